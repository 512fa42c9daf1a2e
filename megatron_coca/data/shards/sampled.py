"""A digest of a shard that is cheap to take, by which a run that goes on knows its data again."""

import hashlib

import numpy as np

from megatron_coca.data.shards.shard import Shard

_WINDOWS = 64
_TOKENS = 4096


def sampled_digest(shard: Shard) -> str:
    """SHA-256 of tokens and beginnings of documents in ``_WINDOWS`` stretches spread evenly over a shard or its part.

    Reads half a megabyte to two, whatever the size: another corpus is told apart, a change between the stretches is
    not. It is the same for the same tokens in another dtype, under another name and without a manifest.
    """
    count = min(_TOKENS, shard.len_tokens)
    offsets = np.unique(np.linspace(0, shard.len_tokens - count, _WINDOWS).astype(np.int64))
    digest = hashlib.sha256(f"{shard.documents} {shard.len_tokens}".encode())
    digest.update(shard.windows(offsets, count).astype("<i8").tobytes())
    digest.update(np.packbits(shard.document_begins(offsets, count)).tobytes())
    return digest.hexdigest()
