"""Long-context benchmarks from the harness's files to the report, with stand-ins for their data."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_coca.commands.evaluate import main
from megatron_coca.evaluation.tasks.lm_eval import benchmarks
from tests.parity.exported import NEOX, random_checkpoint
from tests.unit.evaluation.benchmark_cases import LONGBENCH_QUESTIONS, word_tokenizer, write_stand_ins
from tests.unit.evaluation.harness_cases import read

pytestmark = pytest.mark.slow  # the harness's own task files are read, and ruler generates 500 documents for each task

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Measure tasks on local data in two variants; returns the folder of results."""
    folder = tmp_path_factory.mktemp("benchmarks")
    tokenizer = word_tokenizer(folder / "tokenizer")
    checkpoint = random_checkpoint(folder / "run", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, **NEOX)
    data = write_stand_ins(folder / "data")
    ntk = ["--variant", "NTK", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"]

    def measure(name: str, tasks: str, *options: object, status: int = 0, both: bool = True) -> Path:
        given = ["--checkpoint", checkpoint, "--device", "cpu", "--datasets", data, "--tasks", tasks]
        given += [*(["--variant", "plain"] if both else []), *ntk, "--output", folder / "results" / name, *options]
        assert main(["lm-eval", *map(str, given)]) == status
        return folder / "results" / name

    return measure


def report(results: Path) -> str:
    assert main(["report", str(results), "--output", str(results / "report")]) == 0
    return (results / "report/report.md").read_text()


def test_babilong(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Each length is a measurement; the table has a column for each."""
    for length in ("0k", "1k"):
        given = ["--metadata", json.dumps({"max_seq_lengths": length})] if length != "0k" else []
        folder = run(f"babilong/{length}", "babilong_longctx", "--limit", 2, *given)
    lists = json.dumps({"max_seq_lengths": [4096]})
    run("babilong/list", "babilong_qa1", "--metadata", lists, status=2)
    assert "babilong reads one length at a time" in capsys.readouterr().err
    text = report(folder.parent)
    assert "| length | 0k | 1k |" in " ".join(text.split())
    assert "qa5: NTK" in text and "BABILong: means over qa1 to qa5" in text


def test_longbench(run: Run) -> None:
    """Categories beside published rows, all tasks, and LongBench-E by length; long prompts lose their middle."""
    folder = run("longbench", "longbench,longbench_e", "--max-length", 640, "--truncate", "middle")
    results = {entry.task: entry for entry in read(folder / "lm-eval_ntk.json").results}
    assert results["longbench"].samples == 21 * LONGBENCH_QUESTIONS
    assert [(each.length, each.samples) for each in results["longbench_qasper_e"].by_length] == [
        *(("0-4k", 1), ("4-8k", 1), ("8k+", 2))
    ]
    text = report(folder)
    assert "Llama2-7B-chat-4k" in text and "LongBench-E: tasks by length in words" in text
    assert all(name in text for name in benchmarks.LONGBENCH_ENGLISH)


def test_infinitebench(run: Run) -> None:
    entries = read(run("infinitebench", "infinitebench") / "lm-eval_plain.json").results
    assert {"infinitebench_passkey", "infinitebench_code_debug"} < {entry.task for entry in entries}
    assert all(score.value is not None for entry in entries for score in entry.scores)


def test_ruler(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """All 13 tasks at a length, and their mean; a length that is too short for a task is an error."""
    lengths = json.dumps({"max_seq_lengths": [2048]})
    folder = run("ruler", "ruler", "--limit", 1, "--metadata", lengths, both=False)
    entries = read(folder / "lm-eval_ntk.json").results
    assert {entry.task for entry in entries} == {"ruler", *benchmarks.RULER_TASKS}
    text = report(folder)
    assert "RULER: means over its 13 tasks by length" in text and "ruler_cwe: NTK" in text
    names = ("ruler_vt", "ruler_cwe", "ruler_fwe")
    run("short", ",".join(names), "--metadata", json.dumps({"max_seq_lengths": [128]}), status=2, both=False)
    told = capsys.readouterr().err
    assert all(f"task {name}: failed: --metadata max_seq_lengths 128: is too short" in told for name in names)
