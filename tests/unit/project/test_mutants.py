"""Faults are derived from the code, are valid Python, and leave nothing behind."""

from pathlib import Path

import pytest

from tests import mutants


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    file = tmp_path / "megatron_coca" / "sample.py"
    file.parent.mkdir()
    file.write_text('LIMIT = 3\n\n\ndef clip(x: int = 4) -> int:\n    return min(x, LIMIT) if x > 0 else f"{x}"\n')
    return file


def test_each_fault_changes_one_expression_of_a_function(package: Path) -> None:
    found = {(fault.before, fault.after) for fault in mutants.faults(package)}
    assert ("x > 0", "(x >= 0)") in found and ("min(x, LIMIT)", "(max(x, LIMIT))") in found and ("0", "(1)") in found
    assert not any(before in ("3", "4") for before, _ in found), "neither constants of a file nor default values"


def test_a_planted_fault_is_removed(package: Path) -> None:
    before = package.read_text()
    fault = mutants.drawn([package], 1, seed=0)[0]
    expected = mutants.text_with(fault)
    with pytest.raises(RuntimeError), mutants.planted(fault):
        assert package.read_text() == expected != before
        raise RuntimeError
    assert package.read_text() == before


def test_the_seed_draws_the_same_faults() -> None:
    files = [mutants.PACKAGE / "attention/layer.py", mutants.PACKAGE / "data/blend.py"]
    first, again, other = (mutants.drawn(files, 12, seed) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 12
    assert all(mutants.tests_of(fault) for fault in first)
