"""Where a preparation stands, so that it can be killed at any moment: one SQLite file beside the growing shards.

A transaction holds the position in the corpus, the sizes of the shards at it, and the digests of the documents written
so far. The shards are flushed before it ends; what they hold beyond it is cut off when the preparation goes on.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import ReadUnit

JOURNAL = "journal.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS units (number INTEGER PRIMARY KEY, source INTEGER, path TEXT, size INTEGER, stamp TEXT);
CREATE TABLE IF NOT EXISTS digests (digest BLOB PRIMARY KEY, unit INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bands (hash INTEGER PRIMARY KEY, unit INTEGER) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class ShardState:
    """A shard that has been begun: number of its source, its part, its split, and what it holds."""

    source: int
    part: str
    split: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class State:
    """Where a preparation stands: ``chunks`` of unit ``unit`` are done, and everything before it.

    ``findings`` has, by the name of the source, what was found so far in it: problems, their names, what was left out.
    """

    unit: int = 0
    chunks: int = 0
    shards: tuple[ShardState, ...] = ()
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Self:
        """What ``json.dumps(asdict(state))`` wrote."""
        values = json.loads(text)
        return cls(**values | {"shards": tuple(ShardState(**shard) for shard in values["shards"])})


class Journal:
    """Opens or begins the journal in a folder.

    Raises ``DataError`` where the file is damaged or was begun with other ``settings``.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._path = folder / JOURNAL
        try:
            self._database = sqlite3.connect(self._path)
            self._database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA cache_size=-65536;")
            self._database.executescript(_SCHEMA)
            self._check_settings(settings)
        except sqlite3.OperationalError:
            raise  # of the disk, not of the file
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{self._path}: cannot be used ({error}). Remove {self._path.parent} to begin anew."
            ) from error

    def close(self) -> None:
        """Close, without keeping what was not saved."""
        self._database.close()

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer that was made for this preparation, once it is saved."""
        return self._get("tokenizer")

    @tokenizer.setter
    def tokenizer(self, fingerprint: str) -> None:
        self._put("tokenizer", fingerprint)
        self._database.commit()

    def load(self, units: Sequence[tuple[int, ReadUnit]], limits: Mapping[str, int]) -> tuple[State, State]:
        """Where to go on, and the state before the unit that it is in, given the units (number of the source, unit) as
        they are found now and the longest record of each source.

        Units that were finished must be what they were. The one that was being read is read again from its beginning
        where it has changed, or other limits may cut it into other chunks; those after it may change, come and go.
        """
        state, unit_begin = self._state("state"), self._state("unit_begin")
        known = self._units()
        for number in range(state.unit):
            if number >= len(units) or _differs(known[number], units[number]):
                raise DataError(
                    f"{known[number][1].path}: was read already, and since then it, or what comes before it, has "
                    f"changed. Restore it, or remove {self._path.parent} to begin anew."
                )
        cutting = json.dumps(limits, sort_keys=True)
        changed = state.unit < len(known) and (
            state.unit >= len(units)
            or _differs(known[state.unit], units[state.unit])
            or self._get("longest records") != cutting
        )
        self._put("longest records", cutting)
        if changed and state.chunks:
            state = unit_begin
            for table in ("digests", "bands"):
                self._database.execute(f"DELETE FROM {table} WHERE unit >= ?", (state.unit,))
        self._store_units(units)
        self.save(state, unit_begin)
        return state, unit_begin

    def save(self, state: State, unit_begin: State) -> None:
        """Make ``state``, the state before its unit, and the digests seen since the last time permanent."""
        self._put("state", json.dumps(asdict(state)))
        self._put("unit_begin", json.dumps(asdict(unit_begin)))
        self._database.commit()

    def are_new(self, digests: Sequence[bytes], unit: int) -> np.ndarray:
        """Which texts have not occurred before, in this call or an earlier one: bool [texts]."""
        insert = "INSERT OR IGNORE INTO digests VALUES (?, ?)"
        cursor = self._database.cursor()
        return np.array([cursor.execute(insert, (digest, unit)).rowcount for digest in digests], dtype=bool)

    def forget(self, digests: Sequence[bytes]) -> None:
        """Let these texts be new again."""
        self._database.executemany("DELETE FROM digests WHERE digest = ?", [(digest,) for digest in digests])

    def are_unlike(self, bands: np.ndarray, candidates: np.ndarray, unit: int) -> np.ndarray:
        """Which of the candidates share no band with a text that was kept before: bool [texts]."""
        kept = candidates.copy()
        for row in np.flatnonzero(candidates):
            hashes = [(int(value), unit) for value in bands[row].view(np.int64)]
            kept[row] = not any(self._has_band(value) for value, _ in hashes)
            if kept[row]:
                self._database.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?)", hashes)
        return kept

    def _has_band(self, value: int) -> bool:
        return self._database.execute("SELECT 1 FROM bands WHERE hash = ?", (value,)).fetchone() is not None

    def _check_settings(self, settings: dict[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True, default=str)
        found = self._get("settings")
        if found is None:
            self._put("settings", text)
            self.save(State(), State())
        elif found != text:
            before, now = _flat(json.loads(found)), _flat(json.loads(text))
            names = sorted(name for name in before | now if before.get(name) != now.get(name))
            raise DataError(
                f"{self._path.parent}: was begun with other settings ({', '.join(names)}). Give the same ones to go on, "
                "or remove that folder to begin anew."
            )

    def _state(self, name: str) -> State:
        text = self._get(name)
        assert text is not None, "a journal begins with a state"
        return State.read(text)

    def _units(self) -> list[tuple[int, ReadUnit]]:
        rows = self._database.execute("SELECT source, path, size, stamp FROM units ORDER BY number")
        return [(source, ReadUnit(path, size, stamp)) for source, path, size, stamp in rows]

    def _store_units(self, units: Sequence[tuple[int, ReadUnit]]) -> None:
        self._database.execute("DELETE FROM units")
        self._database.executemany("INSERT INTO units VALUES (?, ?, ?, ?, ?)", _rows(units))

    def _get(self, name: str) -> str | None:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _put(self, name: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Values of nested mappings by their dotted paths."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    inner = (_flat(each, f"{path}.{name}" if path else name) for name, each in value.items())
    return {name: each for part in inner for name, each in part.items()}


def _differs(before: tuple[int, ReadUnit], now: tuple[int, ReadUnit]) -> bool:
    return before != now


def _rows(units: Sequence[tuple[int, ReadUnit]]) -> Iterator[tuple[Any, ...]]:
    for number, (source, unit) in enumerate(units):
        yield number, source, unit.path, unit.size, unit.stamp
