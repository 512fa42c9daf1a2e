"""Sink logits against transformers' gpt-oss attention: values, and the gradients of all weights."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from megatron_coca import load_config
from megatron_coca.attention.build import build_method, select_backend
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionEncoding

HEADS, KV_HEADS, WIDTH, HIDDEN = 6, 2, 8, 40


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("length", [1, 29])
def test_values_and_gradients_are_those_of_gpt_oss(length: int, window: int | None) -> None:
    torch.manual_seed(0)
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "hidden_size": HIDDEN}
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention" if window is None else "sliding_attention"]}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = GptOssConfig(**shape, **layers, sliding_window=window, rope_parameters=rope)
    theirs._attn_implementation = "eager"
    stock = GptOssAttention(theirs, 0).double()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    keys = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_kv_heads": KV_HEADS}
    keys |= {"kv_channels": WIDTH, "seq_length": 16, "pos_emb": "rotary", "sink_logits": True}
    config = load_config([], keys | {"sliding_window_width": None if window is None else window - 1})
    method = build_method(config.position, config.model)
    name, backend = select_backend("auto", method.needs("cpu", 0.0))
    assert name == "merge"
    ours = SelfAttention(HIDDEN, HEADS, KV_HEADS, method, backend).double()
    with torch.no_grad():
        for part in ("weight", "bias"):
            projections = (stock.q_proj, stock.k_proj, stock.v_proj)
            getattr(ours.query_key_value, part).copy_(torch.cat([getattr(each, part) for each in projections]))
            getattr(ours.dense, part).copy_(getattr(stock.o_proj, part))
        assert ours.position_sinks is not None
        ours.position_sinks.weight.copy_(stock.sinks)
    hidden = torch.randn(2, length, HIDDEN, dtype=torch.float64)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hides = (distance < 0) | (distance >= (window or length))
    mask = torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(hides, torch.finfo(torch.float64).min)
    phases = torch.arange(length)[None, :, None] * 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    expected = stock(hidden, (phases.cos(), phases.sin()), mask)[0]
    found = ours(hidden, PositionEncoding(method)(torch.arange(length), length, torch.float64))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert stock.sinks.grad is not None and stock.sinks.grad.abs().min() > 1e-3
    torch.testing.assert_close(ours.position_sinks.weight.grad, stock.sinks.grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours.dense.weight.grad, stock.o_proj.weight.grad, rtol=0, atol=1e-11)
    taken = torch.cat([each.weight.grad for each in projections])
    torch.testing.assert_close(ours.query_key_value.weight.grad, taken, rtol=0, atol=1e-11)
