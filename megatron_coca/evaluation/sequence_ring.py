"""Processes that divide every input by tokens, so that each needs memory for its part only (`--context-parallel-size`).

The command itself is rank 0. It tells the other processes, which load the same checkpoint, what to compute next.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_coca.attention.context import assign_shard
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.attention.ring.exchange import Ring
from megatron_coca.attention.ring.shard import RingShard
from megatron_coca.evaluation.options import resolve_device, subject_options
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.subject import Evaluation, Subject
from megatron_coca.model import GPT
from megatron_coca.work.workers import begin_worker, safe_path

OPTION = "--context-parallel-size"
END, LOAD, SCORE = range(3)
LONGEST_WAIT = timedelta(hours=6)
"""The longest wait for a process that still loads or computes. With gloo, the processes notice at once if one ends."""
ScoreSequence = Callable[[GPT, Tensor, Tensor, Tensor], Tensor]
"""(model, rows [n, length + 1] int64, indices [m] of this rank's tokens, bounds [n, 2]) -> float64 sums of this rank.

The model reads the first `length` tokens of each row. A row's scored tokens begin at its first bound and end before its
second bound.
"""


class SequenceRing:
    """The processes of one command. They start when the first model is used.

    Results of `score` are sums over the tokens of all ranks. The order in which the ranks' sums are added is fixed.
    """

    def __init__(self, args: Namespace, task: str, score: ScoreSequence) -> None:
        """`score` must be a function at module level, so that the processes can import it."""
        self._args, self._task, self._score, self._ranks = args, task, score, int(args.context_parallel_size)
        self._processes: list[BaseProcess] = []
        self._folder: Any = None
        self._model: GPT | None = None
        self._member: _Member | None = None

    def __enter__(self) -> "SequenceRing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._member is not None and kind is None:
            self._member.tell(END)
        for process in self._processes:
            process.join(60 if kind is None else 0)
            process.kill()
        if self._member is not None:
            dist.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()

    def use(self, subject: Subject, variant: int) -> None:
        """Load the model of a variant on all ranks. `variant` is the index of the variant in the options."""
        if self._model is subject.model:
            return
        member = self._member or self._start()
        member.tell(LOAD, variant)
        member.take(subject.model)
        self._model = subject.model

    def score(self, rows: Tensor, bounds: Tensor) -> Tensor:
        """Return the sums of the score function over all ranks, for rows and bounds in host memory."""
        assert self._member is not None and self._model is not None
        try:
            self._member.tell(SCORE, *rows.shape)
            return self._member.scored(self._model, rows, bounds, self._score)
        except RuntimeError as error:  # the other ranks still wait for this one, or have ended
            raise EvaluationError(
                f"{OPTION}: one of the {self._ranks} processes failed ({str(error).splitlines()[0]}); if it had too "
                "little memory, use more processes or --dtype bfloat16"
            ) from error

    def _start(self) -> "_Member":
        device = resolve_device(self._args.device)
        if torch.device(device).type == "cuda" and torch.cuda.device_count() < self._ranks:
            raise EvaluationError(
                f"{OPTION} {self._ranks}: this host has {torch.cuda.device_count()} GPUs, and each process needs one; "
                "use fewer processes, or --device cpu"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="ring")
        place, context = os.path.join(self._folder.name, "store"), get_context("spawn")
        with safe_path():
            for rank in range(1, self._ranks):
                arguments = (self._args, self._task, self._score, place, rank)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                self._processes.append(process)
        self._member = _Member(place, 0, self._ranks, device)
        return self._member


class _Member:
    """One rank's process groups, and its part in the computation of every score."""

    def __init__(self, place: str, rank: int, ranks: int, device: str) -> None:
        cuda = torch.device(device).type == "cuda"
        self.device = torch.device("cuda", rank) if cuda else torch.device(device)
        if cuda:
            torch.cuda.set_device(self.device)
        elif rank:
            torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        store = dist.FileStore(place, ranks)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=LONGEST_WAIT
        )
        self._hosts = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        group = dist.group.WORLD
        assert group is not None
        self.ring = Ring(group, rank, ranks)
        dist.all_reduce(torch.zeros((), device=self.device))  # NCCL needs all ranks in a group's first operation

    def tell(self, what: int, *numbers: int) -> None:
        """Tell the other ranks what to do next."""
        dist.broadcast(torch.tensor([what, *numbers, 0, 0][:3]), 0, group=self._hosts)

    def told(self) -> list[int]:
        """Wait for the next message of rank 0; return its kind (LOAD, SCORE or END) and two numbers."""
        message = torch.empty(3, dtype=torch.int64)
        dist.broadcast(message, 0, group=self._hosts)
        return [int(number) for number in message]

    def take(self, model: GPT) -> None:
        """Prepare a model on this rank to compute only the rank's part of each input."""
        assign_shard(model, RingShard(ring=self.ring))

    def scored(self, model: GPT, rows: Tensor, bounds: Tensor, score: ScoreSequence) -> Tensor:
        """Return the sums over all ranks. Rank 0 sends its rows and bounds; the other ranks pass buffers for them."""
        for tensor in (rows, bounds):
            dist.broadcast(tensor, 0, group=self._hosts)
        length = rows.shape[1] - 1
        held = self.ring.division(length).held(torch.arange(length, device=self.device), self.ring.rank)
        total = score(model, rows.to(self.device), held, bounds)
        dist.all_reduce(total)
        return total


@torch.inference_mode()
def _serve(args: Namespace, task: str, score: ScoreSequence, place: str, rank: int) -> None:
    """Run rank `rank` until rank 0 ends the ring."""
    begin_worker()
    member = _Member(place, rank, args.context_parallel_size, resolve_device(args.device))
    options = subject_options(Namespace(**{**vars(args), "device": str(member.device), "output": None}))
    evaluation, model = Evaluation(options, task), None
    evaluation.ring_ranks = args.context_parallel_size
    while True:
        what, first, second = member.told()
        if what == END:
            break
        if what == LOAD:
            subject = evaluation.subject(options.variants[first])
            assert isinstance(subject, Subject), "rank 0 has loaded it"
            model = subject.model
            member.take(model)
        else:
            assert model is not None
            rows, bounds = (torch.empty(shape, dtype=torch.int64) for shape in ((first, second), (first, 2)))
            with suppress(PositionRangeError):  # rank 0 reports the error
                member.scored(model, rows, bounds, score)
    dist.destroy_process_group()
