"""Weights that are not trained keep their bits, with any division into ranks. The other weights are trained as if they
were the only ones.

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
import torch.nn as nn

from megatron_coca.attention.layer import SelfAttention, packed_rows
from megatron_coca.checkpoints.native.state import file_name, write_pieces
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.data import Batch
from megatron_coca.model import GPT, LanguageModelLoss, assemble_model, build_model
from megatron_coca.training import randomness
from megatron_coca.training.engine import Engine, build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.optimizer import parts_of, train_only_parts
from megatron_coca.training.topology import Topology
from tests.checkpoint_files import open_state
from tests.patience import patience

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STEPS, STOP, LENGTH, VOCABULARY, RATE = 4, 2, 16, 64, 3e-3
RELATIVE = {"fp32": 1e-5, "bf16": 5e-3}
"""Of losses and gradient norms, as in test_model_parallel.py: sums are taken in another order."""
WEIGHTS = 1e-4
"""Absolute, of weights after four steps of 3e-3: Adam makes whole steps of gradients that are nothing but rounding,
of which there are none here.
"""

Keys = Mapping[str, Any]
KEYS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 1,
    "no_weight_tying": True,
    "pos_emb": "coca",
    "rotary_pct": 0.5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "optimizer.params.lr": RATE,
    "weight_decay": 0.1,
    "gradient_clipping": 0.05,
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
TIED = {"no_weight_tying": False}
KEY, ATTENTION = {"trainable": ["key"]}, {"trainable": ["query", "key", "value"]}
ALONE: dict[str, dict[str, Any]] = {
    "keys": KEY,
    "all of attention": ATTENTION | {"checkpoint_activations": True},
    "grouped queries": LLAMA | {"trainable": ["query", "value"]},
    "a frozen bias": LLAMA | {"pos_emb": "kerple_log", "trainable": ["key", "value", "norms"]},
    "tied": TIED | KEY,
    "a trained bias, tied embedding": TIED
    | {"pos_emb": "kerple_log", "trainable": ["query", "positions", "embedding", "norms"]},
    "keys in bfloat16": KEY | {"precision": "bfloat16"},
    "latents": {"trainable": ["key", "value", "norms"], "kv_lora_rank": 12, "q_lora_rank": 10},
    "heads by layer type": LLAMA
    | {"trainable": ["key", "norms"], "attention_config": [[["sliding", "global"], "all"]], "value_norm": True}
    | {"layer_types": {"sliding": {"sliding_window_width": 5}}, "values_from_keys": True}
    | {"head_shapes": {"sliding": {"kv_channels": 12, "num_kv_heads": 4, "values_from_keys": False}}},
}
"""What is trained by one process, without ZeRO but in bfloat16."""

STAGES = {"pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 1}
Runs = Mapping[str, tuple[str, Keys, str | None]]
TWO_RANKS: Runs = {
    "ZeRO 0": ("keys", {}, None),
    "ZeRO 2": ("grouped queries", {"zero_stage": 2}, None),
    "ZeRO 3": ("keys", {"zero_stage": 3}, "ZeRO 0"),
    "bfloat16, ZeRO 2": ("keys in bfloat16", {"zero_stage": 2}, None),
    "tensor": ("keys", {"model_parallel_size": 2}, "ZeRO 3"),
    "sequence": ("keys", {"sequence_parallel_size": 2}, "tensor"),
    "pipeline": ("keys", STAGES, "sequence"),
}
"""Runs by the name of what one process trains, how the work is divided, and the run from whose state they go on too.

DeepSpeed's grids of one kind are in the way of the kinds before it within a process, so the order matters.
"""
MORE: Runs = {
    "ZeRO 1": ("grouped queries", {"zero_stage": 1}, None),
    "native": ("grouped queries", {"engine": "native"}, "ZeRO 1"),
    "native, tied": ("tied", {"engine": "native"}, None),
    "native, bfloat16": ("keys in bfloat16", {"engine": "native"}, None),
    "ZeRO 2, attention": ("all of attention", {"zero_stage": 2}, None),
    "ZeRO 3, nothing kept whole": (
        "grouped queries",
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        "ZeRO 1",
    ),
    "ZeRO 3, tied": ("tied", {"zero_stage": 3}, None),
    "ZeRO 3, latents": ("latents", {"zero_stage": 3}, None),
    "ZeRO 3, attention": ("all of attention", {"zero_stage": 3}, None),
    "ZeRO 2, offload": ("keys", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, None),
    "bfloat16, ZeRO 1": ("keys in bfloat16", {"zero_stage": 1}, None),
    "bfloat16, ZeRO 3": ("keys in bfloat16", {"zero_stage": 3}, None),
    "tensor, a frozen bias": ("a frozen bias", {"model_parallel_size": 2}, None),
    "tensor, grouped": ("grouped queries", {"model_parallel_size": 2}, "ZeRO 1"),
    "tensor, ZeRO 2": ("keys", {"model_parallel_size": 2, "zero_stage": 2}, "ZeRO 2, offload"),
    "tensor, a trained bias, ZeRO 3": (
        "a trained bias, tied embedding",
        {"model_parallel_size": 2, "zero_stage": 3},
        None,
    ),
    "sequence, grouped, ZeRO 3": (
        "grouped queries",
        {"sequence_parallel_size": 2, "zero_stage": 3},
        "tensor, grouped",
    ),
    "sequence, ZeRO 1": ("keys", {"sequence_parallel_size": 2, "zero_stage": 1}, "tensor, ZeRO 2"),
    "pipeline, attention": ("all of attention", STAGES, "ZeRO 2, attention"),
    "pipeline, tied": ("tied", STAGES, "ZeRO 3, tied"),
    "pipeline, a trained bias, tied embedding": ("a trained bias, tied embedding", STAGES, None),
    "pipeline, bfloat16": ("keys in bfloat16", STAGES, None),
    "tensor, heads by layer type": ("heads by layer type", {"model_parallel_size": 2}, None),
    "pipeline, heads by layer type": ("heads by layer type", STAGES, "tensor, heads by layer type"),
}


def config_of(keys: Keys) -> Config:
    return load_config([], [f"{name}={json.dumps(value)}" for name, value in (KEYS | dict(keys)).items()])


def batches(config: Config, step: int, place: int, copies: int) -> list[Batch]:
    sizes = config.batch.resolve(copies)
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (sizes.total, LENGTH + 1))
    return list(Batch(tokens).split(sizes.micro))[place::copies]


class Run:
    """A run in this process's part of the grid."""

    def __init__(self, keys: Keys) -> None:
        self.config = config_of(keys)
        self.topology = Topology.of(self.config.parallel, dist.world_size())
        self.place = self.topology.coordinates(dist.rank())
        randomness.seed_everything(self.config.seed, self.topology.random_stream(dist.rank()))
        model = assemble_model(self.config, "cpu").train()
        train_only_parts(model, self.config.optimizer)
        sizes = self.config.batch.resolve(self.topology.data)
        self.engine: Engine = build_engine(model, self.config, sizes, self.place.pipe)

    def steps(self, first: int, last: int) -> list[list[float]]:
        done = [
            self.engine.train_step(batches(self.config, step, self.place.data, self.topology.data), RATE)
            for step in range(first, last)
        ]
        return [[step.loss, step.grad_norm or 0.0] for step in done]

    def bits(self) -> dict[str, torch.Tensor]:
        return {f"{each.kind} {each.name} {each.start}": each.tensor.clone() for each in self.engine.pieces()}

    def write(self, folder: Path) -> None:
        places, place = self.engine.parameter_slices(), self.place
        first = self.engine.partitioned or not (place.data or place.sequence)
        own = [
            piece
            for piece in self.engine.pieces()
            if first and (places[piece.name].shard or not place.tensor) and piece.name not in self.engine.copies
        ]
        folder.mkdir(parents=True, exist_ok=True)
        if own:
            write_pieces(folder / file_name(dist.rank()), own, places)
        dist.barrier()

    def read(self, folder: Path, counters: dict[str, float]) -> None:
        places = self.engine.parameter_slices()
        with open_state(folder) as reader:
            for piece in self.engine.pieces():
                reader.fill(piece, places[piece.name])
        self.engine.restored(counters)


def trained(keys: Keys, folder: Path) -> dict[str, Any]:
    """What a run reports, and whether one that is resumed half-way goes on with the same bits."""
    run, other = Run(keys), Run(keys | {"seed": 8})
    steps = run.steps(0, STOP)
    run.write(folder / "half")
    counters = run.engine.counters()
    steps += run.steps(STOP, STEPS)
    run.write(folder / "whole")
    other.read(folder / "half", counters)
    again, bits, own = other.steps(STOP, STEPS), other.bits(), run.bits()
    same = again == steps[STOP:] and bits.keys() == own.keys()
    same = same and all(torch.equal(value, own[name]) for name, value in bits.items())
    return {"steps": steps, "same": same, "counters": counters}


def continued(keys: Keys, source: Path, counters: dict[str, float]) -> list[list[float]]:
    """The second half of a run, from the state that another has written half-way."""
    run = Run(keys | {"seed": 8})
    run.read(source, counters)
    return run.steps(STOP, STEPS)


def refused(keys: Keys) -> str:
    try:
        Run(keys)
    except ConfigError as error:
        return str(error)
    return ""


IDLE = {"pipe_parallel_size": 2, "trainable": ["embedding"]}
Jobs = Mapping[str, tuple[Keys, str | None]]
"""Keys of runs, and the folder of the state from which they are to go on too."""


def main(out: str, jobs: Jobs) -> None:
    torch.set_num_threads(1)
    dist.init_distributed()
    found: dict[str, Any] = {}
    for name, (keys, source) in jobs.items():
        found[name] = trained(keys, Path(out) / name)
        if source is not None:
            found[name]["continued"] = continued(keys, Path(source), found[name]["counters"])
    if dist.world_size() > 1:
        found["idle"] = refused(IDLE)
    (Path(out) / f"rank_{dist.rank()}.json").write_text(json.dumps(found))
    dist.shut_down()


class Launched:
    """The figures of every rank by run, and the states that they wrote."""

    def __init__(self, folder: Path, world: int, jobs: Jobs) -> None:
        folder.mkdir()
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world))
        command = [sys.executable, *launcher, __file__, str(folder), json.dumps(jobs)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        finished = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=patience(400)
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        self.folder, self.jobs = folder, jobs
        self.ranks = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world)]


def two(folder: Path, runs: Runs) -> Launched:
    def source(name: str | None) -> str | None:
        return None if name is None else str(folder / name / "half")

    jobs = {name: (dict(ALONE[base]) | dict(keys), source(other)) for name, (base, keys, other) in runs.items()}
    return Launched(folder, 2, jobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainable")


@pytest.fixture(scope="module")
def together(folder: Path) -> Launched:
    return two(folder / "two", TWO_RANKS)


@pytest.fixture(scope="module")
def more(folder: Path) -> Launched:
    return two(folder / "more", MORE)


@pytest.fixture(scope="module")
def alone(folder: Path, together: Launched) -> Launched:
    state = str(together.folder / "tensor" / "half")
    return Launched(
        folder / "one", 1, {name: (keys, state if name == "keys" else None) for name, keys in ALONE.items()}
    )


def rows_of(config: Config, name: str) -> dict[str, torch.Tensor]:
    """The rows of the parameter that each part has: all where it holds one part."""
    parts = parts_of(name)
    if len(parts) == 1 or "attention.key_value_" in name:  # one matrix, trained as a whole
        return {parts[0]: torch.tensor([])}
    shape = config.model.with_heads(config.model.layer_names[int(name.split(".")[1])])
    keys = shape.num_kv_heads * shape.head_dim
    rows = packed_rows(shape.attention_width, keys, shape.head_dim, not shape.values_from_keys)
    return {part: rows[part].numbers() for part in rows}


def part_of(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return weight[rows] if len(rows) else weight


def assert_state(state: Path, keys: Keys) -> None:
    """Frozen rows are those of the first weights, the others are not; moments exist for what trains, once."""
    config = config_of(keys)
    first = build_model(config).state_dict()
    with open_state(state) as reader:
        assert reader.shapes == {name: tuple(weight.shape) for name, weight in first.items()}
        for name, weight in first.items():
            found = reader.whole(name)
            expected = weight.bfloat16().float() if config.precision.dtype == "bf16" else weight
            for part, rows in rows_of(config, name).items():
                own, given = part_of(found, rows), part_of(expected, rows)
                if config.optimizer.trains(part):
                    assert not torch.equal(own, part_of(weight, rows)), f"{name}: {part} does not train"
                else:
                    assert torch.equal(own, given), f"{name}: {part} has changed"
                    assert not part_of(reader.whole(name, "exp_avg"), rows).any()


@pytest.mark.parametrize("name", ALONE)
def test_one_process_trains_the_parts_alone(name: str, alone: Launched) -> None:
    assert alone.ranks[0][name]["same"], "resuming changes bits"
    assert_state(alone.folder / name / "whole", ALONE[name])


def assert_trained_alike(found: Launched, name: str, runs: Runs, alone: Launched) -> None:
    base, _, source = runs[name]
    tolerance = RELATIVE["bf16" if "precision" in ALONE[base] else "fp32"]
    expected = alone.ranks[0][base]["steps"]
    for rank in found.ranks:
        assert rank[name]["same"], "resuming changes bits"
        for step, one in zip(rank[name]["steps"], expected, strict=True):
            assert step == pytest.approx(one, rel=tolerance)
        for step, one in zip(rank[name].get("continued", expected[STOP:]), expected[STOP:], strict=True):
            assert step == pytest.approx(one, rel=tolerance), f"going on from {source}"
    assert_state(found.folder / name / "whole", found.jobs[name][0])


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_processes_train_them_alike(name: str, together: Launched, alone: Launched) -> None:
    assert_trained_alike(together, name, TWO_RANKS, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_in_every_division(name: str, more: Launched, alone: Launched) -> None:
    assert_trained_alike(more, name, MORE, alone)


def test_one_process_goes_on_from_tensor_ranks(alone: Launched) -> None:
    found = alone.ranks[0]["keys"]
    for step, one in zip(found["continued"], found["steps"][STOP:], strict=True):
        assert step == pytest.approx(one, rel=RELATIVE["fp32"])


def test_a_stage_that_trains_nothing_is_an_error_everywhere(together: Launched) -> None:
    for rank in together.ranks:
        assert "trainable: with embedding, one of the 2 pipeline" in rank["idle"]


class Reference:
    """Plain PyTorch: packed projections, masked gradients, and rows that are put back after every step of AdamW."""

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, build_model(config).train()
        self.masks = {parameter: self._mask(name, parameter) for name, parameter in self.model.named_parameters()}
        decays = [[p for p in self.masks if (p.dim() >= 2) == wide] for wide in (True, False)]
        groups = [{"params": decays[0], "weight_decay": 0.1}, {"params": decays[1], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)

    def _mask(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        mask = torch.zeros_like(parameter, dtype=torch.bool)
        for part, rows in rows_of(self.config, name).items():
            mask[rows if len(rows) else slice(None)] = self.config.optimizer.trains(part)  # type: ignore[arg-type]
        return mask

    def step(self, number: int) -> list[float]:
        loss_of, micro = LanguageModelLoss(self.model), batches(self.config, number, 0, 1)
        losses = [loss_of(torch.from_numpy(batch.tokens)) / len(micro) for batch in micro]
        torch.stack(losses).sum().backward()
        before = {parameter: parameter.detach().clone() for parameter in self.masks}
        for parameter, mask in self.masks.items():
            parameter.grad = torch.where(mask, parameter.grad, 0.0)
        norm = nn.utils.clip_grad_norm_(list(self.masks), self.config.optimizer.gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, mask in self.masks.items():
                parameter.copy_(torch.where(mask, parameter, before[parameter]))
        return [float(torch.stack(losses).sum().detach()), float(norm)]


@pytest.mark.parametrize("name", [name for name in ALONE if "bfloat16" not in name])
def test_it_is_what_masked_gradients_give(name: str, alone: Launched) -> None:
    reference = Reference(config_of(ALONE[name]))
    for number, step in enumerate(alone.ranks[0][name]["steps"]):
        assert step == pytest.approx(reference.step(number), rel=RELATIVE["fp32"])
    with open_state(alone.folder / name / "whole") as reader:
        for parameter, weight in reference.model.state_dict().items():
            torch.testing.assert_close(reader.whole(parameter), weight, rtol=0, atol=WEIGHTS)


def test_the_reference_keeps_its_projections_packed() -> None:
    model: GPT = Reference(config_of(KEY)).model
    layers = [part for part in model.modules() if isinstance(part, SelfAttention)]
    assert layers and all(isinstance(layer.query_key_value, nn.Linear) for layer in layers)


def test_a_run_says_what_it_trains_and_goes_on_with_it(live: Any, open_run: Any, tmp_path: Path) -> None:
    keys = {"trainable": ["key"], "precision": "bfloat16", "zero_stage": 2, "train_iters": 4, "auto_resume": True}
    whole, stopped = keys | {"save": str(tmp_path / "whole")}, keys | {"save": str(tmp_path / "stopped")}
    assert "58,240 parameters, 2,112 (3.63%) trained" in live(whole).output
    live(stopped | {"exit_interval": 2})
    refused = live(stopped | {"trainable": ["key", "value"]}, expected=2)
    assert "trainable (saved ['key'], now ['key', 'value'])" in refused.output
    live(stopped)
    assert open_run(tmp_path / "stopped").weights(4) == open_run(tmp_path / "whole").weights(4)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
