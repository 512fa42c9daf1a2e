"""The report's page in a browser, where there is one: sizes are measured in the page itself."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.evaluation import build_report
from tests.unit.evaluation.report_cases import ablation, every_result, write

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"needs a browser in PATH: none of {', '.join(BROWSERS)} is installed"),
]

MEASURE = """<script>addEventListener("load", () => {
  const all = selector => [...document.querySelectorAll(selector)];
  const name = element => `${element.tagName} ${element.textContent.trim().slice(0, 40)}`;
  const inside = element => element.closest(".scroll, .plot");
  const wide = element => element.scrollWidth > element.clientWidth + 1;
  const cut = element => wide(element) && getComputedStyle(element).display !== "inline" && !inside(element);
  const beyond = element => element.getBoundingClientRect().right > innerWidth + 1 && !inside(element);
  parent.postMessage(JSON.stringify({
    width: document.documentElement.scrollWidth,
    broken: all("img").filter(image => !image.complete || image.naturalWidth === 0).length,
    unnamed: all("img:not([alt]), img[alt=''], th:empty, caption:empty, figcaption:empty, summary:empty").map(name),
    unlinked: all("a").filter(link => !document.querySelector(link.getAttribute("href"))).map(name),
    cut: all("h1, h2, h3, p, li, figcaption, summary, nav a").filter(each => cut(each) || beyond(each)).map(name),
    spilt: all("th, td").filter(wide).map(name),
    tables: all(".scroll").map(box => ({
      wide: wide(box),
      bar: box.offsetHeight - box.clientHeight - 2,
    })),
    plots: all(".plot img").map(image => image.clientWidth / image.getAttribute("width")),
    open: all("details > ul").filter(list => list.checkVisibility()).length,
    details: all("details").length,
  }), "*");
});</script></body>"""
FRAME = """<!DOCTYPE html><pre></pre><script>
addEventListener("message", event => document.querySelector("pre").textContent = event.data);
</script><iframe src="%s" style="width: %dpx; height: 800px; border: 0"></iframe>"""
"""A window itself cannot be as narrow as a phone."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of every section, and one of twelve models with three seeds."""
    folder = tmp_path_factory.mktemp("pages")
    write(folder / "every", every_result())
    build_report([folder / "every"], folder / "sections", "350M parameters, trained at 512")
    results, curves = ablation()
    files = write(folder / "many", results)
    build_report(files, folder / "models", "Twelve models", curves=curves, baseline="Method A")
    return {name: folder / name / "report.html" for name in ("sections", "models")}


def browse(page: Path, width: int, *options: str) -> bytes:
    """What the browser prints."""
    profile = page.parent / f"profile-{width}"
    fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command = [str(BROWSER), *fixed, f"--window-size={width},1200", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout


def measured(page: Path, width: int, name: str, text: str) -> Any:
    """What MEASURE says of a page with this text in a frame of `width` pixels."""
    measuring = page.with_name(f"measuring-{name}.html")
    measuring.write_text(text.replace("</body>", MEASURE))
    frame = page.with_name(f"frame-{name}.html")
    frame.write_text(FRAME % (measuring.name, width))
    shown = browse(frame, 1600, "--virtual-time-budget=10000", "--dump-dom").decode()
    found = re.search(r"<pre>(\{.*\})</pre>", shown, re.DOTALL)
    assert found, shown[:600]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [400, 800, 1400])
@pytest.mark.parametrize("name", ["sections", "models"])
def test_on_a_screen_no_text_is_cut_and_nothing_lacks_a_name(pages: dict[str, Path], name: str, width: int) -> None:
    page = pages[name]
    found = measured(page, width, str(width), page.read_text())
    assert found["width"] <= width and found["broken"] == 0
    assert not found["unnamed"] and not found["unlinked"] and not found["cut"] and not found["spilt"]
    assert all(table["bar"] > 5 for table in found["tables"] if table["wide"]), "a scrollbar that is always there"
    assert width > 400 or any(table["wide"] for table in found["tables"])
    assert all(scale > 0.55 for scale in found["plots"]), "letters of 10 points are 7.5 pixels high at least"
    assert found["details"] > 0 and found["open"] == 0


def test_it_prints(pages: dict[str, Path]) -> None:
    paper = pages["models"].with_name("report.pdf")
    browse(pages["models"], 1280, "--no-pdf-header-footer", f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF")
