"""Fifty training steps of every position method, compared with recorded losses.

`PYTHONPATH=. python tests/golden/test_losses.py --write coca` records the losses of a method again, after an intended
change of numbers.
"""

import sys
from pathlib import Path

import pytest
import torch

from megatron_coca import methods
from megatron_coca.config import load_config
from megatron_coca.config.schedule import learning_rate
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training.optimizer import build_optimizer

LOSSES = Path(__file__).parent / "losses"
STEPS, BATCH, LENGTH, VOCABULARY, PERIOD = 50, 16, 32, 24, 2
METHODS = tuple(name for name in methods.names("pos_emb") if name != "polar")  # polar is pope by default
RELATIVE = 2e-4
"""Another CPU or thread count adds in another order. Changing every initial weight by 1e-7 of itself moves these losses
by at most 1e-6 of themselves; two methods end more than 1e-2 apart."""

KEYS = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 1,
    "optimizer.params.lr": 3e-3,
    "lr_decay_style": "cosine",
    "min_lr": 3e-4,
    "warmup": 0.1,
    "train_iters": STEPS,
    "seed": 42,
}


def samples() -> torch.Tensor:
    """int64 [STEPS, BATCH, LENGTH + 1]: every token but a few is the one PERIOD places before it, plus one."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=generator)
    surprise = torch.rand(tokens.shape, generator=generator) < 0.05
    for place in range(PERIOD, LENGTH + 1):
        follows = (tokens[..., place - PERIOD] + 1) % VOCABULARY
        tokens[..., place] = torch.where(surprise[..., place], tokens[..., place], follows)
    return tokens


def train(method: str) -> list[float]:
    """The loss before each of the steps, in nats per token, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(method)
    finally:
        torch.set_num_threads(threads)


def _train(method: str) -> list[float]:
    config = load_config([], KEYS | {"pos_emb": method})
    model = LanguageModelLoss(build_model(config))
    optimizer = build_optimizer(model, config.optimizer)
    peak = KEYS["optimizer.params.lr"]
    losses = []
    for step, batch in enumerate(samples()):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak, config.schedule)
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.gradient_clipping)
        optimizer.step()
        losses.append(loss.item())
    return losses


def read(method: str) -> list[float]:
    return [float(line) for line in (LOSSES / f"{method}.txt").read_text().splitlines()]


@pytest.mark.always
@pytest.mark.parametrize("method", METHODS)
def test_losses_are_those_written_down(method: str) -> None:
    expected = read(method)
    assert len(expected) == STEPS
    assert train(method) == pytest.approx(expected, rel=RELATIVE)


ALIKE = {("rotary", "xpos"), ("kerple_log", "rpe")}
"""At 32 tokens the decay of xPos, a factor of (0.3 to 1)^(r/512), is hardly there, and two learned biases of the same
few distances come to much the same."""
SLOW = {"sinusoidal"}
"""Its waves are 35 times as large as the token embeddings at the start, as in GPT-NeoX: fifty steps are too few."""


def test_the_files_tell_methods_apart() -> None:
    last = {method: read(method)[-1] for method in METHODS}
    assert {path.stem for path in LOSSES.glob("*.txt")} == last.keys(), "a file for every method and no other"
    pairs = {(a, b) for a in last for b in last if a < b}
    assert all(abs(last[a] - last[b]) > 50 * RELATIVE * last[a] for a, b in pairs - ALIKE)
    assert all(abs(last[a] - last[b]) > RELATIVE * last[a] for a, b in ALIKE)
    assert all(last[method] < read(method)[0] - 0.1 for method in last.keys() - SLOW), "every method learns"


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "--write" or not {*sys.argv[2:]} <= {*METHODS}:
        sys.exit(f"usage: PYTHONPATH=. python {sys.argv[0]} --write METHOD ...; METHOD is one of {', '.join(METHODS)}")
    LOSSES.mkdir(exist_ok=True)
    for name in sys.argv[2:]:
        (LOSSES / f"{name}.txt").write_text("".join(f"{loss:.6f}\n" for loss in train(name)))
