"""Data sets of Hugging Face: saved on disk, folders of data files, and names at the hub, by the ``datasets`` library."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.compression import COMPRESSIONS
from megatron_coca.data.readers.files import FileReader, file_unit
from megatron_coca.data.readers.folders import corpus_files, is_saved_dataset, kind_of, saved_splits
from megatron_coca.data.readers.source import Chunk, Document, ReadingProblems, ReadUnit, SourceSpec, check_keys
from megatron_coca.data.readers.streams import BLOCK
from megatron_coca.data.readers.tables import packed

OPTIONS = ("name", "split", "revision")
DEFAULT_SPLIT = "train"
_ROWS = 100  # read at once: a few hundred KB of articles, tens of MB of books
_FORM = ".arrow"
_FILE_SUFFIXES = frozenset((*COMPRESSIONS, ".csv", ".tsv", ".zip", ".7z", ".rar", ".html", ".py"))


class HuggingFaceReader:
    """Reads what ``datasets`` reads, one split of it.

    ``spec.paths`` are folders that ``save_to_disk`` wrote (their Arrow files are read as files), other folders or files
    of data, or names at the hub; the last two are streamed, without a copy in the library's cache. ``spec.options``:
    ``name`` of the configuration, ``split`` (train), ``revision`` at the hub.

    Raises:
        DataError: an unknown option, a key that means nothing here, and as ``FileReader``.
    """

    def __init__(self, spec: SourceSpec, block: int = BLOCK) -> None:
        check_keys(spec, "huggingface")
        if unknown := sorted(set(spec.options) - set(OPTIONS)):
            raise DataError(f"{spec.name}: unknown options {unknown} of huggingface. Known are {', '.join(OPTIONS)}.")
        self.spec, self._block = spec, block
        self._files = FileReader(replace(spec, options={}), block)
        self._split = spec.options.get("split", DEFAULT_SPLIT)

    def units(self) -> list[ReadUnit]:
        """One per Arrow file of a saved data set, else one per path, of size 0.

        Raises:
            DataError: a folder without this split, a name that neither the disk nor the hub knows, no network.
        """
        return [unit for path in self.spec.paths for unit in self._units(str(path))]

    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Cut an Arrow file, or stream a data set. ``DataError`` where it cannot be read on."""
        if Path(unit.path).is_file() and unit.size:
            yield from self._files.chunks(unit)
            return
        number = 1
        with _reported(unit.path):
            for table in self._stream(unit).with_format("arrow").iter(batch_size=_ROWS):
                for batch in table.combine_chunks().to_batches():
                    for rows, data in packed(batch, 2 * self._block, self.spec.max_record):
                        piece = self._files.typed_chunk(_FORM, unit.path, number, data)
                        yield Chunk(unit.path, number, (piece,), 0)
                        number += rows

    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        """The documents of a chunk; what cannot be used goes to ``problems``."""
        return self._files.documents(chunk, problems)

    def unread(self) -> Counter[str]:
        """None: which files of a folder belong to a data set, its description or ``datasets`` decides."""
        return Counter()

    def _units(self, path: str) -> list[ReadUnit]:
        place = Path(path)
        if place.is_dir() and (saved := _saved_split(place, self._split)):
            return [file_unit(file) for file in corpus_files([saved])]
        if place.exists():
            return [ReadUnit(path, 0, _stamp(place))]
        if path.startswith((".", "/", "~")) or path.count("/") > 1 or _is_file_name(path):
            raise DataError(f"{path}: no such file or folder. Check the path, or name a data set as owner/name.")
        return [ReadUnit(path, 0, self._commit(path))]

    def _commit(self, name: str) -> str:
        """The hub's commit that the reading is pinned to."""
        with _reported(name):
            from huggingface_hub import HfApi

            return str(HfApi().dataset_info(name, revision=self.spec.options.get("revision")).sha)

    def _stream(self, unit: ReadUnit) -> Any:
        datasets = _datasets()
        place = Path(unit.path)
        where: dict[str, Any] = {"path": unit.path, "revision": unit.stamp}
        if place.exists():
            where = {"path": str(place)} if place.is_dir() else {"path": str(place.parent), "data_files": place.name}
        stream = datasets.load_dataset(**where, name=self.spec.options.get("name"), split=self._split, streaming=True)
        names = stream.column_names
        return stream.select_columns(self._files.columns(names, unit.path)) if names else stream


def _saved_split(folder: Path, split: str) -> Path | None:
    """The folder that holds a saved split; None where ``folder`` is no saved data set."""
    if is_saved_dataset(folder):
        return folder
    splits = saved_splits(folder)
    if not splits:
        return None
    if split not in splits:
        raise DataError(f"{folder}: no split {split!r}; there are {', '.join(splits)}. Set the option split.")
    return folder / split


def _is_file_name(path: str) -> bool:
    """Whether this can only be meant as a file: names at the hub may hold dots as well, but not end like one."""
    return kind_of(path) is not None or Path(path).suffix.lower() in _FILE_SUFFIXES


def _stamp(place: Path) -> str:
    files = sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
    facts = [(unit.path, unit.stamp) for unit in map(file_unit, files)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("Reading data sets of Hugging Face needs the library: pip install datasets") from error
    return datasets


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    _datasets()
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library has no base class of its errors, and passes on those of others
        raise DataError(
            f"{path}: datasets cannot read it ({type(error).__name__}: {error}). Check the name, the split, and the "
            "network for a name at the hub."
        ) from error
