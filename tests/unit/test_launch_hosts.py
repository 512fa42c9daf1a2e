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
        ({}, {"a": range(8), "b": range(8), "c": range(2)}),
        ({"num_nodes": 2, "num_gpus": 4}, {"a": range(4), "b": range(4)}),
        ({"include": "b@c:1"}, {"b": range(8), "c": [1]}),
        ({"include": "b:0@b:3,2"}, {"b": [0, 2, 3]}),
        ({"exclude": "a@b:0,7"}, {"b": range(1, 7), "c": range(2)}),
        ({"exclude": "c", "num_gpus": 1}, {"a": [0], "b": [0]}),
    ],
)
def test_chosen_hosts(hostfile: str, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    hosts = chosen_hosts(configured(hostfile=hostfile, **keys))
    assert hosts == [Host(name, tuple(slots)) for name, slots in expected.items()]


@pytest.mark.parametrize(
    ("keys", "slots"),
    [({}, [0]), ({"num_gpus": 3}, [0, 1, 2]), ({"include": "localhost:1,3"}, [1, 3]), ({"num_nodes": 1}, [0])],
)
def test_this_host(keys: dict[str, Any], slots: list[int]) -> None:
    assert chosen_hosts(configured(**keys)) == [Host("localhost", tuple(slots))]


def test_a_missing_hostfile_means_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    """As in GPT-NeoX, whose 125M.yml has `hostfile: /mock_path`."""
    assert chosen_hosts(configured(hostfile="/mock_path", num_gpus=2)) == [Host("localhost", (0, 1))]
    assert "hostfile: /mock_path: no such file; using this host only" in capsys.readouterr().err
    assert start(configured(hostfile="/mock_path"), {}, ["train.py"]) is None, "one process trains where it is"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hostfile": "nowhere", "num_nodes": 2}, "hostfile: nowhere: no such file"),
        ({"num_nodes": 2}, "num_nodes: 2 hosts need a hostfile"),
        ({"text": "a slots=2\nb\n"}, "hosts:2: 'b' is not of the form"),
        ({"text": "a slots=2\nb slots=99999999999999\n"}, "hosts:2: a host has at most 9999 slots"),
        ({"text": f"a slots={'9' * 5000}\n"}, "hosts:1: a host has at most 9999 slots"),
        ({"text": "a slots=2\n", "include": "a:99999999999"}, "'a:99999999999' is not of the form .* up to 9999"),
        ({"exclude": "localhost:99999999999"}, "'localhost:99999999999' is not of the form"),
        ({"text": "a\udcff slots=2\n"}, r"hosts: not UTF-8 text \(byte 1\); save it as UTF-8"),
        ({"text": "a slots=2\na slots=3\n"}, "hosts:2: a is listed twice"),
        ({"text": "# none\n"}, "names no host"),
        ({"text": "a slots=2\n", "num_nodes": 3}, "num_nodes: 3, but there are 1 hosts"),
        ({"text": "a slots=2\n", "num_gpus": 3}, "num_gpus: 3, but a has 2 slots"),
        ({"text": "a slots=2\n", "include": "a", "exclude": "a"}, "include: contradicts exclude"),
        ({"text": "a slots=2\n", "include": "d"}, r"include: no host d \(a\)"),
        ({"text": "a slots=2\n", "exclude": "a:2"}, "exclude: a has no slot 2"),
        ({"text": "a slots=2\n", "exclude": "a"}, "exclude: leaves no slot"),
        ({"text": "a slots=2\n", "include": "a:x"}, "'a:x' is not of the form"),
        ({"text": "a slots=2\n-oProxyCommand=x slots=2\n"}, "hosts:2: '-oProxyCommand=x' is not a host name"),
        ({"text": "-oProxyCommand=x@a slots=2\n"}, "hosts:1: '-oProxyCommand=x@a' is not a host name"),
        ({"text": "root@-a slots=2\n"}, "hosts:1: 'root@-a' is not a host name"),
        ({"text": "a;id slots=2\n"}, "hosts:1: 'a;id' is not a host name"),
        ({"text": "$(id) slots=2\n"}, "is not a host name"),
        ({"text": "a,b slots=2\n"}, "'a,b' is not a host name"),
        (
            {"text": "a slots=2\n", "master_addr": "-oProxyCommand=x"},
            "master_addr: '-oProxyCommand=x' is not a host name",
        ),
        ({"master_addr": "a;id"}, "master_addr: 'a;id' is not a host name"),
    ],
)
def test_hosts_that_cannot_be_used(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    text = keys.pop("text", None) if (keys := dict(keys)) else None
    if text is not None:
        (tmp_path / "hosts").write_bytes(text.encode(errors="surrogateescape"))
        keys["hostfile"] = str(tmp_path / "hosts")
    with pytest.raises(ConfigError, match=message):
        chosen_hosts(configured(**keys))


@pytest.mark.parametrize(
    "name", ["gpu-7", "gpu_7.example.org", "10.0.0.7", "alice@gpu7", "a.b-c@[fe80::1%eth0]", "fe80::1%eth0", "::1"]
)
def test_names_of_hosts(tmp_path: Path, name: str) -> None:
    (tmp_path / "hosts").write_text(f"{name} slots=1\n")
    assert [host.name for host in chosen_hosts(configured(hostfile=str(tmp_path / "hosts"), master_addr=name))] == [
        name
    ]


def test_the_variables_of_each_rank() -> None:
    first, second = LocalRanks((4, 5), 0, 4, "10.0.0.1", 12345), LocalRanks((0, 1), 2, 4, "10.0.0.1", 12345)
    shown = [ranks.variables({"CUDA_VISIBLE_DEVICES": "8,9"}, 1) for ranks in (first, second)]
    assert shown[0]["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "CUDA_VISIBLE_DEVICES" not in shown[1], "the first devices need no choice"
    chosen = LocalRanks((0, 2), 0, 2, "127.0.0.1", 1).variables({"CUDA_VISIBLE_DEVICES": "5,6,7"}, 0)
    assert chosen["CUDA_VISIBLE_DEVICES"] == "5,7", "slots count within the visible devices"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [shown[1][name] for name in names] == ["3", "4", "1", "2", "10.0.0.1", "12345"]


def test_slurm_needs_no_hostfile() -> None:
    keys = configured(launcher="slurm", num_gpus=8, num_nodes=4, comment="a b", account="lab")
    command = srun_command(keys, {"SLURM_JOB_ID": "1"}, SCRIPT)
    options = command[1 : command.index(sys.executable)]
    assert {"--ntasks-per-node=8", "--nodes=4", "--comment=a b", "--account=lab"} <= set(options)
    assert not any(option.startswith(("--gpus", "--nodelist")) for option in options), "the allocation has them"
    assert command[-3:] == ["/x/train.py", "a.yml", "lr=1"]
    assert "--gpus-per-node=8" in srun_command(keys, {}, SCRIPT)


def test_slurm_with_a_part_of_a_hostfile(hostfile: str) -> None:
    command = srun_command(configured(hostfile=hostfile, exclude="c"), {}, SCRIPT)
    assert {"--ntasks-per-node=8", "--nodes=2", "--nodelist=a,b"} <= set(command)
    with pytest.raises(ConfigError, match="same number of tasks on every host"):
        srun_command(configured(hostfile=hostfile), {}, SCRIPT)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("pdsh", None),
        ("openmpi", "-x MASTER_ADDR=a -x MASTER_PORT=29500"),
        ("mvapich", "-env MASTER_ADDR=a -env MASTER_PORT=29500"),
    ],
)
def test_launchers_of_deepspeed(
    hostfile: str, monkeypatch: pytest.MonkeyPatch, kind: str, arguments: str | None
) -> None:
    keys = configured(hostfile=hostfile, launcher=kind, master_addr="a", force_multi=True, no_ssh_check=True)
    with pytest.raises(ConfigError, match=f"launcher: {kind} is not installed here"):
        deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    command = deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert command[-3:] == ["/x/train.py", "a.yml", "lr=1"]
    assert {f"--hostfile={hostfile}", f"--launcher={kind}", "--master_addr=a", "--master_port=29500"} <= set(command)
    assert {"--force_multi", "--no_ssh_check", "--no_local_rank"} <= set(command)
    assert [part for part in command if part.startswith("--launcher_args")] == (
        [f"--launcher_args={arguments}"] if arguments else []
    )


@pytest.mark.parametrize("argument", ["save=$(id)", "save=`id`", "save=a;id", "save=a|b", "a=1\nb=2", 'x=" && id "'])
def test_pdsh_gets_nothing_that_a_shell_would_run(
    hostfile: str, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    keys = configured(hostfile=hostfile, launcher="pdsh")
    with pytest.raises(ConfigError, match="launcher: pdsh passes .* to a shell on every host"):
        deepspeed_command(keys, chosen_hosts(keys), ["/x/train.py", "a.yml", argument])


def test_mpirun_cannot_leave_out_a_host(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    keys = configured(hostfile=hostfile, launcher="openmpi", num_nodes=2)
    with pytest.raises(ConfigError, match="openmpi uses every slot"):
        deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
