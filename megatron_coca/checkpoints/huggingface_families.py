"""The architectures of Hugging Face folders that are read, one row for each `model_type`."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from megatron_coca.checkpoints import weight_map
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.native import read_json
from megatron_coca.checkpoints.pickles import names_in_pickle, open_pickles
from megatron_coca.checkpoints.weights import Weights, names_in, open_safetensors
from megatron_coca.config.model import GATED_ACTIVATIONS, Activation
from megatron_coca.config.position import SCALING_OPTIONS, SCALING_REQUIRED

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Format:
    """A kind of weights files: what one alone is called, what tells of several, and how they are read."""

    single: str
    index: str
    names: Callable[[Path], list[str]]
    open: Callable[[Mapping[str, Path], Path], Weights]


FORMATS = (
    Format(SINGLE, INDEX, names_in, open_safetensors),
    Format("pytorch_model.bin", "pytorch_model.bin.index.json", names_in_pickle, open_pickles),
)
"""In order of preference, which is that of transformers; one file goes before several."""


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a folder: the file of each one by its name, file by file, whether an index knows it or not."""

    folder: Path
    format: Format
    by_name: Mapping[str, Path]

    def open(self, names: Iterable[str]) -> Weights:
        """Some of the weights, file by file. Raises CheckpointError."""
        wanted = set(names)
        chosen = {name: path for name, path in self.by_name.items() if name in wanted}
        return self.format.open(chosen, self.folder)

    def place(self, names: Iterable[str]) -> int:
        """The number of the first file that holds one of them; what is read in this order visits each file once."""
        order = list(dict.fromkeys(self.by_name.values()))
        return min((order.index(self.by_name[name]) for name in names if name in self.by_name), default=0)


def weight_files(folder: Path) -> WeightFiles:
    """Find the weights and look into every file for their names.

    Raises:
        CheckpointError: there are none, a file is missing or damaged, or holds more than tensors.
    """
    for kind in FORMATS:
        if (folder / kind.single).is_file():
            return WeightFiles(folder, kind, dict.fromkeys(kind.names(folder / kind.single), folder / kind.single))
        if (folder / kind.index).is_file():
            return WeightFiles(folder, kind, _indexed(folder, kind))
    known = " or ".join(f"{kind.single} or {kind.index}" for kind in FORMATS)
    raise CheckpointError(f"{folder}: has no weights: no {known}")


def _indexed(folder: Path, kind: Format) -> dict[str, Path]:
    """What an index says, and what its files hold besides."""
    index = folder / kind.index
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: has no weight_map that says which file holds each weight")
    foreign = [file for file in listed.values() if not isinstance(file, str) or Path(file).name != file]
    if foreign:
        raise CheckpointError(f"{index}: {foreign[0]!r} is no name of a file in the folder")
    missing = Counter(file for file in listed.values() if not (folder / file).is_file())
    if missing:
        told = ", ".join(f"{file} ({count} weights)" for file, count in sorted(missing.items()))
        raise CheckpointError(f"{index}: names files that are missing: {told}; fetch the folder again")
    found = {name: folder / file for file in sorted(set(listed.values())) for name in kind.names(folder / file)}
    return found | {name: folder / file for name, file in listed.items()}


def has_t_projection(names: Iterable[str]) -> bool:
    """Whether weights of LLaMA's shape are of the CoCA authors' models, whose key projection is named so."""
    return any(name.endswith("self_attn.t_proj.weight") for name in names)


KNOWN = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""The types that transformers and we have under one name."""

MEASURED = frozenset({"yarn", "longrope", "llama3"})
"""Types that look at `original_max_position_embeddings`; transformers measures the others by max_position_embeddings
whatever stands there.
"""
BY_MAXIMUM = frozenset({"dynamic"})
"""Types whose formula has max_position_embeddings for L."""

TRAINING_LENGTH = "training_length"
"""The key of config.json under which an export names the training length where max_position_embeddings is another."""

DERIVED = frozenset({"yarn", "longrope"})
"""Types whose factor may be left out: it is then the length over the original one."""

ORIGINAL = "original_max_position_embeddings"
BOOKKEEPING = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL})
"""Names in transformers' section that are no option of an extension."""


def section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section on rotation: `rope_scaling` up to transformers 4, `rope_parameters` from 5 on."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_keys(config: Mapping[str, Any], source: Path, beside: str) -> dict[str, Any]:
    """Rotary base and extension. `beside` is what an architecture calls a base that stands beside the section: what it
    calls otherwise transformers does not look at.

    Raises:
        CheckpointError: a type or an option is not known.
    """
    given = section(config)
    base = given.get("rope_theta") or config.get(beside) or 10000
    kind = given.get("rope_type") or given.get("type") or "default"
    options = {name: value for name, value in given.items() if name not in BOOKKEEPING and value is not None}
    _refuse_unknown(kind, options, source)
    if kind == "default":
        return {"rotary_emb_base": float(base)}
    scaling = _lengths(config, given, kind) | options
    lacking = [name for name in SCALING_REQUIRED[kind] if name not in scaling]
    if lacking:
        raise CheckpointError(f"{source}: rope_type {kind!r} has no {' and no '.join(lacking)}")
    return {"rotary_emb_base": float(base), "rope_scaling": {"rope_type": kind} | scaling}


def _refuse_unknown(kind: str, options: Mapping[str, Any], source: Path) -> None:
    if kind not in KNOWN:
        raise CheckpointError(f"{source}: rope_type {kind!r} is not supported; known: {', '.join(KNOWN)}")
    unread = sorted(options.keys() - set(SCALING_OPTIONS[kind]))
    if unread:
        raise CheckpointError(
            f"{source}: rope_type {kind!r} with {', '.join(unread)} is not supported; its options are "
            f"{', '.join(SCALING_OPTIONS[kind]) or 'none'}"
        )


def _lengths(config: Mapping[str, Any], given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """L, for which a value beside the section goes before that in it, and the factor that follows from it."""
    if kind in BY_MAXIMUM and TRAINING_LENGTH in config:
        return {ORIGINAL: config["max_position_embeddings"]}
    original = config.get(ORIGINAL) or given.get(ORIGINAL)
    if original is None or kind not in MEASURED:
        return {}
    return {ORIGINAL: original} | ({"factor": config["max_position_embeddings"] / original} if kind in DERIVED else {})


REMOTE_TYPES: dict[str, str] = {"coca_llama": "llama", "coca_gpt_neox": "gpt_neox", "coca_dense": "llama"}
"""`model_type` of a folder with our modelling file -> that of the stock architecture whose class it extends."""

POSITION = "position"
"""The key of config.json under which the position method stands."""

POSITION_KEYS = (
    "pos_emb",
    "rotary_pct",
    "rotary_emb_base",
    "rope_scaling",
    "relative_positions",
    "logit_scaling",
    "rpe_num_buckets",
    "rpe_max_distance",
)
LEARNED_ROWS = "max_position_embeddings"
"""Ours of that name: the rows of the table of learned positions. Theirs is the training length."""


NETWORK = "network"
"""The key of config.json under which the shape of a `coca_dense` network stands."""

NETWORK_KEYS = (
    "norm",
    "layernorm_epsilon",
    "rms_norm_epsilon",
    "scalenorm_epsilon",
    "use_bias_in_norms",
    "activation",
    "bias_gelu_fusion",
    "gpt_j_residual",
    "gpt_j_tied",
    "hidden_dropout",
)


def network_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our keys of the norms, the activation and the residual out of the config.json of a `coca_dense` folder.

    Raises:
        KeyError: it has no mapping `network`, or one without one of these keys.
    """
    network = config[NETWORK]
    if not isinstance(network, Mapping):
        raise KeyError(NETWORK)
    return {name: network[name] for name in NETWORK_KEYS}


def position_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our keys of the position method out of the config.json of a folder with our modelling file.

    Raises:
        KeyError: it has no mapping `position`.
    """
    position = config[POSITION]
    if not isinstance(position, Mapping):
        raise KeyError(POSITION)
    return {name: position[name] for name in (*POSITION_KEYS, LEARNED_ROWS) if name in position}


def dense_rows(network: Mapping[str, Any]) -> tuple[weight_map.Row, ...]:
    """Names of the weights in a `coca_dense` folder; `network` has `NETWORK_KEYS`."""
    gated, one_norm = network["activation"] in GATED_ACTIVATIONS, network["gpt_j_residual"] and network["gpt_j_tied"]
    return (*weight_map.dense(network["norm"], gated, one_norm), *weight_map.learned_positions("llama"))


def rows(kind: str) -> tuple[weight_map.Row, ...]:
    """Names of the weights in a folder of `model_type` `coca_llama` or `coca_gpt_neox`.

    They are those of the stock architecture, but for the head of GPT-NeoX: transformers 5 calls it `lm_head` and maps
    the older name of stock folders alone.
    """
    stock = {"gpt_neox": weight_map.GPT_NEOX, "llama": weight_map.llama("k_proj")}[REMOTE_TYPES[kind]]
    named = (replace(row, theirs=("lm_head.weight",)) if row.theirs == ("embed_out.weight",) else row for row in stock)
    return (*named, *weight_map.learned_positions(REMOTE_TYPES[kind]))


Json = Mapping[str, Any]
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
TANH_GELU = frozenset({"gelu_new", "gelu_fast", "gelu_pytorch_tanh"})
LLAMA_ACTIVATIONS = ("silu", "swish")
"""Two names of one function."""


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        shape: our keys of the network's shape, from config.json and its path.
        position: our keys of the position method, from config.json, its path and the names of the weights.
        rows: the names of the weights, from config.json and the names that there are.
        unneeded: weights that follow from config.json, so that nobody reads them: masks and frequencies that older
            versions of transformers saved.
    """

    shape: Callable[[Json, Path], dict[str, Any]]
    position: Callable[[Json, Path, Collection[str]], dict[str, Any]]
    rows: Callable[[Json, Collection[str]], tuple[weight_map.Row, ...]]
    unneeded: re.Pattern[str]


def _neox_shape(config: Json, source: Path) -> dict[str, Any]:
    name = config.get("hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{source}: hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return {
        "activation": ACTIVATIONS[name],
        "bias_gelu_fusion": name in TANH_GELU,
        "intermediate_size": config["intermediate_size"],
        "norm": "layernorm",
        "layernorm_epsilon": float(config.get("layer_norm_eps", 1e-5)),
        "gpt_j_residual": config.get("use_parallel_residual", True),
        "use_bias_in_attn_linear": config.get("attention_bias", True),
        "hidden_dropout": float(config.get("hidden_dropout") or 0),
    }


NEOX_POSITIONS = ("rotary", "coca")
"""What `pos_emb` in the config.json of a stock GPT-NeoX folder may say; our exports say `rotary`, others nothing."""


def _neox_position(config: Json, source: Path, names: Collection[str]) -> dict[str, Any]:
    share = section(config).get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    method = config.get("pos_emb", "rotary")
    if method not in NEOX_POSITIONS:
        raise CheckpointError(f"{source}: pos_emb {method!r} is not one of {', '.join(NEOX_POSITIONS)}")
    return {"pos_emb": method, "rotary_pct": float(share), **rope_keys(config, source, "rotary_emb_base")}


def may_be_coca(config: Json) -> bool:
    """Whether a folder that is read as RoPE could be a CoCA model of its authors', whose config.json and weights have the
    names of plain GPT-NeoX. Their code computes CoCA with all features rotated alone, as Pythia's and GPT-NeoX-20B's
    folders are not.
    """
    share = section(config).get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    return config.get("model_type") == "gpt_neox" and "pos_emb" not in config and float(share) == 1


def _llama_shape(config: Json, source: Path) -> dict[str, Any]:
    width = config["hidden_size"] // config["num_attention_heads"]
    if (config.get("head_dim") or width) * config["num_attention_heads"] != config["hidden_size"]:
        raise CheckpointError(f"{source}: head_dim other than hidden_size / num_attention_heads is not supported")
    if config.get("hidden_act", "silu") not in LLAMA_ACTIVATIONS:
        raise CheckpointError(
            f"{source}: hidden_act {config['hidden_act']!r} is not supported for LLaMA; known: "
            f"{', '.join(LLAMA_ACTIVATIONS)}"
        )
    return {
        "activation": "swiglu",
        "intermediate_size": 3 * config["intermediate_size"],  # upstream counts both halves of a gated layer, times 3/2
        "norm": "rmsnorm",
        "rms_norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "use_bias_in_attn_linear": config.get("attention_bias") or False,
        "use_bias_in_mlp": config.get("mlp_bias") or False,
        "use_bias_in_norms": False,
    }


def _llama_position(config: Json, source: Path, names: Collection[str]) -> dict[str, Any]:
    share = section(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise CheckpointError(f"{source}: partial_rotary_factor {share} is not supported for LLaMA, which turns all")
    return {"pos_emb": "coca" if has_t_projection(names) else "rotary", **rope_keys(config, source, "rope_theta")}


def _llama_rows(config: Json, names: Collection[str]) -> tuple[weight_map.Row, ...]:
    return weight_map.llama("t_proj" if has_t_projection(names) else "k_proj")


def _dense_shape(config: Json, source: Path) -> dict[str, Any]:
    network = network_keys(config)
    for name, known in (("norm", weight_map.DENSE_NORMS), ("activation", get_args(Activation))):
        if network[name] not in known:
            raise CheckpointError(f"{source}: network.{name} {network[name]!r} is not one of {', '.join(known)}")
    return network | {
        # Of a gated layer GPT-NeoX counts both halves, times 3/2.
        "intermediate_size": (3 if network["activation"] in GATED_ACTIVATIONS else 1) * config["intermediate_size"],
        "use_bias_in_attn_linear": config["attention_bias"],
        "use_bias_in_mlp": config["mlp_bias"],
    }


def _told_position(config: Json, source: Path, names: Collection[str]) -> dict[str, Any]:
    return position_keys(config)


NEOX_UNNEEDED = re.compile(
    r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)"
    r"|gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)
LLAMA_UNNEEDED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")

FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(_neox_shape, _neox_position, lambda config, names: weight_map.GPT_NEOX, NEOX_UNNEEDED),
    "llama": Family(_llama_shape, _llama_position, _llama_rows, LLAMA_UNNEEDED),
    "coca_gpt_neox": Family(_neox_shape, _told_position, lambda config, names: rows("coca_gpt_neox"), NEOX_UNNEEDED),
    "coca_llama": Family(_llama_shape, _told_position, lambda config, names: rows("coca_llama"), LLAMA_UNNEEDED),
    "coca_dense": Family(
        _dense_shape, _told_position, lambda config, names: dense_rows(network_keys(config)), LLAMA_UNNEEDED
    ),
}
"""Every architecture that is read, by its `model_type`. Those that begin with `coca_` are written by our export, with a
modelling file of ours (remote.py).
"""


def family(config: Json, source: Path) -> Family:
    """The architecture that config.json names. Raises CheckpointError where it is not known."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{source}: model_type {kind!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]
