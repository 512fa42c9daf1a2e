"""The data of stages: a function of seed, step and list, that reads no sample twice while the length stays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_coca.commands import inspect
from megatron_coca.config import load_config
from megatron_coca.data import DataError, load_tokenizer
from megatron_coca.data.shards import ShardWriter
from megatron_coca.training.corpus import open_loader
from megatron_coca.training.opened_stages import OpenedStage, differing_stages, open_stages
from megatron_coca.training.topology import Topology

KEYS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 4,
    "pos_emb": "rotary",
    "vocab_size": 20000,
    "train_iters": 12,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 4,
    "valid_data_paths": [],
    "test_data_paths": [],
}
ALONE = Topology(1, 1, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 1,000 tokens, each with one id of its own, so that a sample shows its source."""
    folder = tmp_path_factory.mktemp("shards")
    for name, first in (("a", 0), ("b", 10000)):
        writer = ShardWriter(folder / name, 20000)
        writer.add(np.arange(first, first + 1000))
        writer.finish()
    return folder


def opened(folder: Path, *stages: dict[str, Any], **keys: Any) -> list[OpenedStage]:
    sources = {"train_data_paths": [str(folder / "a"), str(folder / "b")], "stages": list(stages) or None}
    return open_stages(load_config([], KEYS | sources | keys), ALONE)


def samples(stages: list[OpenedStage]) -> Iterator[tuple[int, ...]]:
    """All samples of the run in order, as the training loop reads them."""
    for stage, corpus, sizes, _ in stages:
        with open_loader(corpus, corpus.train, (sizes.total, sizes.micro, 0, 1)) as loader:
            for step in range(stage.first, stage.last):
                for batch in loader.micro_batches(step):
                    yield from map(tuple, batch.tokens.tolist())


def test_stages_of_the_same_data_are_one_order(folder: Path) -> None:
    whole = list(samples(opened(folder)))
    assert list(samples(opened(folder, {"until": 5}, {"until": 7, "optimizer.params.lr": 1.0}, {}))) == whole
    larger = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
    assert list(samples(opened(folder, {"until": 4}, larger)))[: len(whole)] == whole


def test_other_weights_read_on_after_the_tokens_that_were_read(folder: Path) -> None:
    stages = opened(folder, {"until": 6}, {"until": 9, "train_data_weights": [0.1, 0.9]}, {})
    found = list(samples(stages))
    assert len(set(found)) == len(found) == 48, "no sample is read twice"
    of_a = [sum(sample[0] < 10000 for sample in found[24 * n : 24 * n + 12]) for n in range(2)]
    assert of_a == [6, 1]


def test_the_mixture_counts_all_stages(folder: Path) -> None:
    *_, last = opened(folder, {"until": 6, "seq_length": 8}, {"train_data_weights": [1.0, 3.0]})
    first, second = last.corpus.mixture(12, 4)
    assert (first.tokens, second.tokens) == (12 * 8 + 6 * 4, 12 * 8 + 18 * 4)
    assert first.fraction + second.fraction == 1.0 and first.fraction == 120 / 288
    assert last.corpus.start == (6, 24) and list(last.corpus.train._read) == [24, 24]
    assert [record["tokens_per_step"] for record in last.records] == [32, 16]
    assert list(last.records[0]["read"].values()) == [96, 96]


def test_a_source_of_an_earlier_stage_stays_in_the_mixture(folder: Path) -> None:
    only = {"train_data_paths": [str(folder / "b")]}
    *_, last = opened(folder, {"until": 6}, only)
    shares = last.corpus.mixture(12, 4)
    assert [(Path(share.source).name, share.tokens, share.weight) for share in shares] == [
        ("a", 48, 0.0),
        ("b", 144, 1.0),
    ]


def test_missing_data_of_a_stage_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"stages\[1\]: .*nowhere"):
        opened(folder, {"until": 6}, {"train_data_paths": ["nowhere"]})
    writer = ShardWriter(tmp_path / "c", 300)
    writer.add(np.arange(100))
    writer.finish()
    load_tokenizer("CharLevelTokenizer").save(tmp_path)
    with pytest.raises(DataError, match=r"stages\[1\]: the data has a different tokenizer"):
        opened(folder, {"until": 6}, {"train_data_paths": [str(tmp_path / "c")]})


def test_synthetic_samples_are_new_in_every_stage(folder: Path) -> None:
    keys = {"synthetic": {"task": "copy", "filler_tokens": 50}, "vocab_size": None, "train_data_paths": None}
    found = list(samples(opened(folder, {"until": 5}, {"seq_length": 8}, **keys)))
    assert len({sample[:3] for sample in found}) > 40
    whole = list(samples(opened(folder, **keys)))
    assert list(samples(opened(folder, {"until": 5}, {}, **keys))) == whole


def test_finished_stages_are_compared() -> None:
    one, two = ({"last": last, "tokens_per_step": 8, "changes": {}, "read": {}} for last in (5, 9))
    assert differing_stages([], []) == differing_stages([], [one]) == differing_stages([one], [two]) == []
    assert differing_stages([one, two], [one, one]) == []
    assert differing_stages([one, two], [two, two]) == ["last (saved 5, now 9) in the finished stages[0]"]
    assert "in stage 2, but is now in stage 1" in differing_stages([one, two], [])[0]


def test_stages_are_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample is read in the stage that it belongs to, and the mixture is reported at every border."""
    for name in "ab":
        writer = ShardWriter(tmp_path / name, 512)
        writer.add(np.full(1000, ord(name)))
        writer.finish()
    stages = [{"until": 6}, {"until": 9, "train_data_weights": [0.1, 0.9]}, {"seq_length": 8}]
    changes: dict[str, Any] = {"vocab_size": 512, "tokenizer_type": "CharLevelTokenizer"}
    sources = {"train_data_paths": [str(tmp_path / "a"), str(tmp_path / "b")], "stages": stages}
    file, found = tmp_path / "run.yml", tmp_path / "facts.json"
    file.write_text(yaml.safe_dump(KEYS | sources | changes))
    reference = list(samples(open_stages(load_config([file]), ALONE)))
    for number, stage in ((0, 0), (23, 0), (24, 1), (35, 1), (36, 2), (47, 2)):
        assert inspect.main(["sample", str(file), "--number", str(number), "--json", str(found)]) == 0
        facts, shown = json.loads(found.read_text()), capsys.readouterr().out
        assert facts["stage"] == stage and shown.startswith(f"stages[{stage}], sample {number}: {tmp_path}/")
        assert shown.rstrip().endswith("\n" + bytes(reference[number]).decode())
        assert facts["tokens"] == (9 if stage == 2 else 5)
    assert inspect.main(["mixture", str(file), "--json", str(found)]) == 0
    facts, shown = json.loads(found.read_text())["stages"], capsys.readouterr().out
    assert [each["last"] for each in facts] == [6, 9, 12] and shown.count("up to the end of stages[") == 3
    assert [sum(source["tokens"] for source in each["sources"]) for each in facts] == [96, 144, 240]
    with pytest.raises(DataError, match="--samples: not supported for a run with stages"):
        inspect.main(["mixture", str(file), "--samples", "3"])
