"""Addresses in the files of a checkpoint or of data are read only if the user names them (tests/untrusted_files.md)."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatron_coca import cli
from megatron_coca.config import load_config
from megatron_coca.data import DataError, Shard
from megatron_coca.data.remote_shards import local_prefix
from megatron_coca.data.shards import ShardWriter, shard_paths
from megatron_coca.support import remote_files
from megatron_coca.support.remote_files import RemoteFiles
from tests.checkpoint_files import TINY, write_checkpoint

ROOT = Path(__file__).parents[3]
SPELLINGS = (
    "http://127.0.0.1:8000/a",
    "file:///home/me/private",
    "s3://stranger/a",
    "memory://bucket/text",
    "reference://a::memory://bucket/text",
    "simplecache::memory://bucket/text",
    "github://me/text",
)


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that were opened."""
    found: list[str] = []
    url_to_fs = fsspec.core.url_to_fs
    monkeypatch.setattr(
        "fsspec.core.url_to_fs", lambda url, **options: (found.append(url), url_to_fs(url, **options))[1]
    )
    monkeypatch.chdir(tmp_path)
    return found


def write_shard(prefix: Path) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(prefix, 512)
    writer.add([*range(1, 40), 0])
    writer.finish()
    return prefix


def run_of(tmp_path: Path, name: str, **keys: Any) -> Path:
    data = {"train_data_paths": [name], "valid_data_paths": [], "test_data_paths": [name]}
    return write_checkpoint(tmp_path / "run", load_config([], TINY | data | keys))


@pytest.mark.parametrize("address", SPELLINGS)
def test_spellings(address: str, tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, address)
    command = ["evaluate", "perplexity", "--checkpoint", str(run), "--windows", "8", "--stride", "8"]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert f"test_data_paths: {address}: not read" in said and "--set 'test_data_paths=[URL]'" in said
    assert not opened


def test_filler_of_recall(tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    task = {"text": True, "filler_tokens": 64, "facts": 2, "keys": 4, "values": 4}
    run = run_of(tmp_path, "http://127.0.0.1/a", synthetic=task)
    command = ["evaluate", "recall", "--checkpoint", str(run), "--lengths", "16", "--cases", "2"]
    assert cli.main(command) == 2
    assert "test_data_paths: http://127.0.0.1/a: not read" in capsys.readouterr().err and not opened


def test_an_address_that_the_user_names_is_read(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "far" / "text")
    url = shard.as_uri()
    run = run_of(tmp_path, url)
    command = ["evaluate", "perplexity", "--checkpoint", str(run), "--windows", "8", "--stride", "8"]
    assert cli.main([*command, "--set", f"test_data_paths=[{url}]"]) == 0
    assert cli.main([*command, "--data", url]) == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "file:///home/me", "memory://bucket"])
def test_a_note_beside_an_index(url: str, tmp_path: Path, opened: list[str]) -> None:
    prefix = write_shard(tmp_path / "data" / "text")
    bin_path, _ = shard_paths(prefix)
    size = bin_path.stat().st_size
    bin_path.rename(tmp_path / "elsewhere.bin")
    note = bin_path.with_name("text.bin.remote")
    note.write_text(json.dumps({"url": url, "name": "text.bin", "size": size}))
    with pytest.raises(DataError, match=f"{note}: {url}/text: not read.*instead of the local path"):
        Shard(prefix)
    note.write_text("[" * 10_000)
    with pytest.raises(DataError, match=f"{note}: cannot be read"):
        Shard(prefix)
    assert not opened


def test_the_note_of_this_process_is_not_read_for_its_address(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "far" / "text")
    local = local_prefix(prefix.as_uri())
    note = Path(f"{local}.bin.remote")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"url": "http://127.0.0.1", "name": "other.bin"}))
    assert Shard(local).tokens(0, 3).tolist() == Shard(prefix).tokens(0, 3).tolist()


@pytest.mark.parametrize(
    "url",
    [
        "reference://a",
        "zip://a::memory://b",
        "simplecache::s3://a/b",
        "github://a/b",
        "dir://a",
        "data://a",
        "a::b://c",
    ],
)
def test_other_kinds_of_addresses(url: str, opened: list[str]) -> None:
    with pytest.raises(RemoteFiles.permanent, match="this kind of address cannot be opened; .*s3.*without `::`"):
        RemoteFiles(url)
    assert not opened


def test_the_schemes_are_known_to_fsspec() -> None:
    from fsspec.registry import known_implementations

    assert '"fsspec>=2026.6"' in (ROOT / "pyproject.toml").read_text(), "earlier ones run code in reference://"
    assert remote_files.SCHEMES - set(known_implementations) <= {"abfss"}
    assert not remote_files.SCHEMES & {"reference", "zip", "tar", "dir", "simplecache", "generic", "github", "git"}


def test_a_checkpoint_does_not_choose_where_the_builtin_corpus_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def ensure(root: Path) -> Path:
        asked.append(root)
        raise DataError("not built in this test")

    monkeypatch.setattr("megatron_coca.data.ensure_builtin", ensure)
    run = write_checkpoint(tmp_path / "run", load_config([], TINY | {"data_root": str(tmp_path / "home")}))
    command = ["evaluate", "perplexity", "--checkpoint", str(run), "--windows", "8", "--stride", "8"]
    assert cli.main(command) == 2
    (tmp_path / "home" / "builtin").mkdir(parents=True)
    assert cli.main(command) == 2
    assert asked == [Path("data"), tmp_path / "home"]
