"""The notebook runs unchanged in one process, and its figures agree with its text."""

import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from tests.documents import ROOT

NOTEBOOK = json.loads((ROOT / "docs/notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_stored() -> None:
    """Readers of the repository see the plots. Progress on stderr is not stored, because its times change."""
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|work)/", json.dumps(outputs))


@pytest.mark.slow
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    mpl.use("Agg")
    names: dict[str, Any] = {}
    for number, code in enumerate(CODE):
        exec(compile(code, f"cell {number}", "exec"), names)
    for losses in (names["losses"], names["own_losses"]):
        assert losses[-1] < losses[0] - 0.8
    assert len(names["maps"]) == len(names["own_maps"]) == 2
    assert names["maps"][0].weights.sum(-1).sub(1).abs().max() < 1e-5
    found, curves = names["found"], names["curves"]
    assert len(set(found.values())) == 4 and found["plain"] < names["losses"][0] - 1
    assert curves["plain"] != curves["YaRN"] and all(math.isfinite(score) for score in curves["ReRoPE"])
