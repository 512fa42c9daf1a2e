"""Hugging Face's `evaluate` library and our script of that name."""

import sys
from pathlib import Path

import pytest

from megatron_coca.evaluation.tasks.lm_eval_model import import_evaluate_library


def test_the_library_is_found_beside_our_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script/evaluate.py").write_text("raise SystemExit('our script')")
    (tmp_path / "site/evaluate").mkdir(parents=True)
    (tmp_path / "site/evaluate/__init__.py").touch()
    path = ["", str(tmp_path / "script"), str(tmp_path / "site")]
    monkeypatch.chdir(tmp_path / "script")
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    import_evaluate_library()
    found = sys.modules.pop("evaluate")
    assert found.__file__ == str(tmp_path / "site/evaluate/__init__.py") and sys.path is path
