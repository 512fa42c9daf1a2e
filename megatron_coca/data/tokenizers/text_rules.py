"""Text rules of a Hugging Face folder: which tokens begin and end texts, and whether texts can name special tokens."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_coca.data.tokenizers.end_tokens import read_object, with_text_keys


@dataclass(frozen=True)
class TextRules:
    """How transformers treats texts. The default values apply if there is only a tokenizer.json, without other files.

    Attributes:
        bos, eos: the symbols that begin and end texts, or None.
        ends: the ids that end a generated text.
        splits: whether names of special tokens in a text are treated as ordinary characters (`split_special_tokens`).
        add_bos, add_eos: whether `bos` and `eos` are added to every text; None if tokenizer.json decides.
    """

    bos: str | None = None
    eos: str | None = None
    ends: tuple[int, ...] = ()
    splits: bool = False
    add_bos: bool | None = None
    add_eos: bool | None = None

    def saved(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, for a JSON file."""
        default = TextRules()
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}


def rules_of(saved: Mapping[str, Any]) -> TextRules:
    """Recreate the rules from the result of `TextRules.saved`."""
    known = {field.name: saved[field.name] for field in fields(TextRules) if field.name in saved}
    return TextRules(**known | {"ends": tuple(known.get("ends", ()))})


def find_rules(folder: Path) -> TextRules:
    """Read the rules of a Hugging Face folder. Missing and unreadable files are ignored."""
    names = ("special_tokens_map.json", "tokenizer_config.json", "config.json", "generation_config.json")
    found = {name: read_object(folder / name) for name in names}
    settings = found["special_tokens_map.json"] | found["tokenizer_config.json"]
    given = found["generation_config.json"].get("eos_token_id")
    return TextRules(
        bos=_symbol(settings.get("bos_token")),
        eos=_symbol(settings.get("eos_token")),
        ends=token_ids(given if given is not None else with_text_keys(found["config.json"]).get("eos_token_id")),
        splits=settings.get("split_special_tokens") is True,
        add_bos=_flag(settings.get("add_bos_token")),
        add_eos=_flag(settings.get("add_eos_token")),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids in a value of a configuration file, which may be an id, a list of ids, or None."""
    values = value if isinstance(value, list) else [value]
    return tuple(token for token in values if isinstance(token, int) and not isinstance(token, bool) and token >= 0)


def _symbol(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
