"""Find features of a model that another project's format cannot represent. They make an export stop with an error."""

from collections.abc import Iterator

from megatron_coca.config import COMPUTE_KEYS, Config
from megatron_coca.config.model import GAU, GLOBAL
from megatron_coca.config.schema import MODEL_KEYS, not_at_default

WITHOUT_EFFECT = (
    COMPUTE_KEYS
    | {"init_method", "output_layer_init_method", "init_method_std", "imports"}
    | {"use_mup", "mup_base_hidden_size", "mup_init_scale", "mup_attn_temp", "mup_output_temp", "mup_embedding_mult"}
)
"""Network and position keys that do not change what a trained model computes. The factors of `use_mup` are not lost,
because they are stored in other keys, such as `softmax_scale`.
"""
SHAPE_KEYS = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "intermediate_size", "mlp_multiple_of"),
        *("expansion_factor", "seq_length", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by"),
        *("no_weight_tying", "use_bias_in_attn_linear", "use_bias_in_mlp", "attention_dropout"),
    }
)
"""Keys of the network's shape, which every format has under its own names."""


def lost_keys(config: Config, written: frozenset[str]) -> Iterator[str]:
    """Yield an error message for every key that would be lost in a format that has only the keys `written`.

    Every network or position key that is not at its default is checked. A model that uses a new key of the schema
    therefore stops the export with an error until the format writes this key.
    """
    differ, types_written = [*config.layer_types] != [GLOBAL], "layer_types" in written
    if differ and not types_written:
        yield f"layer_types: layers differ ({', '.join(config.layer_types)}), but the format supports only one type"
    for name, kind in config.layer_types.items() if types_written else ():
        shared = kind.embedding.weights == "shared" or kind.extension.learned
        if name == GAU:
            yield f"layer_types: layers of type {name} are gated attention units, which the format does not support"
        elif differ and (kind.sink_logits or kind.gate or shared):
            yield f"layer_types: layers of type {name} have weights that the format has no names for"
    known, flat = written | WITHOUT_EFFECT | {"attention_config", "layer_types"}, config.flat()
    for key, value in not_at_default((key for key in MODEL_KEYS if key not in known), flat).items():
        yield f"{key}: the format cannot represent {value!r}"
