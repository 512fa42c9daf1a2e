"""Steps of captured micro-batches through DeepSpeed: the bits of ordinary steps. The capture here only runs again."""

import json
import subprocess
import sys
from subprocess import PIPE

import pytest

from megatron_coca.training.launch.environment import free_port
from tests.conftest import clean_environment

SCRIPT = """
import json, os, sys
import numpy as np, torch
from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import LanguageModelLoss, build, build_model
from megatron_coca.training import launch
from megatron_coca.training.engine import Engine, graphs
from megatron_coca.training.engine import group as dist
from megatron_coca.training.optimizer import build_optimizer, train_only_parts

def run_once(run):
    run()
    return run

graphs.capture = run_once
build.check_graphs = lambda backend, device_type: None
launch.complete_environment(os.environ)
dist.init_distributed()

def results(config):
    sizes = config.batch.resolve(dist.world_size())
    model = build_model(config).train()
    train_only_parts(model, config.optimizer)
    engine = Engine(LanguageModelLoss(model), build_optimizer(model, config.optimizer), config, sizes)
    generator = np.random.default_rng(dist.rank())
    steps = []
    for _ in range(3):
        tokens = generator.integers(64, size=(sizes.accumulation, sizes.micro, 17))
        masks = generator.integers(2, size=(sizes.accumulation, sizes.micro, 16)).astype(bool)
        batches = [Batch(rows, loss_mask=mask) for rows, mask in zip(tokens, masks, strict=True)]
        held_out = engine.mean_loss([Batch(tokens[0, :1, :9])])
        steps.append((*engine.train_step(batches, 1e-3), held_out))
    pieces = {(piece.name, piece.kind, piece.start): piece.tensor.clone() for piece in engine.pieces()}
    engine._engine.destroy()
    return steps, pieces

differing = []
for case in json.loads(sys.argv[1]):
    keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64,
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5,
            "optimizer.params.lr": 1e-3}
    config = load_config([], keys | case)
    steps, pieces = results(config)
    captured, captured_pieces = results(config.override({"cuda_graphs": True}))
    same = steps == captured and pieces.keys() == captured_pieces.keys()
    differing += [] if same and all(torch.equal(pieces[key], captured_pieces[key]) for key in pieces) else [case]
print(json.dumps(differing), flush=True)
dist.shut_down()
"""
CASES = [
    {"pos_emb": "coca", "precision": "fp32", "zero_optimization": {"stage": 0}},
    {"pos_emb": "rotary", "precision": "bfloat16", "zero_optimization": {"stage": 1}, "no_weight_tying": True},
    {"pos_emb": "alibi", "precision": "fp32", "zero_optimization": {"stage": 1}, "trainable": ["query", "mlp"]},
    {"pos_emb": "kerple_log", "precision": "bfloat16", "checkpoint_activations": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_captured_steps_have_the_bits_of_others(processes: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(CASES)]
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(processes):
        environment = clean_environment() | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True))
    for child in ranks:
        output, errors = child.communicate(timeout=600)
        assert child.returncode == 0, errors
        assert json.loads(output.splitlines()[-1]) == []
