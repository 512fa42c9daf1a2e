"""What other people's names and addresses look like on a terminal, in tables, and in files that are shared."""

import io
import logging
import tarfile
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron_coca import cli
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.checkpoints.native.object_store import RemoteFolder
from megatron_coca.config import ConfigError, load_config
from megatron_coca.evaluation.report.document import Table, TableCell, TableRow, csv_table
from megatron_coca.support.console import write
from megatron_coca.support.errors import UNAVAILABLE
from megatron_coca.support.markdown_tables import format_table
from megatron_coca.support.plain_text import masked, plain
from megatron_coca.support.remote_files import local_folder
from tests.checkpoint_files import TINY, write_checkpoint

HOSTILE = "a\x1b]0;owned\x07\x1b[31mb\x9b2J\u202ecod.exe\rz"


WRITER = "native.CONFIG).write_text("


def test_control_characters_become_escapes_and_text_stays() -> None:
    assert plain(HOSTILE) == r"a\x1b]0;owned\x07\x1b[31mb\x9b2J\u202ecod.exe\rz"
    assert plain("surrogate \udcff") == r"surrogate \udcff"
    kept = "tabs\tand\nlines, naïve, 日本語, 🎉, café\u0301"
    assert plain(kept) == kept


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pa%24s@host/x", "https://me:***@host/x"),
        ("sftp://me:p:q@host:22/x", "sftp://me:***@host:22/x"),
        ("ftp:/me:pass@host/x", "ftp:/me:***@host/x"),
        ("simplecache::https://me:pass@host/x", "simplecache::https://me:***@host/x"),
        ("https://hf_token@host/x", "https://***@host/x"),
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("s3://bucket/a?X-Amz-Signature=abc&b=c", "s3://bucket/a?X-Amz-Signature=***&b=c"),
        ("https://h/a?b=c&access_token=abc", "https://h/a?b=c&access_token=***"),
        ("s3://bucket/a@b:c/d", "s3://bucket/a@b:c/d"),
        ("a:b@c is no address", "a:b@c is no address"),
    ],
)
def test_secrets_of_urls(url: str, shown: str) -> None:
    assert masked(url) == shown and masked(f"{{'url': '{url}', 'a': 1}}") == f"{{'url': '{shown}', 'a': 1}}"


def test_errors_logs_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    url = "nothing://me:secret@host/" + HOSTILE
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(url)
    with pytest.raises(ConfigError) as refused:
        load_config([], {"num_layers": url})
    write(url)
    for text in (str(caught.value), str(refused.value), capsys.readouterr().err, format_table(["a"], [[HOSTILE]])):
        assert "secret" not in text and "\x1b" not in text and "\x9b" not in text
    assert local_folder(url, "cache", CheckpointError).parts[:3] == ("cache", "nothing", "me@host")


def test_warnings_and_errors_of_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command without a log of its own, a library that quotes its part of the address, and a refused variant."""

    class Away(MemoryFileSystem):  # type: ignore[misc]
        protocol = "away"

        def find(self, path: str, *_: object, **__: object) -> list[str]:
            raise ConnectionError(f"no bucket me:secret@host{HOSTILE}")

    fsspec.register_implementation("away", Away, clobber=True)
    monkeypatch.setattr("megatron_coca.support.remote_files.SCHEMES", {"away"})
    monkeypatch.setattr("megatron_coca.support.remote_files.TIMEOUT", 0.1)
    monkeypatch.setattr(RemoteFolder.__init__, "__defaults__", (0.1,))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.chdir(tmp_path)
    lengths = ["--lengths", "64", "--output", str(tmp_path / "out")]
    assert cli.main(["evaluate", "passkey", "--checkpoint", "away://me:secret@host/x", *lengths]) == UNAVAILABLE
    run = write_checkpoint(tmp_path / "run", load_config([], TINY))
    variant = ["--variant", "a", "num_layers=away://me:secret@host/x"]
    assert cli.main(["evaluate", "passkey", "--checkpoint", str(run), *lengths, *variant]) == 2
    said = capsys.readouterr().err + "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "retrying" in said and "away://me:***@host/x" in said
    assert "secret" not in said and "\x1b" not in said


def test_names_in_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("\x1b[31mred\n2026 saved.jsonl", "\x1b]0;title\x07.exe"):
            member = tarfile.TarInfo(name)
            member.size = 10
            archive.addfile(member, io.BytesIO(b"{broken}\n\n"))
        member = tarfile.TarInfo("good.jsonl")
        content = b'{"text": "a text"}\n' * 20
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    options = ["--input", f"a={tmp_path / 'a.tar'}", "--output", str(tmp_path / "out"), "--workers", "0"]
    options += ["--max-faulty", "1"]  # one of the two files has no record
    assert cli.main(["prepare", *options, "--tokenizer-type", "CharLevelTokenizer"]) == 0
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said and r"\x1b[31mred\n2026 saved.jsonl" in said


def test_cells_of_csv_files_are_no_formulas() -> None:
    cells = ("=1+2", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1", "-", "-0.5", "+1.25", "plain", "a=b")
    rows = tuple(TableRow(text, (TableCell(text), TableCell("x", -0.5))) for text in cells)
    lines = csv_table(Table("t", "", ("=name", "=head", "value"), rows)).splitlines()
    assert lines[0] == """"'=name","source","'=head","value\""""
    assert [line.split(",")[0] for line in lines[1:7]] == [f""""'{text}\"""" for text in cells[:6]]
    assert [line.split(",")[0] for line in lines[7:]] == [f'"{text}"' for text in cells[6:]]
    assert all(line.endswith(",-0.5") for line in lines[1:])


def test_the_configuration_beside_a_checkpoint_has_no_password(tmp_path: Path) -> None:
    given = {"data_path": "https://me:secret@host/shard"}
    saved = write_checkpoint(tmp_path / "run", load_config([], TINY | given))
    done = import_checkpoint(saved, tmp_path / "imported")
    text = (done.folder / "global_step0" / "config.yml").read_text()
    assert "secret" not in text and "https://me:***@host/shard" in text


def test_no_checkpoint_is_written_with_a_password() -> None:
    package = Path(__file__).parents[3] / "megatron_coca"
    written = [line for path in package.rglob("*.py") for line in path.read_text().splitlines() if WRITER in line]
    assert len(written) == 3 and all(f"{WRITER}config.record()" in line for line in written)
    paths = {f"{split}_data_paths": ["https://me:secret@host/x"] for split in ("train", "valid", "test")}
    config = load_config(TINY | paths)
    assert "secret" not in config.record() and "secret" in config.to_yaml()
