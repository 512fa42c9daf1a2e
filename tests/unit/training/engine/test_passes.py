"""Passes in a CUDA graph train the bits of passes without one. The graph is imitated; tests/gpu has real ones."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import Batch
from megatron_coca.model import GPT, build_model
from megatron_coca.training.engine import NativeEngine, StepResult, build_engine
from megatron_coca.training.engine.passes import WARMUP, CapturedPass
from megatron_coca.training.monitoring.loss_guard import Limits
from megatron_coca.training.optimizer import train_only_parts
from tests.checkpoint_files import run_alone
from tests.imitated_graphs import Replays

KEYS: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 64}
KEYS |= {"pos_emb": "coca", "engine": "native", "gradient_clipping": 0.5, "optimizer.params.lr": 1e-2}
KEYS |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, one micro-batch": {"precision": "bfloat16", "gradient_accumulation_steps": 1},
    "bfloat16, sums in fp32": {"precision": "bfloat16", "data_types": {"grad_accum_dtype": "fp32"}},
    "frozen weights, dropout": {"trainable": ["key", "mlp"], "hidden_dropout": 0.2, "attention_dropout": 0.2},
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    run_alone(monkeypatch)
    imitated = Replays()
    yield imitated
    imitated.restore()


def engine_of(keys: dict[str, Any], captured: bool, seed: int = 0) -> tuple[NativeEngine, GPT]:
    config = load_config([], KEYS | keys | {"cuda_graphs": captured})
    torch.manual_seed(seed)
    model = build_model(config).train()
    train_only_parts(model, config.optimizer)
    engine = build_engine(model, config, config.batch.resolve(1))
    assert isinstance(engine, NativeEngine)
    return engine, model


def batches(step: int, count: int, masked: bool = False, lengths: Sequence[int] = ()) -> list[Batch]:
    generator, found = np.random.default_rng(step), []
    for length in lengths or [8] * count:
        mask = generator.random((2, length)) < 0.5 if masked else None
        found.append(Batch(generator.integers(8, size=(2, length + 1)), loss_mask=mask))
    return found


def train(engine: NativeEngine, steps: range, masked: bool = False) -> list[StepResult]:
    count = engine._config.batch.resolve(1).accumulation
    return [engine.train_step(batches(step, count, masked), 1e-2) for step in steps]


def assert_equal(one: GPT, other: GPT) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("masked", [False, True], ids=["all labels", "loss masks"])
@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_captured_passes_train_the_same_bits(keys: dict[str, Any], masked: bool, replays: Replays) -> None:
    (plain, expected), (captured, model) = (engine_of(keys, captured) for captured in (False, True))
    torch.manual_seed(7)
    wanted = train(plain, range(STEPS), masked)
    torch.manual_seed(7)
    assert train(captured, range(STEPS), masked) == wanted
    assert_equal(model, expected)
    micro_batches = STEPS * captured._config.batch.resolve(1).accumulation
    assert replays.count == micro_batches - WARMUP
    assert any(norm > 0.5 for _, norm, *_ in wanted), "never clips"
    assert captured.mean_loss(batches(9, 1)) == plain.mean_loss(batches(9, 1))


@pytest.mark.parametrize("keys", [CASES["fp32"], CASES["bfloat16"]], ids=["fp32", "bfloat16"])
def test_a_resumed_engine_captures_again(keys: dict[str, Any], replays: Replays) -> None:
    whole, expected = engine_of(keys, True)
    train(whole, range(3))
    saved, counters = {each[:3]: each.tensor.clone() for each in whole.pieces()}, whole.counters()
    wanted = train(whole, range(3, STEPS))
    resumed, model = engine_of(keys, True, seed=1)
    train(resumed, range(7, 9))  # so that its graph exists before the state is replaced
    for piece in resumed.pieces():
        piece.tensor.copy_(saved[piece[:3]])
    resumed.restored(counters)
    assert train(resumed, range(3, STEPS)) == wanted
    assert_equal(model, expected)


def test_micro_batches_of_another_shape_run_without_the_graph(replays: Replays) -> None:
    """Also between two replays of one step."""
    figures, models = [], []
    for captured in (False, True):
        engine, model = engine_of({"gradient_accumulation_steps": 5}, captured)
        given = [[8] * 5, [8, 8, 5, 8, 8], [5, 8, 8, 8, 5], [5] * 5, [8] * 5]
        figures.append([engine.train_step(batches(n, 0, lengths=row), 1e-2) for n, row in enumerate(given)])
        models.append(model)
    assert figures[0] == figures[1]
    assert_equal(*models)
    assert replays.count == 2 + 4 + 3 + 5


def test_the_capture_waits_for_equal_shapes(replays: Replays) -> None:
    engine, _ = engine_of({"gradient_accumulation_steps": 2}, True)
    engine.train_step(batches(0, 0, lengths=[8, 8]), 1e-2)
    engine.train_step(batches(1, 0, lengths=[5, 8]), 1e-2)
    engine.train_step(batches(2, 0, lengths=[8, 8]), 1e-2)
    assert not replays.count
    engine.train_step(batches(3, 0, lengths=[8, 8]), 1e-2)
    assert replays.count == 2


def test_a_bad_step_changes_nothing(replays: Replays) -> None:
    engine, _ = engine_of({}, True)
    train(engine, range(2))
    before = [each.tensor.clone() for each in engine.pieces()]
    result = engine.train_step(batches(2, 3), 1e-2, Limits(loss=1.0))
    assert result.skipped and replays.count == 6
    assert all(torch.equal(one, each.tensor) for one, each in zip(before, engine.pieces(), strict=True))
    again = engine.train_step(batches(2, 3), 1e-2)
    assert (again.loss, again.grad_norm) == (result.loss, result.grad_norm) and not again.skipped


def test_what_a_graph_cannot_contain_is_an_error(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not too little memory, for which the run has its own message."""

    def fail(error: type[RuntimeError], *arguments: object) -> None:
        raise error("operation not permitted when stream is capturing\nmore")

    engine, _ = engine_of({}, True)
    monkeypatch.setattr(CapturedPass, "_captured", partial(fail, RuntimeError))
    train(engine, range(1))
    with pytest.raises(ConfigError, match=r"cuda_graphs: .* \(operation not .* capturing\); .*cuda_graphs=false"):
        train(engine, range(1, 2))
    engine, _ = engine_of({}, True)
    monkeypatch.setattr(CapturedPass, "_captured", partial(fail, torch.OutOfMemoryError))
    train(engine, range(1))
    with pytest.raises(torch.OutOfMemoryError):
        train(engine, range(1, 2))


def test_a_closed_engine_frees_the_memory_of_the_graph(replays: Replays) -> None:
    engine, model = engine_of({}, True)
    train(engine, range(2))
    engine.close()
    captured = engine._captured
    assert captured is not None and not (captured._inputs or captured._gradients or captured._sums)
    assert not sum(weight.numel() for weight in model.parameters())
