"""With labels, loss, gradient and validation loss are means over all labels, with any division of the samples.

Most of the sixteen samples have no label and a few have many, so means of means would differ by a factor.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron_coca.config import load_config
from megatron_coca.data import Blend, Shard
from megatron_coca.data.shards import MASKED, ShardWriter
from megatron_coca.model import build_model
from megatron_coca.training.corpus import open_corpus
from tests.checkpoint_files import open_state
from tests.conftest import make_labels

BATCH, EVALUATED, LENGTH = 16, 2, 32
LOSS, GRADIENT = 2e-6, 1e-5
"""Relative, of float32 against float64: sums of 16 samples in two layers."""


@pytest.fixture(scope="module")
def keys(small: dict[str, Any], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One step at a learning rate that changes no weight, so that it is validated with the initial ones."""
    folder = tmp_path_factory.mktemp("labels")
    labels = {
        f"{split}_label_data_paths": [make_labels(corpus / f"words_{name}", folder)]
        for split, name in (("train", "train"), ("valid", "test"))
    }
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_clipping": 0.0, "init_method_std": 0.2}
    fixed = {"train_iters": 1, "eval_interval": 1, "eval_iters": EVALUATED, "train_batch_size": BATCH}
    rate = {"optimizer.params.lr": 1e-12, "warmup": 0.0, "min_lr": 0.0}
    return plain | fixed | rate | labels | {"eod_mask_loss": True, "eval_windows": [LENGTH, 2 * LENGTH]}


Truth = dict[str, Any]


@pytest.fixture(scope="module")
def truth(small: dict[str, Any], keys: dict[str, Any]) -> Truth:
    """Figures and gradients in float64: one sum over all labels, divided by their number."""
    config = load_config([], small | keys | {"train_micro_batch_size_per_gpu": BATCH})
    opened, model = open_corpus(config), build_model(config).double()
    eod = opened.packing.masked_token

    def mean(samples: Any, count: int, window: int = LENGTH, last: int = LENGTH) -> torch.Tensor:
        tokens, _, mask = samples.read(np.arange(count))
        tokens, counted = tokens[:, -window - 1 :], (mask & (tokens[:, :-1] != eod))[:, -last:]
        given, counted = torch.from_numpy(tokens), torch.from_numpy(counted)
        assert 0.02 < counted.float().mean() < 0.5 and (counted.sum(1) == 0).sum() > count / 3
        logits = model(given[:, :-1])[:, -last:]
        return F.cross_entropy(logits[counted], given[:, -last:][counted], reduction="sum") / counted.sum()

    loss = mean(opened.train, BATCH)
    loss.backward()
    longest = Blend(opened.valid.shards, opened.valid.weights, 2 * LENGTH, opened.valid.seed)
    scored = {name: mean(longest, BATCH, window, LENGTH // 2) for name, window in (("32", 32), ("64", 64))}
    return {
        "loss": float(loss.detach()),
        "validation_loss": float(mean(opened.valid, EVALUATED * BATCH).detach()),
        **{f"validation_perplexity_{name}": math.exp(float(each.detach())) for name, each in scored.items()},
        "gradients": {name: each.grad for name, each in model.named_parameters()},
    }


FAST = [(1, {}, 16), (1, {}, 1), (2, {"zero_stage": 2}, 1)]
SLOW = [
    (1, {}, 8),
    (2, {}, 8),
    (4, {"zero_stage": 1}, 2),
    (2, {"zero_stage": 3}, 4),
    (2, {"pipe_parallel_size": 2}, 2),
    (2, {"model_parallel_size": 2}, 2),
    (2, {"sequence_parallel_size": 2}, 2),
    (4, {"sequence_parallel_size": 2, "zero_stage": 3}, 1),
    (4, {"pipe_parallel_size": 2}, 2),
    (1, {"loss_chunk_size": 0}, 2),
]


def test_a_step_without_labels_has_no_gradient(
    live: Any, open_run: Any, tmp_path: Path, keys: Any, corpus: Path
) -> None:
    """It is no loss of 0, and neither is a validation without labels."""
    for name in ("train", "test"):
        shard = Shard(corpus / f"words_{name}")
        writer = ShardWriter(tmp_path / f"{name}_labels", 512, labels=True)
        for number in range(shard.documents):
            writer.add(np.full(len(shard.document(number)), MASKED))
        writer.finish()
    labels = {"train_label_data_paths": [str(tmp_path / "train_labels")]}
    labels["valid_label_data_paths"] = [str(tmp_path / "test_labels")]
    finished = live(keys | labels | {"save": str(tmp_path / "run"), "train_iters": 2}, ranks=2)
    run = open_run(tmp_path / "run")
    steps = [record for record in run.records if "loss" in record]
    assert [(step["loss"], step["grad_norm"], step["skipped_steps"]) for step in steps] == [(None, 0.0, 0)] * 2
    assert [event for event in run.events if "no token of this step has a label" in event] == run.events
    assert len(run.events) == 2 and not any("validation" in name for record in run.records for name in record)
    assert "validation_loss: not reported" in finished.output
    weights = load_file(tmp_path / "run" / "global_step2" / "model.safetensors")
    assert all(bool(each.isfinite().all()) for each in weights.values())


@pytest.mark.parametrize(
    ("ranks", "changes", "micro"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_figures_and_gradients_are_means_over_labels(
    live: Any, open_run: Any, tmp_path: Path, keys: Any, truth: Truth, ranks: int, changes: dict[str, Any], micro: int
) -> None:
    live(keys | changes | {"save": str(tmp_path), "train_micro_batch_size_per_gpu": micro}, ranks=ranks)
    figures = {name: value for record in open_run(tmp_path).records for name, value in record.items()}
    for name in truth.keys() - {"gradients"}:
        assert figures[name] == pytest.approx(truth[name], rel=LOSS), name
    norm = math.sqrt(sum(float(each.square().sum()) for each in truth["gradients"].values()))
    assert figures["grad_norm"] == pytest.approx(norm, rel=GRADIENT)
    with open_state(tmp_path / "global_step1" / "state") as reader:
        for name, gradient in truth["gradients"].items():
            found = reader.whole(name, "exp_avg").double() / 0.1  # 1 - beta1
            assert (found - gradient).norm() <= GRADIENT * norm, name
