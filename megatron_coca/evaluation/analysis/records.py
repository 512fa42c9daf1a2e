"""The result file of `evaluate.py analyse`."""

from typing import Literal

from megatron_coca.evaluation.documents import DocumentsRecord
from megatron_coca.evaluation.results import Cell, Record, Result

Share = float | None
"""Between 0 and 1; None where there is nothing to take a share of."""
Quantiles = list[float] | None
"""At the protocol's `quantiles`; None where there is no value."""


class Angles(Record):
    """The initial angles Theta_j from k_j to q_j, in radians, in (-pi, pi].

    Counts and shares are over pairs of tokens; "by head" is [layer][head], "by pair" is a list over rotated pairs j.
    Where q_j or k_j is zero there is no angle, and `undefined` is the share of these; all other shares are of the rest.
    """

    edges: list[float]  # radians; the last bin holds the angles next to pi from both sides
    counts_by_head: list[list[list[int]]]
    counts_by_pair: list[list[int]]
    undefined: Share
    collinear: Share  # |Theta_j| within rounding of 0
    anomalous: Share
    anomalous_by_head: list[list[Share]]
    anomalous_by_pair: list[Share]
    largest: float | None  # radians, the largest |Theta_j|


class Border(Record):
    """The distances, in tokens, at which a rotated pair first crosses one of its three borders; lists are over j."""

    exists: list[Share]  # pairs that have this border at all
    mean: list[float | None]
    quantiles: list[Quantiles]
    within_training: list[Share]  # of all pairs: those that cross it within the training length
    within_length: list[Share]  # the same for the analysed length
    beyond_training: Share  # of all pairs and all j: those whose border lies beyond the training length


class Borders(Record):
    """Borders by the direction that causes them, and the frequencies theta_j (radians per token) they follow from.

    `k` is the end of the anomalous range of an anomalous pair, tau tokens away.
    """

    frequencies: list[float]
    k: Border
    minus_q: Border
    q: Border


class Curve(Record):
    """Scores by distance; lists are over the distances, None where no pair is visible."""

    mean: list[float | None]
    mean_abs: list[float | None]
    quantiles_abs: list[Quantiles]
    pairs: list[int]  # samples, all layers and heads together


class Decay(Record):
    """Attention scores, scaled and with their bias, by the distance of query and key in tokens."""

    distances: list[int]
    measured: Curve  # between tokens of the text at that distance
    turned: Curve  # the same pairs of tokens moved to every distance
    falling: list[Share]  # of the moved pairs: whose score falls from a distance to the next one
    falling_mean: Share
    bound_rope: list[float] | None  # mean of RoPE's bound over the moved pairs; None where rotation is not all
    bound_coca: list[float] | None  # mean of CoCA's strong bound
    above_rope: list[Share] | None  # moved pairs with |a| above their own bound
    above_coca: list[Share] | None


class Entropy(Record):
    """Entropy in nats of the attention weights of a query; means over documents and all dimensions not named."""

    positions: list[int]  # of the sampled queries
    by_position: list[float]
    by_layer: list[float]
    by_head: list[list[float]]
    mean: float


class LengthAnalysis(Cell):
    length: int
    documents: int
    angles: Angles | None  # None where nothing is rotated
    borders: Borders | None
    decay: Decay
    entropy: Entropy

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class AnalysisProtocol(Record):
    text: str
    pairs: int  # pairs of tokens for angles, over all documents
    queries: int  # of one document: positions for entropy, for scores at each distance, and pairs of the sweep
    seed: int  # of the drawn pairs
    quantiles: list[float]
    layers: str | None = None  # the type of layers, where they differ


class AnalysisResult(Result):
    task: Literal["analyse"] = "analyse"
    protocol: AnalysisProtocol
    documents: DocumentsRecord
    results: list[LengthAnalysis]
