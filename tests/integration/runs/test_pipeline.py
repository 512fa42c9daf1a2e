"""Pipeline stages train like one process.

Many small runs share the processes of one launch. These processes call `main` in this file.
"""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.checkpoints.native.state import file_name, write_pieces
from megatron_coca.config import load_config
from megatron_coca.data import Batch, DrawnPositions
from megatron_coca.model import assemble_model
from megatron_coca.training import randomness
from megatron_coca.training.engine import build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.launch import complete_environment
from megatron_coca.training.monitoring.loss_guard import Limits
from megatron_coca.training.optimizer import train_only_parts
from megatron_coca.training.topology import Topology
from tests.checkpoint_files import open_state
from tests.integration.killing import ForkServer

STEPS, LENGTH, RATE = 4, 16, 3e-3
RELATIVE = {"fp32": 1e-6, "bf16": 3e-3}
"""Gradients are summed in another order; in float32 that came to 6e-8 of the losses and 2e-7 of the gradient norms. In
bfloat16 sums over micro batches are rounded too, which came to 4e-5 and 1e-3.
"""

KEYS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": LENGTH,
    "vocab_size": 64,
    "no_weight_tying": True,
    "pos_emb": "rotary",
    "rotary_pct": 0.5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "optimizer.params.lr": RATE,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 8,
    "seed": 7,
}
METHODS: dict[str, dict[str, Any]] = {
    "rotary, fewer micro-batches than stages": {"train_micro_batch_size_per_gpu": 4},
    "coca, packed documents, activation checkpointing": {
        "pos_emb": "coca",
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "checkpoint_activations": True,
    },
    "alibi, sgd, no clipping": {"pos_emb": "alibi", "optimizer.type": "sgd", "gradient_clipping": 0.0},
    "a bias by layer, CPU offload": {
        "pos_emb": "kerple_log",
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    },
    "a shared bias": {"pos_emb": "rpe"},
    "learned positions, tied weights, chunked loss": {
        "pos_emb": "learned",
        "no_weight_tying": False,
        "loss_chunk_size": 5,
    },
    "layers that differ, normalized queries": {
        "pos_emb": "coca",
        "attention_config": [[["sliding", "global"], "all"]],
        "layer_types": {"sliding": {"pos_emb": "rpe", "sliding_window_width": 5}},
        "use_qk_layernorm": True,
        "attention_output_gate": "feature",
    },
    "constant angles": {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}},
    "learned frequencies": {"rope_scaling": {"rope_type": "clex", "max_factor": 4}},
    "forgetting gates, activation checkpointing": {
        "pos_emb": "none",
        "forgetting_gate": "fox",
        "checkpoint_activations": True,
    },
    "latents": {"kv_lora_rank": 12, "q_lora_rank": 10, "pos_emb": "coca", "rotary_pct": 1.0},
    "muP, tied weights": {"pos_emb": "coca", "use_mup": True, "mup_base_hidden_size": 8, "no_weight_tying": False},
    "embedding and norms only, CPU offload": {
        "trainable": ["embedding", "norms"],
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    },
    "bfloat16, tied weights": {"precision": "bfloat16", "no_weight_tying": False},
}
OF_FOUR = ("alibi, sgd, no clipping", "a shared bias", "forgetting gates, activation checkpointing")
OF_FOUR += ("bfloat16, tied weights",)
"""Compared only with four processes, which is slow."""
OF_TWO = [name for name in METHODS if name not in OF_FOUR]
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RESUMED: dict[str, dict[str, Any]] = {
    "dropout, a shared bias, bfloat16": DROPOUT | {"attention_dropout": 0.0, "pos_emb": "rpe", "precision": "bfloat16"},
    "dropout, learned frequencies, tied weights": DROPOUT
    | {"rope_scaling": {"rope_type": "clex", "max_factor": 4}, "no_weight_tying": False},
}


class Trained:
    """A run in this process's part of the grid, on samples that follow from the step."""

    def __init__(self, keys: dict[str, Any]) -> None:
        config = load_config([], [f"{name}={json.dumps(value)}" for name, value in keys.items()])
        self.topology = Topology.of(config.parallel, dist.world_size())
        self.place = self.topology.coordinates(dist.rank())
        self.sizes = config.batch.resolve(self.topology.data)
        self.packed, self.drawn = config.data.reset_attention_mask, config.training_positions is not None
        randomness.seed_everything(config.seed, dist.rank())
        model = assemble_model(config, "cpu")
        train_only_parts(model, config.optimizer)
        self.engine = build_engine(model, config, self.sizes, self.place.pipe)

    def batches(self, seed: int, samples: int | None = None) -> list[Batch]:
        random = np.random.default_rng(seed)
        shape = (self.sizes.accumulation, self.topology.data, samples or self.sizes.micro)
        tokens = random.integers(0, 64, (*shape, LENGTH + 1))
        documents = np.cumsum(random.random((*shape, LENGTH)) < 0.2, axis=-1).astype(np.int32)
        draw = DrawnPositions("stretched", 4 * LENGTH, 0)
        positions = draw.draw(np.arange(math.prod(shape)), LENGTH, step=seed).reshape(documents.shape)
        own = zip(*(of_all[:, self.place.data] for of_all in (tokens, documents, positions)), strict=True)
        return [
            Batch(row, marks, None, marks != 1) if self.packed else Batch(row, None, places if self.drawn else None)
            for row, marks, places in own
        ]

    def steps(self, first: int, last: int, limits: Limits | None = None) -> list[list[Any]]:
        return [list(self.engine.train_step(self.batches(step), RATE, limits)[:4]) for step in range(first, last)]

    def evaluated(self) -> list[float]:
        return [self.engine.mean_loss(self.batches(99, samples=samples)).mean for samples in (None, 1)]

    def bits(self) -> dict[str, torch.Tensor]:
        return {f"{piece.kind} {piece.name} {piece.start}": piece.tensor.clone() for piece in self.engine.pieces()}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own = [piece for piece in self.engine.pieces() if piece.name not in self.engine.copies]
        write_pieces(folder / file_name(dist.rank()), own, self.engine.parameter_slices())
        dist.barrier()

    def read(self, folder: Path, counters: dict[str, float]) -> None:
        places = self.engine.parameter_slices()
        with open_state(folder) as reader:
            for piece in self.engine.pieces():
                reader.fill(piece, places[piece.name])
        self.engine.restored(counters)


def compared(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a run reports, with a skipped step and an evaluation in between."""
    run = Trained(keys)
    steps = run.steps(0, STEPS - 1)
    before = run.bits()
    refused = run.steps(STEPS - 1, STEPS, Limits(loss=0.0))
    untouched = same(before, run.bits())
    evaluated = run.evaluated()
    found = {"steps": steps + refused + run.steps(STEPS - 1, STEPS), "evaluated": evaluated, "untouched": untouched}
    everyones = dist.gather_floats([number for step in found["steps"] for number in step] + evaluated)
    return found | {"agreed": all(each == everyones[0] for each in everyones)}


def resumed(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Whether a run that is written and read goes on as the one that never stopped."""
    one, other = Trained(keys), Trained(keys)
    one.steps(0, 2)
    one.write(folder)
    counters, states = one.engine.counters(), randomness.rng_states()
    expected, bits = one.steps(2, STEPS), one.bits()
    other.read(folder, counters)
    torch.set_rng_state(states["torch"])
    return {"same": other.steps(2, STEPS) == expected and same(bits, other.bits()), "steps": expected}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


PROGRAMS: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {"compared": compared, "resumed": resumed}


def main(arguments: list[Any]) -> int:
    """The program of a rank: its folder and its jobs, each with a name in PROGRAMS, its own name and its keys."""
    out, jobs = arguments
    torch.set_num_threads(1)
    complete_environment(os.environ)
    dist.init_distributed()
    found = {name: PROGRAMS[program](keys, Path(out) / name) for program, name, keys in jobs}
    (Path(out) / f"rank_{dist.rank()}.json").write_text(json.dumps(found))
    dist.shut_down()
    return 0


Launched = Callable[[str, int, list[tuple[str, str, dict[str, Any]]]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """launched(name, world, jobs): what each of `world` ranks found, in a folder of this name."""
    folder = tmp_path_factory.mktemp("pipeline")

    def run(name: str, world: int, jobs: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
        (folder / name).mkdir()
        launch = server.start_program("tests.integration.runs.test_pipeline", [str(folder / name), jobs], world)
        assert launch.end() == [0] * world, launch.output()
        return [json.loads((folder / name / f"rank_{rank}.json").read_text()) for rank in range(world)]

    return run


def jobs(pipe: int, names: Iterable[str] = METHODS) -> list[tuple[str, str, dict[str, Any]]]:
    stages = KEYS | ({"pipe_parallel_size": pipe} if pipe > 1 else {})
    comparisons = [("compared", name, stages | METHODS[name]) for name in names]
    return comparisons + [("resumed", name, stages | keys) for name, keys in RESUMED.items() if pipe > 1]


@pytest.fixture(scope="module")
def alone(launched: Launched) -> dict[str, Any]:
    return launched("one", 1, jobs(1, OF_TWO))[0]


@pytest.fixture(scope="module")
def two_stages(launched: Launched) -> list[dict[str, Any]]:
    return launched("two", 2, jobs(2, OF_TWO))


def assert_equal_runs(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for name in alone:
        keys = METHODS[name]
        tolerance = RELATIVE["bf16" if keys.get("precision") == "bfloat16" else "fp32"]
        for rank in ranks:
            found, expected = rank[name], alone[name]
            assert found["agreed"] and found["untouched"], f"{name}: ranks differ, or a skipped step changed weights"
            for step, one in zip(found["steps"], expected["steps"], strict=True):
                assert step == pytest.approx(one, rel=tolerance), f"{name}: loss, gradient norm, skipped"
            assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=tolerance), name
        assert [step[2] for step in alone[name]["steps"]] == [False] * (STEPS - 1) + [True, False]


def assert_resumed(ranks: list[dict[str, Any]]) -> None:
    for name in RESUMED:
        assert all(rank[name]["same"] for rank in ranks), name
        assert all(rank[name]["steps"] == ranks[0][name]["steps"] for rank in ranks), name


@pytest.mark.slow
def test_two_stages_train_as_one_process(two_stages: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert_equal_runs(two_stages, alone)


def test_a_run_in_stages_resumes_with_the_same_bits(two_stages: list[dict[str, Any]]) -> None:
    assert_resumed(two_stages)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stages"), [(4, 4), (4, 2)], ids=["4 stages", "2 stages x 2 copies"])
def test_four_processes_train_as_one(world: int, stages: int, launched: Launched, alone: dict[str, Any]) -> None:
    ranks = launched(f"{world} {stages}", world, jobs(stages))
    assert_resumed(ranks)
    others = launched(f"one beside {world} {stages}", 1, jobs(1, OF_FOUR))[0]
    assert_equal_runs(ranks, alone | others)
    assert (alone | others).keys() == METHODS.keys()


@pytest.mark.slow
def test_train_in_stages_stop_and_go_on_in_stages_or_without(train: Any, open_run: Any, tmp_path: Path) -> None:
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "no_weight_tying": False, "train_iters": 6}
    staged, two = plain | {"pipe_parallel_size": 2}, ("--num_gpus", "2")
    whole, stopped, alone = (tmp_path / name for name in ("whole", "stopped", "alone"))
    commands = [
        (staged | {"save": str(whole)}, two),
        (staged | {"save": str(stopped), "exit_interval": 3}, two),
        (plain | {"save": str(alone), "load": str(stopped)}, ()),
        (staged | {"save": str(stopped), "load": str(stopped)}, two),
    ]
    for keys, options in commands:
        finished = train(keys, options=options)
        assert finished.status == 0, finished.output
    assert open_run(stopped).records == open_run(whole).records
    assert open_run(stopped).weights(6) == open_run(whole).weights(6)
    assert open_run(alone).losses == pytest.approx(open_run(whole).losses[3:], rel=RELATIVE["fp32"])
