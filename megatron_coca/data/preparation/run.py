"""Corpora to shards: read, split by key, tokenize, write; and where it was killed, go on."""

import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_coca.atomic_write import complete_folder, exclusive_lock, lock_file, partial_folder, refuse_existing
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation import manifest
from megatron_coca.data.preparation.journal import JOURNAL, Journal, ShardState, State
from megatron_coca.data.preparation.pipeline import ChunkDone, Pool, Prepared, Step, UnitDone, cut, in_order
from megatron_coca.data.preparation.plan import (
    CorpusSource,
    Execution,
    Inputs,
    Rules,
    check,
    find_inputs,
    nothing_usable,
    shard_name,
)
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import ReadingProblems, ReadUnit
from megatron_coca.data.shard_writer import LENGTHS_SUFFIX, ShardWriter, Written
from megatron_coca.data.shards import SUFFIXES
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.load import load_saved_tokenizer

_Key = tuple[int, str, str]


class Outputs:
    """Writers by (number of the source, part, split), opened with their first document.

    Args:
        folder: where the shards grow.
        names: of the sources.
        vocab_size: of the tokenizer.
        shards: what is there already; the files are cut to it, and other shards in the folder removed.
    """

    def __init__(self, folder: Path, names: Sequence[str], vocab_size: int, shards: Sequence[ShardState]) -> None:
        self._folder, self._names, self._vocab_size = folder, names, vocab_size
        self._writers: dict[_Key, ShardWriter] = {}
        self._bytes: dict[_Key, int] = {}
        for shard in shards:
            written = Written(shard.documents, shard.tokens)
            self._open((shard.source, shard.part, shard.split), written, shard.bytes)
        known = {self.name(shard) for shard in shards}
        for path in [path for suffix in (*SUFFIXES, LENGTHS_SUFFIX) for path in folder.glob(f"*{suffix}")]:
            if path.stem not in known:
                path.unlink()  # begun after what was saved

    def write(self, source: int, prepared: Prepared, kept: np.ndarray) -> None:
        """Append the ``kept`` (bool [documents]) documents of a chunk."""
        for number, (part, split) in enumerate(prepared.targets):
            chosen = kept & (prepared.target == number)
            if not chosen.any():
                continue
            key = (source, part, split)
            if key not in self._writers:
                self._open(key, Written(), 0)
            tokens = prepared.tokens if chosen.all() else prepared.tokens[np.repeat(chosen, prepared.lengths)]
            self._writers[key].extend(tokens, prepared.lengths[chosen])
            self._bytes[key] += int(prepared.bytes[chosen].sum())

    def sync(self) -> None:
        """Flush everything; what ``states`` tells then can be gone back to."""
        for writer in self._writers.values():
            writer.sync()

    @property
    def tokens(self) -> int:
        """In all shards."""
        return sum(writer.tokens for writer in self._writers.values())

    def states(self) -> tuple[ShardState, ...]:
        """What the shards hold, flushed or not."""
        return tuple(
            ShardState(*key, writer.documents, writer.tokens, self._bytes[key]) for key, writer in self._writers.items()
        )

    def finish(self) -> list[ShardState]:
        """Write the indices and close; the shards in the order of the sources, then by part."""
        for writer in self._writers.values():
            writer.finish()
        return sorted(self.states(), key=lambda state: (state.source, state.part))

    def close(self) -> None:
        """Close all files as they are."""
        for writer in self._writers.values():
            writer.close()

    def name(self, state: ShardState) -> str:
        """Name of a shard's files."""
        return shard_name(self._names[state.source], state.part, state.split)

    def _told(self, key: _Key) -> str:
        return f"{self._names[key[0]]}, set {key[1]!r}," if key[1] else self._names[key[0]]

    def _open(self, key: _Key, written: Written, size: int) -> None:
        name = self.name(ShardState(*key))
        taken = [other for other in self._writers if self.name(ShardState(*other)) == name]
        if taken:
            raise DataError(
                f"{self._told(taken[0])} and {self._told(key)} would both be written to {name}. "
                "Leave a set out with `sets`, or rename a source."
            )
        self._writers[key] = ShardWriter(self._folder / name, self._vocab_size, written)
        self._bytes[key] = size


class Progress:
    """A bar over the bytes of all units, or over their number where no size is known."""

    def __init__(self, units: Sequence[tuple[int, ReadUnit]], names: Sequence[str], first: int, shown: bool) -> None:
        self._names, self._by_size = names, any(unit.size for _, unit in units)
        sizes = [unit.size if self._by_size else 1 for _, unit in units]
        self._bar = tqdm(
            total=sum(sizes),
            initial=sum(sizes[:first]),
            unit="B" if self._by_size else " units",
            unit_scale=self._by_size,
            smoothing=0.05,
            disable=not shown,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, step: Step, tokens: int) -> None:
        """Move on by a step; ``tokens`` have been written so far."""
        self._bar.set_description(f"tokenize {self._names[step.source]}", refresh=False)
        self._bar.set_postfix_str(f"{tokens / 1e6:,.1f}M tokens", refresh=False)
        if isinstance(step, UnitDone):
            self._bar.update(0 if self._by_size else 1)
        elif self._by_size:
            self._bar.update(step.read)


TokenizerSource = Tokenizer | Callable[[Path], Tokenizer]
"""A tokenizer, or what makes one in a folder; it is made once, and kept while the preparation is interrupted."""


def prepare(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    rules: Rules | None = None,
    execution: Execution | None = None,
    notes: dict[str, Any] | None = None,
) -> Path:
    """Tokenize ``sources`` into ``<output>/<source>[_<set>]_{train,valid,test}.{bin,idx}``.

    Beside them lie the tokenizer, ``manifest.json`` and ``data.yml``, the data keys of a run. Every document ends in
    ``tokenizer.eod``. The result does not depend on ``execution``, nor on kills in between.

    The work goes on in ``.<output>.partial`` beside ``output``, which becomes ``output`` when it is complete; the same
    call after a kill or an error goes on from there.

    Args:
        sources: in the order in which they are read; of equal documents the first is kept.
        output: folder to make.
        tokenizer: used, or called with a folder for one.
        rules: what holds for all sources.
        execution: how the work is done.
        notes: further settings that must be the same when the work goes on, such as those of the tokenizer's training.

    Returns:
        Path of ``manifest.json``.

    Raises:
        DataError: a path is missing, a source has no usable document, a file is damaged, ``output`` exists or cannot
            be written, another process is at it, or the partial folder was begun with other settings.
    """
    rules, execution = rules or Rules(), execution or Execution()
    check(sources, rules)
    output, settings = Path(output), _settings(sources, tokenizer, rules, notes)
    if _was_completed(output, settings):
        with _exclusive(output):
            _remove_working_files(output)
        return output / manifest.MANIFEST
    refuse_existing(output, DataError)
    inputs = find_inputs(sources)
    with _partial(output) as folder:
        with closing(Journal(folder, settings)) as journal:
            made = _tokenizer(tokenizer, journal, folder)
            _Preparation(sources, made, rules, settings, inputs, folder, journal).run(execution, output)
        complete_folder(folder, output)
        _remove_working_files(output)
    return output / manifest.MANIFEST


def _was_completed(output: Path, settings: dict[str, Any]) -> bool:
    """Whether the same preparation made ``output`` and was killed before it removed its own files there."""
    return (output / JOURNAL).is_file() and manifest.read_manifest(output / manifest.MANIFEST)["settings"] == settings


def _remove_working_files(output: Path) -> None:
    """Remove what only the preparation needs. After the rename, so that a kill in between costs no work; the journal
    last, since it shows that something is left to remove.
    """
    for pattern in (f"*{LENGTHS_SUFFIX}", f"{JOURNAL}?*", JOURNAL):
        for path in output.glob(pattern):
            path.unlink(missing_ok=True)


def _exclusive(output: Path) -> AbstractContextManager[None]:
    busy = f"{output}: another process is preparing it. Wait for it, or choose another folder."
    return exclusive_lock(lock_file(output), DataError, busy, temporary=True)


@contextmanager
def _partial(output: Path) -> Iterator[Path]:
    """The partial folder of ``output``, which no other process works in meanwhile."""
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
                    shutil.rmtree(folder)  # nothing was done that could be gone on with
                raise
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or error
        kept = f"What was done is kept in {folder}: free some space and run the same command again, or remove it and"
        advice = f"{kept} choose another folder." if folder.exists() else "Choose another folder."
        raise DataError(f"{output}: cannot be written ({reason}). {advice}") from error


def _tokenizer(source: TokenizerSource, journal: Journal, folder: Path) -> Tokenizer:
    """The tokenizer, saved in ``folder``; where it was to be made, the one that the journal knows to be there."""
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


def _settings(
    sources: Sequence[CorpusSource], tokenizer: TokenizerSource, rules: Rules, notes: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides what is written, but for the files, which the journal has one by one, and for what is done
    about faults, which may be decided anew.
    """
    fractions = {"valid_fraction": rules.valid_fraction, "test_fraction": rules.test_fraction}
    named = {source.spec.name: asdict(replace(source, spec=replace(source.spec, paths=()))) for source in sources}
    for described in named.values():
        del described["spec"]["max_record_mib"]
    fingerprint = None if callable(tokenizer) else tokenizer.fingerprint
    values = {"sources": named, "tokenizer": fingerprint, **fractions, **(notes or {})}
    return json.loads(json.dumps(values, default=str))


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
    ) -> None:
        self._sources, self._tokenizer, self._rules = sources, tokenizer, rules
        self._settings, self._inputs, self._folder = settings, inputs, folder
        self._units = inputs.units
        self._names = [source.spec.name for source in sources]
        comparing = [number for number, source in enumerate(sources) if source.duplicates != "keep"]
        self._last_compared = max(comparing, default=-1)
        self._journal = journal
        self._saved = time.monotonic()

    def run(self, execution: Execution, output: Path) -> None:
        limits = {source.spec.name: source.spec.max_record_mib for source in self._sources}
        self._state, self._unit_begin = self._journal.load(self._units, limits)
        strict, found = self._rules.strict, self._state.findings
        self._sets = {name: set(found.get(name, {}).get("sets", ())) for name in self._names}
        self._problems = {
            name: ReadingProblems.restored(found[name], strict) if name in found else ReadingProblems(strict)
            for name in self._names
        }
        vocab_size = self._tokenizer.vocab_size
        with closing(Outputs(self._folder, self._names, vocab_size, self._state.shards)) as self._outputs:
            self._read_all(execution)
            self._finish(output)

    def _read_all(self, execution: Execution) -> None:
        readers = [open_reader(source.spec) for source in self._sources]
        cuts = cut(readers, self._units, self._state.unit, self._state.chunks)
        pool = Pool(execution.workers, self._sources, self._folder, self._rules)
        with pool, Progress(self._units, self._names, self._state.unit, execution.progress) as bar:
            for step in in_order(cuts, pool.submit, pool.in_flight):
                if isinstance(step, ChunkDone):
                    self._write(step)
                elif isinstance(step, UnitDone):
                    self._end_unit(step)
                bar.update(step, self._outputs.tokens)
                if time.monotonic() - self._saved >= execution.save_seconds:
                    self._save()
        self._save()

    def _write(self, step: ChunkDone) -> None:
        problems, source = self._problems[self._names[step.source]], self._sources[step.source]
        problems.merge(step.prepared.problems)
        self._sets[self._names[step.source]] |= step.prepared.sets
        kept = np.ones(len(step.prepared.lengths), dtype=bool)
        if step.source <= self._last_compared:  # a source that keeps all may stand before one that compares
            new = self._journal.are_new(step.prepared.digests, step.unit)
            kept = new if source.duplicates != "keep" else kept
            problems.leave_out("duplicate", int((~kept).sum()))
        if step.prepared.bands is not None:
            unlike = self._journal.are_unlike(step.prepared.bands, kept, step.unit)
            problems.leave_out("near duplicate", int((kept & ~unlike).sum()))
            # A text that was left out for being like another has not been written: another source may have it.
            self._journal.forget([step.prepared.digests[row] for row in np.flatnonzero(kept & ~unlike)])
            kept = unlike
        self._outputs.write(step.source, step.prepared, kept)
        self._state = replace(self._state, chunks=self._state.chunks + 1)

    def _end_unit(self, step: UnitDone) -> None:
        if step.damage is not None:
            if not self._rules.skip_damaged:
                self._save()
                raise step.damage
            unit = self._units[step.unit][1]
            self._problems[self._names[step.source]].add(unit.path, manifest.DAMAGED, str(step.damage))
        self._state = replace(self._state, unit=step.unit + 1, chunks=0)
        self._unit_begin = self._current()
        if step.unit + 1 == len(self._units) or self._units[step.unit + 1][0] != step.source:
            self._check_found(step.source)

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

    def _finish(self, output: Path) -> None:
        shards = self._outputs.finish()
        state = replace(self._current(), shards=tuple(shards))
        record = manifest.build(self._sources, self._tokenizer, self._settings, self._inputs, state, self._folder)
        manifest.write(self._folder, output, self._sources, record, self._tokenizer)
        (self._folder / manifest.MANIFEST).write_text(json.dumps(record, indent=1) + "\n")

    def _check_found(self, number: int) -> None:
        """A source that gave nothing at all is a mistake in its description."""
        if not any(shard.source == number for shard in self._outputs.states()):
            raise DataError(
                nothing_usable(self._sources[number], self._inputs.of(number), self._problems[self._names[number]])
            )
