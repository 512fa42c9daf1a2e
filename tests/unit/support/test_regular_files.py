"""A FIFO, a device, a socket or a loop of links in the place of a file is an error at once, never a hang."""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
from megatron_coca.checkpoints.inspection import describe, describe_text
from megatron_coca.config import load_config
from megatron_coca.data import DataError, load_saved_tokenizer, load_tokenizer
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.readers import corpus_files
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.results import EvaluationError, check_writable
from megatron_coca.model import build_model
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.regular_files import read_regular
from megatron_coca.training.checkpointing.resume import runs_of
from tests.checkpoint_files import BYTES, TINY, write_checkpoint
from tests.neox_files import write_neox


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:  # names of sockets are short
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "loop of links": lambda path: path.symlink_to(path.name),
    "socket": _socket,
}


@pytest.fixture(params=IRREGULAR)
def put(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """A function that replaces a file; whoever then reads it for 20 seconds fails."""

    def replace(path: Path) -> None:
        path.unlink()
        IRREGULAR[request.param](path)

    def expire(*_: object) -> None:
        raise AssertionError("reads what is not a regular file")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(20)
    yield replace
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("saved") / "run", load_config([], TINY))


PARTS = (
    *(native.MANIFEST, native.META, native.CONFIG, native.WEIGHTS),
    *("state/rank_00000.safetensors", "rng/rank_0.pt", "tokenizer/tokenizer_type.json"),
)


@pytest.mark.parametrize("name", PARTS)
def test_in_the_place_of_a_file_of_a_checkpoint(
    name: str, saved: Path, put: Callable[[Path], None], tmp_path: Path
) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    folder = native.step_folder(run, 7)
    put(folder / name)
    with pytest.raises(CheckpointError, match="not a regular file|symbolic link|no complete checkpoint"):
        open_checkpoint(run)
    with pytest.raises(CheckpointError, match="not a regular file|symbolic link|Too many levels"):
        native.verify(folder)
    assert describe_text(describe(folder)), "shows what can be read"
    assert describe(folder).damage is not None
    assert runs_of([folder]) <= {None}


def test_in_the_place_of_latest(saved: Path, put: Callable[[Path], None], tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    put(run / native.LATEST)
    assert native.locate(run) == native.step_folder(run, 7)


@pytest.mark.parametrize("name", ["layer_00-model_00-model_states.pt", "layer_04-model_00-model_states.pt"])
def test_in_the_place_of_a_file_of_gpt_neox(name: str, put: Callable[[Path], None], tmp_path: Path) -> None:
    keys = TINY | {"pipe_parallel_size": 1, "pos_emb": "rotary"}
    torch.manual_seed(0)
    network = {key: value for key, value in keys.items() if key != "pipe_parallel_size"}
    folder = write_neox(tmp_path / "run", keys, build_model(load_config([], network)).state_dict(), 20)
    put(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read \((not a regular|Too many levels)"):
        open_checkpoint(folder)


def test_in_the_place_of_a_tokenizers_file(put: Callable[[Path], None], tmp_path: Path) -> None:
    vocabulary, folder = tmp_path / "tokenizer.json", tmp_path / "tokenizer"
    vocabulary.touch()
    put(vocabulary)
    for kind, path in (("HFTokenizer", vocabulary), ("HFTokenizer", tmp_path), ("SPMTokenizer", vocabulary)):
        with pytest.raises(
            DataError, match=r"cannot be read \((not a regular|Too many levels|No such)|is outside the fol"
        ):
            load_tokenizer(kind, path)
    BYTES.save(folder)
    put(folder / "tokenizer_type.json")
    with pytest.raises(DataError, match="json: cannot be read .*(regular|Too many levels)"):
        load_saved_tokenizer(folder)


def test_in_the_place_of_a_manifest_of_data(put: Callable[[Path], None], tmp_path: Path) -> None:
    for name in ("manifest.json", "state.json", "dataset_info.json"):
        (tmp_path / name).touch()
    put(tmp_path / "manifest.json")
    put(tmp_path / "state.json")
    with pytest.raises(DataError, match="manifest.json: cannot be read"):
        read_manifest(tmp_path / "manifest.json")
    with pytest.raises(DataError, match=r"state.json: cannot be read"):
        corpus_files([tmp_path])


def test_files_that_are_read_whole_have_a_largest_size(tmp_path: Path) -> None:
    sparse = tmp_path / "vocab.json"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes, more than 268,435,456"):
        read_regular(sparse)
    with pytest.raises(DataError, match=r"vocab.json: cannot be read \(1,099,511,627,776 bytes, more than"):
        load_tokenizer("HFTokenizer", sparse)


def test_results_are_not_written_to_a_fifo_or_read_from_one(tmp_path: Path) -> None:
    fifo = tmp_path / "result.json"
    os.mkfifo(fifo)
    with pytest.raises(EvaluationError, match=r"result.json: is not a regular file"):
        check_writable(fifo)
    with pytest.raises(OSError, match="not a regular file"):
        write_file(fifo, "text")
    with pytest.raises(EvaluationError, match=r"cannot be read \(not a regular file\)"):
        read_results([fifo])
    assert fifo.is_fifo()
