"""Attention layers of transformers' families that cannot be imported, because they have experts or linear attention:
gpt-oss, Llama 4 and Qwen3-Next.

The functions return the outputs [batch, length, hidden_size] of our layer and of theirs with the same random weights.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_coca import Attention, load_config

HEADS, KV_HEADS, WIDTH, HIDDEN, TRAINED = 6, 2, 8, 40, 16
SHAPE = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "hidden_size": HIDDEN}
OURS = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_kv_heads": KV_HEADS}
OURS |= {"kv_channels": WIDTH, "seq_length": TRAINED}


def gpt_oss(length: int, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sinks, on all keys or in a window."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    types = ["full_attention" if window is None else "sliding_attention"]
    config = GptOssConfig(**SHAPE, num_hidden_layers=1, layer_types=types, sliding_window=window)
    config._attn_implementation = "eager"
    keys = {"pos_emb": "rotary", "sink_logits": True, "sliding_window_width": None if window is None else window - 1}
    ours, theirs = _with_equal_weights(GptOssAttention(config, 0), keys, dtype)
    with torch.no_grad():
        ours.attention.position_sinks.weight.copy_(theirs.sinks)
    distance = _distances(length)
    phases = _phases(length)
    return _outputs(ours, theirs, (phases.cos().to(dtype), phases.sin().to(dtype)), distance < (window or length))


def llama4(length: int, rotates: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A rotary layer of chunks, or one without positions whose logits have a temperature. Rotation is in float32."""
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

    flags = {"no_rope_layers": [int(rotates)], "use_qk_norm": False, "attention_bias": True, "floor_scale": TRAINED}
    config = Llama4TextConfig(**SHAPE, num_hidden_layers=1, **flags)
    config._attn_implementation = "eager"
    scaled = {"pos_emb": "none", "logit_scaling": {"type": "temperature", "first": 1}}
    keys = {"pos_emb": "rotary", "attention_chunk_size": TRAINED // 2} if rotates else scaled
    pairs = torch.arange(WIDTH).view(-1, 2).T.flatten()  # their pairs are neighbours
    ours, theirs = _with_equal_weights(Llama4TextAttention(config, 0), keys, dtype, pairs if rotates else None)
    index = torch.arange(length) // (TRAINED // 2)
    phases = _phases(length)
    seen = index[:, None] == index if rotates else torch.ones(length, length, dtype=torch.bool)
    return _outputs(ours, theirs, torch.polar(torch.ones_like(phases), phases).to(torch.complex64), seen)


def qwen3_next(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output gates of features, zero-centred norms of heads, and half of the features rotated."""
    ours, theirs = qwen3_next_layers(dtype)
    hidden = torch.randn(2, length, HIDDEN, dtype=dtype)
    with torch.no_grad():
        return ours(hidden), theirs(hidden, qwen3_next_tables(length, dtype), None)[0]


def qwen3_next_layers(dtype: torch.dtype) -> tuple[Attention, Any]:
    """Our layer and theirs, with equal random weights. Their query projection also computes the gates, head by head."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    config = Qwen3NextConfig(**SHAPE, num_hidden_layers=1, attention_bias=True, rms_norm_eps=1e-6)
    config._attn_implementation = "sdpa"
    keys = {"pos_emb": "rotary", "rotary_pct": 0.5, "attention_output_gate": "feature", "qk_norm": "head"}
    keys |= {"norm": "rmsnorm", "rms_norm_epsilon": 1e-6, "zero_centered_norms": True}
    ours, theirs = _with_equal_weights(Qwen3NextAttention(config, 0), keys, dtype)
    with torch.no_grad():
        ours.attention.query_layernorm.weight.copy_(theirs.q_norm.weight)
        ours.attention.key_layernorm.weight.copy_(theirs.k_norm.weight)
        for part in ("weight", "bias"):
            gates = getattr(theirs.q_proj, part).unflatten(0, (HEADS, 2, WIDTH))[:, 1]
            getattr(ours.attention.output_gate, part).copy_(gates.flatten(0, 1))
    return ours, theirs


def qwen3_next_tables(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and sines of half of the features, [1, length, WIDTH / 2]."""
    phases = _phases(length, WIDTH // 2).repeat(1, 1, 2)
    return phases.cos().to(dtype), phases.sin().to(dtype)


def _with_equal_weights(
    theirs: Any, keys: dict[str, Any], dtype: torch.dtype, pairs: Tensor | None = None
) -> tuple[Attention, Any]:
    """Our layer with random weights of theirs; `pairs` orders the features of their queries and keys."""
    torch.manual_seed(0)
    theirs = theirs.to(dtype).eval()
    ours = Attention(load_config([], OURS | keys)).to(dtype).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
        for part in ("weight", "bias"):
            q, k, v = (
                getattr(each, part).unflatten(0, (-1, WIDTH)) for each in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
            )
            q = q[:: len(q) // HEADS]  # without the gates of Qwen3-Next
            q, k = (x if pairs is None else x[:, pairs] for x in (q, k))
            getattr(ours.attention.query_key_value, part).copy_(torch.cat((q, k, v)).flatten(0, 1))
            getattr(ours.attention.dense, part).copy_(getattr(theirs.o_proj, part))
    return ours, theirs


def _distances(length: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)


def _phases(length: int, width: int = WIDTH) -> Tensor:
    theta = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(length)[None, :, None] * theta


@torch.no_grad()
def _outputs(ours: Attention, theirs: Any, tables: Any, seen: Tensor) -> tuple[Tensor, Tensor]:
    dtype = next(theirs.parameters()).dtype
    hidden = torch.randn(2, len(seen), HIDDEN, dtype=dtype)
    hides = ~seen | (_distances(len(seen)) < 0)
    mask = torch.zeros(1, 1, *seen.shape, dtype=dtype).masked_fill(hides, torch.finfo(dtype).min)
    return ours(hidden), theirs(hidden, tables, mask)[0]
