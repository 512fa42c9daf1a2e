"""Cached decoding: the logits of the full forward pass, whatever the method, and the bytes that it takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_coca import methods
from megatron_coca.attention.layer import Cache, LayerCache, cache_bytes
from megatron_coca.config import load_config
from megatron_coca.model import GPT, build_model

TRAINED, LENGTH, PROMPT = 16, 45, 20
SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": TRAINED,
    "max_position_embeddings": LENGTH,
    "vocab_size": 50,
}
REQUIRED: dict[str, dict[str, Any]] = {
    "dynamic_max": {"target_length": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * j for j in range(8)], "factor": 4.0},
    "proportional": {"proportion": 0.5},
    **{kind: {"window": 6} for kind in methods.names("relative_positions") if kind != "dual_chunk"},
    "inv_leaky_rerope": {"window": 6, "target_length": 64},
    "dual_chunk": {"chunk_size": 5, "max_position": 8},
}


def make(**keys: Any) -> GPT:
    model = build_model(load_config([], SHAPE | {"pos_emb": "coca"} | keys)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(length: int = LENGTH, batch: int = 2) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(0))


def decoded(model: GPT, ids: Tensor, cache: Cache, *sizes: int) -> Tensor:
    """The logits of `ids` fed to the cache in chunks of these sizes, then one by one."""
    cuts = [*sizes, *[1] * (ids.shape[1] - sum(sizes))]
    return torch.cat([model(chunk, cache=cache) for chunk in ids.split(cuts, dim=1)], dim=1)


def scaling(rope_type: str) -> dict[str, Any]:
    factor = {"factor": 4.0} if methods.find("rope_scaling", rope_type).option("factor") else {}
    return {"rope_type": rope_type} | factor | REQUIRED.get(rope_type, {})


FORMS = [{"pos_emb": name} for name in methods.names("pos_emb")]
EXTENDED = [{"pos_emb": "coca", "rope_scaling": scaling(name)} for name in methods.names("rope_scaling")]
MAPPED = [
    {"pos_emb": name, "relative_positions": {"type": kind} | REQUIRED[kind]}
    for kind in methods.names("relative_positions")
    for name in sorted(methods.names("pos_emb", rotary=True))
    if (kind, name) != ("streaming", "coca")
]
COMBINED = [
    {"pos_emb": "coca", "rope_scaling": scaling("dynamic"), "relative_positions": {"type": "rerope", "window": 6}},
    {"pos_emb": "rotary", "rope_scaling": scaling("yarn"), "logit_scaling": "log_n", "rotary_pct": 0.5},
    {"pos_emb": "coca", "logit_scaling": "log_n_trained", "rotary_pct": 0.5, "num_kv_heads": 1},
    {"pos_emb": "alibi", "logit_scaling": "log_n"},
    {"pos_emb": "coca", "logit_scaling": {"type": "temperature", "period": 7, "first": 1}, "rotary_pct": 0.5},
    {"pos_emb": "none", "logit_scaling": {"type": "ssmax", "bias": True}, "qk_norm": "head"},
    {"pos_emb": "coca", "rope_scaling": scaling("dynamic"), "logit_scaling": "ssmax", "qk_norm": "head"}
    | {"attention_config": ["global", "nope"], "layer_types": {"nope": {"pos_emb": "none"}}},
]


@pytest.mark.fewest
@pytest.mark.parametrize("keys", [*FORMS, *EXTENDED, *MAPPED, *COMBINED], ids=str)
@torch.no_grad()
def test_cached_decoding_is_the_full_forward(keys: dict[str, Any]) -> None:
    model, ids = make(**keys), tokens()
    full = model(ids)
    cache = model.new_cache(length=LENGTH)
    torch.testing.assert_close(decoded(model, ids, cache, PROMPT, 3), full, rtol=1e-4, atol=2e-5)
    assert len(cache) == LENGTH


@torch.no_grad()
def test_a_stepped_length_is_the_full_forward_at_the_prompt_and_without_a_dynamic_extension() -> None:
    ids = tokens()
    static, dynamic = (make(rope_scaling=scaling(name)) for name in ("linear", "dynamic"))
    torch.testing.assert_close(decoded(static, ids, static.new_cache(), PROMPT), static(ids), rtol=1e-4, atol=2e-5)
    stepped = decoded(dynamic, ids, dynamic.new_cache(), PROMPT)
    torch.testing.assert_close(stepped[:, :PROMPT], dynamic(ids[:, :PROMPT]), rtol=1e-4, atol=2e-5)
    assert not torch.allclose(stepped, dynamic(ids), atol=1e-3), "the length that each step saw was another one"


@torch.no_grad()
def test_positions_can_be_given_row_by_row() -> None:
    model, ids = make(), tokens(8)
    positions = torch.stack((torch.arange(8), torch.arange(8) + 30))
    cache = model.new_cache(LENGTH)
    parts = [model(ids[:, :5], positions[:, :5], cache=cache), model(ids[:, 5:], positions[:, 5:], cache=cache)]
    torch.testing.assert_close(
        torch.cat(parts, dim=1), model.logits(model.hidden_states(ids, positions, length=LENGTH)), rtol=1e-4, atol=2e-5
    )


@torch.no_grad()
def test_documents_with_a_cache_are_an_error() -> None:
    model = make()
    with pytest.raises(ValueError, match="one document"):
        model(tokens(4), documents=torch.zeros(2, 4, dtype=torch.int64), cache=model.new_cache())


REROPE = {"relative_positions": {"type": "rerope", "window": 6}}


@pytest.mark.parametrize(
    ("keys", "tensors"), [({}, 2), ({"pos_emb": "rotary"}, 2), (REROPE, 3), (REROPE | {"pos_emb": "xpos"}, 2)]
)
@torch.no_grad()
def test_a_cache_takes_the_bytes_that_it_says(keys: dict[str, Any], tensors: int) -> None:
    """Values and K' of every segment; or keys where K' changes with every token."""
    model = make(**keys)
    cache = model.new_cache(LENGTH)
    model(tokens(), cache=cache)
    held = [view for layer in cache.layers for view in layer.append(*_nothing(layer))]
    assert len(held) == 2 * tensors
    size = cache_bytes([model.methods["global"]] * 2, 1, torch.float32)
    assert size == tensors * 16 * 2 * 2 * 4 and sum(view.numel() for view in held) * 4 == size * 2 * LENGTH


@torch.no_grad()
def test_a_cache_holds_a_gate_of_every_head_and_token() -> None:
    model = make(forgetting_gate="fox")
    cache = model.new_cache(LENGTH)
    model(tokens(), cache=cache)
    held = [view for layer in cache.layers for view in layer.append(*_nothing(layer))]
    size = cache_bytes([model.methods["global"]] * 2, 1, torch.float32)
    assert size == 2 * 2 * (2 * 16 + 1) * 4 and sum(view.numel() for view in held) * 4 == size * 2 * LENGTH


@pytest.mark.parametrize(
    ("keys", "length", "rotated"),
    [
        *(({"pos_emb": name}, None, 1) for name in methods.TABLES["pos_emb"] if name != "xpos"),
        ({"pos_emb": "xpos"}, LENGTH, PROMPT + 1),
        (REROPE, None, 1),
        ({"rope_scaling": scaling("dynamic")}, LENGTH, 1),
        ({"rope_scaling": scaling("dynamic")}, None, PROMPT + 1),
        ({"rope_scaling": scaling("clex")}, None, PROMPT + 1),
    ],
)
@torch.no_grad()
def test_a_token_rotates_its_own_key_alone(keys: dict[str, Any], length: int | None, rotated: int) -> None:
    """Unless frequencies or factors change with every token: then all keys in one call."""
    model, seen = make(**keys), []
    cache = model.new_cache(length)
    model(tokens(PROMPT), cache=cache)
    method = model.methods["global"]
    original = method.operands

    def counted(form: Any, q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
        seen.append((q.shape[2], k.shape[2]))
        return original(form, q, k, *rest)

    for block in model.blocks:
        block.attention.method = replace(method, operands=counted)
    model(tokens(1), cache=cache)
    assert seen == [(1, rotated)] * 2


class Counted(TorchDispatchMode):
    """Counts dispatched operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_decoded_token_of_coca_takes_the_operations_of_rope() -> None:
    """Besides the formulas of its own query and key, for which the CPU has no fused kernel."""
    counts = {}
    for name in ("rotary", "coca"):
        model, one = make(pos_emb=name), torch.zeros(2, 2, 1, 16)
        method = model.methods["global"]
        context = model.positions(torch.zeros(1, dtype=torch.int64), 1, torch.float32)
        with Counted() as operands:
            method.operands(method.form, one, one, context.segments, None)
        cache = model.new_cache()
        model(tokens(PROMPT), cache=cache)
        with Counted() as decoding:
            model(tokens(1), cache=cache)
        counts[name] = decoding.count - 2 * operands.count
    assert counts["coca"] == counts["rotary"]


@torch.no_grad()
def test_the_length_is_the_cache_s() -> None:
    model = make(rope_scaling=scaling("dynamic"))
    with pytest.raises(ValueError, match="length: cannot be combined with a cache"):
        model.hidden_states(tokens(3), cache=model.new_cache(), length=40)


@torch.no_grad()
def test_a_failed_call_leaves_the_cache_as_it_was() -> None:
    model, ids = make(), tokens(12)
    cache = model.new_cache()
    first = model(ids[:, :5], cache=cache)
    for wrong in (torch.full((2, 3), 999), tokens(3, batch=1)):
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            model(wrong, cache=cache)
        assert len(cache) == 5 and all(layer.length == 5 for layer in cache.layers)
    rest = model(ids[:, 5:], cache=cache)
    torch.testing.assert_close(torch.cat((first, rest), dim=1), model(ids), rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_a_call_that_fails_in_the_second_layer_is_undone_in_the_first() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model, ids = make(), tokens(12)
    cache = model.new_cache()
    first = model(ids[:, :5], cache=cache)
    hook = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:, 5:8], cache=cache)
    hook.remove()
    assert len(cache) == 5 and [layer.length for layer in cache.layers] == [5, 5]
    rest = model(ids[:, 5:], cache=cache)
    torch.testing.assert_close(torch.cat((first, rest), dim=1), model(ids), rtol=1e-4, atol=2e-5)


def test_a_cache_is_for_generation() -> None:
    model = make()
    with pytest.raises(ValueError, match="model.eval.. and use torch.no_grad"):
        model(tokens(4), cache=model.new_cache())
    with torch.no_grad(), pytest.raises(ValueError, match="model.eval"):
        model.train()(tokens(4), cache=model.new_cache())
    with torch.no_grad(), pytest.raises(ValueError, match="has 1 layers, but the model has 2"):
        model.eval()(tokens(4), cache=Cache([None]))
    with pytest.raises(ValueError, match="at least 1"):
        model.new_cache(length=0)


def _nothing(layer: LayerCache) -> list[Tensor]:
    return [buffer[:, :, :0] for buffer in layer.buffers]


def test_buffers_grow_and_keep_what_they_hold() -> None:
    layer = LayerCache()
    x = torch.randn(2, 3, 40, 5)
    for start, stop in ((0, 1), (1, 7), (7, 8), (8, 40)):
        (kept,) = layer.append(x[:, :, start:stop])
        torch.testing.assert_close(kept, x[:, :, :stop], rtol=0, atol=0)


@torch.no_grad()
def test_the_room_of_a_cache_is_no_length_of_a_text() -> None:
    """Factors for long texts are for texts that are long, however many tokens a cache has room for."""
    model = make(rope_scaling=scaling("longrope"))
    short = tokens(TRAINED)
    alone = model(short)
    torch.testing.assert_close(model(short, cache=model.new_cache(capacity=64 * LENGTH)), alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(short, cache=model.new_cache(LENGTH)), alone, rtol=1e-2)


@torch.no_grad()
def test_room_is_taken_once_whatever_length_extensions_see() -> None:
    model = make(rope_scaling=scaling("dynamic"))
    for length in (None, PROMPT, LENGTH):
        cache = model.new_cache(length, capacity=LENGTH)
        model(tokens(PROMPT), cache=cache)
        first = cache.layers[0].buffers[0]
        for _ in range(LENGTH - PROMPT):
            model(tokens(1), cache=cache)
        assert cache.layers[0].buffers[0] is first and first.shape[2] == LENGTH
