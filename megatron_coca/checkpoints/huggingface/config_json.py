"""Read the configuration of a model from a Hugging Face config.json.

`READERS` contains GPT-NeoX, LLaMA and the architecture of exports with our modelling file (model_source.py). Every
other architecture is a row of `families.FAMILIES`. The code for LLaMA, GPT-NeoX and all rows is in `families/`.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface import families, quantized, weight_map
from megatron_coca.checkpoints.huggingface.families import gpt_neox, llama
from megatron_coca.checkpoints.huggingface.families.parts.defaults import NotSupported
from megatron_coca.checkpoints.huggingface.families.parts.experts import each_mlp
from megatron_coca.checkpoints.huggingface.families.parts.keys import ConfigReader, read_keys
from megatron_coca.checkpoints.huggingface.rope import (
    MAXIMUM,
    TRAINING_LENGTH,
)
from megatron_coca.checkpoints.huggingface.unread_keys import ignored_keys
from megatron_coca.checkpoints.huggingface.unsupported_types import UNSUPPORTED_TYPES
from megatron_coca.checkpoints.huggingface.wrappers import TEXT, WRAPPERS
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.config.model import DENSE, EXPERTS, GATED_ACTIVATIONS, Activation
from megatron_coca.config.source import COMMAND_LINE, OVERRIDES

Json = Mapping[str, Any]
logger = logging.getLogger(__name__)

CONFIG = "config.json"
POSITION, NETWORK = "position", "network"
"""Keys in an exported config.json that describe the position method and the blocks of a `coca_dense` model."""
OURS = "coca_dense"
"""`model_type` of folders with our modelling file."""

POSITION_KEYS = (
    *("pos_emb", "rotary_pct", "rotary_emb_base", "rope_scaling", "relative_positions", "logit_scaling"),
    *("rpe_num_buckets", "rpe_max_distance", "pos_emb_options"),
)
"""Position keys that our modelling file supports."""
LIMITS = ("sliding_window_width", "attention_chunk_size", "alibi_slope_scale", "rotary_frequencies")
"""Position keys that are written only if they are set."""
LAYERS = "layers"
"""Key in `position` that lists the type of every layer, if the types differ. The key `layer_types` contains the
position keys of each type except `global`.
"""
LEARNED_ROWS = "max_position_embeddings"
"""Key in `position` for the number of rows in the learned position table. At the top level of config.json, the same key
is the training length.
"""
NETWORK_KEYS = (
    *("norm", "layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon", "use_bias_in_norms", "activation"),
    *("bias_gelu_fusion", "gpt_j_residual", "gpt_j_tied", "hidden_dropout"),
    *("qk_norm", "use_qk_layernorm", "use_bias_in_qkv", "zero_centered_norms", "norm_position", "use_embedding_norm"),
    *("embedding_scale", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping", "final_logit_scale"),
)
"""Network keys that the modelling file supports. All of them are always written."""
LATER_KEYS = (
    *("qk_norm_after_rotation", "clip_qkv", "residual_scale", "use_bias_in_output_head", "embedding_dropout"),
    *("sinusoidal_base", "opt_pos_emb_offset", "attention_output_gate", "embedding_width"),
    *("use_output_transform", "skip_first_norm", "swiglu_limit", "swiglu_alpha"),
    *("moe_num_experts", "moe_top_k", "moe_intermediate_size", "moe_shared_intermediate_size", "moe_shared_gate"),
    *("moe_router_scores", "moe_router_bias", "moe_correction_bias", "moe_norm_topk_prob", "moe_weights_on_input"),
    *("moe_routed_scaling_factor", "moe_num_groups", "moe_top_k_groups", "moe_group_scores"),
)
"""More network keys that the modelling file supports. They are written only if they are not at their defaults, because
exports of earlier versions lack them.
"""
MLPS = "mlps"
"""Key in `network` that lists the type of the MLP of every layer, `dense` or `experts`. Models without mixtures of
experts lack it.
"""
QK_NORMS = {
    "head": (".weight",),
    "projection": (".norm.weight",),
    "layernorm": (".weight", ".bias"),
    "layernorm_by_head": (".weight",),
}
"""`qk_norm` -> the ends of the parameter names of the query and key norms."""

THEIR_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_kv_heads": "num_key_value_heads",
    "seq_length": "max_position_embeddings",
    "kv_channels": "head_dim",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "layernorm_epsilon": "layer_norm_eps",
    "rms_norm_epsilon": "rms_norm_eps",
    "gpt_j_residual": "use_parallel_residual",
    "use_bias_in_attn_linear": "attention_bias",
    "use_bias_in_mlp": "mlp_bias",
}
"""Our keys -> their names in config.json, for messages."""


HARMLESS = frozenset(
    {
        *("architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        *("_commit_hash", "_attn_implementation_autoset", "attn_implementation", "tokenizer_class", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("initializer_range", "pretraining_tp", "classifier_dropout", "id2label", "label2id", "problem_type"),
        *("return_dict", "output_attentions", "output_hidden_states", "is_decoder", "is_encoder_decoder"),
        *("chunk_size_feed_forward", "torchscript", "use_bfloat16", "prefix", "task_specific_params"),
        *("finetuning_task", "max_sequence_length", "max_length", "min_length", "do_sample", "temperature", "top_k"),
        *("top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "early_stopping", "num_return_sequences", "bad_words_ids"),
        *("encoder_no_repeat_ngram_size", "remove_invalid_values", "forced_bos_token_id", "forced_eos_token_id"),
        *("suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty", "output_scores"),
        *("return_dict_in_generate", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"),
        *("pruned_heads", "tf_legacy_loss", "rope_theta", "rotary_emb_base", "rope_parameters", "rope_scaling"),
        *("partial_rotary_factor", "rotary_pct", "original_max_position_embeddings"),
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "_num_labels", "_attn_implementation"),
        *("is_llama_config", "rope_interleaved", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
        quantized.KEY,
    }
)
"""Keys in config.json that may stay unread: keys that do not change a causal language model, and all RoPE keys."""
UNSUPPORTED = {
    "rope_interleaved": "weights for interleaved rotary features are not supported",
}
"""Keys that must be false, null or empty -> the error message if they are not."""
ALIASES = frozenset({"hidden_size", "num_hidden_layers", "num_attention_heads"})
"""Keys that a class accepts even if it has its own names for them. They take precedence over the class's own names."""


def parse_config(
    values: Json,
    source: Path,
    generation: Json | None = None,
    weights: Callable[[], Collection[str]] = tuple,
    warn: bool = True,
) -> Config:
    """Return the configuration of the model that a config.json describes.

    `values` is the content of config.json, and `source` is its path, for messages. `generation` is the content of
    generation_config.json, and `weights` returns the names of the weights. `warn` says whether to log the keys without
    effect. Raises CheckpointError if the model is not supported.
    """
    keys, theirs = read_config(values, source, generation, weights, warn)
    try:
        return load_config([], keys)
    except ConfigError as error:
        problems, kind = [], str(values.get("model_type"))
        fixed = families.FAMILIES[kind].fixed if kind in families.FAMILIES else {}
        for line in error.problems:
            key, problem = line.removeprefix(f"{OVERRIDES}: ").removeprefix(f"{COMMAND_LINE}: ").split(": ", 1)
            name = f"{theirs[key]} (here {key})" if key in theirs else key
            name += f" (fixed by {families.row_name(kind)})" if key in fixed else ""
            problems.append(f"{name}: {problem}")
        raise CheckpointError(f"{source}: does not describe a supported model: {'; '.join(problems)}") from error


def read_config(
    values: Json,
    source: Path,
    generation: Json | None = None,
    weights: Callable[[], Collection[str]] = tuple,
    warn: bool = True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return our keys for the model that a config.json describes, and the names of some of these keys in config.json.

    The values are not validated. `parse_config` describes the arguments and errors.
    """
    family = families.FAMILIES.get(str(values.get("model_type")))
    first = family.first if family is not None else {}
    values = {name: value for name, value in values.items() if name not in first} | {
        common: values[name] for name, common in first.items() if values.get(name) is not None
    }
    # MPT has a nested mapping in config.json. Its keys are read as `attn_config.NAME`.
    inner = values.get("attn_config")
    if isinstance(inner, Mapping):
        values = {name: value for name, value in values.items() if name != "attn_config"} | {
            f"attn_config.{name}": value for name, value in inner.items() if name not in HARMLESS
        }
    names = family.names if family is not None else {}
    renamed = {name: own for name, own in names.items() if name in ALIASES and own is not None}
    aliases = {own: values[name] for name, own in renamed.items() if name in values}
    config = _Read({name: value for name, value in values.items() if name not in renamed} | aliases, names)
    reader = None if family is not None else find_reader(config, source)
    for name, reason in UNSUPPORTED.items():
        if config.get(name):
            raise CheckpointError(f"{source}: {name}: {reason}; use another version of the model")
    quantized.check_supported(config, source)
    try:
        if family is not None:
            keys = _common_keys(config, generation or {}, family.tied, family.length)
            keys |= read_keys(family, config, source)
        elif reader is not None:
            keys = _common_keys(config, generation or {}) | reader.shape(config, source)
            keys |= reader.position(config, source, weights())
    except NotSupported as error:
        remedy = "" if "; " in str(error) else "; use another model"
        raise CheckpointError(f"{source}: {error}{remedy}") from error
    except KeyError as missing:
        raise CheckpointError(f"{source}: {missing} is missing; add it, or download the folder again") from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{source}: has an invalid value ({error}); download the folder again") from error
    known = config.read | HARMLESS | (family.harmless if family is not None else frozenset())
    unread = sorted(name for name, value in config.items() if value is not None and name not in known)
    if unread:
        kind = str(config["model_type"])
        ignored = _ignored(kind, unread, source, families.row_name(kind) if family is not None else "")
        if warn:
            logger.warning("%s: ignored %s", source, ignored)
    theirs = {ours: names.get(common) or common for ours, common in THEIR_NAMES.items()}
    theirs |= {"seq_length": TRAINING_LENGTH} if config.get(TRAINING_LENGTH) else {}
    return keys, theirs


def _ignored(kind: str, unread: Collection[str], source: Path, row: str) -> str:
    """Return the keys in `unread`, which have no effect on the model, with the reason. Raises CheckpointError if a key
    may have one.
    """
    ignored, reason = ignored_keys(kind, unread)
    if others := [name for name in unread if name not in ignored]:
        options, them = " ".join(f"--ignore-key {name}" for name in others), "it" if len(others) == 1 else "them"
        own = f"; to support {them}, add {them} to {row}" if row else ""
        raise CheckpointError(
            f"{source}: {', '.join(others)}: not supported and may change the model; use another model, or ignore "
            f"{them} with {options}{own}"
        )
    return f"{', '.join(ignored)}, because {reason}"


class _Read(dict[str, Any]):
    """The content of config.json, read with common key names. `names` maps them to the architecture's own names.

    Attributes:
        read: the keys in config.json that have been read.
    """

    def __init__(self, values: Json, names: Mapping[str, str | None]) -> None:
        super().__init__(values)
        self.read: set[str] = set()
        self._names = names

    def _own(self, name: str) -> str:
        own = self._names.get(name, name) or ""
        self.read.add(own)
        return own

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._own(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._own(str(name)))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._own(name), default)


def _common_keys(config: Json, generation: Json, tied: bool = False, length: int | None = None) -> dict[str, Any]:
    rows, trained, maximum = config["vocab_size"], config.get(TRAINING_LENGTH), config.get(MAXIMUM)
    # Our exports list the padding rows at the end of the vocabulary in `suppress_tokens`.
    listed = generation.get("suppress_tokens")
    suppressed = {token for token in listed if isinstance(token, int)} if isinstance(listed, list) else set()
    first = min(suppressed, default=rows)
    padded = 0 < first < rows == max(suppressed) + 1 and len(suppressed) == rows - first
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "seq_length": trained or maximum or length or config[MAXIMUM],
        "no_weight_tying": not config.get("tie_word_embeddings", tied),
        "attention_dropout": float(config.get("attention_dropout") or 0),
        "vocab_size": first if padded else rows,
        "make_vocab_size_divisible_by": rows if padded else 1,
    }


# Architectures --------------------------------------------------------------------------------------------------------


def _section(config: Json, name: str) -> Json:
    """Return a nested mapping of config.json. Raises KeyError if the key is missing or not a mapping."""
    if not isinstance(config[name], Mapping):
        raise KeyError(name)
    return config[name]


def position_keys(config: Json) -> dict[str, Any]:
    """Return our position keys from an exported config.json. Raises KeyError if `position` is missing."""
    position = _section(config, POSITION)
    keys = (*POSITION_KEYS, *LIMITS, LEARNED_ROWS, "layer_types")
    layers = {"attention_config": [[position[LAYERS], 1]]} if LAYERS in position else {}
    return {name: position[name] for name in keys if name in position} | layers


def _exported_position(config: Json, source: Path, names: Collection[str]) -> dict[str, Any]:
    known = (*POSITION_KEYS, *LIMITS, LEARNED_ROWS, LAYERS, "layer_types", "clex_frequencies")
    _check_section(config, POSITION, known, source)
    return position_keys(config)


def _check_section(config: Json, name: str, known: Collection[str], source: Path) -> None:
    """Raise CheckpointError if a section has a key that this version would ignore, but the modelling file might not."""
    if unknown := sorted(_section(config, name).keys() - {*known}):
        raise CheckpointError(
            f"{source}: {name}.{unknown[0]}: not known; update megatron_coca if a newer version wrote the folder"
        )


def _dense_shape(config: Json, source: Path) -> dict[str, Any]:
    section = _section(config, NETWORK)
    network = {name: section[name] for name in NETWORK_KEYS}
    network |= {name: section[name] for name in LATER_KEYS if name in section}
    _check_section(config, NETWORK, (*network, MLPS), source)
    layers = section.get(MLPS)
    if layers is not None:
        count = config["num_hidden_layers"]
        if not isinstance(layers, list) or len(layers) != count or not {*map(str, layers)} <= {DENSE, EXPERTS}:
            raise CheckpointError(
                f"{source}: network.{MLPS}: expected a list of {DENSE} or {EXPERTS} for each of {count} layers"
            )
        network |= {"mlp_config": [[layers, 1]]}
    for name, known in (("norm", weight_map.DENSE_NORMS), ("activation", get_args(Activation))):
        if network[name] not in known:
            raise CheckpointError(
                f"{source}: network.{name}: {network[name]!r} is not supported; use one of {', '.join(known)}"
            )
    for name in ("hidden_act", "rms_norm_eps"):  # transformers saves LLaMA's values; `network` has the model's
        config.get(name)
    return (
        network
        | llama.other_head_dim(config)
        | {
            # GPT-NeoX's key is 3 times the width of a gated MLP.
            "intermediate_size": (3 if network["activation"] in GATED_ACTIVATIONS else 1) * config["intermediate_size"],
            "use_bias_in_attn_linear": config["attention_bias"],
            "use_bias_in_mlp": config["mlp_bias"],
        }
    )


def dense_rows(network: Json) -> tuple[weight_map.Row, ...]:
    """Return the table of weight names for a `coca_dense` folder.

    `network` has NETWORK_KEYS, `no_weight_tying` and `use_bias_in_mlp`, and may have LATER_KEYS and MLPS.
    """
    gated, one_norm = network["activation"] in GATED_ACTIVATIONS, network["gpt_j_residual"] and network["gpt_j_tied"]
    names: list[str] = []
    without = network["norm"] == "non_parametric_rmsnorm" and network["qk_norm"] in ("head", "projection")
    if (kind := network["qk_norm"]) is not None and not without:
        names = [f"{module}_layernorm{end}" for module in ("query", "key") for end in QK_NORMS[kind]]
    elif network["use_qk_layernorm"]:
        names = [f"qk_layernorm.{parameter}" for parameter in weight_map.DENSE_NORMS[network["norm"]]]
    position = network["norm_position"]
    places: list[str] = []
    if position in ("pre", "sandwich"):
        places += ["input_layernorm", "post_attention_layernorm"][: 1 if one_norm else 2]
    if position != "pre":
        kind_of_place = "sum" if position == "residual" else "output"
        places += [f"{module}_{kind_of_place}_layernorm" for module in ("attention", "mlp")]
    norms = weight_map.DENSE_NORMS[network["norm"]] if network["use_embedding_norm"] else ()
    of_embedding = (f"embedding_layernorm.{parameter}" for parameter in norms)
    head_bias = "final_linear.bias" if network["no_weight_tying"] else "final_bias"
    dense: Sequence[weight_map.Row] = weight_map.dense(network["norm"], gated, places, names)
    if network.get(MLPS) is not None:
        dense = [*each_mlp(dense, network[MLPS]), *_mixture_rows(network)]
    return (
        *(row for row in dense if position != "residual" or not row.ours.startswith("norm.")),
        *(weight_map.output_transform(network["norm"]) if network.get("use_output_transform") else ()),
        *(weight_map.NARROW_EMBEDDING if network.get("embedding_width") else ()),
        *(weight_map.Row(f"embedding.{name}", (f"model.{name}",)) for name in of_embedding),
        *(weight_map.XIELU if network["activation"] == "xielu" else ()),
        *([weight_map.Row(head_bias, ("lm_head.bias",))] if network.get("use_bias_in_output_head") else []),
        *(weight_map.OUTPUT_GATE if network.get("attention_output_gate") else ()),
        *weight_map.LEARNED_POSITIONS,
    )


def _mixture_rows(network: Json) -> Iterator[weight_map.Row]:
    """Yield a row for each weight of the mixtures of experts, whose modules have our names."""
    kinds = ("weight", "bias") if network["use_bias_in_mlp"] else ("weight",)
    linear = [f"linear{number}.{kind}" for number in (1, 2) for kind in kinds]
    names = ["router.weight", *linear]
    names += ["router.bias"] if network.get("moe_router_bias") else []
    names += ["router.correction_bias"] if network.get("moe_correction_bias") else []
    if network.get("moe_shared_intermediate_size") is not None:
        names += [f"shared.{name}" for name in linear]
        names += ["shared_gate.weight"] if network.get("moe_shared_gate") else []
    for number in (number for number, kind in enumerate(network[MLPS]) if kind == EXPERTS):
        for name in names:
            yield weight_map.Row(f"blocks.{number}.mlp.{name}", (f"model.layers.{number}.mlp.{name}",))


UNNEEDED = re.compile(
    r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)|(transformer\.)?h\.\d+\.attn\.(attention\.)?(masked_bias|bias|causal_mask)"
)

READERS: dict[str, ConfigReader] = {
    "gpt_neox": gpt_neox.READER,
    "llama": llama.READER,
    OURS: ConfigReader(
        _dense_shape,
        _exported_position,
        lambda config, names: dense_rows(
            {
                **_section(config, NETWORK),
                "no_weight_tying": not config.get("tie_word_embeddings"),
                "use_bias_in_mlp": config["mlp_bias"],
            }
        ),
        llama.UNNEEDED,
    ),
}
"""`model_type` -> the reader of the architecture."""


def find_reader(config: Json, source: Path) -> ConfigReader:
    """Return the reader of the architecture in config.json. Raises CheckpointError if it is not supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        known = f"supported values: {', '.join(sorted(READERS.keys() | families.FAMILIES.keys()))}"
        if config.get(TEXT):
            known = f"the text networks of these models that read images or sound are supported: {', '.join(WRAPPERS)}"
        reason = UNSUPPORTED_TYPES.get(str(kind), known)
        raise CheckpointError(f"{source}: model_type: {kind!r} is not supported; {reason}")
    return READERS[kind]
