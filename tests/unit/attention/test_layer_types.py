"""Layers that differ: what their keys mean, caches of a window, and unsupported combinations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca import build_model, load_config
from megatron_coca.attention.layer import LayerCache, cache_bytes
from megatron_coca.checkpoints.compare import check_same_model
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.config import Config, ConfigError
from megatron_coca.model import GPT
from megatron_coca.model.cost import flops_per_token, parameter_count

LENGTH, WIDTH = 60, 6
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 48}
SHAPE |= {"make_vocab_size_divisible_by": 1, "init_method_std": 0.2, "output_layer_init_method": "normal"}
SLIDING = {"sliding_window_width": WIDTH, "rotary_emb_base": 500.0, "rope_scaling": None}
PATTERN = {
    "pos_emb": "coca",
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    "attention_config": [[["sliding", "global", "nope", "sliding"], 1]],
    "layer_types": {"sliding": SLIDING, "nope": {"pos_emb": "none"}},
}
MAPPED = {"relative_positions": {"type": "rerope", "window": 5}, "logit_scaling": "log_n"}
LEARNED = {
    "pos_emb": "rotary",
    "attention_config": ["t5", "global", "kernel", "t5"],
    "layer_types": {"t5": {"pos_emb": "rpe"}, "kernel": {"pos_emb": "kerple_log", "sliding_window_width": 9}},
}
CASES = {
    "pattern": PATTERN,
    "windows of all layers": {"pos_emb": "rotary", "sliding_window_width": WIDTH},
    "a window with a bias": {"pos_emb": "alibi", "sliding_window_width": WIDTH},
    "learned biases by type": LEARNED,
    "a map on global layers": PATTERN
    | {"relative_positions": {"type": "rerope", "window": 5}, "logit_scaling": "log_n"},
    "normalized queries and keys": PATTERN | {"use_qk_layernorm": True},
}


def configured(**keys: Any) -> Config:
    return load_config([], SHAPE | {"pos_emb": "rotary"} | keys)


def tokens(length: int = LENGTH, batch: int = 2) -> Tensor:
    return torch.randint(48, (batch, length), generator=torch.Generator().manual_seed(0))


def dense(config: Config, model: GPT) -> GPT:
    """The same weights with every layer computed by the reference backend."""
    types = {name: kind.model_dump() for name, kind in config.position.layer_types.items()}
    types = {name: kind | {"attention_backend": "reference"} for name, kind in types.items()}
    reference = build_model(config.override({"attention_backend": "reference", "layer_types": types})).eval()
    reference.load_state_dict(model.state_dict())
    return reference


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
@torch.no_grad()
def test_values_and_decoding_are_those_of_dense_attention(keys: dict[str, Any]) -> None:
    config = configured(**keys)
    model, ids = build_model(config).eval(), tokens()
    full = model(ids)
    torch.testing.assert_close(full, dense(config, model)(ids), rtol=1e-4, atol=2e-5)
    cache = model.new_cache(length=LENGTH)
    parts = ids.split([25, 3] + [1] * (LENGTH - 28), dim=1)
    torch.testing.assert_close(torch.cat([model(p, cache=cache) for p in parts], dim=1), full, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_every_weight_trains_and_documents_stay_apart(keys: dict[str, Any]) -> None:
    model, ids = build_model(configured(**keys)), tokens()
    model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    model.eval()
    with torch.no_grad():
        documents = (torch.arange(LENGTH) >= 20).long().expand(2, -1)
        length = model.hidden_states(ids, documents=documents, length=40)
        torch.testing.assert_close(length[:, 20:], model.hidden_states(ids[:, 20:], length=40), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("width", [0, 1, WIDTH])
def test_a_window_hides_what_is_further_as_in_gpt_neox(width: int, backend: str) -> None:
    """`sliding_window_width` is the largest distance, GPT-NeoX's (width, -1): one layer sees width + 1 tokens."""
    model = build_model(configured(num_layers=1, sliding_window_width=width, attention_backend=backend)).eval()
    ids = tokens(20, 1)
    with torch.no_grad():
        before = model(ids)
        changed = ids.clone()
        changed[0, 5] = (changed[0, 5] + 1) % 48
        differs = (model(changed) != before).any(dim=-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(5, 5 + width + 1))


def test_each_type_has_its_own_keys() -> None:
    methods = build_model(configured(**PATTERN)).methods
    assert list(methods) == ["sliding", "global", "nope"]
    assert [method.window for method in methods.values()] == [WIDTH + 1, None, None]
    assert methods["sliding"].rotary.base == 500 and methods["global"].rotary.base == 10000
    assert methods["sliding"].rotary.scaling.rope_type == "default"
    assert methods["global"].rotary.scaling.rope_type == "dynamic" and methods["nope"].rotary is None


def test_a_type_inherits_what_applies_to_it() -> None:
    keys = {"relative_positions": {"type": "rerope"}, "logit_scaling": "log_n", "pos_emb": "coca"}
    types = configured(**PATTERN | keys).layer_types
    assert types["nope"].rope_scaling is None and types["nope"].relative_positions is None
    assert types["sliding"].relative_positions is None, "a window leaves no far pairs to map"
    assert {kind.scaling.name for kind in types.values()} == {"log_n"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_config": ["a"] * 4}, "attention_config: unknown attention type a; .*layer_types"),
        ({"layer_types": {"a": {}}}, "layer_types: no layer has the type a"),
        ({"layer_types": {"global": {}}}, "layer_types: global is reserved"),
        ({"attention_config": [[["a"], 3]], "layer_types": {"a": {}}}, "covers 3 layers, but num_layers is 4"),
        (
            {"attention_config": [[["a"], 4]], "layer_types": {"a": {"pos_emb": "rotray"}}},
            "layer_types.a.pos_emb: `rot",
        ),
        (
            {"attention_config": [[["a"], 4]], "layer_types": {"a": {"num_layers": 3}}},
            "layer_types.a.num_layers: unknown",
        ),
        (
            {"attention_config": [[["a"], 4]], "layer_types": {"a": {"rope_scaling": {"rope_type": "yarn"}}}},
            "layers of type a: rope_type yarn needs factor",
        ),
        (
            {"attention_config": [[["a", "global"], 2]], "layer_types": {"a": {"pos_emb": "learned"}}},
            "pos_emb learned .*all layers share",
        ),
        ({"sliding_window_width": 3, "relative_positions": {"type": "rerope"}}, "contradicts relative_positions"),
        ({"use_qk_layernorm": True, "num_kv_heads": 2}, "a weight for every query head"),
        ({"use_qk_layernorm": True, "model_parallel_size": 2}, "not supported with model_parallel_size"),
    ],
)
def test_mistakes_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**keys)


def test_a_resolved_configuration_is_read_back(tmp_path: Any) -> None:
    config = configured(**PATTERN)
    (tmp_path / "config.yml").write_text(config.to_yaml())
    again = load_config(tmp_path / "config.yml")
    assert again == config and again.layer_types == config.layer_types
    longer = again.override({"layer_types.sliding.rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert longer.layer_types["sliding"].extension.name == "linear"
    assert longer.layer_types["sliding"].sliding_window_width == WIDTH


def test_what_evaluation_may_change_in_a_type(tmp_path: Any) -> None:
    config = configured(**PATTERN)
    for keys in ({"sliding_window_width": 99}, {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}):
        check_same_model(tmp_path, config, config.override({"layer_types": {"sliding": keys}}))
    with pytest.raises(CheckpointError, match=r"layer_types.nope.pos_emb \(saved 'none', .*'rotary'\)"):
        check_same_model(tmp_path, config, config.override({"layer_types": {"nope": {"pos_emb": "rotary"}}}))
    with pytest.raises(CheckpointError, match=r"layer_types.sliding.rope_scaling \(clex must be"):
        check_same_model(tmp_path, config, config.override({"layer_types": {"sliding": {"rope_scaling": "clex"}}}))


def test_the_cache_of_a_window_holds_the_window() -> None:
    model = build_model(configured(**PATTERN)).eval()
    cache = model.new_cache()
    with torch.no_grad():
        for token in tokens(1000, 1).split(1, dim=1):
            model(token, cache=cache)
    held = [layer.buffers[0].shape[2] for layer in cache.layers]
    assert max(held[0], held[3]) <= 3 * (WIDTH + 1) and min(held[1], held[2]) >= 1000
    methods = [model.methods[name] for name in model.layer_types]
    per_token = [2 * method.head_dim * 4 * 4 for method in methods]
    kept = [min(1000, method.window or 1000) for method in methods]
    expected = sum(size * count for size, count in zip(per_token, kept, strict=True))
    assert cache_bytes(methods, 1000, torch.float32) == expected


def test_a_window_cannot_return_further_than_it_holds() -> None:
    layer, x = LayerCache(window=4), torch.randn(1, 1, 40, 2)
    for token in range(40):
        (kept,) = layer.append(x[:, :, token : token + 1])
        torch.testing.assert_close(kept, x[:, :, max(token - 3, 0) : token + 1])
    layer.cut(39)
    (kept,) = layer.append(x[:, :, 39:])
    torch.testing.assert_close(kept, x[:, :, 36:])
    with pytest.raises(ValueError, match="cannot go back to token 5"):
        layer.cut(5)


def test_cost_counts_windows_and_learned_weights_by_type() -> None:
    plain, windowed = configured(), configured(sliding_window_width=3)
    model = plain.model
    blocks = 2.0 * (flops_per_token(plain, 16).forward - flops_per_token(windowed, 16).forward) / 2
    seen = sum(min(m + 1, 16) for m in range(16)) / 16 - sum(min(m + 1, 4) for m in range(16)) / 16
    assert blocks == pytest.approx(4 * model.num_layers * model.hidden_size * seen)
    for keys in (LEARNED, PATTERN | {"use_qk_layernorm": True}):
        config = configured(**keys)
        assert parameter_count(config).total == sum(p.numel() for p in build_model(config).parameters())


def test_recomputation_gives_the_same_bits() -> None:
    gradients = []
    for recomputed in (False, True):
        model, ids = (
            build_model(configured(**PATTERN, checkpoint_activations=recomputed, checkpoint_num_layers=3)),
            tokens(),
        )
        model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
