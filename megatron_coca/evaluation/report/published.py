"""Numbers as printed in papers, read from `published.yaml`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.results import Result
from megatron_coca.support.safe_yaml import read_yaml


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper, or a part of such a table.

    Attributes:
        name: the table's name in the paper.
        metric: the kind of numbers, by which report sections select tables.
        setting: the model, training and data behind the numbers.
        training_length: the models' training length in tokens; None if the rows have different training lengths.
        rows: for each row, its `name` and its `values`, which are separated by spaces.
        columns: lengths in tokens, or other column heads.
        protocol: values of a result with the same protocol, by their paths in it; empty if no result has this protocol.
        same_length: whether to show the table only next to results of models with this training length.
        apart: whether to keep the table separate from ours, because rows are differences or columns are not lengths.
        measured: whether the numbers were measured; False for a table of formulas.
    """

    name: str
    metric: str
    setting: str
    training_length: int | None
    rows: list[dict[str, str]]
    columns: Sequence[int | str] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    source: str = "CoCA paper, arXiv:2309.08646v3"
    protocol: Mapping[str, Any] = field(default_factory=dict)
    same_length: bool = False
    apart: bool = False
    measured: bool = True


TABLES = [PublishedTable(**table) for table in read_yaml(Path(__file__).with_suffix(".yaml"))]
"""All published tables, in the order of a report."""


def tables_of(metric: str, training_lengths: Collection[int] = ()) -> list[PublishedTable]:
    """Return the tables with this metric that a report with `--papers` shows for models of these training lengths."""
    chosen = [table for table in TABLES if table.metric == metric]
    return [table for table in chosen if not table.same_length or table.training_length in training_lengths]


def comparable_tables(metric: str, training_lengths: Collection[int], result: Result) -> list[PublishedTable]:
    """Return the tables with this metric that have the training length and the protocol of our results."""
    chosen = [table for table in TABLES if table.metric == metric and table.training_length in training_lengths]
    return [table for table in chosen if table.protocol and not table.apart and _same(table.protocol, result)]


def _same(protocol: Mapping[str, Any], result: Result) -> bool:
    """Return True if the result has all values of a protocol. A string may also be a part of the result's string, or of
    one of its strings.
    """
    for path, wanted in protocol.items():
        found: Any = attrgetter(path)(result)
        texts = [found] if isinstance(found, str) else found
        if isinstance(wanted, str):
            if not any(wanted in text.lower() for text in texts):
                return False
        elif found != wanted:
            return False
    return True


COST = (
    "Published (CoCA paper, arXiv:2309.08646v3, Figure 6 and appendix C): CoCA is about 5% to 10% slower than vanilla "
    "self-attention at inference, and needs about 60 GB of GPU memory at a length of 32k with the opt_einsum "
    "contraction (350M parameters)."
)
