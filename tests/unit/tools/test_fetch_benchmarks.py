"""The script that downloads the data of benchmarks: every source lies where `--datasets` reads it."""

import io
from pathlib import Path
from typing import Any

import huggingface_hub
import nltk
import pytest

from megatron_coca.evaluation.tasks.lm_eval.benchmarks import BENCHMARKS, PUNKT, SQUAD, place_of
from megatron_coca.evaluation.tasks.lm_eval.data import check_places
from tools import fetch_benchmarks


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Servers that answer every request with one file; the list has the requests."""
    asked: list[str] = []

    def snapshot(name: str, repo_type: str, local_dir: Path) -> None:
        asked.append(f"{repo_type} {name}")
        local_dir.mkdir(parents=True)

    def download(name: str, download_dir: str, quiet: bool) -> bool:
        asked.append(name)
        (Path(download_dir) / "tokenizers" / name).mkdir(parents=True)
        return True

    def urlopen(address: str, timeout: float) -> io.BytesIO:
        asked.append(address)
        return io.BytesIO(b"{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(nltk, "download", download)
    monkeypatch.setattr(fetch_benchmarks.urllib.request, "urlopen", urlopen)
    return asked


def test_every_source_is_where_it_is_read(network: list[str], tmp_path: Path) -> None:
    assert fetch_benchmarks.main([*BENCHMARKS, "--output", str(tmp_path)]) == 0
    sources = [source for listed in BENCHMARKS.values() for source in listed]
    assert len(network) == len(sources) and "punkt_tab" in network and SQUAD in network
    check_places(tmp_path, sources)
    assert place_of(SQUAD, tmp_path).read_bytes() == b"{}"
    assert (tmp_path / PUNKT).is_dir() and "dataset Xnhyacinth/LongBench" in network


def test_a_server_that_does_not_answer(
    network: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(fetch_benchmarks.urllib.request, "urlopen", refuse)
    assert fetch_benchmarks.main([SQUAD, "owner/data", "--output", str(tmp_path)]) == 1
    assert f"{SQUAD}: cannot be downloaded (no route to host)" in capsys.readouterr().err
    assert network == ["dataset owner/data"], "the other sources are downloaded"


def test_an_unknown_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fetch_benchmarks.main(["rulers", "--output", str(tmp_path)])
    assert "rulers: unknown benchmark; name ruler, babilong" in capsys.readouterr().err
