"""Prompts with a common beginning: the same logits and answers as without sharing, from fewer tokens."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.config import load_config
from megatron_coca.model import SharedPrefix, build_model, generate, prefix_order
from megatron_coca.model.shared_prefix import common_prefix

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "seq_length": 32}
SHAPE |= {"pos_emb": "rotary", "vocab_size": 64, "make_vocab_size_divisible_by": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
METHODS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "coca": {"pos_emb": "coca", "num_kv_heads": 4},
    "dynamic": {"rope_scaling": DYNAMIC},
    "rerope log n": {"relative_positions": {"type": "rerope", "window": 16}, "logit_scaling": "log_n"},
    "alibi": {"pos_emb": "alibi"},
    "xpos": {"pos_emb": "xpos"},
    "forgetting": {"pos_emb": "none", "forgetting_gate": "fox"},
    "sliding window": {"sliding_window_width": 8},
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    },
}
FILLER = np.arange(1, 101, dtype=np.int32) % 13


def hidden_at(depth: int, key: int) -> np.ndarray:
    return np.concatenate([FILLER[:depth], [50, key], FILLER[depth:]]).astype(np.int32)


PROMPTS = [hidden_at(depth, key) for depth, key in ((80, 40), (20, 41), (50, 42), (50, 43))] + [hidden_at(90, 44)[:-3]]


@pytest.mark.parametrize("dynamic_length", ["current", "total"])
@pytest.mark.parametrize("name", METHODS)
def test_logits_and_answers_equal_those_of_whole_prompts(name: str, dynamic_length: Any) -> None:
    torch.manual_seed(0)
    model = build_model(load_config([], SHAPE | METHODS[name])).double().eval()
    scored, generated, computed = SharedPrefix(model), SharedPrefix(model), 0
    with torch.inference_mode():
        for prompt in sorted(PROMPTS, key=prefix_order):
            ids, length = torch.from_numpy(prompt).long()[None], len(prompt) + 4 if dynamic_length == "total" else None
            cache = scored.cache_for(prompt, 4, length)
            computed += len(prompt) - len(cache)
            whole = model.logits(model.hidden_states(ids, cache=model.new_cache(length)))
            logits = model.logits(model.hidden_states(ids[:, len(cache) :], cache=cache))
            assert (logits - whole[:, -logits.shape[1] :]).abs().max() < 1e-10
            scored.keep(prompt, cache)
            cache = generated.cache_for(prompt, 4, length)
            answers = [generate(model, ids, 4, dynamic_length=dynamic_length, cache=each) for each in (cache, None)]
            assert torch.equal(*answers)
            generated.keep(prompt, cache)
    shared = 0 if name in ("sliding window", "longrope") else 20 + 51 + 50
    assert computed == sum(map(len, PROMPTS)) - shared


def test_beginnings_and_their_order() -> None:
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert [len(prompt) for prompt in sorted(PROMPTS, key=prefix_order)] == [99, 102, 102, 102, 102]
