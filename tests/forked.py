"""`--forks N` collects the tests once and runs them in N copies of this process, each file in one of them.

pytest-xdist starts new processes instead, each of which imports and collects all tests: here 14 seconds of processor
time. It does so because some libraries cannot be used after a fork. CUDA is one, so tests on a GPU still use it.
"""

import atexit
import os
import signal
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run the tests in N copies of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in copies of this process."""
    copies = session.config.getoption("--forks")
    if not copies or session.config.option.collectonly or session.testsfailed:
        return None
    files = defaultdict[str, list[pytest.Item]](list)
    for item in session.items:
        files[str(item.path)].append(item)
    with _copies(session, [*files.values()], min(copies, len(files))) as started:
        _report(session, [*started], len(files))
    return True


@dataclass
class Copy:
    """A copy of this process, as this process sees it."""

    pid: int
    pipe: Connection
    item: Mapping[str, Any] | None = None
    """Name and location of the test that runs."""


@contextmanager
def _copies(session: pytest.Session, files: Sequence[Sequence[pytest.Item]], number: int) -> Iterator[list[Copy]]:
    """Start the copies, and end them."""
    running: list[Copy] = []
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder, and not one of each copy
    try:
        for each in range(number):
            ours, theirs = Pipe()
            if (pid := os.fork()) == 0:
                _run(session, files, theirs, f"copy{each}")
            theirs.close()
            running.append(Copy(pid, ours))
        yield running
    except BaseException:
        for copy in running:
            os.kill(copy.pid, signal.SIGINT)
        raise
    finally:
        ends = [os.waitpid(copy.pid, 0)[1] for copy in running]
    if any(ends):  # also if it ended after its last test
        session.shouldfail = "a process of tests failed, and tests may not have run"
        raise session.Failed(session.shouldfail)


def _report(session: pytest.Session, running: list[Copy], files: int) -> None:
    """Give the copies the `files`, one by one, and pass on what they report.

    A copy sends the name of a hook and its arguments, or `wants` for the next file, or `begins` with a test.
    """
    hooks, waiting = session.config.hook, iter(range(files))
    while running:
        ready = wait([copy.pipe for copy in running])
        for copy in [copy for copy in running if copy.pipe in ready]:
            try:
                name, arguments = copy.pipe.recv()
            except EOFError:
                running.remove(copy)
                if copy.item is not None:
                    text = "the process of the test ended; the tests below it in its file did not run"
                    lost = pytest.TestReport(**copy.item, keywords={}, outcome="failed", longrepr=text, when="call")
                    hooks.pytest_runtest_logreport(report=lost)
                continue
            match name:
                case "wants":
                    copy.item, number = None, next(waiting, None)
                    copy.pipe.send(number)
                    if number is None:
                        running.remove(copy)
                case "begins":
                    copy.item = arguments
                case "pytest_runtest_logreport":
                    report = hooks.pytest_report_from_serializable(config=session.config, data=arguments["report"])
                    hooks.pytest_runtest_logreport(report=report)
                case "pytest_warning_recorded":
                    hooks.pytest_warning_recorded.call_historic(kwargs=arguments)
                case _:
                    getattr(hooks, name)(**arguments)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


def _run(session: pytest.Session, files: Sequence[Sequence[pytest.Item]], pipe: Connection, name: str) -> None:
    """Run the files that the first process names, in this copy of it, and exit."""
    status, plugins = 1, session.config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    try:
        # The copies write the output of tests into files of their own, and temporary files below a folder of their own.
        capture.stop_global_capturing()
        capture.start_global_capturing()
        folders = session.config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp = folders.mktemp(name, numbered=False)
        plugins.unregister(name="terminalreporter")
        plugins.register(Reporter(session.config, pipe))
        pipe.send(("wants", {}))
        while (number := pipe.recv()) is not None:
            for item, following in zip(files[number], [*files[number][1:], session], strict=True):
                pipe.send(("begins", {"nodeid": item.nodeid, "location": item.location}))
                # Before `session`, the fixtures of the session are kept, and all others are torn down.
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            pipe.send(("wants", {}))
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
        status = 0
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        capture.stop_global_capturing()  # prints what it holds
        os._exit(status)


class Reporter:
    """The plugin that sends what a copy reports to the first process."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._pipe.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        shown = warnings.WarningMessage(Warning(text), Warning, warning_message.filename, warning_message.lineno)
        arguments = {"warning_message": shown, "when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("pytest_warning_recorded", arguments))
