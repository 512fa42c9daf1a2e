"""Data sets of Hugging Face: saved on disk, folders of data files, and names at the hub, by the ``datasets`` library."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.document import Document, Problems
from megatron_coca.data.readers.files import FileReader, Piece, file_unit
from megatron_coca.data.readers.folders import corpus_files, is_saved_dataset
from megatron_coca.data.readers.source import Chunk, SourceSpec, Unit
from megatron_coca.data.readers.streams import BLOCK
from megatron_coca.data.readers.tables import packed

OPTIONS = ("name", "split", "revision")
DEFAULT_SPLIT = "train"
_ROWS = 100  # read at once: a few hundred KB of articles, tens of MB of books
_FORM = ".arrow"


class HuggingFaceReader:
    """Reads what ``datasets`` reads, one split of it.

    ``spec.paths`` are folders that ``save_to_disk`` wrote (their Arrow files are read as files), other folders or files
    of data, or names at the hub; the last two are streamed, without a copy in the library's cache. ``spec.options``:
    ``name`` of the configuration, ``split`` (train), ``revision`` at the hub.

    Raises:
        DataError: an unknown option, and as ``FileReader``.
    """

    def __init__(self, spec: SourceSpec, block: int = BLOCK) -> None:
        if unknown := sorted(set(spec.options) - set(OPTIONS)):
            raise DataError(f"{spec.name}: unknown options {unknown} of huggingface. Known are {', '.join(OPTIONS)}.")
        self.spec, self._block = spec, block
        self._files = FileReader(spec, block)
        self._split = spec.options.get("split", DEFAULT_SPLIT)

    def units(self) -> list[Unit]:
        """One per Arrow file of a saved data set, else one per path, of size 0.

        Raises:
            DataError: a folder without this split, a name that neither the disk nor the hub knows, no network.
        """
        return [unit for path in self.spec.paths for unit in self._units(str(path))]

    def chunks(self, unit: Unit) -> Iterator[Chunk]:
        """Cut an Arrow file, or stream a data set. ``DataError`` where it cannot be read on."""
        if Path(unit.path).is_file() and unit.size:
            yield from self._files.chunks(unit)
            return
        number = 1
        with _reported(unit.path):
            for table in self._stream(unit).with_format("arrow").iter(batch_size=_ROWS):
                for batch in table.combine_chunks().to_batches():
                    for rows, data in packed(batch, 2 * self._block):
                        yield Chunk(unit.path, number, (Piece(_FORM, Chunk(unit.path, number, data, 0)),), 0)
                        number += rows

    def documents(self, chunk: Chunk, problems: Problems) -> Iterator[Document]:
        """The documents of a chunk; what cannot be used goes to ``problems``."""
        return self._files.documents(chunk, problems)

    def _units(self, path: str) -> list[Unit]:
        place = Path(path)
        if place.is_dir() and (saved := _saved_split(place, self._split)):
            return [file_unit(file) for file in corpus_files([saved])]
        if place.exists():
            return [Unit(path, 0, _stamp(place))]
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise DataError(f"{path}: no such file or folder. Check the path, or name a data set as owner/name.")
        return [Unit(path, 0, self._commit(path))]

    def _commit(self, name: str) -> str:
        """The hub's commit that the reading is pinned to."""
        with _reported(name):
            from huggingface_hub import HfApi

            return str(HfApi().dataset_info(name, revision=self.spec.options.get("revision")).sha)

    def _stream(self, unit: Unit) -> Any:
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
    listing = folder / "dataset_dict.json"
    if not listing.is_file():
        return None
    try:
        splits = json.loads(listing.read_text())["splits"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{listing}: cannot be read ({error!r}). Save the data set again.") from error
    if split not in splits:
        raise DataError(f"{folder}: no split {split!r}; there are {', '.join(splits)}. Set the option split.")
    return folder / split


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
