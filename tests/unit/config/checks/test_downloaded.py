"""Configuration files in the folder of a checkpoint or of prepared data reach neither strangers nor other folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca.config import ConfigError, load_config, load_saved_config
from megatron_coca.config.checks.downloaded import DATA_KEYS

MODEL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}
NONE: dict[str, Any] = {f"{split}_data_paths": [] for split in ("valid", "test")}
DATA = NONE | {"train_data_paths": ["./text_train"], "tokenizer_type": "CharLevelTokenizer", "vocab_size": 512}


def write(path: Path, keys: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(keys))
    return path


@pytest.mark.parametrize(
    "beside", ["manifest.json", "tokenizer_type.json", "text_train.idx", "text_train.bin.remote", ""]
)
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"use_wandb": True, "wandb_host": "https://stranger.example"}, "use_wandb"),
        ({"log_dir": "logs"}, "log_dir"),
        ({"train_iters": 5}, "train_iters"),
        ({"data_root": "elsewhere"}, "data_root"),
        ({"optimizer": {"params": {"lr": 1.0}}}, "optimizer"),
        ({"wandb-host": "stranger"}, "wandb_host"),
        ({"optimizer.params.lr": 1.0}, "optimizer"),
        ({"hostfile": "hosts"}, "hostfile"),
        ({"wandb": {"enabled": True}}, "wandb"),
        ({"metric_sinks": {"mlflow": {}}}, "metric_sinks"),
        ({"metric_sinks.mlflow.tracking_uri": "https://stranger.example"}, "metric_sinks"),
        ({"stages": [{"until": 1}, {}]}, "stages"),
        ({"no_such_key": 1}, "no_such_key"),
    ],
)
def test_prepared_data_set_only_data_keys(keys: dict[str, Any], named: str, beside: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data" / "data.yml", DATA | keys)
    if beside:
        (tmp_path / "data" / beside).touch()
    with pytest.raises(ConfigError, match=f"data.yml(:[0-9]+)?: {named}: does not describe data"):
        load_config([MODEL, data])
    with pytest.raises(ConfigError, match=f"{named}: does not describe data"):
        load_config(MODEL).override((), [data])
    write(data, DATA)
    assert load_config([MODEL, data]).data.train_data_paths == [f"{tmp_path}/data/text_train"]


@pytest.mark.parametrize("name", ["data.yaml", "data.json", "DATA.YML"])
def test_other_names_of_the_file(name: str, tmp_path: Path) -> None:
    data = write(tmp_path / name, DATA | {"use_wandb": True})
    (tmp_path / "text_train.idx").touch()
    with pytest.raises(ConfigError, match="use_wandb: does not describe data"):
        load_config([MODEL, data])


@pytest.mark.parametrize("path", ["/home/me/private", "./../private", "~/private", "private", "./a/../../private"])
@pytest.mark.parametrize("key", ["data_path", "vocab_file", "merge_file"])
def test_prepared_data_name_only_files_in_their_folder(key: str, path: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data" / "data.yml", {key: path})
    (tmp_path / "data" / "manifest.json").touch()
    with pytest.raises(ConfigError, match=rf"{key}: {path}: outside {data.parent}"):
        load_config([MODEL, data])
    write(data, {key: "./text"})
    load_config([MODEL, data])
    (data.parent / "text").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match=rf"{key}: ./text: outside {data.parent}"):
        load_config([MODEL, data])


def test_data_keys() -> None:
    assert {"train_data_paths", "vocab_file", "pack_impl", "vocab_size", "synthetic"} <= DATA_KEYS
    assert not DATA_KEYS & {"data_root", "save", "imports", "use_wandb", "seq_length"}


def test_another_file_of_this_name_is_the_users(tmp_path: Path) -> None:
    own = write(tmp_path / "data.yml", NONE | {"train_data_paths": ["/shards/a"], "train_iters": 5, "use_wandb": True})
    assert load_config([MODEL, own]).schedule.train_iters == 5


PLACES = ("data/data.yml", "run/global_step7/config.yml", "data/other.yml", "hub/other.yml", "copied/other.yml")
BESIDE = {"data/other.yml": "manifest.json", "hub/other.yml": "model.safetensors", "copied/other.yml": "global_step7/x"}
"""A file beside a configuration that shows whose folder it is in."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "keys",
    [
        {"data_path": "s3://stranger/a"},
        {"data_path": "file:///home/me/private"},
        {"train_data_paths": ["a", "http://127.0.0.1:8000/b"]} | NONE,
        {"valid_data_paths": ["reference://a::file://b"], "train_data_paths": ["a"], "test_data_paths": []},
        {"train_label_data_paths": ["s3://stranger/b"], "train_data_paths": ["a"]} | NONE,
        {"vocab_file": "https://stranger.example/v.json"},
        {"stages": [{"until": 1, "data_path": "s3://stranger/a"}, {}], "train_iters": 2, "save": "runs/a"},
        {"load": "s3://stranger/run"},
        {"save": "s3://stranger/run"},
        {"wandb_host": "stranger"},
        {"hostfile": "hosts"},
        {"master_addr": "stranger"},
        {"wandb_team": "stranger"},
        {"metric_sinks": {"mlflow": {"tracking_uri": "https://stranger.example"}}},
        {"metric_sinks": {"mlflow": {"tracking_uri": "stranger"}}},
        {"metric_sinks": {"comet": {"workspace": "stranger"}}},
        {"metric_sinks": {"comet": {"folder": "../elsewhere"}}},
        {"metric-sinks": {"comet": {}}},
        {"log_dir": "/home/me/.config"},
        {"save": "../elsewhere"},
        {"tensorboard_dir": "~/elsewhere"},
        {"tensorboard": {"enabled": True, "output_path": "/home/me"}},
        {"deepspeed_extra_args.csv_monitor": {"enabled": True}},
        {"wandb-host": "stranger"},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/home/me"}}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": ".."}}},
        {"deepspeed_extra_args": {"csv_monitor": {"enabled": True}}},
    ],
    ids=str,
)
def test_addresses_and_folders_elsewhere_are_the_users_to_name(
    keys: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same value in the user's own file or override is used."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = write(tmp_path / place, keys)
    if place in BESIDE:
        write(file.parent / BESIDE[place], {})
    key = next(iter(keys))
    with pytest.raises(
        ConfigError, match=rf"{file.name}(:[0-9]+)?: {key.replace('-', '_')}.*(may be untrusted|does not describe data)"
    ):
        load_config([MODEL, file])
    own = write(tmp_path / "work" / "own.yml", keys)
    load_config([MODEL, own])
    load_config([MODEL], keys)
    if "data.yml" not in place:
        load_config([MODEL, file, own])
        load_config([MODEL, file], [f"{name}={json.dumps(value)}" for name, value in keys.items()])


def test_folders_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "run/global_step7/config.yml", {"save": "runs/a", "log_dir": str(tmp_path / "logs")})
    assert load_config([MODEL, file]).checkpoint.save == "runs/a"


def test_a_file_beside_the_steps_of_ones_own_run(tmp_path: Path) -> None:
    """The same command resumes a run whose configuration lies in its `save` folder; in a copy, the file is foreign."""
    (tmp_path / "method.py").write_text("")
    for name, saved in {"own": "own", "copy": "own", "damaged": None}.items():
        folder = tmp_path / name
        file = write(folder / "run.yml", {"save": str(folder), "hostfile": "hosts", "imports": ["../method.py"]})
        meta = folder / "global_step7" / "meta.json"
        write(meta, {}).write_text("{" if saved is None else json.dumps({"save": str(tmp_path / saved)}))
        if name == "own":
            (folder / "global_step9").mkdir()  # damaged: another step names the folder
            assert load_config([MODEL, file]).checkpoint.save == str(folder)
        else:
            with pytest.raises(ConfigError, match="run.yml(:[0-9]+)?: hostfile.*may be untrusted") as caught:
                load_config([MODEL, file])
            assert "../method.py: not run" in str(caught.value)


def test_the_record_of_a_checkpoint_keeps_its_addresses(tmp_path: Path) -> None:
    keys = NONE | {"test_data_paths": ["s3://mine/a"], "train_data_paths": ["s3://mine/b"], "save": "/scratch/run"}
    file = write(tmp_path / "run/global_step7/config.yml", MODEL | keys)
    assert load_saved_config(file).config.data.test_data_paths == ["s3://mine/a"]
