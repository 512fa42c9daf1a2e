"""Estimated sizes of states against the tensors of a real engine."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from megatron_coca.config import load_config
from megatron_coca.training.estimate import stage_parameters, stage_trained, states_bytes
from megatron_coca.training.launch.environment import free_port
from megatron_coca.training.topology import Topology, effective_stage
from tests.conftest import clean_environment
from tests.patience import patience

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
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
SMALL_BUFFERS = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
CASES = [
    {"precision": precision, "zero_optimization": SMALL_BUFFERS | {"stage": stage}}
    for precision, stage in (("fp32", 0), ("fp32", 1), ("fp32", 3), ("bfloat16", 0), ("bfloat16", 2), ("bfloat16", 3))
]
CASES += [case | {"data_types": {"grad_accum_dtype": "fp32"}} for case in CASES if case["precision"] == "bfloat16"]
CASES += [{"engine": "native", "precision": precision} for precision in ("fp32", "bfloat16")]
CASES += [
    case | {"lora": {"rank": 8, "also": ["norms", "embedding"]}}
    for case in CASES
    if case.get("zero_optimization", {}).get("stage") != 3
]

HELD = """
import gc, json, os, sys
import numpy as np, torch
from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import build_model
from megatron_coca.training import launch
from megatron_coca.training.adapters import add_adapters
from megatron_coca.training.engine import group as dist
from megatron_coca.training.engine import build_engine

def tensor_bytes():
    gc.collect()
    storages = [value.untyped_storage() for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

launch.complete_environment(os.environ)
dist.init_distributed()
keys, sizes_held, stages = json.loads(sys.argv[1]), [], []
for case in json.loads(sys.argv[2]):
    before = tensor_bytes()
    config = load_config([], keys | case)
    model = build_model(config)
    if config.optimizer.lora is not None:
        dtype = torch.bfloat16 if config.precision.dtype == "bf16" else torch.float32
        add_adapters(model.to(dtype), config.optimizer.lora, 1)
    model.train()
    sizes = config.batch.resolve(dist.world_size())
    engine = build_engine(model, config, sizes)
    tokens = np.zeros((1, config.model.seq_length + 1), dtype=np.int64)
    for _ in range(2):
        engine.train_step([Batch(tokens)] * sizes.accumulation, 1e-3)
    sizes_held.append(tensor_bytes() - before)
    stages.append(None if config.parallel.engine == "native" else engine._engine.zero_optimization_stage())
    engine.close()
    del model, engine
if dist.is_main():
    print(json.dumps([sizes_held, stages]))
dist.shut_down()
"""


def measured(processes: int) -> tuple[list[Any], list[int | None]]:
    """Return what rank 0 prints for every case: bytes of all tensors between two steps, and the ZeRO stage."""
    command = [sys.executable, "-W", "ignore", "-c", HELD, json.dumps(KEYS), json.dumps(CASES)]
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(processes):
        environment = clean_environment() | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=PIPE, stderr=PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=patience(300)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * processes, outputs
    sizes, stages = json.loads(outputs[0][0].splitlines()[-1])
    return sizes, stages


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_states_are_what_an_engine_holds(processes: int) -> None:
    sizes, stages = measured(processes)
    for case, held, stage in zip(CASES, sizes, stages, strict=True):
        config = load_config([], KEYS | case)
        if stage is not None:
            section = case["zero_optimization"] | {"stage3_max_live_parameters": 0}  # nothing is gathered between steps
            config = load_config([], KEYS | case | {"zero_optimization": section})
            assert effective_stage(config, processes) == stage, case
        topology = Topology.of(config.parallel, processes)
        ((numbers, _),) = stage_parameters(config, topology)
        (trained,) = stage_trained(config, topology)
        states = states_bytes(config, topology, numbers, trained)
        resident = states.weights + states.optimizer + (states.gradients if stage == 3 else 0)
        assert held == pytest.approx(resident, rel=0.02), case
