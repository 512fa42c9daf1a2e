"""Fixtures that several test files share: a small corpus, a small configuration, and training in separate processes."""

import atexit
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_coca.data import CorpusSource, Execution, Rules, Shard, SourceSpec, load_tokenizer, prepare
from megatron_coca.data.shards import MASKED, ShardWriter
from tests import forked, long_tests
from tests.fast_cases import fast_cases
from tests.figures import TIMINGS
from tests.forked import pytest_runtestloop  # noqa: F401  # a hook
from tests.patience import patience

ROOT = Path(__file__).parents[1]
TIME_LIMIT = patience(300)
STARTED = time.monotonic()
SLOW_RUN = 60.0
"""Seconds of tests after which a run names its slowest files."""
LAUNCHER_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "OMP_")


def pytest_addoption(parser: pytest.Parser) -> None:
    forked.pytest_addoption(parser)
    parser.addoption("--kills", type=int, default=25, help="how often the slow tests of random kills kill a run")
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes")
    parser.addoption(
        "--costs", action="store_true", help="measure the processor time of tests, for tests/long_tests.yml"
    )
    parser.addoption("--order", help="any text, such as a commit's hash, that decides on the order of the files")


def pytest_configure(config: pytest.Config) -> None:
    """Run Triton's kernels in its interpreter, on the CPU, unless `-m gpu` asks for the tests that need a GPU; give
    each test more time on a slow machine; and do not wait for the disk.
    """
    if config.option.timeout is None:
        config.option.timeout = patience(float(config.getini("timeout")))
    # No test can see whether a file reached the disk, and a process of tests asks for it tens of thousands of times.
    os.fsync = lambda file: os.fstat(file if isinstance(file, int) else file.fileno())
    if config.option.markexpr != "gpu" or not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage neither during the collection nor later among what it made: all modules, and ten thousand tests.

    The collection takes 14 CPU seconds instead of 18 in every process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise libraries report at the end what was not freed


LONGEST = (
    "test_kernel_budgets.py",
    "test_interruptions.py",
    "test_examples.py",
    "test_ablation_tiny.py",
    "test_flex.py",
    "test_model_parallel.py",
    "test_resume.py",
    "test_wheel.py",
    "test_ablation_runs.py",
)
"""Files that take minutes with their slow tests: they begin first, so that none runs alone at the end."""


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases that tests/fast_cases.py leaves out of tests in tests/parity and tests marked `fewest`,
    and those that tests/long_tests.yml leaves out.
    """
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        chosen = "parity" in item.path.parts or item.get_closest_marker("fewest") is not None
        if not chosen or item.get_closest_marker("slow") is not None:
            continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[f"{item.path.name}::{item.originalname}"].append(item)
    for cases in tests.values():
        pairs = [mark.args for mark in cases[0].iter_markers("pairs")]
        for number in {*range(len(cases))}.difference(fast_cases([case.callspec.params for case in cases], pairs)):
            cases[number].add_marker(pytest.mark.slow)
    if items and not items[0].config.getoption("--costs"):
        leave_out_long_cases(items)
    if order := items[0].config.getoption("--order") if items else None:
        items.sort(key=lambda item: hashlib.sha256(f"{order} {item.path.name}".encode()).digest())
    else:
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def leave_out_long_cases(items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases of long tests that the fast suite does not run."""
    long, cases = long_tests.read(), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        marked = item.get_closest_marker("slow") or item.get_closest_marker("always")
        if (test := item.nodeid.partition("[")[0]) in long and marked is None:
            cases[test].append(item)
    for test, found in cases.items():
        parameters = [item.callspec.params if hasattr(item, "callspec") else {} for item in found]
        for number in {*range(len(found))} - long_tests.telling(parameters, long[test]):
            found[number].add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """With `--costs`, report the processor time of the test itself."""
    if not item.config.getoption("--costs"):
        return (yield)
    began = long_tests.processor_time()
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor time", long_tests.processor_time() - began))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test after `--minutes`."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip("the minutes are over")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After a long run, name the files that took the longest: the next place to save time. With `--costs`, write
    tests/long_tests.yml.
    """
    seconds: dict[str, float] = defaultdict(float)
    costs: dict[str, list[float]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
                if report.when == "call" and "always" not in report.keywords:
                    measured = (value for name, value in report.user_properties if name == "processor time")
                    costs[report.nodeid.partition("[")[0]] += [float(str(value)) for value in measured]
    if terminalreporter.config.getoption("--costs"):
        long_tests.write(costs)
    if (total := sum(seconds.values())) > SLOW_RUN:
        slowest = sorted(seconds, key=lambda name: -seconds[name])[:10]
        terminalreporter.write_line(f"slowest files of {total:.0f} s of tests:")
        for name in slowest:
            terminalreporter.write_line(f"{seconds[name]:7.1f} s  {name}")


VOCABULARY = "the sea was calm and a small boat lay near its shore until morning came over hills"

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 32,
    "vocab_size": 512,
    "no_weight_tying": True,
    "pos_emb": "coca",
    "rotary_pct": 0.5,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "optimizer.params.lr": 3e-3,
    "lr_decay_style": "cosine",
    "warmup": 0.2,
    "train_iters": 12,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 4,
    "tokenizer_type": "CharLevelTokenizer",
    "log_interval": 1,
    "eval_interval": 6,
    "eval_iters": 1,
    "seed": 7,
    "distributed_backend": "gloo",
}
"""A model of 60 thousand parameters with dropout, trained for twelve steps with two micro batches each."""


@dataclass(frozen=True)
class Finished:
    """A process that ended: its exit status and all that it printed."""

    status: int
    output: str


class Run:
    """The folder of one training run, and what lies in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def records(self) -> list[dict[str, Any]]:
        """The reports in metrics.jsonl without what no two runs share: the timings and notes."""
        reports = [line for line in self._lines if "event" not in line]
        return [{name: value for name, value in line.items() if name not in TIMINGS} for line in reports]

    @property
    def events(self) -> list[str]:
        """The notes in metrics.jsonl."""
        return [line["event"] for line in self._lines if "event" in line]

    @property
    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        """The training loss of every step."""
        return [record["loss"] for record in self.records if "loss" in record]

    def weights(self, step: int) -> bytes:
        """The bytes of the weights file of `step`."""
        return (self.folder / f"global_step{step}" / "model.safetensors").read_bytes()

    def state(self, step: int) -> dict[str, Any]:
        """Every number in the engine's and the random state of `step`, by file and place."""
        folder = self.folder / f"global_step{step}"
        found = dict(_leaves({"counters": json.loads((folder / "meta.json").read_text())["counters"]}))
        readers = {"state": load_file, "rng": partial(torch.load, weights_only=True)}
        for name, read in readers.items():
            for path in sorted((folder / name).iterdir()):
                found |= {f"{path.relative_to(folder)}{place}": value for place, value in _leaves(read(path))}
        return found


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        children: Any = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    else:
        if isinstance(value, torch.Tensor | int | float | str | bool | None):
            yield place, value
        return
    for name, child in children:
        yield from _leaves(child, f"{place}/{name}")


def _assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys() and any("exp_avg" in place for place in one), (
        "the optimizer's moments are compared"
    )
    for place, value in one.items():
        same = torch.equal(value, other[place]) if isinstance(value, torch.Tensor) else value == other[place]
        assert same, f"{place}: {value} and {other[place]}"


@pytest.fixture(scope="session")
def assert_same_state() -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Compare two results of `Run.state` bit by bit."""
    return _assert_same_state


def make_corpus(folder: Path) -> Path:
    """Prepare 60 documents in a byte tokenizer below `folder`; returns the folder of the shards."""
    generator = random.Random(0)
    texts = (" ".join(generator.choices(VOCABULARY.split(), k=40)) for _ in range(60))
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = CorpusSource(SourceSpec("words", [folder / "words.jsonl"]))
    rules = Rules(valid_fraction=0, test_fraction=0.2)
    prepare([source], folder / "shards", load_tokenizer("CharLevelTokenizer"), rules, Execution(progress=False))
    return folder / "shards"


def make_labels(shard: Path, folder: Path) -> str:
    """Write labels for a shard of `make_corpus`: every token of each seventh document counts, one of the next document,
    none of the others. Returns their prefix.
    """
    given, prefix = Shard(shard), folder / f"{shard.name}_labels"
    writer = ShardWriter(prefix, 512, labels=True)
    for number in range(given.documents):
        document = given.document(number)
        counted = np.arange(len(document)) == 150 if number % 7 == 1 else np.full(len(document), number % 7 == 0)
        writer.add(np.where(counted, document, MASKED))
    writer.finish()
    return str(prefix)


def small_keys(corpus: Path) -> dict[str, Any]:
    """Keys of a small run on the shards of `make_corpus`, without `save`."""
    shards = {"train": "words_train", "valid": "words_test", "test": "words_test"}
    return SMALL | {f"{split}_data_paths": [str(corpus / name)] for split, name in shards.items()}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of 60 documents in a byte tokenizer: its folder, with shards `words_train` and `words_test`."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def small(corpus: Path) -> dict[str, Any]:
    """Keys of a small run on `corpus`, without `save`."""
    return small_keys(corpus)


def command_line(keys: Mapping[str, Any]) -> list[str]:
    """Keys as train.py takes them."""
    return [f"{name}={json.dumps(value)}" for name, value in keys.items()]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without any launcher's variables, one thread a process, and `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(extra or {})


Start = Callable[..., subprocess.Popen[str]]
Train = Callable[..., Finished]


@pytest.fixture(scope="session")
def start(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """start(changes, options=(), before=(), environment=None): a process of train.py on `small` with changed keys.

    `options` follow the keys on the command line; `before` stands between the interpreter and train.py. `streams` are
    other options of Popen.
    """
    file = tmp_path_factory.mktemp("config") / "small.json"
    file.write_text(json.dumps(small))

    def launch(
        changes: Mapping[str, Any],
        options: Sequence[str] = (),
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **streams: Any,
    ) -> subprocess.Popen[str]:
        command = [sys.executable, *before, str(ROOT / "train.py"), str(file), *command_line(changes), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | streams
        return subprocess.Popen(command, cwd=file.parent, env=clean_environment(environment), **pipes)

    return launch


@pytest.fixture(scope="session")
def train(start: Start) -> Train:
    """As `start`, run to its end."""

    def run(changes: Mapping[str, Any], **options: Any) -> Finished:
        process = start(changes, **options)
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Finished(process.returncode, output)

    return run


@pytest.fixture(scope="session")
def open_run() -> type[Run]:
    """Run(folder): what a training run left in its folder."""
    return Run
