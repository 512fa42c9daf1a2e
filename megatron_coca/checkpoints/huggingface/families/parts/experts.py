"""Weight tables and keys that the rows of families with mixtures of experts share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import Json, NotSupported, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.tables import Rows
from megatron_coca.checkpoints.huggingface.weight_map import SINGLE, Heads, Row, WeightPacking
from megatron_coca.config import Config, ModelConfig
from megatron_coca.config.model import DENSE, EXPERTS

ReadKeys = Callable[[Json, Json], dict[str, Any]]
"""Type of `Family.read`: (config.json, our keys so far) -> additional keys of ours."""


def _join_experts(parts: Sequence[Tensor], heads: Heads, each: int) -> Tensor:
    """Stack the matrices of experts. Every `each` parts form one matrix of ours. At most two parts are in memory."""
    first = parts[0]
    rows, *others = first.shape
    stacked = first.new_empty((len(parts) // each, each * rows, *others))
    for number in range(len(parts)):
        part = first if number == 0 else parts[number]
        stacked[number // each, number % each * rows : (number % each + 1) * rows] = part
    return stacked


def of_experts(each: int) -> WeightPacking:
    """Return the packing of experts' matrices, in the order of experts. Every `each` parts form one matrix of ours."""
    return WeightPacking(
        lambda parts, heads: _join_experts(parts, heads, each),
        lambda packed, heads, count: [part for expert in packed for part in expert.chunk(each)],
        lambda shapes, heads: [shapes[0] or (0,)] * len(shapes),
    )


@dataclass(frozen=True)
class ExpertNames:
    """An architecture's names of the modules of a mixture, within the MLP of a layer.

    Attributes:
        mlp: name of the MLP in layers with a mixture. `{i}` is the number of the layer.
        router: the router's linear map.
        parts: the up, gate and down projections of an expert.
        whole: (name, packing) of two tensors that replace the parts. One contains the first layers of all experts, and
            the other contains the second layers. None if every expert has its own tensors.
        shared: the shared MLP, or None.
        shared_gate: the gate of the shared MLP.
        correction: the router's correction, which changes only the choice of the experts.
        corrections: the packing of the correction.
    """

    mlp: str = "model.layers.{i}.mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = ("up_proj", "gate_proj", "down_proj")
    whole: tuple[tuple[str, WeightPacking], tuple[str, WeightPacking]] | None = None
    shared: str | None = None
    shared_gate: str = "shared_expert_gate"
    correction: str = "gate.e_score_correction_bias"
    corrections: WeightPacking = SINGLE


def with_experts(rows: Rows, names: ExpertNames = ExpertNames()) -> Callable[[ModelConfig], Rows]:
    """Return the table of a family as a function of the model. `rows` is the table of a model without mixtures."""

    def table(model: ModelConfig) -> Rows:
        found = each_mlp(rows_of(rows)(model), model.mlp_names)
        for number, kind in enumerate(model.mlp_names):
            if kind == EXPERTS:
                found += [_of_layer(row, number) for row in _mixture(model, names, rows)]
        return tuple(found)

    return table


def each_mlp(rows: Sequence[Row], mlp_names: Sequence[str]) -> list[Row]:
    """Return a table with the rows of MLPs at its end, and only for the layers with a dense MLP."""
    found = [row for row in rows if ".mlp." not in row.ours]
    for row in (row for row in rows if ".mlp." in row.ours):
        found += [_of_layer(row, number) for number, kind in enumerate(mlp_names) if kind == DENSE]
    return found


def _of_layer(row: Row, number: int) -> Row:
    theirs = tuple(name.replace("{i}", str(number)) for name in row.theirs)
    return replace(row, ours=row.ours.replace("{i}", str(number)), theirs=theirs)


def _mixture(model: ModelConfig, names: ExpertNames, rows: Rows) -> Iterator[Row]:
    for number, (name, packing) in enumerate(names.whole or (), start=1):
        yield Row(f"blocks.{{i}}.mlp.linear{number}.weight", (f"{names.mlp}.{name}",), packing)
    up, gate, down = names.parts
    experts = (
        [] if names.whole is not None else [f"{names.mlp}.experts.{number}" for number in range(model.moe_num_experts)]
    )
    for kind in (("weight", "bias") if model.use_bias_in_mlp else ("weight",)) if experts else ():
        both = tuple(f"{expert}.{part}.{kind}" for expert in experts for part in (up, gate))
        yield Row(f"blocks.{{i}}.mlp.linear1.{kind}", both, of_experts(2))
        yield Row(f"blocks.{{i}}.mlp.linear2.{kind}", tuple(f"{name}.{down}.{kind}" for name in experts), of_experts(1))
    yield Row("blocks.{i}.mlp.router.weight", (f"{names.mlp}.{names.router}.weight",))
    if model.moe_router_bias:
        yield Row("blocks.{i}.mlp.router.bias", (f"{names.mlp}.{names.router}.bias",))
    if model.moe_correction_bias:
        yield Row("blocks.{i}.mlp.router.correction_bias", (f"{names.mlp}.{names.correction}",), names.corrections)
    if names.shared is not None and model.moe_shared_intermediate_size is not None:
        for row in (row for row in rows if row.ours.startswith("blocks.{i}.mlp.linear")):
            theirs = tuple(f"{names.mlp}.{names.shared}.{'.'.join(name.split('.')[-2:])}" for name in row.theirs)
            yield replace(row, ours=row.ours.replace(".mlp.", ".mlp.shared."), theirs=theirs)
        if model.moe_shared_gate:
            yield Row("blocks.{i}.mlp.shared_gate.weight", (f"{names.mlp}.{names.shared_gate}.weight",))


def expert_layers(mixed: Sequence[bool]) -> dict[str, Any]:
    """Return our key for the layers with a mixture; no key if all layers have one. `mixed` has a value per layer."""
    if all(mixed):
        return {}
    kinds = groupby(EXPERTS if flag else DENSE for flag in mixed)
    return {"mlp_config": [[[kind], len(list(run))] for kind, run in kinds]}


def at_least_two(config: Json, name: str, default: int | None) -> int:
    """Return the number of experts. Raises NotSupported if there is only one, which no row describes."""
    count = config.get(name, default)
    if not isinstance(count, int) or count < 2:
        raise NotSupported(f"{name}: {count!r} is not supported, only 2 or more experts")
    return count


def counted_experts(
    name: str, default: int, fixed: Mapping[str, Any] = MappingProxyType({}), layers: ReadKeys = lambda config, keys: {}
) -> ReadKeys:
    """Return the function `read` of a family. Its key `name` is the number of experts.

    All models of the family have our keys in `fixed`. The function `layers` reads which layers have a mixture.
    """

    def read(config: Json, keys: Json) -> dict[str, Any]:
        at_least_two(config, name, default)
        return layers(config, keys) | dict(fixed)

    return read


def sparse_steps(config: Json, keys: Json) -> dict[str, Any]:
    """Read which layers have a mixture, by the rule of Qwen's classes."""
    listed, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    mixed = [i not in listed and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]
    if not any(mixed):
        raise NotSupported("decoder_sparse_step, mlp_only_layers: leave no layer with experts")
    return expert_layers(mixed)


def written_steps(config: Config) -> dict[str, Any]:
    """Return the keys that `sparse_steps` reads, and the inner width of the experts."""
    dense = [number for number, kind in enumerate(config.model.mlp_names) if kind == DENSE]
    own = {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return own | {"moe_intermediate_size": config.model.expert_width}


def experts_only(config: Config) -> dict[str, Any]:
    """Return the inner width of the experts for a class in which every layer has a mixture."""
    return {"intermediate_size": config.model.expert_width}


ROUTER_LOSS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Keys for the balancing loss of transformers' training, which the model does not depend on."""
TOP_K: Mapping[str, tuple[str, Any]] = {"norm_topk_prob": ("moe_norm_topk_prob", False)}


DEEPSEEK_3: Mapping[str, Any] = {"moe_router_scores": "sigmoid", "moe_correction_bias": True}
"""Our keys for the router of DeepSeek 3."""


def deepseek_keys(
    experts: int | None, top_k: int | None, normalizes: bool, width: int = 1408
) -> dict[str, tuple[str, Any]]:
    """Return the keys of experts in classes similar to DeepSeek 3's class. The arguments are defaults of the class."""
    return {
        "n_routed_experts": ("moe_num_experts", experts),
        "num_experts_per_tok": ("moe_top_k", top_k),
        "moe_intermediate_size": ("moe_intermediate_size", width),
        "routed_scaling_factor": ("moe_routed_scaling_factor", 1.0),
        "n_group": ("moe_num_groups", 1),
        "topk_group": ("moe_top_k_groups", 1),
        "norm_topk_prob": ("moe_norm_topk_prob", normalizes),
    }


def deepseek_experts(
    config: Json,
    experts: int | None,
    shared: int | None,
    dense: int,
    width: int = 1408,
    router: Mapping[str, Any] = DEEPSEEK_3,
) -> dict[str, Any]:
    """Read the shared MLP and which layers are dense. The first layers are dense.

    config.json gives the width of the shared MLP as a multiple of an expert's width. `experts`, `shared`, `dense` and
    `width` are defaults of the class. `router` contains our keys of the router.
    """
    at_least_two(config, "n_routed_experts", experts)
    first, layers = config.get("first_k_dense_replace", dense), config["num_hidden_layers"]
    if first >= layers:
        raise NotSupported(f"first_k_dense_replace: {first} leaves no layer with experts")
    layers_of = expert_layers([number >= first for number in range(layers)])
    return dict(router) | shared_experts(config, shared, width) | layers_of


def shared_experts(config: Json, shared: int | None, width: int, name: str = "n_shared_experts") -> dict[str, Any]:
    """Return our key of the shared MLP's width.

    `shared` is the default of the key `name`, which gives this width as a multiple of an expert's width. `width` is the
    default of an expert's width.
    """
    beside = config.get(name, shared)
    if not beside:
        raise NotSupported(f"{name}: {beside!r} is not supported, only 1 or more")
    return {"moe_shared_intermediate_size": beside * config.get("moe_intermediate_size", width)}


def listed_experts(config: Json, dense: int) -> dict[str, Any]:
    """Read the layers with a mixture from `mlp_layer_types`. Without this key, the first `dense` layers have none."""
    layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (layers - dense)
    if unknown := sorted(set(kinds) - {"dense", "sparse"}):
        raise NotSupported(f"mlp_layer_types: {unknown[0]!r} is not supported, only 'dense' and 'sparse'")
    if len(kinds) != layers or "sparse" not in kinds:
        raise NotSupported(f"mlp_layer_types: needs {layers} entries, of which one or more are 'sparse'")
    return expert_layers([kind == "sparse" for kind in kinds])


def shared_count(model: ModelConfig) -> int:
    """Return the inner width of the shared MLP as a multiple of an expert's width; 0 without a shared MLP."""
    return (model.moe_shared_intermediate_size or 0) // model.expert_width


def written_listed_experts(config: Config, shared: str | None = None) -> dict[str, Any]:
    """Return the list that `listed_experts` reads, and the inner width of the experts.

    `shared` is the key for the width of the shared MLP as a multiple of an expert's width.
    """
    model = config.model
    beside = {} if shared is None else {shared: shared_count(model)}
    kinds = ["sparse" if kind == EXPERTS else "dense" for kind in model.mlp_names]
    return {"mlp_layer_types": kinds, "moe_intermediate_size": model.expert_width} | beside


def written_deepseek_experts(
    config: Config, shared: str = "n_shared_experts", dense: str = "first_k_dense_replace"
) -> dict[str, Any]:
    """Return the keys that `deepseek_experts` reads, and the inner width of the experts.

    `shared` is the key for the width of the shared MLP as a multiple of an expert's width. `dense` is the key for the
    number of dense layers. The first layers are dense.
    """
    model = config.model
    return {
        "moe_intermediate_size": model.expert_width,
        shared: shared_count(model),
        dense: [*model.mlp_names, EXPERTS].index(EXPERTS),
    }
