"""Gradients of many micro-batches in bfloat16, against float64 and a plain run that sums in float32."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_coca.config import load_config
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training.corpus import open_corpus
from tests.checkpoint_files import open_state

MICRO_BATCHES = 64


def error(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    differences = sum(float((found[name] - each).square().sum()) for name, each in truth.items())
    return (differences / sum(float(each.square().sum()) for each in truth.values())) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sum_of_many_micro_batches_is_as_exact_as_a_plain_one(
    live: Any, small: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    rate = {"optimizer.params.lr": 1e-12, "warmup": 0.0, "train_iters": 1, "eval_iters": 0, "gradient_clipping": 0.0}
    keys = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "precision": "bfloat16", "zero_stage": 1} | rate
    keys |= {"train_batch_size": 2 * MICRO_BATCHES, "train_micro_batch_size_per_gpu": 2}
    config = load_config([], small | keys)
    plain = build_model(config).bfloat16()
    exact, sums = copy.deepcopy(plain).double(), dict[str, Tensor]()
    tokens = torch.from_numpy(open_corpus(config).train.read(np.arange(2 * MICRO_BATCHES)).tokens)
    for rows in tokens.split(2):
        plain.zero_grad()
        (LanguageModelLoss(plain)(rows) / MICRO_BATCHES).backward()
        (LanguageModelLoss(exact)(rows) / MICRO_BATCHES).backward()
        for name, each in plain.named_parameters():
            assert each.grad is not None
            sums[name] = sums.get(name, torch.zeros(each.shape)) + each.grad
    truth = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    errors = {}
    for name, changes in {"fp32": {"data_types": {"grad_accum_dtype": "fp32"}}, "bf16": {}}.items():
        finished = live(keys | changes | {"save": str(tmp_path / name)}, ranks=ranks)
        assert ("are summed in bfloat16" in finished.output) is (name == "bf16")
        with open_state(tmp_path / name / "global_step1" / "state") as reader:
            found = {parameter: reader.whole(parameter, "exp_avg").double() / 0.1 for parameter in truth}
        errors[name] = error(found, truth)
    assert errors["fp32"] <= 2 * error(sums, truth) < errors["bf16"]
