"""MkDocs hook: links to files of the repository outside docs/ work on the site as they do in the repository.

Each linked file becomes a part of the site, below `repository/`, and the links of all pages are rewritten to it. A link
with the name of a page or of its folder as its text gets the title of the page.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = "repository"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")

NAMED = re.compile(r"\[(?:[\w./-]+\.md|benchmarks|(?:studies|tests)/\w+)\](?=\(([^)\s#]+))")


def repository_path(site_path: str) -> str:
    """The path in the repository of a file of the site."""
    inside = site_path.removeprefix(f"{OUTSIDE}/")
    return inside if inside != site_path else f"docs/{site_path}"


def site_path(repository_path: str) -> str:
    """The path on the site of a file of the repository."""
    inside = repository_path.removeprefix("docs/")
    return inside if inside != repository_path else f"{OUTSIDE}/{repository_path}"


def targets(text: str, page: str) -> dict[str, str]:
    """The relative links of a page, and the files of the repository that they lead to. `page` is its path there."""
    links = (match[1] for match in LINK.finditer(text))
    return {link: posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links}


def title(page: Path) -> str:
    """The title of a page; its name if it has none."""
    lines = page.read_text().splitlines() if page.is_file() else []
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), page.name)


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files, and those that they link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in targets((ROOT / page).read_text(), page).values():
            if target in known or not (ROOT / target).is_file() or target.startswith("docs/"):
                continue
            known.add(target)
            files.append(File.generated(config, site_path(target), abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    here = page.file.src_uri
    found = targets(markdown, repository_path(here))

    def rewritten(match: re.Match[str]) -> str:
        there = site_path(found[match[1]])
        return posixpath.relpath(there, posixpath.dirname(here) or ".") + (match[2] or "")

    def titled(match: re.Match[str]) -> str:
        return f"[{title(ROOT / found[match[1]])}]" if match[1] in found else match[0]

    return LINK.sub(rewritten, NAMED.sub(titled, markdown))
