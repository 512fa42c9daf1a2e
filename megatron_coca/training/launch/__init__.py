"""Start training processes, or read the rank of a process that another launcher started."""

from megatron_coca.training.launch.environment import (
    check_devices,
    complete_environment,
    describe_devices,
    threads_per_process,
    unaligned_mlp,
    unused_gpus,
)
from megatron_coca.training.launch.start import start
