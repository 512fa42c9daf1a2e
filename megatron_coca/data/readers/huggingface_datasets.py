"""The reader for Hugging Face data sets on disk or on the Hub. It uses the library `datasets`."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.columnar_files import packed
from megatron_coca.data.readers.files import FileReader, TypedChunk, file_unit
from megatron_coca.data.readers.folders import corpus_files, is_saved_dataset, kind_of, saved_splits
from megatron_coca.data.readers.source import Chunk, Document, Reader, ReadingProblems, ReadUnit, SourceSpec
from megatron_coca.data.readers.streams import BLOCK
from megatron_coca.support.regular_files import inside

OPTIONS = ("name", "split", "revision")
DEFAULT_SPLIT = "train"
_ROWS = 100  # rows that are read at a time, which are a few hundred KB of articles, or tens of MB of books
_FORM = ".arrow"
HUB_DATA = "hf://datasets/"


class HuggingFaceReader(Reader):
    """Reads one split of a data set with the library `datasets`.

    `spec.paths` are folders that `save_to_disk` wrote, other data files or folders, or names of data sets on the Hub.
    The Arrow files from `save_to_disk` are read directly. All other data is streamed without a copy in the cache of the
    library. `spec.options` are the `name` of the data set's configuration, the `split` (default: train) and the
    `revision` on the Hub. Raises `DataError` for an unknown option, and for the other reasons that
    `FileReader` lists.
    """

    uses = frozenset(("fields", "sets", "divide", "options", "messages"))

    def __init__(self, spec: SourceSpec) -> None:
        if unknown := sorted(set(spec.options) - set(OPTIONS)):
            raise DataError(
                f"{spec.name}: unknown options {unknown} for the reader huggingface; supported options: "
                f"{', '.join(OPTIONS)}"
            )
        self.spec = spec
        self._files = FileReader(replace(spec, options={}))
        self._split = spec.options.get("split", DEFAULT_SPLIT)

    def units(self) -> list[ReadUnit]:
        """List the units. Each Arrow file of a saved data set is a unit. Every other path is one unit of size 0.

        Raises `DataError` if a folder does not have the requested split, if a name is neither on disk nor on the Hub,
        or if the Hub cannot be reached.
        """
        units = []
        for name in map(str, self.spec.paths):
            path = Path(name)
            if path.is_dir() and (is_saved_dataset(path) or saved_splits(path)):
                units += [file_unit(file) for file in corpus_files([self._saved_split(path)])]
            elif path.exists():
                units.append(ReadUnit(name, 0, _stamp(path)))
            else:
                if name.startswith((".", "/", "~")) or name.count("/") > 1 or kind_of(name) is not None:
                    raise DataError(
                        f"{name}: no such file or folder; check the path, or name a data set on the Hub as owner/name"
                    )
                with _reported(name):
                    from huggingface_hub import HfApi

                    # The stamp is the commit. This commit is read even if the revision points to another commit later.
                    commit = HfApi().dataset_info(name, revision=self.spec.options.get("revision")).sha
                units.append(ReadUnit(name, 0, str(commit)))
        return units

    def stamp(self, unit: ReadUnit) -> str:
        path = Path(unit.path)
        if not path.exists():
            return unit.stamp  # a data set on the Hub: the same commit is always read
        return file_unit(path).stamp if unit.size else _stamp(path)

    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Cut an Arrow file into chunks, or stream a data set. Raises `DataError` if reading fails."""
        if Path(unit.path).is_file() and unit.size:
            yield from self._files.chunks(unit)
            return
        number = 1
        with _reported(unit.path):
            for table in self._stream(unit).with_format("arrow").iter(batch_size=_ROWS):
                for batch in table.combine_chunks().to_batches():
                    for rows, data in packed(batch, 2 * BLOCK, self.spec.max_record):
                        payload = (TypedChunk(_FORM, Chunk(unit.path, number, data, 0)),)
                        yield Chunk(unit.path, number, payload, 0)
                        number += rows

    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        return self._files.documents(chunk, problems)

    def _saved_split(self, folder: Path) -> Path:
        if is_saved_dataset(folder):
            return folder
        splits = saved_splits(folder)
        if self._split not in splits:
            raise DataError(
                f"{folder}: has no split {self._split!r}; set the option split to one of {', '.join(splits)}"
            )
        return inside(folder, self._split, DataError)

    def _stream(self, unit: ReadUnit) -> Any:
        import datasets

        path = Path(unit.path)
        root = os.path.realpath(path if path.is_dir() else path.parent) if path.exists() else f"{HUB_DATA}{unit.path}@"
        source: dict[str, Any] = {"path": unit.path, "revision": unit.stamp}
        if path.exists():
            source = {"path": str(path)} if path.is_dir() else {"path": str(path.parent), "data_files": path.name}
        with _only_below(root):
            options = {"name": self.spec.options.get("name"), "split": self._split}
            stream = datasets.load_dataset(**source, **options, streaming=True)
        names = stream.column_names
        return stream.select_columns(self._files.fields.columns(names, unit.path)) if names else stream


@contextlib.contextmanager
def _only_below(root: str) -> Iterator[None]:
    """Let `datasets` find files only below `root`, because the metadata in a data set's README.md can name any file or
    URL.
    """
    import datasets

    resolve = datasets.data_files.resolve_pattern

    def checked(pattern: str, base_path: str, *args: Any, **kwargs: Any) -> list[str]:
        relative = "://" not in pattern and "::" not in pattern and not os.path.isabs(pattern)
        place = f"{base_path}/{pattern}" if relative else pattern
        local = "://" not in place
        found = os.path.abspath(f"{os.path.realpath(base_path)}/{pattern}" if relative else place) if local else place
        within = Path(found).is_relative_to(root) if local else found.startswith(root) and ".." not in found.split("/")
        if not within or "::" in found:
            raise DataError(
                f"{root}: the description of the data set names {pattern}, which is outside the data set; read that "
                "file as a source of its own if you trust the data set"
            )
        return resolve(pattern, base_path, *args, **kwargs)

    datasets.data_files.resolve_pattern = checked
    try:
        yield
    finally:
        datasets.data_files.resolve_pattern = resolve


def _stamp(path: Path) -> str:
    """Return the stamp of a file, or of all files in a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stamps = [(unit.path, unit.stamp) for unit in map(file_unit, files)]
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise DataError("huggingface: the library datasets is not installed; run `pip install datasets`") from error
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the errors of the library have no common base class
        raise DataError(
            f"{path}: cannot be read by datasets ({type(error).__name__}: {error}); check the name, the split and, "
            "for the Hub, the network"
        ) from error
