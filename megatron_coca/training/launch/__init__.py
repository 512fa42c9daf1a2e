"""How training processes come to be: started here, on other hosts, or by a launcher that came before."""

from megatron_coca.training.launch.environment import complete_environment, threads_per_process, under_launcher
from megatron_coca.training.launch.start import start

__all__ = ["complete_environment", "start", "threads_per_process", "under_launcher"]
