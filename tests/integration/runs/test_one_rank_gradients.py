"""One rank skips the reduction of gradients: losses, norms and weights equal those of DeepSpeed's reduction, bit for
bit.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.training.launch.environment import free_port
from tests.conftest import clean_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
KEYS = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "seq_length": 32,
    "vocab_size": 300,
    "pos_emb": "coca",
    "optimizer.params.lr": 1e-2,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
}
OFFLOADED: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
SECTIONS = ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 1, "overlap_comm": True}, OFFLOADED, {"stage": 3})
CASES: list[dict[str, Any]] = [
    {"precision": precision, "zero_optimization": section} for precision in ("fp32", "bfloat16") for section in SECTIONS
]
CASES += [case | {"data_types": {"grad_accum_dtype": "fp32"}} for case in CASES if case["precision"] == "bfloat16"]

TRAINED = """
import json, os, sys
import numpy as np, torch
from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training import launch
from megatron_coca.training.engine import deepspeed_internals
from megatron_coca.training.engine.deepspeed_engine import DeepSpeedEngine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.optimizer import build_optimizer

def trained(config):
    torch.manual_seed(0)
    model = build_model(config).train()
    optimizer = build_optimizer(model, config.optimizer)
    engine = DeepSpeedEngine(LanguageModelLoss(model), optimizer, config, config.batch.resolve(1))
    draw, found = np.random.default_rng(0), []
    for _ in range(3):
        tokens = [Batch(draw.integers(0, 300, (2, 33))) for _ in range(2)]
        step = engine.train_step(tokens, 1e-2)
        found += [step.loss, step.grad_norm]
    found += [float(weight.detach().double().sum()) for weight in model.parameters()]
    engine._engine.destroy()
    return found

launch.complete_environment(os.environ)
dist.init_distributed()
keys, own, compared = json.loads(sys.argv[1]), deepspeed_internals.skip_reduction, []
for case in json.loads(sys.argv[2]):
    config = load_config([], keys | case)
    deepspeed_internals.skip_reduction = own
    ours = trained(config)
    deepspeed_internals.skip_reduction = lambda engine: None
    compared.append([ours, trained(config)])
print(json.dumps(compared))
dist.shut_down()
"""


def test_skipped_reductions_change_no_bit() -> None:
    command = [sys.executable, "-W", "ignore", "-c", TRAINED, json.dumps(KEYS), json.dumps(CASES)]
    rank = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        command, env=clean_environment() | rank, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case, (ours, theirs) in zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert ours == theirs, case
        assert ours[0] > ours[4] and ours[1] > 0, f"{case}: does not learn"
