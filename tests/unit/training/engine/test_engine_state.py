"""The counters of the engine in a checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from megatron_coca.training.engine import layouts, state


def test_loss_scaling_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next growth of the scale depends on the steps since the last overflow, not only on the scale."""

    def optimizer() -> Any:
        scaler = DynamicLossScaler(2**16, scale_window=4, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)
        return SimpleNamespace(loss_scaler=scaler)

    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    monkeypatch.setattr(layouts, "layout", lambda _: SimpleNamespace(flat_tensors=lambda _: []))
    monkeypatch.setattr(layouts, "torch_optimizer", lambda _: SimpleNamespace(state={}))
    overflows = [True, True, False, True, False, False, False, False, False, False, True, False, False]
    whole, scales = optimizer(), []
    for overflow in overflows:
        whole.loss_scaler.update_scale(overflow)
        scales.append(whole.loss_scaler.cur_scale)
    assert len(set(scales)) > 2
    for stop in range(1, len(overflows)):
        first, second = optimizer(), optimizer()
        for overflow in overflows[:stop]:
            first.loss_scaler.update_scale(overflow)
        state.set_counters(second, state.counters(first, {}), {})
        for overflow in overflows[stop:]:
            second.loss_scaler.update_scale(overflow)
        assert vars(second.loss_scaler) == vars(whole.loss_scaler)
