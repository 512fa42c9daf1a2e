"""`megatron-coca inspect method`: its numbers against formulas, what it leaves out, and its files."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_coca.commands import inspect
from megatron_coca.config import ConfigError
from megatron_coca.evaluation.report.plots import figures
from megatron_coca.evaluation.report.plots.figures import PAGE, Figure, Layout

MODEL = """
num_layers: 4
hidden_size: 64
num_attention_heads: 2
seq_length: 64
max_position_embeddings: 64
train_micro_batch_size_per_gpu: 1
train_iters: 1
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture
def one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each figure once: phones get the same file as other screens."""
    drawn, draw = dict[str, bytes](), figures.svg

    def svg(figure: Figure, background: str, layout: Layout) -> bytes:
        if layout is PAGE:
            drawn[figure.name] = draw(figure, background)
        return drawn[figure.name]

    monkeypatch.setattr(figures, "svg", svg)


@pytest.fixture
def rotary(tmp_path: Path) -> str:
    return write(tmp_path, "rotary.yml", MODEL + "pos_emb: rotary\n")


def drawn(folder: Path, *arguments: str) -> dict:
    page = folder / "page.html"
    assert inspect.main(["method", *arguments, "--output", str(page), "--json", str(folder / "facts.json")]) == 0
    facts = json.loads((folder / "facts.json").read_text())
    assert {file.name for file in folder.glob("page*")} == {"page.html", *(f"page_{name}.svg" for name in facts)}
    assert page.read_text().count("<figure") == len(facts)
    return facts


def values(facts: dict, figure: str, panel: int = 0, line: int = 0) -> np.ndarray:
    return np.array(facts[figure][panel]["lines"][line]["y"], dtype=float)


def test_wavelengths_and_phases_follow_the_formulas(tmp_path: Path, rotary: str) -> None:
    linear = ["PI", "rope_scaling={rope_type: linear, factor: 4}"]
    facts = drawn(tmp_path, rotary, "--variant", "plain", "--variant", *linear, "--length", "256")
    theta = 10000.0 ** (-np.arange(16) / 16)
    for line, factor in enumerate((1, 1, 4)):  # in training, plain, interpolated
        np.testing.assert_allclose(values(facts, "wavelengths", line=line), factor * 2 * math.pi / theta)
    circle = 2 * math.pi
    unseen = (np.minimum(255 * theta, circle) - np.minimum(63 * theta, circle)) / circle
    np.testing.assert_allclose(values(facts, "phases"), unseen, atol=1e-12)
    interpolated = np.clip(np.minimum(255 / 4 * theta, circle) - np.minimum(63 * theta, circle), 0, None) / circle
    np.testing.assert_allclose(values(facts, "phases", line=1), interpolated, atol=1e-12)
    assert unseen.max() > 0.5 > 10 * interpolated.max()


@pytest.mark.usefixtures("one_layout")
@pytest.mark.parametrize(("kind", "seen"), [("randomized", True), ("pose", True), ("shifted", False)])
def test_training_positions_show_the_phases(tmp_path: Path, rotary: str, kind: str, seen: bool) -> None:
    facts = drawn(tmp_path, rotary, f"training_positions={{type: {kind}, max: 4L}}", "--length", "256")
    assert bool(values(facts, "phases").max() == 0) is seen


@pytest.mark.usefixtures("one_layout")
def test_a_distance_map_reaches_no_new_phase(tmp_path: Path, rotary: str) -> None:
    change = ["ReRoPE", "relative_positions={type: rerope, window: 32}", "logit_scaling=log_n"]
    facts = drawn(tmp_path, rotary, "--variant", *change)
    assert values(facts, "phases").max() == 0
    score = values(facts, "scores")
    factor = values(facts, "logits")
    distance = np.array(facts["scores"][0]["lines"][0]["x"])
    assert np.ptp(score[distance >= 32]) < 1e-12 < np.ptp(score[distance < 32])
    np.testing.assert_allclose(factor, np.maximum(np.log(distance + 1) / math.log(64), 1), rtol=1e-12)


def test_learned_factors_have_their_initial_value(tmp_path: Path, rotary: str) -> None:
    """The factor of SSMax multiplies the scores of every head."""
    change = ["SSMax", "logit_scaling={type: ssmax, initial: 0.5}"]
    facts = drawn(tmp_path, rotary, "--variant", "plain", "--variant", *change, "--length", "65")
    position = np.array(facts["logits"][0]["lines"][1]["x"])
    np.testing.assert_allclose(values(facts, "logits", line=1), 0.5 * np.log1p(position), rtol=1e-12)
    expected = 0.5 * math.log(65) * values(facts, "scores")
    np.testing.assert_allclose(values(facts, "scores", line=1), expected, rtol=1e-12)


@pytest.mark.usefixtures("one_layout")
def test_the_table_names_what_has_no_curve(tmp_path: Path, rotary: str) -> None:
    """Gates, sinks and the narrowest window; and the frequencies of training."""
    changed = {"gated": "forgetting_gate: fox\n", "sunk": "sink_logits: true\nsliding_window_width: 0\n"}
    changed |= {"fast": "rotary_frequencies: rope_id\n"}
    files = [write(tmp_path, f"{name}.yml", MODEL + "pos_emb: rotary\n" + text) for name, text in changed.items()]
    drawn(tmp_path, rotary, *files, "--length", "65")
    rows = re.findall(r'<th scope="row">(\w+)(.*?)</tr>', (tmp_path / "page.html").read_text(), re.DOTALL)
    cells = {name: [cell.strip() for cell in re.findall(r"<td[^>]*>([^<]*)", row)] for name, row in rows}
    assert [cells[name][-1] for name in ("rotary", "gated", "sunk")] == ["-", "fox", "sinks"]
    assert [cells[name][2] for name in ("rotary", "fast")] == ["10000", "rope_id, turns 2.0"]
    assert [cells[name][5] for name in ("rotary", "gated", "sunk")] == ["-", "-", "0"]


@pytest.mark.usefixtures("one_layout")
def test_dual_chunk_attention_is_drawn_for_the_last_query(tmp_path: Path, rotary: str) -> None:
    """Token 255 is the 16th of its chunk of 48: 15 distances of its own, then up to 63, then falling in every chunk."""
    change = ["DCA", "relative_positions={type: dual_chunk}"]
    facts = drawn(tmp_path, rotary, "--variant", "plain", "--variant", *change, "--length", "256")
    plain, score = values(facts, "scores"), values(facts, "scores", line=1)
    distance = np.array(facts["scores"][0]["lines"][0]["x"]).astype(int)
    assert np.array_equal(distance, np.arange(256)) and values(facts, "phases", line=1).max() == 0
    key = 255 - distance
    turned = np.where(key // 48 == 5, 15 - key % 48, 63 - key % 48)
    np.testing.assert_allclose(score, plain[turned], rtol=1e-12)


@pytest.mark.usefixtures("one_layout")
def test_frequencies_of_training_are_those_of_a_model(tmp_path: Path, rotary: str, capsys) -> None:
    """An overlay after the model's file is another trained model; a variant cannot be one."""
    overlay = write(tmp_path, "fast.yml", "rotary_pct: 0.5\nrotary_frequencies: {type: rope_id, period: 8}\n")
    variants = ("--variant", "plain", "--variant", "fast", overlay, "--length", "256")
    facts = drawn(tmp_path, rotary, rotary, overlay, *variants)
    assert "with fast: rotary_pct: part of the training" in capsys.readouterr().out
    assert values(facts, "phases").max() > 0.1 and values(facts, "phases", panel=1).max() == 0
    assert values(facts, "wavelengths", panel=1)[[0, -1]] == pytest.approx([8, 32])


@pytest.mark.usefixtures("one_layout")
def test_the_options_of_a_method_are_named_and_are_no_variant(tmp_path: Path, rotary: str, capsys) -> None:
    polar = write(tmp_path, "polar.yml", MODEL + "pos_emb: polar\npos_emb_options: {power: 2}\nrotary_pct: 0.5\n")
    facts = drawn(tmp_path, rotary, polar, "--variant", "plain", "--variant", "x", "pos_emb=pope", "--length", "65")
    text = capsys.readouterr().out
    assert [panel["title"] for panel in facts["scores"]] == ["rotary", "polar"]
    assert "polar, power 2" in text and "10000, rotary_pct 0.5" in text
    assert "rotary with x: pos_emb: part of the training" in text and "polar with x: " in text


def test_types_of_layers_and_biases_have_their_own_panels(tmp_path: Path, rotary: str) -> None:
    pattern = "attention_config: [[[sliding, global], 2]]\nlayer_types: {sliding: {sliding_window_width: 15}}\n"
    layers = write(tmp_path, "layers.yml", pattern)
    alibi = write(tmp_path, "alibi.yml", MODEL + "pos_emb: alibi\n")
    facts = drawn(tmp_path, rotary, layers, alibi, "--length", "65")
    titles = [panel["title"] for panel in facts["scores"]]
    assert titles == ["rotary + layers: sliding", "rotary + layers: global", "alibi"]
    assert np.isfinite(values(facts, "scores")).sum() == 16
    assert np.ptp(values(facts, "scores", panel=2)) < 1e-9  # without the bias
    np.testing.assert_allclose(values(facts, "biases"), -np.arange(65) * 2.0**-4, rtol=1e-6)


@pytest.mark.usefixtures("one_layout")
def test_a_shape_on_the_command_line_makes_no_model_of_an_overlay(tmp_path: Path, rotary: str) -> None:
    overlay = write(
        tmp_path, "layers.yml", "attention_config: [[[near, global], 2]]\nlayer_types: {near: {pos_emb: none}}\n"
    )
    shape = [line.replace(": ", "=") for line in MODEL.split("\n") if line]
    facts = drawn(tmp_path, rotary, overlay, *shape, "--length", "65")
    assert [panel["title"] for panel in facts["scores"]] == ["rotary + layers: near", "rotary + layers: global"]


@pytest.mark.usefixtures("one_layout")
def test_what_cannot_be_built_is_left_out_with_its_reason(tmp_path: Path, rotary: str, capsys) -> None:
    alibi = write(tmp_path, "alibi.yml", MODEL + "pos_emb: alibi\n")
    yarn = ["YaRN", "rope_scaling={rope_type: yarn, factor: 4}"]
    facts = drawn(tmp_path, rotary, alibi, "--variant", *yarn)
    assert [panel["title"] for panel in facts["scores"]] == ["rotary"]
    assert "left out: alibi with YaRN: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no frequencies to scale"):
        inspect.main(["method", alibi, "--variant", *yarn, "--output", str(tmp_path / "none.html")])
    assert not (tmp_path / "none.html").exists()
    for type_of_layers, reason in (("gau", "remove them"), ("near", "set them for the model")):
        types = ["types", f"attention_config=[[[{type_of_layers}, global], all]]"]
        types += ["layer_types={near: {sliding_window_width: 5}}"] * (type_of_layers == "near")
        drawn(tmp_path, rotary, "--variant", "plain", "--variant", *types)
        assert reason in capsys.readouterr().out.split("left out: rotary with types: ")[1]


def test_an_overlay_alone_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    overlay = write(tmp_path, "yarn.yml", "rope_scaling: {rope_type: yarn, factor: 4}\n")
    with pytest.raises(ConfigError, match="put it after a model's file"):
        inspect.main(["method", overlay, "--output", str(tmp_path / "page.html")])
