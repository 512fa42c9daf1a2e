"""The plan of a ring: all visible pairs are computed once, the ranks compute equally many, and unseen keys stay."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.inputs import CAUSAL, Band, documents_from_ids
from megatron_coca.attention.ring.plan import Division, RingPlan, ring_plan

RANKS = (1, 2, 3, 4)
BANDS = {
    "causal": (CAUSAL,),
    "window": (Band(high=3),),
    "two segments": (Band(high=5), Band(low=5)),
    "first keys": (Band(high=4), Band(4, None, first_keys=2)),
    "chunks": tuple(Band(*ends, chunk=7) for ends in ((0, 1), (1, 2), (2, None))),
}
IDS = torch.tensor([[0] * 7 + [1] * 20 + [2] + [3] * 9, [5] * 37])


def plans(length: int, ranks: int, bands: tuple[Band, ...], ids: Tensor | None = None) -> list[RingPlan]:
    documents = None if ids is None else documents_from_ids(ids)
    return [ring_plan(Division(length, ranks), rank, bands, documents) for rank in range(ranks)]


def visible(bands: tuple[Band, ...], ids: Tensor) -> Tensor:
    """Whether a segment scores a pair, [segments, rows, queries, keys]."""
    length = ids.shape[1]
    token, starts = torch.arange(length), documents_from_ids(ids).starts
    query, key = token[:, None] - starts[..., None], token - starts[..., None]
    found = []
    for band in bands:
        apart = band.apart(query, key)
        seen = (key >= 0) & (query >= key) & (apart >= band.low) & (apart < (band.high or length))
        found.append(seen & (key < (band.first_keys or length)))
    return torch.stack(found)


@pytest.mark.parametrize("length", [16, 37])
@pytest.mark.parametrize("ranks", RANKS)
def test_chunks_are_all_tokens_in_nearly_equal_parts(ranks: int, length: int) -> None:
    division = Division(length, ranks)
    chunks = [chunk for rank in range(ranks) for chunk in division.chunks(rank)]
    assert sorted(token for chunk in chunks for token in chunk) == list(range(length))
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    tokens = torch.arange(length).expand(2, -1)
    for rank in range(ranks):
        first, second = division.chunks(rank)
        held = division.held(tokens, rank)
        assert held.tolist() == [[*first, *second]] * 2 and held.shape[1] == division.tokens(rank)


@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("bands", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_visible_pair_is_in_one_piece(ranks: int, bands: tuple[Band, ...], documents: bool) -> None:
    length, ids = 37, IDS if documents else torch.zeros_like(IDS)
    counts = torch.zeros(len(bands), 2, length, length, dtype=torch.long)
    for plan in plans(length, ranks, bands, ids if documents else None):
        own = torch.tensor([token for chunk in plan.division.chunks(plan.rank) for token in chunk])
        for each in plan.rounds:
            keys = torch.tensor([token for tokens in each.received.ranges for token in tokens])
            for rows, pieces in zip(plan.groups, each.pieces, strict=True):
                for (segment, piece), block in product(pieces, range(1000)):
                    if block >= piece.blocks:
                        continue
                    query, key = piece.query + block * piece.step, piece.key + block * piece.step
                    square = torch.ones(piece.rows, piece.columns, dtype=torch.long)
                    square = {"full": square, "lower": square.tril(), "upper": square.triu()}[piece.shape]
                    queries, seen = own[query : query + piece.rows], keys[key : key + piece.columns]
                    for row in range(2) if rows is None else rows:
                        counts[segment, row].index_put_((queries[:, None], seen), square, accumulate=True)
    assert torch.equal(counts, visible(bands, ids).long())


@pytest.mark.parametrize("bands", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_receives_what_another_sends(ranks: int, bands: tuple[Band, ...]) -> None:
    found = plans(37, ranks, bands, IDS)
    for plan, step in product(found, range(ranks)):
        each = plan.rounds[step]
        assert each.target == (plan.rank + step) % ranks and found[each.source].rounds[step].target == plan.rank
        if step:
            assert each.received == found[each.source].rounds[step].sent


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_compute_equally_many_pairs(ranks: int) -> None:
    length = 64 * ranks
    pairs = [
        sum(
            {"full": piece.rows * piece.columns}.get(piece.shape, piece.rows * (piece.rows + 1) // 2) * piece.blocks
            for each in plan.rounds
            for _, piece in each.pieces[0]
        )
        for plan in plans(length, ranks, (CAUSAL,))
    ]
    assert pairs == [length * (length + 1) // 2 // ranks] * ranks


def test_causal_attention_sends_three_quarters_of_a_full_ring() -> None:
    """A rank reads one chunk of an earlier rank and both chunks of a later one."""
    found = plans(64, 4, (CAUSAL,))
    received = [[len(each.received) for each in plan.rounds[1:]] for plan in found]
    assert received == [[16, 16, 16], [8, 16, 16], [8, 8, 16], [8, 8, 8]]
    assert sum(map(sum, received)) == 3 * (4 * 3 * 16) // 4


def test_windows_skip_whole_rounds() -> None:
    """A window within a chunk reads the last keys of the chunk before, and no others."""
    for plan in plans(64, 4, (Band(high=5),)):
        assert [len(each.received) for each in plan.rounds[1:]] in ([4, 0, 4], [0, 0, 4], [4, 0, 0])
        assert not any(each.areas[0] for each in plan.rounds[1:] if not len(each.received))
    near_and_far = plans(64, 4, (Band(high=5), Band(low=5)))
    used = [[each.received.segments for each in plan.rounds[1:]] for plan in near_and_far]
    assert used[0] == [(1,), (1,), (0, 1)]  # K' of the near segment comes only from the chunk before


def test_documents_stop_messages() -> None:
    """No query sees a key of another document."""
    ids = torch.arange(64)[None] // 8
    assert all(len(each.received) == 0 for plan in plans(64, 4, (CAUSAL,), ids) for each in plan.rounds[1:])
    halves = torch.arange(64)[None] // 32  # in each half, the 4 chunks of 8 tokens need 0, 1, 2 and 3 others
    assert sum(len(each.received) for plan in plans(64, 4, (CAUSAL,), halves) for each in plan.rounds[1:]) == 96


def test_layers_share_a_plan() -> None:
    documents = documents_from_ids(IDS)
    made = [ring_plan(Division(37, 2), 0, BANDS[name], documents) for name in ("causal", "causal", "window")]
    assert made[0] is made[1] is not made[2]
    assert ring_plan(Division(37, 2), 0, (CAUSAL,), None) is ring_plan(Division(37, 2), 0, (CAUSAL,), None)
