"""What a training step reads: samples as text, with the places where documents meet."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.order import Blend, SourceShare
from megatron_coca.data.shards import Shard
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.tables import percent, table

MOST_SAMPLES = 1 << 62
"""Numbers of samples are 64-bit integers."""
TITLES = ("source", "tokens on disk", "weight", "achieved", "samples", "tokens read", "epochs")


@dataclass(frozen=True)
class SourceMixture:
    """A source's share, and the tokens that it has."""

    tokens_on_disk: int
    share: SourceShare

    def facts(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {"tokens_on_disk": self.tokens_on_disk, **asdict(self.share)}


def check_samples(number: int) -> None:
    """Raise ``DataError`` for a number that the order does not reach."""
    if number > MOST_SAMPLES:
        raise DataError(f"{number}: samples are numbered up to 2^62 only. Take a smaller number.")


def mixture(blend: Blend, samples: int) -> list[SourceMixture]:
    """What the first ``samples`` samples of a run take from each source. ``DataError`` beyond ``MOST_SAMPLES``."""
    check_samples(samples)
    shares = blend.mixture(samples)
    return [SourceMixture(shard.len_tokens, share) for shard, share in zip(blend.shards, shares, strict=True)]


def mixture_table(found: Sequence[SourceMixture]) -> str:
    """One row per source, and their sum."""
    rows: list[list[object]] = [
        [s.source, m.tokens_on_disk, percent(s.weight), percent(s.fraction), s.samples, s.tokens, s.epochs]
        for m in found
        for s in (m.share,)
    ]
    shares = [m.share for m in found]
    total = [sum(m.tokens_on_disk for m in found), percent(sum(s.weight for s in shares))]
    total += [percent(sum(s.fraction for s in shares)), sum(s.samples for s in shares), sum(s.tokens for s in shares)]
    return table(TITLES, [*rows, ["all", *total, None]])


BOUNDARY = "──────── document ends ────────"


@dataclass(frozen=True)
class SampleView:
    """One sample of a run.

    Attributes:
        number: in the run's order.
        source: prefix of the shard.
        epoch: pass over the source that it belongs to, from 1.
        first_token: its place in the shard.
        parts: tokens of each document that it has some of, int64 [any].
        starts_document: whether it begins with the first token of a document.
    """

    number: int
    source: str
    epoch: int
    first_token: int
    parts: list[np.ndarray]
    starts_document: bool

    @property
    def tokens(self) -> int:
        """``seq_length + 1``."""
        return sum(map(len, self.parts))

    def facts(self) -> dict[str, Any]:
        """All but the tokens, as JSON can hold it."""
        return {
            "number": self.number,
            "source": self.source,
            "epoch": self.epoch,
            "first_token": self.first_token,
            "tokens": self.tokens,
            "tokens_by_document": [len(part) for part in self.parts],
            "starts_document": self.starts_document,
        }


def view_sample(blend: Blend, number: int) -> SampleView:
    """Sample ``number`` as training reads it. ``DataError`` for a number below 0 or beyond ``MOST_SAMPLES``."""
    check_samples(number)
    place = blend.places([number])[0]
    shard, start, count = blend.shards[place.source], int(place.starts[0]), blend.seq_length + 1
    tokens = shard.tokens(start, count)
    begins = shard.document_begins(place.starts, count)[0]
    inner = np.flatnonzero(begins[1:]) + 1
    # The samples up to this one have made so many passes over its source.
    passes = blend.mixture(number + 1)[place.source].epochs
    return SampleView(
        number, str(shard.prefix), math.ceil(passes), start, np.split(tokens, inner), starts_document=bool(begins[0])
    )


def sample_text(view: SampleView, tokenizer: Tokenizer, pieces: bool = False) -> str:
    """A heading and the text, or the single tokens, with a line where one document ends and the next begins."""
    heading = (
        f"sample {view.number:,}: {view.source}, epoch {view.epoch}, tokens {view.first_token:,} to "
        f"{view.first_token + view.tokens:,} ({view.tokens:,}), of {len(view.parts)} document(s), "
        f"{'from the beginning of' if view.starts_document else 'from within'} the first"
    )
    return "\n".join([heading, "", f"\n{BOUNDARY}\n".join(_shown(part, tokenizer, pieces) for part in view.parts)])


def document_text(shard: Shard, number: int, tokenizer: Tokenizer, pieces: bool = False) -> str:
    """A heading and the text of one document. ``DataError`` for a number that the shard does not have."""
    tokens = shard.document(number)
    return f"document {number:,} of {shard.prefix}: {len(tokens):,} tokens\n\n{_shown(tokens, tokenizer, pieces)}"


def _shown(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer, pieces: bool) -> str:
    listed = [int(token) for token in tokens]
    if pieces:
        return " ".join(f"{token}:{tokenizer.piece(token)}" for token in listed)
    return tokenizer.decode(listed)
