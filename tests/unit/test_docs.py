"""What the pages name exists, and their Python examples compile."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")])
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w/.-])((?:configs|tools|tests|docs|docker|megatron_coca)/[\w./-]*\w)(?![*<{\w])")
MARKERS = re.compile(r"[*<>{}]|NAME")


def missing_links(text: str, folder: Path) -> list[str]:
    """Relative links of a page in `folder` that lead nowhere; code blocks are left out."""
    targets = [target.partition("#")[0] for target in LINK.findall(FENCED.sub("", text))]
    return [target for target in targets if target and "://" not in target and not (folder / target).exists()]


def missing_paths(text: str) -> list[str]:
    """Paths of the repository that a page names and that do not exist; patterns and placeholders are left out."""
    words = {match for word in re.split(r"[\s`,;]+", text) if not MARKERS.search(word) for match in NAMED.findall(word)}
    return sorted(word for word in words if not (ROOT / word).exists())


def examples(page: str) -> list[str]:
    """The fenced Python blocks of a page."""
    return [body for language, body in FENCED.findall((ROOT / page).read_text()) if language == "python"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert not missing_links(text, page.parent)
    assert not missing_paths(text)


def test_the_checks_find_what_is_missing() -> None:
    text = (
        "[this](nowhere.md), [that](README.txt#part), `configs/none.yml`, tools/none.py; configs/*/x.yml is a pattern"
    )
    assert missing_links(text, ROOT) == ["nowhere.md", "README.txt"]
    assert missing_paths(text) == ["configs/none.yml", "tools/none.py"]


@pytest.mark.parametrize("page", ["docs/checkpoints.md", "docs/config.md"])
def test_python_examples_compile_and_import_what_exists(page: str) -> None:
    found = examples(page)
    assert found
    for example in found:
        tree = ast.parse(example)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), page, "exec"), {})
