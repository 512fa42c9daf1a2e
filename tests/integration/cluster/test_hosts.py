"""Two hosts train together with the results of two processes on one host. Each host is a network namespace."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.patience import patience

pytestmark = pytest.mark.slow

STEPS = 4
PLAIN = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": STEPS,
    "train_batch_size": 8,
    "eval_interval": 4,
}
EXECUTE = ("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])")
"""Options with which Python becomes the command that follows them."""


class Host(NamedTuple):
    """A namespace of the network, the name of its interface and its address."""

    name: str
    interface: str
    address: str

    @property
    def enter(self) -> list[str]:
        """What a command begins with to run there."""
        return ["ip", "netns", "exec", self.name]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts are simulated with `ip netns`: install iproute2")
    tag = f"{os.getpid() % 65536:x}"
    subnet = f"10.{199 + os.getpid() % 50}.{os.getpid() // 50 % 256}"
    pair = tuple(Host(f"host{end}-{tag}", f"v{end}{tag}", f"{subnet}.{end}") for end in (1, 2))
    with ExitStack() as stack:
        try:
            for host in pair:
                ip("netns", "add", host.name)
                stack.callback(subprocess.run, ["ip", "netns", "del", host.name], check=False)
            ip("link", "add", pair[0].interface, "type", "veth", "peer", "name", pair[1].interface)
            for host in pair:
                ip("link", "set", host.interface, "netns", host.name)
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                ip("-n", host.name, "link", "set", host.interface, "up")
                ip("-n", host.name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts cannot be simulated here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield pair[0], pair[1]


@pytest.fixture(scope="module")
def one_host(train: Any, open_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same training in two processes of one host."""
    folder = tmp_path_factory.mktemp("one-host") / "run"
    finished = train(PLAIN | {"save": str(folder)}, options=("--num_gpus", "2"))
    assert finished.status == 0, finished.output
    return open_run(folder)


def same(one: Any, other: Any) -> None:
    """Losses, norms and weights, to the last bit."""
    assert one.records == other.records and len(one.losses) == STEPS
    assert one.weights(STEPS) == other.weights(STEPS)


def test_two_hosts_by_environment(
    start: Any, open_run: Any, hosts: tuple[Host, Host], one_host: Any, tmp_path: Path
) -> None:
    """As torchrun, Kubernetes and their like start processes: one on each host, told the first one's address."""
    processes = []
    for rank, host in enumerate(hosts):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        processes.append(
            start(
                PLAIN | {"save": str(tmp_path / "run")},
                before=(*EXECUTE, *host.enter, sys.executable),
                environment=own,
            )
        )
    for process in processes:
        output, _ = process.communicate(timeout=patience(120))
        assert process.returncode == 0, output
    same(open_run(tmp_path / "run"), one_host)


def test_a_host_that_never_joins(start: Any, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Two of three hosts come: both end once, with one message that names the third."""
    processes = []
    for rank, host in enumerate(hosts):
        own = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29511"}
        changes = PLAIN | {"save": str(tmp_path / "run"), "join_timeout": 4.0}
        processes.append(start(changes, before=(*EXECUTE, *host.enter, sys.executable), environment=own))
    for process in processes:
        output, _ = process.communicate(timeout=patience(60))
        assert process.returncode == 79, output
        assert output.count("4 s (`join_timeout`): ranks 2.") == 1, output
        assert "Traceback" not in output, output
    assert not (tmp_path / "run").exists()
