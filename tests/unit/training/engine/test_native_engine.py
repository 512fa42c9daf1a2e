"""The native engine in one process: steps as in a loop of plain PyTorch, bad steps, held-out losses, resumed states."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

from megatron_coca.config import Config, load_config
from megatron_coca.data import Batch
from megatron_coca.model import GPT, LanguageModelLoss, build_model
from megatron_coca.training.engine import NativeEngine, build_engine
from megatron_coca.training.monitoring.loss_guard import Limits
from megatron_coca.training.optimizer import build_optimizer
from tests.checkpoint_files import run_alone
from tests.conftest import clean_environment

KEYS: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 64}
KEYS |= {"pos_emb": "coca", "engine": "native", "gradient_clipping": 0.5, "optimizer.params.lr": 1e-2}
KEYS |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
STEPS = 4
DTYPES: dict[str, dict[str, Any]] = {"fp32": {}, "bfloat16": {"precision": "bfloat16"}}
MUON = {"optimizer.type": "Muon"}
OPTIMIZED = DTYPES | {f"{name}, Muon": keys | MUON for name, keys in DTYPES.items()}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    run_alone(monkeypatch)


def configured(keys: dict[str, Any]) -> Config:
    return load_config([], KEYS | keys)


def model_of(config: Config, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return build_model(config).train()


def engine_of(config: Config, seed: int = 0) -> tuple[NativeEngine, GPT]:
    model = model_of(config, seed)
    engine = build_engine(model, config, config.batch.resolve(1))
    assert isinstance(engine, NativeEngine)
    return engine, model


def batches(step: int) -> list[Batch]:
    return list(Batch(np.random.default_rng(step).integers(8, size=(4, 9))).split(2))


def plain_steps(config: Config) -> tuple[list[tuple[float, float]], nn.Module]:
    """Losses, norms and the model of a loop with float32 weights, which the model reads in its dtype."""
    model = LanguageModelLoss(model_of(config))
    masters = LanguageModelLoss(model_of(config)) if config.precision.dtype == "bf16" else model
    if config.precision.dtype == "bf16":
        model.to(torch.bfloat16)
        for master, weight in zip(masters.parameters(), model.parameters(), strict=True):
            master.data = weight.detach().float()
    optimizer, figures = build_optimizer(masters, config.optimizer), []
    for step in range(STEPS):
        losses = [model(torch.from_numpy(batch.tokens)) for batch in batches(step)]
        torch.stack(losses).mean().backward()
        for master, weight in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = weight.grad.to(master.dtype)  # type: ignore[union-attr]
        norm = nn.utils.clip_grad_norm_(masters.parameters(), config.optimizer.gradient_clipping)
        optimizer.step()
        for master, weight in zip(masters.parameters(), model.parameters(), strict=True):
            weight.data.copy_(master.detach())
            master.grad = weight.grad = None
        figures.append((float(torch.stack(losses).detach().double().mean()), float(norm)))
    return figures, model


@pytest.mark.parametrize("keys", [*DTYPES.values(), DTYPES["bfloat16"] | MUON], ids=[*DTYPES, "bfloat16, Muon"])
def test_steps_are_those_of_plain_pytorch(keys: dict[str, Any]) -> None:
    config = configured(keys)
    engine, model = engine_of(config)
    assert engine.loss_scale is None and engine.device == torch.device("cpu") and not engine.copies
    figures, expected = plain_steps(config)
    for step, (loss, norm) in enumerate(figures):
        result = engine.train_step(batches(step), 1e-2)
        assert (result.skipped, result.labels) == (False, 4 * 8)
        # The sums of gradients and squares are in another order.
        tolerance = 1e-6 if not keys else 2e-2
        assert result.loss == pytest.approx(loss, rel=tolerance) and result.grad_norm == pytest.approx(
            norm, rel=tolerance
        )
        assert norm > config.optimizer.gradient_clipping, "clips"
    tolerance = 1e-5 if not keys else 2e-2
    for weight, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=tolerance, atol=tolerance)
    assert engine.counters() == {"step": float(STEPS)}


@pytest.mark.parametrize("keys", OPTIMIZED.values(), ids=OPTIMIZED)
def test_a_resumed_engine_trains_the_same_bits(keys: dict[str, Any]) -> None:
    config = configured(keys)
    engine, model = engine_of(config)
    for step in range(2):
        engine.train_step(batches(step), 1e-2)
    saved, counters = {each[:3]: each.tensor.clone() for each in engine.pieces()}, engine.counters()
    whole = [engine.train_step(batches(step), 1e-2) for step in range(2, STEPS)]
    held_out = engine.mean_loss(batches(STEPS))
    other, resumed = engine_of(config, seed=1)
    assert engine.parameter_slices() == other.parameter_slices()
    for piece in other.pieces():
        piece.tensor.copy_(saved[piece[:3]])
    other.restored(counters)
    assert [other.train_step(batches(step), 1e-2) for step in range(2, STEPS)] == whole
    assert other.mean_loss(batches(STEPS)) == held_out and held_out.labels == 4 * 8
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("keys", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("limits", [Limits(loss=1.0), Limits(grad_norm=1e-3)], ids=str)
def test_a_bad_step_changes_nothing(keys: dict[str, Any], limits: Limits) -> None:
    engine, _ = engine_of(configured(keys))
    engine.train_step(batches(0), 1e-2)
    before = [each.tensor.clone() for each in engine.pieces()]
    result = engine.train_step(batches(1), 1e-2, limits)
    assert result.skipped and engine.counters() == {"step": 1.0}
    assert all(torch.equal(one, each.tensor) for one, each in zip(before, engine.pieces(), strict=True))
    again = engine.train_step(batches(1), 1e-2)
    assert (again.loss, again.grad_norm) == (result.loss, result.grad_norm) and not again.skipped


def test_weights_that_are_not_finite_are_not_updated() -> None:
    for keys in DTYPES.values():
        engine, model = engine_of(configured(keys))
        with torch.no_grad():
            next(model.parameters()).fill_(torch.inf)
        assert engine.train_step(batches(0), 1e-2).skipped


def test_a_closed_engine_frees_the_weights() -> None:
    for keys in DTYPES.values():
        engine, model = engine_of(configured(keys))
        engine.train_step(batches(0), 1e-2)
        engine.close()
        assert not sum(weight.numel() for weight in model.parameters())


WITHOUT_DEEPSPEED = """
import json, sys
from megatron_coca.config import load_config
from megatron_coca.training import run

run.fit(load_config([], json.loads(sys.argv[1])))
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "deepspeed"]))
"""


@pytest.mark.always
def test_a_run_does_not_import_deepspeed(tmp_path: Path) -> None:
    """Also with a validation and a checkpoint."""
    keys = KEYS | {"vocab_size": None, "seq_length": 32, "synthetic": {"task": "recall"}, "train_iters": 2}
    keys |= {"eval_iters": 1, "save": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_DEEPSPEED, json.dumps(keys)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert (tmp_path / "latest").is_file()
