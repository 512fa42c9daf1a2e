"""The devices of this host: whether PyTorch can use the GPUs that a run asks for, and why not."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from glob import glob

from megatron_coca.config import Config, ConfigError

logger = logging.getLogger(__name__)

DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
"""Device files of NVIDIA's and AMD's drivers, and of the Windows Subsystem for Linux."""
ON_THE_CPU = (
    "to train on the CPU, set distributed_backend=gloo, or give configs/cluster/cpu.yml after the model's file (without"
    " num_gpus that is one process)"
)
NEEDS = {
    "num_gpus": ("asks for GPUs", ON_THE_CPU),
    "distributed_backend": ("asks for GPUs", ON_THE_CPU),
    "precision": ("fp16 needs a GPU", "set fp16=null precision=bfloat16 (or fp32)"),
}
"""What a key of `Config.gpu_keys` needs, and what to do without it."""


def signs_of_gpus() -> list[str]:
    """Return what shows that this host has a GPU, whether or not its driver works: device files, nvidia-smi."""
    return sorted(path for pattern in DEVICE_FILES for path in glob(pattern)) or [
        program for program in [shutil.which("nvidia-smi")] if program
    ]


def no_gpu(keys: Sequence[str], problem: str = "this host has no GPU") -> ConfigError:
    """Return the error for a run with `keys` of `Config.gpu_keys`."""
    return ConfigError(*(f"{key}: {NEEDS[key][0]}, but {problem}; {NEEDS[key][1]}" for key in keys))


def check_devices(config: Config, environment: Mapping[str, str]) -> None:
    """Check that this process can use the GPU that the configuration asks for; warn if a GPU cannot be used.

    Raises:
        ConfigError: it cannot, or the host has fewer GPUs than processes.
    """
    import torch

    if torch.cuda.is_available():
        count, local_rank = torch.cuda.device_count(), int(environment["LOCAL_RANK"])
        if local_rank >= count:
            problem = f"the process with local rank {local_rank} sees {count} GPU(s): one is needed for each process"
            raise ConfigError(f"num_gpus: {problem}; start fewer processes on this host")
        return
    problem = _problem(environment.get("CUDA_VISIBLE_DEVICES"))
    if config.gpu_keys:
        raise no_gpu(config.gpu_keys, problem)
    if signs_of_gpus() and config.parallel.distributed_backend is None:
        logger.warning("training on the CPU: %s", problem)


def _problem(visible: str | None) -> str:
    """Why PyTorch can use no GPU here; `visible` is CUDA_VISIBLE_DEVICES."""
    import torch

    signs = signs_of_gpus()
    if not signs:
        return "this host has no GPU"
    if visible in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides those of this host"
    try:
        torch.cuda.init()
        reason = "it finds no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    return (
        f"PyTorch cannot use the one that is present ({', '.join(signs)}): {reason}; check that `nvidia-smi` works and"
        f" that the driver supports CUDA {torch.version.cuda} of PyTorch {torch.__version__}"
    )


def describe_devices(config: Config, world_size: int, attention_backend: str) -> str:
    """Return the first line of a run: devices, their number, communication and attention backend, dtype."""
    import torch

    devices = (
        f"{world_size} x {torch.cuda.get_device_name()} (nccl)"
        if torch.cuda.is_available()
        else (f"CPU, {world_size} process(es) of {torch.get_num_threads()} thread(s) (gloo)")
    )
    return f"device: {devices}, {config.precision.dtype}, attention backend {attention_backend}"
