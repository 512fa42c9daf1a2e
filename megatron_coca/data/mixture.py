"""The mixture that a run reads: each source's share and number of epochs, as a table, metrics and warnings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_coca.data.blend import SourceShare
from megatron_coca.support.markdown_tables import format_table

REPEATED = 4
"""Number of epochs up to which repeated text is worth about as much as new text (Muennighoff et al. 2023, "Scaling
Data-Constrained Language Models").
"""


def sum_of_shares(earlier: Sequence[SourceShare], later: Sequence[SourceShare]) -> list[SourceShare]:
    """Add up the shares of two parts of a run for each source. `weight` is the source's weight in the later part."""
    if not earlier:
        return list(later)
    total = sum(share.tokens for share in (*earlier, *later))
    shares = {share.source: replace(share, weight=0.0) for share in earlier}
    for share in later:
        before = shares.get(share.source, SourceShare(share.source, 0.0, 0, 0.0, 0, 0.0))
        samples, tokens = before.samples + share.samples, before.tokens + share.tokens
        shares[share.source] = replace(share, samples=samples, tokens=tokens, epochs=before.epochs + share.epochs)
    return [replace(share, fraction=share.tokens / max(1, total)) for share in shares.values()]


def mixture_table(shares: Sequence[SourceShare]) -> str:
    """Format a table with one row per source: configured weight, actual share, samples, tokens, epochs."""
    formats = ("{0.source}", "{0.weight:.2%}", "{0.fraction:.2%}", "{0.samples:,}", "{0.tokens:,}", "{0.epochs:.3g}")
    rows = [tuple(text.format(share) for text in formats) for share in shares]
    return format_table(("source", "weight", "share", "samples", "tokens", "epochs"), rows)


def repeated_sources(shares: Sequence[SourceShare]) -> list[str]:
    """Return a warning for every source that is read more than `REPEATED` times."""
    return [
        f"{share.source}: is read {share.epochs:.1f} times, but after {REPEATED} epochs repeated text is worth less "
        "and less; lower its weight, shorten the run, or add text"
        for share in shares
        if share.epochs > REPEATED
    ]


def source_names(sources: Sequence[str]) -> list[str]:
    """Return the names of sources for metrics: the shards' file names if these are unique, else their full prefixes."""
    short = [Path(source).name for source in sources]
    return short if len(set(short)) == len(short) else list(sources)


def mixture_figures(shares: Sequence[SourceShare]) -> dict[str, float]:
    """Return each source's share and number of epochs as the metrics `share/NAME` and `epochs/NAME`."""
    figures: dict[str, float] = {}
    for name, share in zip(source_names([share.source for share in shares]), shares, strict=True):
        figures |= {f"share/{name}": share.fraction, f"epochs/{name}": share.epochs}
    return figures
