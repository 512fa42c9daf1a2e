"""The report and the documentation in a browser, if there is one: widths, texts, console and keyboard."""

import functools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.evaluation import build_report
from megatron_coca.evaluation.stretch.page import write_page
from tests.documents import ROOT
from tests.patience import patience
from tests.unit.evaluation.report_cases import ablation, every_result, write
from tests.unit.evaluation.stretch_cases import PLAN, config_of, stretch_result

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: install requirements-dev.txt")
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
MKDOCS = next(filter(None, (shutil.which("mkdocs", path=str(ROOT / ".venv-docs/bin")), shutil.which("mkdocs"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver: apt-get install chromium-driver"
    ),
]
WIDTHS = (320, 1400)
PAGES = ("index.html", "report.html", "attention.html", "repository/studies/books/index.html", "repository/index.html")

MEASURE = """
const all = selector => [...document.querySelectorAll(selector)].filter(each => each.checkVisibility());
const name = element =>
  `${element.tagName} ${(element.getAttribute("src") || "").slice(0, 60)} ${element.textContent.trim().slice(0, 50)}`;
const scroller = element => {
  for (let at = element.parentElement; at && at !== document.body; at = at.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(at).overflowX)) return at;
  return null;
};
const beyond = element => element.getBoundingClientRect().right > innerWidth + 1 && !scroller(element);
return {
  width: document.documentElement.scrollWidth,
  inner: innerWidth,
  broken: all("img").filter(image => !image.complete || image.naturalWidth === 0).map(name),
  unnamed: all("img:not([alt]), img[alt=''], th:empty, caption:empty, figcaption:empty, summary:empty").map(name),
  cut: all("h1, h2, h3, p, li, figcaption, caption span, summary, nav a, img").filter(beyond).map(name),
  small: all("figure img").map(image => image.clientWidth),
  open: all("details[open]").length,
  folded: document.querySelectorAll("details").length,
};
"""
WIDE = """
return [...document.querySelectorAll("table")].filter(table => {
  for (let at = table.parentElement; at && at !== document.body; at = at.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(at).overflowX) && at.scrollWidth > at.clientWidth + 1) {
      at.dataset.wide = "yes";
      return true;
    }
  return false;
}).length"""
FOCUSED = """
const box = document.activeElement.closest("[data-wide]");
if (box && !box.dataset.reached) { box.dataset.reached = "yes"; }
return [document.activeElement === document.body, document.querySelectorAll("[data-reached]").length];
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder; scripts of the documentation do not run from files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A report of every section, one of twelve models with three seeds, and the page of `megatron-coca stretch`."""
    folder = tmp_path_factory.mktemp("pages")
    write(folder / "every", every_result())
    build_report([folder / "every"], folder / "sections", "350M parameters, trained at 512", papers=True)
    results, curves = ablation()
    files = write(folder / "many", results)
    build_report(files, folder / "models", f"Twelve models of {'long/' * 20}", curves=curves, baseline="Method A")
    write_page(stretch_result(), {name: config_of(name) for name in PLAN.methods}, folder / "stretch", PLAN)
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if MKDOCS is None:
        pytest.skip("needs mkdocs: make docs")
    folder = tmp_path_factory.mktemp("docs")
    # `docs/site/mkdocs.yml` names paths relative to itself.
    command = [
        MKDOCS,
        "build",
        "--quiet",
        "--config-file",
        str(ROOT / "docs/site/mkdocs.yml"),
        "--site-dir",
        str(folder),
    ]
    subprocess.run(command, check=True, timeout=patience(300), stdout=sys.stderr)
    with served(folder) as address:
        yield address


def opened(browser: Any, address: str, width: int) -> Any:
    """Open a page on a screen of this width, and return the measures of MEASURE."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")
    browser.get(address)
    browser.execute_async_script("document.fonts.ready.then(arguments[0])")
    return browser.execute_script(MEASURE)


def check(browser: Any, address: str, width: int) -> dict[str, Any]:
    found = opened(browser, address, width)
    assert found["inner"] == width and found["width"] <= width
    assert not found["broken"] and not found["unnamed"] and not found["cut"]
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert not [message for message in errors if "favicon" not in message]
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["sections", "models"])
def test_a_report_fits_the_screen(browser: Any, reports: str, name: str, width: int) -> None:
    found = check(browser, f"{reports}/{name}/report.html", width)
    assert min(found["small"]) > 0.85 * min(width, 700), "plots fill the width, so that their letters stay large"
    assert found["folded"] > 0 and found["open"] == 0, "protocols are folded"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_stretch_fits_the_screen(browser: Any, reports: str, width: int) -> None:
    found = check(browser, f"{reports}/stretch/stretch.html", width)
    assert min(found["small"]) > 0.85 * min(width, 700)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_fits_the_screen(browser: Any, docs: str, page: str, width: int) -> None:
    check(browser, f"{docs}/{page}", width)


def test_links_between_pages_have_titles(browser: Any, docs: str) -> None:
    opened(browser, f"{docs}/index.html", 1400)
    texts = browser.execute_script("return [...document.querySelectorAll('article a')].map(link => link.textContent)")
    assert "Reports" in texts and "Key-value recall: retrieval in minutes" in texts
    assert not [text for text in texts if text.endswith(".md")]


def reached_by_tab(browser: Any, most: int = 400) -> tuple[int, int]:
    """Return the number of wide tables, and how many of them the Tab key reaches."""
    wide, reached = browser.execute_script(WIDE), 0
    for pressed in range(most):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        at_end, reached = browser.execute_script(FOCUSED)
        if reached == wide or (pressed > 3 and at_end):
            break
    return wide, reached


def test_the_keyboard_reaches_every_wide_table_of_a_report(browser: Any, reports: str) -> None:
    opened(browser, f"{reports}/sections/report.html", 320)
    wide, reached = reached_by_tab(browser)
    assert wide == reached > 3
    before = browser.execute_script("return document.activeElement.scrollLeft")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT * 5)
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert browser.execute_script("return document.activeElement.scrollLeft") > before == 0


def test_the_keyboard_reaches_every_wide_table_of_the_documentation(browser: Any, docs: str) -> None:
    opened(browser, f"{docs}/recall_books.html", 320)
    wide, reached = reached_by_tab(browser)
    assert wide == reached > 0


def test_a_report_prints(browser: Any, reports: str) -> None:
    opened(browser, f"{reports}/models/report.html", 1400)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert printed["data"].startswith("JVBERi"), "%PDF in base64"
