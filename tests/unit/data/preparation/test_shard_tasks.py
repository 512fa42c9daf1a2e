"""Shards in tasks: the same bytes for any processes, kills and orders, and the same documents as in one shard."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_coca.config import load_config
from megatron_coca.data import DataError, Shard, SourceSpec, load_tokenizer
from megatron_coca.data.inspection import find_shards
from megatron_coca.data.preparation import blocks as blocks_module
from megatron_coca.data.preparation import duplicates, run, shard_files, stages
from megatron_coca.data.preparation.blocks import Blocks
from megatron_coca.data.preparation.manifest import read_manifest, training_weights
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules, find_inputs
from megatron_coca.data.preparation.run import count_tasks, prepare, prepare_part
from megatron_coca.data.preparation.shard_plan import ShardPlan, divide
from megatron_coca.data.preparation.stages import STAGES, attempt, run_stages
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.shards import ShardWriter
from megatron_coca.data.verify import verify_shards
from megatron_coca.work import folders
from megatron_coca.work.locks import exclusive_lock, lock_file

CHARACTERS = load_tokenizer("CharLevelTokenizer")
QUIET = Execution(progress=False)
RULES = Rules(valid_fraction=0.1, test_fraction=0.2, shard_gib=12_000 / 2**30)


def everything(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".idx", ".json")}


def texts_of(prefix: Path) -> list[str]:
    shard = Shard(prefix)
    return [CHARACTERS.decode(shard.document(i)) for i in range(shard.documents)]


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """The blocks have 5,000 bytes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks_module, "open_reader", lambda spec: FileReader(spec, block=2000))
        patched.setattr(blocks_module, "BLOCK_BYTES", (5000, 5000))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[CorpusSource]:
    """Four sources with duplicates within and across them. The third keeps its duplicates, the second is a small file.
    No test changes them.
    """
    folder, chosen, sources = tmp_path_factory.mktemp("corpus"), random.Random(0), list[CorpusSource]()
    for name, files in (("books", 3), ("few", 1), ("code", 2), ("mail", 2)):
        paths = []
        for number in range(files):
            texts = [
                f"text {chosen.randrange(150)} " * chosen.randrange(1, 40) for _ in range(9 if files == 1 else 120)
            ]
            lines = [json.dumps({"text": text, "key": text[:7]}) for text in [*texts, "the same in all"]]
            path = folder / f"{name}{number}.jsonl"
            path.write_text("\n".join([*lines, "{broken", ""]))
            paths.append(path)
        sources.append(CorpusSource(SourceSpec(name, paths), duplicates="keep" if name == "code" else "exact"))
    return sources


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, runs and ranges. Worker processes would not see these numbers."""
    monkeypatch.setattr(duplicates, "GROUP", 2)
    monkeypatch.setattr(duplicates, "RUN", 50)


@pytest.fixture(scope="module")
def divided_folder(tmp_path_factory: pytest.TempPathFactory, corpus: list[CorpusSource]) -> Path:
    """The divided shards, written by one process. No test changes them."""
    return prepare(corpus, tmp_path_factory.mktemp("shards") / "divided", CHARACTERS, RULES, QUIET).parent


@pytest.fixture(scope="module")
def divided(divided_folder: Path) -> dict[str, bytes]:
    """The bytes of the divided shards."""
    return everything(divided_folder)


def open_plan(corpus: list[CorpusSource], output: Path, rules: Rules = RULES) -> ShardPlan:
    """Build all blocks, and return the plan of the shards."""
    settings = blocks_module.settings_of(corpus, CHARACTERS, rules, None)
    blocks = Blocks(corpus, find_inputs(corpus), output, CHARACTERS, rules, settings)
    blocks.make(blocks.missing(), QUIET)
    plan = blocks.plan(rules.shard_bytes)
    plan.folder.mkdir(exist_ok=True)
    return plan


def test_divided_shards_have_the_documents_of_one_shard(
    tmp_path: Path, corpus: list[CorpusSource], divided_folder: Path, small_groups: None
) -> None:
    """In the same order. A small source has one shard with its usual name; the others are numbered."""
    one = replace(RULES, shard_gib=None)
    assert count_tasks(corpus, one, tmp_path / "x")[1] == 1 < count_tasks(corpus, RULES, tmp_path / "x")[1]
    whole = prepare(corpus, tmp_path / "whole", CHARACTERS, one, QUIET).parent
    record = read_manifest(divided_folder / "manifest.json")
    assert record["settings"]["shard_gib"] == RULES.shard_gib
    assert "shard_gib" not in read_manifest(whole / "manifest.json")["settings"]
    assert record["inputs"] == read_manifest(whole / "manifest.json")["inputs"]
    for entry in read_manifest(whole / "manifest.json")["sources"]:
        own = [each for each in record["sources"] if each["source"] == entry["source"]]
        assert [each["name"] for each in own] == (
            ["few"] if entry["name"] == "few" else [f"{entry['name']}_{n:05d}" for n in range(len(own))]
        )
        assert (len(own) > 1) == (entry["name"] != "few")
        for split in ("train", "valid", "test"):
            prefixes = [each[split]["prefix"] for each in own if each[split]["prefix"]]
            assert [text for name in prefixes for text in texts_of(divided_folder / name)] == texts_of(
                whole / entry[split]["prefix"]
            )
            assert sum(each[split]["bytes"] for each in own) == entry[split]["bytes"]
    assert not any(found.faults for found in verify_shards(find_shards([divided_folder])))
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}
    paths = load_config(divided_folder / "data.yml", shape).data.train_data_paths
    assert paths is not None and len(paths) > 6
    assert sum(yaml.safe_load((divided_folder / "data.yml").read_text())["train_data_weights"]) == pytest.approx(1)


def test_duplicates_are_exact_in_any_division(tmp_path: Path, corpus: list[CorpusSource], small_groups: None) -> None:
    """As found by a set of all texts in reading order."""
    rules = Rules(0, 0, shard_gib=RULES.shard_gib)
    seen, expected = set[str](), dict[str, list[str]]()
    for source in corpus:
        for path in source.spec.paths:
            for line in Path(path).read_text().splitlines()[:-1]:
                text = json.loads(line)["text"]
                if source.duplicates == "keep" or text not in seen:
                    expected.setdefault(source.spec.name, []).append(text)
                seen.add(text)
    record = read_manifest(prepare(corpus, tmp_path / "out", CHARACTERS, rules, QUIET))
    for name, texts in expected.items():
        prefixes = [entry["train"]["prefix"] for entry in record["sources"] if entry["source"] == name]
        found = [text for prefix in prefixes if prefix for text in texts_of(tmp_path / "out" / prefix)]
        assert found == texts


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers(
    tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes], workers: int
) -> None:
    execution = Execution(workers, progress=False)
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, execution).parent) == divided


def test_parts_build_blocks_and_then_share_the_shards(
    tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes], small_groups: None
) -> None:
    """A part that finds all shards done ends; a part that comes after the end is told so."""
    output = tmp_path / "out"
    told = [prepare_part(corpus, output, CHARACTERS, part, 3, RULES, QUIET) for part in (2, 0, 1, 1, 0)]
    assert all("blocks are built" in each for each in told[:3])
    tasks = count_tasks(corpus, RULES, output)[1]
    assert all(each.endswith(f"{tasks} of {tasks} tasks that write shards are done") for each in told[3:])
    assert everything(prepare(corpus, output, CHARACTERS, RULES, QUIET).parent) == divided
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_a_part_that_is_overtaken_by_the_last_command(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks disappear while it works. It leaves no files behind."""
    open_plan(corpus, tmp_path / "out")

    def overtaken(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(run, "run_stages", run_stages)
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
        run_stages(*arguments, **options)

    monkeypatch.setattr(run, "run_stages", overtaken)
    assert prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 2, RULES, QUIET) == f"{tmp_path / 'out'}: is complete"
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_items_in_any_order(
    tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes], small_groups: None
) -> None:
    plan, chosen = open_plan(corpus, tmp_path / "out"), random.Random(5)
    for number, stage in enumerate(STAGES):
        items = stage.missing(plan)
        assert len(items) > 3
        chosen.shuffle(items)
        assert all(attempt(plan, number, item, lambda size: None) for item in items)
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == divided


class Killed(BaseException):
    """Stands for a kill: our code does not catch it."""


@pytest.mark.parametrize("seed", range(2))
def test_killed_anywhere_only_the_item_is_lost(
    tmp_path: Path,
    corpus: list[CorpusSource],
    divided: dict[str, bytes],
    small_groups: None,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills while digests are sorted and compared, shards written, and results renamed, linked and described."""
    plan, chosen, kills, made = open_plan(corpus, tmp_path / "out"), random.Random(seed), 0, list[int]()

    def sometimes(function: Callable[..., Any], share: float) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if chosen.random() < share / 2:
                raise Killed
            result = function(*arguments)
            if chosen.random() < share / 2:
                raise Killed
            return result

        return call

    def count(folder: Path, *arguments: Any) -> None:
        if folder.name.startswith(".shards-"):
            made.append(int(folder.name[8:-8]))
        complete(folder, *arguments)

    complete = folders.complete_folder
    with monkeypatch.context() as patched:
        patched.setattr(shard_files.Outputs, "write", sometimes(shard_files.Outputs.write, 0.03))
        patched.setattr(duplicates, "_write_run", sometimes(duplicates._write_run, 0.1))
        patched.setattr(duplicates, "_write_positions", sometimes(duplicates._write_positions, 0.1))
        patched.setattr(folders, "complete_folder", count)
        patched.setattr(shard_files, "_link", sometimes(shard_files._link, 0.005))
        patched.setattr("megatron_coca.data.preparation.manifest.write_run_config", sometimes(lambda *_: None, 0.5))
        while kills < 100:
            try:
                prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
                shutil.rmtree(tmp_path / "out")  # written without data.yml
                break
            except Killed:
                kills += 1
    assert kills > 10
    assert sorted(made) == list(range(len(plan.tasks))), "no task was written twice"
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == divided


def test_two_processes_at_the_same_shard(
    tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds the item locked. It takes another item, and does not touch the unfinished files."""
    plan, asked = open_plan(corpus, tmp_path / "out"), list[bool]()
    write = shard_files.Outputs.finish

    def finish(self: Any) -> Any:
        if not asked:
            asked.append(attempt(plan, 2, 0, lambda size: None))
            run_stages(plan, QUIET, wait=False)
        return write(self)

    for number in range(2):
        for item in STAGES[number].missing(plan):
            attempt(plan, number, item, lambda size: None)
    monkeypatch.setattr(shard_files.Outputs, "finish", finish)
    assert attempt(plan, 2, 0, lambda size: None)
    assert asked == [False] and not STAGES[2].missing(plan), "the other shards were written meanwhile"
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == divided


def test_a_process_waits_for_the_item_of_another(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, and does the item when the lock ends without a result."""
    plan = open_plan(corpus, tmp_path / "out")
    monkeypatch.setattr(stages, "WAITING", 0.0)
    final = plan.result(STAGES[0].kind, 0)
    lock = exclusive_lock(lock_file(final), DataError, "busy")
    lock.__enter__()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: lock.__exit__(None, None, None))
    monkeypatch.setattr(stages, "time", clock)
    run_stages(plan, QUIET)
    assert not any(stage.missing(plan) for stage in STAGES)
    assert "waiting for 1 results of other processes" in capsys.readouterr().err


def test_a_full_disk_costs_the_unfinished_shard(
    tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, calls = ShardWriter.finish, list[int]()

    def full(self: ShardWriter) -> None:
        calls.append(1)
        if len(calls) == 10:
            raise OSError(28, "No space left on device")
        finish(self)

    with monkeypatch.context() as patched, pytest.raises(DataError, match="No space left.*free some space"):
        patched.setattr(ShardWriter, "finish", full)
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    plan = open_plan(corpus, tmp_path / "out")
    missing = STAGES[2].missing(plan)
    assert 0 < len(missing) < len(plan.tasks) and not list(plan.folder.glob(".*.partial"))
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == divided


def test_a_lost_block_is_built_again(tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes]) -> None:
    """A part that needs it names it. The same command builds it, and keeps the shards that exist."""
    plan = open_plan(corpus, tmp_path / "out")
    for number in range(2):
        for item in STAGES[number].missing(plan):
            attempt(plan, number, item, lambda size: None)
    attempt(plan, 2, 0, lambda size: None)
    lost = plan.blocks[plan.tasks[1][0].blocks.start][0]
    lost.unlink()
    with pytest.raises(DataError, match=f"{lost.name}: .*missing; run the same command"):
        run_stages(plan, QUIET)
    kept = plan.result("shards", 0).stat().st_ino
    assert "blocks are built" in prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    assert plan.result("shards", 0).stat().st_ino == kept
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == divided


@pytest.mark.parametrize("damage", ["truncated", "lost", "record"])
def test_a_damaged_result_is_named(
    tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes], damage: str
) -> None:
    plan = open_plan(corpus, tmp_path / "out")
    run_stages(plan, QUIET)
    result = plan.result("shards", 1)
    file = min(result.glob("*.bin")) if damage != "record" else result / "task.json"
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"{result.name}: cannot be read .*delete this folder"):
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    shutil.rmtree(result)
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == divided


def test_a_file_system_without_links(
    tmp_path: Path, corpus: list[CorpusSource], divided: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shard_files.os, "link", no_links)
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == divided


@pytest.mark.parametrize(
    ("sizes", "shard_bytes", "expected"),
    [
        ([[10, 10], [10]], None, [[(0, None, 0, 2), (1, None, 2, 3)]]),
        ([[10] * 4], 20, [[(0, 0, 0, 2)], [(0, 1, 2, 4)]]),
        ([[10] * 3], 20, [[(0, None, 0, 3)]]),
        ([[10], [10] * 4], 20, [[(0, None, 0, 1), (1, 0, 1, 3)], [(1, 1, 3, 5)]]),
        ([[10] * 4, [1]], 20, [[(0, 0, 0, 2)], [(0, 1, 2, 4)], [(1, None, 4, 5)]]),
        ([[100, 1, 1]], 10, [[(0, 0, 0, 1)], [(0, 1, 1, 3)]]),
        ([[1, 1, 100]], 10, [[(0, None, 0, 3)]]),
        ([[0, 0]], 1, [[(0, None, 0, 2)]]),
    ],
)
def test_sources_are_divided_at_blocks(sizes: list[list[int]], shard_bytes: int | None, expected: Any) -> None:
    """As (source, number, first block, end) for each task."""
    rows, block = [], 0
    for source, blocks in enumerate(sizes):
        for size in blocks:
            rows.append((source, block, size))
            block += 1
    found = [
        [(piece.source, piece.number, piece.blocks.start, piece.blocks.stop) for piece in task]
        for task in divide(rows, shard_bytes)
    ]
    assert found == expected


def test_random_divisions_have_each_block_once() -> None:
    """A task has at most one piece of each source, and the numbers of a source count from 0."""
    chosen = np.random.default_rng(0)
    for _ in range(200):
        rows, block = [], 0
        for source in range(chosen.integers(1, 5)):
            for _ in range(chosen.integers(1, 30)):
                rows.append((source, block, int(chosen.integers(0, 50))))
                block += int(chosen.integers(0, 2)) or rows[-1][2] % 2
            block += int(chosen.integers(0, 2))
        rows = list({row[:2]: row for row in rows}.values())
        tasks = divide(rows, int(chosen.integers(1, 200)))
        pieces = [piece for task in tasks for piece in task]
        assert [(piece.source, block) for piece in pieces for block in piece.blocks] == [row[:2] for row in rows]
        assert all(len({piece.source for piece in task}) == len(task) for task in tasks)
        for source in {piece.source for piece in pieces}:
            numbers = [piece.number for piece in pieces if piece.source == source]
            assert numbers in ([None], list(range(len(numbers))))


def test_shards_of_a_set_share_its_weight() -> None:
    def entry(part: str, number: int, tokens: int) -> dict[str, Any]:
        splits = {split: {"tokens": tokens if split == "train" else 0} for split in ("train", "valid", "test")}
        return {"name": f"a_{part}_{number}", "source": "a", "part": part} | splits

    entries = [entry("x", 0, 100), entry("x", 1, 300), entry("y", 0, 50)]
    source = CorpusSource(SourceSpec("a", ()), set_weights={"x": 3.0, "y": 1.0})
    assert training_weights([source], entries) == {"a_x_0": 0.1875, "a_x_1": 0.5625, "a_y_0": 0.25}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_shards_need_a_size(tmp_path: Path, corpus: list[CorpusSource], value: float) -> None:
    with pytest.raises(DataError, match="shard_gib: must be a positive number, not"):
        prepare(corpus, tmp_path / "out", CHARACTERS, Rules(shard_gib=value), QUIET)
