"""All ranks notice the loss of another, and none an orderly end. Ranks are threads here."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_coca.training.engine.peers import Peers
from megatron_coca.work.statuses import FAILED
from tests.patience import patience

SOON = patience(10.0)


class Store(dict[str, bytes]):
    """The store that the ranks share."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Group:
    """Ranks, with the statuses that ended them."""

    def __init__(self, size: int) -> None:
        self.statuses: dict[int, int] = {}
        self.ranks = [
            Peers(rank, 0.2, lambda code, rank=rank: self.statuses.update({rank: code})) for rank in range(size)
        ]  # type: ignore[misc]
        store = Store()
        for peers in self.ranks:
            peers.join(store, "127.0.0.1", True)  # type: ignore[arg-type]
        wait_for(lambda: len(self.ranks[0]._members) == size - 1)

    def close(self) -> None:
        for peers in self.ranks:
            peers.leave(True)


@pytest.fixture
def group() -> Any:
    made = Group(4)
    yield made
    made.close()


@pytest.mark.parametrize("lost", [0, 2])
def test_all_others_end_and_name_the_lost_rank(group: Group, lost: int, capfd: pytest.CaptureFixture[str]) -> None:
    group.ranks[lost].leave(orderly=False)  # as the kernel does for a killed process
    others = {rank for rank in range(4) if rank != lost}
    wait_for(lambda: set(group.statuses) == others)
    assert set(group.statuses.values()) == {FAILED}
    assert all((group.ranks[rank].lost or "").startswith(f"rank {lost} on ") for rank in others)
    said = capfd.readouterr().err
    assert said.count(f": rank {lost} on ") == 3 and "restart all processes with --auto-resume" in said


def test_an_orderly_end_is_no_loss(group: Group) -> None:
    group.ranks[2].leave(orderly=True)
    wait_for(lambda: len(group.ranks[0]._members) == 2)
    group.ranks[0].leave(orderly=True)
    time.sleep(0.5)
    assert not group.statuses and all(peers.lost is None for peers in group.ranks)


def test_a_rank_that_ends_by_its_own_error_names_the_cause(group: Group) -> None:
    group.ranks[3].leave(orderly=False)
    error = RuntimeError("Connection closed by peer")
    group.ranks[1].explain(error)
    group.ranks[1].leave(orderly=False)
    assert error.__notes__[0].startswith("rank 3 on ") and "had already ended" in error.__notes__[0]
    time.sleep(0.5)
    assert 1 not in group.statuses, "it ends by itself"


def test_strangers_and_an_unreachable_rank_do_no_harm(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    store, address = Store(), group.ranks[1]._members
    port = next(iter(address)).getpeername()[1]
    store.set("peers", f"{port} another-secret host")
    stranger = Peers(7, 0.2, lambda code: None)
    stranger.join(store, "127.0.0.1", True)  # type: ignore[arg-type]
    stranger.leave(orderly=False)
    time.sleep(0.3)
    assert group.ranks[0].lost is None and len(group.ranks[0]._members) == 3
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    for text in ("1 secret host", ""):  # a port that is closed, and a rank 0 that could not listen
        store.set("peers", text)
        Peers(1).join(store, "127.0.0.1", True)  # type: ignore[arg-type]
    assert caplog.text.count("no connection to rank 0") == 2
