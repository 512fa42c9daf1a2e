"""The process group of a run, and the few collectives that are used outside the engine."""

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.constants import default_pg_timeout
from torch import Tensor

from megatron_coca.config import ConfigError
from megatron_coca.training.exit_status import NotJoined

JOIN_TIMEOUT = 600.0
"""Seconds to wait for all processes where the caller does not say."""
LOOPBACK = "127.0.0.1"
_POLL = 0.05
_CONNECT = 5.0
"""Seconds for one attempt to connect: a host that is down may answer nothing at all."""
_FAREWELL = 5.0
"""Seconds that rank 0 keeps the store open for the others to read who is missing."""


class Member(NamedTuple):
    """A process among those of its run, and where the first one listens."""

    rank: int
    world_size: int
    address: str
    port: int
    agent: bool
    """Whether a process of torchrun holds the store, so that rank 0 connects to it as the others do."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Member":
        """By the variables that launchers set, which `launch.complete_environment` completes."""
        return cls(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def join(member: Member, timeout: float) -> dist.Store:
    """Wait at most `timeout` seconds until all processes are there; the store that they share.

    Raises:
        NotJoined: some did not come in time; every one that came says so, by rank and host.
        ConfigError: the port of rank 0 is in use.
    """
    if member.world_size == 1:
        return dist.HashStore()
    limit = _Limit(timeout)
    store = _serve(member, limit) if member.rank == 0 and not member.agent else _connect(member, limit)
    _wait_for_all(store, member, limit)
    return store


class _Limit:
    """The time at which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def until(self, holds: Callable[[], bool], grace: float = 0.0) -> bool:
        """Ask again and again, until the answer is yes or `grace` seconds after the limit. In between Python runs, so
        that Ctrl-C is heard."""
        while not holds():
            if time.monotonic() > self._end + grace:
                return False
            time.sleep(_POLL)
        return True

    def __str__(self) -> str:
        return f"{self.seconds:g} s (`join_timeout`)"


def _timeout(limit: _Limit) -> timedelta:
    """For the store's own calls."""
    return timedelta(seconds=limit.left + _FAREWELL)


def _serve(member: Member, limit: _Limit) -> dist.TCPStore:
    options = {"is_master": True, "wait_for_workers": False, "timeout": _timeout(limit)}
    try:
        if member.address == LOOPBACK:
            options["master_listen_fd"] = _bound_to_loopback(member.port)
        return dist.TCPStore(member.address, member.port, member.world_size, **options)
    except (OSError, dist.DistNetworkError) as error:
        taken = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
        if not taken:
            raise
        raise ConfigError(
            [f"MASTER_PORT: port {member.port} of this host is in use; set another (`master_port` in a configuration)"]
        ) from error


def _bound_to_loopback(port: int) -> int:
    """A socket's descriptor, which the store takes over; by itself the store would listen on every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        return listener.detach()


def _connect(member: Member, limit: _Limit) -> dist.TCPStore:
    reason: OSError | None = None

    def reached() -> bool:
        nonlocal reason
        try:
            socket.create_connection((member.address, member.port), timeout=min(_CONNECT, limit.left + _POLL)).close()
        except OSError as error:
            reason = error
            return False
        return True

    if not limit.until(reached):
        raise NotJoined(
            f"rank {member.rank} on {socket.gethostname()}: rank 0 did not answer at {member.address}:{member.port} "
            f"within {limit} ({reason}); see whether its host was started, and whether this one can reach it"
        )
    return dist.TCPStore(member.address, member.port, member.world_size, is_master=False, timeout=_timeout(limit))


def _wait_for_all(store: dist.Store, member: Member, limit: _Limit) -> None:
    """Every process enters its host's name; rank 0 then says whether all came, so that all say the same."""
    store.set(f"joined/{member.rank}", socket.gethostname())
    if member.rank == 0:
        _judge(store, member.world_size, limit)
    try:
        # Rank 0 may have begun later than this process, and its limit counts.
        answered = limit.until(lambda: store.check(["missing"]), grace=limit.seconds + _FAREWELL)
        verdict = json.loads(store.get("missing")) if answered else None
    except dist.DistError as error:
        raise NotJoined(
            f"rank {member.rank} on {socket.gethostname()}: rank 0 at {member.address}:{member.port} ended while the "
            "processes were joining; see its message"
        ) from error
    if verdict is None:
        raise NotJoined(
            f"rank {member.rank} on {socket.gethostname()}: rank 0 answers at {member.address}:{member.port}, but did not "
            f"say within {limit} whether all processes are there"
        )
    if verdict["missing"]:
        store.set(f"seen/{member.rank}", "")
        if member.rank == 0:
            others = [f"seen/{rank}" for rank in range(member.world_size) if rank not in verdict["missing"]]
            _Limit(_FAREWELL).until(lambda: store.check(others))
        raise NotJoined(_missing_text(verdict["missing"], verdict["hosts"], member, limit))


def _judge(store: dist.Store, world_size: int, limit: _Limit) -> None:
    keys = [f"joined/{rank}" for rank in range(world_size)]
    limit.until(lambda: store.check(keys))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    hosts: dict[str, list[int]] = {}
    for rank in range(world_size) if missing else ():
        if rank not in missing:
            hosts.setdefault(store.get(keys[rank]).decode(errors="replace"), []).append(rank)
    store.set("missing", json.dumps({"missing": missing, "hosts": hosts}))


def _missing_text(missing: Sequence[int], hosts: Mapping[str, Sequence[int]], member: Member, limit: _Limit) -> str:
    joined = "; ".join(f"{host}: {ranks_text(ranks)}" for host, ranks in hosts.items())
    return (
        f"{len(missing)} of {member.world_size} processes did not join within {limit}: {ranks_text(missing)}. "
        f"These joined: {joined}. See whether the missing ones were started, and whether their hosts reach "
        f"{member.address}:{member.port}"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks in few words: "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def init_distributed(timeout: float | None = None, join_timeout: float = JOIN_TIMEOUT) -> None:
    """Join the process group that the launcher's environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT).

    Args:
        timeout: seconds after which a collective gives up, None for DeepSpeed's default.
        join_timeout: seconds to wait for all processes.

    Raises:
        NotJoined, ConfigError: see `rendezvous.join`.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On CPU DeepSpeed would compile a shared-memory all-reduce at start; gloo needs no compiler on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    member = Member.of(os.environ)
    store = join(member, join_timeout)
    limit = default_pg_timeout if timeout is None else timedelta(seconds=timeout)
    store.set_timeout(limit)
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("run", store),
        rank=member.rank,
        world_size=member.world_size,
        timeout=limit,
        # As DeepSpeed does where it makes the group: a single process has no peer to be bound for.
        device_id=torch.device(local_device()) if cuda and member.world_size > 1 else None,
    )
    deepspeed.init_distributed(backend, verbose=False)


def rank() -> int:
    """This process's number in the run."""
    return dist.get_rank()


def world_size() -> int:
    """Processes in the run."""
    return dist.get_world_size()


def is_main() -> bool:
    """Whether this process writes what is written once."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def everyone_succeeded(succeeded: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks say so: a failure on one rank must end the save on all. `group` is a background group."""
    return not anyone((not succeeded,), group)[0]


def anyone(flags: Sequence[bool], group: dist.ProcessGroup | None = None) -> tuple[bool, ...]:
    """For each of several questions whether any rank says so; all get the same answers."""
    values = torch.tensor(flags, dtype=torch.int32, device="cpu" if group is not None else local_device())
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return tuple(bool(value) for value in values.tolist())


def broadcast_text(text: str) -> str:
    """The first rank's text, on every rank."""
    if world_size() == 1:
        return text
    encoded = text.encode()
    size = torch.tensor([len(encoded)], device=local_device())
    dist.broadcast(size, src=0)
    content = torch.zeros(int(size), dtype=torch.uint8, device=local_device())
    if is_main() and encoded:
        content.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    dist.broadcast(content, src=0)
    return bytes(content.cpu().numpy()).decode()


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """The sum over all ranks of each of several values."""
    total = torch.tensor(values, dtype=torch.float64, device=local_device())
    if world_size() > 1:
        dist.all_reduce(total)
    return list(total.tolist())


def send_to_main(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Give a CPU tensor to the first rank, which asks for it by `receive`, in a background group."""
    dist.send(tensor.contiguous().view(torch.uint8), group=group, group_dst=0)


def receive(sender: int, numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """The tensor that a rank gives by `send_to_main`, 1-D."""
    content = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
    dist.recv(content, group=group, group_src=sender)
    return content.view(dtype)


def merge_dicts(mine: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """The entries of all ranks' mappings together, in a background group; values are what JSON can hold."""
    return {name: value for each in gather_texts(json.dumps(mine), group) for name, value in json.loads(each).items()}


def gather_texts(mine: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The text of every rank, by rank; `group` is a background group. Bytes are sent, not pickles, which run code."""
    device = "cpu" if group is not None else local_device()
    own = torch.frombuffer(bytearray(mine.encode()) or bytearray(1), dtype=torch.uint8).to(device)
    own_size = torch.tensor([len(mine.encode())], device=device)
    sizes = [torch.empty_like(own_size) for _ in range(world_size())]
    dist.all_gather(sizes, own_size, group=group)
    longest = max(1, *(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded, group=group)
    return [bytes(each[: int(size)].cpu().numpy()).decode() for each, size in zip(everyones, sizes, strict=True)]


def gather_floats(values: list[float]) -> list[list[float]]:
    """The values of every rank, by rank; all ranks must give equally many."""
    mine = torch.tensor(values, dtype=torch.float64, device=local_device())
    everyones = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(everyones, mine)
    return [each.tolist() for each in everyones]


def timed_sum(values: Tensor) -> float:
    """Seconds that adding up `values` over all ranks, in place, takes on this one."""
    barrier()
    _finish_device_work()
    began = time.perf_counter()
    dist.all_reduce(values)
    _finish_device_work()
    return time.perf_counter() - began


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_name() -> str:
    """The name of this host."""
    return socket.gethostname()


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a scalar over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(value)
        value /= world_size()
    return value


def background_group() -> dist.ProcessGroup:
    """A group of all ranks for a thread beside the training thread; it works on CPU tensors. Every rank must call it.

    Its collectives wait for a day: a rank may write or upload for hours, and the watchdog finds one that hangs.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


def local_device() -> str:
    """The device of this process: its own GPU, or the CPU."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"


def shut_down() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
