"""The preparation in real processes that are killed at random moments."""

import bz2
import contextlib
import gzip
import json
import lzma
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zstandard

from megatron_coca import cli
from megatron_coca.data import Shard, load_saved_tokenizer
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[3]


def command(corpus: Path, output: Path, *options: object) -> list[str]:
    tool = str(ROOT / "tools" / "prepare_data.py")
    given = ["--input", f"c={corpus}", "--output", output, "--valid-fraction", 0.1, "--test-fraction", 0.1, *options]
    return [sys.executable, tool, *map(str, given)]


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "tools" / "prepare_data.py"), *map(str, arguments)]
    return subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=patience(120))


def finished(line: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=patience(300))
    assert done.returncode == 0, done.stderr
    return done


def everything(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".idx", ".json", ".model")}


def processes(mark: str) -> list[int]:
    """Processes that were started with a text in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 10 MB in four files of words, some of them twice."""
    folder = tmp_path_factory.mktemp("corpus")
    chosen = random.Random(1)
    vocabulary = [f"{chosen.randrange(10**6):x}" for _ in range(3000)]
    for number in range(4):
        with (folder / f"{number}.jsonl").open("w") as stream:
            for _ in range(500):
                stream.write(json.dumps({"text": " ".join(chosen.choices(vocabulary, k=800))}) + "\n")
    (folder / "5.jsonl").write_bytes((folder / "2.jsonl").read_bytes()[: 10**6] + b"\n")
    return folder


SMALL_BLOCKS = """
if __name__ == "__main__":
    import sys
    from megatron_coca.cli import main
    from megatron_coca.data.preparation import blocks
    blocks.BLOCK_BYTES = 1 << 20, 1 << 20
    sys.exit(main(["prepare", *sys.argv[1:]]))
"""
"""Runs the tool with a block for each megabyte."""


def small_blocks(corpus: Path, output: Path, *options: object) -> list[str]:
    return [sys.executable, "-c", SMALL_BLOCKS, *command(corpus, output, "--train-tokenizer", 400, *options)[2:]]


@pytest.mark.slow
def test_killed_at_random_it_ends_with_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(small_blocks(corpus, tmp_path / "whole", "--workers", 2))
    monkeypatch.setenv("PREPARE_TEST_MARK", str(tmp_path))
    chosen = random.Random(2)
    line = small_blocks(corpus, tmp_path / "out", "--workers", 2)
    for made in (0, 1, 4, 9):
        process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list((tmp_path / ".out.blocks").glob("*.block"))) < made:
            time.sleep(0.002)
        time.sleep(chosen.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    monkeypatch.delenv("PREPARE_TEST_MARK")
    finished(line)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")
    deadline = time.monotonic() + patience(20)
    while (left := processes(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "processes of a killed preparation live on"


def cpu_seconds(process: "subprocess.Popen[Any]") -> float:
    """CPU time of a process and the processes that it started, of which the living and those waited for count."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid)
        for one in (started, *started.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += sum(one.cpu_times()[:4])
    return total


@pytest.mark.slow
def test_jobs_of_an_array_that_are_killed(corpus: Path, tmp_path: Path) -> None:
    """Two jobs for blocks, the same for shards, and the last one, each killed at random moments until it ends. Moments
    are CPU times, because the wall time of the same work depends on what else the machine does.
    """
    chosen, kills, divided = random.Random(2), 0, ("--shard-gib", 0.001)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished(small_blocks(corpus, tmp_path / "whole", *divided, "--workers", 1))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert (tmp_path / "whole/c_train_00005.bin").is_file()
    for part in (*[["--part", "1/2"], ["--part", "2/2"]] * 2, []):
        for attempt in range(100):
            line = small_blocks(corpus, tmp_path / "out", "--workers", 1, *divided, *part)
            process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL)
            moment = whole * (chosen.uniform(0.1, 0.4) + attempt / 20)
            while process.poll() is None and cpu_seconds(process) < moment:
                time.sleep(0.01)
            if process.poll() is not None:
                assert process.returncode == 0
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            if (tmp_path / "out").exists():  # killed after its work
                break
    assert kills > 2
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


@pytest.mark.slow
def test_after_an_interrupt_the_same_command_resumes(corpus: Path, tmp_path: Path) -> None:
    line = small_blocks(corpus, tmp_path / "out", "--workers", 2)
    process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + patience(60)
    while not list((tmp_path / ".out.blocks").glob("*.block")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=patience(60))
    assert process.returncode == 130 and "the same command resumes" in told and "Traceback" not in told
    assert "train:" in finished(line).stdout and not (tmp_path / ".out.blocks").exists()


@pytest.mark.slow
def test_what_was_prepared_trains(tmp_path: Path) -> None:
    """With the options as they are when none is given, and the command that is told at the end."""
    chosen = random.Random(4)
    rows = ({"text": " ".join(chosen.choices(["one", "two", "three", "four"], k=60))} for _ in range(500))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--input", f"c={tmp_path / 'c.jsonl'}", "--train-tokenizer", 280, "--output", tmp_path / "out")
    done = run_tool(*given)
    assert done.returncode == 0, done.stderr
    assert "c train: 4" in done.stdout and "bytes per token" in done.stdout
    assert "Apex" not in done.stderr and "Transformer Engine" not in done.stderr
    tokenizer = load_saved_tokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == 280
    assert set(tokenizer.decode(Shard(tmp_path / "out/c_train").document(0)).split()) <= {"one", "two", "three", "four"}
    told = done.stdout.splitlines()[-1].removeprefix("Train with: megatron-coca ").split()
    small = [
        "num_layers=1",
        "hidden_size=16",
        "num_attention_heads=2",
        "seq_length=16",
        "train_iters=2",
        "precision=fp32",
    ]
    small += ["train_micro_batch_size_per_gpu=2", f"save={tmp_path / 'run'}", "eval_iters=1"]
    line = [sys.executable, "-m", "megatron_coca", *told, *small]
    trained = subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=patience(300))
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "run" / "global_step2").is_dir() and "c_train" in trained.stderr + trained.stdout


def test_a_recipe_is_prepared_and_its_faults_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "recipe.yml").write_text(
        "tokenizer_type: CharLevelTokenizer\nvalid_fraction: 0\ntest_fraction: 0\nsources:\n  a: {paths: [a.txt], "
        "documents: line}\n"
    )
    done = run_tool(tmp_path / "recipe.yml", "--root", tmp_path, "--output", tmp_path / "out")
    assert done.returncode == 0 and "a train: 3 documents" in done.stdout, done.stderr
    assert "is 0, so training reports no validation loss\n" in done.stdout
    assert "Train with: megatron-coca train" in done.stdout
    (tmp_path / "recipe.yml").write_text("sources: {a: {path: [a.txt]}}\n")
    done = run_tool(tmp_path / "recipe.yml", "--output", tmp_path / "o")
    assert done.returncode == 2 and "sources.a.path: unknown key; did you mean `paths`?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "c=none.jsonl", "--output", "o", "--tokenizer-type", "CharLevelTokenizer"), "none.jsonl: no such"),
        (("--input", "none.jsonl", "--output", "o", "--train-tokenizer", 300), "--input none.jsonl: not NAME=PATH"),
        (("--input", "c=x.jsonl", "--output", "o"), "--input: needs a tokenizer"),
        (("--output", "o"), "give exactly one of a recipe, --input and --builtin"),
        (
            ("r.yml", "--test-fraction", 0.5, "--duplicates", "keep"),
            "--test-fraction, --duplicates: only supported with --input",
        ),
        (("--input", "c=x", "--root", "y", "--train-tokenizer", 300), "--root: has no effect without a recipe"),
        (
            ("--input", "c=x", "--output", "s3://b/o", "--tokenizer-type", "CharLevelTokenizer"),
            "s3://b/o: the output must be a local folder",
        ),
        (("--builtin", "--documents", "line"), "--documents: not supported with --builtin"),
        (("--input", "c=x", "--workers", -1), "--workers -1: must be from 0"),
        (("--input", "c=x", "--train-tokenizer", 0), "train_tokenizer.vocab_size: Input should be greater"),
        (("--input", "c=x", "--train-tokenizer", 10**32), "train_tokenizer.vocab_size: Input should be less"),
    ],
)
def test_bad_commands_end_with_status_2(
    arguments: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["prepare", *map(str, arguments)])
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2 and message in capsys.readouterr().err


MEASURED = """
import pathlib, sys
sys.path.insert(0, sys.argv.pop(1))
from megatron_coca import cli

result = cli.main(["prepare", *sys.argv[1:]])
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
print("peak", 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))))
sys.exit(result)
"""
"""Runs the tool and tells its peak memory."""


def measured(corpus: Path, output: Path, *options: object) -> subprocess.CompletedProcess[str]:
    tool = command(corpus, output, "--tokenizer-type", "CharLevelTokenizer", "--workers", 0, *options)[2:]
    line = [sys.executable, "-c", MEASURED, str(ROOT), *tool]
    return subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=patience(120))


def json_lines(millions: int) -> Iterator[bytes]:
    """A record that fills a chunk, one with so many million letters in it, and another."""
    yield b'{"text": "' + b"y" * 2 * 10**6 + b'"}\n{"text": "'
    yield from (b"x" * 10**6 for _ in range(millions))
    yield b'"}\n{"text": "last"}\n'


def packed_by(opened: Callable[[Path, str], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with opened(path, "wb") as stream:
            for part in json_lines(100):
                stream.write(part)

    return write


BOMBS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": packed_by(open),
    "a.json.gz": packed_by(gzip.open),
    "a.jsonl.bz2": packed_by(bz2.open),
    "a.jsonl.xz": packed_by(lzma.open),
    "a.jsonl.zst": packed_by(zstandard.open),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.serial
def test_a_small_file_that_grows_takes_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    BOMBS[name](path)
    done = measured(
        path, tmp_path / "out", "--max-record-mib", 8, "--max-faulty", 1, "--valid-fraction", 0, "--test-fraction", 0
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("peak ")[1])
    assert peak < 400 << 20, f"{peak >> 20} MiB"
    read = json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"][0]
    assert read["written"] == 2 and read["problems"] == {"record too long": 1}
    assert read["problems_named"][0].startswith(f"{path}:2: record too long (100,000,013 bytes")
