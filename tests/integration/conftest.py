"""Fixtures for training processes that start quickly, and for runs that end in a given way."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.conftest import Finished, Run, clean_environment
from tests.integration.hooks import Hook
from tests.integration.killing import ForkServer, fork_server
from tests.slurm_cluster import Cluster, Unavailable, cluster

Live = Callable[..., Finished]
KILLS = pytest.StashKey[Counter[tuple[str, str]]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the number of kills by kind, as benchmarks/cluster.md does."""
    if found := config.stash.get(KILLS, Counter()):
        terminalreporter.section(f"{found.total()} kills")
        for (work, kind), number in found.items():
            terminalreporter.write_line(f"{work}: {kind}: {number}")


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> Counter[tuple[str, str]]:
    """Counts the kills of all tests, by the work and by what was killed."""
    return pytestconfig.stash.setdefault(KILLS, Counter())


@pytest.fixture(scope="session")
def server(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks processes that train on `small`."""
    folder = tmp_path_factory.mktemp("forked")
    file = folder / "small.json"
    file.write_text(json.dumps(small))
    with fork_server(clean_environment(), folder, file) as started:
        yield started


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of three nodes on this machine. Tests are skipped with the reason if it cannot start."""
    try:
        with cluster(tmp_path_factory.mktemp("slurm")) as running:
            yield running
    except Unavailable as reason:
        pytest.skip(f"Slurm cannot run here: {reason}")


@pytest.fixture(scope="session")
def live(server: ForkServer) -> Live:
    """live(changes, hooks=(), ranks=1, expected=0): a run on `small` with changed keys, to its end.

    Every rank must end with the status `expected`; the output is that of all ranks.
    """

    def run(
        changes: Mapping[str, Any], hooks: Sequence[Hook] = (), ranks: int = 1, expected: int | None = 0
    ) -> Finished:
        launch = server.start(changes, ranks, hooks)
        statuses, output = launch.end(), launch.output()
        assert expected is None or statuses == [expected] * ranks, f"{statuses}: {output[-3000:]}"
        return Finished(max(statuses, key=abs), output)

    return run


@pytest.fixture(scope="session")
def whole(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of `small` in one process that never stopped, with a checkpoint at its end only. Not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    live({"save": str(folder)})
    return Run(folder)
