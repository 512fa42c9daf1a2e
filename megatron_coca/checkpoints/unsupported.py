"""Features of a model that a format of another project cannot represent. An export stops on them with an error."""

from collections.abc import Iterator

from megatron_coca.config import COMPUTE_KEYS, KEYS, Config
from megatron_coca.config.model import GAU, GLOBAL
from megatron_coca.config.schema import default_of

WITHOUT_EFFECT = COMPUTE_KEYS | {"init_method", "output_layer_init_method", "init_method_std", "imports"}
"""Keys of the network and its positions that do not change the function of trained weights."""
SHAPE_KEYS = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "intermediate_size", "mlp_multiple_of"),
        *("expansion_factor", "seq_length", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by"),
        *("no_weight_tying", "use_bias_in_attn_linear", "use_bias_in_mlp", "attention_dropout"),
    }
)
"""Keys of the shape. Every format has them, under its own names."""


def lost_keys(config: Config, written: frozenset[str]) -> Iterator[str]:
    """Yield a reason for every key that a format with only the keys `written` would lose.

    Every key of the network and of the position method that is not at its default counts. A new key of the schema is
    therefore an error until the format writes it.
    """
    differ, types_written = [*config.layer_types] != [GLOBAL], "layer_types" in written
    if differ and not types_written:
        yield f"layer_types: the layers differ ({', '.join(config.layer_types)}), but the format has only one method"
    for name, kind in config.layer_types.items() if types_written else ():
        shared = kind.embedding.weights == "shared" or kind.extension.learned
        if name == GAU:
            yield f"layer_types: layers of type {name} are gated attention units, which the format does not have"
        elif differ and (kind.sink_logits or kind.gate or shared):
            yield f"layer_types: layers of type {name} have weights for which the format has no name"
    known, flat = written | WITHOUT_EFFECT | {"attention_config", "layer_types"}, config.flat()
    for key, place in KEYS.items():
        if place.group in ("model", "position") and key not in known and flat[key] != default_of(key, flat):
            yield f"{key}: the format has no such key for {flat[key]!r}"
