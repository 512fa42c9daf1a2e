"""What the estimate says of weights, gradients and optimizer states, against what a real engine holds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_coca.config import load_config
from megatron_coca.training.estimate import stage_parameters, states_bytes
from megatron_coca.training.topology import Topology, effective_stage

ROOT = Path(__file__).parents[2]
KEYS = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 512,
    "no_weight_tying": True,
    "pos_emb": "coca",
    "optimizer.params.lr": 1e-3,
    "train_micro_batch_size_per_gpu": 1,
}
CASES = [{"precision": precision, "stage": stage} for precision in ("fp32", "bfloat16") for stage in range(4)]
SMALL = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
"""Buffers that would hide what is measured."""

HELD = """
import gc, json, os, sys
import numpy as np, torch
from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training import launch
from megatron_coca.training.engine import group as dist
from megatron_coca.training.engine import Engine
from megatron_coca.training.topology import effective_stage
from megatron_coca.training.optimizer import build_optimizer

def held():
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

launch.complete_environment(os.environ)
dist.init_distributed()
keys, found, stages = json.loads(sys.argv[1]), [], []
for case in json.loads(sys.argv[2]):
    before = held()
    config = load_config([], keys | case)
    model = build_model(config).train()
    sizes = config.batch.resolve(dist.world_size())
    engine = Engine(LanguageModelLoss(model), build_optimizer(model, config.optimizer), config, sizes)
    tokens = np.zeros((1, config.model.seq_length + 1), dtype=np.int64)
    for _ in range(2):
        engine.train_step([Batch(tokens)] * sizes.accumulation, 1e-3)
    found.append(held() - before)
    stages.append(effective_stage(config, dist.world_size()))
    engine._engine.destroy()
    del model, engine
if dist.is_main():
    print(json.dumps([found, stages]))
dist.shut_down()
"""


def measured(processes: int) -> tuple[list[int], list[int]]:
    """Bytes of all tensors between two steps on the first rank, and DeepSpeed's stage, for every case."""
    cases = [{"precision": case["precision"], "zero_optimization": SMALL | {"stage": case["stage"]}} for case in CASES]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["--no-python", sys.executable, "-W", "ignore", "-c", HELD, json.dumps(KEYS), json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, stages = json.loads(done.stdout.splitlines()[-1])
    return found, stages


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_states_are_what_an_engine_holds(processes: int) -> None:
    held, stages = measured(processes)
    for case, bytes_held, stage in zip(CASES, held, stages, strict=True):
        config = load_config(
            [], KEYS | {"precision": case["precision"], "zero_optimization": SMALL | {"stage": case["stage"]}}
        )
        topology = Topology.of(config.parallel, processes)
        ((numbers, _),) = stage_parameters(config, topology)
        assert effective_stage(config, processes) == stage, case
        assert bytes_held == pytest.approx(states_bytes(config, topology, numbers).resident, rel=0.02), case
