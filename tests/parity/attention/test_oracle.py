"""The oracle against closed forms and against itself."""

import math

import pytest
import torch
from torch import Tensor

from tests.reference.clex import clex_frequencies
from tests.reference.dense import RelativeMap, Setting, attention, inverse_leak
from tests.reference.frequencies import frequencies, multiplier

HEAD_DIM, LENGTH = 8, 23
THETA = frequencies(HEAD_DIM)
ROTATED = ["rotary", "coca", "coca_strict"]
MAPS = ["rerope", "leaky_rerope", "self_extend", "lm_infinite", "streaming"]


def operands(heads: int = 2, kv_heads: int = 2, batch: int = 2, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, length, HEAD_DIM)] + 2 * [(batch, kv_heads, length, HEAD_DIM)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def softmax_of(scores: Tensor, v: Tensor) -> Tensor:
    """Causal attention from scaled scores, row by row."""
    rows = [torch.softmax(scores[..., m, : m + 1], -1)[..., None, :] @ v[..., : m + 1, :] for m in range(v.shape[2])]
    return torch.cat(rows, dim=-2)


def turned(x: Tensor, position: float) -> Tensor:
    """R_p x of one vector by its rotation matrix."""
    half, matrix = HEAD_DIM // 2, torch.zeros(HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    for j in range(half):
        cos, sin = math.cos(position * THETA[j]), math.sin(position * THETA[j])
        matrix[j, j], matrix[j, j + half], matrix[j + half, j], matrix[j + half, j + half] = cos, -sin, sin, cos
    return matrix @ x


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def by_matrices(name: str, q: Tensor, k: Tensor, places) -> Tensor:
    """Scores from rotation matrices; `places(m, n)` gives the two positions of a pair, None where it is hidden."""
    scores = torch.full((*q.shape[:2], LENGTH, LENGTH), -math.inf, dtype=torch.float64)
    collinear = torch.relu((k[..., : HEAD_DIM // 2] + k[..., HEAD_DIM // 2 :]) / 2)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape)).tolist():
        b, h, m, n = index
        place = places(m, n) if n <= m else None
        if place is None:
            continue
        query, key, u = q[b, h, m], k[b, h, n], collinear[b, h, n]
        if name == "rotary":
            score = turned(query, place[0]) @ turned(key, place[1])
        elif name == "coca":
            score = (query * turned(query, place[0])) @ turned(torch.cat((u, u)), place[1])
        else:
            squared = torch.cat((query.view(2, -1).square().sum(0), torch.zeros(HEAD_DIM // 2)))
            score = turned(squared, place[0]) @ turned(torch.cat((u, torch.zeros_like(u))), place[1])
        scores[b, h, m, n] = score / math.sqrt(HEAD_DIM)
    return scores


PLACES = {
    None: lambda m, n: (m, n),
    "rerope": lambda m, n: (m, n) if m - n < 5 else (5, 0),
    "leaky_rerope": lambda m, n: (m, n) if m - n < 5 else ((m + 5 * 3) / 4, n / 4),
    "self_extend": lambda m, n: (m, n) if m - n < 5 else (m // 3 + 5 - 1, n // 3),
    "lm_infinite": lambda m, n: (m, n) if m - n < 5 else (5, 0) if n < 2 else None,
    "streaming": lambda m, n: (m, n) if m - n < 5 else (min(m, 6), n) if n < 2 else None,
}


@pytest.mark.parametrize("map_type", PLACES)
@pytest.mark.parametrize("name", ROTATED)
def test_forms_and_maps_by_rotation_matrices(name: str, map_type: str | None) -> None:
    q, k, v = operands(heads=1, kv_heads=1, batch=1)
    relative = None if map_type is None else RelativeMap(map_type, 5, leak=4, group_size=3, sinks=2)
    expected = softmax_of(by_matrices(name, q, k, PLACES[map_type]), v)
    close(attention(name, q, k, v, THETA, setting=Setting(map=relative)), expected)


@pytest.mark.parametrize("map_type", MAPS)
@pytest.mark.parametrize("name", ROTATED)
def test_a_window_beyond_the_length_maps_nothing(name: str, map_type: str) -> None:
    q, k, v = operands()
    relative = RelativeMap(map_type, LENGTH, sinks=4)
    close(attention(name, q, k, v, THETA, setting=Setting(map=relative)), attention(name, q, k, v, THETA))


@pytest.mark.parametrize("name", ["rotary", "coca_strict"])
def test_streaming_is_the_cache_of_its_paper(name: str) -> None:
    """Row by row: plain attention of the last query of a cache of the first 2 and the last 5 keys."""
    q, k, v = operands()
    out = attention(name, q, k, v, THETA, setting=Setting(map=RelativeMap("streaming", 5, sinks=2)))
    for m in range(LENGTH):
        kept = sorted({*range(min(2, m + 1)), *range(max(0, m - 4), m + 1)})
        row = attention(name, q[:, :, m : m + 1], k[:, :, kept], v[:, :, kept], THETA)
        close(out[:, :, m : m + 1], row)


@pytest.mark.parametrize("centre", [0.0, 11.0])
def test_xpos_operands(centre: float) -> None:
    """q zeta^((m-c)/512) and k zeta^(-(n-c)/512), as the paper writes them, for any centre."""
    q, k, v = operands()
    zetas = [(2 * j + 0.4 * HEAD_DIM) / (1.4 * HEAD_DIM) for j in range(HEAD_DIM // 2)]
    zeta = torch.tensor(2 * zetas, dtype=torch.float64)
    growth = zeta ** ((torch.arange(LENGTH).double()[:, None] - centre) / 512)
    expected = attention("rotary", q * growth, k / growth, v, THETA)
    close(attention("xpos", q, k, v, THETA), expected)


@pytest.mark.parametrize("name", ["rotary", "coca", "coca_strict", "alibi", "xpos"])
def test_documents_are_separate_runs(name: str) -> None:
    q, k, v = operands()
    positions = torch.cat((torch.arange(9), torch.arange(LENGTH - 9)))
    documents = torch.tensor([[3] * 9 + [1] * (LENGTH - 9)] * 2)
    out = attention(name, q, k, v, THETA, positions, setting=Setting(documents=documents))
    for part in (slice(0, 9), slice(9, None)):
        close(out[:, :, part], attention(name, q[:, :, part], k[:, :, part], v[:, :, part], THETA))


@pytest.mark.parametrize("name", [*ROTATED, "alibi", "xpos"])
@pytest.mark.parametrize("map_type", [None, *MAPS])
def test_the_last_rows(name: str, map_type: str | None) -> None:
    q, k, v = operands()
    setting = Setting(map=map_type and RelativeMap(map_type, 5, sinks=3))
    full = attention(name, q, k, v, THETA, setting=setting)
    close(attention(name, q[:, :, -4:], k, v, THETA, setting=setting), full[:, :, -4:])


def test_grouped_heads_read_the_key_head_of_their_group() -> None:
    q, k, v = operands(heads=4, kv_heads=2)
    wide = attention("coca", q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), THETA)
    close(attention("coca", q, k, v, THETA), wide)


@pytest.mark.parametrize(("name", "invariant"), [("rotary", True), ("coca_strict", True), ("coca", False)])
def test_shift_invariance(name: str, invariant: bool) -> None:
    q, k, v = operands()
    moved = attention(name, q, k, v, THETA, torch.arange(LENGTH) + 1000)
    assert torch.allclose(moved, attention(name, q, k, v, THETA), rtol=1e-9, atol=1e-9) == invariant


def test_log_n_multiplies_the_logits_of_a_row() -> None:
    """For a score linear in q, scaling the logits of row m is scaling its query."""
    q, k, v = operands()
    growth = torch.tensor([math.log(m + 1) / math.log(8) for m in range(LENGTH)], dtype=torch.float64)[:, None]
    for scaling, factors in (("log_n", growth.clamp(min=1)), ("log_n_trained", growth)):
        setting = Setting(logit_scaling=scaling, training_length=8)
        expected = attention("rotary", q * factors, k, v, THETA)
        close(attention("rotary", q, k, v, THETA, setting=setting), expected)
    assert growth[7] == 1 and growth[8] > 1


def test_log_n_leaves_the_bias_alone() -> None:
    q, k, v = operands()
    setting = Setting(logit_scaling="log_n", training_length=8)
    zero = torch.zeros_like(q)
    close(attention("alibi", zero, k, v, THETA, setting=setting), attention("alibi", zero, k, v, THETA))


def test_biases() -> None:
    """On a query of zeros the weights are the softmax of the bias alone."""
    _, k, _ = operands(length=300, batch=1)
    table = torch.randn(32, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p, a = torch.tensor([0.5, -1.0]).double(), torch.tensor([0.0, 0.7]).double()
    buckets = {0: 0, 15: 15, 16: 16, 17: 16, 31: 21, 32: 21, 64: 26, 127: 31, 128: 31, 299: 31}
    formulas = {
        "kerple_log": lambda h, r: -max(p[h], 0.01) * math.log(1 + max(a[h], 0.01) * r),
        "kerple_power": lambda h, r: -max(a[h], 0.01) * r ** max(p[h], 0.01),
        "alibi": lambda h, r: -(2 ** (-4 * (h + 1))) * r,
        "rpe": lambda h, r: float(table[buckets[r], h]) * math.sqrt(HEAD_DIM),
    }
    setting = Setting(bias={"p": p, "a": a, "table": table})
    q, value = torch.zeros(1, 2, 1, HEAD_DIM, dtype=torch.float64), torch.eye(300, dtype=torch.float64)
    for name, formula in formulas.items():
        weights = attention(name, q, k, value.expand(1, 2, -1, -1), THETA, setting=setting)[0, :, 0].flip(-1)
        for h in range(2):
            for r in buckets:
                expected = formula(h, r) - formula(h, 0)
                assert float((weights[h, r] / weights[h, 0]).log()) == pytest.approx(float(expected), rel=1e-9)


def test_multiplier_squares_on_the_rotated_part_only() -> None:
    q, k, v = operands()
    theta = THETA[:2]
    scaled_k = torch.cat((k[..., :4] * 1.5**2, k[..., 4:]), dim=-1)
    for name in ROTATED:
        close(attention(name, q, k, v, theta, setting=Setting(multiplier=1.5)), attention(name, q, scaled_k, v, theta))


def test_frequencies_in_numbers() -> None:
    """Figures worked out by hand from the formulas."""
    plain = frequencies(64)
    alpha = (frequencies(64, rope_type="dynamic", factor=4.0, training_length=512, length=32768)[-1] / plain[-1]) ** -1
    assert float(alpha) == pytest.approx(4 * 64 - 3)
    for dim, length, low, high in ((64, 512, 3, 16), (128, 2048, 16, 41)):
        ratio = frequencies(dim, rope_type="yarn", factor=4.0, training_length=length) / frequencies(dim)
        assert ratio[low] == 1 and ratio[low + 1] < 1 and ratio[high - 1] > 0.25 and ratio[high] == 0.25
    for rope_type in ("ntk", "ntk_fixed", "ntk_mixed"):
        ratio = frequencies(64, rope_type=rope_type, factor=8.0) / plain
        assert float(ratio[-1]) == pytest.approx(1 / 8) and (ratio.diff() < 0).all()
    longest = frequencies(64, rope_type="dynamic_max", training_length=512, target_length=4096, length=10) / plain
    assert float(longest[-1]) == pytest.approx(1 / (4 * 8 - 3))
    rotations = frequencies(64, rope_type="yarn", ramp="rotations", factor=4.0, training_length=512) / plain
    turns = 512 * plain / (2 * math.pi)
    assert (rotations[turns >= 32] == 1).all() and torch.allclose(rotations[turns <= 1], torch.tensor(0.25).double())
    assert multiplier(64, rope_type="yarn", factor=4.0) == pytest.approx(1.1386294361)
    assert multiplier(64, rope_type="dynamic_yarn", training_length=512, length=100) == 1
    assert multiplier(64, rope_type="longrope", factor=8.0, training_length=512) == pytest.approx(math.sqrt(4 / 3))
    assert inverse_leak(4096, 512) == 1 / 16


def test_clex_without_a_network_is_ntk() -> None:
    """With W_down = 0 the solution is ln theta_ntk(t), base B alpha^(d/(d-2)), alpha = 2t - 1."""
    up, down = torch.randn(16, 32), torch.zeros(32, 16)
    for t in (1.0, 2.0, 5.0):
        expected = frequencies(32, rope_type="ntk", factor=2 * t - 1)
        torch.testing.assert_close(clex_frequencies(up, down, t), expected, rtol=1e-8, atol=0)


def test_clex_converges_with_its_step() -> None:
    generator = torch.Generator().manual_seed(0)
    up, down = (0.3 * torch.randn(shape, generator=generator) for shape in ((8, 16), (16, 8)))
    coarse, fine, finer = (clex_frequencies(up, down, 3.0, step=step) for step in (0.02, 0.01, 0.005))
    ratio = float((coarse - fine).norm() / (fine - finer).norm())
    assert 10 < ratio < 24, "the error of the method falls with the fourth power of the step"
