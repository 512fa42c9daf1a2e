"""Backends for CUDA models against the float64 oracle. Run with: python -m pytest -m gpu"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.build import BACKENDS, build_method, select_backend
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.attention.method import PositionEncoding
from megatron_coca.config import load_config
from tests.reference.dense import RelativeMap, Setting, attention
from tests.reference.frequencies import frequencies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 64, 100
REROPE = {"type": "rerope", "window": WINDOW}
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in ("rotary", "coca", "coca_strict", "xpos", "alibi", "none")},
    **{name: (name, {}) for name in ("kerple_log", "kerple_power", "rpe")},
    **{f"rerope-{name}": (name, REROPE) for name in ("rotary", "coca", "coca_strict")},
    "lm_infinite-coca": ("coca", {"type": "lm_infinite", "window": WINDOW, "sinks": 10}),
    "streaming-rotary": ("rotary", {"type": "streaming", "window": WINDOW, "sinks": 4}),
}
ROTATED = ("rotary", "coca", "coca_strict", "xpos")


class Run:
    """One method on CUDA and in the oracle, on the same bfloat16 operands and learned weights."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.relative = CASES[name]
        self.length = length
        keys = {"num_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "seq_length": 512}
        config = load_config([], keys | {"pos_emb": self.name, "relative_positions": dict(self.relative) or None})
        self.method = build_method(config.position, config.model)
        torch.manual_seed(0)
        self.encoding = PositionEncoding(self.method).cuda().eval()
        bias = self.method.layer_bias()
        self.bias = bias.cuda() if bias is not None else None
        heads = (HEADS, KV_HEADS, KV_HEADS)
        self.operands = [torch.randn(2, each, length, HEAD_DIM).bfloat16() for each in heads]
        self.cotangent = torch.randn(2, HEADS, length, HEAD_DIM).bfloat16()

    def inputs(self, leaves: list[Tensor]) -> AttentionInputs:
        """What production makes of q, k and v."""
        frame = self.encoding(torch.arange(self.length, device="cuda"), self.length, leaves[0].dtype)
        return self.method.prepare(*leaves, frame, bias=self.bias.distance_bias() if self.bias is not None else None)

    def weights(self) -> dict[str, Tensor]:
        """Learned parameters by the oracle's names, in float64 on the CPU, within their bounds."""
        found = {}
        if self.bias is not None:
            found = {"p": self.bias.bias_p, "a": self.bias.bias_a}
        elif self.encoding.bias is not None:
            found = {"table": self.encoding.bias.weight}
        return {name: value.detach().double().cpu() for name, value in found.items()}

    def exact(self) -> list[Tensor]:
        """Output and gradients of q, k, v in float64."""
        leaves = [x.double().requires_grad_() for x in self.operands]
        theta = frequencies(HEAD_DIM) if self.name in ROTATED else torch.zeros(0)
        setting = Setting(map=RelativeMap(**self.relative) if self.relative else None, bias=self.weights())
        out = attention(self.name, *leaves, theta, setting=setting)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.cotangent.double())]

    def on_device(self, attend) -> list[Tensor]:  # type: ignore[no-untyped-def]
        """The same in bfloat16 by `attend`, a function of the inputs."""
        leaves = [x.cuda().requires_grad_() for x in self.operands]
        out = attend(self.inputs(leaves))
        results = [out.detach(), *torch.autograd.grad(out, leaves, self.cotangent.cuda())]
        return [x.double().cpu() for x in results]


def errors(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize("length", [128, 1000])
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_values_and_gradients(name: str, length: int) -> None:
    """The backend that `auto` takes: errors at most twice those of dense attention that rounds as it goes."""
    run = Run(name, length)
    _, backend = select_backend("auto", run.method.needs("cuda", 0.0))
    exact = run.exact()
    allowed = errors(run.on_device(BACKENDS["reference"].attend), exact)
    found = errors(run.on_device(backend.attend), exact)
    for what, error, limit in zip(("out", "dq", "dk", "dv"), found, allowed, strict=True):
        assert error <= 2 * limit, f"{what}: {error:.2e} against {limit:.2e} of a plain run"
