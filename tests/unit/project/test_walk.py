"""The number of files that run code between a YAML file and the attention kernel, which a reader must open."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import megatron_coca
from megatron_coca import build_model, load_config

ROOT = Path(__file__).parents[3]
PACKAGE = Path(megatron_coca.__file__).parent
SMALL = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=16", "vocab_size=64"]


def files_run(call: Callable[[], Any]) -> list[str]:
    """The files of the package in which a function runs during `call`; what only imports run is not counted."""
    files: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(PACKAGE)):
            files.add(str(Path(code.co_filename).relative_to(PACKAGE)))

    call()  # what runs once, such as imports inside functions, is not part of the way
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(files)


def test_from_a_yaml_file_to_the_kernel() -> None:
    ids = torch.randint(64, (1, 16))

    def walk() -> None:
        config = load_config([ROOT / "configs/350M/roformer_coca.yml"], SMALL)
        build_model(config)(ids)

    found = [Path(file) for file in files_run(walk)]
    checks = PACKAGE / "config/checks"  # counts once: its files are lists of independent checks, and none leads further
    files = {checks.relative_to(PACKAGE) if (PACKAGE / file).parent == checks else file for file in found}
    assert len(files) <= 22, files


def test_one_forward_pass() -> None:
    model = build_model(load_config([ROOT / "configs/350M/roformer_coca.yml"], SMALL))
    ids = torch.randint(64, (1, 16))
    files = files_run(lambda: model(ids))
    assert len(files) <= 10, files
