"""A plot, its layouts and style, and its files.

Every plot is drawn in two layouts: `COLUMN`, for a column of a paper and for phones, and `PAGE`.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from megatron_coca.evaluation.report.plots.fonts import set_fonts

FOREGROUND, QUIET, FAINT = "#1b1f24", "#59626e", "#9aa3ad"


@dataclass(frozen=True)
class Layout:
    """Width in inches, size of the text in points, panels in a row, and characters in a line of a label."""

    width: float
    points: float
    columns: int
    label: int


COLUMN = Layout(3.33, 8.0, 1, 16)
"""The column of a two-column paper. On a phone 320 pixels wide, the size of the text is about ten pixels."""
PAGE = Layout(7.0, 9.0, 2, 18)
"""The text width of a two-column paper."""


def _style(background: str, points: float) -> dict[str, Any]:
    lines = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    faces = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    sizes = ("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize")
    return {
        **dict.fromkeys(lines, FOREGROUND),
        **dict.fromkeys(faces, background),
        **dict.fromkeys(sizes, points),
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlepad": 0.6 * points,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": FOREGROUND,
        "grid.alpha": 0.12,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.5,
        "lines.markersize": 0.45 * points,
        "legend.frameon": False,
        "figure.dpi": 200,
        "svg.fonttype": "path",
        "pdf.fonttype": 42,
    }


BACKGROUNDS = {"print": "white", "light": "none"}

Drawing = tuple[Callable[[Canvas, Layout], None], Callable[[Layout], float]]
"""The functions `draw` and `height` of a `Figure`."""


@dataclass(frozen=True)
class Figure:
    """A plot. `draw` fills a canvas that is `height(layout)` inches high. `alt` is the text for screen readers."""

    name: str
    caption: str
    alt: str
    draw: Callable[[Canvas, Layout], None]
    height: Callable[[Layout], float] = lambda layout: 2.4

    def _repr_png_(self) -> bytes:
        """Show the plot in a notebook."""
        return png(self)


def style(layout: Layout, background: str = "print", salt: str = "") -> Any:
    """Return a context manager that sets the style of plots while they are drawn and printed."""
    return matplotlib.rc_context(
        cast(Any, {**_style(BACKGROUNDS[background], layout.points), "svg.hashsalt": salt or None})
    )


def drawn(figure: Figure, layout: Layout) -> Canvas:
    """Return the plot on a canvas, in the current style."""
    canvas = Canvas(figsize=(layout.width, figure.height(layout)), layout="constrained")
    figure.draw(canvas, layout)
    set_fonts(canvas)
    return canvas


def svg(figure: Figure, background: str = "print", layout: Layout = PAGE) -> bytes:
    """Return the plot as SVG, with text as paths. The same figure always gives the same bytes."""
    with style(layout, background, figure.name):
        return _printed(drawn(figure, layout), ".svg")


def svgs(figure: Figure, background: str = "print") -> dict[str, bytes]:
    """Return the plot as SVG in both layouts, by the ends of their file names."""
    return {kinds[".svg"]: svg(figure, background, layout) for layout, kinds in FILES.items()}


def png(figure: Figure) -> bytes:
    """Return the plot as PNG on white, for slides and notebooks."""
    with style(PAGE):
        return _printed(drawn(figure, PAGE), ".png")


PRINTERS: dict[str, Callable[[Canvas, io.BytesIO], Any]] = {
    ".svg": lambda canvas, image: FigureCanvasSVG(canvas).print_svg(image, metadata={"Date": None, "Creator": None}),
    ".pdf": lambda canvas, image: FigureCanvasPdf(canvas).print_pdf(
        image, metadata={"CreationDate": None, "Creator": None, "Producer": None}
    ),
    ".png": lambda canvas, image: FigureCanvasAgg(canvas).print_png(image, metadata={"Software": None}),
}
"""Functions that print a plot without dates and versions, so that the same plot gives the same bytes. PDF embeds
TrueType fonts."""


def _printed(canvas: Canvas, kind: str) -> bytes:
    image = io.BytesIO()
    PRINTERS[kind](canvas, image)
    return image.getvalue()


FILES = {PAGE: {".svg": ".svg", ".png": ".png", ".pdf": "-wide.pdf"}, COLUMN: {".svg": "-narrow.svg", ".pdf": ".pdf"}}
"""The ends of the file names of a plot, by layout and kind."""


def images(figure: Figure) -> dict[str, bytes]:
    """Return the plot in all layouts and kinds, by the ends of their file names. SVG has a transparent background."""
    found = {}
    for layout, kinds in FILES.items():
        with style(layout, "light", figure.name):
            canvas = drawn(figure, layout)
            for kind, end in kinds.items():
                found[end] = _printed(canvas, kind)
                canvas.set_layout_engine("none")  # keep the layout that the first printer computed
                canvas.set_facecolor("white")
    return found
