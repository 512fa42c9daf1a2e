"""Find keys of config.json that the class of transformers does not read. Such keys cannot change the model.

The source code of the class is searched for the names of keys, without running the model. Without transformers, only
the keys in `NEVER_READ` are known.
"""

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

NEVER_READ = frozenset(
    {
        *("use_sdpa", "use_flash_attn", "use_flash_attention", "use_flash_attention_2", "flash_attention"),
        *(
            "attn_impl",
            "gradient_checkpointing",
            "neftune_noise_alpha",
            "model_max_length",
            "tokenizer_model_max_length",
        ),
        *("tokenizer_padding_side", "truncation_side", "onnx", "language", "license", "model_name"),
        *("quantization", "sharded", "save_step_dtype", "training_precision"),
        *("lora", "mm_hidden_size", "unsloth_tokenizer", "created_by", "finetuned_from", "recipe", "dataset"),
    }
)
"""Keys in published folders that no class of transformers reads, for use without transformers."""
SHARED = ("cache_utils.py", "masking_utils.py", "modeling_rope_utils.py")
"""Files of transformers that read keys for all classes."""


class KnownKeys(NamedTuple):
    """The keys that a class reads.

    Attributes:
        reader: name of the class, for messages.
        names: the keys.
    """

    reader: str
    names: frozenset[str]


def ignored_keys(kind: str, unread: Iterable[str]) -> tuple[list[str], str]:
    """Return the keys in `unread` that have no effect on models with the `model_type` `kind`, and the reason.

    A key with a leading underscore never has an effect.
    """
    unread = list(unread)
    private = [name for name in unread if name.startswith("_")]
    rest = [name for name in unread if not name.startswith("_")]
    if not rest:
        return private, "keys with a leading underscore do not describe the model"
    known = keys_of_class(kind)
    if known is None:
        return [*private, *(name for name in rest if name in NEVER_READ)], "transformers does not read these keys"
    return [
        *private,
        *(name for name in rest if name not in known.names),
    ], f"{known.reader} of transformers does not read these keys"


@cache
def keys_of_class(kind: str) -> KnownKeys | None:
    """Return the keys that transformers reads for a `model_type`; None if it is not installed or has no such class."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        found = CONFIG_MAPPING[kind]
    except KeyError:
        return None
    file, root = Path(inspect.getfile(found)), Path(inspect.getfile(PreTrainedConfig)).parent
    names = {field.name for owner in (found, PreTrainedConfig) for field in dataclasses.fields(owner)}
    names |= found.attribute_map.keys() | set(found.attribute_map.values())
    names |= set(_literals(file))
    modelling = file.with_name(file.name.replace("configuration_", "modeling_"))
    for path in (modelling, *(root / name for name in SHARED)):
        names |= _read_in(path) if path.is_file() else frozenset()
    return KnownKeys(found.__name__, frozenset(names))


def _literals(path: Path) -> Iterator[str]:
    """Yield every string in a source file that could be the name of a key."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


@cache
def _read_in(path: Path) -> frozenset[str]:
    """Return the names that a source file reads from a configuration: `config.NAME` and `getattr(config, "NAME")`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            names |= {
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    return frozenset(names)


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")
