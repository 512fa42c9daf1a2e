"""CUDA graphs of micro-batches: what is refused, and what the host does around a graph (a graph itself: tests/gpu)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_coca.attention.inputs import BackendError, made_once
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.config.checks import GRAPH_REFUSALS
from megatron_coca.model import build_model
from megatron_coca.model.build import UNCAPTURED, check_graphs, choose_backends
from megatron_coca.training.engine import graphs
from megatron_coca.training.topology import zero_section

KEYS = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24, "vocab_size": 48}


def configured(**keys: Any) -> Config:
    return load_config([], KEYS | {"pos_emb": "coca", "cuda_graphs": True} | keys)


REFUSED: dict[str, list[dict[str, Any]]] = {
    "zero_optimization": [
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ],
    "deepspeed_extra_args": [
        {"deepspeed_extra_args": given}
        for given in (
            {"data_types": {"grad_accum_dtype": "fp32"}},
            {"data_types": {"grad_accum_dtype": "fp16"}},
            {"flops_profiler": {"enabled": True}},
            {"wall_clock_breakdown": True},
        )
    ],
    "pipe_parallel_size": [{"pipe_parallel_size": 2}],
    "model_parallel_size": [{"model_parallel_size": 2}],
    "sequence_parallel_size": [{"sequence_parallel_size": 2}],
    "reset_attention_mask": [{"reset_attention_mask": True}],
    "reset_position_ids": [{"pos_emb": "learned", "reset_position_ids": True}],
    "checkpoint_activations": [{"checkpoint_activations": True, "hidden_dropout": 0.1}],
    "training_positions": [{"pos_emb": "rotary", "training_positions": {"type": "shifted", "max": "4L"}}],
    "rope_scaling": [{"pos_emb": "rotary", "rope_scaling": {"rope_type": "clex"}}],
    "pos_emb": [{"pos_emb": "fire"}],
}


@pytest.mark.parametrize(("key", "keys"), [(key, keys) for key, cases in REFUSED.items() for keys in cases])
def test_what_cannot_be_captured_is_refused(key: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{key}: not available with cuda_graphs: .*; set cuda_graphs=false"):
        configured(**keys)
    configured(**keys, cuda_graphs=False)


def test_every_refusal_is_tested() -> None:
    assert REFUSED.keys() == GRAPH_REFUSALS.keys()


def test_a_cpu_and_what_was_not_captured_are_refused() -> None:
    for refused in (build_model, partial(choose_backends, device="cpu")):
        with pytest.raises(BackendError, match="cuda_graphs: needs a GPU; set cuda_graphs=false"):
            refused(configured())
    build_model(configured(), training=False)
    for backend in UNCAPTURED:
        with pytest.raises(BackendError, match=f"cuda_graphs: attention_backend {backend}: .*; set cuda_graphs=false"):
            check_graphs(backend, "cuda")
    check_graphs("sdpa", "cuda")


def test_gradients_are_reduced_at_once() -> None:
    """What would be reduced beside the backward pass is complete only after it."""
    assert zero_section(configured(precision="bfloat16"), 8, cuda=True)["overlap_comm"] is False
    assert zero_section(configured(precision="bfloat16", cuda_graphs=False), 8, cuda=True)["overlap_comm"] is True


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([5.0]), False)

    def forward(self, samples: Tensor) -> Tensor:
        return (self.weight * self.frozen * samples).sum()


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    monkeypatch.setattr(graphs, "capture", run_once)


@pytest.mark.usefixtures("uncaptured")
def test_gradients_of_a_step_are_summed_in_memory_that_stays() -> None:
    module, samples = Product(), torch.tensor([3.0, 4.0])
    captured = graphs.CapturedMicroBatch(module, {"samples": samples})
    for factor in (1.0, 0.5):
        captured.begin(factor)
        assert float(captured({"samples": samples})) == 70
        assert float(captured({"samples": 2 * samples})) == 140
        captured.set_gradients()
        assert module.weight.grad is not None and float(module.weight.grad) == 105 * factor
        module.weight.grad.data = torch.zeros(1)  # as DeepSpeed does when it moves gradients into its buckets
    assert module.frozen.grad is None
    assert samples.tolist() == [3, 4]


@pytest.mark.usefixtures("uncaptured")
def test_other_shapes_and_moved_weights_are_errors() -> None:
    module = Product()
    captured = graphs.CapturedMicroBatch(module, {"samples": torch.ones(2)})
    for inputs in ({"samples": torch.ones(1)}, {"samples": torch.ones(2), "loss_mask": torch.ones(2)}):
        with pytest.raises(ValueError, match="cuda_graphs: a micro-batch has shapes"):
            captured(inputs)
    module.weight.data = torch.ones(1)
    with pytest.raises(RuntimeError, match="weight has moved since the capture"):
        captured.begin(1.0)


def test_tensors_of_training_stay_and_those_of_evaluation_make_room() -> None:
    """A graph reads the first at their address; generation asks for another length with every token."""
    made = made_once(torch.ones, evaluated=2)
    trained = made(3)
    with torch.no_grad():
        first = made(3)
        assert first is not trained and made(3) is first
        for length in range(4, 7):
            made(length)
        assert made(3) is not first
    assert made(3) is trained
