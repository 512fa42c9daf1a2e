"""CoCA fine-tuned into a small LLaMA in three stages, on a laptop: what configs/finetune/ does to LLaMA-7B.

Trains a LLaMA with RoPE, exports it as a Hugging Face folder, imports that, switches it to CoCA, trains three stages
and exports the result. Measures perplexity up to eight times the training length along the way. All steps are commands
of this project, printed as they run; existing results are reused, so remove runs/finetune to start over.

    megatron-coca finetune-small
    megatron-coca finetune-small train_iters=20
"""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.commands import command_parser
from megatron_coca.commands.configs import shipped
from megatron_coca.commands.quickstart import DYNAMIC_NTK, run
from megatron_coca.config import load_config
from megatron_coca.evaluation.options import slug
from megatron_coca.markdown_tables import format_table

RUNS = Path("runs/finetune")
WINDOWS, STRIDE = (64, 128, 256, 512), 64
MODELS = {
    "LLaMA": "llama",
    "+ CoCA, before any training": "imported_coca",
    "+ CoCA, stage 1 (T)": "stage1",
    "+ CoCA, stage 2 (Q, T, V)": "stage2",
    "+ CoCA, stage 3 (all)": "stage3",
}
"""Labels of the measured models, and their folders."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0. Raises ConfigError, and SystemExit where a command fails."""
    parser = command_parser("finetune-small", __doc__)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="config overrides of every training run")
    keys = parser.parse_args(arguments).keys
    train_llama(keys)
    train_coca(keys)
    rows = []
    for label, name in MODELS.items():
        rows.append(perplexities(label, RUNS / name))
        rows.append(perplexities(f"{label} + dynamic NTK", RUNS / name, DYNAMIC_NTK))
    print("\n" + format_table(("perplexity at", *map(str, WINDOWS)), rows))
    return 0


def train_llama(keys: Sequence[str]) -> None:
    """Train the LLaMA and export it as a Hugging Face folder."""
    file = shipped("finetune/small/llama.yml")
    last = load_config([file], keys).schedule.train_iters  # refused before PyTorch is imported
    from megatron_coca.checkpoints import native

    if last not in native.steps(RUNS / "llama"):
        command("train", file, *keys, "--auto-resume")
    if not (RUNS / "llama_hf").exists():
        command("export", "huggingface", RUNS / "llama", RUNS / "llama_hf")


def train_coca(keys: Sequence[str]) -> None:
    """Import the LLaMA, train the three stages, and export."""
    for name, changes in (("imported", ()), ("imported_coca", ("--set", "pos_emb=coca"))):
        if not (RUNS / name).exists():
            command("import", RUNS / "llama_hf", RUNS / name, *changes)
    for number in (1, 2, 3):
        command("train", shipped(f"finetune/small/coca_stage{number}.yml"), *keys, "--auto-resume")
    if not (RUNS / "llama_coca_hf").exists():
        command("export", "huggingface", RUNS / "stage3", RUNS / "llama_coca_hf")


def perplexities(label: str, folder: Path, keys: Sequence[str] = ()) -> list[str]:
    """One row of the table: `label`, and the perplexity in every window."""
    output = RUNS / f"{slug(label)}.json"
    options = ["--windows", ",".join(map(str, WINDOWS)), "--stride", STRIDE, "--label", label, "--output", output]
    # Continues a result file that exists, and refuses one of other weights.
    command("evaluate", "perplexity", "--checkpoint", folder, *options, *(("--set", *keys) if keys else ()))
    cells = {cell["window"]: cell["perplexity"] for cell in json.loads(output.read_text())["results"]}
    return [label, *(f"{cells[window]:.1f}" for window in WINDOWS)]


def command(*arguments: object) -> None:
    """Run a command of this project."""
    run([*map(str, arguments)])
