"""Map our weight names to those in Hugging Face folders. Each architecture has one table for import and export.

`{i}` is the number of the block. In a row with several Hugging Face names, those weights are packed into one of ours.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.weights import WeightEntry, Weights
from megatron_coca.config import Config

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """Number of query heads and key heads in a packed projection, and the number of rows per head if it is known.

    Only the first `rotated` rows of each head rotate; None if all rows rotate.
    """

    query: int
    key: int
    width: int | None = None
    rotated: int | None = None


def heads_of(config: Config) -> Heads:
    """Return the heads of a model. All layers that rotate have the same share of rotated features."""
    model, shares = config.model, [kind.rotary_pct for kind in config.layer_types.values() if kind.embedding.rotary]
    rotated = int(model.head_dim * (shares[0] if shares else 1.0))
    return Heads(model.num_attention_heads, model.num_kv_heads, model.head_dim, rotated)


@dataclass(frozen=True)
class WeightPacking:
    """Conversion between Hugging Face tensors (the parts) and one tensor of ours (packed).

    Attributes:
        join: (parts, heads) -> packed.
        split: (packed, heads, number of parts) -> parts. This is the exact inverse of `join`.
        wanted: (shapes of the parts, heads) -> the shapes that the parts must have, derived from the first part. By
            default, all shapes are valid.
    """

    join: Callable[[Sequence[Tensor], Heads], Tensor]
    split: Callable[[Tensor, Heads, int], Sequence[Tensor]]
    wanted: Callable[[Sequence[Shape], Heads], Sequence[Shape]] = lambda shapes, heads: shapes


def join_heads(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Pack q, k and v as SelfAttention does: [q | k | v] for each head. With fewer key heads: all q, all k, all v."""
    if heads.query != heads.key:
        return torch.cat(list(parts), dim=0)
    per_head = [part.view(heads.query, -1, *part.shape[1:]) for part in parts]
    return torch.cat(per_head, dim=1).reshape(-1, *parts[0].shape[1:])


def split_heads(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    width = len(packed) // (heads.query + 2 * heads.key)
    if heads.query != heads.key:
        return packed.split([heads.query * width, heads.key * width, heads.key * width])
    per_head = packed.view(heads.query, count, width, *packed.shape[1:])
    return [part.reshape(-1, *packed.shape[1:]) for part in per_head.unbind(1)]


def shapes_by_head(shapes: Sequence[Shape], heads: Heads) -> Sequence[Shape]:
    rows, *others = shapes[0] or (0,)
    width = heads.width or rows // heads.query
    return [(count * width, *others) for count in (heads.query, heads.key, heads.key)]


SINGLE = WeightPacking(lambda parts, heads: parts[0], lambda packed, heads, count: [packed])
STACKED = WeightPacking(
    lambda parts, heads: torch.cat(list(parts)),
    lambda packed, heads, count: packed.chunk(count),
    lambda shapes, heads: [shapes[0] or (0,)] * len(shapes),
)
BY_HEAD = WeightPacking(join_heads, split_heads, shapes_by_head)


def in_halves(rows: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the rows of each head from rotary pairs (0, 1), (2, 3), ... to rotary pairs (i, i + rotated / 2)."""
    return _reordered(rows, heads, rotated, (-1, 2))


def in_pairs(rows: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the rows of each head from rotary pairs (i, i + rotated / 2) to rotary pairs (0, 1), (2, 3), ..."""
    return _reordered(rows, heads, rotated, (2, -1))


def _reordered(rows: Tensor, heads: int, rotated: int | None, shape: tuple[int, int]) -> Tensor:
    each = rows.view(heads, -1, *rows.shape[1:])
    first, rest = each[:, :rotated], each[:, len(each[0]) if rotated is None else rotated :]
    turned = first.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, rest), dim=1).reshape(rows.shape)


def shape_fused(shapes: Sequence[Shape], heads: Heads) -> Sequence[Shape]:
    rows, *others = shapes[0] or (0,)
    count = heads.query + 2 * heads.key
    return [((heads.width or rows // count) * count, *others)]


def _turned(x: Tensor) -> Tensor:
    """Transpose a matrix; return a bias unchanged."""
    return x.t() if x.dim() == 2 else x


def _join_fused(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Pack the rows of a matrix that contains all queries, then all keys, then all values."""
    width = len(parts[0]) // (heads.query + 2 * heads.key)
    return join_heads(parts[0].split([heads.query * width, heads.key * width, heads.key * width]), heads)


def _split_fused(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    return [torch.cat(list(split_heads(packed, heads, 3)))]


def _join_neighbours(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    q, k, v = parts
    q, k = in_halves(q, heads.query, heads.rotated), in_halves(k, heads.key, heads.rotated)
    return join_heads([q, k, v], heads)


def _split_neighbours(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    q, k, v = split_heads(packed, heads, count)
    return [in_pairs(q, heads.query, heads.rotated), in_pairs(k, heads.key, heads.rotated), v]


NEIGHBOURS = WeightPacking(_join_neighbours, _split_neighbours, shapes_by_head)
"""Like BY_HEAD, but for a model that rotates pairs of neighbouring features."""
FUSED = WeightPacking(_join_fused, _split_fused, shape_fused)
TURNED = WeightPacking(lambda parts, heads: _turned(parts[0]), lambda packed, heads, count: [_turned(packed)])
FUSED_TURNED = WeightPacking(
    lambda parts, heads: _join_fused([_turned(parts[0])], heads),
    lambda packed, heads, count: [_turned(_split_fused(packed, heads, count)[0])],
)
GATE_FIRST = WeightPacking(
    lambda parts, heads: torch.cat(parts[0].chunk(2)[::-1]),
    lambda packed, heads, count: [torch.cat(packed.chunk(2)[::-1])],
)
"""One matrix with the gate before the up projection. Our order is the reverse."""


@dataclass(frozen=True)
class Row:
    """One of our weights, and the Hugging Face weights that are packed into it."""

    ours: str
    theirs: tuple[str, ...]
    packing: WeightPacking = SINGLE


def layer_rows(prefix: str, modules: Mapping[str, tuple[str, WeightPacking]]) -> list[Row]:
    """Return the rows for the weights and biases of a block. `modules` maps our name to their name and the packing."""
    return [
        Row(f"blocks.{{i}}.{ours}.{kind}", (f"{prefix}.{theirs}.{kind}",), packing)
        for ours, (theirs, packing) in modules.items()
        for kind in ("weight", "bias")
    ]


MODULES = (
    *("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense"),
    *("mlp.linear1", "mlp.linear2"),
)
"""Our names of the modules in a block."""


def modules_of(theirs: str, **packings: WeightPacking) -> dict[str, tuple[str, WeightPacking]]:
    """Map each of `MODULES` to its packing and its name in `theirs`, which lists the names in the same order.

    `packings` maps the last part of our name to the packing; the default is SINGLE.
    """
    named = zip(MODULES, theirs.split(), strict=True)
    return {ours: (name, packings.get(ours.rpartition(".")[2], SINGLE)) for ours, name in named}


def llama(key_projection: str) -> tuple[Row, ...]:
    """Return LLaMA's table. CoCA's authors name the key projection `t_proj`. Most models have no biases."""
    attention, mlp = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
    packed = (
        (
            "attention.query_key_value",
            [f"{attention}.{name}" for name in ("q_proj", key_projection, "v_proj")],
            BY_HEAD,
        ),
        ("attention.dense", [f"{attention}.o_proj"], SINGLE),
        ("mlp.linear1", [f"{mlp}.up_proj", f"{mlp}.gate_proj"], STACKED),
        ("mlp.linear2", [f"{mlp}.down_proj"], SINGLE),
    )
    return (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
        *(Row(f"blocks.{{i}}.{norm}.weight", (f"model.layers.{{i}}.{norm}.weight",)) for norm in MODULES[:2]),
        *(
            Row(f"blocks.{{i}}.{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), packing)
            for ours, theirs, packing in packed
            for kind in ("weight", "bias")
        ),
        Row("norm.weight", ("model.norm.weight",)),
        Row("final_linear.weight", ("lm_head.weight",)),
    )


DENSE_NORMS: dict[str, tuple[str, ...]] = {
    "layernorm": ("weight", "bias"),
    "rmsnorm": ("weight",),
    "scalenorm": ("g",),
    "non_parametric_layernorm": (),
    "non_parametric_rmsnorm": (),
}
"""Parameters of each norm. The tables of `dense` keep these names. A layernorm may have no bias."""


def dense(norm: str, gated: bool, places: Iterable[str], qk_norms: Iterable[str]) -> tuple[Row, ...]:
    """Return a table with LLaMA's names for a network that differs from LLaMA.

    The network may have any norm, a gated or plain MLP, block norms in the given `places`, and the query and key norms
    in `qk_norms`.
    """
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    rows = [row for row in llama("k_proj") if row.ours.split(".")[-2] not in norms]
    if not gated:
        rows = [Row(row.ours, row.theirs[:1]) if ".mlp.linear1." in row.ours else row for row in rows]
    for name in qk_norms:
        rows.append(Row(f"blocks.{{i}}.attention.{name}", (f"model.layers.{{i}}.self_attn.{name}",)))
    for kind in DENSE_NORMS[norm]:
        rows += [Row(f"blocks.{{i}}.{place}.{kind}", (f"model.layers.{{i}}.{place}.{kind}",)) for place in places]
        rows.append(Row(f"norm.{kind}", (f"model.norm.{kind}",)))
    return tuple(rows)


PRE = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
POST = {"attention_output_layernorm": "post_attention_layernorm", "mlp_output_layernorm": "post_feedforward_layernorm"}
SANDWICH = POST | {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_feedforward_layernorm"}
QK_HEAD = {"attention.query_layernorm": "self_attn.q_norm", "attention.key_layernorm": "self_attn.k_norm"}
QK_PROJECTION = {f"{ours}.norm": theirs for ours, theirs in QK_HEAD.items()}
"""Our names of norms in a block -> their names in Hugging Face folders."""


def like_llama(norms: Mapping[str, str], packing: WeightPacking = BY_HEAD) -> tuple[Row, ...]:
    """Return LLaMA's table with other block norms and another packing of queries, keys and values."""
    rows = [row for row in llama("k_proj") if not row.ours.startswith("blocks.") or "layernorm" not in row.ours]
    rows = [replace(row, packing=packing) if "query_key_value" in row.ours else row for row in rows]
    return (*rows, *layer_rows("model.layers.{i}", {ours: (theirs, SINGLE) for ours, theirs in norms.items()}))


def transformer(
    layers: str, embedding: str, modules: Mapping[str, tuple[str, WeightPacking]], *ends: tuple[str, str]
) -> tuple[Row, ...]:
    """Return the table for a model that has weight names with the prefix `transformer.`: GPT-2, MPT, BLOOM, Falcon."""
    rows = [Row("embedding.word_embeddings.weight", (f"transformer.{embedding}.weight",))]
    rows += layer_rows(f"transformer.{layers}.{{i}}", modules)
    rows += [
        Row(f"{ours}.{kind}", (f"transformer.{theirs}.{kind}",)) for ours, theirs in ends for kind in ("weight", "bias")
    ]
    return (*rows, Row("final_linear.weight", ("lm_head.weight",)))


XIELU = (Row("blocks.{i}.mlp.activation.weight", ("model.layers.{i}.mlp.act_fn.weight",)),)
"""Row for the parameters of an activation, in folders with our modelling file."""
OUTPUT_GATE = tuple(layer_rows("model.layers.{i}", {"attention.output_gate": ("self_attn.g_proj", SINGLE)}))
"""Rows for the output gate, in folders with our modelling file."""
NARROW_EMBEDDING = (
    Row("embedding.projection.weight", ("model.embedding_projection.weight",)),
    Row("output_transform.weight", ("model.output_transform.weight",)),
)
"""Rows for the projections of a narrow embedding, in folders with our modelling file."""


def output_transform(norm: str) -> tuple[Row, ...]:
    """Return the rows for the layers before the output head, in folders with our modelling file."""
    names = ["dense.weight", "dense.bias", *(f"norm.{parameter}" for parameter in DENSE_NORMS[norm])]
    return tuple(Row(f"output_transform.{name}", (f"model.output_transform.{name}",)) for name in names)


_POSITION_BIAS = "model.layers.{i}.self_attn.position_bias"
LEARNED_POSITIONS = (
    Row("embedding.position_embeddings.weight", ("model.position_embeddings.weight",)),
    Row("positions.bias.weight", ("model.position_bias.weight",)),
    Row("positions.clex.up", ("model.clex.up",)),
    Row("positions.clex.down", ("model.clex.down",)),
    Row("blocks.{i}.attention.position_bias.bias_p", (f"{_POSITION_BIAS}.bias_p",)),
    Row("blocks.{i}.attention.position_bias.bias_a", (f"{_POSITION_BIAS}.bias_a",)),
    Row("blocks.{i}.attention.position_offsets.bias", ("model.layers.{i}.self_attn.position_offsets.bias",)),
)
"""Rows for the learned parameters of position methods, in folders with our modelling file."""


def expand(rows: Sequence[Row], num_layers: int) -> list[Row]:
    """Return the rows of all blocks, with `{i}` replaced by the number of the block."""
    expanded = []
    for row in rows:
        for i in range(num_layers) if "{i}" in row.ours else (0,):
            theirs = tuple(name.replace("{i}", str(i)) for name in row.theirs)
            expanded.append(Row(row.ours.replace("{i}", str(i)), theirs, row.packing))
    return expanded


class _PartsOnUse(Sequence[Tensor]):
    """A sequence of weights. Each weight is read when it is used, so a packing need not hold all of them in memory."""

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        self._weights, self._names = weights, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._weights.read(name) for name in self._names[place]]
        return self._weights.read(self._names[place])


def our_weights(theirs: Weights, rows: Sequence[Row], heads: Heads) -> Weights:
    """Convert Hugging Face weights to ours, using the rows of the architecture's table.

    Raises CheckpointError if a weight is missing, or if the shapes of weights to be packed do not match.
    """
    by_name = {row.ours: row for row in rows}
    missing = [name for row in rows for name in row.theirs if name not in theirs.entries]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{theirs.source}: weight {missing[0]} is missing{more}; download the folder again")

    def read(name: str) -> Tensor:
        row = by_name[name]
        return row.packing.join(_PartsOnUse(theirs, row.theirs), heads)

    entries = {}
    for row in rows:
        parts = [theirs.entries[name] for name in row.theirs]
        shapes = [part.shape for part in parts]
        for name, shape, wanted in zip(row.theirs, shapes, row.packing.wanted(shapes, heads), strict=True):
            if shape != wanted:
                problem = f"do not match, {name} must have shape {list(wanted)}"
                raise CheckpointError(_misfit(theirs, row, shapes, problem))
        try:
            whole = row.packing.join([part.stand_in() for part in parts], heads)
        except (RuntimeError, ValueError, IndexError) as error:  # not all packings check shapes in `wanted`
            raise CheckpointError(_misfit(theirs, row, shapes, "do not fit config.json")) from error
        entries[row.ours] = WeightEntry(whole.dtype, tuple(whole.shape))
    return Weights(entries, read, theirs.source, {row.ours: " with ".join(row.theirs) for row in rows})


def _misfit(theirs: Weights, row: Row, shapes: Sequence[Shape], problem: str) -> str:
    listed = ", ".join(f"{name} {list(shape)}" for name, shape in zip(row.theirs, shapes, strict=True))
    return f"{theirs.source}: the shapes of {listed} {problem}; download the folder again"


def to_foreign_weights(ours: Weights, rows: Sequence[Row], heads: Heads) -> Weights:
    """Convert our weights to Hugging Face weights. This is the inverse of `our_weights`.

    Raises CheckpointError if the table has no row for a weight.
    """
    present = {row.ours: row for row in rows if row.ours in ours.entries}
    lacking = ours.entries.keys() - present.keys()
    if lacking:
        raise CheckpointError(f"{ours.source}: the format has no names for {', '.join(sorted(lacking))}")
    origins = {name: (row.ours, number) for row in present.values() for number, name in enumerate(row.theirs)}

    @lru_cache(maxsize=1)  # the parts of one weight are read in succession
    def parts(name: str) -> list[Tensor]:
        row = present[name]
        return [part.contiguous() for part in row.packing.split(ours.read(name), heads, len(row.theirs))]

    def read(name: str) -> Tensor:
        whole, number = origins[name]
        return parts(whole)[number]

    entries: dict[str, WeightEntry] = {}
    for row in present.values():
        split = row.packing.split(ours.entries[row.ours].stand_in(), heads, len(row.theirs))
        entries |= {
            name: WeightEntry(part.dtype, tuple(part.shape)) for name, part in zip(row.theirs, split, strict=True)
        }
    return Weights(entries, read, ours.source)
