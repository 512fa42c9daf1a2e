"""The analysis of a model at one length: forward passes over documents, and what each layer shows in them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_coca.evaluation.analysis.distance_sweep import (
    PAIRS,
    QUANTILES,
    Turned,
    Turntable,
    curve,
    initial_angles,
    mean_of_shares,
    share,
    summarise_angles,
    summarise_borders,
    turning_frequencies,
)
from megatron_coca.evaluation.analysis.observation import (
    Seen,
    draw_pairs,
    log_distances,
    observed,
    row_entropies,
    scores_at,
    spread,
)
from megatron_coca.evaluation.analysis.records import (
    AnalysisProtocol,
    AnalysisResult,
    Decay,
    Entropy,
    LengthAnalysis,
    Share,
    draw_files,
)
from megatron_coca.evaluation.documents import Documents, read_subject_documents
from megatron_coca.evaluation.options import (
    Task,
    add_document_options,
    add_subject_options,
    int_list,
    positive_int,
    whole_number,
)
from megatron_coca.evaluation.results import Cost, EvaluationError, Store, measured
from megatron_coca.evaluation.subject import EvaluatedCheckpoint, Header, Subject, noting_missing, run_subjects
from megatron_coca.model import GPT
from megatron_coca.tables import format_table

TURNED_AT_ONCE = 1 << 22
"""Numbers of operands held at a time while pairs are put apart."""
ROUNDING = 1e-9
"""By how much a score may be above its bound: both are float64 sums of some ten terms."""


@dataclass(frozen=True)
class Sampling:
    """How much is looked at.

    Attributes:
        pairs: pairs of tokens for angles, over all documents.
        queries: of one document: positions whose entropy is taken, positions whose score is taken at each distance,
            and pairs that are put apart.
        seed: of the draw of the pairs.
    """

    pairs: int = 1024
    queries: int = 128
    seed: int = 1234


@dataclass
class Findings:
    """Samples of all layers and documents; every list is in the order of the layers of one document after another."""

    angles: list[np.ndarray] = field(default_factory=list)  # each [heads, pairs, d/2] float32
    entropies: list[np.ndarray] = field(default_factory=list)  # each [heads, positions] float64
    scores: list[list[np.ndarray]] = field(default_factory=list)  # by distance, each [heads * queries] float32
    turned: list[Turned] = field(default_factory=list)


class Observer:
    """Visits the layers of a model that reads `length` tokens at a time."""

    def __init__(self, model: GPT, length: int, sampling: Sampling, documents: int) -> None:
        device = next(model.parameters()).device
        self.method, self.length = model.method, length
        self.distances = log_distances(length)
        self.turntable = Turntable(model.positions, self.distances, length, device)
        self.positions = spread(0, length - 1, sampling.queries)
        self.sampling, self.documents, self.device = sampling, documents, device
        self.findings = Findings()
        self.pairs = draw_pairs(length, 1, 0)

    def begin(self, document: int) -> None:
        """Draws the pairs of the document of that number."""
        count = max(1, len(range(document, self.sampling.pairs, self.documents)))
        m, n = draw_pairs(self.length, count, self.sampling.seed + document)
        self.pairs = m.to(self.device), n.to(self.device)

    def visit(self, seen: Seen) -> None:
        """Takes its samples from one layer."""
        found, inputs = self.findings, seen.inputs
        found.entropies.append(_stored(row_entropies(inputs, self.positions), np.float64))
        found.scores.append([self._at(seen, distance) for distance in self.distances])
        m, n = self.pairs
        q, k = seen.q[0][:, m], seen.k[0][:, n]
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        if self.method.name in PAIRS:
            found.angles.append(_stored(initial_angles(self.method, q, k), np.float32))
        found.turned += self._turn(q, k, seen)

    def _at(self, seen: Seen, distance: int) -> np.ndarray:
        queries = spread(distance, self.length - 1, self.sampling.queries)
        return _stored(scores_at(seen.inputs, queries, distance), np.float32).ravel()

    def _turn(self, q: Tensor, k: Tensor, seen: Seen) -> Iterator[Turned]:
        """Of q and k [heads, pairs, head_dim], some pairs at a time."""
        q, k = (x[:, : self.sampling.queries].transpose(0, 1) for x in (q, k))
        each = max(1, TURNED_AT_ONCE // (q.shape[1] * q.shape[2] * len(self.distances)))
        for of_query, of_key in zip(q.split(each), k.split(each), strict=True):
            yield _on_host(self.turntable.turn(of_query, of_key, seen.inputs.bias))


def analyse(model: GPT, documents: Sequence[np.ndarray], length: int, sampling: Sampling) -> LengthAnalysis:
    """What the first `length` tokens of `documents` (int64, at least so long) show of `model`, in evaluation mode.

    Memory grows with `length`, not with its square, and with `sampling.pairs` times layers, heads and rotated pairs.
    """
    observer = Observer(model, length, sampling, len(documents))
    with torch.no_grad(), observed(model, observer.visit):
        for number, tokens in enumerate(documents):
            observer.begin(number)
            model.hidden_states(torch.from_numpy(tokens[None, :length]).to(observer.device))
    return summarise(model, observer)


def summarise(model: GPT, observer: Observer) -> LengthAnalysis:
    """What was found, as it goes to the result file."""
    layers, length, found = len(model.blocks), observer.length, observer.findings
    angles, borders = None, None
    if found.angles:
        theta = np.stack([np.concatenate(found.angles[layer::layers], axis=1) for layer in range(layers)])
        frequencies = turning_frequencies(model.positions, length).numpy()
        angles = summarise_angles(theta)
        borders = summarise_borders(theta, frequencies, observer.method.training_length, length)
    return LengthAnalysis(
        length=length,
        documents=observer.documents,
        angles=angles,
        borders=borders,
        decay=summarise_decay(observer.distances, found),
        entropy=summarise_entropy(observer.positions.tolist(), found.entropies, layers),
    )


def summarise_entropy(positions: list[int], found: list[np.ndarray], layers: int) -> Entropy:
    """Of entropies [heads, positions], layer after layer of one document after another."""
    values = np.stack(found).reshape(-1, layers, *found[0].shape)
    return Entropy(
        positions=positions,
        by_position=values.mean((0, 1, 2)).tolist(),
        by_layer=values.mean((0, 2, 3)).tolist(),
        by_head=values.mean((0, 3)).tolist(),
        mean=float(values.mean()),
    )


def summarise_decay(distances: list[int], found: Findings) -> Decay:
    """Of the scores between tokens of the text, and of pairs put apart."""
    measured = [np.concatenate([layer[at] for layer in found.scores]) for at in range(len(distances))]
    scores = _joined([turned.scores for turned in found.turned])
    visible = found.turned[0].visible.numpy()
    falls = scores[:, 1:] < scores[:, :-1]
    falling = [share(falls[:, at]) if visible[at] and visible[at + 1] else None for at in range(len(distances) - 1)]
    rope = _against([turned.bound_rope for turned in found.turned], scores, visible)
    coca = _against([turned.bound_coca for turned in found.turned], scores, visible)
    return Decay(
        distances=distances,
        measured=curve(measured),
        turned=curve([scores[:, at] if visible[at] else scores[:0, at] for at in range(len(distances))]),
        falling=falling,
        falling_mean=mean_of_shares(falling),
        bound_rope=rope.mean,
        bound_coca=coca.mean,
        above_rope=rope.above,
        above_coca=coca.above,
    )


class _Bound(NamedTuple):
    """The mean of a bound, and the share of scores beyond their own, by distance; None where there is no bound."""

    mean: list[float] | None
    above: list[Share] | None


def _against(parts: list[Tensor | None], scores: np.ndarray, visible: np.ndarray) -> _Bound:
    known = [part for part in parts if part is not None]
    if not known:
        return _Bound(None, None)
    bounds = _joined(known)
    above = np.abs(scores) > bounds * (1 + ROUNDING)
    return _Bound(
        bounds.mean(axis=0).tolist(), [share(above[:, at]) if visible[at] else None for at in range(len(visible))]
    )


def _joined(parts: list[Tensor]) -> np.ndarray:
    """[pairs, heads, distances] each -> [all pairs and heads, distances]."""
    return torch.cat([part.flatten(0, 1) for part in parts]).numpy()


def _stored(x: Tensor, dtype: type[np.floating]) -> np.ndarray:
    return x.double().cpu().numpy().astype(dtype)


def _on_host(turned: Turned) -> Turned:
    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.cpu()

    return Turned(turned.scores.cpu(), turned.visible.cpu(), moved(turned.bound_rope), moved(turned.bound_coca))


PROTOCOL = (
    "the model reads the first l tokens of each document, positions counted from 0, no token added; Theta_j is the "
    "angle from k_j to q_j, counterclockwise, before rotation, in (-pi, pi]; a pair of tokens is a query and a key that "
    "it sees, drawn uniformly; anomalous: Theta_j below 0; borders: distances at which Theta_j + r theta_j reaches 0 "
    "(k, anomalous pairs alone), pi (-q) and 2 pi (q); scores are scaled and with their bias, as softmax takes them; "
    "turned: the same q and k with the query at the last position; entropy in nats"
)
DOCUMENTS = 4


@dataclass(frozen=True)
class Analysis:
    """The same documents and samples for every subject."""

    documents: Documents
    lengths: tuple[int, ...]
    sampling: Sampling

    def empty(self, header: Header) -> AnalysisResult:
        """As in `running.Measurement`."""
        protocol = AnalysisProtocol(text=PROTOCOL, quantiles=list(QUANTILES), **vars(self.sampling))
        return AnalysisResult(
            **header.fields(), protocol=protocol, documents=self.documents.record(), results=[], missing=[]
        )

    def measure(self, subject: Subject, store: Store[AnalysisResult]) -> None:
        """Short lengths first; the plots are drawn again after each."""
        remedy = "leave the length out, lower --pairs or use --dtype bfloat16"
        for length in sorted(self.lengths):
            at = f"length {length}"
            if store.has((length,)):
                continue
            with noting_missing(store, at, remedy):
                with measured(subject.device) as meter:
                    cell = analyse(subject.model, self.documents.arrays, length, self.sampling)
                store.put(cell, Cost.of(at, meter, length * len(self.documents.arrays)))
        if store.path is not None and store.result.results:
            draw_files(store.result, store.path)

    def table(self, result: AnalysisResult) -> str:
        """As in `running.Measurement`."""
        header = ["length", "anomalous", "of these beyond training", "undefined", "score falls", "entropy, nats"]
        place = f"{result.documents.count} documents, {result.protocol.pairs} pairs of tokens"
        head = f"{result.label}: trained at {result.checkpoint.seq_length}, {place}"
        return f"{head}\n\n{format_table(header, [_row(cell) for cell in result.results])}\n"


def _row(cell: LengthAnalysis) -> list[str]:
    angles, borders = cell.angles, cell.borders
    anomalous = angles.anomalous if angles is not None else None
    beyond = borders.k.beyond_training if borders is not None else None
    of_these = None if not anomalous or beyond is None else beyond / anomalous
    undefined = angles.undefined if angles is not None else None
    numbers = [anomalous, of_these, undefined, cell.decay.falling_mean, cell.entropy.mean]
    return [str(cell.length), *("-" if number is None else f"{number:.3f}" for number in numbers)]


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add_subject_options(parser)
    add_document_options(parser)
    parser.set_defaults(num_documents=DOCUMENTS)
    add, default = parser.add_argument, Sampling()
    lengths = "tokens that the model reads at a time; a length beyond the training length shows what becomes of it"
    add("--lengths", required=True, type=int_list, metavar="N,N,...", help=lengths)
    pairs = f"pairs of tokens whose angles are taken, over all documents; default {default.pairs}"
    add("--pairs", type=positive_int, default=default.pairs, metavar="N", help=pairs)
    queries = f"positions in a document whose entropy and scores are taken; default {default.queries}"
    add("--queries", type=positive_int, default=default.queries, metavar="N", help=queries)
    add("--seed", type=whole_number, default=default.seed, help="of the draw of the pairs")


def run(args: Namespace) -> int:
    """Analyses every variant; returns the exit status. Raises EvaluationError for lengths that cannot be."""
    if len(set(args.lengths)) != len(args.lengths) or min(args.lengths) < 2:
        raise EvaluationError(f"--lengths {','.join(map(str, args.lengths))}: name lengths of at least 2, each once")

    def begin(source: EvaluatedCheckpoint) -> Analysis:
        documents = read_subject_documents(args, source, max(args.lengths))
        return Analysis(documents, tuple(args.lengths), Sampling(args.pairs, args.queries, args.seed))

    return run_subjects(args, "analyse", begin)


ANALYSE = Task("angles, borders, decay and entropy of a checkpoint's attention", add_arguments, run)
