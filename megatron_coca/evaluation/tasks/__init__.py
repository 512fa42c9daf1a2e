"""The evaluation tasks. Each has a folder: `task.py` declares the task, and `measure.py` does the measurement."""

from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.declaration import Task


def declared() -> dict[str, Task]:
    """Return the tasks that all files `task.py` declare, by name. They are in the order of help texts."""
    folders = [file.parent.name for place in __path__ for file in sorted(Path(place).glob("*/task.py"))]
    modules = [import_module(f"{__name__}.{folder}.task") for folder in folders]
    tasks = {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Task)}
    return dict(sorted(tasks.items(), key=lambda item: (item[1].place, item[0])))


TASKS = declared()


def measurements() -> dict[str, Task]:
    """Return the tasks that measure a checkpoint. Suites and ablations can run any of them."""
    return {name: task for name, task in TASKS.items() if task.of_checkpoint}


def function_of(path: str) -> Any:
    """Return a function that a declaration names as `folder.module.function`. Its module may import PyTorch."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)
