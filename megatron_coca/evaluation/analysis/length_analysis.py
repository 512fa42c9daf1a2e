"""The analysis of a model at one length: forward passes over documents, and samples of the attention of every layer."""

import math
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_coca.attention.backends.reference import with_sinks
from megatron_coca.attention.inputs import AttentionInputs, bias_of_pairs
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.config.model import GLOBAL
from megatron_coca.console import track
from megatron_coca.evaluation.analysis import distance_sweep
from megatron_coca.evaluation.analysis.attention_maps import in_band, observed, row_scores
from megatron_coca.evaluation.analysis.distance_sweep import DistanceSweep, SweptScores
from megatron_coca.evaluation.analysis.records import (
    AnalysisProtocol,
    AnalysisResult,
    Curve,
    Decay,
    Entropy,
    LengthAnalysis,
    Share,
)
from megatron_coca.evaluation.documents import read_subject_documents
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, measured
from megatron_coca.evaluation.subject import Evaluation, noting_missing
from megatron_coca.model import GPT
from megatron_coca.model.layers import soft_capped

NEAR = 16
"""Every distance up to this one is sampled."""
PER_OCTAVE = 4
"""Sampled distances in each doubling beyond."""
SWEPT_AT_ONCE = 1 << 22
"""Operands of a distance sweep that exist at a time."""
SCORES_AT_ONCE = 1 << 24
"""Scores that exist at a time for entropies, so that memory does not grow with the square of the length."""
ROUNDING = 1e-9
"""The relative excess of a score over its bound that is rounding: both are float64 sums of some ten terms."""


def draw_pairs(length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Positions m of queries and n <= m of keys, [count] int64 each: `count` different pairs out of all that a causal
    model of `length` tokens scores, uniformly drawn; all of them in random order if there are no more.
    """
    total = length * (length + 1) // 2
    chosen = np.random.default_rng(seed).choice(total, size=min(count, total), replace=False)
    # Pair number p is in row m where m (m + 1) / 2 <= p; the square root is off by one at most.
    rows = ((np.sqrt(8.0 * chosen + 1) - 1) / 2).astype(np.int64)
    rows += (rows + 1) * (rows + 2) // 2 <= chosen
    rows -= rows * (rows + 1) // 2 > chosen
    return torch.from_numpy(rows), torch.from_numpy(chosen - rows * (rows + 1) // 2)


def spread(first: int, last: int, count: int) -> Tensor:
    """At most `count` different integers from `first` to `last`, evenly spread with both ends, int64."""
    return torch.linspace(first, last, min(count, last - first + 1), dtype=torch.float64).round().long().unique()


def log_distances(length: int) -> list[int]:
    """0, 1, ... up to 16, then four in each doubling, up to length - 1."""
    octaves = max(0.0, np.log2(max(length - 1, 1) / NEAR))
    steps = np.arange(1, int(octaves * PER_OCTAVE) + 1)
    far = np.round(NEAR * 2.0 ** (steps / PER_OCTAVE)).astype(int).tolist()
    return sorted({distance for distance in [*range(NEAR + 1), *far, length - 1] if 0 <= distance < length})


def scores_at(inputs: AttentionInputs, queries: Tensor, distance: int) -> Tensor:
    """Scores of the queries at token indices `queries` [n] with the keys `distance` tokens before, [heads, visible],
    scaled and with bias and gates; queries whose key is hidden or before the first token are left out. Batch size 1.
    """
    queries = queries.to(inputs.value.device)
    keys = queries - distance
    first = torch.zeros_like(queries) if inputs.documents is None else inputs.documents.starts[0, queries]
    wide, visible = torch.promote_types(inputs.query.dtype, torch.float32), torch.zeros_like(queries, dtype=torch.bool)
    scores = torch.zeros(inputs.query.shape[1], len(queries), dtype=wide, device=queries.device)
    for segment in inputs.segments:
        kept = in_band(segment.band, queries - keys, keys - first) & (keys >= first)
        query, key = segment.query[0][:, queries[kept]], segment.key[0][:, keys[kept]]
        key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
        scores[:, kept] = soft_capped((query.to(wide) * key.to(wide)).sum(-1) * inputs.scale, inputs.softcap)
        visible |= kept
    if inputs.bias is not None:
        scores = scores + bias_of_pairs(inputs.bias, keys.new_full((1,), distance).to(wide), (queries - first).to(wide))
    if inputs.gates is not None:
        total = inputs.gates[0].double().cumsum(-1)
        scores = scores + (total[:, queries] - total[:, keys.clamp(min=0)]).to(wide)
    return scores[:, visible]


def row_entropies(inputs: AttentionInputs, queries: Tensor) -> Tensor:
    """Entropy in nats of the attention weights of each query, that of a sink among them, [heads, n], computed for some
    queries at a time.
    """
    scores_per_query = inputs.query.shape[1] * inputs.value.shape[2]
    entropies = []
    for chunk in queries.split(max(1, SCORES_AT_ONCE // scores_per_query)):
        weights = with_sinks(row_scores(inputs, chunk)[:1], inputs.sinks)[0].softmax(dim=-1)
        entropies.append(torch.special.entr(weights).sum(dim=-1))
    return torch.cat(entropies, dim=1)


def analyse(
    model: GPT, documents: Sequence[np.ndarray], length: int, protocol: AnalysisProtocol, layer_type: str = GLOBAL
) -> LengthAnalysis:
    """Analyses the layers of one type of `model`, in evaluation mode, on the first `length` tokens of `documents`
    (int64, at least that long).

    Memory grows with `length`, not with its square, and with `protocol.pairs` times layers, heads and rotated pairs.
    """
    device = next(model.parameters()).device
    distances = log_distances(length)
    method, encoding = model.methods[layer_type], model.encodings()[layer_type]
    layers = [layer for layer in model.modules() if isinstance(layer, SelfAttention) and layer.method is method]
    sweep = DistanceSweep(encoding, distances, length, device)
    positions = spread(0, length - 1, protocol.queries)
    # Samples of all layers of one document after another.
    angles: list[np.ndarray] = []  # each [heads, pairs, d/2] float32
    entropies: list[np.ndarray] = []  # each [heads, positions] float64
    scores: list[list[np.ndarray]] = []  # by distance, each [heads * queries] float32
    swept: list[SweptScores] = []

    def visit(q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
        learned = layers[len(entropies) % len(layers)].position_factor  # of one layer after another, in every document
        entropies.append(row_entropies(inputs, positions).double().cpu().numpy())
        by_distance = []
        for distance in distances:
            sampled = scores_at(inputs, spread(distance, length - 1, protocol.queries), distance)
            by_distance.append(sampled.float().cpu().numpy().ravel())
        scores.append(by_distance)
        q, k = q[0][:, m], k[0][:, n]
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        if method.name in distance_sweep.ROTATED_FORMS:
            angles.append(distance_sweep.initial_angles(method, q, k).float().cpu().numpy())
        q, k = (x[:, : protocol.queries].transpose(0, 1) for x in (q, k))
        chunk = max(1, SWEPT_AT_ONCE // (q.shape[1] * q.shape[2] * len(distances)))
        for queries, keys in zip(q.split(chunk), k.split(chunk), strict=True):
            swept.append(sweep.scores(queries, keys, inputs.bias, None if learned is None else learned().double()))

    with torch.no_grad(), observed(model, visit, method):
        for number, tokens in enumerate(track(documents, f"length {length}", len(documents), "documents")):
            pairs = max(1, len(range(number, protocol.pairs, len(documents))))
            m, n = (x.to(device) for x in draw_pairs(length, pairs, protocol.seed + number))
            model.hidden_states(torch.from_numpy(tokens[None, :length]).to(device))
    summary, borders, count = None, None, len(layers)
    if angles:
        theta = np.stack([np.concatenate(angles[layer::count], axis=1) for layer in range(count)])
        frequencies = distance_sweep.rotary_frequencies(encoding, length).numpy()
        summary = distance_sweep.summarise_angles(theta)
        borders = distance_sweep.summarise_borders(theta, frequencies, method.training_length, length)
    return LengthAnalysis(
        length=length,
        documents=len(documents),
        angles=summary,
        borders=borders,
        decay=summarise_decay(distances, scores, swept),
        entropy=_entropy(np.stack(entropies).reshape(-1, count, *entropies[0].shape), positions),
    )


def _entropy(values: np.ndarray, positions: Tensor) -> Entropy:
    """Return the means of entropies [documents, layers, heads, positions]."""
    return Entropy(
        positions=positions.tolist(),
        by_position=values.mean((0, 1, 2)).tolist(),
        by_layer=values.mean((0, 2, 3)).tolist(),
        by_head=values.mean((0, 3)).tolist(),
        mean=float(values.mean()),
    )


def summarise_decay(distances: list[int], sampled: list[list[np.ndarray]], swept: list[SweptScores]) -> Decay:
    """Scores by distance: `sampled` between tokens of the text, `swept` of the same pairs at all distances."""

    def joined(parts: list[Tensor]) -> np.ndarray:
        return torch.cat([part.flatten(0, 1) for part in parts]).numpy()

    def curve(samples: list[np.ndarray]) -> Curve:
        return Curve(
            mean=[distance_sweep.mean(values) for values in samples],
            mean_abs=[distance_sweep.mean(np.abs(values)) for values in samples],
            quantiles_abs=[distance_sweep.quantiles(np.abs(values)) for values in samples],
            pairs=[values.size for values in samples],
        )

    def bound(parts: list[Tensor | None]) -> tuple[list[float] | None, list[Share] | None]:
        """The mean of a bound, and the share of scores beyond their own, by distance; None where there is no bound."""
        known = [part for part in parts if part is not None]
        if not known:
            return None, None
        bounds = joined(known)
        above = np.abs(scores) > bounds * (1 + ROUNDING)
        return bounds.mean(axis=0).tolist(), [
            distance_sweep.share(above[:, at]) if visible[at] else None for at in indices
        ]

    indices = range(len(distances))
    scores, visible = joined([part.scores for part in swept]), swept[0].visible.numpy()
    falls = scores[:, 1:] < scores[:, :-1]
    falling = [distance_sweep.share(falls[:, at]) if visible[at] and visible[at + 1] else None for at in indices[:-1]]
    known = [value for value in falling if value is not None]
    bound_rope, above_rope = bound([part.bound_rope for part in swept])
    bound_coca, above_coca = bound([part.bound_coca for part in swept])
    return Decay(
        distances=distances,
        measured=curve([np.concatenate([layer[at] for layer in sampled]) for at in indices]),
        turned=curve([scores[:, at] if visible[at] else scores[:0, at] for at in indices]),
        falling=falling,
        falling_mean=math.fsum(known) / len(known) if known else None,
        bound_rope=bound_rope,
        bound_coca=bound_coca,
        above_rope=above_rope,
        above_coca=above_coca,
    )


PROTOCOL = (
    "the model reads the first l tokens of each document, positions counted from 0, no token added; Theta_j is the "
    "angle from k_j to q_j, counterclockwise, before rotation, in (-pi, pi]; a pair of tokens is a query and a key "
    "that it sees, drawn uniformly; anomalous: Theta_j below 0; borders: distances at which Theta_j + r theta_j "
    "reaches 0 (k, anomalous pairs alone), pi (-q) and 2 pi (q); scores are scaled and with their bias, as softmax "
    "takes them; turned: the same q and k with the query at the last position; entropy in nats"
)
REMEDY = "leave the length out, lower --pairs or use --dtype bfloat16"


def run(args: Namespace) -> int:
    if len(set(args.lengths)) != len(args.lengths) or min(args.lengths) < 2:
        raise EvaluationError(f"--lengths {','.join(map(str, args.lengths))}: give distinct lengths of at least 2")
    evaluation = Evaluation(subject_options(args), "analyse")
    documents = read_subject_documents(args, evaluation, max(args.lengths))
    samples = {"pairs": args.pairs, "queries": args.queries, "seed": args.seed}
    names = evaluation.opened.trained.layer_types
    chosen = args.layers or (GLOBAL if GLOBAL in names else next(iter(names)))
    if chosen not in names:
        raise EvaluationError(f"--layers {chosen}: no layers have this type; there are {', '.join(names)}")
    layers = chosen if len(names) > 1 else None
    protocol = AnalysisProtocol(text=PROTOCOL, quantiles=list(distance_sweep.QUANTILES), layers=layers, **samples)
    fields = {"protocol": protocol, "documents": documents.record()}
    for subject, store in evaluation.variants(AnalysisResult, **fields):
        for length in sorted(args.lengths):
            at = f"length {length}"
            if store.get((length,)) is not None:
                continue
            with noting_missing(store, at, REMEDY):
                with measured(subject.device) as meter:
                    cell = analyse(subject.model, documents.arrays, length, protocol, chosen)
                store.put(cell, Cost.of(at, meter, length * len(documents.arrays)))
    return evaluation.status
