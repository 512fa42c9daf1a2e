"""Families whose code is in their published folders: a plain computation in float64 from the published formulas.

Every case writes a folder with random weights under the published names. `WEIGHTS` says which of them are queries,
keys, values, gates and so on, as the published code splits them, and `logits` computes the model from these.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, load_model
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.load import open_checkpoint
from tests.parity import family_cases
from tests.parity.families.test_families import CountedFile, tokens, weights

TRAINED, LONG = 40, 100
Json = dict[str, Any]
Named = dict[str, Tensor]


class Shape(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    keys: int
    width: int
    vocabulary: int
    activation: str


class Layer(NamedTuple):
    """Matrices of one layer, [out, in]; biases of queries, keys and values, and of the output, or zeros."""

    norms: tuple[Tensor, Tensor]
    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    biases: tuple[Tensor, Tensor, Tensor, Tensor]
    gate: Tensor
    up: Tensor
    down: Tensor


class Model(NamedTuple):
    """`turned` rotates heads [..., positions, features] by the angles of positions; None with ALiBi."""

    layers: list[Layer]
    embedding: Tensor
    norm: Tensor
    head: Tensor
    epsilon: float
    turned: Callable[[Tensor, Tensor, int], Tensor] | None
    log_n: int | None = None


def halves(base: float) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Rotate pairs (i, i + d/2) by the angle position * base^(-2i/d)."""

    def turned(x: Tensor, positions: Tensor, length: int) -> Tensor:
        width = x.shape[-1]
        angles = positions[:, None] * base ** (-torch.arange(0, width, 2).double() / width)
        cos, sin, first, second = angles.cos(), angles.sin(), x[..., : width // 2], x[..., width // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return turned


def scaled(config: Json) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Rotate as `halves`, with the linear or dynamic extension of InternLM 2."""
    section, base = config.get("rope_scaling") or {}, config.get("rope_theta", 10000)

    def turned(x: Tensor, positions: Tensor, length: int) -> Tensor:
        factor, trained, width = section.get("factor", 1.0), config["max_position_embeddings"], x.shape[-1]
        if section.get("type") == "linear":
            return halves(base)(x, positions / factor, length)
        if section.get("type") == "dynamic" and length > trained:
            longer = base * (factor * length / trained - (factor - 1)) ** (width / (width - 2))
            return halves(longer)(x, positions, length)
        return halves(base)(x, positions, length)

    return turned


def neighbours_of_half(base: float) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Rotate pairs (2i, 2i + 1) of the first half of the features."""

    def turned(x: Tensor, positions: Tensor, length: int) -> Tensor:
        rotated = x.shape[-1] // 2
        angles = positions[:, None] * base ** (-torch.arange(0, rotated, 2).double() / rotated)
        pairs = torch.view_as_complex(x[..., :rotated].unflatten(-1, (-1, 2)).contiguous())
        done = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        return torch.cat((done, x[..., rotated:]), dim=-1)

    return turned


def slopes(heads: int) -> Tensor:
    """ALiBi's slopes: those of the next smaller power of two, then every other one of twice that power."""
    power = 2 ** int(math.log2(heads))
    own = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    others = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return torch.tensor([*own, *others][:heads], dtype=torch.float64)


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def logits(model: Model, shape: Shape, ids: Tensor) -> Tensor:
    """Logits [batch, length, vocabulary] in float64."""
    x, length = model.embedding[ids], ids.shape[1]
    positions = torch.arange(length).double()
    future = positions[None, :] > positions[:, None]
    for layer in model.layers:
        inputs = normed(x, layer.norms[0], model.epsilon)
        matrices = zip((layer.queries, layer.keys, layer.values), layer.biases[:3], strict=True)
        heads = [(inputs @ m.T + bias).unflatten(-1, (-1, shape.width)).transpose(1, 2) for m, bias in matrices]
        if model.turned is not None:
            heads[:2] = [model.turned(each, positions, length) for each in heads[:2]]
        query, key, value = heads[0], *(each.repeat_interleave(shape.heads // shape.keys, 1) for each in heads[1:])
        scores = query @ key.mT / math.sqrt(shape.width)
        if model.log_n is not None:
            scores = scores * ((positions + 1).log() / math.log(model.log_n)).clamp(min=1)[:, None]
        if model.turned is None:
            scores = scores - slopes(shape.heads)[:, None, None] * (positions[:, None] - positions)
        shares = scores.masked_fill(future, -math.inf).softmax(-1)
        x = x + (shares @ value).transpose(1, 2).flatten(2) @ layer.output.T + layer.biases[3]
        inputs = normed(x, layer.norms[1], model.epsilon)
        x = x + (getattr(F, shape.activation)(inputs @ layer.gate.T) * (inputs @ layer.up.T)) @ layer.down.T
    return normed(x, model.norm, model.epsilon) @ model.head.T


# Names of the published weights ---------------------------------------------------------------------------------------


def internlm2(config: Json, shape: Shape, w: Named) -> Model:
    """Each key head has its queries, its key and its value in wqkv. w1 is the gate, and w3 the up projection."""
    layers = []
    for i in range(shape.layers):
        at = f"model.layers.{i}"

        def split(kind: str, at: str = at) -> list[Tensor]:
            packed = w[f"{at}.attention.wqkv.{kind}"]
            groups = packed.view(shape.keys, shape.heads // shape.keys + 2, shape.width, *packed.shape[1:])
            parts = groups[:, :-2], groups[:, -2], groups[:, -1]
            return [part.reshape(-1, *packed.shape[1:]) for part in parts]

        zeros = [torch.zeros(len(each)).double() for each in split("weight")]
        biases = [*split("bias"), w[f"{at}.attention.wo.bias"]] if config.get("bias", True) else [*zeros, 0 * zeros[0]]
        layers.append(
            Layer(
                (w[f"{at}.attention_norm.weight"], w[f"{at}.ffn_norm.weight"]),
                *split("weight"),
                w[f"{at}.attention.wo.weight"],
                (biases[0], biases[1], biases[2], biases[3]),
                *(w[f"{at}.feed_forward.{name}.weight"] for name in ("w1", "w3", "w2")),
            )
        )
    ends = (w[f"{name}.weight"] for name in ("model.tok_embeddings", "model.norm", "output"))
    return Model(layers, *ends, config["rms_norm_eps"], scaled(config))


def _unbiased(hidden: int, *matrices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.zeros(len(each)).double() for each in matrices)
    return q, k, v, torch.zeros(hidden).double()


def llama_names(config: Json, shape: Shape, w: Named) -> Model:
    layers = []
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        queries, keys, values, output = (w[f"{at}.self_attn.{name}_proj.weight"] for name in "qkvo")
        norms = (w[f"{at}.input_layernorm.weight"], w[f"{at}.post_attention_layernorm.weight"])
        mlp = (w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        biases = _unbiased(shape.hidden, queries, keys, values)
        layers.append(Layer(norms, queries, keys, values, output, biases, *mlp))
    ends = (w[f"{name}.weight"] for name in ("model.embed_tokens", "model.norm", "lm_head"))
    return Model(layers, *ends, config["rms_norm_eps"], scaled(config))


def exaone(config: Json, shape: Shape, w: Named) -> Model:
    """c_fc_0 is the gate."""
    layers = []
    for i in range(shape.layers):
        at = f"transformer.h.{i}"
        queries, keys, values, output = (
            w[f"{at}.attn.attention.{name}_proj.weight"] for name in ("q", "k", "v", "out")
        )
        norms = (w[f"{at}.ln_1.weight"], w[f"{at}.ln_2.weight"])
        mlp = (w[f"{at}.mlp.{name}.weight"] for name in ("c_fc_0", "c_fc_1", "c_proj"))
        biases = _unbiased(shape.hidden, queries, keys, values)
        layers.append(Layer(norms, queries, keys, values, output, biases, *mlp))
    ends = (w[f"{name}.weight"] for name in ("transformer.wte", "transformer.ln_f"))
    head = w["transformer.wte.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    return Model(layers, *ends, head, config["layer_norm_epsilon"], scaled(config))


def qwen(config: Json, shape: Shape, w: Named) -> Model:
    """c_attn is all queries, all keys, all values. w2 is the gate."""
    layers = []
    for i in range(shape.layers):
        at = f"transformer.h.{i}"
        biases = w[f"{at}.attn.c_attn.bias"].chunk(3)
        layers.append(
            Layer(
                (w[f"{at}.ln_1.weight"], w[f"{at}.ln_2.weight"]),
                *w[f"{at}.attn.c_attn.weight"].chunk(3),
                w[f"{at}.attn.c_proj.weight"],
                (biases[0], biases[1], biases[2], torch.zeros(shape.hidden).double()),
                *(w[f"{at}.mlp.{name}.weight"] for name in ("w2", "w1", "c_proj")),
            )
        )
    ends = (w[f"{name}.weight"] for name in ("transformer.wte", "transformer.ln_f", "lm_head"))
    log_n = config["seq_length"] if config["use_logn_attn"] else None
    return Model(layers, *ends, config["layer_norm_epsilon"], halves(config["rotary_emb_base"]), log_n)


def chatglm(config: Json, shape: Shape, w: Named) -> Model:
    """dense_h_to_4h is the gate, then the up projection."""
    layers = []
    rows = [shape.heads * shape.width, *[shape.keys * shape.width] * 2]
    for i in range(shape.layers):
        at = f"transformer.encoder.layers.{i}"
        packed = w[f"{at}.self_attention.query_key_value.weight"].split(rows)
        given = w.get(f"{at}.self_attention.query_key_value.bias", torch.zeros(sum(rows)).double()).split(rows)
        gate, up = w[f"{at}.mlp.dense_h_to_4h.weight"].chunk(2)
        layers.append(
            Layer(
                (w[f"{at}.input_layernorm.weight"], w[f"{at}.post_attention_layernorm.weight"]),
                *packed,
                w[f"{at}.self_attention.dense.weight"],
                (given[0], given[1], given[2], torch.zeros(shape.hidden).double()),
                gate,
                up,
                w[f"{at}.mlp.dense_4h_to_h.weight"],
            )
        )
    names = ("embedding.word_embeddings", "encoder.final_layernorm", "output_layer")
    ends = (w[f"transformer.{name}.weight"] for name in names)
    turned = neighbours_of_half(10000 * config.get("rope_ratio", 1))
    return Model(layers, *ends, config["layernorm_epsilon"], turned)


def baichuan(config: Json, shape: Shape, w: Named) -> Model:
    """W_pack is all queries, all keys, all values. Baichuan 2 divides the rows of its head by their lengths."""
    layers = []
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        queries, keys, values = w[f"{at}.self_attn.W_pack.weight"].chunk(3)
        norms = (w[f"{at}.input_layernorm.weight"], w[f"{at}.post_attention_layernorm.weight"])
        mlp = (w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        biases = _unbiased(shape.hidden, queries, keys, values)
        layers.append(Layer(norms, queries, keys, values, w[f"{at}.self_attn.o_proj.weight"], biases, *mlp))
    embedding, norm, head = (w[f"{name}.weight"] for name in ("model.embed_tokens", "model.norm", "lm_head"))
    head = head / head.square().sum(-1, keepdim=True).sqrt() if config["vocab_size"] == 125696 else head
    turned = halves(10000) if "max_position_embeddings" in config else None
    return Model(layers, embedding, norm, head, config["rms_norm_eps"], turned)


# Folders --------------------------------------------------------------------------------------------------------------


def shapes_of(kind: str, config: Json, s: Shape) -> dict[str, tuple[int, ...]]:
    """Names of the published weights -> shapes."""
    q, kv, found = s.heads * s.width, s.keys * s.width, dict[str, tuple[int, ...]]()
    square, up, down = (s.hidden, q), (s.inner, s.hidden), (s.hidden, s.inner)
    packed, whole = (q + 2 * kv, s.hidden), (s.vocabulary, s.hidden)
    separate = {"q": (q, s.hidden), "k": (kv, s.hidden), "v": (kv, s.hidden)}
    one: dict[str, tuple[int, ...]] = {}
    match kind:
        case "internlm2":
            place, ends = "model.layers", ("model.tok_embeddings", "model.norm", "output")
            one = {"attention.wqkv": packed, "attention.wo": square, "attention_norm": (s.hidden,)}
            one |= {"ffn_norm": (s.hidden,), "feed_forward.w1": up, "feed_forward.w3": up, "feed_forward.w2": down}
        case "xverse" | "baichuan":
            place, ends = "model.layers", ("model.embed_tokens", "model.norm", "lm_head")
            one = {f"self_attn.{name}_proj": each for name, each in separate.items()} if kind == "xverse" else {}
            one |= {"self_attn.W_pack": packed} if kind == "baichuan" else {}
            one |= {"self_attn.o_proj": square, "mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
            one |= {"input_layernorm": (s.hidden,), "post_attention_layernorm": (s.hidden,)}
        case "exaone":
            place, ends = "transformer.h", ("transformer.wte", "transformer.ln_f", "lm_head")
            one = {f"attn.attention.{name}_proj": each for name, each in separate.items()}
            one |= {"attn.attention.out_proj": square, "mlp.c_fc_0": up, "mlp.c_fc_1": up, "mlp.c_proj": down}
            one |= {"ln_1": (s.hidden,), "ln_2": (s.hidden,)}
        case "qwen":
            place, ends = "transformer.h", ("transformer.wte", "transformer.ln_f", "lm_head")
            one = {"attn.c_attn": packed, "attn.c_proj": square, "mlp.w1": up, "mlp.w2": up, "mlp.c_proj": down}
            one |= {"ln_1": (s.hidden,), "ln_2": (s.hidden,)}
        case "chatglm":
            place = "transformer.encoder.layers"
            names = ("embedding.word_embeddings", "encoder.final_layernorm", "output_layer")
            ends = (f"transformer.{names[0]}", f"transformer.{names[1]}", f"transformer.{names[2]}")
            one = {"self_attention.query_key_value": packed, "self_attention.dense": square}
            one |= {"mlp.dense_h_to_4h": (2 * s.inner, s.hidden), "mlp.dense_4h_to_h": down}
            one |= {"input_layernorm": (s.hidden,), "post_attention_layernorm": (s.hidden,)}
    for i in range(s.layers):
        found |= {f"{place}.{i}.{name}.weight": each for name, each in one.items()}
    found |= {f"{ends[0]}.weight": whole, f"{ends[1]}.weight": (s.hidden,)}
    found |= {} if config.get("tie_word_embeddings") else {f"{ends[2]}.weight": whole}
    for name in BIASED.get(kind, lambda config: ())(config):
        found |= {f"{place}.{i}.{name}.bias": one[name][:1] for i in range(s.layers)}
    return found


BIASED: dict[str, Callable[[Json], tuple[str, ...]]] = {
    "internlm2": lambda config: ("attention.wqkv", "attention.wo") if config.get("bias", True) else (),
    "qwen": lambda config: ("attn.c_attn",),
    "chatglm": lambda config: ("self_attention.query_key_value",) if config.get("add_qkv_bias") else (),
}
"""The modules with a bias in each family."""
WEIGHTS: dict[str, Callable[[Json, Shape, Named], Model]] = {
    "internlm2": internlm2,
    "xverse": llama_names,
    "exaone": exaone,
    "qwen": qwen,
    "chatglm": chatglm,
    "baichuan": baichuan,
}
MOST = {"vocab_size": 96, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 44}
MOST |= {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.02}
GROUPED = MOST | {"num_key_value_heads": 2, "max_position_embeddings": TRAINED}
INTERN = GROUPED | {"bias": False, "rope_theta": 500, "rope_scaling": None, "pretraining_tp": 1}
EXAONE = {"vocab_size": 96, "hidden_size": 36, "num_layers": 3, "num_attention_heads": 6, "intermediate_size": 44}
EXAONE |= {"layer_norm_epsilon": 1e-5, "activation_function": "silu", "num_key_value_heads": 3, "embed_dropout": 0.0}
EXAONE |= {"attention_dropout": 0.0, "max_position_embeddings": TRAINED, "rope_theta": 500.0, "rope_scaling": None}
QWEN = {"vocab_size": 96, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 88}
QWEN |= {"layer_norm_epsilon": 1e-6, "seq_length": TRAINED, "max_position_embeddings": 8192, "kv_channels": 6}
QWEN |= {"rotary_emb_base": 500.0, "rotary_pct": 1.0, "use_dynamic_ntk": False, "use_logn_attn": True, "no_bias": True}
QWEN |= {"attn_dropout_prob": 0.0, "emb_dropout_prob": 0.0, "bf16": False, "fp16": False, "fp32": False}
QWEN |= {"onnx_safe": None, "use_flash_attn": "auto", "scale_attn_weights": True, "tie_word_embeddings": False}
GLM = {"padded_vocab_size": 96, "hidden_size": 36, "num_layers": 3, "num_attention_heads": 6, "ffn_hidden_size": 44}
GLM |= {"kv_channels": 12, "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": TRAINED}
GLM |= {"layernorm_epsilon": 1e-5, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True}
GLM |= {"apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False}
GLM |= {"attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "original_rope": True}
GLM |= {"fp32_residual_connection": False, "hidden_dropout": 0.0, "post_layer_norm": True, "tie_word_embeddings": False}
ALIBI = MOST | {"model_max_length": TRAINED, "z_loss_weight": 0}
CASES: dict[str, tuple[str, Json]] = {
    "internlm2": ("internlm2", INTERN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "internlm2, linear, biases": (
        "internlm2",
        INTERN | {"bias": True, "num_key_value_heads": 3, "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
    "internlm2, one key head": ("internlm2", INTERN | {"num_key_value_heads": 1}),
    "xverse": ("xverse", GROUPED | {"max_tokenizer_truncation": TRAINED, "num_key_value_heads": 6}),
    "xverse, grouped": ("xverse", GROUPED | {"rope_theta": 500.0}),
    "xverse, two layers": ("xverse", GROUPED | {"num_hidden_layers": 2, "rms_norm_eps": 1e-3}),
    "exaone": ("exaone", EXAONE),
    "exaone, tied": ("exaone", EXAONE | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "exaone, dynamic": ("exaone", EXAONE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "qwen": ("qwen", QWEN),
    "qwen, no scaling": ("qwen", QWEN | {"use_logn_attn": False, "rotary_emb_base": 10000}),
    "qwen, wider heads": ("qwen", QWEN | {"kv_channels": 12, "num_attention_heads": 3}),
    "chatglm": ("chatglm", GLM | {"rope_ratio": 50}),
    "chatglm, no biases": ("chatglm", GLM | {"add_qkv_bias": False, "kv_channels": 8, "multi_query_group_num": 3}),
    "chatglm, one key head": ("chatglm", GLM | {"multi_query_group_num": 1, "layernorm_epsilon": 1e-3}),
    "baichuan 7B": ("baichuan", MOST | {"max_position_embeddings": TRAINED, "model_max_length": TRAINED}),
    "baichuan 13B": ("baichuan", ALIBI),
    "baichuan 2 13B": ("baichuan", ALIBI | {"vocab_size": 125696, "hidden_size": 24, "num_hidden_layers": 1}),
    "baichuan 2 7B": (
        "baichuan",
        MOST | {"vocab_size": 125696, "hidden_size": 24, "num_hidden_layers": 1, "max_position_embeddings": TRAINED},
    ),
}


def shape_of(config: Json) -> Shape:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        config.get("num_hidden_layers") or config["num_layers"],
        hidden,
        config.get("ffn_hidden_size") or config["intermediate_size"] // (2 if "use_logn_attn" in config else 1),
        heads,
        config.get("multi_query_group_num") or config.get("num_key_value_heads") or heads,
        config.get("kv_channels") or hidden // heads,
        config.get("padded_vocab_size") or config["vocab_size"],
        config.get("hidden_act") or config.get("activation_function") or "silu",
    )


def write(name: str, folder: Path) -> tuple[Json, Named]:
    """Write a folder with random weights. Return its config.json and the weights in float64."""
    kind, config = CASES[name]
    config = {"model_type": kind} | config
    generator = torch.Generator().manual_seed(0)
    named = {}
    for each, shape in shapes_of(kind, config, shape_of(config)).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        named[each] = 1 + 0.1 * values if "norm" in each or ".ln_" in each else 0.2 * values
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return config, named


def expected(config: Json, named: Named, ids: Tensor) -> Tensor:
    shape = shape_of(config)
    return logits(WEIGHTS[config["model_type"]](config, shape, named), shape, ids)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_are_those_of_the_published_formulas(name: str, tmp_path: Path) -> None:
    """In float64: within and beyond the training length, with a cache, and with left padding."""
    config, named = write(name, tmp_path)
    model = open_checkpoint(tmp_path).load(dtype=torch.float64).model
    for length in (17, LONG):
        found, wanted = model(tokens(length)), expected(config, named, tokens(length))
        assert wanted.std() > 0.01
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    cache = model.new_cache(length=LONG)
    parts = [model(part, cache=cache) for part in tokens(LONG).split([90, 1, 3, 6], dim=1)]
    if (config.get("rope_scaling") or {}).get("type") != "dynamic":  # a cache keeps the frequencies of 90 tokens
        torch.testing.assert_close(torch.cat(parts, dim=1), wanted, rtol=1e-9, atol=1e-9)
    documents = torch.ones(2, 30, dtype=torch.long)
    documents[0, :7] = 0
    found = model(tokens(30), documents=documents)[0, 7:]
    torch.testing.assert_close(found, expected(config, named, tokens(30)[:1, 7:])[0], rtol=1e-9, atol=1e-9)


WRITTEN = {"internlm2": "llama", "xverse": "llama", "exaone": "llama", "chatglm": "glm", "qwen, no scaling": "qwen2"}
WRITTEN |= {"baichuan 7B": "llama", "qwen": "coca_dense", "baichuan 13B": "coca_dense"}
"""A case -> `model_type` of its export, which transformers then computes."""


@pytest.mark.parametrize("name", WRITTEN)
@torch.no_grad()
def test_an_export_has_a_class_that_computes_the_same(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "source")
    done = export(tmp_path / "source", tmp_path / "exported")
    assert done.model_type == WRITTEN[name] and done.compared.startswith("transformers")
    before, after = (load_model(folder)(tokens(LONG)) for folder in (tmp_path / "source", done.folder))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["internlm2", "xverse", "exaone", "qwen", "chatglm", "baichuan 7B", "baichuan 13B"])
@torch.no_grad()
def test_every_key_has_its_effect_or_is_an_error(name: str, tmp_path: Path) -> None:
    """Of 7 to 14 keys that change the model, most change shapes, which is an error."""
    config, named = write(name, tmp_path)
    errors, same = set[str](), set[str]()
    for key, value in config.items():
        other = family_cases.changed(value)
        if other is None:
            continue
        (tmp_path / "config.json").write_text(json.dumps(config | {key: other}))
        try:
            model = open_checkpoint(tmp_path).load(dtype=torch.float64).model
        except CheckpointError:
            errors.add(key)
            continue
        wanted = expected(config | {key: other}, named, tokens(LONG))
        torch.testing.assert_close(model(tokens(LONG)), wanted, rtol=1e-9, atol=1e-9, msg=key)
        same.add(key)
    assert len(errors) >= 5 and len(same) >= 3 and not errors & {"rms_norm_eps", "rope_theta", "rope_ratio"}


@pytest.mark.parametrize("name", ["internlm2", "chatglm", "baichuan 7B"])
def test_a_folder_is_read_one_matrix_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, tmp_path)
    opened = weights._opened
    monkeypatch.setattr(weights, "_opened", lambda path: CountedFile(opened(path)))
    CountedFile.alive, CountedFile.most = [], 0
    load_model(tmp_path)
    assert 0 < CountedFile.most <= 2


REFUSED = {
    "steps of the base": ("qwen", {"use_dynamic_ntk": True}, "use_dynamic_ntk: true .*; ignore it with --ignore-key"),
    "heads of keys": ("chatglm", {"multi_query_attention": False}, "multi_query_attention: false is not supported"),
    "a ratio of positions": (
        "chatglm",
        {"_name_or_path": "THUDM/chatglm2-6b-32k"},
        "rope_ratio: the code of ChatGLM 2 divides positions by it",
    ),
    "a key without a row": ("xverse", {"qkv_bias": True}, "qkv_bias: not supported and may change the model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_are_not_supported_are_errors(case: str, tmp_path: Path) -> None:
    name, change, message = REFUSED[case]
    config, _ = write(name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)
