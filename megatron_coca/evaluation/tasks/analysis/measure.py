"""`megatron-coca evaluate analyse`: initial angles, score decay and entropy of attention, by length."""

import math
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_coca.attention.backends.reference import with_sinks
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.config.model import GLOBAL
from megatron_coca.evaluation import distance_sweep
from megatron_coca.evaluation.attention_maps import observed, row_scores
from megatron_coca.evaluation.distance_sweep import DistanceSweep, SweptScores
from megatron_coca.evaluation.documents import read_subject_documents
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, Show, measured
from megatron_coca.evaluation.subject import Evaluation, noting_missing
from megatron_coca.evaluation.tasks.analysis.task import (
    AnalysisProtocol,
    AnalysisResult,
    Angles,
    Border,
    Borders,
    Decay,
    Entropy,
    LengthAnalysis,
    MaybeShare,
)
from megatron_coca.evaluation.window_progress import WindowProgress
from megatron_coca.model import GPT

COLLINEAR = 1e-9
"""Angle in radians below which two directions count as equal. If a key is a product u q, float64 rounding changes its
angle to q by 1e-16 radians. Angles after a float32 projection are at least a thousand times this limit."""
NEAR = 16
"""Every distance up to this value is sampled."""
PER_OCTAVE = 4
"""Number of sampled distances in each doubling beyond `NEAR`."""
SWEPT_AT_ONCE = 1 << 22
"""Largest number of elements of the operands that a distance sweep has in memory at once."""
SCORES_AT_ONCE = 1 << 24
"""Largest number of scores in memory at once for entropies. Memory thus does not grow with the square of the length."""


def draw_pairs(length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw positions m of queries and n <= m of keys, [count] int64 each.

    The `count` pairs are distinct and uniform over all pairs that a causal model of `length` tokens scores. If there
    are at most `count` such pairs, return all of them in random order.
    """
    total = length * (length + 1) // 2
    chosen = np.random.default_rng(seed).choice(total, size=min(count, total), replace=False)
    # Pair number p is in the last row m with m (m + 1) / 2 <= p; the square root is off by at most one.
    rows = ((np.sqrt(8.0 * chosen + 1) - 1) / 2).astype(np.int64)
    rows += (rows + 1) * (rows + 2) // 2 <= chosen
    rows -= rows * (rows + 1) // 2 > chosen
    return torch.from_numpy(rows), torch.from_numpy(chosen - rows * (rows + 1) // 2)


def spread(first: int, last: int, count: int) -> Tensor:
    """Return at most `count` different integers from `first` to `last`, both included, evenly spaced, as int64."""
    return torch.linspace(first, last, min(count, last - first + 1), dtype=torch.float64).round().long().unique()


def log_distances(length: int) -> list[int]:
    """Return 0, 1, ... up to 16, then four distances in each doubling, up to length - 1."""
    octaves = max(0.0, np.log2(max(length - 1, 1) / NEAR))
    steps = np.arange(1, int(octaves * PER_OCTAVE) + 1)
    far = np.round(NEAR * 2.0 ** (steps / PER_OCTAVE)).astype(int).tolist()
    return sorted({distance for distance in [*range(NEAR + 1), *far, length - 1] if 0 <= distance < length})


def row_entropies(inputs: AttentionInputs, queries: Tensor) -> Tensor:
    """Return the entropy in nats of each query's attention weights, including the weight of a sink: [heads, n].

    The queries are processed in chunks.
    """
    scores_per_query = inputs.query.shape[1] * inputs.value.shape[2]
    entropies = []
    for chunk in queries.split(max(1, SCORES_AT_ONCE // scores_per_query)):
        weights = with_sinks(row_scores(inputs, chunk)[:1], inputs.sinks)[0].softmax(dim=-1)
        entropies.append(torch.special.entr(weights).sum(dim=-1))
    return torch.cat(entropies, dim=1)


def analyse(
    model: GPT,
    documents: Sequence[np.ndarray],
    length: int,
    protocol: AnalysisProtocol,
    layer_type: str = GLOBAL,
    title: str = "",
) -> LengthAnalysis:
    """Analyse the layers of one type on the first `length` tokens of each document. `model` is in evaluation mode.

    Documents are int64 arrays with at least `length` tokens. `title` is shown with the progress. Each layer counts as a
    fraction of a window there.

    Memory grows linearly with `length`, and with `protocol.pairs` times layers, heads and rotated feature pairs.
    """
    device = next(model.parameters()).device
    distances = log_distances(length)
    method, encoding = model.methods[layer_type], model.encodings()[layer_type]
    layers = [layer for layer in model.modules() if isinstance(layer, SelfAttention) and layer.method is method]
    sweep = DistanceSweep(encoding, distances, length, device)
    positions = spread(0, length - 1, protocol.queries)
    # Samples of all layers, document by document.
    angles: list[np.ndarray] = []  # each [heads, pairs, d/2] float32
    entropies: list[np.ndarray] = []  # each [heads, positions] float64
    swept: list[SweptScores] = []

    def visit(q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
        layer = layers[len(entropies) % len(layers)]  # the layers are visited in order, per document
        factor = None if layer.position_factor is None else layer.position_factor().double()
        offset = None if layer.position_offsets is None else layer.position_offsets().double()
        entropies.append(row_entropies(inputs, positions).double().cpu().numpy())
        q, k = q[0][:, m], k[0][:, n]
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        if method.name in distance_sweep.ROTATED_FORMS:
            angles.append(distance_sweep.initial_angles(method, q, k, offset).float().cpu().numpy())
        q, k = (x[:, : protocol.queries].transpose(0, 1) for x in (q, k))
        chunk = max(1, SWEPT_AT_ONCE // (q.shape[1] * q.shape[2] * len(distances)))
        for queries, keys in zip(q.split(chunk), k.split(chunk), strict=True):
            swept.append(sweep.scores(queries, keys, inputs.bias, factor, offset))
        progress.read(1 / len(layers), length / len(layers))

    progress = WindowProgress(title or f"length {length}", len(documents), length * len(documents))
    with torch.no_grad(), progress, observed(model, visit, method):
        for number, tokens in enumerate(documents):
            pairs = max(1, len(range(number, protocol.pairs, len(documents))))
            m, n = (x.to(device) for x in draw_pairs(length, pairs, protocol.seed + number))
            model.hidden_states(torch.from_numpy(tokens[None, :length]).to(device))
    summary, borders, count = None, None, len(layers)
    if angles:
        theta = np.stack([np.concatenate(angles[layer::count], axis=1) for layer in range(count)])
        frequencies = distance_sweep.rotary_frequencies(encoding, length).numpy()
        summary, borders = summarise_angles(theta, frequencies, method.training_length)
    by_layer = np.stack(entropies).reshape(-1, count, *entropies[0].shape)  # [documents, layers, heads, positions]
    entropy = Entropy(
        positions=positions.tolist(),
        by_position=by_layer.mean((0, 1, 2)).tolist(),
        by_head=by_layer.mean((0, 3)).tolist(),
        mean=float(by_layer.mean()),
    )
    return LengthAnalysis(
        length=length,
        documents=len(documents),
        angles=summary,
        borders=borders,
        decay=summarise_decay(distances, swept),
        entropy=entropy,
    )


def _share(holds: np.ndarray, among: np.ndarray | None = None) -> MaybeShare:
    taken = holds if among is None else holds[among]
    return float(taken.mean()) if taken.size else None


def summarise_angles(theta: np.ndarray, frequencies: np.ndarray, training_length: int) -> tuple[Angles, Borders]:
    """Summarise angles [layers, heads, samples, d/2], which are NaN if undefined.

    The angles grow by `frequencies` [d/2] radians per token of distance.
    """
    defined, anomalous = ~np.isnan(theta), theta < -COLLINEAR
    layers, heads, *_ = theta.shape
    angles = Angles(
        undefined=_share(~defined),
        collinear=_share(np.abs(theta) <= COLLINEAR, defined),
        anomalous=_share(anomalous, defined),
        anomalous_by_head=[
            [_share(anomalous[layer, head], defined[layer, head]) for head in range(heads)] for layer in range(layers)
        ],
        largest=float(np.nanmax(np.abs(theta))) if defined.any() else None,
    )
    # Magnitudes j and j + d/2 may share a frequency.
    frequencies = np.tile(frequencies, theta.shape[-1] // len(frequencies))
    beyond = anomalous & (-theta.astype(np.float64) / frequencies > training_length)
    return angles, Borders(k=Border(beyond_training=_share(beyond, defined)))


def summarise_decay(distances: list[int], swept: list[SweptScores]) -> Decay:
    """Return the share of falling scores by distance; None for a distance at which the method hides keys."""
    scores, visible = torch.cat([part.scores.flatten(0, 1) for part in swept]).numpy(), swept[0].visible.numpy()
    falls = scores[:, 1:] < scores[:, :-1]
    falling = [_share(falls[:, at]) if visible[at] and visible[at + 1] else None for at in range(len(distances) - 1)]
    known = [value for value in falling if value is not None]
    falling_mean = math.fsum(known) / len(known) if known else None
    return Decay(distances=distances, falling=falling, falling_mean=falling_mean, **_changes(scores, visible))


def _changes(scores: np.ndarray, visible: np.ndarray) -> dict[str, list[float | None]]:
    """Return the mean and quartiles of a score's change since distance 0. They are None where the keys are hidden."""
    changes = scores - scores[:, :1]

    def shown(values: np.ndarray) -> list[float | None]:
        return [float(value) if seen else None for value, seen in zip(values, visible, strict=True)]

    low, high = np.quantile(changes, [0.25, 0.75], axis=0)
    return {"change": shown(changes.mean(axis=0)), "low": shown(low), "high": shown(high)}


PROTOCOL = (
    "the model reads the first l tokens of each document, positions counted from 0, no token added; Theta_j is the "
    "angle from k_j to q_j, counterclockwise, before rotation, in (-pi, pi]; a pair of tokens is a query and a key "
    "that it sees, drawn uniformly; anomalous: Theta_j below 0; k: the distance at which Theta_j + r theta_j is 0, "
    "of anomalous pairs; falling: scores, scaled and with their bias, of the same q and k with the query at the last "
    "position; entropy in nats"
)
REMEDY = "remove this length, lower --pairs, or use --dtype bfloat16"


def run(args: Namespace, show: Show) -> int:
    if len(set(args.lengths)) != len(args.lengths) or min(args.lengths) < 2:
        raise EvaluationError(f"--lengths {','.join(map(str, args.lengths))}: must be distinct and at least 2 tokens")
    evaluation = Evaluation(subject_options(args), "analyse", show)
    documents = read_subject_documents(args, evaluation, max(args.lengths))
    samples = {"pairs": args.pairs, "queries": args.queries, "seed": args.seed}
    names = evaluation.opened.trained.layer_types
    chosen = GLOBAL if GLOBAL in names else next(iter(names))
    layers = chosen if len(names) > 1 else None
    protocol = AnalysisProtocol(text=PROTOCOL, layers=layers, **samples)
    fields = {"protocol": protocol, "documents": documents.record()}
    for subject, store in evaluation.variants(AnalysisResult, **fields):
        for length in sorted(args.lengths):
            at = f"length {length}"
            if store.get((length,)) is not None:
                continue
            with noting_missing(store, at, REMEDY):
                with measured(subject.device) as meter:
                    title = f"{subject.label}, {at}"
                    entry = analyse(subject.model, documents.arrays, length, protocol, chosen, title)
                store.put(entry, Cost.of(at, meter, length * len(documents.arrays)))
    return evaluation.status
