"""The digest of the files that a cell's evaluation reads."""

from argparse import Namespace
from pathlib import Path

from megatron_coca.ablation.inputs import InputDigests
from megatron_coca.config import load_config
from tests.checkpoint_files import TINY, write_checkpoint


def digest(**options: object) -> str | None:
    return InputDigests().digest(Namespace(**options), [], load_config([], TINY))


def test_local_data_sets_of_benchmarks_are_inputs(tmp_path: Path) -> None:
    """Their content counts; the files that `hf download` keeps beside them do not."""
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner/rows.jsonl").write_text("{}\n")
    first = digest(datasets=tmp_path)
    assert first is not None and digest(datasets=None) is None
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/time").write_text("1")
    assert digest(datasets=tmp_path) == first
    (tmp_path / "owner/rows.jsonl").write_text("{}\n{}\n")
    assert digest(datasets=tmp_path) != first


def test_the_evaluator_of_longppl_is_an_input(tmp_path: Path) -> None:
    one, other = (
        write_checkpoint(tmp_path / name, load_config([], TINY | {"seed": seed})) for name, seed in (("a", 1), ("b", 2))
    )
    assert digest(evaluator=one) == digest(evaluator=one) != digest(evaluator=other)
