"""Evaluations in several processes write the files of one process, even if some of them are killed."""

import json
import os
import signal
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_coca.commands import evaluate
from megatron_coca.config import load_config
from megatron_coca.evaluation import PerplexityResult, jobs
from megatron_coca.evaluation.results import EvaluationError, Store
from megatron_coca.evaluation.tasks.perplexity import measure as perplexity
from tests.checkpoint_files import write_checkpoint

MODEL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 512}
MODEL |= {"no_weight_tying": True, "pos_emb": "coca", "tokenizer_type": "CharLevelTokenizer"}
VARIANTS = ["--variant", "plain", "--variant", "NTK", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("run")
    checkpoint = write_checkpoint(folder, load_config([], MODEL))
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line * 5}) + "\n" for line in ("Call me Ishmael. ", "It is a truth. ")))
    line = ["perplexity", "--checkpoint", checkpoint, "--data", text, "--windows", "16,64", "--stride", "8"]
    return [*map(str, line), "--device", "cpu", *VARIANTS]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".cost.json")}


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    assert evaluate.main([*arguments, "--output", str(folder)]) == 0
    return files(folder)


def parsed(arguments: list[str], folder: Path, *more: str) -> Namespace:
    return evaluate.parser().parse_args([*arguments, "--output", str(folder), *more])


def test_work_is_divided_by_variant_and_by_length_where_variants_are_few(tmp_path: Path) -> None:
    line = ["longppl", "--checkpoint", "x", "--lengths", "16,64", "--evaluator", "y", "--data", "z", *VARIANTS]
    few = jobs.shares(parsed(line, tmp_path, "--jobs", "2"), 2)
    assert [(share.lengths, share.variant[0][0]) for share in few] == [
        ([length], name) for length in (64, 16) for name in ("plain", "NTK")
    ]
    assert {(share.max_length, share.jobs) for share in few} == {(64, 1)}
    many = jobs.shares(parsed(line, tmp_path, "--jobs", "1"), 1)
    assert [(share.lengths, share.variant[0][0]) for share in many] == [([16, 64], "plain"), ([16, 64], "NTK")]


def test_documents_are_divided_into_parts_and_merged(
    arguments: list[str], whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has its share of the documents of every window, the merge scores only the lost ones."""
    for part in ("2/3", "1/3"):
        assert evaluate.main([*arguments, "--output", str(tmp_path), "--part", part]) == 0
    kept = [path.name for path in sorted(tmp_path.rglob("*.score"))]
    assert len(kept) == 6, "2 variants, 2 windows and 2 documents, of which a third is in part 3"
    assert not list(tmp_path.glob("*.json")), "a part writes no result"
    scored: list[int] = []
    score = perplexity.score_document
    monkeypatch.setattr(perplexity, "score_document", lambda *given: scored.append(given[2]) or score(*given))
    assert evaluate.main([*arguments, "--output", str(tmp_path)]) == 0
    assert len(scored) == 2, "the documents of part 3"
    assert files(tmp_path) == whole and not list(tmp_path.rglob("*.score"))


def test_two_processes(arguments: list[str], whole: dict[str, bytes], tmp_path: Path) -> None:
    assert evaluate.main([*arguments, "--output", str(tmp_path), "--jobs", "2"]) == 0
    assert files(tmp_path) == whole


def killed_once(args: Namespace) -> int:
    """A task that kills the process of the first part."""
    if args.part == (0, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate.run_task(args)


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_measured_at_the_end(
    arguments: list[str], whole: dict[str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert jobs.run_jobs(parsed(arguments, tmp_path, "--jobs", "2"), killed_once) == 0
    assert "on cpu: killed by signal 9" in capfd.readouterr().err
    assert files(tmp_path) == whole


def test_many_writers_of_one_file(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Cells of several stores on one file all stay, whatever each had read before."""
    found = PerplexityResult.model_validate_json(whole["perplexity_plain.json"])
    empty = found.model_copy(update={"results": []})
    stores = [Store(tmp_path / "one.json", empty) for _ in found.results]
    threads = [
        threading.Thread(target=store.put, args=(cell,)) for store, cell in zip(stores, found.results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "one.json").read_bytes() == whole["perplexity_plain.json"]


def test_without_an_output_it_is_an_error(arguments: list[str]) -> None:
    with pytest.raises(EvaluationError, match="--jobs: needs --output"):
        jobs.shares(evaluate.parser().parse_args([*arguments, "--jobs", "2"]), 2)


def test_a_suite_gives_the_processes_to_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, bool]] = []
    monkeypatch.setattr(evaluate, "run_task", lambda args, divided=False: found.append((args.task, divided)) or 0)
    for task in (["suite", "suite.yml"], ["perplexity", "--checkpoint", "x", "--windows", "16", "--stride", "8"]):
        assert evaluate.main([*task, "--output", str(tmp_path), "--jobs", "2"]) == 0
    assert found == [("suite", False), ("perplexity", True)]
