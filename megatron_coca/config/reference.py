"""Writes the reference page of all keys: `python -m megatron_coca.config.reference > docs/config.md`."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.load import leaves
from megatron_coca.config.neox_keys import ALIASES, INERT, UNSUPPORTED, UNSUPPORTED_CHOICES
from megatron_coca.config.position import RelativePositions, RopeScaling
from megatron_coca.config.schema import GROUPS

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m megatron_coca.config.reference > docs/config.md`; change the schema, not this page. -->

A run is one or several YAML or JSON files, merged left to right, and then `key=value` overrides:

    python train.py configs/350M/roformer_coca.yml configs/cluster/cpu.yml train_iters=1000 rope_scaling.factor=4.0

```python
from megatron_coca.config import load_config

config = load_config(["configs/350M/roformer.yml", "configs/extend/dynamic_ntk.yml"], ["optimizer.params.lr=3e-4"])
config.model.head_dim                          # 64
config.override({"rope_scaling": None})        # a new, validated Config
config.to_yaml()                               # every resolved key, flat
```

- Later values win. Mappings are merged name by name, so that `optimizer: {params: {lr: 1e-3}}` keeps the betas.
- `null` means "not set": the default applies. It also takes back what an earlier file set.
- Hyphens and underscores in keys are alike. Dots reach into mappings. `1e-4` is a number.
- A key given twice in one file, an unknown key, a wrong type, a misspelt choice or an impossible combination is an
  error. All errors are reported at once, one line each, as `file:line: key: what is wrong`.
- Types are strict: a whole number may stand for a number, but text or a truth value may not.
- GPT-NeoX's dense configurations load unchanged. Its keys are listed at the end of this page where they have no
  effect here or name a feature that is absent; an absent feature's key may hold GPT-NeoX's default.

Where GPT-NeoX differs: here choices are matched exactly (optimizer types in any case), a `gradient_clipping` of 1.0
clips, `gradient_accumulation_steps` is derived when both batch sizes are given, and a nominal MLP width is rounded so
that both matrices agree.

## Keys
"""


def reference() -> str:
    """The whole page as Markdown."""
    return "\n".join([_INTRODUCTION, *_groups(), *_other_keys()]) + "\n"


def _groups() -> Iterator[str]:
    for name, kind in GROUPS.items():
        yield f"### {name}\n\n{(kind.__doc__ or '').strip()}\n"
        yield _table(("key", "type", "default", "meaning"), _rows(kind, ""))
    nested: dict[str, type[ConfigGroup]] = {"rope_scaling": RopeScaling, "relative_positions": RelativePositions}
    for key, kind in nested.items():
        yield f"### {key}\n\n{(kind.__doc__ or '').strip()} Inside the key `{key}`:\n"
        yield _table(("key", "type", "default", "meaning"), _rows(kind, f"{key}."))


def _rows(kind: type[ConfigGroup], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        yield f"`{prefix}{field.alias or name}`", _type(field), _default(field), field.description or ""


def _type(field: FieldInfo) -> str:
    choices = leaves(field.annotation)
    if choices:
        return " \\| ".join(_cell(choice) for choice in choices)
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    """`int`, `number`, `text`, ...: the type as one writes it in YAML."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    names = {int: "int", float: "number", str: "text", bool: "true \\| false", list: "list", tuple: "list"}
    if get_origin(annotation) in names:
        return names[get_origin(annotation)]
    if parts and get_origin(annotation) is not dict:
        return _type_name(parts[0])
    return names.get(annotation, "mapping")


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "follows" in extra:
        return f"`{extra['follows']}`"
    if field.is_required():
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).replace("\n...", "").strip()
    return f"`{_cell(text)}`"


def _cell(value: Any) -> str:
    """Text within a table, where a bar would end the cell."""
    return str(value).replace("|", "\\|")


def _other_keys() -> Iterator[str]:
    yield "## Second names\n"
    yield _table(("key", "stands for"), ((f"`{alias}`", f"`{key}`") for alias, key in ALIASES.items()))
    yield "## GPT-NeoX's keys without effect\n"
    yield _table(("key", "reason"), ((f"`{key}`", reason) for key, reason in INERT.items()))
    yield "## GPT-NeoX's choices that are not supported yet\n"
    choices = (
        (f"`{key}: {choice}`", why) for key, absent in UNSUPPORTED_CHOICES.items() for choice, why in absent.items()
    )
    yield _table(("choice", "feature"), choices)
    yield "## GPT-NeoX's keys that are not supported yet\n"
    absent = ((f"`{key}`", f"`{default!r}`", feature) for key, (default, feature) in UNSUPPORTED.items())
    yield _table(("key", "accepted value", "feature"), absent)


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
