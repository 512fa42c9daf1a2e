"""Find work that may run at the same time, from the order of launches, events and waits in the log.

A stream runs its work in order. An event makes one stream wait for the work that another had before the event was
recorded. Waits of the host make all later work wait. All other work may overlap on a device.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.pretend.device import Event

PRODUCTS = ("cublasGemmEx", "cublasLtMatmul", "cublasGemmStridedBatchedEx", "cublasSgemm_v2")
"""Launches of matrix products, which are the work that communication should run beside."""
REDUCTIONS = ("ncclAllReduce", "ncclReduce", "ncclReduceScatter")
GATHERS = ("ncclAllGather", "ncclBroadcast")
LARGE = 1 << 20
"""Bytes from which a collective counts: smaller ones carry norms and flags."""


@dataclass
class Collective:
    """A collective of the log, and the number of matrix products issued later that may run beside it."""

    name: str
    amount: int
    beside: int = 0


def collectives(events: Sequence[Event]) -> list[Collective]:
    """Return the large collectives of a log in order."""
    # clock[s][t]: how much of stream t is finished when the next work on stream s starts. The host has a clock too:
    # work that is issued after a wait of the host comes after what was awaited.
    clock: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    host: defaultdict[int, int] = defaultdict(int)
    recorded: dict[int, dict[int, int]] = {}
    issued: list[tuple[int, int, Collective]] = []
    for event in events:
        own = clock[event.stream]
        if event.kind == "order" and event.name == "event recorded":
            recorded[event.amount] = dict(own)
        elif event.kind == "order":
            _join(host if event.name == "host waits for event" else own, recorded.get(event.amount, {}))
        elif event.kind == "wait" and event.name != "cudaEventSynchronize":
            streams = [event.stream] if event.name == "cudaStreamSynchronize" else list(clock)
            for stream in streams:
                _join(host, clock[stream])
        elif event.kind in ("launch", "collective"):
            _join(own, host)
            if event.name in PRODUCTS:
                for stream, position, collective in issued:
                    collective.beside += own[stream] < position
            own[event.stream] += 1
            if event.kind == "collective" and event.amount >= LARGE:
                issued.append((event.stream, own[event.stream], Collective(event.name, event.amount)))
    return [collective for _, _, collective in issued]


def _join(clock: defaultdict[int, int], other: dict[int, int]) -> None:
    for stream, position in other.items():
        clock[stream] = max(clock[stream], position)


def overlapped(found: Sequence[Collective], names: Sequence[str]) -> float:
    """Return the share of the bytes of the named collectives beside which a matrix product may run; 1 without any."""
    chosen = [collective for collective in found if collective.name in names]
    total = sum(collective.amount for collective in chosen)
    return sum(collective.amount for collective in chosen if collective.beside) / total if total else 1.0
