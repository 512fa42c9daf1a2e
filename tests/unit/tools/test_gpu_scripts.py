"""The scripts of the GPU report, on the CPU: they measure, and their checks can fail."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.config import load_config
from megatron_coca.training.launch import unaligned_mlp
from tests.documents import ROOT
from tools import bench_train
from tools.gpu import parity, ranks, speed
from tools.gpu.cases import read_lines

TINY = ["num_layers=1", "hidden_size=64", "num_attention_heads=4", "seq_length=32", "vocab_size=64"]


SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "seq_length": 16}
SHAPE |= {"vocab_size": 90, "pos_emb": "rotary"}


def test_parity_finds_a_wrong_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without positions in place of the rotary one on the device."""
    monkeypatch.setattr(parity, "SHAPE", parity.SHAPE | {"hidden_size": 64, "num_layers": 1, "vocab_size": 4099})
    figures = parity.compare({"pos_emb": "rotary"}, "cpu", compiled=False, values=True)
    assert figures["worst_error"] == figures["worst_on_cpu"] and figures["backend"] == "sdpa"
    build = parity.build_model

    def other(config: Any, *device: str) -> Any:
        return build(config.override({"pos_emb": "none"}) if device else config, *device)

    monkeypatch.setattr(parity, "build_model", other)
    with pytest.raises(AssertionError, match=r"blocks.0.*: error .*, allowed"):
        parity.compare({"pos_emb": "rotary"}, "cpu", compiled=False, values=True)


def test_parity_finds_a_gradient_that_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a correct loss: NaN is neither larger nor smaller than another error."""
    monkeypatch.setattr(parity, "SHAPE", parity.SHAPE | {"hidden_size": 64, "num_layers": 1, "vocab_size": 4099})
    build = parity.build_model

    def broken(config: Any, *device: str) -> Any:
        model = build(config, *device)
        if device:
            last = list(model.parameters())[-1]
            last.register_hook(lambda grad: grad * math.nan)
        return model

    monkeypatch.setattr(parity, "build_model", broken)
    with pytest.raises(AssertionError, match="error nan, allowed"):
        parity.compare({"pos_emb": "rotary"}, "cpu", compiled=False, values=True)


def test_speed_writes_a_line_for_every_method_and_length(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    arguments = ["--output", str(file), "--device", "cpu", "--dtype", "float32", "--rounds", "2", "--lengths", "32"]
    assert speed.main([*arguments, "--methods", "rotary", "coca", "--keys", *TINY]) == 0
    lines = [line for line in read_lines(file) if line["status"] == "ok"]
    assert [(line["method"], line["length"], line["base"]) for line in lines] == [
        (name, 32, "rotary") for name in ("rotary", "coca")
    ]
    assert all(line["milliseconds"] > 0 and line["ratio"] > 0 and line["backend"] == "sdpa" for line in lines)


def test_decoding_with_fixed_shapes_is_timed_beside_a_growing_cache(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    arguments = ["--output", str(file), "--device", "cpu", "--dtype", "float32", "--rounds", "2", "--lengths", "32"]
    assert speed.main([*arguments, "--graphs", "--methods", "coca", "--keys", *TINY]) == 0
    (line,) = (line for line in read_lines(file) if line["status"] == "ok")
    assert (line["method"], line["length"], line["base"]) == ("coca", 32, "growing") and line["ratio"] > 0


def test_methods_of_another_version_are_left_out() -> None:
    """A row of the table of methods is enough for a new method."""
    assert not speed.available({"pos_emb": "no_such_method"}) and speed.available(speed.METHODS["coca"])


def test_kernels_for_packed_documents_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = speed.Setting(argparse.Namespace(device="cpu", dtype="float32", keys=[]))
    monkeypatch.setattr(speed, "TOKENS", 128)
    monkeypatch.setattr(speed, "DOCUMENT", 20)
    call = speed.PACKED["sdpa"]
    monkeypatch.setattr(speed, "PACKED", {"sdpa": call, "other": lambda inputs: call(inputs.replace(documents=None))})
    assert speed.packed(setting, 64, 1, "sdpa", values=True)["documents"] > 2
    with pytest.raises(AssertionError, match="output: differs from sdpa by"):
        speed.packed(setting, 64, 1, "other", values=True)


def test_losses_are_compared() -> None:
    one = {1: 6.0, 2: 5.0}
    ranks.same_bits(one, dict(one))
    with pytest.raises(AssertionError, match="step 2: loss 5.0 and 5.00"):
        ranks.same_bits(one, one | {2: 5.0 + 1e-12})
    with pytest.raises(AssertionError, match="steps \\[3\\] are only in one run"):
        ranks.same_bits(one, one | {3: 4.0})
    assert ranks.nearly(one, one | {2: 5.001}) == pytest.approx(2e-4, rel=1e-2)
    for loss in (6.0, math.nan, math.inf):
        with pytest.raises(AssertionError, match=f"step 2: losses 5.0 and {loss} differ"):
            ranks.nearly(one, one | {2: loss})


@pytest.mark.slow
@pytest.mark.parametrize("check", ["resume", "elastic", "collectives"])
def test_whole_runs(check: str, tmp_path: Path) -> None:
    inputs = [str(ROOT / "configs/quickstart/roformer_coca.yml")]
    keys = ["num_layers=1", "hidden_size=32", "seq_length=32", "train_batch_size=8", "distributed_backend=gloo"]
    arguments = ["--check", check, "--ranks", "2", "--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "x")]
    keys += ["train_micro_batch_size_per_gpu=2"]
    assert ranks.main([*arguments, "--inputs", *inputs, "--keys", *keys]) == 0, read_lines(tmp_path / "x")


def test_the_llama_has_our_shape_and_as_many_weights_as_gpt_neox() -> None:
    pytest.importorskip("transformers")
    config = load_config([], SHAPE)
    counts = {}
    for name in ("transformers", "llama"):
        peer = bench_train.PEERS[name]
        own = config.override(peer.keys)
        counts[name] = sum(weight.numel() for weight in peer.build(own).parameters())
        assert counts[name] == bench_train.parameter_count(own).total
    assert counts["llama"] == pytest.approx(counts["transformers"], rel=0.02)


def test_the_rows_of_the_llama_are_aligned() -> None:
    """Otherwise the peer would be measured with slower matrix products than its users have."""
    config = load_config([ROOT / "configs/350M/roformer.yml"], ["precision=bfloat16"]).override(
        bench_train.PEERS["llama"].keys
    )
    assert config.model.ffn_hidden_size == 2736 and unaligned_mlp(config) is None


def test_a_contestant_without_memory_does_not_stop_the_others() -> None:
    config = load_config([], SHAPE | {"train_micro_batch_size_per_gpu": 1})

    def full(batches: list[torch.Tensor]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    entrants = [bench_train.Contestant("full", config, full, lambda _: 0)]
    entrants += [bench_train.Contestant("fits", config, lambda _: 1.0, lambda _: 5)]
    options = bench_train.parse(["x=1", "--rounds", "50", "--seconds", "0"])
    first, second = bench_train.race(entrants, options)
    assert first["error"] == "out of memory" and second["method"] == second["ratio_to"] == "fits"
    assert second["rounds"] == 3, "no round begins after the time is over"
