"""Training time that a checkpoint costs: intervals of steps that begin with a save, against intervals without one.

    python tools/bench_checkpoint.py configs/350M/roformer_coca.yml configs/cluster/cpu.yml num_layers=6 hidden_size=256

Saves in the background (`async_save` true) and while the loop waits (false), alternating. The loss is the time of an
interval beyond that of the interval without a save in the same round, so CPU time that the background thread takes from
the steps counts; the share is of a run that saves once every --interval seconds. Appends one JSON line per way of
saving to --output.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import Config
from megatron_coca.model import assemble_model, keep_freed_memory
from megatron_coca.training import launch
from megatron_coca.training.corpus import Corpus, open_corpus, open_loader
from megatron_coca.training.engine import build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.optimizer import build_optimizer
from megatron_coca.training.saving import Checkpoints
from megatron_coca.training.topology import Topology
from tools.records import append_records, benchmark_parser, load_inputs

WAYS = {"in the background": True, "waiting": False}
"""Values of `async_save`."""


def main() -> None:
    """Measure every way of saving, print and append the results."""
    parser = benchmark_parser(__doc__, "checkpoint.jsonl", rounds=5, inputs=True)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="length of an interval, long enough for a save to finish"
    )
    parser.add_argument("--interval", type=float, default=600.0, help="seconds between checkpoints of the assumed run")
    options = parser.parse_intermixed_args()
    config = load_inputs(options.inputs)
    if not torch.cuda.is_available():
        keep_freed_memory()
    launch.complete_environment(os.environ)
    dist.init_distributed()
    with tempfile.TemporaryDirectory(prefix="checkpoints") as folder:
        run = BenchmarkRun(config.override({"save": folder, "keep_last_n_checkpoints": 1}), options.seconds)
        append_records(options.output, run.measure(options.rounds, options.interval))
    dist.shut_down()


class BenchmarkRun:
    """A training run in this process that saves in each of the compared ways."""

    def __init__(self, config: Config, seconds: float) -> None:
        corpus = open_corpus(config)
        config = corpus.config
        topology = Topology.of(config.parallel, dist.world_size())
        sizes = config.batch.resolve(topology.data)
        model = assemble_model(config, dist.local_device()).train()
        self._engine = build_engine(model, lambda module: build_optimizer(module, config.optimizer), config, sizes, 0)
        layout = (sizes.total, sizes.micro, topology.coordinates(dist.rank()).data, topology.data)
        self._loader = open_loader(corpus, corpus.train, layout)
        self._checkpoints: dict[str, Checkpoints] = {}
        for way, in_background in WAYS.items():
            save = f"{config.checkpoint.save}/{in_background}"
            Path(save).mkdir()
            changed = config.override({"async_save": in_background, "save": save})
            corpus_of_way = Corpus(changed, corpus.train, corpus.valid, corpus.tokenizer)
            self._checkpoints[way] = Checkpoints(corpus_of_way, self._engine, topology, {"batch": sizes.total})
        self._step = 0
        self._interval(3)
        self._step_seconds = self._interval(3)[0] / 3
        self._count = max(1, round(seconds / self._step_seconds))

    def measure(self, rounds: int, interval: float) -> list[dict[str, object]]:
        """Return one record per way of saving; a first round is not counted."""
        lost: dict[str, list[float]] = {way: [] for way in WAYS}
        blocked: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            plain, _ = self._interval(self._count)
            for way, checkpoints in self._checkpoints.items():
                seconds, waited = self._interval(self._count, checkpoints)
                checkpoints.wait()
                if number:
                    lost[way].append(seconds - plain)
                    blocked[way].append(waited)
        return [self._record(way, lost[way], statistics.median(blocked[way]), interval) for way in WAYS]

    def _interval(self, steps: int, save: Checkpoints | None = None) -> tuple[float, float]:
        """Save if requested and train `steps` steps; return the seconds of all, and those that the save blocked."""
        start = time.perf_counter()
        if save is not None:
            save.save(self._step, {})
        blocked = time.perf_counter() - start
        for _ in range(steps):
            self._engine.train_step(self._loader.micro_batches(self._step), 1e-5)
            self._step += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start, blocked

    def _record(self, way: str, rounds: list[float], blocked: float, interval: float) -> dict[str, object]:
        lost = statistics.median(rounds)
        size = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self._engine.pieces())
        print(
            f"{way:18} {size / 1e6:,.0f} MB of state: {lost:.3f} s lost, {blocked:.3f} s of them the loop waited; "
            f"{lost / interval:.3%} of a run that saves every {interval:.0f} s "
            f"(a step takes {self._step_seconds:.3f} s)"
        )
        return {
            "benchmark": "checkpoint",
            "way": way,
            "state_bytes": size,
            "seconds_lost": lost,
            "seconds_lost_rounds": rounds,
            "seconds_blocked": blocked,
            "step_seconds": self._step_seconds,
            "steps_per_stretch": self._count,
            "interval_seconds": interval,
            "share": lost / interval,
        }


if __name__ == "__main__":
    main()
