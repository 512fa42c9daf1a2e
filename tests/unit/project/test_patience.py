"""Time limits of tests grow on slow machines, never shrink, and stay bounded."""

import pytest

from tests import patience


def test_a_limit_grows_with_the_slowness_within_bounds() -> None:
    assert patience.factor(patience.QUIET) == 1.0
    assert patience.factor(0.1 * patience.QUIET) == 1.0
    assert patience.factor(3.0 * patience.QUIET) == pytest.approx(3.0)
    assert patience.factor(1e9) == patience.LARGEST


def test_pytest_gives_each_test_more_time(request: pytest.FixtureRequest) -> None:
    limit = request.config.getoption("timeout")
    assert limit >= float(request.config.getini("timeout"))
