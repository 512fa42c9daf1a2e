"""The recipe of a checkpoint: the keys in which models that are averaged over seeds must agree."""

from typing import Any

import pytest

from megatron_coca.config import load_config
from megatron_coca.evaluation.results import CheckpointRecord
from megatron_coca.evaluation.subject import recipe_of

ELSEWHERE = {f"{split}_data_paths": ["data/elsewhere"] for split in ("train", "valid", "test")}
KEYS = {"train_iters": 100, "optimizer.params.lr": 1e-3, "stages": [{"until": "50%", "seq_length": 256}, {}]}


def recipe(**keys: Any) -> dict[str, Any]:
    return recipe_of(load_config("configs/350M/roformer.yml", KEYS | keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"seed": 7},
        {"save": "runs/elsewhere", "log_interval": 3},
        ELSEWHERE,
        {"train_micro_batch_size_per_gpu": 1},
        {"stages": [{"until": "50%", "seq_length": 256, **ELSEWHERE}, {}]},
    ],
)
def test_seeds_folders_and_machines_do_not_change_a_recipe(keys: Any) -> None:
    assert recipe(**keys) == recipe()


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer.params.lr": 2e-3},
        {"optimizer.params.betas": [0.9, 0.98]},
        {"synthetic": {"task": "recall", "facts": 4}, "vocab_size": 512},
        {"weight_decay": 0.3},
        {"train_iters": 200},
        {"train_batch_size": 64},
        {"init_method_std": 0.5},
        {"stages": [{"until": "50%", "seq_length": 128}, {}]},
        {"lora": {"rank": 4, "alpha": 8, "targets": ["query"]}},
    ],
)
def test_what_a_training_makes_of_a_seed_is_in_its_recipe(keys: Any) -> None:
    changed = recipe(**keys)
    assert changed != recipe()
    record = CheckpointRecord(path="run", identity="x", step=1, seq_length=8, pos_emb="rotary", recipe=changed)
    assert CheckpointRecord.model_validate_json(record.model_dump_json()).recipe == changed
