"""GPT-NeoX's checkpoint layout: the configuration, the models that it can represent, and the location of each weight.

This module follows EleutherAI/gpt-neox at commit ea7aefd8. In a model with L blocks, layer 0 is the embedding, layers 2
to L+1 are the blocks, layer L+3 is the final norm and layer L+4 is the output head. Layers 1 and L+2 have no weights.
If the head is tied to the embedding, there is no layer L+4.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_coca.attention.positions.bias import alibi_slopes
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.native.state import TensorShard, layer_shards
from megatron_coca.checkpoints.neox.names import FOREIGN
from megatron_coca.checkpoints.tokenizer import KEYS as TOKENIZER_KEYS
from megatron_coca.config import KEYS, Config, ConfigError, ModelConfig, load_saved_config
from megatron_coca.config.base import shown
from megatron_coca.config.model import GATED_ACTIVATIONS
from megatron_coca.config.neox_keys import ALIASES, INERT, UNSUPPORTED
from megatron_coca.config.source import OVERRIDES, Overrides, dump, merge, read_file

logger = logging.getLogger(__name__)

# Configuration --------------------------------------------------------------------------------------------------------

CONFIGS = "configs"
MODEL_FILE = "model.yml"
SUFFIXES = (".yml", ".yaml", ".json")

NETWORK_FEATURES = frozenset(
    {
        *("sparsity_config", "sparse_attention"),
        *("num_unique_layers", "gmlp_attn_dim", "soft_prompt_tuning", "dim_att", "head_size", "ffn_dim"),
        *("te_layernorm_mlp", "te_mha", "te_fp8_mha", "moe_num_experts", "use_mup"),
    }
)
"""Unsupported keys that change the network. All other unsupported keys affect only the training run."""
RUN_KEYS = frozenset(
    {name.split(".")[0] for name, place in KEYS.items() if place.group not in ("model", "position")}
    | ALIASES.keys()
    | INERT.keys()
    | (UNSUPPORTED.keys() - NETWORK_FEATURES)
)
"""Keys and sections that do not change the network."""
DATA_KEYS = frozenset({"data_path", "train_data_paths", "valid_data_paths", "test_data_paths"})
"""Keys that select the training data. Evaluation uses the same data by default."""
NEOX_KEYS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "intermediate_size", "seq_length"),
    *("max_position_embeddings", "no_weight_tying", "activation", "bias_gelu_fusion", "use_bias_in_attn_linear"),
    *("use_bias_in_mlp", "gpt_j_residual", "gpt_j_tied", "norm", "layernorm_epsilon", "rms_norm_epsilon"),
    *("scalenorm_epsilon", "hidden_dropout", "attention_dropout", "pos_emb", "rotary_pct", "rotary_emb_base"),
    *("rpe_num_buckets", "rpe_max_distance", "sliding_window_width", "use_qk_layernorm", "opt_pos_emb_offset"),
)
"""Network keys that GPT-NeoX has too."""
ABSENT = {"use_qk_layernorm": False, "opt_pos_emb_offset": 0}
"""Key -> the value that is not written, because the key can then be left out."""


def read_config(
    folder: Path, vocab_size: int, overrides: Overrides = (), given: Sequence[str | Path] = ()
) -> tuple[Config, int]:
    """Read the model's configuration and its number of tensor ranks from the YAML files in a step folder.

    Keys of the training run are ignored, except those that select its tokenizer and its data. `vocab_size` is the
    number of embedding rows, including padding. `overrides` and the YAML files `given` come from the user, and only
    their key `imports` is read. Raises CheckpointError if there are no YAML files in the step folder, or if they
    describe an unsupported network.
    """
    configs = folder / CONFIGS
    files = sorted(path for path in configs.iterdir() if path.suffix in SUFFIXES) if configs.is_dir() else []
    if not files:
        raise CheckpointError(f"{folder}: no {CONFIGS}/*.yml; copy the YAML files of the training run to {CONFIGS}")
    problems: list[str] = []
    values = merge([layer for path in files if (layer := read_file(path, problems)) is not None]).values
    kept = {name: value for name, value in values.items() if name not in RUN_KEYS - {*TOKENIZER_KEYS} - DATA_KEYS}
    if "train_data_paths" in kept:
        kept.pop("data_path", None)  # GPT-NeoX prefers the paths of separate splits
    if kept.get("norm", "layernorm") == "layernorm":
        kept["use_bias_in_norms"] = True  # GPT-NeoX ignores the key, and PyTorch's layer norm has a bias
    try:
        if problems:
            raise ConfigError(*problems)
        rows = {"vocab_size": vocab_size, "make_vocab_size_divisible_by": 1}
        config = load_saved_config(kept | rows, overrides, given).config
    except ConfigError as error:
        listed = "; ".join(line.removeprefix(f"{OVERRIDES}: ") for line in error.problems)
        raise CheckpointError(f"{configs}: {listed}") from error
    ranks = values.get("model_parallel_size") or 1
    if type(ranks) is not int:
        raise CheckpointError(f"{configs}: model_parallel_size: expected an integer, got {shown(ranks)}")
    return config, ranks


def model_yaml(config: Config, ranks: int, pipe: int) -> str:
    """Return the model's keys as a GPT-NeoX YAML file for `ranks` tensor ranks and `pipe` pipeline stages.

    `make_vocab_size_divisible_by` is set so that GPT-NeoX pads the vocabulary of any smaller tokenizer to the model's
    number of rows.
    """
    flat, model, foreign = config.flat(), config.model, foreign_keys(config)
    # Keys of disabled features are left out, because older versions of GPT-NeoX do not have them.
    values = {name: flat[name] for name in NEOX_KEYS if flat[name] is not None and flat[name] != ABSENT.get(name)}
    values["max_position_embeddings"] = max(model.max_position_embeddings, model.seq_length)  # GPT-NeoX requires it
    values["intermediate_size"] = (3 if model.activation in GATED_ACTIVATIONS else 1) * model.ffn_hidden_size
    values["rotary_emb_base"] = int(config.position.rotary_emb_base)
    values["make_vocab_size_divisible_by"] = model.padded_vocab_size // ranks
    values |= {"model_parallel_size": ranks, "pipe_parallel_size": pipe}
    values |= {name: value for name, value in foreign.items() if name not in values}
    comment = f"# Stock GPT-NeoX does not support {', '.join(foreign)}. Activate the plugin of megatron_coca.\n"
    return (comment if foreign else "") + dump(values)


def foreign_keys(config: Config) -> dict[str, Any]:
    """Return the keys and values of a configuration that stock GPT-NeoX does not support."""
    flat, keys = config.flat(), {}
    for name in FOREIGN:
        value = flat[name]
        if value not in (None, "none"):
            options = isinstance(value, dict)
            keys[name] = {option: v for option, v in value.items() if v is not None} if options else value
    return keys | ({} if config.position.embedding.neox == "upstream" else {"pos_emb": config.position.pos_emb})


def computed_differently(config: Config, ranks: int) -> list[str]:
    """Return reasons why GPT-NeoX with `ranks` tensor ranks computes other results than our model, or an empty list.

    The reasons come from megatron/model/transformer.py. Any of them makes an import or export stop with an error.
    """
    model, position = config.model, config.position
    gated = model.activation in GATED_ACTIVATIONS
    trained, distances = model.seq_length, position.relative_positions
    original = position.original_length(trained)
    by_length = position.logit_scaling != "none" or (
        distances is not None and distances.settings(original) != distances.settings(trained)
    )
    limits = (
        (
            model.gpt_j_residual and not model.use_bias_in_mlp,
            "gpt_j_residual: without use_bias_in_mlp, GPT-NeoX omits the attention output from the sum",
        ),
        (
            not model.use_bias_in_mlp and not gated,
            "use_bias_in_mlp: without this key, GPT-NeoX supports only gated activations",
        ),
        (
            model.use_qk_layernorm and model.norm in ("layernorm", "non_parametric_layernorm") and ranks > 1,
            f"use_qk_layernorm: with {ranks} tensor ranks, GPT-NeoX normalizes over the heads of each rank",
        ),
        (
            model.activation in ("geglu_tanh", "relu_squared", "xielu"),
            f"activation: GPT-NeoX does not support {model.activation}",
        ),
        (
            model.use_mup,
            "use_mup: GPT-NeoX reads the widths of the base model from a file that a checkpoint does not contain",
        ),
        (
            original != trained and by_length,
            "logit_scaling and the defaults of relative_positions: depend on seq_length here, but in the GPT-NeoX "
            "plugin on rope_scaling.original_max_position_embeddings, which is a different length; set all options of "
            "relative_positions, or set logit_scaling to none",
        ),
    )
    return [reason for applies, reason in limits if applies]


def cannot_hold(config: Config, ranks: int) -> list[str]:
    """Return reasons why GPT-NeoX's layout with `ranks` tensor ranks cannot represent a model, or an empty list."""
    model, position = config.model, config.position
    gated = model.activation in GATED_ACTIVATIONS
    limits = (
        (
            model.norm == "layernorm" and not model.use_bias_in_norms,
            "use_bias_in_norms: GPT-NeoX's layernorm always has a bias",
        ),
        (model.norm not in NORMS, f"norm: GPT-NeoX does not support {model.norm}"),
        (
            model.attention_output_gate is not None,
            "attention_output_gate: GPT-NeoX has no weights for an output gate",
        ),
        (
            position.embedding_options.get("initial_angle") == "random",
            "pos_emb_options: GPT-NeoX would train random angles; set initial_angle to a number",
        ),
        (
            position.embedding.rotary and position.rotary_emb_base % 1 != 0,
            "rotary_emb_base: must be a whole number",
        ),
        (not gated and model.ffn_hidden_size % 2 != 0, "intermediate_size: the width inside the MLP must be even"),
        (ranks < 1, f"model_parallel_size: must be at least 1, not {ranks}"),
    )
    divided = {
        "num_attention_heads": model.num_attention_heads,
        "num_kv_heads": model.num_kv_heads,
        "the width inside the MLP": model.ffn_hidden_size,
        "the padded vocabulary": model.padded_vocab_size,
    }
    reasons = [reason for applies, reason in limits if applies]
    choices = (choice.not_expressed("neox", ("upstream", "plugin")) for choice, _ in position.choices())
    reasons += [reason for reason in choices if reason is not None]
    if ranks >= 1:
        reasons += [
            f"{name} ({value}) is not a multiple of {ranks}" for name, value in divided.items() if value % ranks
        ]
    return reasons


# Weights --------------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]

EMBEDDING, FIRST_BLOCK = 0, 2
WORDS = "word_embeddings.weight"
"""Name of the embedding weight in layer 0."""
TIED = "tied_modules.embed."
"""Prefix of the embedding weight's name in a pipeline with a tied output head."""
NORMS: dict[str, dict[str, str]] = {
    "layernorm": {"weight": "weight", "bias": "bias"},
    "rmsnorm": {"weight": "scale"},
    "scalenorm": {"g": "g"},
    "non_parametric_layernorm": {},
}
"""The parameters of each norm: our names -> GPT-NeoX's names."""
LINEAR = ("attention.query_key_value", "attention.dense", "mlp.linear1", "mlp.linear2")
PARTIAL_SUMS = ("attention.dense.bias", "mlp.linear2.bias")


@dataclass(frozen=True)
class NeoxSharding:
    """Distribution of a weight over tensor ranks.

    Attributes:
        kind: "cut": each block is split along `dim`, and every rank has one part of it. "copy": every rank has the
            whole weight. "sum": the weight is the sum of the tensors on all ranks. This applies to some biases under
            `gpt_j_residual`, because GPT-NeoX sums over ranks at the end of the block.
        dim: the dimension that is split.
        blocks: sizes of the blocks along `dim`.
    """

    kind: Literal["cut", "copy", "sum"] = "copy"
    dim: int = 0
    blocks: tuple[int, ...] = ()

    def whole_shape(self, part: Shape, ranks: int) -> Shape | None:
        """Return the shape of the whole weight, given the shape of a rank's part; None if the part does not fit."""
        if self.kind != "cut":
            return part
        divided = all(block % ranks == 0 for block in self.blocks)
        if not divided or len(part) <= self.dim or part[self.dim] * ranks != sum(self.blocks):
            return None
        return self._shard(0, ranks).full_shape(part)

    def merge(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """Merge the parts of all ranks into the whole weight. `name` is for messages.

        Copies that differ are averaged, as in GPT-NeoX's own converter.
        """
        if len(parts) == 1 or (self.kind == "copy" and all(torch.equal(part, parts[0]) for part in parts[1:])):
            return parts[0]
        if self.kind == "cut":
            whole = parts[0].new_empty(self._shard(0, len(parts)).full_shape(parts[0].shape))
            for rank, part in enumerate(parts):
                self._shard(rank, len(parts)).copy_into(part, whole)
            return whole
        stacked = torch.stack([part.float() for part in parts])
        if self.kind == "sum":
            return stacked.sum(0).to(parts[0].dtype)
        logger.warning("%s: the copies on its %d tensor ranks differ; using their mean", name, len(parts))
        return stacked.mean(0).to(parts[0].dtype)

    def split(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Split a whole weight into the parts of `ranks` ranks, as views if possible."""
        if self.kind == "copy":
            return [whole] * ranks
        if self.kind == "sum":
            return [whole, *(torch.zeros_like(whole) for _ in range(ranks - 1))]
        return [self._shard(rank, ranks).cut(whole) for rank in range(ranks)]

    def _shard(self, rank: int, ranks: int) -> TensorShard:
        return TensorShard(self.dim, rank, ranks, self.blocks)


COPY = NeoxSharding()


class NeoxLocation(NamedTuple):
    """The layer number of a weight, and the name of the weight in this layer."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of layer {self.layer:02}"


class NeoxWeight(NamedTuple):
    """The tensor stored at a location.

    Attributes:
        ours: our name of the weight; None for a buffer, which follows from the configuration.
        sharding: distribution of the weight over tensor ranks.
        used: whether GPT-NeoX's forward pass uses the tensor. Other weights and buffers are written but not read.
        values: float32 values of a buffer; None for a weight, or for a buffer that need not be written.
    """

    ours: str | None
    sharding: NeoxSharding = COPY
    used: bool = True
    values: Tensor | None = None


def block_layers(model: ModelConfig) -> range:
    """Return the numbers of the transformer blocks."""
    return range(FIRST_BLOCK, FIRST_BLOCK + model.num_layers)


def layers(model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of all layers that have a state dict."""
    norm = model.num_layers + 3
    return (EMBEDDING, *block_layers(model), norm, *((norm + 1,) if model.no_weight_tying else ()))


def table(config: Config) -> dict[NeoxLocation, NeoxWeight]:
    """Return the tensor at every location that a checkpoint of this model may have, including biases it lacks."""
    model, position = config.model, config.position
    norm, words = model.num_layers + 3, NeoxSharding("cut", 0, (model.padded_vocab_size,))
    entries = {NeoxLocation(EMBEDDING, WORDS): NeoxWeight(f"embedding.{WORDS}", words)}
    if position.pos_emb == "learned":
        learned = "position_embeddings.weight"
        entries[NeoxLocation(EMBEDDING, learned)] = NeoxWeight(f"embedding.{learned}")
    if position.pos_emb == "sinusoidal":
        inverse = 1.0 / 10000 ** (torch.arange(0, model.hidden_size, 2).float() / model.hidden_size)
        entries[NeoxLocation(EMBEDDING, "position_embeddings.inv_freq")] = NeoxWeight(None, values=inverse, used=False)
    for layer in block_layers(model):
        for name, weight in _block(config, layer - FIRST_BLOCK).items():
            entries[NeoxLocation(layer, name)] = weight
    for ours, theirs in NORMS[model.norm].items():
        entries[NeoxLocation(norm, f"norm.{theirs}")] = NeoxWeight(f"norm.{ours}")
    if model.no_weight_tying:
        entries[NeoxLocation(norm + 1, "final_linear.weight")] = NeoxWeight("final_linear.weight", words)
    return entries


def _block(config: Config, number: int) -> dict[str, NeoxWeight]:
    model, method, ours = config.model, config.position.pos_emb, f"blocks.{number}"
    entries: dict[str, NeoxWeight] = {}
    one_norm = model.gpt_j_residual and model.gpt_j_tied
    second = "input_layernorm" if one_norm else "post_attention_layernorm"
    for parameter, theirs in NORMS[model.norm].items():
        entries[f"input_layernorm.{theirs}"] = NeoxWeight(f"{ours}.input_layernorm.{parameter}")
        entries[f"post_attention_layernorm.{theirs}"] = NeoxWeight(f"{ours}.{second}.{parameter}", used=not one_norm)
    for name in (f"{layer}.{kind}" for layer in LINEAR for kind in ("weight", "bias")):
        cut = next((shards for shards in layer_shards(model) if shards.holds(name)), None)
        sharding = NeoxSharding("cut", cut.dim, cut.blocks) if cut is not None else COPY
        if cut is None and model.gpt_j_residual and name in PARTIAL_SUMS:
            sharding = NeoxSharding("sum")
        entries[name] = NeoxWeight(f"{ours}.{name}", sharding)
    by_head = (model.num_attention_heads,)
    for parameter, theirs in NORMS[model.norm].items() if model.use_qk_layernorm else ():
        split = COPY if model.norm == "scalenorm" else NeoxSharding("cut", 0, by_head)
        entries[f"attention.qk_layernorm.{theirs}"] = NeoxWeight(f"{ours}.attention.qk_layernorm.{parameter}", split)
    if method == "rpe":  # all blocks share one table, but GPT-NeoX saves it in every block
        entries["attention.rpe.weight"] = NeoxWeight("positions.bias.weight", NeoxSharding("cut", 1, by_head))
    if config.position.embedding.resolved(config.position.embedding_options, 0).get("offset", "none") != "none":
        offsets = "attention.position_offsets.bias"
        entries[offsets] = NeoxWeight(f"{ours}.{offsets}", NeoxSharding("cut", 0, by_head))
    if method == "alibi":
        slopes = torch.tensor(alibi_slopes(model.num_attention_heads))
        entries["attention.alibi_embed.slopes"] = NeoxWeight(None, NeoxSharding("cut", 0, by_head), False, slopes)
    if method == "rotary":
        entries["attention.rotary_emb.inv_freq"] = NeoxWeight(None, used=False)
    return entries
