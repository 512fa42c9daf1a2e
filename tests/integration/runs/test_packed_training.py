"""Training of CoCA with attention, positions and loss that end at the ends of documents."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_coca.data import Shard
from megatron_coca.data.shards import MASKED, ShardWriter

STEPS = 12
PACKED = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_packed_documents_train_and_resume(
    live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path, zero_stage: int
) -> None:
    """A resumed run ends in the same bits as one that never stopped. It cannot change how documents are separated."""
    once, stopped = ({"save": str(tmp_path / name), "load": str(tmp_path / name)} for name in ("once", "stopped"))
    keys = PACKED | {"zero_stage": zero_stage}
    for output in (live(keys | once).output, live(keys | stopped | {"exit_interval": 5}).output):
        assert "weight" in output and "words_train" in output, "the mixture is logged"
    refused = live(keys | stopped | {"reset_position_ids": False}, expected=2)
    assert "reset_position_ids" in refused.output
    live(keys | stopped)
    one, other = open_run(tmp_path / "once"), open_run(tmp_path / "stopped")
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


@pytest.mark.slow
def test_answers_in_whole_documents_train_and_resume(
    live: Any, corpus: Path, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    """Only every other token counts; stopped and resumed ends in the bits of never stopped, other labels do not."""
    shard = Shard(corpus / "words_train")
    for name, rest in (("even", 0), ("odd", 1)):
        writer = ShardWriter(tmp_path / name, 512, labels=True)
        for number in range(shard.documents):
            document = shard.document(number)
            writer.add(np.where(np.arange(len(document)) % 2 == rest, document, MASKED))
        writer.finish()
    keys = PACKED | {"pack_impl": "pack_until_overflow", "train_label_data_paths": [str(tmp_path / "even")]}
    once, stopped = ({"save": str(tmp_path / name), "load": str(tmp_path / name)} for name in ("once", "stopped"))
    live(keys | once)
    live(keys | stopped | {"exit_interval": 5})
    refused = live(keys | stopped | {"train_label_data_paths": [str(tmp_path / "odd")]}, expected=2)
    assert "label shards" in refused.output
    live(keys | stopped)
    one, other = open_run(tmp_path / "once"), open_run(tmp_path / "stopped")
    assert one.records == other.records and one.weights(STEPS) == other.weights(STEPS)
    assert_same_state(one.state(STEPS), other.state(STEPS))
