"""Prepare shards from corpora: tokenize the corpus in blocks, which are kept if the process is killed, and then write
the documents to shards.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation import manifest
from megatron_coca.data.preparation.acceptance import check_tokenizer
from megatron_coca.data.preparation.blocks import (
    Blocks,
    TokenizerSource,
    blocks_folder,
    cut,
    remove_blocks,
    settings_of,
)
from megatron_coca.data.preparation.faults import check_faults
from megatron_coca.data.preparation.manifest import Findings, ShardState
from megatron_coca.data.preparation.preparation_plan import (
    CorpusSource,
    Execution,
    Inputs,
    Rules,
    check,
    find_inputs,
    has_labels,
    no_usable_document,
    shard_name,
)
from megatron_coca.data.preparation.workers import TokenizedChunk
from megatron_coca.data.shards import LABELS_SUFFIX, ShardWriter
from megatron_coca.support.atomic_write import atomic_dir, require_new
from megatron_coca.support.console import Progress


def prepare(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    rules: Rules | None = None,
    execution: Execution | None = None,
    notes: dict[str, Any] | None = None,
) -> Path:
    """Tokenize `sources` into `<output>/<source>[_<set>]_{train,valid,test}.{bin,idx}`.

    The folder also contains the tokenizer, `manifest.json`, and `data.yml` with the data keys of a run. Every document
    ends with `tokenizer.eod`. The result depends neither on `execution` nor on interruptions.

    The folder appears only after it is complete. Until then the tokenized blocks are kept in `.<output>.blocks`; after
    a kill or an error, the same call continues from these blocks.

    Args:
        sources: sources in reading order. If documents are equal, the first one is kept.
        output: the folder to create.
        tokenizer: a tokenizer, or a function that trains a tokenizer in a given folder.
        rules: the rules that apply to all sources.
        execution: settings that do not affect the result.
        notes: further settings that determine the result, such as the settings of the tokenizer training.

    Returns the path of `manifest.json`. Raises `DataError` if a path is missing, if a source has no usable document or
    too many faulty records, if the tokenizer loses text, if a file is damaged or changes while it is read, if `output`
    exists or cannot be written, or if another process is preparing it.
    """
    rules, execution = rules or Rules(), execution or Execution()
    check(sources, rules)
    output = Path(output)
    if (output / manifest.MANIFEST).is_file():
        remove_blocks(output)  # left over if an earlier call was killed after the folder was complete
    require_new(output, DataError)
    inputs = find_inputs(sources)
    with atomic_dir(output, DataError) as folder:
        try:
            with _work_is_kept(output):
                settings = settings_of(sources, tokenizer, rules, notes)
                blocks = Blocks(sources, inputs, output, tokenizer, rules, settings)
                if blocks.chat_time is not None:
                    settings["chat"]["time"] = blocks.chat_time
                blocks.make(blocks.missing(), execution)
                blocks.tokenizer.save(folder)
                shards, findings = _write_shards(blocks, sources, inputs, folder, execution)
                for source, found in zip(sources, findings, strict=True):
                    check_tokenizer(source.spec.name, found.sample, blocks.tokenizer, rules)
                record = manifest.build_manifest(sources, blocks.tokenizer, settings, inputs, shards, findings, folder)
                manifest.write_run_config(folder, output, sources, record["sources"], blocks.tokenizer)
                (folder / manifest.MANIFEST).write_text(json.dumps(record, indent=1) + "\n")
        except DataError:
            remove_blocks(output, unused=True)
            raise
    remove_blocks(output)
    return output / manifest.MANIFEST


def prepare_part(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    part: int,
    parts: int,
    rules: Rules | None = None,
    execution: Execution | None = None,
    notes: dict[str, Any] | None = None,
) -> str:
    """Build only the blocks of `prepare` with number % `parts` == `part`. Return a message with the number of blocks
    that exist so far. Raises `DataError` as `prepare` does.
    """
    rules, execution = rules or Rules(), execution or Execution()
    check(sources, rules)
    require_new(output, DataError)
    with _work_is_kept(output):
        settings = settings_of(sources, tokenizer, rules, notes)
        blocks = Blocks(sources, find_inputs(sources), output, tokenizer, rules, settings)
        blocks.make([number for number in blocks.missing() if number % parts == part], execution)
    return f"{blocks.folder}: {len(blocks) - len(blocks.missing())} of {len(blocks)} blocks are built"


def count_blocks(sources: Sequence[CorpusSource], rules: Rules, output: Path) -> int:
    """Return the number of blocks of a preparation that has yet to run. Raises `DataError` as `prepare` does."""
    check(sources, rules)
    require_new(output, DataError)
    return len(cut([unit.size for _, unit in find_inputs(sources).units]))


@contextmanager
def _work_is_kept(output: Path) -> Iterator[None]:
    """Raise `DataError` for a full or unwritable disk. The message says where the finished blocks are kept."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or error
        blocks = blocks_folder(output)
        made = len(list(blocks.glob("*.block")))
        so_far = (
            f"{made} blocks are kept in {blocks}, and the same command continues from them"
            if made
            else "no finished block exists yet"
        )
        raise DataError(
            f"{output}: cannot be written ({reason}); free some space and run the same command again, or choose "
            f"another folder ({so_far})"
        ) from error


def _write_shards(
    blocks: Blocks, sources: Sequence[CorpusSource], inputs: Inputs, folder: Path, execution: Execution
) -> tuple[list[ShardState], list[Findings]]:
    """Write the documents of all blocks to shards, without duplicates. Return (shards, findings about each source)."""
    comparing = [number for number, source in enumerate(sources) if source.duplicates != "keep"]
    last_compared = max(comparing, default=-1)
    findings = [Findings() for _ in sources]
    total = sum(map(blocks.size, range(len(blocks)))) or None
    with (
        closing(Outputs(folder, sources, blocks.tokenizer.vocab_size)) as outputs,
        _digests(folder / "digests.sqlite") as database,
        Progress("writing shards", total, "B", show=execution.progress) as progress,
    ):
        for block in range(len(blocks)):
            for unit, chunk in blocks.read(block):
                number = inputs.units[unit][0]
                problems = findings[number].problems
                problems.merge(chunk.problems)
                findings[number].sets |= chunk.sets
                findings[number].sample.merge(chunk.sample)
                kept = np.ones(len(chunk.lengths), dtype=bool)
                # This includes sources that keep duplicates, because a later source may drop texts that occur in them.
                if number <= last_compared:
                    new = _are_new(database, chunk.digests)
                    kept = new if sources[number].duplicates != "keep" else kept
                    problems.leave_out("duplicate", int((~kept).sum()))
                outputs.write(number, chunk, kept)
            progress.advance(blocks.size(block))
        shards = outputs.finish()
    written = Counter[int]()
    for shard in shards:
        written[shard.source] += shard.documents
    for number, source in enumerate(sources):
        problems = findings[number].problems
        check_faults(source.spec.name, written[number], problems, source.max_faulty)
        if not written[number]:
            raise DataError(no_usable_document(source, inputs.of(number), problems))
    return shards, findings


@contextmanager
def _digests(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a temporary database for the digests of all texts, which may not fit into memory."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-65536;")
        database.execute("CREATE TABLE digests (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        yield database
    path.unlink()


def _are_new(database: sqlite3.Connection, digests: np.ndarray) -> np.ndarray:
    """Add digests to the database. Return a mask, bool [texts], of the texts that have not occurred before, neither in
    this call nor in an earlier call.
    """
    cursor = database.cursor()
    insert = "INSERT OR IGNORE INTO digests VALUES (?)"
    return np.array([cursor.execute(insert, (digest.tobytes(),)).rowcount for digest in digests], dtype=bool)


class Outputs:
    """The shard writers in a folder, by (number of the source, set, split). A writer is opened when its first document
    is written.
    """

    def __init__(self, folder: Path, sources: Sequence[CorpusSource], vocab_size: int) -> None:
        self._folder, self._sources, self._vocab_size = folder, sources, vocab_size
        self._writers: dict[tuple[int, str, str], ShardWriter] = {}
        self._labels: dict[tuple[int, str, str], ShardWriter] = {}
        self._bytes = Counter[tuple[int, str, str]]()

    def write(self, source: int, chunk: TokenizedChunk, kept: np.ndarray) -> None:
        """Append the documents of a chunk that the mask `kept`, bool [documents], selects."""
        for number, (part, split) in enumerate(chunk.targets):
            chosen = kept & (chunk.target == number)
            if not chosen.any():
                continue
            key = (source, part, split)
            if key not in self._writers:
                self._open(*key)
            tokens = chunk.tokens if chosen.all() else chunk.tokens[np.repeat(chosen, chunk.lengths)]
            self._writers[key].extend(tokens, chunk.lengths[chosen])
            if key in self._labels:
                assert chunk.labels is not None, "every document of a labelled source has labels"
                self._labels[key].extend(chunk.labels[np.repeat(chosen, chunk.lengths)], chunk.lengths[chosen])
            self._bytes[key] += int(chunk.text_bytes[chosen].sum())

    def finish(self) -> list[ShardState]:
        """Write the index files. Return the shards, sorted by source and then by set."""
        for writer in (*self._writers.values(), *self._labels.values()):
            writer.finish()
        shards = [
            ShardState(*key, writer.documents, writer.tokens, self._bytes[key]) for key, writer in self._writers.items()
        ]
        return sorted(shards, key=lambda shard: (shard.source, shard.part))

    def close(self) -> None:
        """Close all open files."""
        for writer in (*self._writers.values(), *self._labels.values()):
            writer.close()

    def _open(self, source: int, part: str, split: str) -> None:
        name = shard_name(self._sources[source].spec.name, part, split)
        for other in self._writers:
            if shard_name(self._sources[other[0]].spec.name, *other[1:]) == name:
                raise DataError(
                    f"{name}: {self._label(*other[:2])} and {self._label(source, part)} would be written to the same "
                    "shard; exclude a set with `sets`, or rename a source"
                )
        key = (source, part, split)
        self._writers[key] = ShardWriter(self._folder / name, self._vocab_size)
        if has_labels(self._sources[source]):
            labels_path = self._folder / f"{name}{LABELS_SUFFIX}"
            self._labels[key] = ShardWriter(labels_path, self._vocab_size, labels=True)

    def _label(self, source: int, part: str) -> str:
        name = self._sources[source].spec.name
        return f"{name}, set {part!r}," if part else name
