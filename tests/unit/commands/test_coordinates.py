"""`megatron-coca inspect mup`: its table, its picture, its values and its errors."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_coca.commands import coordinates, inspect
from megatron_coca.config import ConfigError
from megatron_coca.evaluation.report.plots.figures import PAGE, drawn
from megatron_coca.training.coordinate_check import KINDS, Coordinate

MODEL = """
num_layers: 1
hidden_size: 16
num_attention_heads: 2
seq_length: 8
pos_emb: coca
optimizer: {params: {lr: 1.0e-2}}
"""


def found(kinds: tuple[str, ...] = KINDS) -> list[Coordinate]:
    """Measurements in which changes grow with the square of the width, but not with muP."""
    return [
        Coordinate(width, mup, kind, step, 1.0, step * (0.25 if mup else (width / 64) ** 2))
        for mup in (True, False)
        for width in (64, 128, 256)
        for kind in kinds
        for step in range(3)
    ]


def test_the_table_shows_the_last_step() -> None:
    lines = coordinates.table(found()).splitlines()
    assert lines[0] == "Mean absolute change of outputs after 2 steps"
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[4:]]
    assert rows[2:4] == [["scores", "muP", "0.5", "0.5", "0.5", "0.00"], ["scores", "standard", "2", "8", "32", "2.00"]]
    assert [row[0] for row in rows[::2]] == list(KINDS)


def test_a_model_without_a_part_has_no_row_and_no_panel() -> None:
    """A model that only has gated attention units has no MLP."""
    some = tuple(kind for kind in KINDS if kind != "mlp")
    assert "mlp" not in coordinates.table(found(some))
    shown = [axes.get_title() for axes in drawn(coordinates.figure(found(some)), PAGE).axes if axes.get_visible()]
    assert shown == list(some)
    assert coordinates.picture(found(some), ".png").startswith(b"\x89PNG")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.yml").write_text(MODEL)
    picture, values = tmp_path / "new/changes.svg", tmp_path / "values.json"
    options = ["--widths", "32,16", "--steps", "1", "--output", str(picture), "--json", str(values)]
    assert inspect.main(["mup", str(tmp_path / "model.yml"), "init_method_std=0.1", *options]) == 0
    printed = capsys.readouterr().out
    assert "width 16 | width 32" in printed and printed.rstrip().endswith("changes.svg")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    facts = json.loads(values.read_text())
    assert len(facts) == 2 * 2 * 2 * len(KINDS)
    assert facts[0] == {"width": 16, "mup": True, "kind": "embedding", "step": 0, "size": facts[0]["size"], "change": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "changes.jpg"], r"--output: .*changes\.jpg: .*\.svg or \.png"),
        (["--widths", "16,16"], "--widths: one width shows no growth"),
        (["--widths", "16,17"], "2 heads do not divide hidden_size 17"),
    ],
)
def test_errors(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "model.yml").write_text(MODEL)
    with pytest.raises(ConfigError, match=message):
        inspect.main(["mup", str(tmp_path / "model.yml"), *options])
