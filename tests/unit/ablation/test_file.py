"""Reading the file of an ablation: short forms, scales, and names that it must define."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_coca.ablation.file import read_ablation
from megatron_coca.ablation.grid import Cell, expand
from megatron_coca.evaluation import EvaluationError

Write = Callable[..., Path]


def cells_of(file: Path) -> list[Cell]:
    return expand(read_ablation(file), "cpu")


def test_one_text_stands_for_a_list(write: Write, tmp_path: Path) -> None:
    base, ntk = str(tmp_path / "base.json"), str(tmp_path / "ntk.yml")
    lists = {"A": {"set": ["train_iters=6"], "variants": {"": [], "+ NTK": [ntk]}}, "B": ["train_iters=6"]}
    texts = {"A": {"set": "train_iters=6", "variants": {"": None, "+ NTK": ntk}}, "B": "train_iters=6"}
    first = cells_of(write(base=[base], models=lists, baseline="A"))
    assert [cell.name for cell in cells_of(write(base=base, models=texts, baseline="A"))] == [c.name for c in first]


def test_scales_change_the_file(write: Write, tmp_path: Path) -> None:
    scales = {"tiny": {"seeds": [7]}, "large": {"tasks": {"perplexity": {"stride": 8}}}}
    file = write(scales=scales)
    assert read_ablation(file).seeds == [7]
    large = read_ablation(file, "large", tmp_path / "elsewhere")
    assert large.seeds == [1, 2] and large.results == tmp_path / "elsewhere"
    assert large.tasks["perplexity"] is not None and large.tasks["perplexity"].keys() == {"data", "windows", "stride"}
    with pytest.raises(EvaluationError, match="--scale huge: unknown; known scales: tiny"):
        read_ablation(file, "huge")


def test_a_scale_is_a_mapping(write: Write) -> None:
    with pytest.raises(EvaluationError, match="scales.tiny: must be a mapping"):
        read_ablation(write(scales={"tiny": None}))


def test_the_baseline_needs_its_plain_variant(write: Write, tmp_path: Path) -> None:
    models = {"RoFormer": {"set": ["pos_emb=rotary"], "variants": {"+ NTK": [str(tmp_path / "ntk.yml")]}}}
    with pytest.raises(EvaluationError, match='baseline: RoFormer: has no variant ""'):
        cells_of(write(models=models))
