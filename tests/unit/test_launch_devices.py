"""Devices: what a run that asks for GPUs is told on a host without, and the line that names them."""

import logging
from typing import Any

import pytest
import torch

from megatron_coca.config import Config, ConfigError, LaunchConfig, load_config
from megatron_coca.training.launch import check_devices, describe_devices, environment, start

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 64}
RANK = {"LOCAL_RANK": "0"}


def configured(**keys: Any) -> Config:
    return load_config([], SHAPE | keys)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without device files and nvidia-smi."""
    monkeypatch.setattr(environment, "DEVICE_FILES", ())
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with nvidia-smi, whose driver PyTorch cannot use."""

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")

    monkeypatch.setattr(environment, "DEVICE_FILES", ())
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)


@pytest.mark.parametrize(
    ("keys", "key"),
    [({"num_gpus": 8}, "num_gpus"), ({"num_gpus": 1}, "num_gpus"), ({"max_restarts": 1}, "distributed_backend")],
)
def test_no_process_is_started_for_gpus_that_are_not_there(no_gpu: None, keys: dict[str, Any], key: str) -> None:
    expected = f"^{key}: asks for GPUs, but this host has no GPU; to train on the CPU, set distributed_backend=gloo"
    with pytest.raises(ConfigError, match=expected):
        start(LaunchConfig.model_validate(keys), {}, ["train.py"], lambda: 0, gpu_keys=(key,))
    assert start(LaunchConfig(num_gpus=1), {}, ["train.py"]) is None


def test_a_process_of_another_launcher_is_refused_too(no_gpu: None) -> None:
    for keys in ({"num_gpus": 2}, {"distributed_backend": "nccl"}):
        with pytest.raises(ConfigError, match=f"^{next(iter(keys))}: asks for GPUs, but this host has no GPU; to"):
            check_devices(configured(**keys), RANK)


def test_fp16_is_refused_together_with_the_devices(no_gpu: None) -> None:
    with pytest.raises(ConfigError) as refused:
        check_devices(configured(num_gpus=2, precision="fp16"), RANK)
    devices_line, dtype_line = str(refused.value).splitlines()[-2:]
    assert "num_gpus: asks for GPUs" in devices_line
    assert "precision: fp16 needs a GPU, but this host has no GPU; set fp16=null precision=bfloat16" in dtype_line
    with pytest.raises(ConfigError, match="precision: fp16 needs a GPU"):
        check_devices(configured(distributed_backend="gloo", precision="fp16"), RANK)


def test_the_cpu_that_is_asked_for_is_used(no_gpu: None, broken_driver: None, caplog: pytest.LogCaptureFixture) -> None:
    check_devices(configured(num_gpus=2, distributed_backend="gloo"), RANK)
    assert not caplog.records


def test_a_broken_driver_is_told_from_no_gpu(broken_driver: None, caplog: pytest.LogCaptureFixture) -> None:
    expected = (
        r"PyTorch cannot use the one that is present \(/usr/bin/nvidia-smi\): The NVIDIA driver on your system is too"
        r" old \(found version 11040\)\.; check that `nvidia-smi` works"
    )
    with pytest.raises(ConfigError, match=f"num_gpus: asks for GPUs, but {expected}"):
        check_devices(configured(num_gpus=1), RANK)
    with caplog.at_level(logging.WARNING):
        check_devices(configured(), RANK)
    assert "training on the CPU: PyTorch cannot use the one that is present" in caplog.text
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='' hides those of this host"):
        check_devices(configured(num_gpus=1), RANK | {"CUDA_VISIBLE_DEVICES": ""})


def test_each_process_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(configured(num_gpus=2), {"LOCAL_RANK": "1"})
    with pytest.raises(ConfigError, match=r"num_gpus: the process with local rank 2 sees 2 GPU\(s\)"):
        check_devices(configured(num_gpus=4), {"LOCAL_RANK": "2"})


def test_the_line_names_devices_dtype_and_backend(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    line = describe_devices(configured(), 2, "sdpa")
    assert line == "device: CPU, 2 process(es) of 4 thread(s) (gloo), fp32, attention backend sdpa"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    line = describe_devices(configured(precision="bfloat16"), 8, "merge")
    assert line == "device: 8 x NVIDIA H100 (nccl), bf16, attention backend merge"
