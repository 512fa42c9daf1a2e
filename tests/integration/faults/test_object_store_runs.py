"""Real training processes with checkpoints on an object store: an S3 server on this machine."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
from megatron_coca.checkpoints.native import object_store
from megatron_coca.checkpoints.native.object_store import RemoteFolder
from megatron_coca.data.readers.remote import DataFiles
from tests.conftest import Finished
from tests.integration.hooks import Hook
from tests.integration.killing import ForkServer

moto = pytest.importorskip("moto.server", reason="needs the S3 server of moto, which is in requirements-dev.txt")

STEPS = 6
KEYS = {"train_iters": STEPS, "checkpoint_factor": 2, "eval_iters": 0, "auto_resume": True}
ACCESS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """The variables with which s3fs finds the server, also set in this process; it has one empty bucket."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = ACCESS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        RemoteFolder("s3://bucket")._fs.mkdir("bucket")
        yield variables
    server.stop()


Train = Callable[..., Finished]


@pytest.fixture(scope="module")
def train(server: ForkServer, store: dict[str, str]) -> Train:
    """train(changes, hooks, ranks, expected): as the fixture `live`, with the object store at hand."""

    def run(changes: Mapping[str, Any], hooks: Sequence[Hook] = (), ranks: int = 1, expected: int = 0) -> Finished:
        started = server.start(KEYS | changes, ranks, hooks, store)
        statuses, output = started.end(), started.output()
        assert statuses == [expected] * ranks, f"{statuses}: {output[-3000:]}"
        return Finished(statuses[0], output)

    return run


@pytest.fixture(scope="module")
def uninterrupted(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The save folder of the same run on a local disk."""
    folder = tmp_path_factory.mktemp("local") / "run"
    train({"save": str(folder)})
    return folder


def digest(url: str, step: int) -> str:
    return RemoteFolder(url).read_json(step, native.MANIFEST)["files"][native.WEIGHTS]["sha256"]


def local_digest(folder: Path, step: int) -> str:
    manifest = native.read_json(native.step_folder(folder, step) / native.MANIFEST)
    return manifest["files"][native.WEIGHTS]["sha256"]


@pytest.mark.slow
def test_a_run_is_resumed_on_another_machine(train: Train, uninterrupted: Path, tmp_path: Path) -> None:
    url = "s3://bucket/moved/run"
    train({"save": url, "checkpoint_cache": str(tmp_path / "first"), "exit_interval": 4})
    resumed = train({"save": url, "checkpoint_cache": str(tmp_path / "second")})
    assert "resuming at step 4" in resumed.output and f"uploaded {url}/global_step6" in resumed.output
    assert RemoteFolder(url).steps() == [2, 4, 6]
    assert digest(url, STEPS) == local_digest(uninterrupted, STEPS)
    config = object_store.fetch(url, cache=tmp_path) / native.CONFIG
    assert f"save: {url}\n" in config.read_text()
    assert native.steps(tmp_path / "first/s3/bucket/moved/run") == [2, 4], "two checkpoints are kept locally"
    assert native.steps(tmp_path / "second/s3/bucket/moved/run") == [4, 6]


def test_a_kill_inside_an_upload_costs_one_checkpoint(train: Train, uninterrupted: Path, tmp_path: Path) -> None:
    url, cache = "s3://bucket/killed", tmp_path / "cache"
    keys = {"save": url, "checkpoint_cache": str(cache), "async_save": False}
    train(keys, [Hook("uploaded file", "kill", [9])], expected=-9)
    assert RemoteFolder(url).steps() == [2], "step 4 was not complete"
    shutil.rmtree(cache)
    assert "resuming at step 2" in train(keys).output
    assert RemoteFolder(url).steps() == [2, 4, 6] and digest(url, STEPS) == local_digest(uninterrupted, STEPS)


@pytest.mark.slow
def test_a_run_on_shards_of_a_store_has_the_weights_of_one_on_a_disk(
    train: Train, corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    files = DataFiles("s3://bucket/corpus")
    for path in sorted(corpus.iterdir()):
        if path.is_file():
            files.put(path, path.name)
    shards = {"train": "words_train", "valid": "words_test", "test": "words_test"}
    keys = {f"{split}_data_paths": [f"s3://bucket/corpus/{name}"] for split, name in shards.items()}
    keys |= {"save": str(tmp_path / "run"), "num_workers": 2}
    train(keys | {"data_root": str(tmp_path / "first"), "exit_interval": 4})
    resumed = train(keys | {"data_root": str(tmp_path / "second")})
    assert "resuming at step 4" in resumed.output
    assert local_digest(tmp_path / "run", STEPS) == local_digest(uninterrupted, STEPS)
    assert not list(tmp_path.rglob("words_train.bin")), "tokens stay on the store"
    assert list(tmp_path.rglob("words_train.idx"))
    train(keys | {"save": str(tmp_path / "pair"), "data_root": str(tmp_path / "pair_data")}, ranks=2)
    assert native.steps(tmp_path / "pair")[-1] == STEPS


LORA = {"rank": 4, "also": ["norms"]}


@pytest.mark.slow
def test_adapters_that_begin_in_a_stage_are_resumed_on_another_machine(train: Train, tmp_path: Path) -> None:
    """The checkpoint that the adapters change stays on the store, and every new machine downloads it too."""
    stages = [{"until": 2, "trainable": ["key"]}, {"lora": LORA, "reset_optimizer": True}]
    keys = {"stages": stages, "keep_last_n_checkpoints": 1}
    train(keys | {"save": str(tmp_path / "local")})
    url = "s3://bucket/adapters"
    for stop in (2, 4, STEPS):
        machine = {"save": url, "checkpoint_cache": str(tmp_path / f"machine{stop}"), "exit_interval": stop}
        started = train(keys | machine)
        assert stop == 2 or f"resuming at step {stop - 2}" in started.output
    assert RemoteFolder(url).steps() == [2, STEPS]
    assert digest(url, STEPS) == local_digest(tmp_path / "local", STEPS)
    folder = object_store.fetch(url, cache=tmp_path / "reader")
    expected = dict(open_checkpoint(tmp_path / "local").weights())
    for name, weight in open_checkpoint(folder).weights():
        assert torch.equal(weight, expected[name])
    assert object_store.fetch(url, cache=tmp_path / "reader") == folder, "both are in the cache"


@pytest.mark.slow
def test_adapters_of_a_model_elsewhere_are_resumed_on_another_machine(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    """The model is on the store too, or its folder is named again. Without it, the error says what to do."""
    shutil.copytree(uninterrupted, tmp_path / "first" / "base")
    train({"save": "s3://bucket/base", "checkpoint_cache": str(tmp_path / "first")})
    keys = {"finetune": True, "lora": LORA}
    train(keys | {"load": str(uninterrupted), "save": str(tmp_path / "local")})
    for name, load in (("disk", str(tmp_path / "first" / "base")), ("store", "s3://bucket/base")):
        url = f"s3://bucket/of_{name}"
        given = keys | {"load": load, "save": url}
        train(given | {"checkpoint_cache": str(tmp_path / "first"), "exit_interval": 2})
        if name == "disk":
            (tmp_path / "first" / "base").rename(tmp_path / "moved")
            missing = train(given | {"checkpoint_cache": str(tmp_path / "second")}, expected=2)
            assert re.search("no longer exists .*--base FOLDER", missing.output)
            given |= {"load": str(tmp_path / "moved")}
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
        resumed = train(given | {"checkpoint_cache": str(tmp_path / "third")})
        assert "resuming at step 2" in resumed.output
        assert digest(url, STEPS) == local_digest(tmp_path / "local", STEPS), name


AWAY = Hook("transfer", "no answer", [])


@pytest.mark.slow
def test_what_a_kill_before_the_last_upload_leaves_behind_is_uploaded_by_the_next_start(
    train: Train, tmp_path: Path
) -> None:
    url = "s3://bucket/owed"
    keys = {"save": url, "checkpoint_cache": str(tmp_path), "async_save": False, "keep_last_n_checkpoints": 2}
    train(keys, [Hook("uploaded file", "kill", [16])], expected=-9)
    assert RemoteFolder(url).steps() == [2, 4] and native.steps(tmp_path / "s3/bucket/owed") == [4, 6]
    assert "nothing to do" in train(keys).output
    assert RemoteFolder(url).steps() == [4, 6], "uploaded, and pruned"
    assert "uploaded" not in train(keys).output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_outage_has_a_status_of_its_own_and_loses_nothing(train: Train, tmp_path: Path, ranks: int) -> None:
    url = f"s3://bucket/away{ranks}"
    keys = {"save": url, "checkpoint_cache": str(tmp_path), "object_store_timeout": 3.0}
    away = train(keys, [AWAY], ranks, expected=69)
    assert "could not be uploaded" in away.output and f"{url}: " in away.output and "Traceback" not in away.output
    last = native.steps(tmp_path / f"s3/bucket/away{ranks}")[-1]
    assert f"resuming at step {last}" in train(keys, ranks=ranks).output
    assert RemoteFolder(url).steps() == [2, 4, 6]


@pytest.mark.slow
def test_training_goes_on_while_the_store_is_away(train: Train, tmp_path: Path) -> None:
    url = "s3://bucket/back"
    steps = {"train_iters": 40, "checkpoint_factor": 10}
    output = train(steps | {"save": url, "checkpoint_cache": str(tmp_path)}, [Hook("transfer", "late answer", [])])
    lines = output.output.splitlines()
    first_upload = next(number for number, line in enumerate(lines) if f"uploaded {url}/global_step10" in line)
    assert any("step 30/40" in line for line in lines[:first_upload])
    assert RemoteFolder(url).steps() == [10, 20, 30, 40]


@pytest.mark.slow
def test_a_run_that_is_preempted_during_an_outage_does_not_wait_for_it(train: Train, tmp_path: Path) -> None:
    url = "s3://bucket/preempted"
    keys = {"save": url, "checkpoint_cache": str(tmp_path), "object_store_timeout": 1e4}
    assert "step 5 is saved" in train(keys, [AWAY, Hook("step", "terminate twice", [5])], expected=75).output
    train(keys | {"train_iters": 5})
    assert RemoteFolder(url).steps() == [2, 4, 5]


@pytest.mark.slow
def test_a_cache_that_is_behind_the_store_costs_nothing(train: Train, uninterrupted: Path, tmp_path: Path) -> None:
    url, keys = "s3://bucket/caches", {"save": "s3://bucket/caches", "keep_last_n_checkpoints": 9}
    for cache, end in (("a", 2), ("b", 4)):
        train(keys | {"checkpoint_cache": str(tmp_path / cache), "exit_interval": end})
    assert "resuming at step 4" in train(keys | {"checkpoint_cache": str(tmp_path / "a")}).output
    assert RemoteFolder(url).steps() == [2, 4, 6] and digest(url, STEPS) == local_digest(uninterrupted, STEPS)
    assert not RemoteFolder(f"{url}/quarantine").steps()


@pytest.mark.slow
def test_two_ranks_upload_what_both_have_written(train: Train, tmp_path: Path) -> None:
    url = "s3://bucket/ranks"
    keys = {"save": url, "checkpoint_cache": str(tmp_path), "zero_optimization.stage": 1}
    train(keys | {"exit_interval": 4}, ranks=2)
    shutil.rmtree(tmp_path / "s3")
    assert "resuming at step 4" in train(keys, ranks=2).output
    files = RemoteFolder(url).read_json(STEPS, native.MANIFEST)["files"]
    assert {"state/rank_00000.safetensors", "state/rank_00001.safetensors"} <= files.keys()


def of_another_run(folder: Path, save: Path) -> Path:
    """A copy of a checkpoint that another run might have written."""
    step = native.step_of(folder)
    partial = native.begin(save, step)
    shutil.copytree(folder, partial, dirs_exist_ok=True)
    (partial / native.MANIFEST).unlink()
    native.write_json(partial / native.META, native.read_json(partial / native.META) | {"run": "another"})
    return native.commit(save, step)


@pytest.mark.slow
def test_another_run_is_an_error(train: Train, uninterrupted: Path, tmp_path: Path) -> None:
    url = "s3://bucket/taken"
    first = native.step_folder(uninterrupted, 2)
    RemoteFolder(url).upload(of_another_run(first, tmp_path / "another"))
    fresh = train({"save": url, "checkpoint_cache": str(tmp_path / "cache"), "auto_resume": False}, expected=2)
    assert f"{url}: already contains a run (up to step 2)" in fresh.output
    assert RemoteFolder(url).steps() == [2]


def test_load_takes_the_weights_of_a_url(train: Train, uninterrupted: Path, tmp_path: Path) -> None:
    url = "s3://bucket/source"
    RemoteFolder(url).upload(native.step_folder(uninterrupted, STEPS))
    keys = {"load": url, "finetune": True, "checkpoint_cache": str(tmp_path), "auto_resume": False, "train_iters": 1}
    assert "starts from the weights of" in train(keys).output


@torch.no_grad()
def test_a_model_is_loaded_from_a_url(
    store: dict[str, str], uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, tokens = "s3://bucket/model", torch.arange(40, 60)[None]
    RemoteFolder(url).upload(native.step_folder(uninterrupted, STEPS))
    expected = load_model(uninterrupted)(tokens)
    assert torch.equal(load_model(url)(tokens), expected)
    downloaded = tmp_path / "runs/object_store/read/s3/bucket/model/global_step6" / native.WEIGHTS
    before = downloaded.stat().st_mtime_ns
    assert torch.equal(load_model(f"{url}/global_step6")(tokens), expected)
    assert downloaded.stat().st_mtime_ns == before, "what has not changed is not downloaded again"
    with pytest.raises(CheckpointError, match=r"s3://bucket/nothing: no complete checkpoint"):
        load_model("s3://bucket/nothing")
