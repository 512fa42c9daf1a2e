"""The guide of CONTRIBUTING.md, "An evaluation task", carried out: its files, its rows, a result and its table."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_coca.config import load_config
from megatron_coca.evaluation import options
from megatron_coca.evaluation.cli import main
from megatron_coca.evaluation.report.reading import RESULT_TYPES
from megatron_coca.evaluation.report.sections import SECTIONS
from megatron_coca.evaluation.subcommands import MEASUREMENTS, TASKS, Task
from tests.checkpoint_files import write_checkpoint
from tests.documents import ROOT, blocks

PAGE = "CONTRIBUTING.md"
TABLES: dict[str, dict[str, Any]] = {"MEASUREMENTS": MEASUREMENTS, "RESULT_TYPES": RESULT_TYPES, "SECTIONS": SECTIONS}
FILE = re.compile(r"# evaluation/([\w/]+)\.py\n")
ROW = re.compile(r'^ *\| `(\w+)` \| `([\w/]+\.py)` \| `("copying": .*)` \|$', re.MULTILINE)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of the guide: every block is the file that its first line names, and every row is in its table."""
    names: dict[str, Any] = {"Task": Task, "options": options}
    for source in blocks(PAGE, "python"):
        if (found := FILE.match(source)) is not None:
            name = f"megatron_coca.evaluation.{found[1].replace('/', '.')}"
            module = ModuleType(name)
            exec(compile(source, found[1], "exec"), module.__dict__)
            if name == options.__name__:
                monkeypatch.setattr(options, "add_copying_options", module.add_copying_options, raising=False)  # type: ignore[attr-defined]
            else:
                monkeypatch.setitem(sys.modules, name, module)
            names |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    rows = ROW.findall((ROOT / PAGE).read_text())
    assert {table for table, _, _ in rows} == TABLES.keys()
    for table, file, row in rows:
        text = (ROOT / "megatron_coca/evaluation" / file).read_text()
        assert re.search(rf"^{table}\b.* = \{{$", text, re.MULTILINE), file
        for name, value in eval(f"{{{row}}}", names).items():
            monkeypatch.setitem(TABLES[table], name, value)
    monkeypatch.setitem(TASKS, "copying", MEASUREMENTS["copying"])


@pytest.mark.usefixtures("copying")
def test_a_task_of_the_guide_has_a_command_a_result_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 257}
    checkpoint = write_checkpoint(tmp_path / "run", load_config([], shape))
    given = ["copying", "--checkpoint", str(checkpoint), "--label", "small", "--device", "cpu"]
    given += ["--lengths", "8,16", "--output", str(tmp_path / "results")]
    assert main(given) == 0
    assert "Copied tokens by length" in capsys.readouterr().out
    written = tmp_path / "results/copying_small.json"
    results = json.loads(written.read_text())["results"]
    assert [entry["length"] for entry in results] == [8, 16] and all(0 <= entry["accuracy"] <= 1 for entry in results)
    before = written.read_bytes()
    assert main(given) == 0 and written.read_bytes() == before, "resumed"
    assert main(["report", str(tmp_path / "results"), "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report/report.md").read_text()
    assert "## Copying" in page and re.search(rf"^\| small +\| +{results[0]['accuracy']:.2f} ", page, re.MULTILINE)
