"""The grid of ranks."""

from pathlib import Path
from typing import Any

import pytest

from megatron_coca.config import BatchSizes, ConfigError, ParallelConfig, load_config
from megatron_coca.training.topology import Topology, effective_stage, rounded_sum, zero_section

ROOT = Path(__file__).parents[3]


def parallel(pipe: int = 0, tensor: int = 1, sequence: int = 1) -> ParallelConfig:
    return ParallelConfig(pipe_parallel_size=pipe, model_parallel_size=tensor, sequence_parallel_size=sequence)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (0, 2, 1), (0, 1, 4), (2, 3, 2)])
def test_every_place_is_taken_once(sizes: tuple[int, int, int]) -> None:
    topology = Topology.of(parallel(*sizes), 24)
    assert topology.world_size == 24
    assert topology.layout() == {
        "pipe": max(1, sizes[0]),
        "data": topology.data,
        "tensor": sizes[1],
        "sequence": sizes[2],
    }
    assert len({topology.coordinates(rank) for rank in range(24)}) == 24


def test_neighbours_share_a_model() -> None:
    """DeepSpeed's meshes put data ranks outside tensor and sequence ranks, and pipelines put stages outside both."""
    topology = Topology.of(parallel(tensor=2), 6)
    assert [topology.coordinates(rank).data for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [topology.coordinates(rank).tensor for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    topology = Topology.of(parallel(pipe=2), 6)
    assert [topology.coordinates(rank).pipe for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_ranks_that_share_activations_draw_the_same_numbers() -> None:
    topology = Topology.of(parallel(tensor=2, sequence=2), 8)
    streams = {topology.coordinates(rank)._replace(tensor=0): set[int]() for rank in range(8)}
    for rank in range(8):
        streams[topology.coordinates(rank)._replace(tensor=0)].add(topology.random_stream(rank))
    assert all(len(found) == 1 for found in streams.values()) and len(set.union(*streams.values())) == 4


def test_rings_of_ranks() -> None:
    """The ranks that divide heads are consecutive; the metadata of a run without rings is what it was."""
    topology = Topology.of(ParallelConfig(sequence_parallel_size=2, context_parallel_size=3), 12)
    assert (topology.data, topology.sequence_ranks) == (2, 6)
    assert topology.layout() == {"pipe": 1, "data": 2, "tensor": 1, "sequence": 2, "context": 3}
    assert [topology.coordinates(rank).data for rank in range(12)] == [0] * 6 + [1] * 6
    assert len({topology.random_stream(rank) for rank in range(12)}) == 12
    with pytest.raises(ConfigError, match=r"x context_parallel_size 3 = 6 does not divide 8 processes"):
        Topology.of(ParallelConfig(sequence_parallel_size=2, context_parallel_size=3), 8)


def test_ranks_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match=r"pipe_parallel_size 2 x model_parallel_size 2 .* = 4 .*divide 6"):
        Topology.of(parallel(2, 2), 6)


@pytest.mark.parametrize(("precision", "stage"), [("bfloat16", 2), ("fp16", 1), ("fp32", 1)])
def test_gradients_summed_in_float32(precision: str, stage: int) -> None:
    """DeepSpeed's stage 1 would use an optimizer for bfloat16 that checkpoints do not support."""
    keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "precision": precision}
    config = load_config([], keys | {"zero_stage": 1, "data_types": {"grad_accum_dtype": "fp32"}})
    assert effective_stage(config, 2) == stage


ZERO = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "precision": "bfloat16"}


@pytest.mark.parametrize(
    ("keys", "accumulation", "warns"),
    [
        ({}, 16, True),
        ({}, 15, False),
        ({"precision": "fp32"}, 256, False),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 256, False),
        ({"pipe_parallel_size": 2}, 64, True),
    ],
)
def test_long_sums_in_bfloat16_are_warned_of(keys: dict[str, Any], accumulation: int, warns: bool) -> None:
    config = load_config([], ZERO | keys)
    note = rounded_sum(config, BatchSizes(1, accumulation, accumulation))
    assert (note is not None) is warns
    if note is not None:
        assert f"of {accumulation} micro-batches" in note and ("data_types" in note) is not bool(keys)


@pytest.mark.parametrize(("cluster", "gpus"), [("gpu1", 1), ("a100x8", 8), ("a100x32", 32), ("slurm", 32)])
def test_no_configured_cluster_sums_many_gradients_in_bfloat16(cluster: str, gpus: int) -> None:
    config = load_config([ROOT / "configs/350M/roformer_coca.yml", ROOT / f"configs/cluster/{cluster}.yml"])
    assert rounded_sum(config, config.batch.resolve(gpus)) is None


@pytest.mark.parametrize(
    ("keys", "ranks", "cuda", "overlaps"),
    [
        ({"zero_stage": 1}, 8, True, True),
        ({"zero_stage": 2}, 8, True, True),
        ({"zero_stage": 1}, 8, False, False),
        ({"zero_stage": 1}, 1, True, False),
        ({"zero_stage": 3}, 8, False, True),
        ({"zero_stage": 1, "pipe_parallel_size": 2}, 8, True, False),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, 8, True, False),
        ({"zero_optimization": {"stage": 1, "overlap_comm": False}}, 8, True, False),
    ],
)
def test_gradients_are_reduced_during_the_backward_pass(
    keys: dict[str, Any], ranks: int, cuda: bool, overlaps: bool
) -> None:
    """If there are streams and other ranks, if DeepSpeed supports it, and unless the configuration says otherwise."""
    assert zero_section(load_config([], ZERO | keys), ranks, cuda)["overlap_comm"] is overlaps


@pytest.mark.parametrize(("ranks", "size"), [(2, 30_000_000), (64, 64_000_000), (4096, 200_000_000)])
def test_buckets_grow_with_the_ranks(ranks: int, size: int) -> None:
    assert zero_section(load_config([], ZERO | {"zero_stage": 1}), ranks, cuda=True)["reduce_bucket_size"] == size
    given = {"stage": 1, "reduce_bucket_size": 7}
    assert zero_section(load_config([], ZERO | {"zero_optimization": given}), ranks, True)["reduce_bucket_size"] == 7


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_copies_no_gradients_to_a_buffer(ranks: int) -> None:
    """It reduces nothing. A given key holds."""
    assert zero_section(load_config([], ZERO | {"zero_stage": 1}), ranks, True)["contiguous_gradients"] is (ranks > 1)
    given = {"stage": 1, "contiguous_gradients": ranks == 1}
    config = load_config([], ZERO | {"zero_optimization": given})
    assert zero_section(config, ranks, True)["contiguous_gradients"] is (ranks == 1)
