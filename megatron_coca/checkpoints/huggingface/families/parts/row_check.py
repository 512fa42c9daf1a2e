"""Check the rows of `families.FAMILIES` when they are loaded. Otherwise, a mistake in a row would look like an error in
a folder.

`tests/unit/checkpoints/huggingface/test_family_rows.py` compares the rows with the classes of transformers.
"""

from collections.abc import Iterator
from typing import Any

from megatron_coca.checkpoints.huggingface.families.parts.keys import GATED, PLAIN, Family
from megatron_coca.config.base import nearest
from megatron_coca.config.schema import KEYS

COMMON = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "attention_dropout",
    ),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "sliding_window"),
)
"""Keys of config.json that most architectures have. A row can give them other names, or None if they are absent."""


def check_row(name: str, family: Family) -> None:
    """Raise ValueError if a row cannot describe any model. `name` is the name of the row for the message."""
    if problems := list(_problems(family)):
        raise ValueError("\n".join(f"{name}: {problem}" for problem in problems))


def _problems(family: Family) -> Iterator[str]:
    if not callable(family.rows):
        yield "rows: expected a function of the model, got a table; put it into rows_of(...)"
    for theirs, value in family.keys.items():
        if not (isinstance(value, tuple) and len(value) == 2):
            yield f'keys: {theirs}: expected ("our key", default of the class), got {value!r}; correct it'
        else:
            yield from _unknown("keys", f"{theirs}: ", value[0])
    for ours in family.fixed:
        yield from _unknown("fixed", "", ours)
    for field, common in (
        *(("names", name) for name in family.names),
        *(("first", name) for name in family.first.values() if name not in family.keys),
    ):
        if common not in COMMON:
            yield f"{field}: {common} is not a common key{nearest(common, COMMON) or '; correct it'}"
    gated = family.fixed.get("activation") == "gated"
    key, default = family.activation
    if default not in (known := GATED if gated else PLAIN):
        mlp = "a gated MLP" if gated else "an MLP without a gate"
        yield f"activation: {key}: {default!r} is not one of {' | '.join(known)} ({mlp}); correct it"


def _unknown(field: str, before: str, ours: Any) -> Iterator[str]:
    if ours not in KEYS:
        yield f"{field}: {before}{ours} is not a key of docs/config.md{nearest(str(ours), KEYS) or '; correct it'}"
