"""The report's page in a browser, where there is one."""

import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from megatron_coca.evaluation import build_report
from tests.unit.report_cases import every_result, write

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")

DARK = ("--blink-settings=preferredColorScheme=0",)
DRAWN = ("perplexity_0", "perplexity_1", "passkey_0", "passkey_1", "needle", "harness_0", "speed")
MEASURE = """<script>addEventListener("load", () => {
  const broken = [...document.images].filter(image => !image.complete || image.naturalWidth === 0).length;
  parent.postMessage(`width ${document.documentElement.scrollWidth} of ${innerWidth}, broken ${broken}`, "*");
});</script></body>"""
FRAME = """<!DOCTYPE html><script>addEventListener("message", event => document.title = event.data);</script>
<iframe src="%s" style="width: %dpx; height: 800px; border: 0"></iframe>"""
"""A window itself cannot be as narrow as a phone."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write(folder / "results", {name: each for name, each in every_result().items() if name in DRAWN})
    build_report([folder / "results"], folder, "350M parameters, trained at 512")
    return folder / "report.html"


def browse(page: Path, width: int, *options: str) -> bytes:
    """What the browser prints."""
    profile = page.parent / f"profile-{width}"
    fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    command = [str(BROWSER), *fixed, f"--window-size={width},1200", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window_and_every_image_is_drawn(page: Path, width: int) -> None:
    measuring = page.with_name(f"measuring-{width}.html")
    measuring.write_text(page.read_text().replace("</body>", MEASURE))
    frame = page.with_name(f"frame-{width}.html")
    frame.write_text(FRAME % (measuring.name, width))
    shown = browse(frame, 1400, "--dump-dom").decode()
    assert re.search(rf"<title>width {width} of {width}, broken 0</title>", shown), shown[:600]


@pytest.mark.parametrize(("options", "low", "high"), [((), 200, 255), (DARK, 10, 80)])
def test_light_and_dark(page: Path, options: tuple[str, ...], low: int, high: int) -> None:
    picture = page.with_name(f"{'dark' if options else 'light'}.png")
    browse(page, 1280, *options, f"--screenshot={picture}")
    grey = Image.open(io.BytesIO(picture.read_bytes())).convert("L")
    statistics = ImageStat.Stat(grey)
    assert low < statistics.mean[0] < high
    assert statistics.stddev[0] > 10, "there is something to see"
