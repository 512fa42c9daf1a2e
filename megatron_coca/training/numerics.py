"""Software and hardware that affect the last bits of a run, and their changes between its launches."""

from collections.abc import Mapping

import torch

from megatron_coca.checkpoints.native import code_versions
from megatron_coca.support.host import preloaded_libraries, processor_name


def numerics(device: torch.device) -> dict[str, str]:
    """Return versions, hardware, threads and preloaded libraries of this process, as `meta.json` records them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    found = code_versions() | {"device": name, "threads": str(torch.get_num_threads())}
    return found | {"LD_PRELOAD": " ".join(preloaded_libraries())}


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe the entries that differ. Entries that are missing in checkpoints of older versions are not compared."""
    return [
        f"{name} (saved {saved[name]!r}, now {value!r})"
        for name, value in now.items()
        if name in saved and saved[name] != value
    ]
