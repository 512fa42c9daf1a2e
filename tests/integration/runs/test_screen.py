"""The output of train.py on a terminal, in a file, and with two processes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Train, clean_environment, command_line
from tests.terminal import HIDDEN_CURSOR, on_terminal, screen

ROOT = Path(__file__).parents[3]
STEPS = 12
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("columns", "ranks"), [(80, 1), (40, 1), (80, 2)])
def test_a_run_on_a_terminal(small: dict[str, Any], tmp_path: Path, columns: int, ranks: int) -> None:
    keys = small | {"save": str(tmp_path / "run"), "train_iters": STEPS, "eval_interval": 6}
    arguments = [str(ROOT / "train.py"), *command_line(keys), "--num_gpus", str(ranks)]
    environment = clean_environment()
    status, written = on_terminal([sys.executable, *arguments], columns, environment, tmp_path, seconds=120)
    assert status == 0 and HIDDEN_CURSOR not in written, written
    lines = screen(written, columns)
    (bar,) = [line for line in lines if line.startswith(f"{STEPS}/{STEPS} ")]
    assert "loss " in bar and ("tok/s" in bar and "GiB" in bar and "val " in bar) == (columns == 80), lines
    assert len(bar) < columns and " left " in written
    text = "".join(lines)
    validations = [found.start() for found in re.finditer(r"validation loss \d", text)]
    assert "from step 0" in text and len(validations) == 2, "lines that stay"
    assert text.index("from step 0") < validations[0] < text.index(bar)


def test_a_run_off_a_terminal(train: Train, tmp_path: Path) -> None:
    finished = train({"save": str(tmp_path), "train_iters": STEPS}, options=["--num_gpus", "2"])
    assert finished.status == 0 and "\r" not in finished.output and "\x1b" not in finished.output
    reports = [line for line in finished.output.splitlines() if re.search(r"step \d+/12: loss", line)]
    assert [re.match(r"\d{4}-\d\d-\d\d [\d:]{8} \w+ step (\d+)/", line)[1] for line in reports] == [
        str(step) for step in range(1, STEPS + 1)
    ]
    assert len(json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])) > 1
