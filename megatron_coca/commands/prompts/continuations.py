"""Print the continuations of `generate`, or write them to a JSONL file one by one and resume from that file."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_coca.evaluation.results import EvaluationError, check_writable, write_atomically
from megatron_coca.support.plain_text import plain
from megatron_coca.support.regular_files import read_regular
from megatron_coca.work.locks import exclusive_lock, lock_file

SHOWN = 60
"""Maximum number of prompt characters in the heading of a continuation."""

ContinuationRecord = dict[str, Any]
ContinuationKey = tuple[str, int]
"""A prompt, and the number of earlier prompts with the same text."""


def keys_of(prompts: Sequence[str]) -> list[ContinuationKey]:
    """Return the key of each prompt."""
    times, keys = Counter[str](), []
    for prompt in prompts:
        keys.append((prompt, times[prompt]))
        times[prompt] += 1
    return keys


class Continuations(Protocol):
    """A receiver of continuations.

    Attributes:
        finished: the places of prompts that already have their continuations.
    """

    finished: set[int]

    def add(self, place: int, record: ContinuationRecord) -> None:
        """Receive the continuation of the prompt at `place`."""


class Printed:
    """Prints continuations in the order of the prompts, each as soon as all earlier continuations are complete."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.finished: set[int] = set()
        self._prompts, self._waiting, self._next = prompts, dict[int, ContinuationRecord](), 0
        self._show = plain if sys.stdout.isatty() else str  # a file or another program receives the unchanged text

    def add(self, place: int, record: ContinuationRecord) -> None:
        self._waiting[place] = record
        while self._next in self._waiting:
            self._print(self._next)
            self._next += 1

    def end(self) -> None:
        """If the command was interrupted, print the complete continuations that still wait for earlier ones."""
        for place in sorted(self._waiting):
            self._print(place)

    def _print(self, place: int) -> None:
        text, total = self._waiting.pop(place)["text"], len(self._prompts)
        if total == 1:
            print(self._show(text), flush=True)
            return
        heading = " ".join(self._prompts[place].split())
        heading = heading if len(heading) <= SHOWN else heading[: SHOWN - 3] + "..."
        print(self._show(f"[{place + 1}/{total}] {heading}\n{text}\n"), flush=True)


class ContinuationsFile:
    """A JSONL file. Each continuation is written to it when it is complete. At the end, the lines are sorted in the
    order of the prompts.
    """

    def __init__(
        self,
        path: Path,
        keys: Sequence[ContinuationKey],
        settings: str,
        file: IO[str],
        found: Mapping[ContinuationKey, ContinuationRecord],
    ):
        self._path, self._keys, self._settings, self._file = path, keys, settings, file
        self._records = {place: found[key] for place, key in enumerate(keys) if key in found}
        self.finished = set(self._records)

    def add(self, place: int, record: ContinuationRecord) -> None:
        self._records[place] = record | {"sample": self._keys[place][1], "settings": self._settings}
        self._file.write(_line(self._records[place]))
        self._file.flush()

    def end(self) -> None:
        """Sort the file, or say how many continuations an interrupted command has written."""
        done, total = len(self._records), len(self._keys)
        if done < total:
            note = f"{self._path}: {done} of {total} continuations are complete; the same command adds the others"
            print(f"megatron-coca generate: {note}", file=sys.stderr)
            return
        write_atomically(self._path, "".join(_line(self._records[place]) for place in range(total)).encode())
        print(f"{self._path}: {total} continuations")


@contextmanager
def written_to(path: Path, prompts: Sequence[str], settings: str, overwrite: bool) -> Iterator[Continuations]:
    """Open the JSONL file at `path` for the continuations of `prompts`, and sort it at the end of the block.

    `settings` is a digest of everything that a continuation depends on, except its prompt. A file with continuations of
    the same prompts and settings is resumed. Raises EvaluationError if the file has other content and `overwrite` is
    not set, or if it cannot be written.
    """
    check_writable(path)
    keys, busy = keys_of(prompts), f"{path}: another process is writing it; wait for it, or name another --output"
    with ExitStack() as stack:
        stack.enter_context(exclusive_lock(lock_file(path), EvaluationError, busy, temporary=True))
        found = _found(path, set(keys), settings, overwrite)
        write_atomically(path, "".join(map(_line, found.values())).encode())  # without an incomplete last line
        try:
            with path.open("a", encoding="utf-8") as file:
                written = ContinuationsFile(path, keys, settings, file, found)
                try:
                    yield written
                finally:
                    written.end()
        except OSError as error:
            raise EvaluationError(
                f"{path}: cannot be written ({error.strerror}); free some space, and the same command continues"
            ) from error


@contextmanager
def printed(prompts: Sequence[str]) -> Iterator[Continuations]:
    """Print the continuations of `prompts` in the block."""
    shown = Printed(prompts)
    try:
        yield shown
    finally:
        shown.end()


def _line(record: ContinuationRecord) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _found(
    path: Path, keys: set[ContinuationKey], settings: str, overwrite: bool
) -> dict[ContinuationKey, ContinuationRecord]:
    """Return the continuations in a file; none if the file may be replaced. An incomplete last line is ignored."""
    if not path.exists():
        return {}
    remedy = "name another --output, or replace the file with --overwrite"
    try:
        lines = read_regular(path).decode().split("\n")[:-1]
        records = [json.loads(line) for line in lines]
        if any(record["settings"] != settings for record in records):
            raise EvaluationError(f"{path}: contains continuations with another checkpoint or other options; {remedy}")
        found = {(str(record["prompt"]), int(record["sample"])): record for record in records}
        if others := found.keys() - keys:
            raise EvaluationError(f"{path}: contains continuations of {len(others)} other prompts; {remedy}")
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror}); name another --output") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if overwrite:
            return {}
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{path}: is not an output of this command; {remedy}") from error
    return found
