"""Folders of repositories to documents."""

import json
import os
import pickle
import shutil
import sysconfig
from pathlib import Path

import pytest

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers import open_reader, repositories
from megatron_coca.data.readers.source import Document, Filters, ReadingProblems, SourceSpec


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def spec(*roots: Path, **other) -> SourceSpec:
    return SourceSpec("code", roots, reader="repositories", **other)


def read(given: SourceSpec, strict: bool = False) -> tuple[list[Document], ReadingProblems]:
    reader, problems = open_reader(given), ReadingProblems(strict)
    worker = pickle.loads(pickle.dumps(reader))
    chunks = [chunk for unit in reader.units() for chunk in reader.chunks(unit)]
    chunks = pickle.loads(pickle.dumps(chunks))
    return [document for chunk in chunks for document in worker.documents(chunk, problems)], problems


TREE: dict[str, str | bytes] = {
    "flat/b.py": "b = 1\n",
    "flat/a.c": "int a;\n",
    "flat/.git/config": "[core]\n",
    "flat/sub/deep/c.rs": "fn c() {}\n",
    "owner/one/x.go": "package x\n",
    "owner/two/.git/HEAD": "ref\n",
    "owner/two/lib/y.js": "let y;\n",
}


def test_repositories_are_found_by_name_or_owner(tmp_path: Path) -> None:
    documents, problems = read(spec(write(tmp_path, TREE)))
    assert [(d.key, d.text) for d in documents] == [
        ("flat", "int a;\n"),
        ("flat", "b = 1\n"),
        ("flat", "fn c() {}\n"),
        ("owner/one", "package x\n"),
        ("owner/two", "let y;\n"),
    ]
    assert problems.filtered == {"version control": 2} and not problems.total
    reader = open_reader(spec(tmp_path))
    assert [u.path for u in reader.units()] == [str(tmp_path / n) for n in ("flat", "owner/one", "owner/two")]


def test_a_repository_may_be_named_itself(tmp_path: Path) -> None:
    documents, _ = read(spec(write(tmp_path, TREE) / "flat"))
    assert [d.key for d in documents] == ["flat"] * 3


def test_skipped_files_are_counted(tmp_path: Path) -> None:
    root = write(
        tmp_path / "all",
        {
            "README": "of none",
            "r/a.png": b"\x89PNG\0",
            "r/b.py": b"x = '\0'\n",
            "r/latin.py": "# é\n".encode("latin-1"),
            "r/empty.py": " \n",
            "r/notebook.ipynb": "{}",
            "r/LICENSE": "Take it.\n",
            "r/tool": "#!/bin/sh\necho\n",
            "r/bom.py": b"\xef\xbb\xbfx = 1\n",
        },
    )
    write(tmp_path / "secret", {"s.py": "secret = 1\n"})
    (root / "r" / "link.py").symlink_to(tmp_path / "secret" / "s.py")
    (root / "r" / "loop").symlink_to(root, target_is_directory=True)
    (root / "linked").symlink_to(tmp_path / "secret", target_is_directory=True)
    os.mkfifo(root / "r" / "pipe.py")
    documents, problems = read(spec(root))
    assert [d.text for d in documents] == ["x = 1\n", "#!/bin/sh\necho\n"]
    assert problems.filtered == {
        "symbolic link": 2,
        "binary": 1,
        "empty file": 1,
        "unknown file type": 3,
        "not a regular file": 1,
    }
    assert problems.named == [f"{root}/r/latin.py: invalid UTF-8 (byte 2)"]
    with pytest.raises(DataError, match="latin.py: invalid UTF-8"):
        read(spec(root), strict=True)


def test_unreadable_files_are_named_and_folders_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path, {"r/a.py": "a = 1\n", "r/locked/b.py": "b = 1\n", "r/gone.py": "c = 1\n"})
    reader, problems, scandir = open_reader(spec(root)), ReadingProblems(), os.scandir
    chunks = [chunk for unit in reader.units() for chunk in reader.chunks(unit)]
    (root / "r" / "gone.py").unlink()
    assert [d.text for c in chunks for d in reader.documents(c, problems)] == ["a = 1\n", "b = 1\n"]
    assert problems.named == [f"{root}/r/gone.py: unreadable (No such file or directory)"]

    def refuse(path: str):  # permissions do not stop the superuser, who may run this
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="r/locked: the folder cannot be listed .*Permission denied"):
        reader.units()


def test_a_file_that_is_too_long_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, {"r/a.py": "a = 1\n", "r/b.py": "b = 1\n" * 200_000, "r/c.py": "c" * (1 << 20)})
    documents, problems = read(spec(root, max_record_mib=1))
    assert [len(document.text) for document in documents] == [6, 1 << 20]
    (line,) = problems.named
    assert line.startswith(f"{root}/r/b.py: record too long (") and "max_record_mib: 1)" in line


def test_names_that_are_not_utf8_are_read_and_shown(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "r")
    os.mkdir(folder)
    for name, content in ((b"\xff.py", b"x = 1\n"), (b"\xfe.py", b"\xff\n")):
        Path(os.fsdecode(os.path.join(folder, name))).write_bytes(content)
    documents, problems = read(spec(tmp_path))
    assert [d.text for d in documents] == ["x = 1\n"]
    assert problems.named[0].endswith("\\xfe.py: invalid UTF-8 (byte 0)")


def test_facts_come_from_the_metadata(tmp_path: Path) -> None:
    root = write(tmp_path / "all", TREE)
    records = [
        {"repository": "Owner/One", "stars": 5},
        {"repository": "owner/two", "stars": 0},
    ]
    metadata = tmp_path / "repositories.jsonl"
    metadata.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    documents, problems = read(spec(root, metadata=metadata, filters=Filters(min_stars=1)))
    assert [d.key for d in documents] == ["owner/one"]
    assert problems.filtered == {"version control": 2, "no stars given": 3, "stars below 1": 1}
    reader = open_reader(spec(root, metadata=metadata))
    before = pickle.dumps(reader)
    list(reader.documents(next(reader.chunks(reader.units()[0])), ReadingProblems()))
    assert pickle.dumps(reader) == before  # the metadata stays behind


def grow(root: Path) -> None:
    write(root, {"r/a.py": "a = 12\n"})


def touch(root: Path) -> None:
    os.utime(root / "r" / "a.py", ns=(1, 1))


def add(root: Path) -> None:
    write(root, {"r/sub/new.py": "n = 1\n"})


def remove(root: Path) -> None:
    (root / "r" / "sub" / "b.c").unlink()


def rename(root: Path) -> None:
    (root / "r" / "sub" / "b.c").rename(root / "r" / "b.c")


def relink(root: Path) -> None:
    remove(root)
    (root / "r" / "sub" / "b.c").symlink_to(root / "r" / "a.py")


@pytest.mark.parametrize("change", [grow, touch, add, remove, rename, relink])
def test_a_changed_repository_has_another_stamp_and_the_others_keep_theirs(tmp_path: Path, change) -> None:
    write(tmp_path, {"r/a.py": "a = 1\n", "r/sub/b.c": "int b;\n", "s/c.py": "c = 1\n"})
    reader = open_reader(spec(tmp_path))
    before = {unit.path: unit for unit in reader.units()}
    assert list(before.values()) == reader.units()
    assert [unit.size for unit in before.values()] == [13, 6]
    change(tmp_path)
    after = {unit.path: unit for unit in reader.units()}
    assert [after[path].stamp == before[path].stamp for path in before] == [False, True]


def test_what_is_not_read_does_not_change_a_stamp(tmp_path: Path) -> None:
    write(tmp_path, {"r/a.py": "a = 1\n", "r/.git/HEAD": "one"})
    reader = open_reader(spec(tmp_path))
    before = reader.units()
    write(tmp_path, {"r/.git/HEAD": "two", "r/__pycache__/a.pyc": b"\0", "r/image.png": b"\0"})
    assert reader.units() == before and not reader.unread()


def test_other_metadata_is_another_stamp(tmp_path: Path) -> None:
    root = write(tmp_path / "all", {"r/a.py": "a = 1\n"})
    write(tmp_path, {"m.jsonl": '{"repository": "r", "stars": 1}\n'})
    reader, plain = open_reader(spec(root, metadata=tmp_path / "m.jsonl")), open_reader(spec(root))
    (before,) = reader.units()
    os.utime(tmp_path / "m.jsonl", ns=(1, 1))
    assert reader.units() == [before] != plain.units()
    write(tmp_path, {"m.jsonl": '{"repository": "r", "stars": 2}\n'})
    assert reader.units()[0].stamp != before.stamp


def test_paths_may_be_many_repositories_and_owners(tmp_path: Path) -> None:
    write(tmp_path, TREE)
    documents, _ = read(spec(tmp_path / "flat", tmp_path / "owner"))
    assert [d.key for d in documents] == ["flat"] * 3 + ["one", "two"]


def test_filters_of_files(tmp_path: Path) -> None:
    files = {"r/a.py": "x = 1\n", "r/b.py": "y" * 2000, "r/c.js": "// @generated\n", "r/vendor/d.py": "z = 1\n"}
    filters = Filters(max_bytes=100, generated=False, minified=False, languages=("python", "javascript"))
    documents, problems = read(spec(write(tmp_path, files | {"r/tool": "#!/bin/sh\n"}), filters=filters))
    assert [d.text for d in documents] == ["x = 1\n"]
    assert problems.filtered == {"larger than 100 bytes": 1, "generated": 1, "vendored": 1, "language not chosen": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": ["nowhere"]}, "no such folder"),
        ({"paths": ["empty"]}, "contains no repository"),
        ({"filters": Filters(min_stars=1)}, "needs metadata"),
        ({"metadata": Path("nowhere.jsonl")}, "no such file"),
        ({"options": {"split": "train"}}, "repositories does not use options.*reader huggingface"),
        ({"fields": {"text": "content"}}, "does not use fields"),
        ({"documents": "line"}, "does not use documents"),
        ({"sets": ["ArXiv"]}, "does not use sets"),
        ({"metadata": Path("bad.jsonl")}, "bad.jsonl:2: invalid"),
    ],
)
def test_invalid_specs_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, message) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"all/r/a.py": "x", "bad.jsonl": '{"repository": "r"}\n{"stars": 3}\n'})
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        read(SourceSpec(**({"name": "code", "paths": ["all"], "reader": "repositories"} | change)))


def test_chunks_are_small_and_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path, {f"r/{i % 7}/f{i}.py": f"x = {i}\n" * 20 for i in range(200)} | {"r/.git/HEAD": ""})
    whole, _ = read(spec(root))
    monkeypatch.setattr(repositories, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(repositories, "CHUNK_FILES", 9)
    reader = open_reader(spec(root))
    (unit,) = reader.units()
    chunks = list(reader.chunks(unit))
    assert chunks == list(reader.chunks(unit)) and len(chunks) > 20
    assert read(spec(root))[0] == whole and len(whole) == 200
    assert sum(chunk.read for chunk in chunks) == unit.size == sum(p.stat().st_size for p in root.rglob("*.py"))
    assert [chunk.first for chunk in chunks[1:]] == [chunk.first + len(chunk.payload.names) for chunk in chunks[:-1]]


def test_a_part_of_the_python_installation(tmp_path: Path) -> None:
    for name in ("json", "email", "xml"):
        shutil.copytree(Path(sysconfig.get_paths()["stdlib"]) / name, tmp_path / "python" / name)
    documents, problems = read(spec(tmp_path, filters=Filters(generated=False, minified=False)))
    assert len(documents) > 40 and {d.key for d in documents} == {"python/json", "python/email", "python/xml"}
    assert any("class JSONDecoder" in d.text for d in documents)
    assert not problems.total and set(problems.filtered) <= {"unknown file type", "empty file", "generated"}


def test_a_language_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="code: filters.languages: unknown language .Pyton.; .*`Python`"):
        open_reader(spec(tmp_path, filters=Filters(languages=("c", "Pyton"))))
