"""What the config.json of a Hugging Face folder says of a model, in keys of ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.huggingface.families import family
from megatron_coca.checkpoints.huggingface.files import weight_files
from megatron_coca.checkpoints.native import read_json

CONFIG = "config.json"


def is_huggingface_folder(path: Path) -> bool:
    """Whether `path` holds a Hugging Face config.json."""
    return (path / CONFIG).is_file()


def read_keys(folder: Path) -> dict[str, Any]:
    """Our configuration keys for the model in `folder`.

    CoCA is recognised in LLaMA folders by their T projection, and in folders of our export by what they say. The
    authors' GPT-NeoX folders look like plain ones: say pos_emb=coca.

    Raises:
        CheckpointError: config.json or the weights' files are not in order, or say something that is not known here.
    """
    source = folder / CONFIG
    config = read_json(source)
    found = family(config, source)
    if config.get("quantization_config"):
        raise CheckpointError(f"{source}: has a quantization_config, and quantized weights are not read")
    try:
        keys = _common_keys(config) | found.shape(config, source)
        return keys | found.position(config, source, weight_files(folder).by_name)
    except KeyError as missing:
        raise CheckpointError(f"{source}: has no {missing}") from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{source}: a value in it is of the wrong kind: {error}") from error


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "seq_length": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 1,
        "no_weight_tying": not config.get("tie_word_embeddings", False),
        "attention_dropout": float(config.get("attention_dropout") or 0),
    }
