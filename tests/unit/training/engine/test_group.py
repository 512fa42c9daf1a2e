"""How processes meet at the start: all name the missing ones, and no others can join."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_coca.config import ConfigError
from megatron_coca.training.engine import group
from megatron_coca.training.engine.group import Rendezvous, join
from megatron_coca.training.launch.environment import free_port
from megatron_coca.work.statuses import EXIT_STATUSES, NotJoined

LISTEN = "0A"
ROOT = Path(__file__).parents[4]


def listeners() -> set[tuple[str, int]]:
    """Address, as the kernel writes it, and port of every listening TCP socket of this host."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == LISTEN:
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


def members(ranks: list[int], world_size: int, address: str = "127.0.0.1") -> list[Rendezvous]:
    port = free_port()
    return [Rendezvous(rank, world_size, address, port, False) for rank in ranks]


def joined(present: list[Rendezvous], timeout: float) -> list[dist.Store | Exception]:
    """Results or errors of processes (here threads) that join together."""
    with ThreadPoolExecutor(len(present)) as pool:
        futures = [pool.submit(join, member, timeout) for member in present]
        return [future.exception() or future.result() for future in futures]  # type: ignore[misc]


def test_processes_of_one_host_meet_where_no_other_host_can_come() -> None:
    present = members([0, 1, 2], 3)
    stores = joined(present, 20.0)
    assert [address for address, port in listeners() if port == present[0].port] == ["0100007F"], "127.0.0.1 only"
    stores[2].set("from", "rank 2")  # type: ignore[union-attr]
    assert stores[0].get("from") == b"rank 2"  # type: ignore[union-attr]


def test_one_process_opens_no_port() -> None:
    before = listeners()
    assert isinstance(join(Rendezvous(0, 1, "127.0.0.1", free_port(), False), 5.0), dist.HashStore)
    assert listeners() <= before


def test_every_process_names_those_that_did_not_come() -> None:
    present = members([0, 1, 4], 6)
    errors = joined(present, 1.0)
    assert all(isinstance(error, NotJoined) for error in errors), errors
    assert len(set(map(str, errors))) == 1, "all give the same message"
    for fact in ("3 of 6 processes ", " 1 s (`join_timeout`)", "ranks 2, 3, 5.", f"joined: {socket.gethostname()}. "):
        assert fact in str(errors[0])
    assert NotJoined.status in EXIT_STATUSES


def test_the_first_process_does_not_come() -> None:
    began = time.monotonic()
    (error,) = joined(members([3], 4), 1.0)
    assert isinstance(error, NotJoined) and time.monotonic() - began < 4.0
    assert "rank 0 did not answer at 127.0.0.1:" in str(error) and "within 1 s (`join_timeout`)" in str(error)


def test_a_late_process_is_waited_for() -> None:
    early, late = members([0, 1], 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, early, 20.0)
        time.sleep(0.5)
        assert not first.done()
        second = pool.submit(join, late, 20.0)
        assert isinstance(first.result(10), dist.TCPStore) and isinstance(second.result(10), dist.TCPStore)


def test_processes_that_torchrun_starts_again_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun still has the keys of the first attempt."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    for attempt, ranks in (("0", [0, 1]), ("1", [0])):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        found = joined([Rendezvous(rank, 2, "127.0.0.1", port, True) for rank in ranks], 2.0)
        assert [isinstance(each, NotJoined) for each in found] == [attempt == "1"] * len(ranks), found
    del agent


def test_the_first_process_ends_while_others_join() -> None:
    """As after Ctrl-C of rank 0: its store, which knows the missing ranks, is gone."""
    first, second, _ = members([0, 1, 2], 3)
    store = dist.TCPStore("127.0.0.1", first.port, 3, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join, second, 30.0)
        while not store.check(["joined/1"]):
            time.sleep(0.02)
        del store
        assert "ended while the processes were joining" in str(waiting.exception(10))


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for address in ("127.0.0.1", socket.gethostname()):
            with pytest.raises(ConfigError, match=f"MASTER_PORT: port {port} of this host cannot be used"):
                join(Rendezvous(0, 2, address, port, False), 5.0)


def test_an_address_that_does_not_resolve() -> None:
    began = time.monotonic()
    with pytest.raises(NotJoined, match=r"no-such-host.invalid.* within 1 s \(`join_timeout`\)") as error:
        join(Rendezvous(1, 2, "no-such-host.invalid", free_port(), False), 1.0)
    assert time.monotonic() - began < 10.0 and error.value.status == 79


@pytest.mark.parametrize(
    ("present", "address", "told"),
    [
        (
            Rendezvous(1, 2, "no-such-host.invalid", 29500, False),
            "no-such-host.invalid",
            "rank 0 at no-such-host.invalid:29500 (",
        ),
        (Rendezvous(0, 3, "127.0.0.1", 0, False), "127.0.0.1", "ranks 1, 2, which have not joined"),
    ],
)
def test_a_process_says_for_which_ranks_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, present: Rendezvous, address: str, told: str
) -> None:
    monkeypatch.setattr(group, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(group, "GRACE_SECONDS", 0.0)
    with pytest.raises(NotJoined):
        join(present._replace(port=present.port or free_port()), 1.0)
    lines = [line for line in caplog.text.splitlines() if "waiting for" in line]
    assert 1 <= len(lines) <= 3, "the pause doubles"
    assert told in lines[0] and address in lines[0] and f"rank {present.rank} on {socket.gethostname()}" in lines[0]


def test_an_address_that_resolves_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a pod may resolve only after its start; rank 0 needs no name for itself."""
    resolve, began = socket.getaddrinfo, time.monotonic()

    def late(host: str, *arguments: object, **keywords: object) -> object:
        if host == "localhost" and time.monotonic() - began < 0.5:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    stores = joined(members([0, 1], 2, "localhost"), 20.0)
    assert all(isinstance(store, dist.TCPStore) for store in stores) and time.monotonic() - began >= 0.5


def test_ranks_exchange_no_pickles() -> None:
    """Unpickling would run code that a peer sends; texts and numbers are enough."""
    pickling = {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
    }
    for path in (ROOT / "megatron_coca").rglob("*.py"):
        text = path.read_text()
        assert not [name for name in pickling if name in text], path


def test_flags_go_through_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the default group is NCCL, so that no step waits for the device; the Gloo group is made once."""
    made, reduced = [], []
    monkeypatch.setattr(group, "world_size", lambda: 2)
    monkeypatch.setattr(group, "_host_groups", [])
    monkeypatch.setattr(group.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(group.dist, "new_group", lambda backend: made.append(backend) or "hosts")
    monkeypatch.setattr(group.dist, "all_reduce", lambda values, op, group: reduced.append((values.device.type, group)))
    assert group.anyone((True, False)) == (True, False) and group.everyone_succeeded(True)
    assert made == ["gloo"] and reduced == [("cpu", "hosts")] * 2
