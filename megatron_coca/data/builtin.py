"""The embedded default corpus: English and code out of the running Python installation, without a download.

It is written as JSONL and then takes the same way as any other corpus (tokenizer, split by key, shards). Its split key
is the name of the top-level package in both sources, so that a module is wholly trained on or wholly held out, together
with the modules next to it, which share passages. The topics of ``help()`` quote one another and have one key.
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

from tqdm import tqdm

from megatron_coca.atomic_write import atomic_dir, exclusive_lock
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.manifest import MANIFEST, RUN_CONFIG, read_manifest
from megatron_coca.data.preparation.plan import SPLITS, CorpusSource, Execution, Rules, training_texts
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.readers.source import ReadingProblems, SourceSpec
from megatron_coca.data.shards import token_dtype
from megatron_coca.data.tokenizers.load import train_sentencepiece

# Tests and demos; what other projects installed; packages that not every Python of this version or the next one has.
SKIPPED_FOLDERS = frozenset(
    (
        *("test", "tests", "turtledemo", "dist-packages", "site-packages", "__pycache__"),
        *("distutils", "idlelib", "lib2to3", "tkinter", "pydoc_data"),
    )
)
# Tables and settings that a program wrote.
SKIPPED_FILES = ("encodings/cp*", "encodings/mac_*", "encodings/iso8859_*", "encodings/koi8*", "_sysconfigdata*")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path | None = None) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module, in sorted order; tests, demos and generated tables are left out."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or any(relative.match(pattern) for pattern in SKIPPED_FILES):
            continue
        yield ".".join(relative.with_suffix("").parts), path


def _docstring_nodes(tree: ast.Module) -> Iterator[tuple[_Documented, ast.Expr]]:
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            yield node, statement


def docstrings(tree: ast.Module) -> str:
    """All docstrings of a module in the order of the source, blank lines between them."""
    found = [(statement.lineno, ast.get_docstring(node)) for node, statement in _docstring_nodes(tree)]
    return "\n\n".join(text.strip() for _, text in sorted(found) if text and text.strip())


def without_docstrings(source: str, tree: ast.Module) -> str:
    """The source with every docstring cut out; a body that held nothing else keeps a ``pass``."""
    lines = source.encode().split(b"\n")
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line) + 1)
    remaining = bytearray(b"\n".join(lines))
    statements = sorted(_docstring_nodes(tree), key=lambda pair: pair[1].lineno, reverse=True)
    for node, statement in statements:
        assert statement.end_lineno is not None and statement.end_col_offset is not None
        begin = begins[statement.lineno - 1] + statement.col_offset
        end = begins[statement.end_lineno - 1] + statement.end_col_offset
        alone = len(node.body) == 1 and not isinstance(node, ast.Module)
        _cut(remaining, begin, end, b"pass" if alone else b"")
    return remaining.decode().strip("\n") + "\n"


def _cut(source: bytearray, begin: int, end: int, replacement: bytes) -> None:
    """Replace a statement; where nothing replaces it, take the rest of its line or the semicolon behind it as well."""
    if not replacement:
        rest = source[end : _line_end(source, end)].lstrip()
        if rest.startswith(b";"):
            end = source.index(b";", end) + 1
            while source[end : end + 1] == b" ":
                end += 1
        elif not rest:
            end = min(_line_end(source, end) + 1, len(source))
            begin = source.rfind(b"\n", 0, begin) + 1
    source[begin:end] = replacement


def _line_end(source: bytearray, position: int) -> int:
    found = source.find(b"\n", position)
    return len(source) if found < 0 else found


def read_module(path: Path, problems: ReadingProblems) -> tuple[str, str]:
    """(docstrings, source without them) of one file; two empty strings where it does not parse, which is reported."""
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the library's own escapes: not ours to mend
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        problems.add(str(path), "not a source of this Python", str(error))
        return "", ""
    return docstrings(tree), without_docstrings(source, tree)


def topics() -> dict[str, str]:
    """The language reference behind ``help()``, by topic."""
    try:
        from pydoc_data.topics import topics as by_name
    except ImportError as error:
        raise DataError(
            "This Python has no pydoc_data, part of its standard library. Install the full Python, or prepare a corpus "
            "of your own with tools/prepare_data.py --input."
        ) from error
    return dict(sorted(by_name.items()))


_LOGGER = logging.getLogger(__name__)

FOLDER = "builtin"
SOURCES = ("text", "code")
WEIGHTS = (0.75, 0.25)  # by tokens: the paper's mixture
VOCAB_SIZE = 1024
TEST_FRACTION = 0.1  # larger than for a large corpus, so that long documents are held out in both sources
_TOKENIZER_CHARACTERS = 2_000_000
_MIN_CHARACTERS = 200


def _records(problems: ReadingProblems, progress: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(source, record) of every document."""
    origin = {"python": platform.python_version()}
    for name, text in topics().items():
        yield "text", {"text": text, "key": "pydoc_data", "meta": origin | {"topic": name}}
    found = list(modules())
    for name, path in tqdm(found, desc="read the standard library", unit="module", disable=not progress):
        for source, text in zip(SOURCES, read_module(path, problems), strict=True):
            yield source, {"text": text, "key": name.partition(".")[0], "meta": origin | {"module": name}}


def _write_jsonl(folder: Path, progress: bool) -> list[CorpusSource]:
    """Write ``<source>.jsonl``, without documents that are very short or the same as an earlier one."""
    seen: set[bytes] = set()
    problems = ReadingProblems()
    paths = {source: folder / f"{source}.jsonl" for source in SOURCES}
    with paths["text"].open("w") as text, paths["code"].open("w") as code:
        streams = {"text": text, "code": code}
        for source, record in _records(problems, progress):
            digest = hashlib.sha256(record["text"].encode()).digest()
            if len(record["text"]) >= _MIN_CHARACTERS and digest not in seen:
                seen.add(digest)
                streams[source].write(json.dumps(record) + "\n")
    for line in problems.named:
        _LOGGER.warning("left out of the built-in corpus: %s", line)
    return [
        CorpusSource(SourceSpec(name, [paths[name]]), weight) for name, weight in zip(SOURCES, WEIGHTS, strict=True)
    ]


def prepare_builtin(root: Path, vocab_size: int = VOCAB_SIZE, progress: bool = True) -> Path:
    """Make ``<root>/builtin``: text.jsonl, code.jsonl, tokenizer.model, shards/. It appears only when complete.

    Returns:
        Path of ``<root>/builtin/shards/manifest.json``.

    Raises:
        DataError: ``<root>/builtin`` exists or cannot be written.
    """
    final = Path(root) / FOLDER
    with atomic_dir(final, DataError) as folder:
        sources = _write_jsonl(folder, progress)
        rules = Rules(valid_fraction=0, test_fraction=TEST_FRACTION, strict=True)
        texts = training_texts(sources, rules, _TOKENIZER_CHARACTERS)
        tokenizer = train_sentencepiece(texts, vocab_size, folder / "tokenizer.model")
        prepare(sources, folder / "shards", tokenizer, rules, Execution(progress=progress))
        (folder / "shards" / RUN_CONFIG).unlink()  # configs/data/builtin.yml stands for it
    return final / "shards" / MANIFEST


def ensure_builtin(root: Path, vocab_size: int = VOCAB_SIZE, progress: bool = True) -> Path:
    """The manifest of the built-in corpus under ``root``, prepared by the first of any number of processes that ask.

    Raises:
        DataError: what is there has another vocabulary size or is damaged; the message says what to remove.
    """
    folder = Path(root) / FOLDER
    if not folder.exists():
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            with exclusive_lock(Path(root) / f".{FOLDER}.wait.lock", DataError, busy=None, temporary=True):
                if not folder.exists():
                    return prepare_builtin(root, vocab_size, progress)
        except OSError as error:
            raise DataError(f"{root}: cannot be written ({error}). Choose another data_root.") from error
    return _checked(folder, vocab_size)


def _checked(folder: Path, vocab_size: int) -> Path:
    """The manifest's path, when the files that it names are there in full; reads no token."""
    path = folder / "shards" / MANIFEST
    try:
        manifest = read_manifest(path)
    except DataError as error:
        raise DataError(f"{error} Remove {folder}; it is made anew when it is asked for.") from error
    found = manifest["tokenizer"]["vocab_size"]
    if found != vocab_size:
        raise DataError(
            f"{folder}: prepared with {found} tokens, asked for {vocab_size}. Remove it, or set vocab_size."
        )
    for report in (entry[split] for entry in manifest["sources"] for split in SPLITS if entry[split]["documents"]):
        shard = path.parent / f"{report['prefix']}.bin"
        due = report["tokens"] * token_dtype(vocab_size)().itemsize
        if not shard.is_file() or not shard.with_suffix(".idx").is_file() or shard.stat().st_size != due:
            raise DataError(f"{shard}: missing or truncated. Remove {folder}; it is made anew when it is asked for.")
    return path
