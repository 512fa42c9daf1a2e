"""Folders: their readable files, and counts of the others."""

import os
import socket
from pathlib import Path

import pytest

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers import corpus_files, open_reader
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.folders import FileKind, kind_of
from megatron_coca.data.readers.source import SourceSpec, is_utf8


@pytest.mark.parametrize(
    ("name", "form", "compression"),
    [
        ("a/B.JSONL.ZST", ".jsonl", ".zst"),
        ("wiki.zst", "", ".zst"),
        ("a.tgz", ".tar", ".gz"),
        ("AA/wiki_00", ".jsonl", ""),
        ("AA/wiki_123.bz2", ".jsonl", ".bz2"),
        ("wiki_00.jsonl.gz", ".jsonl", ".gz"),
    ],
)
def test_formats_by_name(name: str, form: str, compression: str) -> None:
    assert kind_of(name) == FileKind(form, compression)


@pytest.mark.parametrize(
    "name", ["a", "wiki_0", "my_wiki_00", "a.csv.gz", "a.html.zst", "wiki.en.zst", "a.00.zst", "a.parquet.gz", ".zst"]
)
def test_unknown_names(name: str) -> None:
    assert kind_of(name) is None


def test_a_folder_stands_for_its_readable_files(tmp_path: Path) -> None:
    names = ["b/2.txt", "b/1.txt.gz", "a.txt", "c.csv", ".hidden.txt", ".git/d.txt", "README.md", "b/state.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    assert corpus_files([tmp_path]) == [tmp_path / name for name in ("a.txt", "b/1.txt.gz", "b/2.txt")]
    assert corpus_files([tmp_path / "b", tmp_path / "README.md"])[-1] == tmp_path / "README.md"


def test_names_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    os.mkdir(folder + b"/d\xff")
    for name in (b"good.txt", b"bad\xfe.txt", b"d\xff/inner.txt"):
        with open(folder + b"/" + name, "w") as file:
            file.write("text")
    reader = FileReader(SourceSpec("s", [tmp_path]))
    assert [unit.path for unit in reader.units()] == [str(tmp_path / "good.txt")]
    assert reader.unread() == {"name that is not UTF-8": 2}
    with pytest.raises(DataError, match=r"bad\\xfe.txt: .*not valid UTF-8; rename"):
        corpus_files([Path(os.fsdecode(folder + b"/bad\xfe.txt"))])


def test_what_is_not_read_in_a_folder_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    (inner / ".cache").mkdir(parents=True)
    names = ["a.zip", "B.ZIP", "c.htm", "d.csv.gz", "e.v2.zst", "f.0001", "g.00.zst", "LICENCE", ".h.txt", "README.md"]
    others = ["corpus-md5sum.txt", "SHA256SUMS.txt", "dataset_info.json", ".cache/i.txt"]
    for name in [*names, *others, "j.txt", "summary.txt"]:
        (inner / name).write_text("x")
    (inner / "gone.txt").symlink_to(inner / "nowhere.txt")
    (inner / "loop.txt").symlink_to(inner / "loop.txt")
    (inner / "good.txt").symlink_to(inner / "j.txt")
    os.mkfifo(inner / "pipe.jsonl")
    monkeypatch.chdir(inner)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket.jsonl")
    reader = FileReader(SourceSpec("s", [tmp_path]))
    assert [Path(unit.path).name for unit in reader.units()] == ["good.txt", "j.txt", "summary.txt"]
    assert reader.unread() == {
        "not a readable file (.zip)": 2,
        "not a readable file (.htm)": 1,
        "not a readable file (.csv.gz)": 1,
        "not a readable file (.v2.zst)": 1,
        "not a readable file (.zst)": 1,
        "not a readable file (no known ending)": 2,
        "hidden file": 1,
        "hidden folder": 1,
        "description of the data": 4,
        "dangling link": 2,
        "not a regular file": 2,
    }
    assert not FileReader(SourceSpec("s", [inner / "j.txt"])).unread()


def test_other_files_of_a_saved_data_set_are_counted(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    for name in ("dataset_info.json", "data.arrow", "cache-1.arrow"):
        (tmp_path / name).write_text("{}")
    reader = FileReader(SourceSpec("s", [tmp_path]))
    assert [Path(unit.path).name for unit in reader.units()] == ["data.arrow"]
    assert reader.unread() == {"next to a saved data set": 1, "description of the data": 2}


def test_a_folder_without_a_readable_file_tells_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"; 1 dangling link; 1 not a readable file \(\.csv\); check"):
        FileReader(SourceSpec("s", [tmp_path])).units()


@pytest.mark.parametrize("name", ["pipe.jsonl", "pipe.parquet", "wiki_00"])
def test_a_pipe_that_is_named_is_an_error(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: is a pipe or device, not a regular file"):
        FileReader(SourceSpec("s", [tmp_path / name])).units()


def test_a_dangling_link_that_is_named_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"a\.txt: no such file"):
        FileReader(SourceSpec("s", [tmp_path / "a.txt"])).units()


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("metadata", Path("m.jsonl"), "use the reader repositories"),
        ("options", {"split": "train"}, "use the reader huggingface"),
    ],
)
def test_unused_keys_are_errors(tmp_path: Path, key: str, value: object, remedy: str) -> None:
    with pytest.raises(DataError, match=f"s: the reader files does not use {key}; remove {key}, or {remedy}"):
        open_reader(SourceSpec("s", [tmp_path], **{key: value}))  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    listed = os.scandir

    def scandir(path: str):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="closed: the folder cannot be read"):
        corpus_files([tmp_path])


def test_names_in_utf8_are_read_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a locale with Latin-1, Python decodes the bytes of a name as Latin-1."""
    monkeypatch.setattr("megatron_coca.data.readers.source.os.fsencode", lambda name: str(name).encode("latin-1"))
    seen = "b\u00fccher".encode().decode("latin-1")
    assert is_utf8(seen) and not is_utf8("b\u00fccher")
    folder = tmp_path / seen
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    assert corpus_files([folder]) == [folder / "a.txt"]
