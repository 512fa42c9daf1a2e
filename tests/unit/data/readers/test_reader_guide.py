"""The guide "A reader of data" in CONTRIBUTING.md, carried out: its CSV reader prepares a corpus from a recipe."""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_coca.data import DataError, Shard, load_tokenizer, prepare
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.preparation_plan import Execution
from megatron_coca.data.preparation.recipe import Recipe, read_recipe
from megatron_coca.data.readers import READERS
from tests.documents import ROOT, blocks

CHARACTERS = load_tokenizer("CharLevelTokenizer")


def source_of_the_guide() -> str:
    (source,) = [block for block in blocks("CONTRIBUTING.md", "python") if "class CsvReader(Reader)" in block]
    return source


@pytest.fixture
def csv_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps 1 and 2 of the guide: the module that the page shows, and its row in the table."""
    (tmp_path / "csv_of_the_guide.py").write_text(source_of_the_guide())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(READERS, "csv", importlib.import_module("csv_of_the_guide").CsvReader)
    yield
    sys.modules.pop("csv_of_the_guide")


def recipe(folder: Path, content: str, **keys: object) -> Recipe:
    (folder / "books.csv").write_text(content)
    source = {"reader": "csv", "paths": ["books.csv"], "fields": {"text": "body", "key": "title"}} | keys
    text = yaml.safe_dump(
        {"tokenizer_type": "CharLevelTokenizer", "valid_fraction": 0, "test_fraction": 0, "sources": {"books": source}}
    )
    (folder / "recipe.yml").write_text(text)
    return read_recipe(folder / "recipe.yml", root=folder)


def prepared(found: Recipe, folder: Path) -> Path:
    return prepare(found.sources, folder / "out", CHARACTERS, found.rules, Execution(progress=False)).parent


@pytest.mark.usefixtures("csv_reader")
def test_a_reader_made_by_the_guide_prepares_a_corpus(tmp_path: Path) -> None:
    many = "".join(f"t{n},book {n}\n" for n in range(1500))  # more than one chunk
    content = f'title,body\nfirst,"two\nlines"\nempty,\n{many}'
    out = prepared(recipe(tmp_path, content), tmp_path)
    shard = Shard(out / "books_train")
    texts = [CHARACTERS.decode(shard.document(number)) for number in range(shard.documents)]
    assert len(texts) == 1501 and texts[0].startswith("two\nlines") and texts[-1].startswith("book 1499")
    (facts,) = read_manifest(out / "manifest.json")["inputs"]
    assert facts["problems"] == {"empty text": 1} and facts["problems_named"][0].endswith("books.csv:2: empty text")


@pytest.mark.usefixtures("csv_reader")
def test_no_text_is_lost_without_a_word(tmp_path: Path) -> None:
    """Not that of a long field, a line break of another kind, a byte order mark, or a comma without quotes."""
    long = "x" * 200_000
    content = f'\ufefftitle,body\na,{long}\nb,"two\r\nlines"\nc,Hello, world\n' + "d,more\n" * 20
    out = prepared(recipe(tmp_path, content, fields={"text": "body", "key": "title"}), tmp_path)
    shard = Shard(out / "books_train")
    texts = [CHARACTERS.decode(shard.document(number)) for number in range(shard.documents)]
    assert len(texts[0]) >= len(long) and texts[1].startswith("two\r\nlines")
    (facts,) = read_manifest(out / "manifest.json")["inputs"]
    assert facts["problems"] == {"row too long": 1}
    assert "books.csv:3: row too long (" in facts["problems_named"][0]


@pytest.mark.usefixtures("csv_reader")
def test_a_damaged_file_and_a_foreign_key_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"books\.csv: cannot be read to its end"):
        prepared(recipe(tmp_path, 'title,body\na,"never closed\n'), tmp_path)
    with pytest.raises(DataError, match="csv does not use sets"):
        prepared(recipe(tmp_path, "title,body\na,b\n", sets=["one"]), tmp_path)


def test_the_package_imports_it(tmp_path: Path) -> None:
    """In the place that the guide names, it must not import what is being imported."""
    shutil.copytree(
        ROOT / "megatron_coca", tmp_path / "megatron_coca", ignore=shutil.ignore_patterns("__pycache__", "configs")
    )
    readers = tmp_path / "megatron_coca" / "data" / "readers"
    (readers / "csv_files.py").write_text(source_of_the_guide())
    table = (readers / "__init__.py").read_text()
    table = table.replace("\n\nREADERS", "\nfrom megatron_coca.data.readers.csv_files import CsvReader\n\nREADERS")
    (readers / "__init__.py").write_text(table.replace('    "files":', '    "csv": CsvReader,\n    "files":'))
    code = "from megatron_coca.data.readers import READERS; assert 'csv' in READERS"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PATH": ""}, check=True)
