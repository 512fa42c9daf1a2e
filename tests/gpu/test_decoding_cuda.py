"""Decoding with CUDA graphs: the tokens of the growing cache. Run with: python -m pytest -m gpu"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.config import load_config
from megatron_coca.model import GPT, Sampling, SharedPrefix, build_model, generate, static_decoding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPT, NEW = 90, 60
SHAPE = {
    "num_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": PROMPT + NEW,
    "vocab_size": 1000,
    "init_method_std": 0.2,
}
METHODS: list[dict[str, Any]] = [
    {"pos_emb": "rotary", "num_kv_heads": 2},
    {"pos_emb": "coca"},
    {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    {"pos_emb": "coca", "relative_positions": {"type": "rerope", "window": 20}},
    {"pos_emb": "rotary", "relative_positions": {"type": "dual_chunk", "chunk_size": 20, "max_position": 40}},
    {"pos_emb": "alibi", "num_kv_heads": 2},
    {"pos_emb": "kerple_log"},
    {"pos_emb": "rpe"},
    {"pos_emb": "fire"},
    {"pos_emb": "none", "forgetting_gate": "fox"},
    {"pos_emb": "rotary", "sliding_window_width": 15, "sink_logits": True},
    {"pos_emb": "rotary", "attn_logit_softcapping": 20.0},
    {"pos_emb": "learned"},
]


def make(dtype: torch.dtype, **keys: Any) -> GPT:
    """A model whose largest logits differ clearly, in `dtype`."""
    return build_model(load_config([], SHAPE | keys), "cuda", training=False).to(dtype).eval()


def prompts(batch: int) -> Tensor:
    return torch.randint(1000, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).cuda()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=2)])
@pytest.mark.parametrize("keys", METHODS, ids=str)
def test_graphs_generate_the_tokens_of_the_growing_cache(
    keys: dict[str, Any], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, so that rounding decides no token. The extent doubles once."""
    monkeypatch.setattr(static_decoding, "LEAST_EXTENT", 64)
    model, ids = make(torch.float32, attention_backend="reference", **keys), prompts(2)
    wanted = generate(model, ids, NEW, sampling=sampling, decoding="growing")
    assert torch.equal(generate(model, ids, NEW, sampling=sampling, decoding="static"), wanted)


@pytest.mark.parametrize("keys", METHODS[:4], ids=str)
def test_auto_uses_graphs_in_bfloat16_and_keeps_them_for_the_next_prompt(keys: dict[str, Any]) -> None:
    """Most tokens before the first difference, which rounding may cause, are equal; the graphs stay with the cache."""
    model, ids = make(torch.bfloat16, **keys), prompts(3)
    ids[1:, :50] = ids[0, :50]
    shared, decoders, equal = SharedPrefix(model), set(), 0
    for row in ids:
        cache = shared.cache_for(row.cpu().numpy(), 8)
        found = generate(model, row[None], 8, cache=cache, decoding="auto")
        shared.keep(row.cpu().numpy(), cache)
        equal += int((found == generate(model, row[None], 8, decoding="growing")).cumprod(1).sum())
        decoders.add(id(cache.decoder))
    assert cache.decoder is not None and len(decoders) == 1
    assert equal >= 18, "of 24"
