"""The built-in corpus: English and code from the running Python installation, without a download.

The corpus is written as JSONL and then prepared like any other corpus. Modules of one package often contain the same
passages. Therefore the split key is the name of the top-level package, which keeps these modules in the same split. The
topics of `help()` quote one another, so they all have the same key.
"""

import ast
import hashlib
import json
import logging
import platform
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.manifest import MANIFEST, RUN_CONFIG, read_manifest
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules, training_texts
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.readers.source import ReadingProblems, SourceSpec
from megatron_coca.data.tokenizers import train_sentencepiece
from megatron_coca.support.console import Progress
from megatron_coca.support.errors import why_not_written
from megatron_coca.work.folders import atomic_dir
from megatron_coca.work.locks import exclusive_lock

# Folders with tests, demos, packages of other projects, and packages that are missing from some builds or from the next
# version of Python.
SKIPPED_FOLDERS = frozenset(
    (
        *("test", "tests", "turtledemo", "dist-packages", "site-packages", "__pycache__"),
        *("distutils", "idlelib", "lib2to3", "tkinter", "pydoc_data"),
    )
)
# Generated tables and build settings.
SKIPPED_FILES = ("encodings/cp*", "encodings/mac_*", "encodings/iso8859_*", "encodings/koi8*", "_sysconfigdata*")

FOLDER = "builtin"
SOURCES = ("text", "code")
WEIGHTS = (0.75, 0.25)  # shares of the training tokens, as in the paper
VOCAB_SIZE = 1024
TEST_FRACTION = 0.1  # large, so that the test split of this small corpus has long documents from both sources
_TOKENIZER_CHARACTERS = 2_000_000
_MIN_CHARACTERS = 200
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_LOGGER = logging.getLogger(__name__)


def _docstring_nodes(tree: ast.Module) -> Iterator[tuple[_Documented, ast.Expr]]:
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            yield node, statement


def docstrings(tree: ast.Module) -> str:
    """Return all docstrings of a module in source order, separated by blank lines."""
    by_line = sorted((statement.lineno, ast.get_docstring(node)) for node, statement in _docstring_nodes(tree))
    return "\n\n".join(text.strip() for _, text in by_line if text and text.strip())


def without_docstrings(source: str, tree: ast.Module) -> str:
    """Remove every docstring from the source. A body that becomes empty gets `pass`."""
    lines = source.encode().split(b"\n")
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    remaining = bytearray(b"\n".join(lines))
    for node, statement in sorted(_docstring_nodes(tree), key=lambda pair: pair[1].lineno, reverse=True):
        assert statement.end_lineno is not None and statement.end_col_offset is not None
        begin = offsets[statement.lineno - 1] + statement.col_offset
        end = offsets[statement.end_lineno - 1] + statement.end_col_offset
        if len(node.body) == 1 and not isinstance(node, ast.Module):
            remaining[begin:end] = b"pass"
            continue
        # Remove the rest of the line as well, or the semicolon before the next statement.
        line_end = remaining.find(b"\n", end)
        line_end = len(remaining) if line_end < 0 else line_end
        rest = remaining[end:line_end].lstrip()
        if rest.startswith(b";"):
            end = remaining.index(b";", end) + 1
            while remaining[end : end + 1] == b" ":
                end += 1
        elif not rest:
            end = min(line_end + 1, len(remaining))
            begin = remaining.rfind(b"\n", 0, begin) + 1
        remaining[begin:end] = b""
    return remaining.decode().strip("\n") + "\n"


def _read_module(path: Path, problems: ReadingProblems) -> tuple[str, str]:
    """Return (docstrings, source without docstrings) of a file. If the file cannot be parsed, it is added to
    `problems`, and both strings are empty.
    """
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # the standard library contains invalid escapes
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        problems.add(str(path), "cannot be parsed by this version of Python", str(error))
        return "", ""
    return docstrings(tree), without_docstrings(source, tree)


def _records(problems: ReadingProblems, progress: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (source, record) for every document. The topics of `help()` come first, then the modules of the standard
    library.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "built-in corpus: this Python installation lacks pydoc_data, a part of the standard library; install "
            "the complete Python, or prepare your own corpus with `megatron-coca prepare --input`"
        ) from error
    origin = {"python": platform.python_version()}
    for name, text in sorted(topics.items()):
        yield "text", {"text": text, "key": "pydoc_data", "meta": origin | {"topic": name}}
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
        and not any(path.relative_to(root).match(pattern) for pattern in SKIPPED_FILES)
    ]
    progress.total = len(paths)
    for path in paths:
        progress.advance()
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        for source, text in zip(SOURCES, _read_module(path, problems), strict=True):
            yield source, {"text": text, "key": name.partition(".")[0], "meta": origin | {"module": name}}


def _write_jsonl(folder: Path, progress: bool) -> list[CorpusSource]:
    """Write `<source>.jsonl` for each source, without very short documents and without exact duplicates."""
    seen: set[bytes] = set()
    problems = ReadingProblems()
    paths = {source: folder / f"{source}.jsonl" for source in SOURCES}
    modules = Progress("reading the standard library", unit="modules", show=progress)
    with paths["text"].open("w", encoding="utf-8") as text, paths["code"].open("w", encoding="utf-8") as code, modules:
        streams = {"text": text, "code": code}
        for source, record in _records(problems, modules):
            digest = hashlib.sha256(record["text"].encode()).digest()
            if len(record["text"]) >= _MIN_CHARACTERS and digest not in seen:
                seen.add(digest)
                streams[source].write(json.dumps(record) + "\n")
    for line in problems.named:
        _LOGGER.warning("left out of the built-in corpus, which is complete without this file: %s", line)
    return [
        CorpusSource(SourceSpec(name, [paths[name]]), weight) for name, weight in zip(SOURCES, WEIGHTS, strict=True)
    ]


def prepare_builtin(root: Path, vocab_size: int = VOCAB_SIZE, progress: bool = True) -> Path:
    """Create `<root>/builtin` with text.jsonl, code.jsonl, tokenizer.model and shards/. The folder does not appear
    before it is complete.

    Returns the path of the manifest, `<root>/builtin/shards/manifest.json`. Raises `DataError` if `<root>/builtin`
    exists or cannot be written.
    """
    final = builtin_folder(root)
    with atomic_dir(final, DataError) as folder:
        sources = _write_jsonl(folder, progress)
        rules = Rules(valid_fraction=0, test_fraction=TEST_FRACTION, strict=True)
        texts = training_texts(sources, rules, _TOKENIZER_CHARACTERS)
        tokenizer = train_sentencepiece(texts, vocab_size, folder / "tokenizer.model", show=progress)
        prepare(sources, folder / "shards", tokenizer, rules, Execution(progress=progress))
        (folder / "shards" / RUN_CONFIG).unlink()  # configs/data/builtin.yml replaces it
    return final / "shards" / MANIFEST


def builtin_folder(root: Path) -> Path:
    return Path(root) / FOLDER


def ensure_builtin(root: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Return the path of the manifest of the built-in corpus under `root`. A missing corpus is prepared first; if
    several processes call this function, only one of them prepares the corpus.

    Raises `DataError` if the existing corpus has a different vocabulary size or is damaged.
    """
    folder = builtin_folder(root)
    if not folder.exists():
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            with exclusive_lock(Path(root) / f".{FOLDER}.wait.lock", DataError, busy=None, temporary=True):
                if not folder.exists():
                    return prepare_builtin(root, vocab_size)
        except OSError as error:
            raise DataError(f"{root}: {why_not_written(error, 'choose another data_root')}") from error
    path = folder / "shards" / MANIFEST
    try:
        manifest = read_manifest(path)
    except DataError as error:
        raise DataError(
            f"{folder}: damaged ({error}); remove the folder, which is recreated when it is needed"
        ) from error
    prepared = manifest["tokenizer"]["vocab_size"]
    if prepared != vocab_size:
        raise DataError(
            f"{folder}: prepared with a vocabulary size of {prepared}, not {vocab_size}; remove the folder, or set "
            f"vocab_size to {prepared}"
        )
    return path
