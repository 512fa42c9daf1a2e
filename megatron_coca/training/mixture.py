"""What a run takes from each of its sources, in figures."""

from collections.abc import Sequence
from pathlib import Path

from megatron_coca.data import SourceShare
from megatron_coca.data.inspection.table import table

REPEATED = 4
"""Passes over a source up to which repeating it is worth about as much as new text, and beyond which ever less:
Muennighoff et al., "Scaling Data-Constrained Language Models" (2023).
"""
_HEADINGS = ("source", "weight", "share", "samples", "tokens", "epochs")


def mixture_table(shares: Sequence[SourceShare]) -> str:
    """A line for every source: weight asked for, share achieved, samples, tokens, passes over it."""
    return table(_HEADINGS, [_row(share) for share in shares])


def _row(share: SourceShare) -> tuple[str, ...]:
    return (
        share.source,
        f"{share.weight:.2%}",
        f"{share.fraction:.2%}",
        f"{share.samples:,}",
        f"{share.tokens:,}",
        f"{share.epochs:.3g}",
    )


def repeated_sources(shares: Sequence[SourceShare]) -> list[str]:
    """A line for every source that is read more than ``REPEATED`` times."""
    return [
        f"{share.source}: is read {share.epochs:.1f} times; beyond {REPEATED} passes text teaches ever less, "
        "so lower its weight, shorten the run, or add text"
        for share in shares
        if share.epochs > REPEATED
    ]


def source_names(sources: Sequence[str]) -> list[str]:
    """What sources are called in figures, by their prefixes: the shards' names where these differ, else whole prefixes."""
    short = [Path(source).name for source in sources]
    return short if len(set(short)) == len(short) else list(sources)


def mixture_figures(shares: Sequence[SourceShare]) -> dict[str, float]:
    """Share and passes of every source, as `share/NAME` and `epochs/NAME`."""
    figures: dict[str, float] = {}
    for name, share in zip(source_names([share.source for share in shares]), shares, strict=True):
        figures |= {f"share/{name}": share.fraction, f"epochs/{name}": share.epochs}
    return figures
