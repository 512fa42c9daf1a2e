"""What GPT-NeoX computes otherwise, cannot hold or cannot divide: such a model is neither read nor written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.config import KEYS, Config, ConfigError, load_config
from megatron_coca.config.model import GATED_ACTIVATIONS
from megatron_coca.config.neox_keys import ALIASES, INERT, UNSUPPORTED
from megatron_coca.config.position import ROTATED_METHODS
from megatron_coca.config.source import OVERRIDES, merge, read_file
from megatron_coca.config.yaml_text import dump

CONFIGS = "configs"
MODEL_FILE = "model.yml"
SUFFIXES = (".yml", ".yaml", ".json")

NETWORK_FEATURES = frozenset(
    {
        *("sliding_window_width", "sparsity_config", "sparse_attention", "opt_pos_emb_offset", "use_qk_layernorm"),
        *("num_unique_layers", "gmlp_attn_dim", "soft_prompt_tuning", "dim_att", "head_size", "ffn_dim"),
        *("te_layernorm_mlp", "te_mha", "te_fp8_mha", "moe_num_experts", "use_mup"),
    }
)
"""Features absent here that make another network; all other absent ones concern the run that made the weights."""

OURS = ("rope_scaling", "relative_positions", "logit_scaling")
"""Keys that say how the network computes and that GPT-NeoX lacks."""

THEIRS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "intermediate_size", "seq_length"),
    *("max_position_embeddings", "no_weight_tying", "activation", "bias_gelu_fusion", "use_bias_in_attn_linear"),
    *("use_bias_in_mlp", "gpt_j_residual", "gpt_j_tied", "norm", "layernorm_epsilon", "rms_norm_epsilon"),
    *("scalenorm_epsilon", "hidden_dropout", "attention_dropout", "pos_emb", "rotary_pct", "rotary_emb_base"),
    *("rpe_num_buckets", "rpe_max_distance"),
)
"""Keys that GPT-NeoX has too and that fix its network."""

THEIR_POSITIONS = frozenset({"learned", "rotary", "sinusoidal", "rpe", "alibi", "none"})


def _of_the_run() -> frozenset[str]:
    """Keys, and sections of them, that do not change what network it is."""
    training = {name.split(".")[0] for name, place in KEYS.items() if place.group not in ("model", "position")}
    return frozenset(training | ALIASES.keys() | INERT.keys() | (UNSUPPORTED.keys() - NETWORK_FEATURES))


OF_THE_RUN = _of_the_run()
TOKENIZER = frozenset({"tokenizer_type", "vocab_file", "merge_file"})
"""Keys of the run that say which tokens the rows of the embedding are."""


def read_config(folder: Path, vocab_size: int) -> tuple[Config, int]:
    """The model's configuration from the YAML files in a step's folder, and its number of tensor ranks.

    Args:
        folder: one step's folder.
        vocab_size: rows of the embedding, padding included.

    Raises:
        CheckpointError: there are no such files, or they describe a network that this package does not have. Keys of the
            run that trained it are not looked at, but for those that name its tokenizer.
    """
    place = folder / CONFIGS
    files = sorted(path for path in place.iterdir() if path.suffix in SUFFIXES) if place.is_dir() else []
    if not files:
        raise CheckpointError(
            f"{folder}: has no {CONFIGS}/*.yml; put the YAML files that the model was trained with there"
        )
    problems: list[str] = []
    values = merge([layer for path in files if (layer := read_file(path, problems)) is not None]).values
    kept = {name: value for name, value in values.items() if name not in OF_THE_RUN or name in TOKENIZER}
    if kept.get("norm", "layernorm") == "layernorm":
        kept["use_bias_in_norms"] = True  # the key has no effect there: PyTorch's layer norm has a bias
    try:
        if problems:
            raise ConfigError(problems)
        config = load_config([], kept | {"vocab_size": vocab_size, "make_vocab_size_divisible_by": 1})
    except ConfigError as error:
        told = "; ".join(line.removeprefix(f"{OVERRIDES}: ") for line in error.problems)
        raise CheckpointError(f"{place}: {told}") from error
    return config, int(values.get("model_parallel_size") or 1)


def model_yaml(config: Config, ranks: int, pipe: int) -> str:
    """The model's keys as a file of GPT-NeoX's, for `ranks` tensor ranks.

    The vocabulary is padded to a multiple of the rows that there are: whatever a tokenizer counts, GPT-NeoX then comes to
    this number of rows.
    """
    flat, model = config.flat(), config.model
    values = {name: flat[name] for name in THEIRS}
    values["intermediate_size"] = (3 if model.activation in GATED_ACTIVATIONS else 1) * model.ffn_hidden_size
    values["rotary_emb_base"] = int(config.position.rotary_emb_base)
    values["make_vocab_size_divisible_by"] = model.padded_vocab_size // ranks
    values |= {"model_parallel_size": ranks, "pipe_parallel_size": pipe}
    foreign = foreign_keys(config)
    values |= {name: value for name, value in foreign.items() if name not in values}
    comment = f"# Stock GPT-NeoX does not know: {', '.join(foreign)}. It needs the plugin of megatron_coca.\n"
    return (comment if foreign else "") + dump(values)


def foreign_keys(config: Config) -> dict[str, Any]:
    """The keys of a configuration, with their values, that stock GPT-NeoX refuses."""
    flat = config.flat()
    found = {name: _given(flat[name]) for name in OURS if flat[name] not in (None, "none")}
    return found | ({} if config.position.pos_emb in THEIR_POSITIONS else {"pos_emb": config.position.pos_emb})


def _given(value: Any) -> Any:
    """A value without the options that say nothing."""
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


class Limit(NamedTuple):
    """Something that stands against a model in GPT-NeoX's layout: whether a model has it, and what is said."""

    has: Callable[[Config], bool]
    reason: str


def _has_two_lengths(config: Config) -> bool:
    """Whether something besides the extension measures against a length, and the model has two."""
    position, trained = config.position, config.model.seq_length
    original, distances = position.original_length(trained), position.relative_positions
    mapped = distances is not None and distances.settings(original) != distances.settings(trained)
    return original != trained and (position.logit_scaling != "none" or mapped)


COMPUTED: tuple[Limit, ...] = (
    Limit(
        lambda config: config.model.gpt_j_residual and not config.model.use_bias_in_mlp,
        "with gpt_j_residual and without use_bias_in_mlp GPT-NeoX leaves attention out of the sum",
    ),
    Limit(
        lambda config: not config.model.use_bias_in_mlp and config.model.activation not in GATED_ACTIVATIONS,
        "without use_bias_in_mlp GPT-NeoX computes gated activations only",
    ),
    Limit(
        _has_two_lengths,
        "logit_scaling and the defaults of relative_positions measure against seq_length, and with the plugin in GPT-NeoX "
        "against rope_scaling.original_max_position_embeddings, which is another length here; set the map's options, "
        "or logit_scaling to none",
    ),
)
"""What its forward pass does otherwise (megatron/model/transformer.py)."""

HELD: tuple[Limit, ...] = (
    Limit(
        lambda config: config.model.norm == "layernorm" and not config.model.use_bias_in_norms,
        "its layernorm always has a bias (use_bias_in_norms is false)",
    ),
    Limit(
        lambda config: config.position.pos_emb in ("kerple_log", "kerple_power"),
        "it has no place for what KERPLE learns",
    ),
    Limit(
        lambda config: config.position.rope_scaling is not None and config.position.rope_scaling.rope_type == "clex",
        "it has no place for what CLEX learns",
    ),
    Limit(
        lambda config: config.position.pos_emb in ROTATED_METHODS and config.position.rotary_emb_base % 1 != 0,
        "its rotary_emb_base is a whole number",
    ),
    Limit(
        lambda config: config.model.activation not in GATED_ACTIVATIONS and config.model.ffn_hidden_size % 2 != 0,
        "its inner width is even",
    ),
)
"""What its configuration or its files have no place for."""


def reasons(config: Config, limits: tuple[Limit, ...]) -> list[str]:
    """Why not; none where nothing stands against it."""
    return [limit.reason for limit in limits if limit.has(config)]


def undivided(config: Config, ranks: int) -> list[str]:
    """The numbers of a model that `ranks` tensor ranks cannot share equally."""
    if ranks < 1:
        return [f"model_parallel_size is {ranks}, and at least 1 rank holds it"]
    model = config.model
    shared = {
        "num_attention_heads": model.num_attention_heads,
        "num_kv_heads": model.num_kv_heads,
        "the inner width": model.ffn_hidden_size,
        "the padded vocabulary": model.padded_vocab_size,
    }
    return [f"{name} ({value}) is no multiple of {ranks}" for name, value in shared.items() if value % ranks]
