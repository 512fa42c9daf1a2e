"""Read the examples of the pages: fenced blocks by language, and commands as a reader would copy them."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("docs", "benchmarks", "docker", "configs/ablations", "studies", "studies/*"),
    *("tests", "tests/pretend", "tests/soak", "megatron_coca"),
)
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for name in FOLDERS for page in ROOT.glob(f"{name}/*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LANGUAGES = {"bash", "python", "text", "yaml"}
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )?(?:(?:python|make|pip|bash) |megatron-coca [^`]*[/=])[^`]+)`")
INDENTED = re.compile(r"\n\n(?: {4}| {7})(?=\S)(.*)")
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{4,}\b(?!=)")
"""Marks an inline command that shows a form: `megatron-coca train ...`, `megatron-coca evaluate TASK --help`."""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in this language, without the indent of a list."""
    found = FENCED.findall((ROOT / page).read_text())
    return [re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, name, body in found if name == language]


def languages(page: str) -> set[str]:
    """The languages of all fenced blocks of a page."""
    return {name for _, name, _ in FENCED.findall((ROOT / page).read_text())}


def indented(page: str) -> list[str]:
    """The first lines of indented code blocks, whose language is unknown."""
    return INDENTED.findall(FENCED.sub("", (ROOT / page).read_text()))


def commands(page: str) -> list[str]:
    """The commands of a page in their order, each in one line with single spaces and without its comment."""
    inline = INLINE.findall(FENCED.sub("", (ROOT / page).read_text()))
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [command for command in inline if not PLACEHOLDER.search(command)]
    lines = [line.replace(".venv/bin/", "") for line in lines]
    plain = (" ".join(re.sub(r"(^|\s)#\s.*", "", line).split()) for line in lines)
    return [line for line in plain if line]


@cache
def words(command: str) -> tuple[str, ...]:
    """The words of a command as bash expands them, file patterns left alone."""
    assert not re.search(r"[$;&|]", command), command
    script = f"set -f; printf '%s\\0' {re.split(' [<>] ', command)[0]}"
    printed = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout
    return tuple(printed.split("\0")[:-1])


def everywhere() -> Iterator[tuple[str, str]]:
    """(page, command) for all pages."""
    for page in NAMES:
        for command in commands(page):
            yield page, command
