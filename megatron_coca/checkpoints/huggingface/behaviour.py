"""What the tokenizer and generation files of a Hugging Face folder do beside giving ids; an import does not keep it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.native import read_json

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
