"""The attention analysis against float64 computed pair by pair: packed weights, the papers' formulas, the oracle."""

import cmath
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_coca.config import load_config
from megatron_coca.evaluation.attention_maps import observed
from megatron_coca.evaluation.tasks.analysis import measure as length_analysis
from megatron_coca.evaluation.tasks.analysis.measure import analyse, draw_pairs
from megatron_coca.evaluation.tasks.analysis.task import AnalysisProtocol, LengthAnalysis
from megatron_coca.model import GPT, build_model
from tests.reference import dense
from tests.reference.frequencies import frequencies

LAYERS, HEADS, WIDTH, TRAINED, LENGTH = 2, 2, 32, 12, 20
HEAD = WIDTH // HEADS
EVERYTHING = AnalysisProtocol(text="", pairs=10**6, queries=10**6, seed=1)
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
REROPE = {"relative_positions": {"type": "rerope", "window": 6}}
INFINITE = {"relative_positions": {"type": "lm_infinite", "window": 6, "sinks": 3}}
CHUNKED = {"relative_positions": {"type": "dual_chunk", "chunk_size": 7, "max_position": 10}}


def build(pos_emb: str, **keys: Any) -> GPT:
    """A float64 model whose weights are large enough to make attention uneven."""
    shape = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "seq_length": TRAINED}
    config = load_config([], shape | {"vocab_size": 50, "pos_emb": pos_emb} | keys)
    model = build_model(config, training=False).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def documents(count: int = 2) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 50, LENGTH) for _ in range(count)]


def projections(model: GPT, tokens: np.ndarray) -> list[tuple[Tensor, Tensor]]:
    """q and k [heads, length, head_dim] of every layer, unpacked by hand from what the linear layer gives."""
    packed: list[Tensor] = []
    hooks = [
        block.attention.query_key_value.register_forward_hook(lambda module, given, out: packed.append(out[0]))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(torch.from_numpy(tokens)[None])
    for hook in hooks:
        hook.remove()
    found = []
    for rows in packed:
        heads = [rows[:, 3 * HEAD * head : 3 * HEAD * (head + 1)] for head in range(HEADS)]
        found.append((torch.stack([x[:, :HEAD] for x in heads]), torch.stack([x[:, HEAD : 2 * HEAD] for x in heads])))
    return found


def theta(pos_emb: str, keys: dict[str, Any]) -> list[float]:
    return frequencies(HEAD, length=LENGTH, training_length=TRAINED, **keys.get("rope_scaling", {})).tolist()


def vectors(pos_emb: str, q: Tensor, k: Tensor, j: int) -> tuple[complex, complex]:
    """The papers' q_j and k_j of one query and one key [head_dim]."""
    query = complex(q[j], q[j + HEAD // 2])
    if pos_emb in ("coca", "coca_strict"):
        u = max(0.0, (float(k[j]) + float(k[j + HEAD // 2])) / 2)
        return query, complex(query.real * u, query.imag * u)
    return query, complex(k[j], k[j + HEAD // 2])


def angles_by_hand(pos_emb: str, model: GPT) -> dict[tuple[int, int, int], list[float | None]]:
    """Every Theta_j in (-pi, pi] by layer, head and j, over all pairs that a query sees."""
    found: dict[tuple[int, int, int], list[float | None]] = {}
    for tokens in documents():
        for layer, (q, k) in enumerate(projections(model, tokens)):
            for head in range(HEADS):
                for m in range(LENGTH):
                    for n in range(m + 1):
                        for j in range(HEAD // 2):
                            one, other = vectors(pos_emb, q[head, m], k[head, n], j)
                            angle = None if one * other == 0 else cmath.phase(one * other.conjugate())
                            found.setdefault((layer, head, j), []).append(angle)
    return found


@pytest.fixture(scope="module")
def rotary() -> tuple[GPT, LengthAnalysis]:
    model = build("rotary")
    return model, analyse(model, documents(), LENGTH, EVERYTHING)


def test_angles_are_those_of_all_pairs(rotary: tuple[GPT, LengthAnalysis]) -> None:
    model, cell = rotary
    by_hand, found = angles_by_hand("rotary", model), cell.angles
    assert found is not None and found.undefined == 0
    everything = [angle for angles in by_hand.values() for angle in angles]
    assert len(everything) == len(documents()) * LAYERS * HEADS * LENGTH * (LENGTH + 1) // 2 * HEAD // 2
    assert found.anomalous == pytest.approx(sum(angle < 0 for angle in everything) / len(everything), abs=1e-12)
    assert found.largest == pytest.approx(max(map(abs, everything)), rel=1e-6)
    for layer in range(LAYERS):
        for head in range(HEADS):
            own = [angle for j in range(HEAD // 2) for angle in by_hand[layer, head, j]]
            share = sum(angle < 0 for angle in own) / len(own)
            assert found.anomalous_by_head[layer][head] == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("keys", [{}, DYNAMIC], ids=["plain", "dynamic"])
def test_the_reach_of_the_anomaly_follows_from_the_angles(keys: dict[str, Any]) -> None:
    """Found by turning: the first r > 0 at which the angle of an anomalous pair, unwrapped, has reached 0."""
    model = build("rotary", **keys)
    by_hand, borders = angles_by_hand("rotary", model), analyse(model, documents(), LENGTH, EVERYTHING).borders
    assert borders is not None
    beyond = total = 0
    for j, speed in enumerate(theta("rotary", keys)):
        own = [angle for (_, _, plane), angles in by_hand.items() if plane == j for angle in angles]
        tau = [(2 * math.pi - angle % (2 * math.pi)) / speed for angle in own if angle % (2 * math.pi) > math.pi]
        beyond, total = beyond + sum(each > TRAINED for each in tau), total + len(own)
    assert 0 < beyond < total and borders.k.beyond_training == pytest.approx(beyond / total, abs=1e-12)


@pytest.mark.parametrize("pos_emb", ["coca", "coca_strict"])
def test_the_angles_of_coca_come_out_as_zero(pos_emb: str) -> None:
    model = build(pos_emb)
    cell, by_hand = analyse(model, documents(), LENGTH, EVERYTHING), angles_by_hand(pos_emb, model)
    assert cell.angles is not None and cell.borders is not None
    assert cell.angles.anomalous == 0 and cell.angles.collinear == 1 and cell.angles.largest < 1e-14
    everything = [angle for angles in by_hand.values() for angle in angles]
    assert cell.angles.undefined == pytest.approx(everything.count(None) / len(everything), abs=1e-12)
    assert 0.1 < cell.angles.undefined < 0.9, "both coefficients that are zero and others are in the test"
    assert cell.borders.k.beyond_training == 0


POLAR = {
    "pope": ("pope", {"pos_emb_options": {"offset": "uniform"}}),
    "shared magnitudes": ("polar", {"pos_emb_options": {"magnitude": "relu_mean", "power": 2, "offset": "uniform"}}),
    "shared frequencies": ("polar", {"pos_emb_options": {"frequencies": "pair"}}),
    "constant angle": ("coca_strict", {"pos_emb_options": {"initial_angle": -0.5}}),
    "random angles": ("coca_strict", {"pos_emb_options": {"initial_angle": "random"}}),
}


@pytest.mark.parametrize("name", POLAR)
def test_constant_angles_are_in_angles_and_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle scores a pair at all distances: its query and key stand at the ends of a sequence of that length."""
    pos_emb, keys = POLAR[name]
    model, options = build(pos_emb, **keys), keys["pos_emb_options"]
    pairs, swept, angles = draw_pairs(LENGTH, 3, 9), [], []
    of_sweep, of_angles = length_analysis.summarise_decay, length_analysis.summarise_angles
    monkeypatch.setattr(length_analysis, "summarise_decay", lambda d, parts: swept.extend(parts) or of_sweep(d, parts))
    monkeypatch.setattr(length_analysis, "summarise_angles", lambda t, *rest: angles.append(t) or of_angles(t, *rest))
    found = analyse(model, documents(1), LENGTH, AnalysisProtocol(text="", pairs=3, queries=3, seed=9))
    by_feature = pos_emb == "pope" or options.get("frequencies", "pair" if pos_emb == "coca_strict" else "feature")
    by_feature = by_feature in (True, "feature")
    softplus = pos_emb != "coca_strict" and options.get("magnitude") != "relu_mean"
    power = options.get("power", 2 if pos_emb == "coca_strict" else 1)
    speeds = frequencies(2 * HEAD if by_feature else HEAD, length=LENGTH, training_length=TRAINED)
    terms = HEAD if softplus or by_feature else HEAD // 2
    for layer, (block, (q, k)) in enumerate(zip(model.blocks, projections(model, documents(1)[0]), strict=True)):
        drawn = block.attention.position_offsets
        constant = torch.full((HEADS, terms), -options.get("initial_angle", 0) if drawn is None else 0.0).double()
        offset = constant if drawn is None else drawn().detach().double()
        polar = dense.Polar(softplus, power, by_feature, offset)
        layout = dense.lay_out(torch.arange(LENGTH, dtype=torch.float64)[None], LENGTH, dense.Setting())
        for number, (m, n) in enumerate(zip(*pairs, strict=True)):
            ends = q[:, m][:, None].expand(-1, LENGTH, -1), k[:, n][:, None].expand(-1, LENGTH, -1)
            expected = dense._polar_scores(ends[0][None], ends[1][None], speeds, layout, 1.0, polar)[0, :, -1]
            expected = expected.flip(-1)[:, found.decay.distances] / math.sqrt(HEAD)
            torch.testing.assert_close(swept[layer].scores[number], expected, atol=1e-9, rtol=0)
            seen = torch.tensor(angles[0][layer, :, number]).double()
            turned = torch.polar(torch.ones_like(offset), -offset)
            known = ~seen.isnan()
            turns = (torch.polar(torch.ones_like(seen), seen)[known], turned[known])
            torch.testing.assert_close(*turns, atol=1e-6, rtol=0)
            assert known.any() and angles[0].shape[-1] == terms


def scores_by_oracle(pos_emb: str, keys: dict[str, Any], model: GPT, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [heads, length, length] as softmax takes them, and which pairs are visible, by the oracle's formulas."""
    given = keys.get("relative_positions")
    relative = None if given is None else dense.RelativeMap(**given)
    multiplier = 0.1 * math.log(4) + 1 if keys == YARN else 1.0
    setting = dense.Setting(map=relative)
    pairs = dense.lay_out(torch.arange(LENGTH, dtype=torch.float64)[None], LENGTH, setting)
    speeds = torch.tensor(theta(pos_emb, keys), dtype=torch.float64)
    scores = dense.SCORES[pos_emb](q[None], k[None], speeds, pairs, multiplier) / math.sqrt(HEAD)
    if keys.get("logit_scaling") == "log_n":
        scores = scores * (torch.arange(1, LENGTH + 1).double().log() / math.log(TRAINED)).clamp(min=1)[:, None]
    if pos_emb in dense.BIASES:
        scores = scores + dense.BIASES[pos_emb](pairs.distance.clamp(min=0).double(), HEADS, HEAD, {})
    return scores[0], pairs.visible.expand(1, 1, LENGTH, LENGTH)[0, 0]


CASES = [
    ("rotary", {}),
    ("rotary", DYNAMIC),
    ("rotary", YARN),
    ("rotary", REROPE),
    ("rotary", INFINITE),
    ("rotary", CHUNKED),
    ("rotary", {"logit_scaling": "log_n"}),
    ("xpos", {}),
    ("coca", {}),
    ("coca", REROPE),
    ("coca", CHUNKED),
    ("coca_strict", DYNAMIC),
    ("alibi", {}),
    ("none", {}),
]


@pytest.mark.parametrize(("pos_emb", "keys"), CASES, ids=str)
def test_entropy_is_the_oracles(pos_emb: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every query; with memory for three at a time."""
    monkeypatch.setattr(length_analysis, "SCORES_AT_ONCE", 3 * HEADS * LENGTH)
    model = build(pos_emb, **keys)
    cell = analyse(model, documents(), LENGTH, EVERYTHING)
    entropies = np.zeros((len(documents()), LAYERS, HEADS, LENGTH))
    for number, tokens in enumerate(documents()):
        for layer, (q, k) in enumerate(projections(model, tokens)):
            scores, visible = scores_by_oracle(pos_emb, keys, model, q, k)
            for head in range(HEADS):
                for m in range(LENGTH):
                    weights = [math.exp(scores[head, m, n]) for n in range(m + 1) if visible[m, n]]
                    shares = [weight / sum(weights) for weight in weights]
                    entropies[number, layer, head, m] = -sum(each * math.log(each) for each in shares)
    entropy = cell.entropy
    assert cell.decay.distances == [*range(17), LENGTH - 1]
    assert entropy.positions == list(range(LENGTH))
    np.testing.assert_allclose(entropy.by_position, entropies.mean((0, 1, 2)), atol=1e-9)
    np.testing.assert_allclose(entropy.by_head, entropies.mean((0, 3)), atol=1e-9)
    assert entropy.mean == pytest.approx(entropies.mean(), abs=1e-9)


def score_by_hand(pos_emb: str, q: Tensor, k: Tensor, speeds: list[float], r: float) -> float:
    """The score of one pair of tokens at distance r, term by term; the query stands at LENGTH - 1."""
    pairs = [vectors(pos_emb, q, k, j) for j in range(HEAD // 2)]
    score = 0.0
    for (one, other), speed in zip(pairs, speeds, strict=True):
        if pos_emb == "coca":
            m, n = LENGTH - 1, LENGTH - 1 - r
            u, first, second = abs(other) / abs(one), one.real, one.imag
            (cm, sm), (cn, sn) = ((math.cos(at * speed), math.sin(at * speed)) for at in (m, n))
            score += u * (first**2 + second**2) * cm * cn
            score += u * ((second**2 - first**2) * cm * sn + 2 * first * second * sm * sn)
        else:
            score += (one * other.conjugate() * cmath.exp(1j * r * speed)).real
    return score / math.sqrt(HEAD)


@pytest.mark.parametrize(
    ("pos_emb", "keys", "factor"),
    [
        ("rotary", {}, 1.0),
        ("rotary", DYNAMIC, 1.0),
        ("rotary", YARN, (0.1 * math.log(4) + 1) ** 2),
        ("coca", {}, 1.0),
        ("coca_strict", {}, 1.0),
        ("coca_strict", {"logit_scaling": "log_n"}, math.log(LENGTH) / math.log(TRAINED)),
        ("coca_strict", {"logit_scaling": "ssmax"}, math.log(LENGTH)),
        ("coca_strict", {"logit_scaling": {"type": "ssmax", "bias": True}}, math.log(LENGTH)),
    ],
    ids=str,
)
def test_falling_scores_of_pairs_put_apart(
    pos_emb: str, keys: dict[str, Any], factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Tensor] = []
    summarise = length_analysis.summarise_decay

    def noted(distances: list[int], parts: list[Any]) -> Any:
        swept.extend(part.scores.flatten(0, 1) for part in parts)
        return summarise(distances, parts)

    monkeypatch.setattr(length_analysis, "summarise_decay", noted)
    model = build(pos_emb, **keys)
    protocol = AnalysisProtocol(text="", pairs=6, queries=3, seed=9)
    decay = analyse(model, documents(), LENGTH, protocol).decay
    speeds, samples = theta(pos_emb, keys), []
    for number, tokens in enumerate(documents()):
        pairs = draw_pairs(LENGTH, 3, 9 + number)
        for block, (q, k) in zip(model.blocks, projections(model, tokens), strict=True):
            learned = block.attention.position_factor
            own = torch.full((HEADS,), factor, dtype=torch.float64)
            if learned is not None:
                own = factor * learned.weight.detach().double()
                own += 0.0 if learned.bias is None else learned.bias.detach().double()
            for m, n in zip(*pairs, strict=True):
                for head in range(HEADS):
                    one, other = q[head, m], k[head, n]
                    by_distance = [score_by_hand(pos_emb, one, other, speeds, r) for r in decay.distances]
                    samples.append([float(own[head]) * score for score in by_distance])
    scores = np.array(samples)  # [samples, distances]
    np.testing.assert_allclose(torch.cat(swept), scores, atol=1e-9)
    np.testing.assert_allclose(decay.falling, (np.diff(scores, axis=1) < 0).mean(0))


@pytest.mark.parametrize("pos_emb", ["alibi", "none"])
def test_without_rotation_there_are_no_angles(pos_emb: str) -> None:
    cell = analyse(build(pos_emb), documents(), LENGTH, EVERYTHING)
    assert cell.angles is None and cell.borders is None
    assert cell.decay.falling_mean == {"alibi": 1.0, "none": 0.0}[pos_emb]


def test_watching_changes_nothing() -> None:
    model, ids = build("coca"), torch.from_numpy(documents(1)[0])[None]
    methods = [block.attention.method for block in model.blocks]
    with torch.no_grad():
        before = model(ids)
        seen: list[Tensor] = []
        watching = observed(model, lambda q, k, inputs: seen.append(q), model.methods["global"])
        with pytest.raises(RuntimeError, match="stop"), watching:
            assert torch.equal(model(ids), before)
            raise RuntimeError("stop")
        assert torch.equal(model(ids), before)
    assert len(seen) == LAYERS and [block.attention.method for block in model.blocks] == methods
