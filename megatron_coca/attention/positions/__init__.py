"""The mathematics of positions: pure functions and literal tables, without configuration or backends."""


class PositionRangeError(ValueError):
    """Positions exceed the range supported by the weights or the dtype."""
