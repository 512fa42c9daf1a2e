"""Folders of Hugging Face transformers: what they say of a model, their weights, and writing them."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_coca.checkpoints import weight_map
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.huggingface_families import TRAINING_LENGTH, Family, WeightFiles, family, weight_files
from megatron_coca.checkpoints.native import read_json
from megatron_coca.checkpoints.weights import Weights, joined
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.config.source import OVERRIDES

CONFIG, GENERATION = "config.json", "generation_config.json"

THEIRS = {
    "num_layers": "num_hidden_layers",
    "num_kv_heads": "num_key_value_heads",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "layer_norm_eps",
    "rms_norm_epsilon": "rms_norm_eps",
    "gpt_j_residual": "use_parallel_residual",
    "use_bias_in_attn_linear": "attention_bias",
    "use_bias_in_mlp": "mlp_bias",
}
"""Our keys that config.json has under another name; for messages."""


def is_huggingface_folder(path: Path) -> bool:
    """Whether `path` holds a Hugging Face config.json."""
    return os.path.isfile(path / CONFIG)  # False, too, where the file system does not say


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
        keys = _common_keys(config) | _vocabulary(config, folder) | found.shape(config, source)
        return keys | found.position(config, source, weight_files(folder).by_name)
    except KeyError as missing:
        raise CheckpointError(f"{source}: has no {missing}") from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{source}: a value in it is of the wrong kind: {error}") from error


def read_config(folder: Path) -> Config:
    """The configuration of the model in `folder`.

    Raises:
        CheckpointError: as for `read_keys`, or what config.json says makes no valid configuration.
    """
    try:
        return load_config([], read_keys(folder))
    except ConfigError as error:
        told = "; ".join(_in_their_words(line.removeprefix(f"{OVERRIDES}: ")) for line in error.problems)
        raise CheckpointError(f"{folder / CONFIG}: does not describe a model that is known here: {told}") from error


def _in_their_words(problem: str) -> str:
    """A fault with the name that its key has in config.json, where that is another."""
    key, told = problem.split(": ", 1)
    return f"{THEIRS[key]} (here {key}): {told}" if key in THEIRS else problem


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "seq_length": config.get(TRAINING_LENGTH) or config["max_position_embeddings"],
        "no_weight_tying": not config.get("tie_word_embeddings", False),
        "attention_dropout": float(config.get("attention_dropout") or 0),
    }


def _vocabulary(config: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Token ids and the rows they are padded to: rows at the end that generation never chooses are padding."""
    rows, path = config["vocab_size"], folder / GENERATION
    listed = read_json(path).get("suppress_tokens") if path.is_file() else None
    never = {each for each in listed if isinstance(each, int)} if isinstance(listed, list) else set()
    first = min(never, default=rows)
    if 0 < first < rows and never == set(range(first, rows)):
        return {"vocab_size": first, "make_vocab_size_divisible_by": rows}
    return {"vocab_size": rows, "make_vocab_size_divisible_by": 1}


Json = dict[str, Any]
ADDING_FLAGS = ("add_bos_token", "add_eos_token")
ADDING_PROCESSORS = frozenset({"BertProcessing", "RobertaProcessing"})
"""Steps of a tokenizer.json that always put symbols around a text; TemplateProcessing does where it names some."""

KEPT_DEFAULTS = frozenset(
    {"do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "transformers_version"}
)
"""Of generation_config.json, what an export has of itself; a name with `_` in front is no setting."""


class _Source(NamedTuple):
    """A folder, the id that ends its texts or None, and three of its files, empty where one is absent."""

    folder: Path
    end: int | None
    vocabulary: Json
    settings: Json
    generation: Json


def behaviour_note(folder: Path, end: int | None) -> str | None:
    """What `folder` does that its ids do not say, and how an export keeps it; None where there is nothing.

    Args:
        folder: a Hugging Face folder.
        end: the token that ends texts after an import, None where no tokenizer is taken.

    Raises:
        CheckpointError: one of its files is no JSON mapping.
    """
    source = _Source(folder, end, *map(_json, _paths(folder)))
    more = [told for told, has in BEHAVIOURS if has(source)]
    if not more:
        return None
    return f"{folder}: also has {', '.join(more)}; export with --tokenizer {folder} to keep them"


def _paths(folder: Path) -> Iterator[Path]:
    return (folder / f"{name}.json" for name in ("tokenizer", "tokenizer_config", "generation_config"))


def _json(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}


def _has_template(source: _Source) -> bool:
    return (source.folder / "chat_template.jinja").is_file() or bool(source.settings.get("chat_template"))


def _adds_symbols(source: _Source) -> bool:
    if any(source.settings.get(name) for name in ADDING_FLAGS):
        return True
    if not source.vocabulary and (source.folder / "tokenizer.model").is_file():
        # transformers' class for LLaMA begins every text with a symbol, unless it is told not to.
        class_name = str(source.settings.get("tokenizer_class"))
        return class_name.startswith("Llama") and source.settings.get("add_bos_token") is None
    return _adds(source.vocabulary.get("post_processor") or {})


def _adds(processor: Json) -> bool:
    if any(map(_adds, processor.get("processors") or [])):
        return True
    named = any("SpecialToken" in step for step in processor.get("single") or [])
    return named or processor.get("type") in ADDING_PROCESSORS


def _has_symbols(source: _Source) -> bool:
    """Beside the one that ends texts: those are one token within a text, here they are ordinary characters."""
    added = source.vocabulary.get("added_tokens") or []
    decoder = source.settings.get("added_tokens_decoder") or {}
    ids = {each.get("id") for each in added if each.get("special")}
    ids |= {int(number) for number, each in decoder.items() if each.get("special")}
    return bool(ids - {source.end}) or bool(source.settings.get("extra_special_tokens"))


def _has_defaults(source: _Source) -> bool:
    end, names = source.generation.get("eos_token_id"), (n for n in source.generation if not n.startswith("_"))
    several = isinstance(end, list) and len(end) > 1
    return several or bool(source.generation.get("do_sample")) or not KEPT_DEFAULTS.issuperset(names)


BEHAVIOURS: tuple[tuple[str, Callable[[_Source], bool]], ...] = (
    ("a chat template", _has_template),
    ("symbols that it puts around texts", _adds_symbols),
    ("special tokens within texts", _has_symbols),
    ("defaults of generation", _has_defaults),
)
"""What is told, and whether a folder has it."""

HEAD, EMBEDDING = "final_linear.weight", "embedding.word_embeddings.weight"
OPTIONAL = re.compile(r".*\.bias|.*position.*")
"""Ours that some models of an architecture have and others have not."""

NAMED = 5
"""Weights that a message names at most."""


def open_weights(folder: Path, num_layers: int, num_heads: int, tied: bool) -> Weights:
    """The weights of our model, in the dtype on disk and in the order of the files.

    Raises:
        CheckpointError: a weight is missing, or there is one that would not be read: then it is another model.
    """
    config = read_json(folder / CONFIG)
    found, files = family(config, folder / CONFIG), weight_files(folder)
    heads = weight_map.Heads(
        num_heads, config.get("num_key_value_heads") or num_heads, config["hidden_size"] // num_heads
    )
    rows = weight_map.expand(found.rows(config, files.by_name), num_layers)
    wanted = [row for row in rows if not OPTIONAL.fullmatch(row.ours) or any(n in files.by_name for n in row.theirs)]
    if tied:
        _refuse_untied(files, {row.ours: row.theirs[0] for row in rows if row.ours in (HEAD, EMBEDDING)})
        wanted = [row for row in wanted if row.ours != HEAD]
    wanted.sort(key=lambda row: files.place(row.theirs))
    weights = joined(files.open(name for row in wanted for name in row.theirs), wanted, heads)
    _refuse_unread(files, rows, found)
    return weights


def _refuse_untied(files: WeightFiles, names: dict[str, str]) -> None:
    """A tied head may be in the files as well, but then it has to be the embedding: transformers ties no others."""
    if not files.by_name.keys() >= set(names.values()):
        return
    both = files.open(names.values())
    if not torch.equal(both.read(names[HEAD]), both.read(names[EMBEDDING])):
        raise CheckpointError(
            f"{files.folder}: {names[HEAD]} differs from {names[EMBEDDING]}, though {CONFIG} ties them; set "
            "tie_word_embeddings to false there"
        )


def _refuse_unread(files: WeightFiles, rows: Sequence[weight_map.Row], found: Family) -> None:
    read = {name for row in rows for name in row.theirs}
    unread = [name for name in files.by_name if name not in read and not found.unneeded.fullmatch(name)]
    if unread:
        raise CheckpointError(
            f"{files.folder}: has weights that this model has no place for: {_listed(unread)}. Without them it would be "
            "another model, so it is not read"
        )


def _listed(names: Collection[str]) -> str:
    told = ", ".join(sorted(names)[:NAMED])
    return told + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
