"""What makes two runs read the same data, and how they are told apart: source by source."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_coca.data import Blend, DataError, Shard
from megatron_coca.data.inspection.collection import shard_entry
from megatron_coca.data.shards.sampled import sampled_digest

logger = logging.getLogger(__name__)


def _digest(value: str | None) -> str:
    return "none" if value is None else value[:12]


def _count(value: int) -> str:
    return f"{value:,}"


_COUNTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("token count", _count),
    "document_counts": ("document count", _count),
    "weights": ("weight", repr),
}
_CONTENTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "sha256": ("content", _digest),
    "sampled": ("content", _digest),
}
"""Entries with a value for every source: what they are called, and how a value is shown."""


def data_identity(blend: Blend) -> dict[str, list[Any]]:
    """What is compared when a run goes on, as JSON can hold it; a list over the sources each.

    `sha256` is what the manifest says of the tokens' file, None where none does: it takes every token into account and
    no reading. `sampled` is taken from the shard itself, so that data without a manifest is known again as well, and
    a file that was replaced under its manifest is not.
    """
    return {
        "tokens": [shard.len_tokens for shard in blend.shards],
        "document_counts": [shard.documents for shard in blend.shards],
        "weights": list(blend.weights),
        "sha256": [_recorded_digest(shard) for shard in blend.shards],
        "sampled": [sampled_digest(shard) for shard in blend.shards],
    }


def _recorded_digest(shard: Shard) -> str | None:
    try:
        return shard_entry(shard.prefix).sha256
    except DataError as error:  # a manifest.json of something else may lie beside a shard of another program
        logger.info("%s; it is known again by some of its tokens instead", error)
        return None


def differing_data(saved: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What differs between two identities, a phrase each such as `token count of NAME (saved 1,000, now 900)`.

    `names` are those of the sources now.
    """
    before = len(saved.get("tokens") or ())
    if before != len(names):
        return [f"number of sources (saved {before}, now {len(names)})", *_of_the_run(saved, now)]
    found = [line for number, name in enumerate(names) for line in _of_source(saved, now, number, name)]
    return found + _of_the_run(saved, now)


def _of_source(saved: Mapping[str, Any], now: Mapping[str, Any], number: int, name: str) -> list[str]:
    counts = _differing(_COUNTS, saved, now, number, name)
    # Other counts are other content: once is enough.
    return counts or _differing(_CONTENTS, saved, now, number, name)[:1]


def _differing(
    entries: Mapping[str, tuple[str, Callable[[Any], str]]],
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    number: int,
    name: str,
) -> list[str]:
    """Checkpoints of earlier versions lack some entries, and a shard may have no manifest on one side: compared is what
    both have, so that such runs can go on.
    """
    found = []
    for key, (title, shown) in entries.items():
        old, new = (_value(identity, key, number) for identity in (saved, now))
        if old is not None and new is not None and old != new:
            found.append(f"{title} of {name} (saved {shown(old)}, now {shown(new)})")
    return found


def _value(identity: Mapping[str, Any], key: str, number: int) -> Any:
    values = identity.get(key)
    return values[number] if values is not None else None


def _of_the_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What belongs to no source: the tokenizer, and what the ends of documents change."""
    found = []
    old, new = saved.get("tokenizer"), now.get("tokenizer")
    # A run that began without a tokenizer may go on once one is named.
    if old is not None and old != new:
        found.append(f"tokenizer (saved {_digest(old)}, now {_digest(new)})")
    if saved.get("documents", []) != now.get("documents", []):
        found.append(f"treatment of documents (saved {_keys(saved)}, now {_keys(now)})")
    return found


def _keys(identity: Mapping[str, Any]) -> str:
    return " and ".join(identity.get("documents", [])) or "as one text"
