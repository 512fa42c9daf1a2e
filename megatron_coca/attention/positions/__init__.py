"""Position mathematics: pure functions and literal tables, without configuration and without backends."""


class PositionRangeError(ValueError):
    """Positions exceed the range of the weights or of the dtype."""
