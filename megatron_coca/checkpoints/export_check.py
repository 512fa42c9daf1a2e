"""Compare an export with its source before the export counts as complete.

1. Configuration: the import reads a configuration that describes the same model (`comparable`).
2. Weights: every weight that the import reads is bit-identical to the source. Only one weight is in memory at a time.
3. Logits: for a short input, source and export compute the same float32 logits. For a Hugging Face folder, transformers
   runs the export if it is installed and has the class. Otherwise, and for an export to GPT-NeoX, this package imports
   the export and runs it.

Only a part of the model computes the logits: the first 4,096 rows of the vocabulary and as many layers as fit into
512 MiB, with at least one layer of every type. For a model of 7 billion parameters, this is one layer of 0.2 billion
parameters. It takes 0.8 GB of memory while the source runs, and again while the export runs. Models of up to about 100
million parameters are compared whole. The input has 64 tokens, or up to 1,024 if that many are needed to exceed a
window, a chunk or the training length. A difference that appears only on longer inputs can be found only in step 1.
"""

import logging
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_coca.checkpoints.compare import comparable
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.opened import OpenedCheckpoint, load_weights
from megatron_coca.checkpoints.weights import WeightEntry, Weights
from megatron_coca.config import COMPUTE_KEYS, Config, load_config
from megatron_coca.config.schema import MODEL_KEYS, not_at_default
from megatron_coca.model import empty_model

logger = logging.getLogger(__name__)

MEMORY, ROWS = 1 << 29, 4096
"""Maximum size of the compared layers in float32, in bytes, and maximum number of compared vocabulary rows."""
SHORT, LONG = 64, 1024
"""Number of input tokens, and the maximum if more are needed to exceed a window, a chunk or the training length."""
TOLERANCE = 1e-3
"""Maximum difference between logits, as a fraction of the largest logit. Source and export compute in float32 but in
different orders, so small models differ by up to 1e-5. A wrong key changes the logits by more than 1e-2.
"""
IMPORT = "megatron-coca import"
VOCABULARY = ("embedding.word_embeddings.weight", "final_linear.weight", "final_linear.bias", "final_bias")
"""Our names of the weights that have a row for each token."""


class Excerpt(NamedTuple):
    """The compared part of a model (its first layers and vocabulary rows), and the input tokens."""

    config: Config
    weights: Weights
    ids: Tensor  # int64 [1, length]

    def logits(self) -> Tensor:
        """Return the logits that our model computes, float32 [length, rows]."""
        return own_logits(self.config, self.weights, self.ids)


def excerpt(config: Config, weights: Weights, longest: int = LONG) -> Excerpt:
    """Return the part of a model to compare, with an input of at most `longest` tokens. `weights` have our names."""
    rows, layers = min(config.model.padded_vocab_size, ROWS), _layers(config, weights)
    text = torch.randint(rows, (1, min(_length(config), longest)), generator=torch.Generator().manual_seed(0))
    return Excerpt(reduced(config, layers, rows), first(weights, layers, rows), text)


def first(weights: Weights, layers: int, rows: int) -> Weights:
    """Return the weights of the first `layers` layers, with the first `rows` rows of the vocabulary."""
    kept = (name for name in weights.entries if (number := _layer(name)) is None or number < layers)
    entries = {name: _cut(name, weights.entries[name], rows) for name in kept}
    return Weights(
        entries,
        lambda name: weights.read(name)[:rows] if name in VOCABULARY else weights.read(name),
        weights.source,
        weights.origins,
    )


def _cut(name: str, entry: WeightEntry, rows: int) -> WeightEntry:
    return entry._replace(shape=(rows, *entry.shape[1:])) if name in VOCABULARY else entry


def _layer(name: str) -> int | None:
    """Return the number of the block that a weight belongs to, or None."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def _layers(config: Config, weights: Weights) -> int:
    """Return the number of layers to compare: as many as fit into MEMORY, but at least one layer of every type.

    The last compared layer has the same type as the model's last layer, because the class of Gemma 4 expects that.
    """
    sizes = [0] * config.model.num_layers
    for name, entry in weights.entries.items():
        if (number := _layer(name)) is not None:
            sizes[number] += 4 * prod(entry.shape)
    names = list(zip(config.model.layer_names, config.model.mlp_names, strict=True))
    needed = max(names.index(name) for name in set(names)) + 1
    possible = [count for count in range(needed, len(sizes) + 1) if names[count - 1][0] == names[-1][0]]
    return max((count for count in possible if sum(sizes[:count]) <= MEMORY), default=possible[0])


def _length(config: Config) -> int:
    limits = [config.model.seq_length, config.position.original_length(config.model.seq_length)]
    for kind in config.layer_types.values():
        limits += [limit + 1 for limit in (kind.sliding_window_width, kind.attention_chunk_size) if limit is not None]
        settings = kind.relative_positions.settings(config.model.seq_length) if kind.relative_positions else {}
        limits += [limit for limit in settings.values() if isinstance(limit, int)]
    crossed = max((limit + limit // 2 for limit in limits if limit + limit // 2 <= LONG), default=0)
    length = max(SHORT, crossed)
    if config.position.embedding.weights == "table":
        length = min(length, config.model.max_position_embeddings - config.model.opt_pos_emb_offset)
    return length


def reduced(config: Config, layers: int, rows: int) -> Config:
    """Return the configuration of the first layers of a model, without the keys of the training run."""
    flat, names = config.flat(), config.model.layer_names[:layers]
    keys = not_at_default((key for key in MODEL_KEYS if key not in COMPUTE_KEYS), flat)
    keys.pop("imports", None)  # the imported methods are already registered
    keys |= {"num_layers": layers, "attention_config": [[list(names), 1]]}
    if config.model.mixtures:
        keys |= {"mlp_config": [[list(config.model.mlp_names[:layers]), 1]], "moe_expert_interval": 1}
    return load_config([], keys | {"vocab_size": rows, "make_vocab_size_divisible_by": 1})


@torch.no_grad()
def own_logits(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """Run our model on `ids` and return the float32 logits [length, rows]."""
    model = empty_model(config, "cpu", training=False)
    load_weights(model, weights)
    return model.eval()(ids)[0]


# Comparison -----------------------------------------------------------------------------------------------------------


def check_folder(
    folder: Path, read: Callable[[Path], OpenedCheckpoint], config: Config, weights: Weights
) -> OpenedCheckpoint:
    """Compare the configuration and the weights of an export with the source. Return the opened export.

    Args:
        folder: the export.
        read: opens a folder of the export's layout.
        config: configuration of the source.
        weights: the weights that the export must contain, by our names.

    Raises CheckpointError if the configuration or a weight differs.
    """
    try:
        back = read(folder)
        found = back.weights()
    except CheckpointError as error:
        raise fault(f"{IMPORT} cannot read the export: {error}") from error
    if differing := list(_differing(comparable(config), comparable(back.trained))):
        raise fault(f"the configuration describes another model: {'; '.join(differing)}")
    if names := sorted(found.entries.keys() ^ weights.entries.keys()):
        raise fault(f"{names[0]} is only in the {'source' if names[0] in weights.entries else 'export'}")
    with weights.shown(f"reading {folder.name.strip('.').removesuffix('.partial')} back") as shown:
        for name, tensor in shown:
            if not _same_bits(tensor, found.read(name)):
                raise fault(f"{name} has different values")
    return back


def _differing(wanted: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield one line for each value that differs between two descriptions of models."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in wanted.keys() | found.keys():
            yield from _differing(wanted.get(key), found.get(key), f"{place}.{key}" if place else key)
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from _differing(one, other, f"{place}[{number}]")
    elif wanted != found:
        yield f"{place} is {found!r}, not {wanted!r}"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


def check_logits(expected: Tensor, found: Tensor, by: str) -> float:
    """Return the largest difference between logits as a fraction of the largest logit.

    `by` is the program that computed `found`. Raises CheckpointError if the difference exceeds TOLERANCE.
    """
    if found.shape != expected.shape:
        raise fault(f"{by} computes logits of shape {list(found.shape)}, the source {list(expected.shape)}")
    if not torch.equal(expected.isfinite(), found.isfinite()):
        raise fault(f"{by} computes infinite logits at other positions than the source")
    finite = expected.isfinite()
    largest = float(expected[finite].abs().max()) if finite.any() else 0.0
    apart = float((expected - found)[finite].abs().max()) if finite.any() else 0.0
    if apart > TOLERANCE * max(largest, 1e-3):
        raise fault(
            f"{by} computes logits that differ by {apart:.3g}; the largest logit of the source is {largest:.3g}"
        )
    return apart / max(largest, 1e-3)


def fault(problem: str) -> CheckpointError:
    return CheckpointError(
        f"export: does not match the source: {problem}; nothing was written, report this with the checkpoint's "
        "configuration"
    )


def report(part: Excerpt, share: float, by: str) -> str:
    """Log the result of a logit comparison. Return `by`, the program that computed the export's logits."""
    layers, tokens = part.config.model.num_layers, part.ids.shape[1]
    text = f"{by}, {layers} layers, {tokens} tokens, largest difference {share:.1e} of the largest logit"
    logger.info("the export computes the same logits as its source: %s", text)
    return by


def check_import(back: OpenedCheckpoint, part: Excerpt) -> None:
    """Compare the logits that our import of an export computes with those of the source. Raises CheckpointError."""
    layers, rows = part.config.model.num_layers, part.config.model.padded_vocab_size
    found = own_logits(reduced(back.trained, layers, rows), first(back.weights(), layers, rows), part.ids)
    report(part, check_logits(part.logits(), found, IMPORT), IMPORT)
