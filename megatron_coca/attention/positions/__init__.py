"""The mathematics of positions: pure functions and literal tables, without configuration or backends."""


class PositionRangeError(ValueError):
    """Positions exceed the range of the weights or of the dtype."""
