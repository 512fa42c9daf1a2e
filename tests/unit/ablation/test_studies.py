"""The folders of studies/ have one form, and the table in their README follows from plans, archives and pages."""

import re
from functools import cache
from pathlib import Path

import pytest

from megatron_coca.ablation.cells import archive_of
from megatron_coca.ablation.file import AblationFile, read_ablation
from megatron_coca.ablation.grid import configured
from megatron_coca.config import load_config, split_inputs
from megatron_coca.evaluation.stretch.page import OVERLAY
from megatron_coca.evaluation.stretch.plans import read_plan
from megatron_coca.support.safe_yaml import read_yaml

ROOT = Path(__file__).parents[3]
STUDIES = ROOT / "studies"
ROW = re.compile(r"^\| \[(\w+)\]\((\S+)\) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = {name: rest for name, *rest in ROW.findall((STUDIES / "README.md").read_text())}
"""Link, question and answer of every study."""
FOLDERS = sorted(path.name for path in STUDIES.iterdir() if path.is_dir() and path.name != "figures")
OF_STRETCH = {"real_model", "retrained"}
TRAINED = [name for name in FOLDERS if name not in OF_STRETCH]


@cache
def plans(study: str) -> dict[str, AblationFile]:
    """The plans of a study at all scales, by the names that their folders of results should have."""
    found = {}
    for path in sorted((STUDIES / study).glob("*.yml")):
        scales = (read_yaml(path) or {}).get("scales", {})
        name = "cells" if path.stem == "plan" else path.stem
        for place, scale in enumerate(scales):
            found[f"{name}_{scale}" if place else name] = read_ablation(path, scale)
    return found


def test_the_table_has_every_study() -> None:
    assert sorted(ROWS) == FOLDERS
    for name, (link, *_) in ROWS.items():
        assert link == f"{name}/{'README.md' if (STUDIES / name / 'README.md').exists() else 'plan.yml'}"


@pytest.mark.parametrize("study", TRAINED)
def test_results_have_the_name_of_their_plan(study: str) -> None:
    assert plans(study)
    for name, file in plans(study).items():
        assert file.results == Path("studies", study, name)
    archives = {path.name for path in (STUDIES / study).glob("*.zst")}
    assert archives <= {archive_of(file.results).name for file in plans(study).values()}


def test_no_two_studies_share_a_folder_of_runs() -> None:
    runs = [file.runs for study in TRAINED for file in plans(study).values()]
    assert len(runs) == len(set(runs)) > 25


@pytest.mark.parametrize("study", TRAINED)
def test_every_model_of_a_plan_has_a_configuration(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of plans that have not been run."""
    monkeypatch.chdir(ROOT)
    for file in plans(study).values():
        base = load_config(*split_inputs(file.base))
        for entry in file.models.values():
            configured(base, entry)


@pytest.mark.parametrize("study", sorted(OF_STRETCH))
def test_plans_of_stretch_name_their_methods(study: str) -> None:
    for path in (STUDIES / study).glob("*.yml"):
        if path.name != OVERLAY:
            assert read_plan(path).contrasts


@pytest.mark.parametrize("study", FOLDERS)
def test_numbers_of_an_answer_are_on_a_page_of_the_study(study: str) -> None:
    pages = " ".join(path.read_text() for path in (STUDIES / study).glob("*.md"))
    numbers = re.findall(r"\d+\.\d+", ROWS[study][2])
    assert all(re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", pages) for number in numbers), numbers


@pytest.mark.parametrize("template", sorted(STUDIES.rglob("*.md.j2")), ids=lambda path: str(path.relative_to(STUDIES)))
def test_a_template_has_the_name_of_its_page(template: Path) -> None:
    page = template.with_suffix("")
    named = f"{template.relative_to(ROOT)} {page.relative_to(ROOT)}"
    assert f"--page {named} -->" in page.read_text()
