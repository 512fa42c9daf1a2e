"""Exit statuses are known and documented."""

import re
from pathlib import Path

import pytest

from megatron_coca.work.statuses import EXIT_STATUSES, Diverged, Preempted, Stopped, Unsaved

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("kind", "status"), [(Preempted, 75), (Diverged, 77), (Unsaved, 78)])
def test_orderly_ends_of_a_run_know_their_status(kind: type[Stopped], status: int) -> None:
    with pytest.raises(Stopped) as caught:
        raise kind("SIGTERM")
    assert caught.value.status == status and status in EXIT_STATUSES


def test_every_exit_status_is_documented() -> None:
    section = (ROOT / "docs" / "faults.md").read_text().partition("## Exit statuses")[2].partition("##")[0]
    statuses = re.findall(r"^\| (\d+) \| \S.* \| \S.* \|$", section, re.MULTILINE)
    assert tuple(map(int, statuses)) == EXIT_STATUSES
