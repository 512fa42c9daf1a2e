"""The process group of a run: a rendezvous with a timeout, and the collectives that are used outside the engine."""

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_coca.config import ConfigError
from megatron_coca.training.engine.peers import Peers
from megatron_coca.work.statuses import NotJoined

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
"""Timeout of one connection attempt, because a host that is down may not answer at all."""
NOTICE_SECONDS = 15.0
"""Seconds until a waiting process logs what it waits for. The pause before the next message doubles each time."""
DEFAULT_TIMEOUT = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
"""Time limit of collectives without a watchdog, as in DeepSpeed."""
GRACE_SECONDS = 5.0
"""Seconds for which rank 0 keeps the store open, so that the other ranks can read which ranks are missing."""


class Rendezvous(NamedTuple):
    """A process's rank, the world size, and the address at which rank 0 (or torchrun's `agent`) serves the store."""

    rank: int
    world_size: int
    address: str
    port: int
    agent: bool


def join(rendezvous: Rendezvous, timeout: float) -> dist.Store:
    """Wait at most `timeout` seconds until all ranks have joined, and return their common store.

    Raises:
        NotJoined: some ranks did not join in time. The error names them on every rank that joined.
        ConfigError: the port of rank 0 is in use.
    """
    rank, world_size, address, port, agent = rendezvous
    if world_size == 1:
        return dist.HashStore()
    deadline, limit = time.monotonic() + timeout, f"{timeout:g} s (`join_timeout`)"
    serves = rank == 0 and not agent
    store: dist.Store = _serve(rendezvous, deadline) if serves else _connect(rendezvous, deadline, limit)
    if agent:  # torchrun's store outlives the processes, which it may restart
        store = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    keys = [f"joined/{other}" for other in range(world_size)]

    def absent() -> str:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        return f"ranks {', '.join(missing)}, which have not joined; their hosts must reach {address}:{port}"

    try:
        store.set(keys[rank], socket.gethostname())
        with _notices(rank, absent, limit, rank == 0):
            complete = _wait_until(lambda: store.check(keys), deadline)
        if complete:
            return store
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        hosts = {store.get(key).decode(errors="replace") for other, key in enumerate(keys) if other not in missing}
    except dist.DistError as error:
        raise NotJoined(
            f"rank {rank} on {socket.gethostname()}: rank 0 at {address}:{port} ended while the processes were joining;"
            " see the message of rank 0"
        ) from error
    if serves:
        time.sleep(GRACE_SECONDS)  # the store ends with this process, and other ranks still read from it
    raise NotJoined(
        f"{len(missing)} of {world_size} processes did not join within {limit}: ranks {', '.join(map(str, missing))}."
        f" Processes on these hosts joined: {', '.join(sorted(hosts))}. Check that the missing processes were started,"
        f" and that their hosts can reach {address}:{port}"
    )


@contextmanager
def _notices(rank: int, awaited: Callable[[], str], limit: str, active: bool) -> Iterator[None]:
    """While the `with` block waits, log what it waits for. A thread writes the log, because the block may spend minutes
    looking up the name of a host.
    """
    over, started = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = NOTICE_SECONDS
        while not over.wait(pause):
            try:
                text = awaited()
            except dist.DistError:  # the store has ended, and the main thread reports it
                return
            place = f"rank {rank} on {socket.gethostname()}"
            logger.warning("%s: waiting for %.0f s of %s for %s", place, time.monotonic() - started, limit, text)
            pause *= 2

    if active:
        threading.Thread(target=tell, name="notices", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Poll `condition` until it is true or `deadline` has passed. Polling keeps Ctrl-C working."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _serve(rendezvous: Rendezvous, deadline: float) -> dist.TCPStore:
    """Serve the store. This rank connects to it at the loopback address, because a pod's name may not resolve yet."""
    port, left = rendezvous.port, max(0.0, deadline - time.monotonic())
    options: dict[str, Any] = {"timeout": timedelta(seconds=left + GRACE_SECONDS)}
    try:
        if rendezvous.address == LOOPBACK:  # by default the store would listen on every interface
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((LOOPBACK, port))
                options["master_listen_fd"] = listener.detach()
        return dist.TCPStore(LOOPBACK, port, rendezvous.world_size, is_master=True, wait_for_workers=False, **options)
    except (OSError, dist.DistNetworkError) as error:
        raise ConfigError(
            f"MASTER_PORT: port {port} of this host cannot be used ({str(error).splitlines()[0]}); set another port"
            " (`master_port` in a configuration)"
        ) from error


def _connect(rendezvous: Rendezvous, deadline: float, limit: str) -> dist.TCPStore:
    """Connect to the store once rank 0 serves it. A pod's name may not resolve until some time after the pod starts."""
    rank, _, address, port, _ = rendezvous
    reason: OSError | None = None

    def unreachable() -> str:
        problem = reason or f"the name {address} does not resolve yet"
        return f"rank 0 at {address}:{port} ({problem}); check MASTER_ADDR (`master_addr`) and the host of rank 0"

    def reachable() -> bool:
        nonlocal reason
        left = max(0.0, deadline - time.monotonic())
        try:
            socket.create_connection((address, port), timeout=min(CONNECT_SECONDS, left + POLL_SECONDS)).close()
        except OSError as error:
            reason = error
            return False
        return True

    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    with _notices(rank, unreachable, limit, first_of_host):
        connected = _wait_until(reachable, deadline)
    if not connected:
        raise NotJoined(
            f"rank {rank} on {socket.gethostname()}: rank 0 did not answer at {address}:{port} within {limit} "
            f"({reason}); check MASTER_ADDR (`master_addr` in a configuration), that rank 0 was started, and that this "
            "host can reach it"
        )
    timeout = timedelta(seconds=max(0.0, deadline - time.monotonic()) + GRACE_SECONDS)
    return dist.TCPStore(address, port, rendezvous.world_size, is_master=False, timeout=timeout)


def init_distributed(timeout: float | None = None, join_timeout: float = 600.0, watch: bool = False) -> Peers:
    """Join the process group that the environment describes, after `launch.complete_environment` has completed it.
    Return the connections that detect the loss of another rank.

    Args:
        timeout: seconds after which a collective fails; None for `DEFAULT_TIMEOUT`.
        join_timeout: seconds to wait for all processes.
        watch: whether to detect the loss of another rank. If so, every rank must call `leave` on the result when it
            ends.

    Raises:
        NotJoined, ConfigError: see `join`.
    """
    variables, agent = os.environ, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    rendezvous = Rendezvous(rank, world_size, variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), agent)
    store, peers = join(rendezvous, join_timeout), Peers(rank)
    if watch and world_size > 1:
        peers.join(store, rendezvous.address, rendezvous.address == LOOPBACK)
    limit = timedelta(seconds=timeout) if timeout is not None else DEFAULT_TIMEOUT
    store.set_timeout(limit)
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("run", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
        # DeepSpeed sets this, too, if it creates the group. A single process has no peers.
        device_id=torch.device(local_device()) if cuda and world_size > 1 else None,
    )
    return peers


_host_groups: list[dist.ProcessGroup] = []


def _host_group() -> dist.ProcessGroup | None:
    """Return a Gloo group of all ranks, for decisions on the host that must not wait for the device.

    None means the default group, if it uses Gloo. The first call creates the group, so every rank must make it.
    """
    if dist.get_backend() == "gloo":
        return None
    if not _host_groups:
        _host_groups.append(dist.new_group(backend="gloo"))
    return _host_groups[0]


def shut_down() -> None:
    """Leave the process group."""
    _host_groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Return this process's rank in the run."""
    return dist.get_rank()


def world_size() -> int:
    """Return the number of processes in the run."""
    return dist.get_world_size()


def is_main() -> bool:
    """Return whether this is rank 0, which writes the files that exist once per run."""
    return rank() == 0


def local_device() -> str:
    """Return this process's device: its own GPU, or the CPU."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"


def background_group() -> dist.ProcessGroup:
    """Create a group of all ranks for a background thread, for CPU tensors. Every rank must call this.

    Its collectives time out only after a day: a rank may write or upload for hours, and the watchdog detects hangs.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


def own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Create groups of ranks, and return the one with this rank. Every rank must call this, with the same groups."""
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank() in ranks)


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def everyone_succeeded(succeeded: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `succeeded` is true on all ranks. `group` is a background group."""
    return not anyone((not succeeded,), group)[0]


def anyone(flags: Sequence[bool], group: dist.ProcessGroup | None = None) -> tuple[bool, ...]:
    """Return, for each flag, whether it is set on any rank. `group` is a background group. The device is not used."""
    values = torch.tensor(flags, dtype=torch.int32)
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group or _host_group())
    return tuple(bool(value) for value in values.tolist())


def sum_on_host(value: int) -> int:
    """Return the sum of `value` over all ranks. The device is not used."""
    total = torch.tensor(value, dtype=torch.int64)
    if world_size() > 1:
        dist.all_reduce(total, group=_host_group())
    return int(total)


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all ranks."""
    return [math.fsum(column) for column in zip(*gather_floats(list(values)), strict=True)]


def mean_over_ranks(value: Tensor) -> Tensor:
    """Average a scalar over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(value)
        value /= world_size()
    return value


def send_weights(module: torch.nn.Module) -> None:
    """Copy the parameters of `module` from rank 0 to all ranks, in place."""
    if world_size() > 1:
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), 0)


def gather_floats(values: list[float]) -> list[list[float]]:
    """Return the values of all ranks, indexed by rank. All ranks must pass the same number of values."""
    own = torch.tensor(values, dtype=torch.float64, device=local_device())
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own)
    return [tensor.tolist() for tensor in gathered]


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the texts of all ranks, indexed by rank. `group` is a background group. The texts are not pickled, because
    unpickling could run code.
    """
    if world_size() == 1:
        return [text]  # avoids waiting for the device
    device = "cpu" if group is not None else local_device()
    own = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8).to(device)
    own_size = torch.tensor([len(text.encode())], device=device)
    sizes = [torch.empty_like(own_size) for _ in range(world_size())]
    dist.all_gather(sizes, own_size, group=group)
    padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(data[: int(size)].cpu().numpy()).decode() for data, size in zip(gathered, sizes, strict=True)]


def merge_dicts(own: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the union of all ranks' dictionaries of JSON values, exchanged in a background group."""
    return {name: value for text in gather_texts(json.dumps(own), group) for name, value in json.loads(text).items()}


def broadcast_text(text: str) -> str:
    """Return rank 0's text on every rank."""
    return gather_texts(text if is_main() else "")[0]


def send_to_main(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Send a CPU tensor to rank 0 through a background group; rank 0 calls `receive`."""
    dist.send(tensor.contiguous().view(torch.uint8), group=group, group_dst=0)


def receive(sender: int, numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Return the 1-D tensor that rank `sender` sends with `send_to_main`."""
    content = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
    dist.recv(content, group=group, group_src=sender)
    return content.view(dtype)
