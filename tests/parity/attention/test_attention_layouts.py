"""Grouped heads, partial rotation, packed documents, shifted positions, late queries, narrow and wide windows: every
method and backend against the float64 oracle.
"""

from dataclasses import replace

import pytest
import torch

from megatron_coca import methods
from megatron_coca.attention.layer import LayerCache
from megatron_coca.attention.method import PositionEncoding
from tests.parity.attention_cases import (
    BACKENDS,
    CASES,
    CHOSEN,
    FAST,
    MAPS,
    SERVED,
    Layout,
    assert_as_exact_as_plain,
    check,
    error,
    exact,
    inputs_of,
    production,
    with_window,
)

EXACT = [(name, backend) for name, backend in CHOSEN if backend != "flex"]
ROTATED = [(name, backend) for name, backend in CHOSEN if methods.find("pos_emb", CASES[name].pos_emb).rotary]
MAPPED = [(name, backend) for name, backend in SERVED if name in MAPS]
DOCUMENTS = ((0,) * 30 + (1,) * 1 + (2,) * 50, (4,) * 64 + (3,) * 17)


def restarting(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Positions that begin at 0 in every document."""
    return tuple(index - ids.index(each) for index, each in enumerate(ids))


@pytest.mark.parametrize(("name", "backend"), CHOSEN)
def test_grouped_query_attention(name: str, backend: str) -> None:
    check(CASES[name], backend, Layout(65, kv_heads=2 if backend == "merge" else 1))


@pytest.mark.parametrize(("name", "backend"), ROTATED)
def test_partial_rotary(name: str, backend: str) -> None:
    check(replace(CASES[name], rotary_pct=0.25), backend, Layout(65))


@pytest.mark.parametrize("scaling", ["log_n", "log_n_trained"])
@pytest.mark.parametrize(("name", "backend"), EXACT)
def test_logit_scaling(name: str, backend: str, scaling: str) -> None:
    """Also on dimensions that are not rotated."""
    check(replace(CASES[name], logit_scaling=scaling), backend, Layout(70))
    if (name, backend) in ROTATED:
        check(replace(CASES[name], logit_scaling=scaling, rotary_pct=0.25), backend, Layout(50))


@pytest.mark.parametrize(("name", "backend"), CHOSEN)
def test_packed_documents(name: str, backend: str) -> None:
    """Rows with different boundaries, a document of one token, positions that restart."""
    positions = tuple(map(restarting, DOCUMENTS))
    check(CASES[name], backend, Layout(81, kv_heads=2, positions=positions, ids=DOCUMENTS))


@pytest.mark.parametrize(("name", "backend"), EXACT)
def test_packed_documents_with_running_positions(name: str, backend: str) -> None:
    """Bands, sinks and biases count tokens of the document whatever the positions say."""
    check(CASES[name], backend, Layout(81, ids=DOCUMENTS))


@pytest.mark.parametrize(("name", "backend"), EXACT)
def test_late_queries_in_packed_documents(name: str, backend: str) -> None:
    """The queries of the last 40 tokens: documents before them have none, one has some."""
    positions = tuple(map(restarting, DOCUMENTS))
    check(CASES[name], backend, Layout(81, queries=40, positions=positions, ids=DOCUMENTS))


@pytest.mark.parametrize("name", CASES)
def test_positions_that_do_not_start_at_zero(name: str) -> None:
    """A shift changes the scores of CoCA-Slack and of nothing else, as the table of forms declares; none in chunks,
    where positions count from the chunk's first token.
    """
    case, attend = CASES[name], BACKENDS["reference"].attend
    shifted = Layout(60, positions=tuple(range(1000, 1060)))
    if case.relative.get("type") == "self_extend":
        shifted = replace(shifted, positions=tuple(range(1002, 1062)))  # floor(1002/4) cuts groups elsewhere
    moved, true = production(case, shifted, torch.float64, attend), exact(case, shifted, torch.float64)
    for what in ("out", "q", "k", "v"):
        assert error(moved.all[what], true.all[what]) < 1e-9, what
    unmoved = production(case, Layout(60), torch.float64, attend)
    kind, shift_invariant = case.relative.get("type"), methods.find("pos_emb", case.pos_emb).shift_invariant
    by_length = case.scaling.get("rope_type") == "dynamic" or case.logit_scaling == "log_n"
    unchanged = kind == "dual_chunk" or (shift_invariant and kind != "self_extend" and not by_length)
    assert (error(moved.out, unmoved.out) < 1e-9) == unchanged


@pytest.mark.parametrize(("name", "backend"), FAST)
def test_positions_per_row(name: str, backend: str) -> None:
    check(CASES[name], backend, Layout(50, positions=(tuple(range(50)), tuple(range(7, 57)))))


@pytest.mark.parametrize(("queries", "kv_heads"), [(1, 1), (5, 4)])
@pytest.mark.parametrize(("name", "backend"), CHOSEN)
def test_queries_that_are_the_last_of_the_keys(name: str, backend: str, queries: int, kv_heads: int) -> None:
    check(CASES[name], backend, Layout(63, queries=queries, kv_heads=kv_heads))


@pytest.mark.parametrize("backend", ["sdpa", "merge"])
@pytest.mark.parametrize("name", ["rotary", "alibi", "rerope-coca"])
def test_late_queries_in_several_blocks(name: str, backend: str) -> None:
    """More queries than one block of a backend holds, after more keys than that."""
    if (name, backend) in SERVED:
        check(CASES[name], backend, Layout(800, queries=600, batch=1, kv_heads=2))


@pytest.mark.parametrize(
    ("window", "queries"), [(1, None), (1, 1), (2, 7), (2, None), (63, 7), (63, None), (64, 1), (500, None)]
)
@pytest.mark.parametrize(("name", "backend"), [pair for pair in MAPPED if pair in CHOSEN])
def test_windows(name: str, backend: str, window: int, queries: int | None) -> None:
    """The narrowest windows, one as long as the row, and wider ones, which leave no far pair."""
    check(with_window(CASES[name], window), backend, Layout(63, queries=queries))


@pytest.mark.parametrize(("sinks", "length"), [(0, 40), (1, 40), (50, 40), (50, 90)])
@pytest.mark.parametrize("backend", ["reference", "merge"])
@pytest.mark.parametrize(
    "name", ["lm_infinite-rotary", "lm_infinite-coca", "streaming-rotary", "streaming-coca_strict"]
)
def test_sinks(name: str, backend: str, sinks: int, length: int) -> None:
    """None, one, and more than there are keys out of the window."""
    case = CASES[name]
    case = replace(case, relative=dict(case.relative) | {"sinks": sinks})
    check(case, backend, Layout(length))


STAYING = [name for name in CASES if CASES[name].method.keys_stay(1)]


@pytest.mark.parametrize(("name", "rotated"), [*((name, False) for name in CASES), *((name, True) for name in STAYING)])
def test_cached_keys_give_the_operands_of_a_full_pass(name: str, rotated: bool) -> None:
    """Keys of earlier tokens, or K' of theirs where that stays, give the last rows of the oracle, under every map."""
    case, layout = CASES[name], Layout(63, queries=5)
    method, true = case.method, exact(case, layout, torch.float64)
    q, k, v = layout.operands(torch.float64)
    encoding, layer = PositionEncoding(method).train(case.training), LayerCache()
    bias = inputs_of(case, layout, (q, k, v), {}).bias
    cached = None
    for start, stop in ((0, 58), (58, 63)):  # the queries of the first part do not count
        new, seen = layout.place[start:stop], layout.place[:stop]
        frame = encoding(new, layout.scored, q.dtype, seen, of_new_keys=rotated)
        part = (k[:, :, start:stop], v[:, :, start:stop])
        own = {"bias": bias, "offset": case.learned().get("offset")}
        cached = method.prepare_cached(q if start else part[0], *part, frame, layer.append, **own)
    assert error(BACKENDS["reference"].attend(cached), true.out) < 1e-9


def test_the_measure_can_fail() -> None:
    """An error of one part in a hundred thousand is found."""
    layout = Layout(63)
    ours = production(CASES["rotary"], layout, torch.float32, lambda x: BACKENDS["sdpa"].attend(x) * 1.00001)
    with pytest.raises(AssertionError, match="of a plain run"):
        assert_as_exact_as_plain(CASES["rotary"], layout, torch.float32, ours)
