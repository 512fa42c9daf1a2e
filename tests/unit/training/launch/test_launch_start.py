"""Hosts, and the command lines that reach them."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.config import ConfigError, LaunchConfig
from megatron_coca.training.launch.start import Host, LocalRanks, chosen_hosts, deepspeed_command, srun_command, start

SCRIPT = ["/x/train.py", "a.yml", "lr=1"]


def configured(**keys: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(keys)


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("# three hosts\na slots=8\n\nb slots=8  # the second\nc slots = 2\n")
    return str(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"a": 8, "b": 8, "c": 2}),
        ({"num_nodes": 2, "num_gpus": 4}, {"a": 4, "b": 4}),
        ({"num_gpus": 1}, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_chosen_hosts(hostfile: str, keys: dict[str, Any], expected: dict[str, int]) -> None:
    assert chosen_hosts(configured(hostfile=hostfile, **keys)) == [Host(*host) for host in expected.items()]


@pytest.mark.parametrize(("keys", "slots"), [({}, 1), ({"num_gpus": 3}, 3), ({"num_nodes": 1}, 1)])
def test_this_host(keys: dict[str, Any], slots: int) -> None:
    assert chosen_hosts(configured(**keys)) == [Host("localhost", slots)]


def test_a_missing_hostfile_means_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    """As in GPT-NeoX: its 125M.yml has `hostfile: /mock_path`."""
    assert chosen_hosts(configured(hostfile="/mock_path", num_gpus=2)) == [Host("localhost", 2)]
    assert "hostfile: /mock_path: not found" in capsys.readouterr().err
    assert start(configured(hostfile="/mock_path"), {}, ["train.py"]) is None, "one process trains where it is"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hostfile": "nowhere", "num_nodes": 2}, "hostfile: nowhere: not found"),
        ({"num_nodes": 2}, "num_nodes: 2 hosts need a hostfile"),
        ({"text": "a slots=2\nb\n"}, "hosts:2: 'b' must have the form"),
        ({"text": "a slots=2\nb slots=99999\n"}, "hosts:2: 'b slots=99999' must have the form"),
        ({"text": "a\udcff slots=2\n"}, "hosts: cannot be read as UTF-8 text"),
        ({"text": "a slots=2\na slots=3\n"}, "hosts:2: a is listed twice"),
        ({"text": "# none\n"}, "contains no hosts"),
        ({"text": "a slots=2\n", "num_nodes": 3}, "num_nodes: 3, but .*hosts has 1 hosts"),
        ({"text": "a slots=2\n", "num_gpus": 3}, "num_gpus: 3, but a has only 2 slots"),
        ({"text": "a slots=2\n-oProxyCommand=x slots=2\n"}, "hosts:2: '-oProxyCommand=x slots=2' must have the form"),
    ],
)
def test_hosts_that_cannot_be_used(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    text = keys.pop("text", None) if (keys := dict(keys)) else None
    if text is not None:
        (tmp_path / "hosts").write_bytes(text.encode(errors="surrogateescape"))
        keys["hostfile"] = str(tmp_path / "hosts")
    with pytest.raises(ConfigError, match=message):
        chosen_hosts(configured(**keys))


def test_the_variables_of_each_rank() -> None:
    shown = LocalRanks(2, 2, 4, "10.0.0.1", 12345).variables(1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [shown[name] for name in names] == ["3", "4", "1", "2", "10.0.0.1", "12345"]


def test_slurm_needs_no_hostfile() -> None:
    keys = configured(launcher="slurm", num_gpus=8, num_nodes=4, comment="a b", account="lab")
    command = srun_command(keys, {"SLURM_JOB_ID": "1"}, SCRIPT)
    options = command[1 : command.index(sys.executable)]
    assert {"--ntasks-per-node=8", "--nodes=4", "--comment=a b", "--account=lab"} <= set(options)
    assert not any(option.startswith(("--gpus", "--nodelist")) for option in options), "the allocation has them"
    assert command[-3:] == ["/x/train.py", "a.yml", "lr=1"]
    assert "--gpus-per-node=8" in srun_command(keys, {}, SCRIPT)


def test_slurm_with_a_part_of_a_hostfile(hostfile: str) -> None:
    command = srun_command(configured(hostfile=hostfile, num_nodes=2), {}, SCRIPT)
    assert {"--ntasks-per-node=8", "--nodes=2", "--nodelist=a,b"} <= set(command)
    with pytest.raises(ConfigError, match="same number of tasks on every host"):
        srun_command(configured(hostfile=hostfile), {}, SCRIPT)


def test_the_launcher_of_deepspeed(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = configured(hostfile=hostfile, master_addr="a", num_nodes=2, no_ssh_check=True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="launcher: pdsh is not installed here"):
        deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    command = deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert command[-3:] == ["/x/train.py", "a.yml", "lr=1"]
    assert {f"--hostfile={hostfile}", "--launcher=pdsh", "--master_addr=a", "--master_port=29500"} <= set(command)
    assert {"--num_nodes=2", "--no_ssh_check", "--no_local_rank"} <= set(command)


def test_a_user_of_a_host_is_no_part_of_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("me@192.168.1.10 slots=2\nyou@192.168.1.7 slots=2\n")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    keys = configured(hostfile=str(tmp_path / "hosts"))
    assert chosen_hosts(keys) == [Host("me@192.168.1.10", 2), Host("you@192.168.1.7", 2)]
    assert "--master_addr=192.168.1.10" in deepspeed_command(keys, chosen_hosts(keys), SCRIPT)


@pytest.mark.parametrize("argument", ["save=$(id)", "save=`id`", "save=a;id", "save=a|b", "a=1\nb=2", 'x=" && id "'])
def test_pdsh_gets_nothing_that_a_shell_would_run(
    hostfile: str, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    keys = configured(hostfile=hostfile, launcher="pdsh")
    with pytest.raises(ConfigError, match="launcher: pdsh passes .* to a shell on every host"):
        deepspeed_command(keys, chosen_hosts(keys), ["/x/train.py", "a.yml", argument])
