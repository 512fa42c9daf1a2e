"""Drawn configurations train on several ranks as on one: every choice of a model beside every division among ranks.

Many small runs share the processes of one launch. These processes call `main` in this file.
"""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model import assemble_model
from megatron_coca.training import randomness
from megatron_coca.training.adapters import add_adapters
from megatron_coca.training.engine import build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.launch import complete_environment
from megatron_coca.training.optimizer import train_only_parts
from megatron_coca.training.topology import Topology
from tests.integration.killing import ForkServer
from tests.integration.runs.test_model_parallel import LENGTH, VOCABULARY, batches

STEPS = 3

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": VOCABULARY,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "output_layer_init_method": "normal",
    "train_batch_size": 8,
    "seed": 5,
}
Keys = dict[str, Any]
LLAMA: Keys = {"activation": "swiglu", "norm": "rmsnorm", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
MUP: Keys = {"use_mup": True, "mup_base_hidden_size": 16}
CHOICES: dict[str, Sequence[Keys]] = {
    "position": [
        {"pos_emb": "rotary", "rotary_pct": 0.5},
        {"pos_emb": "coca"},
        {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}},
        {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}},
        {"pos_emb": "polar"},
        {"pos_emb": "xpos"},
        {"pos_emb": "alibi"},
        {"pos_emb": "kerple_log"},
        {"pos_emb": "fire"},
        {"pos_emb": "rpe"},
        {"pos_emb": "learned"},
        {"pos_emb": "none", "forgetting_gate": "fox"},
        {"pos_emb": "rotary", "rope_scaling": {"rope_type": "clex", "max_factor": 4}},
        {"pos_emb": "coca", "logit_scaling": "ssmax"},
        {"pos_emb": "rotary", "relative_positions": {"type": "inv_leaky_rerope", "window": 8}},
        {"pos_emb": "coca", "kv_lora_rank": 12, "q_lora_rank": 10, "rotary_pct": 1.0},
    ],
    "layers": [
        {},
        {},
        {"sliding_window_width": 9},
        {
            "attention_config": [[["near", "global"], "all"]],
            "layer_types": {"near": {"pos_emb": "rotary", "sliding_window_width": 5}},
        },
    ],
    "block": [{}, LLAMA, LLAMA | {"num_kv_heads": 2}, {"gpt_j_residual": True}, {"use_qk_layernorm": True}],
    "mlp": [{}, {}, {"moe_num_experts": 4, "moe_top_k": 2}],
    "head": [{"no_weight_tying": True}, {"no_weight_tying": False}],
    "width": [{}, MUP],
    "trained": [
        {},
        {},
        {"trainable": ["embedding", "norms"]},
        {"trainable": ["query", "key", "norms"]},
        {"trainable": ["mlp", "positions", "embedding"]},
        {
            "lora": {
                "rank": 2,
                "alpha": 4,
                "targets": ["query", "key", "value", "dense"],
                "also": ["norms", "embedding"],
            }
        },
    ],
    "optimizer": [
        {},
        {"gradient_clipping": 0.0},
        {"optimizer.type": "Lion"},
        {"optimizer.type": "sgd"},
        {"optimizer.type": "Muon"},
    ],
    "rate": [{"optimizer.params.lr": 2e-3}],
    "data": [
        {},
        {"reset_attention_mask": True, "eod_mask_loss": True},
        {"training_positions": {"type": "stretched", "max": "4L"}},
    ],
    "memory": [{}, {"checkpoint_activations": True}, {"loss_chunk_size": 5}],
    "batch": [{"train_micro_batch_size_per_gpu": size} for size in (1, 2)],
    "engine": [{}, {"engine": "native"}, {"engine": "deepspeed"}],
    "zero": [{"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)]
    + [{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}],
}
DIVISIONS: dict[int, Sequence[Keys]] = {
    2: [
        {},
        {"pipe_parallel_size": 2},
        {"model_parallel_size": 2},
        {"sequence_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    4: [
        {},
        {"pipe_parallel_size": 2},
        {"model_parallel_size": 2},
        {"model_parallel_size": 4},
        {"sequence_parallel_size": 2},
        {"sequence_parallel_size": 2, "context_parallel_size": 2},
        {"context_parallel_size": 2},
        {"context_parallel_size": 4},
    ],
}
RELATIVE = 2e-4
"""Of losses and gradient norms in float32. Sums are taken in another order, and Lion and Muon make whole steps of
gradients that are nothing but rounding.
"""


class Draw(NamedTuple):
    """A valid configuration, and a division among a number of ranks that is valid with it."""

    keys: Keys
    ranks: int
    division: Keys


def drawn(seed: int) -> Draw:
    """The draw of a seed."""
    source = random.Random(seed)
    ranks = source.choice(sorted(DIVISIONS))
    division = source.choice(DIVISIONS[ranks])
    while True:
        keys = dict(BASE)
        for values in CHOICES.values():
            keys |= source.choice(values)
        try:
            config_of(keys)
            Topology.of(config_of(keys | division).parallel, ranks)
        except ConfigError:
            continue
        return Draw(keys, ranks, division)


def config_of(keys: Keys) -> Config:
    return load_config([], [f"{name}={json.dumps(value)}" for name, value in keys.items()])


def trained(keys: Keys) -> list[list[float]]:
    """Loss and gradient norm of every step, then the loss of held-out samples."""
    config = config_of(keys)
    topology = Topology.of(config.parallel, dist.world_size())
    place, copies = topology.coordinates(dist.rank()), topology.data
    model = assemble_model(config, "cpu")
    if config.optimizer.lora is not None:
        add_adapters(model, config.optimizer.lora, config.seed)
    else:
        train_only_parts(model, config.optimizer)
    randomness.seed_everything(config.seed, topology.random_stream(dist.rank()))
    sizes, rate = config.batch.resolve(copies), config.optimizer.lr
    engine = build_engine(model.train(), config, sizes, place.pipe)
    steps = [engine.train_step(batches(config, step, place.data, copies), rate) for step in range(STEPS)]
    evaluated = engine.mean_loss(batches(config, STEPS, place.data, copies)).mean
    found = [[step.loss, step.grad_norm or 0.0] for step in steps] + [[evaluated, 0.0]]
    engine.close()
    return found


def main(arguments: list[Any]) -> int:
    """The program of a rank: its file, and the keys of its runs."""
    out, runs = arguments
    torch.set_num_threads(1)
    complete_environment(os.environ)
    dist.init_distributed()
    found = []
    for number, keys in enumerate(runs):
        print(f"run {number}", flush=True)  # says which run hangs
        try:
            found.append(trained(keys))
        except ConfigError as error:  # of what only an engine knows, such as a pipeline stage without trained weights
            print(f"run {number}: {error}", flush=True)
            found.append([])
    Path(f"{out}_{dist.rank()}.json").write_text(json.dumps(found))
    dist.shut_down()
    return 0


DRAWN = 16
"""Configurations that a test draws."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 64, DRAWN))
def test_drawn_configurations_train_as_on_one_rank(first: int, server: ForkServer, tmp_path: Path) -> None:
    draws = {seed: drawn(seed) for seed in range(first, first + DRAWN)}
    # DeepSpeed makes the groups of a sequence once in a process, so every division has a launch of its own.
    launches: dict[tuple[int, str], list[int]] = {(1, "{}"): [*draws]}
    for seed, draw in draws.items():
        launches.setdefault((draw.ranks, json.dumps(draw.division)), []).append(seed)
    alone: dict[int, list[list[float]]] = {}
    compared = 0
    for number, ((world, division), seeds) in enumerate(launches.items()):
        runs = [draws[seed].keys | json.loads(division) for seed in seeds]
        out = tmp_path / f"launch_{number}"
        launch = server.start_program("tests.integration.runs.test_drawn_runs", [str(out), runs], world)
        assert launch.end() == [0] * world, f"{division}, {seeds}: {launch.output()}"
        for rank in range(world):
            found = dict(zip(seeds, json.loads(Path(f"{out}_{rank}.json").read_text()), strict=True))
            alone = alone or found
            for seed, steps in found.items():
                compared += bool(steps) and world > 1
                for step, one in zip(steps, alone[seed] if steps else (), strict=True):
                    assert step == pytest.approx(one, rel=RELATIVE), f"{draws[seed]}: {steps} {alone[seed]}"
    assert compared > DRAWN, "most draws are refused"
