"""What the pages name exists, and their examples are read: commands, configurations, Python.

tests/integration/product/test_examples.py executes them.
"""

import argparse
import ast
import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca.ablation.file import AblationFile, read_ablation
from megatron_coca.config import load_config
from megatron_coca.evaluation.stretch.plans import Plan
from megatron_coca.evaluation.suite import read_suite
from tests.documents import FENCED, LANGUAGES, NAMES, ROOT, blocks, commands, everywhere, indented, languages, words
from tests.examples import NOT_RUN, PRELUDES, QUICK, RUN, make_configs, treatment, write_model

LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w/.-])((?:configs|studies|tools|tests|docs|docker|megatron_coca)/[\w./-]*\w)(?![*<{\w])")
MARKERS = re.compile(r"[*<>{}]|NAME")
COMMANDS = list(dict.fromkeys(command for _, command in everywhere()))
SCRIPT = re.compile(r"(?:[A-Z_]+=\S+ )*(?:nice -n \d+ )?(?:python tools/\w+\.py|megatron-coca) ")
OURS = [command for command in COMMANDS if SCRIPT.match(command)]
OF_RUNS = (
    "megatron-coca train",
    "megatron-coca estimate",
    "megatron-coca inspect",
    "tools/bench_train.py",
)
BASE = "configs/quickstart/roformer.yml"
OTHER_YAML = {
    "docs/ablations.md": AblationFile.model_validate,
    "docs/harness.md": dict,
    "docs/stretch.md": Plan.model_validate,
}
"""Pages whose YAML is not a run's configuration, and what reads it."""


def missing_links(text: str, folder: Path) -> list[str]:
    """Relative links and images of a page in `folder` that lead nowhere. Code blocks are left out, and pages of
    workflows, which are not files but pages of the site that shows the repository.
    """
    targets = [target.partition("#")[0] for target in LINK.findall(FENCED.sub("", text))]
    made = {f"{target}{page}" for target in workflow_pages() for page in ("", "/badge.svg")}
    files = [target for target in targets if target and "://" not in target and target not in made]
    return [target for target in files if not (folder / target).exists()]


def workflow_pages() -> list[str]:
    """The addresses of the workflows' pages on GitHub, relative to the page of a file in the top folder."""
    return [f"../../actions/workflows/{path.name}" for path in (ROOT / ".github/workflows").glob("*.yml")]


def missing_paths(text: str) -> list[str]:
    """Paths of the repository that a page names and that do not exist; patterns and placeholders are left out."""
    words = {match for word in re.split(r"[\s`,;]+", text) if not MARKERS.search(word) for match in NAMED.findall(word)}
    return sorted(word for word in words if not (ROOT / word).exists())


@pytest.mark.parametrize("page", NAMES)
def test_what_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not missing_links(text, (ROOT / page).parent)
    assert not missing_paths(text)


def test_the_checks_find_what_is_missing() -> None:
    text = (
        "[this](nowhere.md), [that](README.txt#part), `configs/none.yml`, tools/none.py; configs/*/x.yml is a pattern"
    )
    badges = "![ours](../../actions/workflows/ci.yml/badge.svg) ![none](../../actions/workflows/none.yml/badge.svg)"
    assert missing_links(text, ROOT) == ["nowhere.md", "README.txt"]
    assert missing_links(badges, ROOT) == ["../../actions/workflows/none.yml/badge.svg"]
    assert missing_paths(text) == ["configs/none.yml", "tools/none.py"]


def test_tests_that_pages_name_exist() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = [found for page in NAMES for found in re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / page).read_text())]
    assert len(named) > 50
    assert not [f"{file}::{name}" for file, name in named if f"def {name}(" not in files.get(file, "")]


@pytest.mark.parametrize("page", NAMES)
def test_the_language_of_every_example_is_known(page: str) -> None:
    assert languages(page) <= LANGUAGES
    assert not indented(page) or page == "docs/config.md", "fence it: ```bash, ```python, ```yaml or ```text"


@pytest.mark.parametrize("page", NAMES)
def test_every_command_is_run_or_has_a_reason(page: str) -> None:
    for command in commands(page):
        treatment(command)
    for block in blocks(page, "text"):
        assert not re.search(r"^python (?!train.py CONFIG)", block, re.MULTILINE), "a command: fence it as ```bash"


def test_a_command_without_a_row_fails_and_every_row_is_used() -> None:
    with pytest.raises(LookupError, match=r"tests/examples\.py"):
        treatment("kubectl get pods")
    unused = [row for row in (*RUN, *NOT_RUN) if not any(command.startswith(row) for command in COMMANDS)]
    assert not unused and not RUN.keys() & NOT_RUN.keys()


def test_a_command_has_one_spelling() -> None:
    """The scripts of the top level and of tools/ run the same subcommands; only the pages' list of them names them."""
    fronts = "train|evaluate|tools/(?:ablate|convert_to_huggingface|convert_to_neox|generate|prepare_data)"
    spelled = re.compile(rf"(?:\bpython |`)(?:{fronts})\.py\b")
    named = {
        "README.md": 1,
        "megatron_coca/README.md": 1,
        "docs/faults.md": 1,
        "docs/neox.md": 7,
        "tests/untrusted_files.md": 1,
    }  # GPT-NeoX's own commands
    for folder, pattern in (
        ("configs", "*.y*ml"),
        ("studies", "*.yml"),
        ("studies", "*.j2"),
        ("megatron_coca", "*.py"),
        ("megatron_coca", "*.yaml"),
    ):
        for path in (ROOT / folder).rglob(pattern):
            assert not spelled.search(path.read_text()), f"{path}: say `megatron-coca COMMAND`"
    for page in NAMES:
        lines = [line for line in (ROOT / page).read_text().splitlines() if spelled.search(line)]
        assert len(lines) <= named.get(page, 0), f"{page}: say `megatron-coca COMMAND`: {lines}"


class _ParsedError(Exception):
    """The arguments were accepted."""


@pytest.mark.always
@pytest.mark.parametrize("command", OURS)
def test_arguments_are_accepted(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stop_after_parsing(monkeypatch)
    script, *arguments = called(command)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
    with pytest.raises((_ParsedError, SystemExit)) as ended:
        runpy.run_path("megatron_coca" if script == "megatron-coca" else script, run_name="__main__")
    assert isinstance(ended.value, _ParsedError) or ended.value.code == 0, capsys.readouterr().err


def called(command: str) -> tuple[str, ...]:
    """The script or program of a command, and its arguments."""
    found = words(command)
    first = found.index("python") + 1 if "python" in found else found.index("megatron-coca")
    return found[first:]


def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise _ParsedError once a command line is accepted, instead of doing what it says."""
    depth = 0

    def stop(name: str) -> None:
        original = getattr(argparse.ArgumentParser, name)

        def parse(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                found = original(self, *arguments, **options)
            finally:
                depth -= 1
            if depth:
                return found
            unknown = [word for word in found[1] if word.startswith("-")] if isinstance(found, tuple) else []
            assert not unknown, f"unknown options: {unknown}"
            raise _ParsedError

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)

    for name in ("parse_args", "parse_known_args", "parse_intermixed_args"):
        stop(name)


@pytest.mark.parametrize("command", OURS)
def test_configurations_load(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script, *arguments = called(command)
    script = " ".join([script, *arguments[:1]]) if script == "megatron-coca" else script
    files = [word for word in arguments if word.endswith(".yml") and Path(word).exists()]
    keys = [word for word in arguments if re.match(r"[a-z_.]+=", word)]
    if script in OF_RUNS and files:
        of_folder = any(word.startswith("models/") for word in arguments)  # which has the network
        load_config([BASE, *files] if of_folder else files, keys)
    elif script == "megatron-coca ablate":
        read_ablation(Path(files[0]))
    elif script == "megatron-coca evaluate" and arguments[1] == "suite":
        read_suite(Path(files[0]))
    elif script == "megatron-coca evaluate":
        for file in files:
            load_config([file] if file.startswith("configs/350M") else [BASE, file])


@pytest.mark.parametrize("page", [page for page in NAMES if "yaml" in languages(page)])
def test_configurations_in_a_page_load(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block)
        if page in OTHER_YAML:
            OTHER_YAML[page](content)
        else:
            load_config([BASE], content)


@pytest.mark.parametrize("page", [page for page in NAMES if "python" in languages(page)])
def test_python_compiles_and_imports_what_exists(page: str) -> None:
    paths = re.findall(r"^ *# ([\w/]+)\.py$", (ROOT / page).read_text(), re.MULTILINE)
    written = {f"megatron_coca.{path.replace('/', '.')}" for path in paths}  # files that the page's reader writes
    for example in blocks(page, "python"):
        nodes = [node for node in ast.parse(example).body if isinstance(node, ast.ImportFrom)]
        imports = [node for node in nodes if "coca" in str(node.module) and node.module not in written]
        exec(compile(ast.Module(imports, []), page, "exec"), {})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small configurations and the checkpoint of the quickstart."""
    folder = tmp_path_factory.mktemp("models")
    make_configs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_model("configs/quickstart/roformer_coca.yml", "runs/quickstart/roformer_coca")
    return folder


@pytest.mark.parametrize("page", QUICK)
def test_python_runs(page: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    names: dict[str, Any] = {}
    for code in (PRELUDES.get(page, ""), *blocks(page, "python")):
        exec(compile(code, page, "exec"), names)


def test_every_page_is_in_the_index_and_on_the_site() -> None:
    index, site = ((ROOT / "docs" / name).read_text() for name in ("index.md", "site/mkdocs.yml"))
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in site
        assert f"({page.name})" in index or page.name == "index.md"


def test_every_column_of_a_table_has_a_head() -> None:
    """Screen readers read the head before a cell."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "studies").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    heads = [one for one, rule in pairwise(lines) if re.fullmatch(r"\s*\|[-:| ]+\|", rule)]
    assert not [head for head in heads if re.search(r"\|\s*\|", head)]
