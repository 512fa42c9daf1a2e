"""What the documents say of keys, methods and backends is what the code says."""

from dataclasses import replace
from pathlib import Path

import pytest

from docs import generate
from docs.generate import TABLES, backends_page, generated, needs
from megatron_coca import methods
from megatron_coca.attention.build import BACKENDS
from megatron_coca.attention.inputs import Needs
from megatron_coca.config import backends


@pytest.mark.always
def test_generated_pages_and_tables_are_current() -> None:
    pytest.importorskip("triton")
    stale = [str(path) for path, text in generated() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python docs/generate.py"


def test_the_check_names_pages_that_are_not_current(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes nothing. The slow tests do not run it, because their configurations are smaller."""
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "PAGES", {"a.md": lambda: "new", "b.md": lambda: "same"})
    monkeypatch.setattr(generate, "TABLES", {})
    monkeypatch.setattr("sys.argv", ["docs/generate.py", "--check"])
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text("same")
    assert generate.main() == 1 and capsys.readouterr().out == "a.md\n"
    assert (tmp_path / "a.md").read_text() == "same"
    (tmp_path / "a.md").write_text("new")
    assert generate.main() == 0 and capsys.readouterr().out == ""


def test_a_new_choice_appears_in_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    added = replace(methods.find("rope_scaling", "linear"), name="newest", rule="`theta_j / 7`")
    monkeypatch.setitem(methods.TABLES["rope_scaling"], "newest", added)
    assert "`newest` | `theta_j / 7` | `factor`" in TABLES["docs/attention.md", "extensions"]()
    assert "`newest`" in TABLES["README.md", "methods"]()
    page = next(text for path, text in generated() if path.name == "config.md")
    assert "\\| newest | " in page and "llama3, newest | number | required" in page


def test_every_choice_has_a_row_of_its_needs() -> None:
    rows = needs()
    for key in ("pos_emb", "relative_positions"):
        for name in methods.TABLES[key]:
            assert [label for label in rows if f"`{name}`" in label.replace(f"{key}: ", "`").split(" with")[0]], name
    assert rows["`pos_emb: alibi`"] == Needs("cuda", bias="linear")
    assert rows["`pos_emb: kerple_log`"].bias == "log"
    near, far = next(found for label, found in rows.items() if "lm_infinite" in label).bands
    assert near.high == far.low and far.first_keys == 4


def test_every_backend_has_a_row() -> None:
    rows = backends.BACKENDS
    assert set(rows) == set(BACKENDS)
    assert all(f"| `{name}` | {rows[name].summary} |" in backends_page() for name in BACKENDS)
