"""Heat maps: accuracies as coloured cells with their numbers."""

import math
from collections.abc import Sequence
from textwrap import fill

from matplotlib.figure import Figure as Canvas

from megatron_coca.evaluation.labels import plot_text
from megatron_coca.evaluation.report.plots.figures import Drawing, Layout

HeatMap = tuple[str, Sequence[Sequence[float | None]]]
"""A title, and accuracies by row and column; None leaves a cell empty."""


def heat_maps(
    maps: Sequence[HeatMap], rows: Sequence[str], heads: Sequence[str], x_label: str, y_label: str, name: str
) -> Drawing:
    """Return two functions: one draws the heat maps, the other returns the height of the plot.

    `name` is the label of the colour bar.
    """

    def columns_in(layout: Layout) -> int:
        return min(len(maps), layout.columns)

    def height(layout: Layout) -> float:
        lines = math.ceil(len(maps) / columns_in(layout))
        return 0.9 + lines * (0.35 + 1.7 * layout.points / 72 * max(6, len(rows)))

    def draw(canvas: Canvas, layout: Layout) -> None:
        columns = columns_in(layout)
        grid = canvas.subplots(math.ceil(len(maps) / columns), columns, squeeze=False, sharey=True)
        for index, axes in enumerate(grid.flat):
            if index >= len(maps):
                axes.set_visible(False)
                continue
            title, values = maps[index]
            numbers = [[math.nan if value is None else value for value in line] for line in values]
            image = axes.imshow(numbers, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
            lowest = index + columns >= len(maps)
            axes.set_xticks(range(len(heads)), heads if lowest else [""] * len(heads))
            axes.set_yticks(range(len(rows)), list(map(plot_text, rows)))
            axes.set(xlabel=x_label if lowest else "", ylabel="" if index % columns else y_label)
            axes.set_title(plot_text(fill(title, int(1.15 * layout.width / columns * 72 / layout.points))))
            axes.spines[:].set_visible(False)
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    ink = "grey" if value is None else "white" if value < 0.55 else "black"
                    text = "–" if value is None else f"{value:.2f}".replace("0.", ".")
                    axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=layout.points - 1)
        canvas.colorbar(image, ax=list(grid.flat), label=name, shrink=0.9, aspect=max(20, 10 * len(grid)))

    return draw, height
