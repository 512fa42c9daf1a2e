"""Output gates against transformers' Qwen3-Next attention in float64: values, and the gradients of all weights."""

import pytest
import torch

from tests.parity.stock_layers import HEADS, HIDDEN, WIDTH, qwen3_next_layers, qwen3_next_tables


@pytest.mark.parametrize("length", [1, 29])
def test_values_and_gradients_are_those_of_qwen3_next(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # their norms compute in float32
    layer, theirs = qwen3_next_layers(torch.float64)
    ours, hidden = layer.attention, torch.randn(2, length, HIDDEN, dtype=torch.float64)
    own, stock = (hidden.clone().requires_grad_() for _ in range(2))
    found, expected = layer(own), theirs(stock, qwen3_next_tables(length, torch.float64), None)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(expected)
    for output in (found, expected):
        (output * cotangent).sum().backward()
    for part in ("weight", "bias"):
        q, gate = getattr(theirs.q_proj, part).grad.unflatten(0, (HEADS, 2, WIDTH)).flatten(2).unbind(1)
        packed = [q.reshape(HEADS * WIDTH, -1), *(getattr(each, part).grad for each in (theirs.k_proj, theirs.v_proj))]
        wanted = {
            ours.output_gate: gate.reshape(HEADS * WIDTH, -1),
            ours.query_key_value: torch.cat([x.reshape(len(x), -1) for x in packed]),
            ours.dense: getattr(theirs.o_proj, part).grad,
        }
        for module, gradient in wanted.items():
            own_gradient = getattr(module, part).grad
            torch.testing.assert_close(own_gradient, gradient.reshape(own_gradient.shape), rtol=0, atol=1e-11)
    assert gate.abs().min() > 0
    torch.testing.assert_close(own.grad, stock.grad, rtol=0, atol=1e-11)
    for norm, stock_norm in ((ours.query_layernorm, theirs.q_norm), (ours.key_layernorm, theirs.k_norm)):
        torch.testing.assert_close(norm.weight.grad, stock_norm.weight.grad, rtol=0, atol=1e-11)
