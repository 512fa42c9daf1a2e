"""The archive of results: files are packed and unpacked, existing ones stay, and damage is reported."""

import json
from pathlib import Path

import pytest
import zstandard

from megatron_coca.ablation import cells
from megatron_coca.ablation.cells import archive_of, pack, unpack
from megatron_coca.evaluation import EvaluationError


def write(path: Path, content: object) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path.read_bytes()


def test_the_archive_stands_for_the_folder(tmp_path: Path) -> None:
    results = tmp_path / "study"
    files = {"a-s1-0/cell.json": {"seed": 1}, "a-s1-0/recall_a.json": {"x": [0.1, "Infinity", "\u00e9"], "n": 10**12}}
    files["a-s1-0/truncated/perplexity_a.json"] = {"second task": True}
    before = {name: write(results / name, content) for name, content in files.items()}
    write(results / "report" / "tables.json", {})
    assert pack(results) == archive_of(results) == tmp_path / "study.jsonl.zst"
    for name in files:
        (results / name).unlink()
    changed = write(results / "a-s1-0/cell.json", {"seed": 2})
    unpack(results)
    assert (results / "a-s1-0/cell.json").read_bytes() == changed, "existing files stay"
    assert (results / "a-s1-0/recall_a.json").read_bytes() == before["a-s1-0/recall_a.json"]
    second = "a-s1-0/truncated/perplexity_a.json"
    assert (results / second).read_bytes() == before[second]
    assert len(zstandard.decompress(archive_of(results).read_bytes()).splitlines()) == 3, "no report"
    unpack(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_empty_folder_and_damage_are_reported(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no results to pack"):
        pack(tmp_path / "study")
    archive = archive_of(tmp_path / "study")
    archive.write_bytes(b"no zstd")
    with pytest.raises(EvaluationError, match="damaged"):
        unpack(tmp_path / "study")
    whole = zstandard.compress(b'{"file": "a-s1-0/cell.json", "content": 1}\n' * 99)
    for damaged, problem in ((whole[:-5], "it was cut off"), (b"", "it was cut off"), (whole * 2, "data follows")):
        archive.write_bytes(damaged)
        with pytest.raises(EvaluationError, match=rf"damaged \({problem}"):
            unpack(tmp_path / "study")
    archive.write_bytes(zstandard.compress(b'{"file": "../../x.json", "content": 1}\n'))
    with pytest.raises(EvaluationError, match=r"contains \.\./\.\./x\.json, which is outside"):
        unpack(tmp_path / "study")


def test_a_small_archive_with_much_content_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "LARGEST", 1 << 20)
    archive_of(tmp_path / "study").write_bytes(zstandard.compress(b" " * (1 << 24)))
    with pytest.raises(EvaluationError, match="damaged .its content is larger than 1 MiB"):
        unpack(tmp_path / "study")
    write(tmp_path / "study/a-s1-0/cell.json", "x" * (1 << 20))
    with pytest.raises(EvaluationError, match="at most 1 MiB.*several folders"):
        pack(tmp_path / "study")
