"""Devices: the error of a run that asks for GPUs on a host without them, and the line that names the devices."""

import logging
import re
from typing import Any

import pytest
import torch

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.training.launch import check_devices, describe_devices, environment, unaligned_mlp, unused_gpus

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 64}
RANK = {"LOCAL_RANK": "0"}


def configured(**keys: Any) -> Config:
    return load_config([], SHAPE | keys)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without nvidia-smi."""

    def fail() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with nvidia-smi and a driver that PyTorch cannot use."""

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")

    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)


def test_a_process_of_another_launcher_gets_the_error_too(no_gpu: None) -> None:
    for keys in ({"num_gpus": 2}, {"distributed_backend": "nccl"}):
        with pytest.raises(ConfigError, match=f"^{next(iter(keys))}: asks for GPUs, .*cannot use any"):
            check_devices(configured(**keys), RANK)


def test_errors_about_fp16_and_devices_come_together(no_gpu: None) -> None:
    with pytest.raises(ConfigError) as refused:
        check_devices(configured(num_gpus=2, precision="fp16"), RANK)
    devices_line, dtype_line = str(refused.value).splitlines()[-2:]
    assert "num_gpus: asks for GPUs" in devices_line
    assert "precision: fp16 needs a GPU, but" in dtype_line and "; set fp16=null precision=bfloat16" in dtype_line
    with pytest.raises(ConfigError, match="precision: fp16 needs a GPU"):
        check_devices(configured(distributed_backend="gloo", precision="fp16"), RANK)


def test_the_cpu_that_is_asked_for_is_used(no_gpu: None, broken_driver: None, caplog: pytest.LogCaptureFixture) -> None:
    check_devices(configured(num_gpus=2, distributed_backend="gloo"), RANK)
    assert not caplog.records


def test_a_broken_driver_is_named(broken_driver: None, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"num_gpus: .*\(The NVIDIA driver .*too old"):
        check_devices(configured(num_gpus=1), RANK)
    with caplog.at_level(logging.WARNING):
        check_devices(configured(), RANK)
    assert "this host may have GPUs" in caplog.text


def test_each_process_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(configured(num_gpus=2), {"LOCAL_RANK": "1"})
    with pytest.raises(ConfigError, match=r"num_gpus: .*local rank 2 sees only 2 GPU"):
        check_devices(configured(num_gpus=4), {"LOCAL_RANK": "2"})


def test_the_line_names_devices_dtype_and_backend(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    line = describe_devices(configured(), 2, "sdpa")
    assert line == "device: CPU, 2 process(es) of 4 thread(s) (gloo), fp32, attention backend sdpa"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    line = describe_devices(configured(precision="bfloat16"), 8, "merge")
    assert line == "device: 8 x NVIDIA H100 (nccl), bf16, attention backend merge"


@pytest.mark.parametrize(
    ("found", "world_size", "keys", "warned"), [(8, 1, {}, True), (1, 1, {}, False), (8, 8, {}, False)]
)
def test_gpus_that_no_process_takes_are_told(
    monkeypatch: pytest.MonkeyPatch, found: int, world_size: int, keys: dict[str, Any], warned: bool
) -> None:
    """GPT-NeoX would take all of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    note = unused_gpus(configured(**keys), world_size)
    assert (note is not None) == warned and (note is None or "set num_gpus=8" in note)
    assert unused_gpus(configured(num_gpus=1), 1) is None


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, None),
        ({"activation": "swiglu", "expansion_factor": 8}, "85, is not a multiple of 8,.*mlp_multiple_of=8 .16"),
        ({"activation": "swiglu", "expansion_factor": 8, "mlp_multiple_of": 8}, None),
        ({"intermediate_size": 264, "model_parallel_size": 2}, "264, 132 on each of 2 ranks,.*mlp_multiple_of=16 .32"),
        ({"intermediate_size": 268, "precision": "fp32"}, None),
    ],
)
def test_rows_of_the_mlp_that_are_not_aligned_are_told(keys: dict[str, Any], told: str | None) -> None:
    note = unaligned_mlp(configured(**{"precision": "bfloat16"} | keys))
    assert note is None if told is None else re.search(told, str(note))
