"""CoCA fine-tuned into a small LLaMA in three stages, on a laptop: what configs/finetune/ does to LLaMA-7B.

Trains a LLaMA with RoPE, exports it as a Hugging Face folder, imports that, switches it to CoCA, trains three stages
and exports the result. Measures perplexity up to eight times the training length along the way. All steps are commands
of this project, printed as they run; existing results are reused, so remove runs/finetune to start over.

    python tools/finetune_small.py
    python tools/finetune_small.py train_iters=20
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.checkpoints import native  # noqa: E402
from megatron_coca.config import load_config  # noqa: E402
from megatron_coca.tables import format_table  # noqa: E402
from tools.quickstart import run  # noqa: E402

RUNS = Path("runs/finetune")
CONFIGS = ROOT / "configs/finetune/small"
WINDOWS, STRIDE = (64, 128, 256, 512), 64
DYNAMIC_NTK = ("rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")
MODELS = {
    "LLaMA": "llama",
    "+ CoCA, before any training": "imported_coca",
    "+ CoCA, stage 1 (T)": "stage1",
    "+ CoCA, stage 2 (Q, T, V)": "stage2",
    "+ CoCA, stage 3 (all)": "stage3",
}
"""Labels of the measured models, and their folders."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or the exit status of the command that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="config overrides of every training run")
    keys = parser.parse_args(arguments).keys
    try:
        train_llama(keys)
        train_coca(keys)
        rows = []
        for label, name in MODELS.items():
            rows.append(perplexities(label, RUNS / name))
            rows.append(perplexities(f"{label} + dynamic NTK", RUNS / name, DYNAMIC_NTK))
    except subprocess.CalledProcessError as error:
        return error.returncode
    print("\n" + format_table(("perplexity at", *map(str, WINDOWS)), rows))
    return 0


def train_llama(keys: Sequence[str]) -> None:
    """Train the LLaMA and export it as a Hugging Face folder."""
    last = load_config([CONFIGS / "llama.yml"], keys).schedule.train_iters
    if last not in native.steps(RUNS / "llama"):
        python("train.py", CONFIGS / "llama.yml", *keys, "--auto-resume")
    if not (RUNS / "llama_hf").exists():
        python("tools/convert_to_huggingface.py", RUNS / "llama", RUNS / "llama_hf")


def train_coca(keys: Sequence[str]) -> None:
    """Import the LLaMA, train the three stages, and export."""
    for name, changes in (("imported", ()), ("imported_coca", ("--set", "pos_emb=coca"))):
        if not (RUNS / name).exists():
            python("tools/import_checkpoint.py", RUNS / "llama_hf", RUNS / name, *changes)
    stages = [CONFIGS / f"coca_stage{number}.yml" for number in (1, 2, 3)]
    python("tools/train_stages.py", *stages, *(("--with", *keys) if keys else ()))
    if not (RUNS / "llama_coca_hf").exists():
        python("tools/convert_to_huggingface.py", RUNS / "stage3", RUNS / "llama_coca_hf")


def perplexities(label: str, folder: Path, keys: Sequence[str] = ()) -> list[str]:
    """One row of the table: `label`, and the perplexity in every window."""
    slug = "_".join("".join(letter if letter.isalnum() else " " for letter in label.lower()).split())
    output = RUNS / f"{slug}.json"
    options = ["--windows", ",".join(map(str, WINDOWS)), "--stride", STRIDE, "--label", label, "--output", output]
    # Continues a result file that exists, and refuses one of other weights.
    python("evaluate.py", "perplexity", "--checkpoint", folder, *options, *(("--set", *keys) if keys else ()))
    cells = {cell["window"]: cell["perplexity"] for cell in json.loads(output.read_text())["results"]}
    return [label, *(f"{cells[window]:.1f}" for window in WINDOWS)]


def python(script: str, *arguments: object) -> None:
    """Run a script of this project."""
    run([sys.executable, str(ROOT / script), *map(str, arguments)])


if __name__ == "__main__":
    sys.exit(main())
