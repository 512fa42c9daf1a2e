"""Shards written by several real processes that are killed, or that run out of disk space."""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest

from megatron_coca.data import DataError, load_tokenizer
from megatron_coca.data.preparation import blocks as blocks_module
from megatron_coca.data.preparation import duplicates
from megatron_coca.data.preparation.blocks import Blocks
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules, find_inputs
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.preparation.shard_plan import ShardPlan
from megatron_coca.data.preparation.stages import STAGES, run_stages
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import SourceSpec

pytestmark = pytest.mark.slow
CHARACTERS = load_tokenizer("CharLevelTokenizer")
QUIET = Execution(progress=False)
RULES = Rules(0.1, 0.1, shard_gib=100_000 / 2**30)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CorpusSource]:
    """Two sources of 4 MB in blocks of 50 kB, a third of the texts twice."""
    monkeypatch.setattr(blocks_module, "open_reader", lambda spec: FileReader(spec, block=10_000))
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", (50_000, 50_000))
    monkeypatch.setattr(duplicates, "GROUP", 4)
    monkeypatch.setattr(duplicates, "RUN", 500)
    chosen, sources = random.Random(0), []
    for name in ("books", "code"):
        path = tmp_path / f"{name}.jsonl"
        texts = (f"text {chosen.randrange(9000)} " * 30 for _ in range(10_000))
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(CorpusSource(SourceSpec(name, [path])))
    return sources


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def open_plan(corpus: list[CorpusSource], output: Path) -> ShardPlan:
    settings = blocks_module.settings_of(corpus, CHARACTERS, RULES, None)
    blocks = Blocks(corpus, find_inputs(corpus), output, CHARACTERS, RULES, settings)
    blocks.make(blocks.missing(), QUIET)
    return blocks.plan(RULES.shard_bytes)


def forked(work: Callable[[], object]) -> int:
    """Run a function in a forked process. Its exit status is 0, or 1 after an exception."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def test_writers_killed_at_random(corpus: list[CorpusSource], tmp_path: Path) -> None:
    """Three processes share the work. Each killed process is replaced, and the result is that of one process."""
    (tmp_path / "one").mkdir()
    prepare(corpus, tmp_path / "one" / "out", CHARACTERS, RULES, QUIET)
    plan, chosen, running, kills = open_plan(corpus, tmp_path / "out"), random.Random(1), list[int](), 0
    assert len(plan.tasks) > 40
    while not plan.folder.is_dir() or any(stage.missing(plan) for stage in STAGES):
        while len(running) < 3:
            begin = chosen.random()
            running.append(forked(lambda begin=begin: run_stages(plan, QUIET, begin)))
        time.sleep(chosen.uniform(0, 0.1))
        victim = running.pop(chosen.randrange(3))
        os.kill(victim, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) == -signal.SIGKILL
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in running] == [0, 0]
    print(f"{kills} kills")
    assert kills >= 8
    made = {path: path.stat().st_ino for path in plan.folder.iterdir() if not path.name.startswith(".")}
    assert len(made) == sum(stage.count(plan) for stage in STAGES)
    prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    own, one = everything(tmp_path / "out"), everything(tmp_path / "one" / "out")
    assert own.pop("data.yml").split(b"\n", 1)[1] == one.pop("data.yml").split(b"\n", 1)[1]
    assert own == one


def test_a_process_without_space(corpus: list[CorpusSource], tmp_path: Path) -> None:
    """The limit of the size of a file stands for the disk. The other process and a later command do the shards."""
    plan = open_plan(corpus, tmp_path / "out")
    run_stages(plan, QUIET)
    largest = max(path.stat().st_size for path in plan.folder.rglob("*.bin"))
    expected = everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent)
    os.rename(tmp_path / "out", tmp_path / "first")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, resource.RLIM_INFINITY))
        with pytest.raises(DataError, match="File too large.*free some space"):
            prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)

    plan = open_plan(corpus, tmp_path / "out")
    assert os.waitstatus_to_exitcode(os.waitpid(forked(limited), 0)[1]) == 0
    missing = STAGES[-1].missing(plan)
    assert missing and not (tmp_path / "out").exists() and not list(plan.folder.glob(".*.partial"))
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == expected


def test_an_error_ends_the_workers(corpus: list[CorpusSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that are complete are kept. Worker processes have the usual sizes of groups and runs."""
    monkeypatch.undo()
    monkeypatch.setattr(blocks_module, "open_reader", lambda spec: FileReader(spec, block=10_000))
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", (50_000, 50_000))
    expected = everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent)
    os.rename(tmp_path / "out", tmp_path / "first")
    plan = open_plan(corpus, tmp_path / "out")
    path = plan.blocks[-3][0]
    run_stages(replace(plan, tasks=[]), QUIET)  # the digests
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{path.name}: cannot be read .*delete this file"):
        run_stages(plan, Execution(2, progress=False))
    assert not active_children()
    assert 0 < len(STAGES[-1].missing(plan)) < len(plan.tasks)
    path.unlink()
    prepare(corpus, tmp_path / "out", CHARACTERS, RULES, Execution(2, progress=False))
    assert everything(tmp_path / "out") == expected
