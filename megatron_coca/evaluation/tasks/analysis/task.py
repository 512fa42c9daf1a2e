"""`megatron-coca evaluate analyse`: options and result files."""

from argparse import ArgumentParser
from typing import Literal

from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.options import (
    add_document_options,
    add_subject_options,
    length_list,
    positive_int,
    whole_number,
)
from megatron_coca.evaluation.results import OPEN, DocumentsRecord, Entry, Record, Result

MaybeShare = float | None
"""A fraction between 0 and 1; None if nothing was counted."""


class Part(Record):
    model_config = OPEN


class Angles(Part):
    """The initial angles Theta_j from k_j to q_j, in radians, in (-pi, pi]. Shares are over token pairs and j.

    An angle is undefined if q_j or k_j is zero. `undefined` is the share of these; all other shares leave them out.
    """

    undefined: MaybeShare
    collinear: MaybeShare  # share of angles that are 0 up to rounding
    anomalous: MaybeShare  # share of angles below 0
    anomalous_by_head: list[list[MaybeShare]]  # [layer][head]
    largest: float | None  # radians; the largest |Theta_j|


class Border(Part):
    beyond_training: MaybeShare  # share of all token pairs and all j with a border beyond the training length


class Borders(Part):
    """`k` describes the distance tau at which the anomalous range of an anomalous pair ends."""

    k: Border


class Decay(Part):
    """Scores of the same query and key by their distance in tokens."""

    distances: list[int]
    falling: list[MaybeShare]  # share of pairs with a lower score at the next distance
    falling_mean: MaybeShare
    change: list[float | None] | None = None  # mean score minus the score at distance 0; None in earlier files
    low: list[float | None] | None = None  # first quartile of the change over layers, heads and pairs
    high: list[float | None] | None = None


class Entropy(Part):
    """Entropy in nats of a query's attention weights, as means over documents. `by_position` is also a mean over layers
    and heads, `by_head` over positions, and `mean` over all three.
    """

    positions: list[int]  # positions of the sampled queries
    by_position: list[float]
    by_head: list[list[float]]  # [layer][head]
    mean: float


class LengthAnalysis(Entry):
    length: int
    documents: int
    angles: Angles | None  # None if the method does not rotate queries and keys
    borders: Borders | None
    decay: Decay
    entropy: Entropy

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class AnalysisProtocol(Part):
    text: str
    pairs: int  # number of token pairs for angles, over all documents
    queries: int  # number of positions for entropy, and of pairs for the distance sweep, per document
    seed: int  # seed for drawing the pairs
    layers: str | None = None  # the type of the analysed layers if there are several types


class AnalysisResult(Result):
    task: Literal["analyse"] = "analyse"
    protocol: AnalysisProtocol
    documents: DocumentsRecord
    results: list[LengthAnalysis]


def add_analyse_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add_document_options(parser)
    parser.set_defaults(num_documents=4)
    add = parser.add_argument
    lengths = "input lengths in tokens, or as multiples of the training length, such as 1L,4L"
    add("--lengths", required=True, type=length_list, metavar="N,N,...", help=lengths)
    pairs = "number of token pairs for the angles, over all documents; default: %(default)s"
    add("--pairs", type=positive_int, default=1024, metavar="N", help=pairs)
    queries = "number of positions per document for entropy and scores; default: %(default)s"
    add("--queries", type=positive_int, default=128, metavar="N", help=queries)
    add("--seed", type=whole_number, default=1234, help="seed for drawing the token pairs")


ANALYSE = Task(
    "analyse",
    "initial angles, score decay and entropy of a checkpoint's attention",
    add_analyse_options,
    "--checkpoint runs/350M_roformer_coca --lengths 512,2048 --output results",
    "analysis.measure.run",
    AnalysisResult,
    numbers=(
        Number(
            "anomalous pairs",
            lambda entry: None if entry.angles is None else entry.angles.anomalous,
            best="neither",
            digits=3,
        ),
        Number("score falls with distance", lambda entry: entry.decay.falling_mean, best="neither", digits=3),
        Number("entropy", lambda entry: entry.entropy.mean, unit="nats", best="neither", digits=3),
    ),
    comparable={
        "documents (sha256)": "documents.sha256",
        "pairs": "protocol.pairs",
        "queries": "protocol.queries",
        "seed": "protocol.seed",
        "protocol": "protocol.text",
    },
    divided_by="lengths",
    sections=(TaskSection("analysis", "Analysis of attention", "analysis.section.analysis_blocks", place=120),),
    place=80,
)
