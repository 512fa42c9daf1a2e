"""Training CoCA with attention, positions and loss that stop at the ends of documents."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

STEPS = 12
PACKED = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}


def trained(train: Any, folder: Path, **keys: Any) -> Any:
    finished = train(PACKED | {"save": str(folder), "load": str(folder)} | keys)
    assert finished.status == 0, finished.output
    return finished


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_packed_documents_train_and_resume(
    train: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path, zero_stage: int
) -> None:
    """Stopped and resumed ends in the bits of never stopped; another choice about documents is not resumed."""
    once, stopped = tmp_path / "once", tmp_path / "stopped"
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(trained, train, once, zero_stage=zero_stage),
            pool.submit(trained, train, stopped, zero_stage=zero_stage, exit_interval=5),
        ]
        outputs = [run.result().output for run in runs]
    assert all("weight" in output and "words_train" in output for output in outputs), "the mixture is told"
    refused = train(PACKED | {"save": str(stopped), "load": str(stopped), "reset_position_ids": False})
    assert refused.status == 2 and "reset_position_ids" in refused.output
    trained(train, stopped, zero_stage=zero_stage)
    one, other = open_run(once), open_run(stopped)
    assert one.records == other.records and one.weights(STEPS) == other.weights(STEPS)
    assert_same_state(one.state(STEPS), other.state(STEPS))
    compare_with_plain(one, whole)


def compare_with_plain(packed: Any, plain: Any) -> None:
    """Documents count in the losses; the mixture is in the records and in the checkpoint."""
    assert all(mine != other for mine, other in zip(packed.losses[6:], plain.losses[6:], strict=True))
    assert packed.losses[-1] < packed.losses[0]
    (mixture,) = [record for record in packed.records if "share/words_train" in record]
    assert mixture["step"] == STEPS and mixture["share/words_train"] == 1.0
    meta = json.loads((packed.folder / f"global_step{STEPS}" / "meta.json").read_text())
    (share,) = meta["mixture"]
    assert share["samples"] == STEPS * 4 and share["tokens"] == STEPS * 4 * 32
    assert share["epochs"] == mixture["epochs/words_train"]
