"""CUDA graphs of training passes on the CPU: what a replay does to memory, without a GPU.

A real capture computes nothing. A replay writes to the memory that the capture allocated, and does not change which
gradients the parameters have.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_coca.training.engine.passes import CapturedPass


class Replays:
    """Imitates captures until `restore` is called, and counts replays."""

    def __init__(self) -> None:
        self.count = 0
        stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda other: None)
        self._set(torch.cuda, "Stream", lambda device: stream)
        self._set(torch.cuda, "current_stream", lambda device: stream)
        self._set(torch.cuda, "stream", lambda given: nullcontext())
        replays = self

        def captured(own: CapturedPass, run: Callable[[], None]) -> Callable[[], None]:
            return replays.capture(own, run)

        self._set(CapturedPass, "_captured", captured)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._originals = getattr(self, "_originals", [])
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)

    def capture(self, own: CapturedPass, run: Callable[[], None]) -> Callable[[], None]:
        parameters: list[nn.Parameter] = list(own._module.parameters())
        with torch.random.fork_rng(devices=[]):
            run()
        loss, places = own._loss, [parameter.grad for parameter in parameters]
        assert loss is not None

        def replay() -> None:
            self.count += 1
            held = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            run()
            loss.copy_(own._loss)
            own._loss = loss
            for parameter, place, grad in zip(parameters, places, held, strict=True):
                if place is not None:
                    place.copy_(parameter.grad)
                parameter.grad = grad

        for place in (loss, *places):
            if place is not None:
                place.fill_(torch.nan)
        return replay
