"""How fast a run is, and how much memory it takes."""

import resource
from dataclasses import dataclass

import torch

from megatron_coca.config import Config
from megatron_coca.model.cost import flops_per_token, peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Throughput:
    """Turns steps and seconds into figures.

    Attributes:
        tokens_per_step: of all ranks together.
        devices: number of ranks.
        flops_per_token: of forward and backward pass, as MFU counts them (`Flops.model`).
        peak: FLOP/s of one device; None where it is not known.
    """

    tokens_per_step: int
    devices: int
    flops_per_token: float
    peak: float | None

    def figures(self, steps: int, seconds: float) -> dict[str, float]:
        """Figures of `steps` that took `seconds` of training. `mfu` is left out where no peak is known."""
        rate = self.tokens_per_step * steps / max(seconds, 1e-9)
        flops = rate / self.devices * self.flops_per_token
        found = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self.devices,
            "step_seconds": seconds / steps,
            "tflops_per_device": flops / 1e12,
        }
        return found | ({"mfu": flops / self.peak} if self.peak else {})


def measure_by(config: Config, tokens_per_step: int, devices: int) -> Throughput:
    """What the configured model's throughput is reckoned with.

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    return Throughput(tokens_per_step, devices, flops_per_token(config).model, device_peak(config))


def device_peak(config: Config) -> float | None:
    """FLOP/s: `peak_theoretical_tflops`, else this GPU's data sheet's, else None."""
    given = config.logging.peak_theoretical_tflops
    if given is not None:
        return given * 1e12
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def peak_memory() -> tuple[float, float]:
    """GiB that this process has held at most, and their share of the device's memory.

    On a GPU what PyTorch has allocated there. Elsewhere the resident set, with a share of 0: how much of a machine's
    memory a process may take is not known.
    """
    if torch.cuda.is_available():
        allocated = torch.cuda.max_memory_allocated()
        return allocated / GIB, allocated / torch.cuda.get_device_properties().total_memory
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 0.0
