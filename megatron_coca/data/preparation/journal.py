"""The state of a preparation, in one SQLite file next to the growing shards, so that a kill at any moment is safe.

A transaction holds the position in the corpus, the sizes of the shards there, and the digests of the documents written
so far. The shards are flushed before it commits; what they contain beyond it is cut off when the preparation resumes.
"""

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import ReadUnit

JOURNAL = "journal.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS units (number INTEGER PRIMARY KEY, source INTEGER, path TEXT, size INTEGER, stamp TEXT);
CREATE TABLE IF NOT EXISTS digests (digest BLOB PRIMARY KEY, unit INTEGER) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class ShardState:
    """A growing shard: number of its source, set, split, and its size."""

    source: int
    part: str
    split: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class State:
    """A position: ``chunks`` of unit ``unit`` are done, and everything before it.

    ``findings`` has, by the name of the source, its ``ReadingProblems.facts`` so far and the sets that occurred.
    """

    unit: int = 0
    chunks: int = 0
    shards: tuple[ShardState, ...] = ()
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)


class Journal:
    """The journal in a folder, opened or created.

    Raises ``DataError`` where the file is damaged or was created with other ``settings``.
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
                f"{self._path}: cannot be used ({error}). Remove {self._path.parent}; start over."
            ) from error

    def close(self) -> None:
        """Close, discarding what was not saved."""
        self._database.close()

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer that was trained for this preparation, once it is saved."""
        return self._get("tokenizer")

    @tokenizer.setter
    def tokenizer(self, fingerprint: str) -> None:
        self._put("tokenizer", fingerprint)
        self._database.commit()

    def load(self, units: Sequence[tuple[int, ReadUnit]], limits: Mapping[str, int]) -> tuple[State, State]:
        """The position to resume from, and that at the beginning of its unit.

        Args:
            units: (number of the source, unit) as found now. Finished units must be unchanged. A unit that was being
                read is read again from its beginning if it changed; later ones may change, appear and disappear.
            limits: ``max_record_mib`` by source. Another limit may cut the current unit into other chunks, so that it
                is read again as well.
        """
        state, unit_begin = self._state("state"), self._state("unit_begin")
        rows = self._database.execute("SELECT source, path, size, stamp FROM units ORDER BY number")
        known = [(source, ReadUnit(os.fsdecode(path), size, stamp)) for source, path, size, stamp in rows]
        for number in range(state.unit):
            if number >= len(units) or known[number] != units[number]:
                raise DataError(
                    f"{known[number][1].path}: this file, or one before it, has changed since it was read. Restore it, "
                    f"or remove {self._path.parent} to start over."
                )
        longest = json.dumps(limits, sort_keys=True)
        changed = state.unit < len(known) and (
            known[state.unit : state.unit + 1] != list(units[state.unit : state.unit + 1])
            or self._get("longest records") != longest
        )
        self._put("longest records", longest)
        if changed and state.chunks:
            state = unit_begin
            self._database.execute("DELETE FROM digests WHERE unit >= ?", (state.unit,))
        self._database.execute("DELETE FROM units")
        values = [  # paths as bytes, since SQLite's text is UTF-8 and names of files need not be
            (number, source, os.fsencode(unit.path), unit.size, unit.stamp)
            for number, (source, unit) in enumerate(units)
        ]
        self._database.executemany("INSERT INTO units VALUES (?, ?, ?, ?, ?)", values)
        self.save(state, unit_begin)
        return state, unit_begin

    def save(self, state: State, unit_begin: State) -> None:
        """Commit the position, that at the beginning of its unit, and the digests since the last commit."""
        self._put("state", json.dumps(asdict(state)))
        self._put("unit_begin", json.dumps(asdict(unit_begin)))
        self._database.commit()

    def are_new(self, digests: Sequence[bytes], unit: int) -> np.ndarray:
        """Mask of the texts that have not occurred before, in this call or an earlier one: bool [texts]."""
        insert = "INSERT OR IGNORE INTO digests VALUES (?, ?)"
        cursor = self._database.cursor()
        return np.array([cursor.execute(insert, (digest, unit)).rowcount for digest in digests], dtype=bool)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True, default=str)
        stored = self._get("settings")
        if stored is None:
            self._put("settings", text)
            self.save(State(), State())
        elif stored != text:
            before, now = _flat(json.loads(stored)), _flat(json.loads(text))
            names = sorted(name for name in before | now if before.get(name) != now.get(name))
            raise DataError(
                f"{self._path.parent}: was started with other settings ({', '.join(names)}). Use the same settings to "
                "resume, or remove that folder to start over."
            )

    def _state(self, name: str) -> State:
        values = json.loads(self._get(name) or "{}")
        return State(**values | {"shards": tuple(ShardState(**shard) for shard in values["shards"])})

    def _get(self, name: str) -> str | None:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _put(self, name: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Values of nested mappings by their dotted paths."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flat(inner, f"{path}.{name}" if path else name)
    return flat
