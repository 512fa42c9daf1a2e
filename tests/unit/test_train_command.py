"""train.py answers a request for help and a refused configuration without importing PyTorch or DeepSpeed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHAPE = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=4", "num_workers=0"]
TRAINABLE = [*SHAPE, "train_iters=1", "optimizer.params.lr=0.1"]
CASES = {
    "help": (["--help"], 0, "usage: "),
    "mistyped option": (
        ["--num_gpu", "2", *TRAINABLE, "--no-such-option"],
        2,
        "unrecognized arguments: --no-such-option",
    ),
    "mistyped key": ([*TRAINABLE, "num_layer=3"], 2, "num_layer: unknown key; did you mean `num_layers`?"),
    "no steps": ([*SHAPE, "optimizer.params.lr=0.1"], 2, "train_iters: not set; training needs it"),
    "no learning rate": ([*SHAPE, "train_iters=1"], 2, "optimizer.params.lr: not set; training needs it"),
    "no hostfile": ([*TRAINABLE, "--hostfile", "/nothing"], 2, "hostfile: /nothing: no such file"),
    "no folder for restarts": (
        [*TRAINABLE, "distributed_backend=gloo", "--num_gpus=2", "--max-restarts=1"],
        2,
        "max_restarts: a restart resumes",
    ),
    "a key with dashes": (["a.yml", "--train_iters", "10"], 2, "keys have no dashes: write `train_iters=10`"),
    "a key of Hugging Face with dashes": (
        ["a.yml", "--learning_rate=1e-4"],
        2,
        "write `optimizer.params.lr=1e-4`",
    ),
    "a folder and a name": (["-d", "nowhere", "125M"], 2, "nowhere/125M.yml: no such file"),
}
PROGRAM = """
import contextlib, io, json, resource, runpy, sys
main, results = runpy.run_path(sys.argv[1])["main"], {}
for name, arguments in json.loads(sys.argv[2]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    heavy = [name for name in ("torch", "deepspeed", "transformers", "tokenizers") if name in sys.modules]
    results[name] = [status, out.getvalue(), heavy, sum(resource.getrusage(resource.RUSAGE_SELF)[:2])]
print(json.dumps(results))
"""
Answers = dict[str, tuple[int, str, list[str], float]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Status, output, imported libraries and CPU seconds of every case, one after the other in one process."""
    arguments = json.dumps({name: arguments for name, (arguments, _, _) in CASES.items()})
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "train.py"), arguments]
    finished = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("name", CASES)
def test_answers_without_pytorch(name: str, answers: Answers) -> None:
    _, expected, message = CASES[name]
    status, output, heavy, seconds = answers[name]
    assert status == expected and message in output, output
    assert not heavy and seconds < 1.0
