"""The table and the picture of `megatron-coca inspect mup`."""

from collections.abc import Callable, Sequence

from megatron_coca.config import Config, ConfigError
from megatron_coca.evaluation.report.plots.figures import Figure, png, svg
from megatron_coca.evaluation.report.plots.panels import Line, Panel, panels
from megatron_coca.support.markdown_tables import format_table
from megatron_coca.training.coordinate_check import KINDS, Coordinate, check_coordinates, exponent

PARAMETRIZATIONS = {True: "muP", False: "standard"}
PICTURES: dict[str, Callable[[Figure], bytes]] = {".svg": svg, ".png": png}
"""The functions that draw a picture, by the extension of its file."""


def measure(config: Config, widths: Sequence[int], steps: int) -> list[Coordinate]:
    """Measure the models of `widths`, sorted and without repetitions. Raises ConfigError, BackendError."""
    different = sorted(set(widths))
    if len(different) < 2:
        raise ConfigError("--widths: one width shows no growth; name at least two, such as 64,128")
    return check_coordinates(config, different, steps)


def changes(found: Sequence[Coordinate], kind: str, mup: bool) -> list[tuple[int, float]]:
    """Return pairs of a width and a part's change after the last step; empty if the model has no such part."""
    last = max(each.step for each in found)
    return [(each.width, each.change) for each in found if (each.kind, each.mup, each.step) == (kind, mup, last)]


def table(found: Sequence[Coordinate]) -> str:
    """Return a table of the changes after the last step, with the best-fitting exponent of the width."""
    widths, steps = sorted({each.width for each in found}), max(each.step for each in found)
    rows = []
    for kind in KINDS:
        for mup, name in PARAMETRIZATIONS.items():
            points = changes(found, kind, mup)
            if points:
                rows.append([kind, name, *(change for _, change in points), f"{exponent(points):.2f}"])
    header = ("part", "parametrization", *(f"width {width}" for width in widths), "exponent of the width")
    return f"Mean absolute change of outputs after {steps} steps\n\n{format_table(header, rows)}"


def figure(found: Sequence[Coordinate]) -> Figure:
    """Return a plot of the changes after the last step against the width, with a panel for each part."""
    shown = []
    for kind in KINDS:
        lines = []
        for mup, name in PARAMETRIZATIONS.items():
            if points := changes(found, kind, mup):
                widths, values = zip(*points, strict=True)
                lines.append(Line(name, tuple(map(float, widths)), tuple(values)))
        if lines:
            shown.append(Panel(tuple(lines), "width", "mean absolute change", kind, log_y=True))
    steps = max(each.step for each in found)
    caption = f"Mean absolute change of outputs after {steps} steps, by width"
    return Figure("coordinates", caption, f"{caption}, with muP and in the standard parametrization", *panels(shown))


def picture(found: Sequence[Coordinate], kind: str) -> bytes:
    """Return the plot as the content of a file with the extension `kind`, a key of PICTURES."""
    return PICTURES[kind](figure(found))
