"""Latent attention: the paper's formula, gradients, every method in decoding, bytes, and wrong combinations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca import Attention, attention_maps, build_model, load_config
from megatron_coca.attention.build import build_methods
from megatron_coca.attention.latent import LatentAttention
from megatron_coca.attention.layer import cache_bytes
from megatron_coca.config import Config, ConfigError
from megatron_coca.model import generate
from megatron_coca.training.optimizer import parts_of, train_only_parts, trainable_share
from tests.reference import dense, frequencies
from tests.reference.latent import latent_attention
from tests.unit.attention.test_cache import COMBINED, EXTENDED, FORMS, LENGTH, MAPPED, PROMPT, decoded, make, tokens
from tests.unit.model.test_static_decoding import OTHERS

WIDTHS: dict[str, Any] = {
    **{"kv_lora_rank": 10, "q_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 16, "v_head_dim": 9},
    "latent_norm_epsilon": 1e-3,
}
NO_QUERY_LATENT = {"q_lora_rank": None, "use_bias_in_qkv": False}
HEADS, TRAINED = 2, 16
YARN = {"rope_type": "yarn", "factor": 4.0}
STRENGTHS = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
REROPE = {"relative_positions": {"type": "rerope", "window": 6}}
CASES: dict[str, dict[str, Any]] = {
    "rotary": {},
    "no latent of queries": NO_QUERY_LATENT,
    "coca": {"pos_emb": "coca"},
    "coca_strict": {"pos_emb": "coca_strict"},
    "xpos": {"pos_emb": "xpos"},
    "none": {"pos_emb": "none"},
    "ReRoPE": REROPE,
    "CoCA, ReRoPE, log n": REROPE | {"pos_emb": "coca", "logit_scaling": "log_n"},
    "half": {"rotary_pct": 0.5},
    "YaRN": {"rope_scaling": YARN},
    "YaRN with strengths": {"rope_scaling": STRENGTHS},
    "CoCA, YaRN with strengths": {"rope_scaling": STRENGTHS, "pos_emb": "coca", "softmax_scale": 0.1},
}


def latents(**keys: Any) -> Any:
    return make(**{"pos_emb": "rotary"} | WIDTHS | keys).double()


def scored(keys: dict[str, Any], length: int) -> Any:
    """The oracle's scores of the rotated features, and the factor on all logits."""
    name, extension = keys.get("pos_emb", "rotary"), dict(keys.get("rope_scaling", {}))
    strengths = [extension.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    rotated = int(WIDTHS["qk_rope_head_dim"] * keys.get("rotary_pct", 1.0))
    settings = {"training_length": TRAINED, "length": length} | extension
    theta = frequencies.frequencies(rotated, **settings)
    multiplier, of_all = frequencies.multiplier(rotated, **settings), 1.0
    if strengths[1] is not None:
        own, of_all = (1 + 0.1 * strength * math.log(4.0) for strength in strengths)
        multiplier = own / of_all
    window = dense.RelativeMap("rerope", 6) if "relative_positions" in keys else None
    pairs = dense.lay_out(torch.arange(length).double()[None], length, dense.Setting(map=window))

    def score(q: Tensor, k: Tensor) -> Tensor:
        return dense.SCORES[name](q[None, None], k[None, None], theta, pairs, multiplier)[0, 0]

    return score, of_all**2


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_formula(keys: dict[str, Any], backend: str) -> None:
    length = 24
    model = latents(attention_backend=backend, **keys)
    layer = model.blocks[0].attention
    assert isinstance(layer, LatentAttention)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 32, dtype=torch.float64, generator=generator).requires_grad_()
    inputs = [x, *layer.parameters()]
    made = layer(x[None], model.contexts(torch.arange(length), length, torch.float64)["global"])[0]
    score, of_all = scored(keys, length)
    scale = keys.get("softmax_scale") or (5 + 16) ** -0.5
    factor = torch.ones(length, dtype=torch.float64)
    if "logit_scaling" in keys:
        factor = (torch.arange(length).double() + 1).log().div(math.log(TRAINED)).clamp(min=1.0)
    wanted = latent_attention(x, dict(layer.named_parameters()), HEADS, score, scale * of_all, factor, 1e-3)
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-11)
    weights = torch.randn(made.shape, dtype=torch.float64, generator=generator)
    pairs = zip(torch.autograd.grad(made, inputs, weights), torch.autograd.grad(wanted, inputs, weights), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


WITHOUT = frozenset({"num_kv_heads", "qk_norm"})
"""Keys that other layers have in these cases."""
EVERY = [
    {key: value for key, value in keys.items() if key not in WITHOUT}
    for keys in [*FORMS, *EXTENDED, *MAPPED, *COMBINED, *OTHERS]
    if "gau" not in str(keys)
]


@pytest.mark.fewest
@pytest.mark.parametrize("keys", EVERY, ids=str)
@torch.no_grad()
def test_decoding_from_latents_is_the_full_forward(keys: dict[str, Any]) -> None:
    model, ids = latents(**keys), tokens()
    full, cache = model(ids), model.new_cache(length=LENGTH)
    sizes = (PROMPT, 3, 1, 1, 1, LENGTH - PROMPT - 7)  # and one more token
    torch.testing.assert_close(decoded(model, ids, cache, *sizes), full, rtol=1e-9, atol=1e-10)
    assert len(cache) == LENGTH


@pytest.mark.parametrize("keys", [{}, {"pos_emb": "coca"}, REROPE, {"sliding_window_width": 5}], ids=str)
@torch.no_grad()
def test_rows_have_positions_of_their_own_as_after_padding_on_the_left(keys: dict[str, Any]) -> None:
    model, ids = latents(**keys), tokens(12)
    shifted = torch.stack((torch.arange(12), torch.arange(12) + 30))
    cache = model.new_cache(LENGTH)
    parts = [model(ids[:, span], shifted[:, span], cache=cache) for span in (slice(0, 7), slice(7, 11), slice(11, 12))]
    whole = model.logits(model.hidden_states(ids, shifted, length=LENGTH))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("keys", [{}, {"forgetting_gate": "fox"}, REROPE | {"pos_emb": "coca"}], ids=str)
@torch.no_grad()
def test_a_cache_holds_one_latent_and_one_key_of_every_token(keys: dict[str, Any]) -> None:
    model = latents(**keys)
    cache = model.new_cache(LENGTH)
    model(tokens(), cache=cache)
    latent, key, *gates = cache.layers[0].buffers
    assert (*latent.shape, *key.shape) == (2, 1, LENGTH, 10, 2, 1, LENGTH, 16)
    size = cache_bytes([model.methods["global"]], 1, torch.float64)
    assert size == (10 + 16) * 8 + 2 * 4 * len(gates) and len(gates) == ("forgetting_gate" in keys)


def test_a_token_of_deepseek_takes_576_numbers_in_each_layer() -> None:
    keys = {"num_attention_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config = load_config([], {"num_layers": 1, "hidden_size": 7168, "seq_length": 16, "pos_emb": "rotary"} | keys)
    assert cache_bytes(build_methods(config).values(), 1, torch.bfloat16) == 576 * 2


@torch.no_grad()
def test_documents_stay_apart() -> None:
    model, ids = latents(pos_emb="coca"), tokens(24)
    documents = (torch.arange(24) >= 10).long().expand(2, -1)
    packed = model.hidden_states(ids, documents=documents, length=24)
    for span in (slice(0, 10), slice(10, 24)):
        alone = model.hidden_states(ids[:, span], length=24)
        torch.testing.assert_close(packed[:, span], alone, rtol=1e-9, atol=1e-10)


def test_generation_with_fixed_shapes_finds_the_same_tokens() -> None:
    model, ids = latents(pos_emb="coca", rope_scaling=YARN), tokens(PROMPT)
    wanted = generate(model, ids, 20, decoding="growing")
    assert torch.equal(generate(model, ids, 20, decoding="static"), wanted)


@torch.no_grad()
def test_maps_and_attention_for_a_network_of_ones_own() -> None:
    """The map's weights, times the values, are the output before the projection."""
    keys = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "pos_emb": "coca"} | WIDTHS
    own = Attention(load_config([], keys)).double().eval()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    (found,) = attention_maps(own, x)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(2, HEADS, 9, dtype=torch.float64))
    layer = own.attention
    down = layer.key_value_down(x)[..., :10]
    values = layer.key_value_up(layer.key_value_down_layernorm(down)).unflatten(-1, (HEADS, -1))[..., 5:]
    out = torch.einsum("bhmn,bnhd->bmhd", found.weights, values)
    torch.testing.assert_close(own(x), layer.dense(out.flatten(2)), rtol=1e-9, atol=1e-10)


def test_every_weight_has_a_gradient_also_when_recomputed() -> None:
    gradients = []
    for policy in (None, "full", "selective"):
        given = {} if policy is None else {"checkpoint_activations": True, "checkpoint_policy": policy}
        model = latents(attention_output_gate="head", **given).train()
        model.loss(model.hidden_states(tokens()), tokens()).backward()
        assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())
        gradients.append([weight.grad for weight in model.parameters()])
    for other in gradients[1:]:
        for ours, theirs in zip(gradients[0], other, strict=True):
            assert torch.equal(ours, theirs)


def configured(**keys: Any) -> Config:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 50}
    return load_config([], shape | {"pos_emb": "rotary"} | WIDTHS | keys)


@pytest.mark.parametrize("trainable", [["query"], ["key", "value"], ["norms", "attention_output"]], ids=str)
def test_parts_are_trained_alone(trainable: list[str]) -> None:
    config = configured(trainable=trainable)
    model = build_model(config)
    train_only_parts(model, config.optimizer)
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert names and all(set(parts_of(name)) <= set(trainable) for name in names)
    assert any("key_value_up" in name for name in names) == ("key" in trainable)
    share = trainable_share(config)
    assert share.trained == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert share.total == sum(weight.numel() for weight in model.parameters())


def test_norms_of_latents_are_trained_beside_norms_without_weights() -> None:
    config = configured(norm="non_parametric_rmsnorm", trainable=["norms"])
    assert trainable_share(config).trained == 2 * (10 + 7)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "grouped": ({"num_kv_heads": 1}, "kv_lora_rank: not supported with num_kv_heads, because every head has"),
    "head width": ({"kv_channels": 8}, "kv_lora_rank: not supported with kv_channels"),
    "norms of heads": ({"qk_norm": "head"}, "kv_lora_rank: not supported with qk_norm"),
    "GPT-NeoX's norm": ({"use_qk_layernorm": True}, "kv_lora_rank: not supported with use_qk_layernorm"),
    "limits": ({"clip_qkv": 2.0}, "kv_lora_rank: not supported with clip_qkv"),
    "values that are keys": ({"values_from_keys": True}, "kv_lora_rank: not supported with values_from_keys"),
    "norm of values": ({"value_norm": True}, "kv_lora_rank: not supported with value_norm"),
    "tensor ranks": ({"model_parallel_size": 2}, "kv_lora_rank: not supported with model_parallel_size"),
    "adapters of keys": (
        {"lora": {"targets": ["key"]}},
        "keys and values; list both key and value in lora.targets",
    ),
    "units": ({"attention_config": ["gau", "global"]}, "kv_lora_rank: not supported with layers of type gau"),
    "only keys": ({"trainable": ["key"]}, "kv_lora_rank: one matrix computes keys and values; train both"),
    "wide values": ({"v_head_dim": 22}, "v_head_dim: 22 exceeds the 21 features of queries and keys"),
    "no latents": ({"kv_lora_rank": None}, "q_lora_rank: has no effect without latent attention"),
    "an odd width": ({"qk_rope_head_dim": 5}, "rotary_pct: 1.0 of 5 features per head"),
    "uneven heads": (
        {"hidden_size": 33, "qk_nope_head_dim": None},
        "2 heads do not divide hidden_size 33; change one of them, or set qk_nope_head_dim",
    ),
    "a strength alone": ({"rope_scaling": YARN | {"mscale": 0.7}}, "rope_scaling: mscale has an effect only with"),
    "a strength without latents": (
        {"rope_scaling": YARN | {"mscale_all_dim": 0.7}} | dict.fromkeys(WIDTHS) | {"latent_norm_epsilon": 1e-6},
        "rope_scaling: mscale_all_dim is only for latent attention",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations_are_errors(case: str) -> None:
    keys, problem = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        configured(**keys)
    assert problem in str(raised.value)


def test_widths_have_defaults_from_the_heads() -> None:
    model = configured(**dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))).model
    assert (model.unrotated_dim, model.head_dim, model.value_dim, model.score_dim) == (16, 8, 16, 24)
