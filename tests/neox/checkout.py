"""Run a GPT-NeoX checkout on the CPU. GPT_NEOX_HOME is its folder, GPT_NEOX_PYTHON an interpreter with its
requirements.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, Finished, clean_environment
from tests.patience import patience

HOME, PYTHON = "GPT_NEOX_HOME", "GPT_NEOX_PYTHON"
INSIDE = ROOT / "tests/neox/inside"
TIME_LIMIT = patience(300)
LOSS = re.compile(r"iteration +(\d+)/.*?learning rate: (\S+) .*?lm_loss: (\S+) ")


@dataclass(frozen=True)
class Step:
    """One line of GPT-NeoX's log.

    Attributes:
        number: completed steps.
        next_rate: the learning rate of the step after it, to four digits.
        loss: to seven digits.
    """

    number: int
    next_rate: float
    loss: float


def steps(output: str) -> list[Step]:
    """The steps that GPT-NeoX reports in its output, with `log_interval: 1`."""
    return [Step(int(number), float(rate), float(loss)) for number, rate, loss in LOSS.findall(output)]


@dataclass(frozen=True)
class Checkout:
    """Its folder, and the interpreter that runs it."""

    home: Path
    python: str

    def deepy(
        self,
        script: str,
        folder: Path,
        *files: Mapping[str, object],
        ranks: int = 1,
        before: Sequence[str] = (),
        fails: bool = False,
    ) -> str:
        """The output of `deepy.py script` with the plugin on YAML files with these keys, which must succeed, or fail.
        `before` stands in place of the plugin's launcher and deepy.py.
        """
        names = []
        for number, keys in enumerate(files):
            names.append(f"part{number}.yml")
            (folder / names[-1]).write_text(yaml.safe_dump(dict(keys)))
        devices = {"MASTER_ADDR": "127.0.0.1", "LOCAL_SIZE": str(ranks), "NEOX_CPU_RANKS": str(ranks)}
        done = self.run([*(before or (*PLUGIN, "deepy.py")), script, "-d", str(folder), *names], devices)
        assert (done.status != 0) == fails, _end(done.output)
        return done.output

    def inside(self, script: str, *arguments: str, ranks: int = 1, plugin: bool = True) -> None:
        """Runs one of our scripts as every one of `ranks` processes."""
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        command = [*(PLUGIN if plugin else ()), str(INSIDE / script), *arguments]
        started = [self._start(command, common | {"RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(ranks)]
        outputs = [process.communicate(timeout=TIME_LIMIT)[0] for process in started]
        assert [process.returncode for process in started] == [0] * ranks, _end(outputs[0])

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Finished:
        """python ARGUMENTS in the checkout."""
        process = self._start(arguments, environment)
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
        finally:
            process.kill()
        return Finished(process.returncode, output)

    def _start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        paths = [str(ROOT / "tests/neox/cpu"), str(ROOT), str(self.home)]
        programs = [str(Path(self.python).parent), os.environ["PATH"]]
        own = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(programs)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        variables = clean_environment(own | dict(environment))
        return subprocess.Popen([self.python, *arguments], cwd=self.home, env=variables, **pipes)


PLUGIN = ("-m", "megatron_coca.neox_plugin")
IMPORTING = ("-c", "import megatron_coca.neox_plugin.active, deepy; deepy.main()")
"""The other way to activate the plugin."""


def _end(output: str) -> str:
    """What was printed last, without whole configurations in one line."""
    return "\n".join(line[:400] for line in output.splitlines()[-40:])


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.fixture(scope="session")
def checkout() -> Checkout:
    """The checkout, or a skip."""
    home = os.environ.get(HOME)
    if home is None:
        pytest.skip(f"set {HOME} to a GPT-NeoX checkout, see benchmarks/neox.md")
    return Checkout(Path(home).resolve(), os.environ.get(PYTHON, sys.executable))
