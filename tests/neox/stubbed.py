"""Replace GPT-NeoX by tests/neox/stub during a test. Another package named `megatron` is restored afterwards."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from megatron_coca.neox_plugin.upstream import MODULES
from tests.conftest import ROOT

STUB = ROOT / "tests/neox/stub"


class Upstream:
    """The stub's modules, imported anew for each test."""

    def __getitem__(self, name: str) -> Any:
        return importlib.import_module(f"megatron.{name}")

    def arguments(self, **changes: Any) -> Any:
        """NeoXArgs of a small model."""
        keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "train_iters": 20}
        keys |= {"max_position_embeddings": 64, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        return self["neox_arguments"].NeoXArgs(**keys | changes)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    """The stub, importable as `megatron`; the plugin is not active."""
    theirs = _loaded()
    for name in theirs:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(STUB))
    for module in MODULES:
        importlib.import_module(f"megatron.{module}")
    yield Upstream()
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(theirs)


def _loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
