"""A whole attention layer computed by the float64 oracle, from the weights and the configuration of a layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_coca import Attention, load_config
from megatron_coca.config import Config
from tests.reference.clex import clex_frequencies
from tests.reference.dense import Polar, RelativeMap, Setting, attention, inverse_leak
from tests.reference.frequencies import frequencies, multiplier
from tests.reference.gated_unit import gated_unit

SHAPE: dict[str, Any] = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 512}
SHAPE |= {"vocab_size": 512, "pos_emb": "rotary"}


def layer_of(
    keys: Mapping[str, Any], dtype: torch.dtype = torch.float32, trained: int = 512
) -> tuple[Attention, Config]:
    """The layer of a rotary model with these keys, in training, its weights away from their initial values."""
    config, generator = load_config([], SHAPE | {"seq_length": trained} | keys), torch.Generator().manual_seed(0)
    layer = Attention(config).to(dtype).train()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return layer, config


@torch.no_grad()
def oracle_error(keys: Mapping[str, Any], length: int, dtype: torch.dtype = torch.float32) -> float:
    """Norm of the layer's difference to the oracle, by that of the oracle, at four times the trained length."""
    layer, config = layer_of(keys, dtype, length // 4)
    if layer.encoding.clex is not None or config.position.scaling.evaluation_only:
        layer.eval()  # training draws positions, and has no such factor
    hidden = torch.randn(1, length, config.model.hidden_size, generator=torch.Generator().manual_seed(1), dtype=dtype)
    exact = layer_by_oracle(layer, config, hidden)
    return float((layer(hidden) - exact).norm() / exact.norm())


@torch.no_grad()
def layer_by_oracle(layer: Attention, config: Config, hidden: Tensor) -> Tensor:
    """What `layer(hidden)` must give, [batch, length, hidden_size] float64, for as many key heads as query heads."""
    of_layer, model, position = layer.attention, config.model, config.position
    if "gau" in config.layer_types:  # rotary
        theta = frequencies(model.gau_key_width, float(position.rotary_emb_base), rope_type="default")
        weights = {name: weight.double() for name, weight in of_layer.named_parameters()}
        return torch.stack([gated_unit(x, weights, theta) for x in hidden.double()])
    heads, length, trained = model.num_attention_heads, hidden.shape[1], model.seq_length
    packed = _linear(of_layer.query_key_value, hidden.double()).unflatten(-1, (heads, -1))
    q, k, v = packed.chunk(3, dim=-1)
    if model.use_qk_layernorm:
        q, k = (_layer_norm(x.flatten(2), of_layer.qk_layernorm).view_as(x) for x in (q, k))
    if model.qk_norm is not None:
        norms, width = (of_layer.query_layernorm, of_layer.key_layernorm), 2 if model.qk_norm == "projection" else 3
        q, k = (_rms_norm(x, norm, model.rms_norm_epsilon, width) for x, norm in zip((q, k), norms, strict=True))
    scaling, dim = (
        position.rope_scaling.given if position.rope_scaling else {},
        int(model.head_dim * position.rotary_pct),
    )
    polar = _polar(layer, config)
    dim *= 2 if polar is not None and polar.by_feature else 1  # twice the number of frequencies
    kind = {"rope_type": position.extension.name, "training_length": trained, "length": length}
    if position.frequencies is not None:  # RoPE-ID
        kind |= {"rope_id": position.rotary_frequencies.given}
    if layer.encoding.clex is not None:
        theta = clex_frequencies(layer.encoding.clex.up, layer.encoding.clex.down, -(-length // trained), step=0.004)
    else:
        theta = frequencies(dim if position.embedding.rotary else 0, float(position.rotary_emb_base), **kind, **scaling)
    learned = {"factors": of_layer.position_factor, "sinks": of_layer.position_sinks}
    gated: dict[str, Any] = {}
    if of_layer.position_gates is not None:
        opened = _linear(of_layer.position_gates.projection, hidden.double()).transpose(1, 2)
        gated = {"gate": position.forgetting_gate, "opened": opened}
    setting = Setting(
        multiplier(dim, float(position.rotary_emb_base), **kind, **scaling) if layer.encoding.clex is None else 1.0,
        _relative(config, layer.training),
        _logit_scaling(config),
        trained,
        _learned_bias(layer),
        _chunks(config, hidden),
        polar=polar,
        **gated,
        **{name: None if module is None else module() for name, module in learned.items()},
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = attention(position.pos_emb, q, k, v, theta, setting=setting)
    out = out.transpose(1, 2)
    if of_layer.output_gate is not None:
        out = out / (1 + (-_linear(of_layer.output_gate, hidden.double())).exp()).unflatten(-1, (heads, -1))
    return _linear(of_layer.dense, out.flatten(2))


def _polar(layer: Attention, config: Config) -> Polar | None:
    """The form of PoPE, its relatives and CoCA-Strict with an angle; None for other forms."""
    position, own = config.position, layer.attention.position_offsets
    options = position.embedding.resolved(position.embedding_options, config.model.seq_length)
    if position.pos_emb == "pope":
        return Polar(True, 1, True, own().double())
    if position.pos_emb == "polar":
        softplus, by_feature = options["magnitude"] == "softplus", options["frequencies"] == "feature"
        return Polar(softplus, options["power"], by_feature, own().double())
    if position.pos_emb != "coca_strict" or options["initial_angle"] == 0.0:
        return None
    angle, shape = options["initial_angle"], (config.model.num_attention_heads, config.model.head_dim // 2)
    return Polar(False, 2, False, torch.full(shape, -angle, dtype=torch.float64) if own is None else own().double())


def _learned_bias(layer: Attention) -> dict[str, Tensor]:
    """The weights of the bias by the oracle's names."""
    module = layer.attention.position_bias or layer.encoding.bias
    weights = {} if module is None else dict(module.named_parameters())
    names = {"bias_p": "p", "bias_a": "a", "weight": "table"}
    return {names.get(name, name): value.double() for name, value in weights.items()}


def _relative(config: Config, training: bool) -> RelativeMap | None:
    choice, trained, window = (
        config.position.distance_map,
        config.model.seq_length,
        config.position.sliding_window_width,
    )
    if window is not None:
        return RelativeMap("lm_infinite", window + 1)  # without first keys, that is a window
    if choice is None or (choice.training_only and not training):
        return None
    assert config.position.relative_positions is not None
    options = choice.resolved(config.position.relative_positions.given, trained)
    if target := options.pop("target_length", None):
        options["leak"] = inverse_leak(target, trained)
    return RelativeMap(choice.name, **options)


def _chunks(config: Config, hidden: Tensor) -> Tensor | None:
    size = config.position.attention_chunk_size
    return None if size is None else (torch.arange(hidden.shape[1]) // size).expand(len(hidden), -1)


def _logit_scaling(config: Config) -> str | tuple[float, int, int]:
    name = config.position.scaling.name
    if name != "temperature":
        return name
    given = next(given for choice, given in config.position.choices() if choice.key == "logit_scaling")
    options = config.position.scaling.resolved(given, config.model.seq_length)
    return options["strength"], options["period"], options["first"]


def _linear(module: torch.nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.double().T + module.bias.double()


def _layer_norm(x: Tensor, norm: torch.nn.Module) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return scaled * norm.weight.double().flatten() + norm.bias.double().flatten()


def _rms_norm(x: Tensor, norm: torch.nn.Module, epsilon: float, first: int) -> Tensor:
    """x [batch, length, heads, head_dim] by its root mean square over the dimensions from `first` on."""
    mean_square = x.square().mean(tuple(range(first, 4)), keepdim=True)
    weight = next(norm.parameters()).double().view(-1, x.shape[-1])  # of all heads or of each
    return x / (mean_square + epsilon).sqrt() * weight
