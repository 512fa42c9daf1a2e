"""Attention layers of transformers whose families have experts and so no import: gpt-oss and Llama 4.

Each function returns the outputs [batch, length, hidden_size] of ours and of theirs with the same random weights.
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
            q, k = (x if pairs is None else x[:, pairs] for x in (q, k))
            getattr(ours.attention.query_key_value, part).copy_(torch.cat((q, k, v)).flatten(0, 1))
            getattr(ours.attention.dense, part).copy_(getattr(theirs.o_proj, part))
    return ours, theirs


def _distances(length: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)


def _phases(length: int) -> Tensor:
    theta = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    return torch.arange(length)[None, :, None] * theta


@torch.no_grad()
def _outputs(ours: Attention, theirs: Any, tables: Any, seen: Tensor) -> tuple[Tensor, Tensor]:
    dtype = next(theirs.parameters()).dtype
    hidden = torch.randn(2, len(seen), HIDDEN, dtype=dtype)
    hides = ~seen | (_distances(len(seen)) < 0)
    mask = torch.zeros(1, 1, *seen.shape, dtype=dtype).masked_fill(hides, torch.finfo(dtype).min)
    return ours(hidden), theirs(hidden, tables, mask)[0]
