"""Switches of the block: norms, biases, head width, scales and soft-capping, one by one against a plain computation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import chunked_causal_mask_function

from megatron_coca import build_model, load_config
from megatron_coca.attention.build import build_method, find_backend
from megatron_coca.attention.inputs import in_chunks
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.config import ConfigError
from megatron_coca.model import GPT
from megatron_coca.model.cost import parameter_count

LENGTH = 300
"""More than a block of queries with soft-capping."""
SHAPE = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "num_kv_heads": 1, "seq_length": 16}
SHAPE |= {"vocab_size": 50, "make_vocab_size_divisible_by": 1, "init_method_std": 0.2, "pos_emb": "rotary"}
SHAPE |= {"output_layer_init_method": "normal", "norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 60}
CASES: dict[str, dict[str, Any]] = {
    "head width": {"kv_channels": 6},
    "biases of queries, keys and values": {"use_bias_in_attn_linear": False, "use_bias_in_qkv": True},
    "norms of outputs": {"norm_position": "post"},
    "norms of both": {"norm_position": "sandwich", "zero_centered_norms": True, "activation": "geglu_tanh"},
    "a tied head with a bias": {"use_bias_in_output_head": True},
    "a transform before the head, no first norm": {
        "use_output_transform": True,
        "skip_first_norm": True,
        "use_bias_in_mlp": True,
        "activation": "geglu_tanh",
    },
    "norms of sums, a narrow embedding": {"norm_position": "residual", "embedding_width": 10},
    "parallel": {"norm_position": "sandwich", "gpt_j_residual": True},
    "heads": {"qk_norm": "head", "zero_centered_norms": True},
    "heads, no weights": {"unweighted_qk_norm": True},
    "heads after rotation": {"qk_norm": "head", "qk_norm_after_rotation": True},
    "heads with weights of their own": {"qk_norm": "layernorm_by_head"},
    "clipped projections": {"clip_qkv": 0.5},
    "scaled branches, a head with a bias": {
        "residual_scale": 0.3,
        "use_bias_in_output_head": True,
        "no_weight_tying": True,
        "activation": "relu_squared",
    },
    "xielu, norms without weights": {"activation": "xielu", "norm": "non_parametric_rmsnorm"},
    "projections": {"qk_norm": "projection", "pos_emb": "coca"},
    "scales": {"embedding_scale": 3.0, "softmax_scale": 0.7, "final_logit_scale": 0.25, "use_embedding_norm": True},
    "capping": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "sliding_window_width": 40},
    "capping with a map": {
        "attn_logit_softcapping": 1.5,
        "relative_positions": {"type": "rerope", "window": 9},
    },
    "capping with a bias": {"attn_logit_softcapping": 1.5, "pos_emb": "alibi"},
    "sinks": {"sink_logits": True},
    "sinks in a window": {"sink_logits": True, "sliding_window_width": 40},
    "sinks with a map": {"sink_logits": True, "pos_emb": "coca", "relative_positions": {"type": "rerope", "window": 9}},
    "chunks": {"attention_chunk_size": 37},
    "chunks with a bias": {"attention_chunk_size": 37, "pos_emb": "alibi", "attention_backend": "sdpa"},
    "learned factors": {"logit_scaling": {"type": "ssmax", "initial": 0.7}},
    "learned factors with a bias": {"logit_scaling": {"type": "ssmax", "bias": True}, "sink_logits": True},
    "forgetting gates": {"forgetting_gate": "fox"},
    "forgetting gates in a window": {"forgetting_gate": "cable", "sliding_window_width": 40},
    "forgetting gates with a map": {
        "forgetting_gate": "fox",
        "pos_emb": "coca",
        "relative_positions": {"type": "rerope", "window": 9},
    },
    "forgetting gates with a bias": {"forgetting_gate": "cable", "pos_emb": "alibi"},
    "forgetting gates with capping and factors": {
        "forgetting_gate": "fox",
        "attn_logit_softcapping": 1.5,
        "logit_scaling": "ssmax",
    },
    "forgetting gates in chunks": {"forgetting_gate": "fox", "attention_chunk_size": 37},
    "output gates of heads": {
        "attention_output_gate": "head",
        "qk_norm": "head",
        "qk_norm_after_rotation": True,
        "clip_qkv": 0.5,
    },
    "output gates of features": {"attention_output_gate": "feature", "use_bias_in_qkv": False},
    "output gates with a map": {
        "attention_output_gate": "feature",
        "pos_emb": "coca",
        "relative_positions": {"type": "rerope", "window": 9},
    },
    "heads by layer type": {
        "attention_config": ["sliding", "global"],
        "layer_types": {"sliding": {"sliding_window_width": 40}},
        "head_shapes": {"sliding": {"kv_channels": 6, "num_kv_heads": 3, "values_from_keys": False}},
        "kv_channels": 10,
        "values_from_keys": True,
        "value_norm": True,
        "layer_scale": True,
        "qk_norm": "head",
        "softmax_scale": 1.0,
        "clip_qkv": 2.0,
    },
    "values from keys": {"values_from_keys": True, "num_kv_heads": 3, "attention_output_gate": "feature"},
    "learned factors and sinks": {"logit_scaling": "ssmax", "sink_logits": True, "pos_emb": "coca_strict"},
}


def configured(**keys: Any) -> Any:
    return load_config([], SHAPE | keys)


def random_model(config: Any) -> GPT:
    torch.manual_seed(0)
    model = build_model(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return model


def xielu(x: Tensor, weight: Tensor) -> Tensor:
    a, c = F.softplus(weight[0]), weight[2] + F.softplus(weight[1])
    return torch.where(x > 0, a * x * x, c * (torch.expm1(x.clamp(max=weight[3].item())) - x)) + weight[2] * x


def norm(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    weight = 1 + weight if config.model.zero_centered_norms else weight
    return x / (x.square().mean(-1, keepdim=True) + config.model.rms_norm_epsilon).sqrt() * weight


def rotated(x: Tensor, config: Any) -> Tensor:
    """x [length, heads, head_dim]"""
    half = x.shape[-1] // 2
    phases = torch.arange(len(x)).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    cos, sin = phases.cos()[:, None], phases.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def log_gates(linear: Callable[[str, Tensor], Tensor], own: str, x: Tensor, config: Any) -> Tensor:
    """[length, heads] of hidden states x [length, width] before attention; 0 without gates."""
    kind = config.position.forgetting_gate
    if kind is None:
        return torch.zeros(len(x), 3, dtype=x.dtype)
    opened = linear(f"{own}attention.position_gates.projection", x)
    return {"fox": torch.sigmoid(opened).log(), "cable": -(1 + opened.exp()).log()}[kind]


def plain_logits(model: GPT, config: Any, ids: Tensor) -> Tensor:
    """Logits [length, vocabulary] of ids [length] of a sequential model with rotary positions, written out."""
    keys, weights = config.model, dict(model.state_dict())

    def normed(name: str, x: Tensor) -> Tensor:
        absent = "output_layernorm" in name or "sum_layernorm" in name
        plain = torch.ones(()) if keys.norm == "non_parametric_rmsnorm" and not absent else None
        weight = weights.get(f"{name}.weight", plain)
        return x if weight is None else norm(x, weight, config)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = weights["embedding.word_embeddings.weight"][ids] * keys.embedding_scale
    x = linear("embedding.projection", x) if keys.embedding_width else x
    if keys.use_embedding_norm:
        x = norm(x, weights["embedding.embedding_layernorm.weight"], config)

    for i in range(keys.num_layers):
        own, name = f"blocks.{i}.", keys.layer_names[i]
        changed = dict(config.flat()["head_shapes"].get(name, {}))
        width = changed.get("kv_channels") or keys.kv_channels or keys.hidden_size // keys.num_attention_heads
        groups = 3 // changed.get("num_kv_heads", keys.num_kv_heads)
        shared = changed.get("values_from_keys", keys.values_from_keys)
        packed = linear(f"{own}attention.query_key_value", normed(f"{own}input_layernorm", x))
        packed = packed if keys.clip_qkv is None else packed.clamp(-keys.clip_qkv, keys.clip_qkv)
        if shared:
            q, k = packed.unflatten(-1, (-1, width)).split([3, 3 // groups], dim=1)
            v = k
        elif groups == 1:  # query, key and value of each head in turn
            q, k, v = packed.unflatten(-1, (3, 3, width)).unbind(2)
        else:
            q, k, v = packed.unflatten(-1, (-1, width)).split([3, 1, 1], dim=1)
        v = norm(v, torch.ones(()), config) if keys.value_norm else v
        if keys.qk_norm == "layernorm_by_head":
            of_query, of_key = (weights[f"{own}attention.{n}_layernorm.weight"] for n in ("query", "key"))
            q, k = F.layer_norm(q, [width]) * of_query, F.layer_norm(k, [width]) * of_key
        if keys.unweighted_qk_norm:
            q, k = norm(q, torch.ones(()), config), norm(k, torch.ones(()), config)
        if keys.qk_norm_after_rotation:
            q, k = rotated(q, config), rotated(k, config)
        if keys.qk_norm == "head":
            q, k = (normed(f"{own}attention.{n}_layernorm", part) for n, part in (("query", q), ("key", k)))
        if not keys.qk_norm_after_rotation:
            q, k = rotated(q, config), rotated(k, config)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("mhd,nhd->hmn", q, k) * (keys.softmax_scale or width**-0.5)
        total = log_gates(linear, own, normed(f"{own}input_layernorm", x), config).T.cumsum(-1)
        factors = weights.get(f"{own}attention.position_factor.weight")
        if factors is not None:
            added = weights.get(f"{own}attention.position_factor.bias", torch.zeros_like(factors))
            logarithms = torch.arange(1, len(ids) + 1).double().log()[:, None]
            scores = scores * (factors[:, None, None] * logarithms + added[:, None, None])
        if keys.attn_logit_softcapping:
            scores = keys.attn_logit_softcapping * torch.tanh(scores / keys.attn_logit_softcapping)
        scores = scores + total[:, :, None] - total[:, None]
        distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
        window = config.layer_types[name].sliding_window_width
        chunk = torch.arange(len(ids)) // (config.position.attention_chunk_size or len(ids))
        hidden = (distance < 0) | (chunk[:, None] != chunk) | (distance > (len(ids) if window is None else window))
        powers, sinks = (
            scores.masked_fill(hidden, -torch.inf).exp(),
            weights.get(f"{own}attention.position_sinks.weight"),
        )
        total = powers.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        out = torch.einsum("hmn,nhd->mhd", powers / total, v)
        if keys.attention_output_gate:
            opened = linear(f"{own}attention.output_gate", normed(f"{own}input_layernorm", x))
            out = out / (1 + (-opened.unflatten(-1, (3, -1))).exp())
        out = out.flatten(1)
        attended = normed(f"{own}attention_output_layernorm", linear(f"{own}attention.dense", out))
        x = normed(f"{own}attention_sum_layernorm", x + keys.residual_scale * attended)
        inner = linear(f"{own}mlp.linear1", normed(f"{own}post_attention_layernorm", x))
        if keys.activation == "relu_squared":
            inner = inner.clamp(min=0) ** 2
        elif keys.activation == "xielu":
            inner = xielu(inner, weights[f"{own}mlp.activation.weight"])
        else:
            value, gate = inner.chunk(2, -1)
            inner = value * (F.gelu(gate, approximate="tanh") if keys.activation == "geglu_tanh" else F.silu(gate))
        x = x + keys.residual_scale * normed(f"{own}mlp_output_layernorm", linear(f"{own}mlp.linear2", inner))
        x = normed(f"{own}mlp_sum_layernorm", x) * weights.get(f"{own}layer_scale.weight", 1.0)
    head = weights.get("final_linear.weight", weights["embedding.word_embeddings.weight"])
    x = normed("norm", x)
    x = linear("output_transform", x) if keys.embedding_width else x
    if keys.use_output_transform:
        dense = linear("output_transform.dense", x)
        x = normed("output_transform.norm", F.gelu(dense, approximate="tanh"))
    logits = x @ head.T + weights.get("final_linear.bias", weights.get("final_bias", 0.0))
    logits = logits * keys.final_logit_scale
    cap = keys.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def tokens() -> Tensor:
    return torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(0))


OF_BACKENDS = ("parallel", "projections", "capping with a map", "sinks with a map", "learned factors and sinks")
OF_BACKENDS += (
    "output gates with a map",
    "chunks with a bias",
    "forgetting gates with a map",
    "forgetting gates with a bias",
)
WRITTEN_OUT = [name for name in CASES if name not in OF_BACKENDS]


@pytest.mark.parametrize("name", [name for name in WRITTEN_OUT if name != "capping with a bias"])
@torch.no_grad()
def test_logits_are_those_of_the_formulas(name: str) -> None:
    config = configured(**CASES[name])
    model, ids = random_model(config).eval(), tokens()
    torch.testing.assert_close(model(ids)[0], plain_logits(model, config, ids[0]), rtol=1e-9, atol=1e-9)


@pytest.mark.fewest
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_backends_and_cached_decoding_agree_and_parameters_are_counted(name: str) -> None:
    config = configured(**CASES[name])
    model, ids = random_model(config).eval(), tokens()
    full = model(ids)
    dense = build_model(config.override({"attention_backend": "reference"})).double().eval()
    dense.load_state_dict(model.state_dict())
    torch.testing.assert_close(full, dense(ids), rtol=1e-9, atol=1e-9)
    cache = model.new_cache(length=LENGTH)
    parts = [model(part, cache=cache) for part in ids.split([290, 3, 1, 1, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-9, atol=1e-9)
    assert parameter_count(config).total == sum(parameter.numel() for parameter in model.parameters())


DIFFERENTIATED = ["scaled branches, a head with a bias", "xielu, norms without weights", "heads after rotation"]
DIFFERENTIATED += [
    "clipped projections",
    "norms of both",
    "capping",
    "capping with a map",
    "projections",
    "scales",
    "sinks",
    "learned factors",
]


@pytest.mark.fewest
@pytest.mark.parametrize(
    "name",
    [
        *DIFFERENTIATED,
        "learned factors with a bias",
        "chunks",
        "sinks in a window",
        "sinks with a map",
        "learned factors and sinks",
        "output gates of heads",
        "output gates with a map",
        "heads by layer type",
        "values from keys",
    ]
    + [name for name in CASES if name.startswith("forgetting gates")],
)
def test_gradients_are_those_of_dense_attention_and_an_unchunked_loss(name: str) -> None:
    config = configured(**CASES[name], loss_chunk_size=128)
    model, ids = random_model(config), tokens()
    dense = build_model(config.override({"attention_backend": "reference", "loss_chunk_size": 0})).double()
    dense.load_state_dict(model.state_dict())
    for either in (model, dense):
        either.loss(either.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
    for (key, one), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.abs().max() > 0, key
        if key.endswith("mlp.activation.weight"):
            assert one.grad[2:].abs().max() == 0, "the constants of xIELU are not trained"
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_blocks_have_the_gradients_of_their_gates(policy: str) -> None:
    """Blocks of queries, which are computed again themselves, inside blocks of the model that are."""
    config = configured(forgetting_gate="fox", pos_emb="coca")
    again = config.override({"checkpoint_activations": True, "checkpoint_policy": policy})
    models, ids = [random_model(each).train() for each in (config, again)], tokens()
    for model in models:
        model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
    for (key, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14, msg=key)


REFUSED = {
    "zero_centered_norms": {"zero_centered_norms": True, "norm": "scalenorm"},
    "qk_norm_after_rotation": {"qk_norm_after_rotation": True, "qk_norm": "head", "logit_scaling": "log_n"},
    "qk_norm_after_rotation: needs": {"qk_norm_after_rotation": True, "qk_norm": "projection"},
    **{
        f"qk_norm_after_rotation: not supported with pos_emb {name}": {
            "qk_norm_after_rotation": True,
            "qk_norm": "head",
            "pos_emb": name,
        }
        for name in ("coca", "pope", "polar")
    },
    "skip_first_norm": {"skip_first_norm": True, "norm_position": "post"},
    "use_output_transform": {"use_output_transform": True, "embedding_width": 8},
    "norm_position: residual": {"norm_position": "residual", "gpt_j_residual": True},
    "use_bias_in_output_head: not": {
        "use_bias_in_output_head": True,
        "no_weight_tying": True,
        "final_logit_scale": 0.5,
    },
    "attention_chunk_size: contradicts relative_positions": {
        "attention_chunk_size": 4,
        "relative_positions": {"type": "rerope", "window": 4},
    },
    "qk_norm": {"qk_norm": "head", "model_parallel_size": 1, "use_qk_layernorm": True, "num_kv_heads": 3},
    "qk_norm: layernorm_by_head is not": {"qk_norm": "layernorm_by_head", "model_parallel_size": 3, "num_kv_heads": 3},
    "activation: xielu is not": {"activation": "xielu", "model_parallel_size": 3, "num_kv_heads": 3},
    "forgetting_gate": {"forgetting_gate": "fox", "sink_logits": True},
    "head_shapes: global is reserved": {"head_shapes": {"global": {"kv_channels": 8}}},
    "head_shapes: no layer has the type 'local'": {"head_shapes": {"local": {"kv_channels": 8}}},
    "head_shapes: 2 key heads of type local do not divide num_attention_heads 3": {
        "attention_config": ["local", "global"],
        "layer_types": {"local": {}},
        "head_shapes": {"local": {"num_kv_heads": 2}},
    },
    "model_parallel_size: 3 does not divide head_shapes.local.num_kv_heads 1": {
        "attention_config": ["local", "global"],
        "layer_types": {"local": {}},
        "head_shapes": {"local": {"num_kv_heads": 1}},
        "num_kv_heads": 3,
        "model_parallel_size": 3,
    },
    "final_logit_softcapping": {"final_logit_softcapping": 3.0, "loss_kernel": "triton"},
}


@pytest.mark.parametrize("key", REFUSED)
def test_contradicting_switches_are_errors(key: str) -> None:
    with pytest.raises(ConfigError, match=key if ":" in key else f"{key}:"):
        configured(**REFUSED[key])


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_backends_without_sinks_say_so(backend: str) -> None:
    with pytest.raises(ValueError, match=f"attention_backend: {backend} .* no sink_logits"):
        build_model(configured(sink_logits=True, attention_backend=backend))


@pytest.mark.parametrize("pos_emb", ["rotary", "coca", "coca_strict", "none", "alibi"])
def test_learned_factors_multiply_every_score_once(pos_emb: str) -> None:
    """CoCA's scores are quadratic in the query; those of ALiBi get the factor without their bias."""
    learned = configured(pos_emb=pos_emb, logit_scaling={"type": "ssmax", "initial": 0.5})
    plain = configured(pos_emb=pos_emb)
    scores = []
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 12, 8, dtype=torch.float64, generator=generator) for heads in (3, 1))
    for config in (learned, plain):
        model = build_model(config).double()
        context = model.positions(torch.arange(12), 12, torch.float64)
        factor = model.blocks[0].attention.position_factor
        inputs = model.positions.method.prepare(q, k, k, context, factor=factor and torch.tensor([1.0, 2.0, 3.0]))
        scores.append(inputs.query @ inputs.key.mT)
    expected = torch.tensor([1.0, 2.0, 3.0])[:, None, None] * torch.arange(1, 13).double().log()[:, None] * scores[1]
    torch.testing.assert_close(scores[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "keys",
    [
        {"sink_logits": True, "logit_scaling": "ssmax"},
        {"sink_logits": True, "logit_scaling": {"type": "ssmax", "bias": True}},
        {"attention_chunk_size": 8},
        {"forgetting_gate": "fox"},
        {"forgetting_gate": "fox", "sliding_window_width": 3},
        {"attention_output_gate": "feature", "pos_emb": "coca"},
    ],
)
def test_documents_have_their_own_sinks_factors_and_chunks(keys: dict[str, Any]) -> None:
    """Two packed documents have the same outputs as each document separately."""
    config = configured(**keys)
    model, ids = random_model(config).eval(), tokens()[:1, :40]
    packed = model(ids, documents=(torch.arange(40) >= 17).long()[None])
    alone = torch.cat((model(ids[:, :17]), model(ids[:, 17:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1, 5, 17])
def test_chunks_are_those_of_transformers(length: int) -> None:
    index = torch.arange(length)
    theirs = chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long))(0, 0, index[:, None], index)
    chunks = in_chunks(None, 5, 2, length, torch.device("cpu"))
    torch.testing.assert_close((index <= index[:, None]) & (index >= chunks.starts[1][:, None]), theirs)
    assert chunks.spans == (tuple((start, min(start + 5, length)) for start in range(0, length, 5)),) * 2
    position = load_config([], SHAPE | {"attention_chunk_size": 5}).position
    assert position.mean_keys(length) == pytest.approx(float(theirs.sum()) / length)


def test_a_backend_without_gates_says_so() -> None:
    with pytest.raises(ValueError, match="attention_backend: flex .* forgetting gates need a call"):
        config = configured(forgetting_gate="fox")
        find_backend("flex", build_method(config.position, config.model).needs("cuda", 0.0))


@pytest.mark.parametrize("key", ["sliding_window_width", "attention_chunk_size"])
def test_fire_counts_tokens_that_windows_drop(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: not supported with pos_emb fire: its bias"):
        configured(pos_emb="fire", **{key: 4})


def test_gates_are_not_deterministic_on_cuda() -> None:
    config = configured(forgetting_gate="fox")
    needs = replace(build_method(config.position, config.model).needs("cuda", 0.0), deterministic=True)
    with pytest.raises(ValueError, match="deterministic: on CUDA, .*running sum of forgetting gates"):
        find_backend("auto", needs)


def test_backends_without_capping_say_so() -> None:
    with pytest.raises(ValueError, match="attention_backend: merge .* no attn_logit_softcapping"):
        build_model(configured(attn_logit_softcapping=3.0, attention_backend="merge"))


def test_opt_positions_begin_at_the_offset() -> None:
    """GPT-NeoX adds it to the positions before it looks them up, in OPT's way."""
    shape = SHAPE | {"pos_emb": "learned", "max_position_embeddings": 20}
    plain, shifted = (build_model(load_config([], shape | {"opt_pos_emb_offset": offset})) for offset in (0, 4))
    weights = plain.state_dict()
    table = weights["embedding.position_embeddings.weight"]
    shifted.load_state_dict(weights | {"embedding.position_embeddings.weight": table.roll(4, 0)})
    ids = tokens()[:, :16]
    assert torch.equal(shifted.eval()(ids), plain.eval()(ids))
    with pytest.raises(PositionRangeError, match="position 20 is beyond the 20 learned positions"):
        shifted(tokens()[:, :17])
    moved = build_model(configured(pos_emb="sinusoidal", opt_pos_emb_offset=4)).eval()
    still = build_model(configured(pos_emb="sinusoidal")).eval()
    assert torch.equal(moved(ids), still(ids, positions=torch.arange(4, 20)))


def test_norms_begin_without_effect() -> None:
    """The weights of a norm of each head are a matrix, but are initialised as those of a norm."""
    config = configured(qk_norm="layernorm_by_head", norm="layernorm", zero_centered_norms=True)
    weights = build_model(config).state_dict()
    assert all((weights[key] == 1).all() for key in weights if key.endswith("query_layernorm.weight"))
    assert all((weights[key] == 0).all() for key in weights if key.endswith("input_layernorm.weight"))
    a, c = F.softplus(build_model(configured(activation="xielu")).state_dict()["blocks.0.mlp.activation.weight"][:2])
    torch.testing.assert_close(torch.stack((a, c + 0.5)), torch.tensor([0.8, 0.8]))
