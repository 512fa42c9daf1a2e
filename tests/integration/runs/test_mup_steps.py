"""Steps with `use_mup` of each engine are the steps of AdamW that this file writes out, weight by weight.

All engines share one process, which runs this file as a program.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import LanguageModelLoss, assemble_model
from megatron_coca.model.width_scaling import CONSTANT, HIDDEN, kind_of
from megatron_coca.training.engine import build_engine
from megatron_coca.training.engine import group as dist
from tests.patience import patience

RATIO, RATE, DECAY, BETAS, EPSILON = 4, 1e-2, 0.3, (0.9, 0.95), 1e-9
KEYS: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 64}
KEYS |= {"pos_emb": "coca", "gradient_clipping": 0.0, "optimizer.params.lr": RATE, "optimizer.params.betas": BETAS}
KEYS |= {"optimizer.params.eps": EPSILON, "weight_decay": DECAY, "train_micro_batch_size_per_gpu": 2}
KEYS |= {"use_mup": True, "mup_base_hidden_size": 8, "no_weight_tying": True}
ENGINES: dict[str, dict[str, Any]] = {"native": {"engine": "native"}}
ENGINES |= {f"ZeRO {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)}
STEPS = 3


def batch(step: int) -> Batch:
    return Batch(np.random.default_rng(step).integers(16, size=(2, 9)))


def written_out(config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights after each step of AdamW with the rate of each kind of weight, in float32."""
    model = LanguageModelLoss(assemble_model(config, "cpu").train())
    weights = dict(model.named_parameters())
    mean, square = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    for step in range(STEPS):
        model(torch.from_numpy(batch(step).tokens)).backward()
        for name, weight in weights.items():
            grad = weight.grad
            assert grad is not None
            mean[name] = BETAS[0] * mean[name] + (1 - BETAS[0]) * grad
            square[name] = BETAS[1] * square[name] + (1 - BETAS[1]) * grad**2
            unbiased = mean[name] / (1 - BETAS[0] ** (step + 1))
            size = (square[name] / (1 - BETAS[1] ** (step + 1))).sqrt() + EPSILON
            rate = RATE / RATIO if kind_of(name) is HIDDEN else RATE
            shrunk = 1 - RATE * DECAY if weight.dim() == 2 else 1.0  # the same share at every width
            weight.data = weight.detach() * shrunk - rate * unbiased / size
            weight.grad = None
        yield {name.removeprefix("model."): weight.detach().clone() for name, weight in weights.items()}


def check(name: str) -> None:
    """Train with an engine, and compare its weights after each step."""
    config = load_config([], KEYS | ENGINES[name])
    expected = list(written_out(config))
    assert {kind_of(each) for each in expected[0]} == {HIDDEN, CONSTANT}
    engine = build_engine(assemble_model(config, "cpu").train(), config, config.batch.resolve(1))
    for step, weights in enumerate(expected):
        engine.train_step([batch(step)], RATE)
        found = {piece.name: piece for piece in engine.pieces() if piece.kind == "weight"}
        assert found.keys() == weights.keys()
        for each, weight in weights.items():
            moved = found[each].tensor.flatten()[: weight.numel()].view(weight.shape)
            # Adam divides by the root of small squares, so a difference of rounding can change a step of 0.01 a little.
            torch.testing.assert_close(moved, weight, rtol=1e-5, atol=2e-5, msg=f"{name}: {each} at step {step}")
    engine.close()
    print(f"equal: {name}")


def test_steps() -> None:
    root = Path(__file__).parents[3]
    launcher = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1")
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience(300))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "equal: " in line] == [f"equal: {name}" for name in ENGINES]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_distributed()
    for engine in ENGINES:
        check(engine)
    dist.shut_down()
