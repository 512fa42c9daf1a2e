"""Write the shards of a task, and collect the shards of all tasks in the finished folder."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.block_files import read_block
from megatron_coca.data.preparation.duplicates import Dropped
from megatron_coca.data.preparation.manifest import Findings, WrittenShard, shard_facts
from megatron_coca.data.preparation.preparation_plan import CorpusSource, has_labels, shard_name
from megatron_coca.data.preparation.shard_plan import ShardPlan, SourcePiece
from megatron_coca.data.preparation.workers import TokenizedChunk
from megatron_coca.data.readers.source import ReadingProblems
from megatron_coca.data.shards import LABELS_SUFFIX, ShardWriter
from megatron_coca.data.tokenizers.losses import Sample

SHARDS = "shards"
_RECORD = "task.json"
ShardKey = tuple[int, str, str]
"""Identifies a shard within a task: (number of the source, set, split)."""


def write_shards(plan: ShardPlan, number: int, folder: Path, advance: Callable[[float], None]) -> None:
    """Write the shards of a task into `folder`, check and hash them, and record them together with the findings about
    their sources.

    Raises `DataError` for a damaged block.
    """
    pieces = {piece.source: piece for piece in plan.tasks[number]}
    findings = {source: Findings() for source in pieces}
    first, last = plan.tasks[number][0].blocks.start, plan.tasks[number][-1].blocks.stop
    dropped, size = Dropped(plan), sum(piece.bytes for piece in pieces.values())
    with closing(Outputs(folder, plan.sources, plan.vocab_size, plan.tasks[number])) as outputs:
        for block in range(first, last):
            _write_block(plan, block, pieces, dropped.of(block), findings, outputs)
            advance(size / (last - first))
        shards = outputs.finish()
    record = {
        "shards": [asdict(shard) for shard in shards],
        "findings": {source: _facts(found) for source, found in findings.items()},
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")


def _write_block(
    plan: ShardPlan,
    block: int,
    pieces: Mapping[int, SourcePiece],
    dropped: np.ndarray,
    findings: Mapping[int, Findings],
    outputs: "Outputs",
) -> None:
    """Append the documents of a block to the shards, and add the block's counts to `findings`. Documents that belong to
    none of `pieces` and documents in `dropped` are skipped.
    """
    path, first = plan.blocks[block]
    end = 0
    for unit, chunk in read_block(path):
        begin, end = end, end + len(chunk.lengths)
        source = int(plan.owners[first + unit])
        if source not in pieces or block not in pieces[source].blocks:
            continue
        kept = np.ones(len(chunk.lengths), dtype=bool)
        kept[dropped[slice(*np.searchsorted(dropped, (begin, end)))] - begin] = False
        found = findings[source]
        found.problems.merge(chunk.problems)
        found.problems.leave_out("duplicate", int((~kept).sum()))
        found.sets |= chunk.sets
        found.sample.merge(chunk.sample)
        outputs.write(source, chunk, kept)


class Outputs:
    """The writers of the shards of one task. A writer is opened when the first document of its shard is written."""

    def __init__(
        self, folder: Path, sources: Sequence[CorpusSource], vocab_size: int, pieces: Sequence[SourcePiece]
    ) -> None:
        self._folder, self._sources, self._vocab_size = folder, sources, vocab_size
        self._numbers = {piece.source: piece.number for piece in pieces}
        self._writers: dict[ShardKey, ShardWriter] = {}
        self._labels: dict[ShardKey, ShardWriter] = {}
        self._names: dict[str, ShardKey] = {}
        self._bytes = Counter[ShardKey]()

    def write(self, source: int, chunk: TokenizedChunk, kept: np.ndarray) -> None:
        """Append the documents of a chunk to their shards. The mask `kept`, bool [documents], selects the documents."""
        for number, (part, split) in enumerate(chunk.targets):
            chosen = kept & (chunk.target == number)
            if not chosen.any():
                continue
            key = (source, part, split)
            if key not in self._writers:
                self._open(key)
            tokens = chunk.tokens if chosen.all() else chunk.tokens[np.repeat(chosen, chunk.lengths)]
            self._writers[key].extend(tokens, chunk.lengths[chosen])
            if key in self._labels:
                assert chunk.labels is not None, "every document of a labelled source has labels"
                self._labels[key].extend(chunk.labels[np.repeat(chosen, chunk.lengths)], chunk.lengths[chosen])
            self._bytes[key] += int(chunk.text_bytes[chosen].sum())

    def finish(self) -> list[WrittenShard]:
        """Write the index files. Return the shards with their facts, sorted by source and then by set."""
        for writer in (*self._writers.values(), *self._labels.values()):
            writer.finish()
        shards = []
        for name, key in self._names.items():
            writer = self._writers[key]
            facts = shard_facts(self._folder, name, writer.documents, writer.tokens, self._bytes[key])
            shards.append(WrittenShard(*key, self._numbers[key[0]], facts))
        return sorted(shards, key=lambda shard: (shard.source, shard.part))

    def close(self) -> None:
        """Close all open files."""
        for writer in (*self._writers.values(), *self._labels.values()):
            writer.close()

    def _open(self, key: ShardKey) -> None:
        source, part, split = key
        name = shard_name(self._sources[source].spec.name, part, split, self._numbers[source])
        _check_name(name, self._names.setdefault(name, key), key, self._sources)
        self._writers[key] = ShardWriter(self._folder / name, self._vocab_size)
        if has_labels(self._sources[source]):
            labels_path = self._folder / f"{name}{LABELS_SUFFIX}"
            self._labels[key] = ShardWriter(labels_path, self._vocab_size, labels=True)


def _check_name(name: str, one: ShardKey, other: ShardKey, sources: Sequence[CorpusSource]) -> None:
    """Raise `DataError` if two shards have the same name."""
    if one == other:
        return

    def label(key: ShardKey) -> str:
        source = sources[key[0]].spec.name
        return f"{source}, set {key[1]!r}," if key[1] else source

    raise DataError(
        f"{name}: {label(one)} and {label(other)} would be written to the same shard; exclude a set with `sets`, or "
        "rename a source"
    )


def _facts(found: Findings) -> dict[str, object]:
    return {"problems": found.problems.facts(), "sets": sorted(found.sets), "sample": asdict(found.sample)}


def collect(plan: ShardPlan, folder: Path) -> tuple[list[WrittenShard], list[Findings]]:
    """Link the shards of all tasks into `folder`. Return the shards, sorted by source, set and number, and the findings
    about each source. Raises `DataError` for a damaged result.
    """
    shards, findings = list[WrittenShard](), [Findings() for _ in plan.sources]
    names: dict[str, ShardKey] = {}
    for number in range(len(plan.tasks)):
        result = plan.result(SHARDS, number)
        record = _read_record(result)
        written = [WrittenShard(**shard) for shard in record["shards"]]
        for shard in written:
            key, name = (shard.source, shard.part, shard.split), shard.facts["prefix"]
            _check_name(name, names.setdefault(name, key), key, plan.sources)
        for name in record["sizes"]:
            _link(result / name, folder / name)
        shards += written
        for source, facts in record["findings"].items():
            found = findings[int(source)]
            found.problems.merge(ReadingProblems.restored(facts["problems"]))
            found.sets |= set(facts["sets"])
            found.sample.merge(Sample.restored(facts["sample"]))
    return sorted(shards, key=lambda shard: (shard.source, shard.part, shard.number or 0)), findings


def _read_record(result: Path) -> dict[str, Any]:
    """Read the record of a task. Raises `DataError` if a file of the task is missing or has the wrong size."""
    try:
        record = json.loads((result / _RECORD).read_bytes())
        for name, size in record["sizes"].items():
            if (result / name).stat().st_size != size:
                raise ValueError(f"{name} does not have {size} bytes")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{result}: cannot be read ({error}); delete this folder and run the same command again"
        ) from error
    return record


def _link(path: Path, new: Path) -> None:
    """Give a file a second name, or copy it if the file system has no links."""
    try:
        os.link(path, new)
    except OSError:
        shutil.copyfile(path, new)
