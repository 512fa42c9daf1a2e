"""Identities of training data. A resumed run compares the identity of its data with the saved identity, and reports
the differences.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_coca.data.blend import Samples
from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection import shard_entry
from megatron_coca.data.shards import Shard, sampled_digest

logger = logging.getLogger(__name__)


def data_identity(blend: Samples) -> dict[str, Any]:
    """Return the identity of the data as a mapping for JSON. Each value is a list with one entry per source.

    An entry of `sha256` is the manifest's checksum of the token file, or None. It covers every token, and the token
    file is not read for it. `sampled` is computed from the shards themselves. It therefore also detects a change in a
    shard without a manifest, and a replaced file if the manifest still has the old checksum.
    """
    recorded: list[str | None] = []
    for shard in blend.shards:
        try:
            recorded.append(shard_entry(shard.prefix).sha256)
        except DataError as error:  # another program may have written manifest.json
            logger.info("%s; the shard is identified by a sample of its tokens instead", error)
            recorded.append(None)
    identity: dict[str, list[Any]] = {
        "tokens": [shard.len_tokens for shard in blend.shards],
        "document_counts": [shard.documents for shard in blend.shards],
        "weights": list(blend.weights),
        "sha256": recorded,
        "sampled": [sampled_digest(shard) for shard in blend.shards],
    }
    labels = [_label_digest(shard) for shard in blend.shards]
    return identity | ({"labels": labels} if any(labels) else {})


def _label_digest(shard: Shard) -> str | None:
    return None if shard.labels is None else sampled_digest(shard.labels)


def _digest(value: str | None) -> str:
    return "none" if value is None else value[:12]


COUNTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("token count", "{:,}".format),
    "document_counts": ("document count", "{:,}".format),
    "weights": ("weight", repr),
}
"""Maps each key of the identity with one number per source to its title and its format in messages."""


def differing_data(saved: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the differences between two identities, such as `token count of NAME (saved 1,000, now 900)`.

    Counts and checksums that one of the identities lacks are not compared, because a shard may have lost its manifest.
    `names` are the current names of the sources. For a synthetic task, they are the names of the sources of its filler
    text.
    """
    differences: list[str] = []
    if "text" in now:
        differences, names = differing_data(saved["text"], now["text"], names) if "text" in saved else [], ()
    before = len(saved.get("tokens") or ())
    if before != len(names):
        differences.append(f"number of sources (saved {before}, now {len(names)})")
    for number, name in enumerate(names) if before == len(names) else ():
        lines: list[str] = []
        for key in (*COUNTS, "sha256", "sampled"):
            old, new = (identity[key][number] if identity.get(key) else None for identity in (saved, now))
            if old is None or new is None or old == new:
                continue
            if key in COUNTS or not lines:  # report only one of the two digests
                title, shown = COUNTS.get(key, ("content", _digest))
                lines.append(f"{title} of {name} (saved {shown(old)}, now {shown(new)})")
        differences += lines
    if saved.get("labels") != now.get("labels"):
        differences.append("set of label shards, which determines the tokens that count in the loss")
    old, new = saved.get("tokenizer"), now.get("tokenizer")
    if old is not None and old != new:  # a run that started without a tokenizer may set one later
        differences.append(f"tokenizer (saved {_digest(old)}, now {_digest(new)})")
    if saved.get("documents", []) != now.get("documents", []):
        old, new = (" and ".join(identity.get("documents", [])) or "as one text" for identity in (saved, now))
        differences.append(f"treatment of documents (saved {old}, now {new})")
    if saved.get("task") != now.get("task"):
        differences.append(f"synthetic task (saved {saved.get('task')}, now {now.get('task')})")
    return differences
