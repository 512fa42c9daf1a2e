"""Tensor, sequence and context parallel ranks train like one process.

Many small runs share the processes of one launch. These processes run this file as a program.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.checkpoints.native.state import file_name, write_pieces
from megatron_coca.config import Config, load_config
from megatron_coca.data import Batch, DrawnPositions
from megatron_coca.model import build_model
from megatron_coca.training import randomness
from megatron_coca.training.engine import build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.topology import Topology
from tests.checkpoint_files import open_state
from tests.patience import patience

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STEPS, LENGTH, VOCABULARY, RATE = 2, 32, 96, 3e-3
RELATIVE = {"fp32": 1e-5, "bf16": 5e-3}
"""Of losses and gradient norms. Sums are taken in another order: 3e-6 was seen in float32. In bfloat16 partial sums are
rounded before they are added: 2e-3 was seen.
"""
MOMENT = 1e-3
"""Of the largest entry of a parameter's averaged gradient, in float32. Adam makes whole steps of gradients that are
nothing but rounding; a part of a gradient that is missing or counted twice differs by its half.
"""

KEYS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": VOCABULARY,
    "no_weight_tying": True,
    "pos_emb": "rotary",
    "rotary_pct": 0.5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "optimizer.params.lr": RATE,
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 4,
    "seed": 7,
}
LLAMA: dict[str, Any] = {
    "num_kv_heads": 2,
    "activation": "swiglu",
    "intermediate_size": 48,
    "norm": "rmsnorm",
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}
PACKED = {"reset_attention_mask": True, "eod_mask_loss": True}
Runs = Mapping[str, dict[str, Any]]
METHODS: Runs = {
    "rotary": {},
    "coca, packed documents, a loss mask": PACKED | {"pos_emb": "coca"},
    "coca_strict, checkpointed activations, parallel residual": {
        "pos_emb": "coca_strict",
        "checkpoint_activations": True,
        "gpt_j_residual": True,
    },
    "pope, grouped queries": LLAMA | {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}},
    "random angles": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}},
    "a bias by layer, grouped queries": LLAMA | {"pos_emb": "kerple_log"},
    "sinks, learned factors, gates of features": LLAMA
    | {"pos_emb": "coca", "sink_logits": True, "logit_scaling": "ssmax", "attention_output_gate": "feature"},
    "forgetting gates, packed documents, checkpointed activations": LLAMA
    | PACKED
    | {"pos_emb": "coca", "forgetting_gate": "fox", "checkpoint_activations": True},
    "chunks, a temperature": {
        "pos_emb": "coca",
        "attention_chunk_size": 7,
        "logit_scaling": {"type": "temperature", "period": 8},
    },
    "a shared bias, tied weights, gates of heads": {
        "pos_emb": "rpe",
        "no_weight_tying": False,
        "attention_output_gate": "head",
    },
    "ZeRO 3, norms of sums, a narrow embedding, tied weights": {
        "zero_stage": 3,
        "norm_position": "residual",
        "embedding_width": 8,
        "use_bias_in_output_head": True,
        "no_weight_tying": False,
    },
    "muP, grouped queries": LLAMA | {"pos_emb": "coca", "use_mup": True, "mup_base_hidden_size": 8},
    "ZeRO 3, muP": {"zero_stage": 3, "pos_emb": "coca", "use_mup": True, "mup_base_hidden_size": 8},
    "a chunked loss, packed documents": PACKED | {"loss_chunk_size": 5, "pos_emb": "alibi"},
    "learned positions": {"pos_emb": "learned"},
    "a relative map": {"relative_positions": {"type": "rerope", "window": 8}},
    "three segments, sinks": {
        "pos_emb": "coca",
        "sink_logits": True,
        "relative_positions": {"type": "dual_chunk", "chunk_size": 7, "max_position": 10},
    },
    "learned frequencies": {"rope_scaling": {"rope_type": "clex", "max_factor": 4}},
    "layers that differ": {
        "attention_config": [[["sliding", "global"], "all"]],
        "layer_types": {"sliding": {"pos_emb": "rpe", "sliding_window_width": 5}},
    },
    "heads by layer type": LLAMA
    | {
        "attention_config": [[["sliding", "global"], "all"]],
        "layer_types": {"sliding": {"sliding_window_width": 5}},
        "head_shapes": {"sliding": {"kv_channels": 12, "num_kv_heads": 4, "values_from_keys": False}},
        "values_from_keys": True,
        "value_norm": True,
        "layer_scale": True,
        "qk_norm": "head",
    },
    "ZeRO 3, FIRE, packed documents": LLAMA | PACKED | {"zero_stage": 3, "pos_emb": "fire"},
    "ZeRO 3, norms of heads, learned factors": LLAMA
    | {"zero_stage": 3, "pos_emb": "coca", "qk_norm": "head", "logit_scaling": {"type": "ssmax", "bias": True}},
    "ZeRO 3, three segments, sinks": {
        "zero_stage": 3,
        "pos_emb": "coca",
        "sink_logits": True,
        "relative_positions": {"type": "dual_chunk", "chunk_size": 7, "max_position": 10},
    },
    "ZeRO 2, STRING, a temperature": {
        "zero_stage": 2,
        "relative_positions": {"type": "string", "window": 9, "local": 4},
        "logit_scaling": {"type": "temperature", "period": 8},
    },
    "ZeRO 3, Sandwich, packed documents": PACKED | {"zero_stage": 3, "pos_emb": "sandwich"},
    "ZeRO 3, forgetting gates": {"zero_stage": 3, "pos_emb": "none", "forgetting_gate": "cable"},
    "ZeRO 3, coca": {"zero_stage": 3, "pos_emb": "coca"},
}
TENSOR_ONLY: Runs = {"hidden dropout": {"hidden_dropout": 0.1}}
"""Tensor ranks draw the masks of one process; those of a sequence draw their own."""

SEQUENCE_ONLY: Runs = {
    "norms of all heads together": {"qk_norm": "projection", "norm": "rmsnorm"},
    "GPT-NeoX's norm": {"use_qk_layernorm": True},
    "latents, packed documents, gates": PACKED
    | {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 8, "v_head_dim": 6, "pos_emb": "coca"}
    | {"rotary_pct": 1.0, "attention_output_gate": "feature", "forgetting_gate": "fox"},
    "ZeRO 3, latents, a relative map": {
        "zero_stage": 3,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "relative_positions": {"type": "rerope", "window": 8},
    },
}
"""Tensor ranks have some of the heads only, and no latents."""

RING_ONLY: Runs = {
    "gated attention units": {"pos_emb": "coca", "attention_config": ["gau", "global"], "gau_key_width": 8},
    "soft-capping": LLAMA | {"pos_emb": "coca", "attn_logit_softcapping": 4.0},
    "one key head, a window, packed documents": LLAMA | PACKED | {"num_kv_heads": 1, "sliding_window_width": 6},
    "LM-Infinite, bfloat16": {
        "precision": "bfloat16",
        "zero_stage": 1,
        "pos_emb": "coca",
        "relative_positions": {"type": "lm_infinite", "window": 6, "sinks": 2},
    },
}
"""Ranks of a ring have all heads."""

UNITS: dict[str, Any] = {"pos_emb": "coca", "attention_config": ["gau", "global"], "gau_key_width": 8}
"""Gated attention units, which neither tensor nor sequence ranks divide."""

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STAGES: Runs = {
    **{f"ZeRO {stage}": {"zero_stage": stage} | LLAMA | {"pos_emb": "kerple_log"} for stage in (1, 2, 3)},
    "ZeRO 3, nothing kept whole": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "ZeRO 2, no reduce-scatter": {"zero_optimization": {"stage": 2, "reduce_scatter": False}},
    **{f"ZeRO {stage}, offload": {"zero_optimization": {"stage": stage} | OFFLOAD} for stage in (1, 2, 3)},
    "ZeRO 3, parameters offloaded": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}} | OFFLOAD},
    **{f"bfloat16, ZeRO {stage}": {"precision": "bfloat16", "zero_stage": stage} for stage in (1, 2, 3)},
}
FOUR_RANKS: Runs = {
    name: METHODS[name] for name in ("rotary", "coca, packed documents, a loss mask", "ZeRO 3, coca")
} | {name: STAGES[name] for name in ("ZeRO 1", "ZeRO 2")}


def config_of(keys: Mapping[str, Any]) -> Config:
    return load_config([], [f"{name}={json.dumps(value)}" for name, value in (KEYS | keys).items()])


def batches(config: Config, step: int, place: int, copies: int) -> list[Batch]:
    """Of the samples of a step, those of one copy of the model; they follow from the step."""
    sizes, random = config.batch.resolve(copies), np.random.default_rng(step)
    tokens = random.integers(0, VOCABULARY, (sizes.total, LENGTH + 1))
    begins = random.random((sizes.total, LENGTH)) < 0.2
    begins[:, : LENGTH // 2] = False  # the ranks of a sequence have unequal numbers of counted tokens
    packed = config.data.reset_attention_mask
    documents, mask = (np.cumsum(begins, axis=1, dtype=np.int32), ~begins) if packed else (None, None)
    drawn, positions = config.training_positions is not None, DrawnPositions("stretched", 4 * LENGTH, 0)
    places = positions.draw(np.arange(sizes.total), LENGTH, step=step) if drawn else None
    return list(Batch(tokens, documents, places, mask).split(sizes.micro))[place::copies]


def trained(keys: Mapping[str, Any], folder: Path) -> list[list[float]]:
    """Loss and gradient norm of every step, then the loss of held-out samples; the state is written to `folder`."""
    config = config_of(keys)
    topology = Topology.of(config.parallel, dist.world_size())
    place, copies = topology.coordinates(dist.rank()), topology.data
    model = build_model(config)
    randomness.seed_everything(config.seed, topology.random_stream(dist.rank()))
    engine = build_engine(model.train(), config, config.batch.resolve(copies))
    steps = [engine.train_step(batches(config, step, place.data, copies), RATE) for step in range(STEPS)]
    evaluated = engine.mean_loss(batches(config, STEPS, place.data, copies)).mean
    places = engine.parameter_slices()
    first = engine.partitioned or not (place.data or place.sequence)
    own = [piece for piece in engine.pieces() if first and (places[piece.name].shard or not place.tensor)]
    folder.mkdir(parents=True, exist_ok=True)
    write_pieces(folder / file_name(dist.rank()), own, places)
    dist.barrier()
    return [*([step.loss, step.grad_norm or 0.0] for step in steps), [evaluated, 0.0]]


def main(out: str, runs: Runs) -> None:
    torch.set_num_threads(1)
    dist.init_distributed()
    found = {name: trained(keys, Path(out) / name) for name, keys in runs.items()}
    (Path(out) / f"rank_{dist.rank()}.json").write_text(json.dumps(found))
    dist.shut_down()


class Launched:
    """Runs in one launch of `world` processes: the figures of every rank by name, and the state of each."""

    def __init__(self, folder: Path, world: int, runs: Runs) -> None:
        folder.mkdir()
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world))
        command = [sys.executable, *launcher, __file__, str(folder), json.dumps(runs)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        finished = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=patience(400)
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        self.folder, self.runs = folder, runs
        self.ranks = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Launched:
    return Launched(folder / "alone", 1, {**METHODS, **TENSOR_ONLY, **SEQUENCE_ONLY, **RING_ONLY})


@pytest.fixture(scope="module")
def alone_in_stages(folder: Path) -> Launched:
    return Launched(folder / "stages", 1, STAGES)


def on_ranks(runs: Runs, division: Mapping[str, Any]) -> Runs:
    return {f"{name}, {json.dumps(division)}": {**keys, **division} for name, keys in runs.items()}


def assert_equal_runs(found: Launched, expected: Launched, runs: Runs, division: Mapping[str, Any]) -> None:
    for base, keys in runs.items():
        name, precise = f"{base}, {json.dumps(division)}", "precision" not in keys
        for rank in found.ranks:
            assert rank[name] == found.ranks[0][name], f"{name}: the ranks disagree"
            for step, one in zip(rank[name], expected.ranks[0][base], strict=True):
                assert step == pytest.approx(one, rel=RELATIVE["fp32" if precise else "bf16"]), name
        if precise:
            assert_equal_moments(found.folder / name, expected.folder / base)


def assert_equal_moments(found: Path, expected: Path) -> None:
    """The averaged gradient of every parameter, put together from what the ranks hold of it."""
    with open_state(found) as reader, open_state(expected) as other:
        assert reader.shapes == other.shapes
        for name in other.shapes:
            if name == "blocks.1.layer_scale.weight":
                continue  # its gradient is nothing but rounding, because the final norm removes the scale
            moment = other.whole(name, "exp_avg")
            tolerance = MOMENT * float(moment.abs().max())
            torch.testing.assert_close(
                reader.whole(name, "exp_avg"), moment, rtol=0, atol=tolerance, msg=f"{found}: {name}"
            )


TENSOR, SEQUENCE, RING = {"model_parallel_size": 2}, {"sequence_parallel_size": 2}, {"context_parallel_size": 2}
RINGS: Runs = {**METHODS, **SEQUENCE_ONLY, **RING_ONLY}


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Launched:
    runs = {**on_ranks({**METHODS, **TENSOR_ONLY}, TENSOR), **on_ranks({**METHODS, **SEQUENCE_ONLY}, SEQUENCE)}
    return Launched(folder / "two", 2, {**runs, **on_ranks(RINGS, RING)})


def test_two_tensor_ranks_train_as_one_process(two_ranks: Launched, alone: Launched) -> None:
    assert_equal_runs(two_ranks, alone, {**METHODS, **TENSOR_ONLY}, TENSOR)


def test_two_ranks_of_a_sequence_train_as_one_process(two_ranks: Launched, alone: Launched) -> None:
    assert_equal_runs(two_ranks, alone, {**METHODS, **SEQUENCE_ONLY}, SEQUENCE)


def test_two_ranks_of_a_ring_train_as_one_process(two_ranks: Launched, alone: Launched) -> None:
    assert_equal_runs(two_ranks, alone, RINGS, RING)


@pytest.mark.slow
@pytest.mark.parametrize("division", [TENSOR, SEQUENCE, RING], ids=str)
def test_under_every_zero_stage(division: Mapping[str, Any], folder: Path, alone_in_stages: Launched) -> None:
    found = Launched(folder / f"stages {json.dumps(division)}", 2, on_ranks(STAGES, division))
    assert_equal_runs(found, alone_in_stages, STAGES, division)


def test_gated_attention_units_on_two_copies(folder: Path) -> None:
    alone = Launched(folder / "units alone", 1, {"units": UNITS})
    found = Launched(folder / "units", 2, on_ranks({"units": UNITS | {"zero_stage": 3}}, {}))
    assert_equal_runs(found, alone, alone.runs, {})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4], ids=["2 ranks x 2 copies", "4 ranks"])
@pytest.mark.parametrize("key", ["model_parallel_size", "sequence_parallel_size"])
def test_four_processes_train_as_one(
    key: str, size: int, folder: Path, alone: Launched, alone_in_stages: Launched
) -> None:
    runs = {name: keys for name, keys in FOUR_RANKS.items() if size == 2 or "num_kv_heads" not in keys}
    found = Launched(folder / f"{key} {size}", 4, on_ranks(runs, {key: size}))
    for expected in (alone, alone_in_stages):
        chosen = {name: keys for name, keys in runs.items() if name in expected.runs}
        assert_equal_runs(found, expected, chosen, {key: size})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "division"),
    [(3, {"context_parallel_size": 3}), (4, {"context_parallel_size": 4}), (4, SEQUENCE | RING), (4, RING)],
    ids=str,
)
def test_rings_of_other_sizes(processes: int, division: Mapping[str, Any], folder: Path, alone: Launched) -> None:
    """Three ranks have unequal numbers of tokens, and more ranks than key heads; rings and Ulysses together; copies."""
    names = ("rotary", "coca, packed documents, a loss mask", "a bias by layer, grouped queries", "ZeRO 3, coca")
    runs = {name: METHODS[name] for name in (*names, "forgetting gates, packed documents, checkpointed activations")}
    runs["one key head, a window, packed documents"] = RING_ONLY["one key head, a window, packed documents"]
    if "sequence_parallel_size" in division:
        del runs["one key head, a window, packed documents"]
    if processes == 3:  # whose gradients DeepSpeed divides by a number that is not a power of two
        runs |= {"learned positions": METHODS["learned positions"]}
    found = Launched(folder / f"ring {processes} {json.dumps(division)}", processes, on_ranks(runs, division))
    assert_equal_runs(found, alone, runs, division)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
