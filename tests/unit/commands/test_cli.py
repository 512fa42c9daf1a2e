"""Every command shows its help with an example, and answers help, typing errors and invalid configurations at once."""

import errno
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from megatron_coca import __version__, cli
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.commands import configs, inspect
from megatron_coca.commands.evaluate import subcommands
from megatron_coca.evaluation import options
from megatron_coca.model import DECODING, DYNAMIC_LENGTH, DYNAMIC_LENGTHS, Decoding
from tests.patience import patience

ROOT = Path(__file__).parents[3]
SHAPE = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=4", "num_workers=0"]
TRAINABLE = [*SHAPE, "train_iters=1", "optimizer.params.lr=0.1"]
LAYOUTS = ("huggingface", "neox")
HELP = (
    [[name] for name in cli.COMMANDS]
    + [["evaluate", task] for task in subcommands()]
    + [["export", name] for name in LAYOUTS]
)
FRONTS = {  # in tools/ and the root, and what their command line begins with
    "train.py": "train",
    "evaluate.py": "evaluate",
    "tools/ablate.py": "ablate",
    "tools/convert_to_huggingface.py": "export huggingface",
    "tools/convert_to_neox.py": "export neox",
    "tools/generate.py": "generate",
    "tools/prepare_data.py": "prepare",
}
NOT_FRONTS = {
    "records.py",
    "eval.py",
    "gpu_report.py",
    "fetch_benchmarks.py",
    *(path.name for path in ROOT.glob("tools/bench_*.py")),
}
AT = ["--checkpoint", "none"]
REFUSED = {
    "command of other programs": (["convert"], "'convert' is not a command; use import or export"),
    "a chat without a model": (["chat", "--system", "x"], "the following arguments are required: MODEL"),
    "a chat with a folder that does not exist": (["chat", "nope"], "--checkpoint: nope: no such folder"),
    "a download without its owner": (["download", "gpt2"], "'gpt2' is not the name of a model on the hub"),
    "mistyped command": (["trian"], "'trian' is not a command; did you mean `train`?"),
    "no command": ([], "required: COMMAND"),
    "mistyped option": (["train", "--num_gpu", "2", *TRAINABLE, "--nothing"], "unrecognized arguments: --nothing"),
    "mistyped key": (["train", *TRAINABLE, "num_layer=3"], "num_layer: unknown key; did you mean `num_layers`?"),
    "no steps": (["train", *SHAPE, "optimizer.params.lr=0.1"], "train_iters: not set; training needs it"),
    "no learning rate": (["train", *SHAPE, "train_iters=1"], "optimizer.params.lr: not set; training needs it"),
    "no hostfile": (["train", *TRAINABLE, "--hostfile", "/nothing"], "hostfile: /nothing: no such file"),
    "no checkpoint": (["generate", "--checkpoint", "nope", "--prompt", "x"], "--checkpoint: nope: no such folder"),
    "a name of the hub": (
        ["generate", "--checkpoint", "me/it", "--prompt", "x"],
        "`megatron-coca download me/it` and use models/it",
    ),
    "a name of the hub without its owner": (["generate", *AT, "--prompt", "x"], "its whole name, hf://OWNER/none"),
    "a run's name is none of the hub": (["train", "runs/it"], "runs/it.yml: no such file"),
    "a page that is no HTML": (["inspect", "method", "a.yml", "--output", "m.txt"], "m.txt: must be an HTML file"),
    "no overlay": (["generate", "--checkpoint", "nope", "none.yml"], "none.yml: no such file"),
    "chosen devices": (["train", *TRAINABLE, "include=localhost:1"], "include: not supported; list the hosts to use"),
    "a key with dashes": (["train", "a.yml", "--train_iters", "10"], "write keys without dashes: `train_iters=1000`"),
    "a folder and a name": (["train", "-d", "nowhere", "125M"], "nowhere/125M.yml: no such file"),
    "a length of no machine": (["evaluate", "passkey", *AT, "--lengths", "64,99999999999"], "be at most 134,217,728"),
    "a drawing of it": (["inspect", "method", "a.yml", "--output", "a.html", "--length", "9" * 11], "134,217,728"),
    "as many new tokens": (["generate", *AT, "--max-new-tokens", "100000000000000"], "must be at most 134,217,728"),
    "as many samples": (["generate", *AT, "--num-samples", "9" * 23], "must be at most 1,000,000"),
    "jobs of no machine": (["evaluate", "passkey", *AT, "--lengths", "64", "--jobs", "9" * 23], "be at most 1,024"),
    "jobs of a grid": (["ablate", "a.yml", "--jobs", "9" * 23], "must be at most 1,024"),
    "workers": (["prepare", "--input", "a=b", "--workers", "9" * 23], "must be from 0 to 1024"),
    "mistyped task": (["evaluate", "perplexty"], "invalid choice: 'perplexty'"),
    "estimate": (["estimate", *SHAPE, "num_layer=3"], "num_layer: unknown key; did you mean `num_layers`?"),
    "stages": (["train", *TRAINABLE, "stages=[{until: 1}, {}]"], "stages[0].until: step 1 leaves no step"),
    "stages without a folder": (["train", *TRAINABLE, "stages=[{}]"], "stages: need save"),
    "prepare": (["prepare", "--input", "a=b"], "--input: needs a tokenizer; set either tokenizer_type"),
    "inspect": (["inspect", "sample", "none.yml", "--number", "3"], "none.yml"),
}
PROGRAM = """
import contextlib, io, json, subprocess, sys, traceback
from megatron_coca.cli import main
class Refused(subprocess.Popen):
    def __init__(self, *arguments, **keywords):
        raise AssertionError("a process is started")
    def __del__(self):
        pass
subprocess.Popen, answers = Refused, []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        except Exception:
            status, _ = 1, traceback.print_exc(file=out)
    slow = {"torch", "deepspeed", "transformers", "matplotlib", "lm_eval", "datasets"} & sys.modules.keys()
    answers.append([status, out.getvalue(), sorted(slow)])
print(json.dumps(answers))
"""
Answer = tuple[int, str, list[str]]


def answers_of(command_lines: list[list[str]]) -> list[Answer]:
    """Status, output and imported slow libraries of command lines, one after the other in one process."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(command_lines)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    lines = [[*line, "--help"] for line in HELP] + [line for line, _ in REFUSED.values()]
    return dict(zip([" ".join(line) for line in lines], answers_of(lines), strict=True))


@pytest.mark.parametrize("line", HELP, ids=" ".join)
def test_help_has_an_example(line: list[str], answers: dict[str, Answer]) -> None:
    status, shown, slow = answers[" ".join([*line, "--help"])]
    name = " ".join(line)
    assert status == 0 and shown.startswith(f"usage: megatron-coca {name} ") and not slow, shown
    assert re.search(f"^ *megatron-coca {name}( |$)", shown, re.MULTILINE), shown


@pytest.mark.parametrize("case", REFUSED)
def test_errors_import_no_slow_library(case: str, answers: dict[str, Answer]) -> None:
    line, message = REFUSED[case]
    status, shown, slow = answers[" ".join(line)]
    assert status == 2 and message in shown and "Traceback" not in shown and not slow, (shown, slow)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--help"],
        ["train", *TRAINABLE, "num_layer=3"],
        ["evaluate", "perplexity", "--help"],
        ["quickstart", "--help"],
        ["prepare", "--help"],
        ["trian"],
    ],
    ids=" ".join,
)
def test_answers_take_less_than_a_second(arguments: list[str]) -> None:
    """Processor time, which other processes do not change; one of three runs."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], capture_output=True); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "megatron_coca", *arguments]
    runs = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(3))
    assert any(float(run.stdout) < max(1.0, patience(0.6)) for run in runs)  # more on a slow processor


def test_fronts_are_the_commands() -> None:
    found = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"))}
    assert {name for name in found if Path(name).name not in NOT_FRONTS} == FRONTS.keys()
    for name, command in FRONTS.items():
        words = ", ".join(f'"{word}"' for word in command.split())
        assert f"sys.exit(main([{words}, *sys.argv[1:]]))" in (ROOT / name).read_text(), name


@pytest.mark.parametrize("name", sorted(NOT_FRONTS - {"records.py"}))
def test_benchmarks_show_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"tools/{name}", "--help"])
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])  # as `python tools/NAME.py` has it
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith("usage: ") and f"python tools/{name}" in shown


@pytest.mark.parametrize("program", ["train.py", "tools/prepare_data.py", "megatron_coca/__main__.py"])
def test_outside_of_the_environment(program: str, tmp_path: Path) -> None:
    """-S leaves out installed packages, as Python outside of the environment does."""
    command = [sys.executable, "-S", str(ROOT / program)]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "torch, pydantic: not installed" in done.stderr and ".venv" in done.stderr


def ended(arguments: list[str], output: str, unbuffered: bool = False) -> tuple[int, str]:
    """The status and the messages of a command. `output` is "closed pipe" (its reader has ended; with "both" that of
    the messages too), "full disk", or "none" if the shell has closed it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    command = [sys.executable, "-m", "megatron_coca", *arguments]
    closing = ["sh", "-c", 'exec "$@" >&-', "sh"] if output == "none" else []
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, open("/dev/full", "w") as full:
        stdout = full if output == "full disk" else pipe
        stderr = subprocess.STDOUT if output == "both" else subprocess.PIPE
        done = subprocess.run(
            [*closing, *command], check=False, cwd=ROOT, stdout=stdout, stderr=stderr, text=True, env=environment
        )
    return done.returncode, done.stderr or ""


ESTIMATE = ["estimate", "configs/350M/roformer.yml"]


@pytest.mark.parametrize(
    ("arguments", "output", "unbuffered"),
    [
        pytest.param(ESTIMATE, "closed pipe", False, id="one print"),
        pytest.param(["evaluate", "report", "--help"], "closed pipe", False, id="help"),
        pytest.param(ESTIMATE, "closed pipe", True, id="unbuffered"),
    ],
)
def test_a_closed_pipe_ends_the_output_quietly(arguments: list[str], output: str, unbuffered: bool) -> None:
    """As with `| head`: no traceback, and the status of a program that SIGPIPE ends."""
    assert ended(arguments, output, unbuffered) == (141, "")


def test_messages_that_nobody_reads_leave_the_status_as_it_is() -> None:
    assert ended(["inspect", "checkpoint", "nowhere"], "both") == (2, "")


@pytest.mark.parametrize(
    ("output", "reason"), [("closed pipe", "Broken pipe"), ("full disk", "No space left on device")]
)
def test_a_command_that_writes_files_ends_its_work(output: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 50)
    data = tmp_path / "data"
    given = [
        "prepare",
        "--input",
        f"a={tmp_path / 'a.txt'}",
        "--tokenizer-type",
        "CharLevelTokenizer",
        "--workers",
        "0",
    ]
    status, messages = ended([*given, "--documents", "line", "--output", str(data)], output)
    assert status == 0 and (data / "data.yml").is_file()
    assert messages.count(f"standard output: cannot be written ({reason}); the work continues") == 1


def test_inspect_leaves_an_error_of_the_output_to_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It handles errors of files, which have names. If the output has no descriptor, the error is not hidden."""

    def broken(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(inspect, "print", broken, raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    (tmp_path / "model.yml").write_text("pos_emb: rotary")
    with pytest.raises(BrokenPipeError):
        cli.main(["inspect", "method", str(tmp_path / "model.yml"), *SHAPE, "--output", str(tmp_path / "page.html")])


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_disk_is_an_error_with_a_remedy(unbuffered: bool) -> None:
    status, said = ended(ESTIMATE, "full disk", unbuffered)
    assert status == 2
    assert re.fullmatch(r"megatron-coca: .*\(No space left on device\); free .*\n", said)


def test_output_that_the_shell_closed_is_no_error() -> None:
    assert ended(ESTIMATE, "none") == (0, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"megatron-coca {__version__}\n"


def test_configs_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert configs.main(["copy", str(tmp_path / "configs")]) == 0
    copied = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {path.relative_to(ROOT): path.read_bytes() for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert copied == kept and f"{len(kept)} files" in capsys.readouterr().out
    assert (
        configs.main(["copy", str(tmp_path / "configs")]) == 2 and "configs: exists already" in capsys.readouterr().err
    )


def test_choices_are_those_of_the_libraries() -> None:
    assert tuple(DTYPES) == options.DTYPES
    assert options.DYNAMIC_LENGTHS.keys() == DYNAMIC_LENGTHS.keys() and options.DYNAMIC_LENGTH == DYNAMIC_LENGTH
    assert get_args(options.Decoding) == get_args(Decoding) == tuple(options.DECODINGS)
    assert options.DECODING == DECODING


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("generate --checkpoint x --promt y", "did you mean `--prompt`?"),
        ("evaluate passkey --checkpoint x --length 4", "did you mean `--lengths`?"),
        ("ablate a.yml --slurm", "--slurm was removed: use --engine slurm"),
        ("train-tokenizer", "was removed; use prepare --train-tokenizer"),
    ],
)
def test_misspelt_and_removed_options_name_the_option_to_use(
    line: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2 and remedy in capsys.readouterr().err


def test_an_option_of_another_subcommand_is_not_its_own_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "passkey", "--checkpoint", "x", "--metadata", "y"])
    error = capsys.readouterr().err
    assert "unrecognized arguments: --metadata y" in error and "did you mean" not in error
