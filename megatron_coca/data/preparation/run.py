"""Prepare shards from corpora: read, split by key, tokenize, write, and resume after a kill."""

import json
import shutil
import sqlite3
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.atomic_write import complete_folder, exclusive_lock, lock_file, partial_folder, refuse_existing
from megatron_coca.console import Progress
from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.preparation import manifest
from megatron_coca.data.preparation.blocks import Blocks, TokenizerSource, settings_of
from megatron_coca.data.preparation.journal import JOURNAL, Journal, ShardState, State
from megatron_coca.data.preparation.preparation_plan import (
    CorpusSource,
    Execution,
    Inputs,
    Rules,
    check,
    find_inputs,
    has_labels,
    no_usable_document,
    shard_label,
    shard_name,
)
from megatron_coca.data.preparation.workers import Pool, TokenizedChunk
from megatron_coca.data.readers.source import Chunk, ReadingProblems
from megatron_coca.data.remote_shards import publish, refuse_store
from megatron_coca.data.shards import LABELS_SUFFIX, LENGTHS_SUFFIX, SUFFIXES, ShardWriter
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.kinds import Tokenizer


def prepare(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    rules: Rules | None = None,
    execution: Execution | None = None,
    notes: dict[str, Any] | None = None,
    url: str | None = None,
) -> Path:
    """Tokenize ``sources`` into ``<output>/<source>[_<set>]_{train,valid,test}.{bin,idx}``.

    The folder also gets the tokenizer, ``manifest.json`` and ``data.yml``, the data keys of a run. Every document ends
    with ``tokenizer.eod``. The result depends neither on ``execution`` nor on interruptions.

    The work is done in ``.<output>.partial`` next to ``output``, which is renamed when it is complete; the same call
    after a kill or an error resumes there.

    Args:
        sources: in the order of reading; of equal documents the first is kept.
        output: folder to create.
        tokenizer: used, or called with a folder to train one.
        rules: for all sources.
        execution: settings without effect on the result.
        notes: further settings that must be the same on resuming, such as those of the tokenizer's training.
        url: of a folder on an object store, to which the result is uploaded; ``output`` keeps its small files.

    Returns the path of ``manifest.json``. Raises ``DataError`` if a path is missing, a source has no usable document, a
    file is damaged, ``output`` exists or cannot be written, another process is preparing it, or the partial folder was
    started with other settings.
    """
    rules, execution = rules or Rules(), execution or Execution()
    check(sources, rules)
    output, settings = Path(output), settings_of(sources, tokenizer, rules, notes)
    path = output / manifest.MANIFEST
    # The same preparation was killed after the rename, before its working files were removed.
    if (output / JOURNAL).is_file() and manifest.read_manifest(path)["settings"] == settings:
        with _exclusive(output):
            _finish(output, Blocks(sources, output, rules, settings), url)
        return path
    refuse_existing(output, DataError)
    if url is not None:
        refuse_store(url, manifest.MANIFEST)
    inputs = find_inputs(sources)
    with _partial(output) as folder:
        with closing(Journal(folder, settings)) as journal:
            blocks = Blocks(sources, output, rules, settings)
            made = _make_tokenizer(blocks.tokenizer or tokenizer, journal, folder)
            blocks.cut(inputs, made)
            _Preparation(sources, made, rules, settings, inputs, folder, journal, blocks).run(execution, url or output)
        complete_folder(folder, output)
        _finish(output, blocks, url)
    return path


def _finish(output: Path, blocks: Blocks, url: str | None) -> None:
    """Upload the result, if it goes to a store, and remove the files that only the preparation needs.

    Done after the rename, so that a kill in between costs no work; the journal goes last, as the mark that this is not
    done yet.
    """
    blocks.remove()
    if url is not None:
        last, working = output / manifest.MANIFEST, (LENGTHS_SUFFIX, JOURNAL)
        files = [path for path in sorted(output.iterdir()) if not any(mark in path.name for mark in working)]
        publish([path for path in files if path != last], last, url)
        for path in [path for suffix in SUFFIXES for path in output.glob(f"*{suffix}")]:
            path.unlink()
    for pattern in (f"*{LENGTHS_SUFFIX}", f"{JOURNAL}?*", JOURNAL):
        for path in output.glob(pattern):
            path.unlink(missing_ok=True)


def _exclusive(output: Path) -> AbstractContextManager[None]:
    busy = f"{output}: another process is preparing it. Wait for it, or choose another folder."
    return exclusive_lock(lock_file(output), DataError, busy, temporary=True)


@contextmanager
def _partial(output: Path) -> Iterator[Path]:
    """The partial folder of ``output``, locked against other processes."""
    folder = partial_folder(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(output):
            refuse_existing(output, DataError)  # another process may have made it while this one looked for its inputs
            folder.mkdir(exist_ok=True)
            try:
                yield folder
            except DataError:
                if folder.exists() and not any(folder.glob("*.bin")):
                    shutil.rmtree(folder)  # there is no work to resume
                raise
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or error
        kept = f"The work so far is kept in {folder}: free some space and run the same command again, or remove it and"
        advice = f"{kept} choose another folder." if folder.exists() else "Choose another folder."
        raise DataError(f"{output}: cannot be written ({reason}). {advice}") from error


def _make_tokenizer(source: TokenizerSource, journal: Journal, folder: Path) -> Tokenizer:
    """The tokenizer, saved in ``folder``; one that was trained before the interruption is loaded."""
    if not callable(source):
        source.save(folder)
        return source
    if (known := journal.tokenizer) is not None:
        saved = load_saved_tokenizer(folder)
        if saved.fingerprint == known:
            return saved
    with tempfile.TemporaryDirectory() as scratch:
        made = source(Path(scratch))
    made.save(folder)
    journal.tokenizer = made.fingerprint
    return made


class Outputs:
    """Writers by (number of the source, set, split), opened with their first document.

    Args:
        folder: of the growing shards.
        names: of the sources.
        vocab_size: of the tokenizer.
        shards: recorded in the journal; the files are cut to these sizes, and other shards in the folder removed.
        labelled: numbers of the sources that get label shards.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        vocab_size: int,
        shards: Sequence[ShardState],
        labelled: Collection[int] = (),
    ) -> None:
        self._labelled, self._labels = labelled, dict[tuple[int, str, str], ShardWriter]()
        self._folder, self._names, self._vocab_size = folder, names, vocab_size
        self._writers: dict[tuple[int, str, str], ShardWriter] = {}
        self._bytes: dict[tuple[int, str, str], int] = {}
        for shard in shards:
            self._open(shard)
        known = {f"{self._name(shard)}{suffix}" for shard in shards for suffix in ("", LABELS_SUFFIX)}
        for path in [path for suffix in (*SUFFIXES, LENGTHS_SUFFIX) for path in folder.glob(f"*{suffix}")]:
            if path.stem not in known:
                path.unlink()  # created after the last save

    def write(self, source: int, chunk: TokenizedChunk, kept: np.ndarray) -> None:
        """Append the ``kept`` (bool [documents]) documents of a chunk."""
        for number, (part, split) in enumerate(chunk.targets):
            chosen = kept & (chunk.target == number)
            if not chosen.any():
                continue
            key = (source, part, split)
            if key not in self._writers:
                self._open(ShardState(*key))
            tokens = chunk.tokens if chosen.all() else chunk.tokens[np.repeat(chosen, chunk.lengths)]
            self._writers[key].extend(tokens, chunk.lengths[chosen])
            if key in self._labels:
                assert chunk.labels is not None, "every document of a labelled source has labels"
                self._labels[key].extend(chunk.labels[np.repeat(chosen, chunk.lengths)], chunk.lengths[chosen])
            self._bytes[key] += int(chunk.text_bytes[chosen].sum())

    def sync(self) -> None:
        """Flush everything, so that a later process can resume from ``states``."""
        for writer in (*self._writers.values(), *self._labels.values()):
            writer.sync()

    @property
    def tokens(self) -> int:
        """Total tokens in all shards."""
        return sum(writer.tokens for writer in self._writers.values())

    def states(self) -> tuple[ShardState, ...]:
        """The present sizes of the shards, flushed or not."""
        return tuple(
            ShardState(*key, writer.documents, writer.tokens, self._bytes[key]) for key, writer in self._writers.items()
        )

    def finish(self) -> tuple[ShardState, ...]:
        """Write the indices and close; the shards in the order of the sources, then by set."""
        for writer in (*self._writers.values(), *self._labels.values()):
            writer.finish()
        return tuple(sorted(self.states(), key=lambda state: (state.source, state.part)))

    def close(self) -> None:
        """Close all files without writing indices."""
        for writer in (*self._writers.values(), *self._labels.values()):
            writer.close()

    def _name(self, state: ShardState) -> str:
        return shard_name(self._names[state.source], state.part, state.split)

    def _open(self, state: ShardState) -> None:
        name, key = self._name(state), (state.source, state.part, state.split)
        for other in self._writers:
            if self._name(ShardState(*other)) == name:
                labels = [shard_label(self._names[source], part) for source, part, _ in (other, key)]
                raise DataError(
                    f"{labels[0]} and {labels[1]} would both be written to {name}. "
                    "Leave a set out with `sets`, or rename a source."
                )
        sizes = self._vocab_size, state.documents, state.tokens
        self._writers[key] = ShardWriter(self._folder / name, *sizes)
        if state.source in self._labelled:
            self._labels[key] = ShardWriter(self._folder / f"{name}{LABELS_SUFFIX}", *sizes, labels=True)
        self._bytes[key] = state.bytes


@dataclass(frozen=True, slots=True)
class _Step:
    """A chunk to tokenize, a chunk that was done before (no ``chunk``), or the end of a unit.

    ``read`` are the bytes read for the chunk; ``damage`` is the reason why a damaged unit ended.
    """

    unit: int
    source: int
    read: int = 0
    chunk: Chunk | TokenizedChunk | None = None
    ends_unit: bool = False
    damage: DataError | None = None


class _Preparation:
    def __init__(
        self,
        sources: Sequence[CorpusSource],
        tokenizer: Tokenizer,
        rules: Rules,
        settings: dict[str, Any],
        inputs: Inputs,
        folder: Path,
        journal: Journal,
        blocks: Blocks,
    ) -> None:
        self._blocks = blocks
        self._sources, self._tokenizer, self._rules = sources, tokenizer, rules
        self._settings, self._inputs, self._folder = settings, inputs, folder
        self._units = inputs.units
        self._names = [source.spec.name for source in sources]
        comparing = [number for number, source in enumerate(sources) if source.duplicates != "keep"]
        self._last_compared = max(comparing, default=-1)
        self._journal = journal
        self._saved = time.monotonic()

    def run(self, execution: Execution, output: Path | str) -> None:
        limits = {source.spec.name: source.spec.max_record_mib for source in self._sources}
        self._state, self._unit_begin = self._journal.load(self._units, limits)
        strict, findings = self._rules.strict, self._state.findings
        self._sets = {name: set(findings.get(name, {}).get("sets", ())) for name in self._names}
        self._problems = {
            name: ReadingProblems.restored(findings[name], strict) if name in findings else ReadingProblems(strict)
            for name in self._names
        }
        vocab_size = self._tokenizer.vocab_size
        labelled = {number for number, source in enumerate(self._sources) if has_labels(source)}
        with closing(Outputs(self._folder, self._names, vocab_size, self._state.shards, labelled)) as self._outputs:
            self._read_all(execution)
            state = replace(self._current(), shards=self._outputs.finish())
            record = manifest.build_manifest(
                self._sources, self._tokenizer, self._settings, self._inputs, state, self._folder
            )
            manifest.write_run_config(self._folder, output, self._sources, record["sources"], self._tokenizer)
            (self._folder / manifest.MANIFEST).write_text(json.dumps(record, indent=1) + "\n")

    def _read_all(self, execution: Execution) -> None:
        workers = execution.workers if self._blocks.missing() else 0
        pool = Pool(workers, self._sources, self._folder, self._rules)
        by_size = any(unit.size for _, unit in self._units)
        sizes = [unit.size if by_size else 1 for _, unit in self._units]
        done, unit = sum(sizes[: self._state.unit]), "B" if by_size else "units"
        progress = Progress("preparing", sum(sizes), unit, done, execution.progress)
        waiting: deque[tuple[_Step, Callable[[], TokenizedChunk] | None]] = deque()

        def finish(step: _Step, result: Callable[[], TokenizedChunk] | None) -> None:
            if result is not None:
                self._write(step, result())
            elif step.ends_unit:
                self._end_unit(step)
            progress.begin(f"tokenizing {self._names[step.source]}")
            progress.details = (f"{self._outputs.tokens / 1e6:,.1f}M tokens",)
            progress.advance(step.read if by_size else int(step.ends_unit))
            if time.monotonic() - self._saved >= execution.save_seconds:
                self._save()

        with pool, progress:
            for step in self._steps():
                waiting.append((step, pool.submit(step.source, step.chunk) if step.chunk is not None else None))
                while len(waiting) > pool.in_flight:
                    finish(*waiting.popleft())
            while waiting:
                finish(*waiting.popleft())
        self._save()

    def _steps(self) -> Iterator[_Step]:
        """Yield the chunks of the units from the saved position on, and the end of each unit."""
        first, done = self._state.unit, self._state.chunks
        for number in range(first, len(self._units)):
            source, damage = self._units[number][0], None
            try:
                for index, chunk in enumerate(self._blocks.chunks(number)):
                    skipped = number == first and index < done
                    yield _Step(number, source, chunk.read, None if skipped else chunk)
            except OutOfMemory:
                raise
            except DataError as error:
                damage = error
            yield _Step(number, source, ends_unit=True, damage=damage)

    def _write(self, step: _Step, chunk: TokenizedChunk) -> None:
        name, source = self._names[step.source], self._sources[step.source]
        self._problems[name].merge(chunk.problems)
        self._sets[name] |= chunk.sets
        kept = np.ones(len(chunk.lengths), dtype=bool)
        if step.source <= self._last_compared:  # also of sources that keep all, for the later ones that do not
            new = self._journal.are_new(chunk.digests, step.unit)
            kept = new if source.duplicates != "keep" else kept
            self._problems[name].leave_out("duplicate", int((~kept).sum()))
        self._outputs.write(step.source, chunk, kept)
        self._state = replace(self._state, chunks=self._state.chunks + 1)

    def _end_unit(self, step: _Step) -> None:
        problems = self._problems[self._names[step.source]]
        if step.damage is not None:
            if not self._rules.skip_damaged:
                self._save()
                raise step.damage
            problems.add(self._units[step.unit][1].path, manifest.DAMAGED, str(step.damage))
        self._state = replace(self._state, unit=step.unit + 1, chunks=0)
        self._unit_begin = self._current()
        last = step.unit + 1 == len(self._units) or self._units[step.unit + 1][0] != step.source
        if last and not any(shard.source == step.source for shard in self._outputs.states()):
            units = self._inputs.of(step.source)
            raise DataError(no_usable_document(self._sources[step.source], units, problems))

    def _current(self) -> State:
        """The state as it would be saved now; the shards may not be flushed yet."""
        findings = {
            name: problems.facts() | {"sets": sorted(self._sets[name])} for name, problems in self._problems.items()
        }
        return replace(self._state, shards=self._outputs.states(), findings=findings)

    def _save(self) -> None:
        self._outputs.sync()
        self._journal.save(self._current(), self._unit_begin)
        self._saved = time.monotonic()
