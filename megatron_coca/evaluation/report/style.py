"""How plots look: colours that people with any colour vision tell apart, on light and on dark ground."""

import io
from collections.abc import Mapping
from typing import Any, cast

import matplotlib
from matplotlib import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from megatron_coca.evaluation.report.document import Figure

LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
DARK = ("#56B4E9", "#F0803C", "#2BC295", "#E39CC4", "#F0B429", "#7C9CF0", "#DDDDDD")
"""The palette of Okabe and Ito (jfly.uni-koeln.de/color), less its yellow; brighter for dark ground."""

MARKERS = "osD^vP*X"
SIZES: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "legend.fontsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 160,
    "svg.fonttype": "path",
}


def _colours(ink: str, ground: str, palette: tuple[str, ...]) -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    grounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(grounds, ground),
        "grid.color": ink,
        "grid.alpha": 0.14,
        "grid.linewidth": 0.7,
        "axes.prop_cycle": cycler(color=palette),
    }


PRINT = SIZES | _colours("#1b1f24", "white", LIGHT)
ON_LIGHT = SIZES | _colours("#1b1f24", "none", LIGHT)
ON_DARK = SIZES | _colours("#e4e7ec", "none", DARK)


def png(figure: Figure) -> bytes:
    """For documents and print, on white ground."""
    image = io.BytesIO()
    with matplotlib.rc_context(cast(Any, PRINT)):
        FigureCanvasAgg(_drawn(figure)).print_png(image, metadata={"Software": None})
    return image.getvalue()


def svg(figure: Figure, style: Mapping[str, Any]) -> bytes:
    """For the page, without ground; the same bytes every time."""
    image = io.BytesIO()
    with matplotlib.rc_context(cast(Any, {**style, "svg.hashsalt": figure.name})):
        FigureCanvasSVG(_drawn(figure)).print_svg(image, metadata={"Date": None, "Creator": None})
    return image.getvalue()


def _drawn(figure: Figure) -> Canvas:
    canvas = Canvas(figsize=figure.size, layout="constrained")
    figure.draw(canvas)
    return canvas
