"""Places for the names of marks and levels in a plot. They should cover no curve, no dotted line and no other name.

Each name is tried at STEPS places along its dotted line, and written at the place with the smallest overlap. All
coordinates are pixels of the canvas, so the canvas must have its final layout.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

STEPS = 40
"""Number of places that are tried along a dotted line."""
SAMPLES = 400
"""Number of x values at which curves are compared with a name."""
BAND = 0.1
"""Weight of a band relative to a curve. It is small, because a name on a band can be read."""
TAKEN = 1e6
"""Weight of a dotted line or of another name. It is larger than the weight of all curves together."""


class Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.top <= other.bottom or other.top <= self.bottom)


Points = tuple[Sequence[float], Sequence[float]]
"""x and y of one curve, in data coordinates."""


@dataclass
class Covered:
    """Curves, bands and boxes that a name in these axes should not cover.

    A curve has [SAMPLES] y values in pixels at the x values `at`; they are NaN beyond its ends. A band is a pair of
    curves: its lower and its upper end. The boxes are those of dotted lines and of other names.
    """

    axes: Axes
    at: np.ndarray
    curves: list[np.ndarray] = field(default_factory=list)
    bands: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)

    @classmethod
    def of(cls, axes: Axes, curves: Iterable[Points], bands: Iterable[tuple[Points, Points]]) -> "Covered":
        found = cls(axes, np.linspace(axes.bbox.x0, axes.bbox.x1, SAMPLES))
        found.curves = [found._pixels(curve) for curve in curves]
        found.bands = [(found._pixels(low), found._pixels(high)) for low, high in bands]
        return found

    def _pixels(self, curve: Points) -> np.ndarray:
        points = np.asarray([pair for pair in zip(*curve, strict=True) if np.isfinite(pair).all()], dtype=np.float64)
        if not points.size:
            return np.full(SAMPLES, np.nan)
        x, y = self.axes.transData.transform(points).T
        return np.interp(self.at, x, y, left=np.nan, right=np.nan)

    def overlap(self, box: Box, gap: float) -> float:
        """Return the overlap of a box, with `gap` pixels around it.

        A curve or band adds the share of the width in which it overlaps the box, times its weight. A dotted line or
        another name adds TAKEN.
        """
        wide = Box(box.left - gap, box.bottom - gap, box.right + gap, box.top + gap)
        inside = (self.at >= wide.left) & (self.at <= wide.right)
        total = TAKEN * sum(wide.overlaps(each) for each in self.boxes)
        ranges = [(1.0, *_joined(each)) for each in self.curves] + [(BAND, *each) for each in self.bands]
        for weight, low, high in ranges:
            total += weight * float(np.mean(((high >= wide.bottom) & (low <= wide.top))[inside]))
        return total


def _joined(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and highest y of a curve around every sample, so that no steep part is missed."""
    around = np.stack([np.roll(curve, 1), curve, np.roll(curve, -1)])
    around[0, 0], around[2, -1] = np.nan, np.nan
    known = ~np.isnan(around).all(axis=0)
    low, high = np.full(curve.shape, np.nan), np.full(curve.shape, np.nan)
    low[known], high[known] = np.nanmin(around[:, known], axis=0), np.nanmax(around[:, known], axis=0)
    return low, high


def place_name(covered: Covered, name: str, along: str, value: float, gap: float, colour: str, last: bool) -> None:
    """Write `name` beside the dotted line at the data coordinate `value`, at the place with the smallest overlap.

    `along` is "x" for a vertical line and "y" for a horizontal one. `gap` is the distance to other things, in pixels. A
    name is broken into shorter lines if this makes the overlap smaller. If several places have the same overlap, the
    first is used, which is the lowest or leftmost. With `last`, the last one is used.
    """
    axes = covered.axes
    text = axes.annotate(name, (0, 0), xycoords="axes fraction", ha="left", va="bottom", color=colour, linespacing=1.0)
    text.set_in_layout(False)
    found = []
    for shown in (name, fill(name, len(name) // 2 + 2)):
        text.set_text(shown)
        size = text.get_window_extent()
        boxes = _boxes(axes, (size.width, size.height), along, value, gap)
        best = min(reversed(boxes) if last else boxes, key=lambda box: covered.overlap(box, 0.5 * gap))
        found.append((covered.overlap(best, 0.5 * gap), shown, best))
    overlap, shown, best = min(found, key=lambda each: each[0])
    covered.boxes.append(best)
    text.set_text(shown)
    text.xy = tuple(axes.transAxes.inverted().transform((best.left, best.bottom)))
    text.set_position(text.xy)
    if overlap >= BAND:
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _boxes(axes: Axes, size: tuple[float, float], along: str, value: float, gap: float) -> list[Box]:
    """Return the boxes of this `size` on both sides of a dotted line, in order, inside the axes if possible."""
    area, (width, height), boxes = Box(*axes.bbox.extents), size, []
    x, y = axes.transData.transform((value, 1.0) if along == "x" else (1.0, value))
    for share in np.linspace(0, 1, STEPS):
        if along == "x":
            bottom = area.bottom + gap + share * (area.top - area.bottom - 2 * gap - height)
            corners = [(x + gap, bottom), (x - gap - width, bottom)]
        else:
            left = area.left + gap + share * (area.right - area.left - 2 * gap - width)
            corners = [(left, y + 0.7 * gap), (left, y - 0.7 * gap - height)]
        boxes += [Box(left, bottom, left + width, bottom + height) for left, bottom in corners]
    inside = [
        box
        for box in boxes
        if box.left >= area.left and box.right <= area.right and box.bottom >= area.bottom and box.top <= area.top
    ]
    return inside or boxes
