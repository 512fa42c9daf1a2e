"""CoCA given to a small LLaMA in three stages, on a laptop: what configs/finetune/ does to LLaMA-7B, start to end.

A LLaMA with RoPE is trained and written as a Hugging Face folder; this is imported, given CoCA, trained in three
stages and written as a Hugging Face folder again. Perplexity is measured up to eight times the training length on the
way. Everything is done by the project's own commands, which are printed as they run; what is there already is used
again: remove runs/finetune to begin anew. Give `key=value` texts to change every training run.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quickstart import ROOT, run

from megatron_coca.checkpoints import native
from megatron_coca.config import load_config
from megatron_coca.tables import format_table

RUNS = Path("runs/finetune")
CONFIGS = ROOT / "configs/finetune/small"
WINDOWS, STRIDE = (64, 128, 256, 512), 64
DYNAMIC_NTK = ("rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")


class Measured(NamedTuple):
    """A model whose perplexity is measured: its row of the table, its folder, and keys that say how it is used."""

    label: str
    folder: Path
    keys: tuple[str, ...] = ()


MODELS = (
    Measured("LLaMA", RUNS / "llama"),
    Measured("+ CoCA, before any training", RUNS / "imported_coca"),
    Measured("+ CoCA, stage 1 (T)", RUNS / "stage1"),
    Measured("+ CoCA, stage 2 (Q, T, V)", RUNS / "stage2"),
    Measured("+ CoCA, stage 3 (all)", RUNS / "stage3"),
)


def main(keys: Sequence[str] | None = None) -> int:
    """Exit status 0, or that of the command that failed."""
    given = list(sys.argv[1:] if keys is None else keys)
    try:
        make_a_llama(given)
        give_it_coca(given)
        rows = [row for model in MODELS for row in perplexities(model)]
    except subprocess.CalledProcessError as error:
        return error.returncode
    print("\n" + format_table(("perplexity at", *map(str, WINDOWS)), rows))
    return 0


def make_a_llama(keys: Sequence[str]) -> None:
    """The folder of a LLaMA as its users have it."""
    last = load_config([CONFIGS / "llama.yml"], keys).schedule.train_iters
    if last not in native.steps(RUNS / "llama"):
        run([sys.executable, str(ROOT / "train.py"), str(CONFIGS / "llama.yml"), *keys, "--auto-resume"])
    if not (RUNS / "llama_hf").exists():
        tool("convert_to_huggingface.py", RUNS / "llama", RUNS / "llama_hf")


def give_it_coca(keys: Sequence[str]) -> None:
    """Import, three stages, export."""
    for name, changes in (("imported", ()), ("imported_coca", ("--set", "pos_emb=coca"))):
        if not (RUNS / name).exists():
            tool("import_checkpoint.py", RUNS / "llama_hf", RUNS / name, *changes)
    stages = [str(CONFIGS / f"coca_stage{number}.yml") for number in (1, 2, 3)]
    tool("train_stages.py", *stages, *(("--with", *keys) if keys else ()))
    if not (RUNS / "llama_coca_hf").exists():
        tool("convert_to_huggingface.py", RUNS / "stage3", RUNS / "llama_coca_hf")


def perplexities(model: Measured) -> list[list[str]]:
    """Two rows of the table: the model as it is, and with dynamic NTK."""
    rows = []
    for label, keys in ((model.label, model.keys), (f"{model.label} + dynamic NTK", (*model.keys, *DYNAMIC_NTK))):
        output = RUNS / f"{slug(label)}.json"
        command = [sys.executable, str(ROOT / "evaluate.py"), "perplexity", "--checkpoint", str(model.folder)]
        command += ["--windows", ",".join(map(str, WINDOWS)), "--stride", str(STRIDE), "--label", label]
        run(
            [*command, "--output", str(output), *(("--set", *keys) if keys else ())]
        )  # goes on, or refuses other weights
        cells = {cell["window"]: cell["perplexity"] for cell in json.loads(output.read_text())["results"]}
        rows.append([label, *(f"{cells[window]:.1f}" for window in WINDOWS)])
    return rows


def slug(label: str) -> str:
    """A file's name for a label."""
    return "_".join("".join(letter if letter.isalnum() else " " for letter in label.lower()).split())


def tool(name: str, *arguments: object) -> None:
    """Run one of the project's tools."""
    run([sys.executable, str(ROOT / "tools" / name), *map(str, arguments)])


if __name__ == "__main__":
    sys.exit(main())
