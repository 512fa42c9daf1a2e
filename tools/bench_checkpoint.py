"""What a checkpoint costs the training: stretches of steps with a save at their beginning, and without, in turns.

    python tools/bench_checkpoint.py configs/350M/roformer_coca.yml configs/cluster/cpu.yml num_layers=6 hidden_size=256

Saved is as training saves (`async_save` true), and with the loop waiting for it (false). Lost is the time of a
stretch beyond that of one without a save in the same round, so work of the background thread that takes processor time
from the steps counts; the share is of a run that saves once every --interval seconds. One JSON line per way of saving
is appended to --output.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import Config, load_config  # noqa: E402
from megatron_coca.model import assemble_model, keep_freed_memory  # noqa: E402
from megatron_coca.training import launch  # noqa: E402
from megatron_coca.training.corpus import Corpus, open_corpus, open_loader  # noqa: E402
from megatron_coca.training.engine import build_engine  # noqa: E402
from megatron_coca.training.engine import group as dist  # noqa: E402
from megatron_coca.training.optimizer import build_optimizer  # noqa: E402
from megatron_coca.training.saving import Checkpoints  # noqa: E402
from megatron_coca.training.topology import Topology  # noqa: E402
from tools.records import append_records, environment  # noqa: E402

WAYS = {"in the background": True, "waiting": False}


def main() -> None:
    """Parse, measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a stretch; a save should end within it")
    parser.add_argument("--interval", type=float, default=600.0, help="seconds between checkpoints of the imagined run")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/checkpoint.jsonl"))
    options = parser.parse_intermixed_args()
    config = load_config(
        [text for text in options.inputs if "=" not in text], [text for text in options.inputs if "=" in text]
    )
    if not torch.cuda.is_available():
        keep_freed_memory()
    launch.complete_environment(os.environ)  # type: ignore[arg-type]
    dist.init_distributed()
    with tempfile.TemporaryDirectory(prefix="checkpoints") as folder:
        bench = Bench(config.override({"save": folder, "keep_last_n_checkpoints": 1}), options.seconds)
        losses = bench.measure(options.rounds)
        append_records(options.output, [bench.record(way, lost, options.interval) for way, lost in losses.items()])
    dist.shut_down()


class Bench:
    """A run in this process, and how long stretches of it take."""

    def __init__(self, config: Config, seconds: float) -> None:
        self._corpus = open_corpus(config)
        config = self._corpus.config
        topology = Topology.of(config.parallel, dist.world_size())
        sizes = config.batch.resolve(topology.data)
        self._topology, self._batch = topology, sizes.total
        model = assemble_model(config, dist.local_device()).train()

        def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
            return build_optimizer(module, config.optimizer)

        self._engine = build_engine(model, optimizer, config, sizes, 0)
        layout = (sizes.total, sizes.micro, topology.coordinates(dist.rank()).data, topology.data)
        self._loader = open_loader(self._corpus, self._corpus.train, layout)
        self._step = 0
        self._steps(3)
        begun = time.perf_counter()
        self._steps(3)
        self.step_seconds = (time.perf_counter() - begun) / 3
        self._count = max(1, round(seconds / self.step_seconds))
        self.blocked: dict[str, list[float]] = {way: [] for way in WAYS}

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Seconds lost in each round by way of saving; the first round is not counted."""
        ways = {way: self._checkpoints(self._corpus, in_background) for way, in_background in WAYS.items()}
        losses: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            plain = self._stretch(lambda: None)
            for way, checkpoints in ways.items():
                taken = self._stretch(lambda way=way, each=checkpoints: self._save(way, each))  # type: ignore[misc]
                checkpoints.wait()
                if turn:
                    losses[way].append(taken - plain)
        self.blocked = {way: values[1:] for way, values in self.blocked.items()}
        return losses

    def record(self, way: str, losses: list[float], interval: float) -> dict[str, object]:
        """One line of the result."""
        lost, blocked = statistics.median(losses), statistics.median(self.blocked[way])
        held = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self._engine.pieces())
        print(
            f"{way:18} {held / 1e6:,.0f} MB of state: {lost:.3f} s lost, {blocked:.3f} s of them the loop waited; "
            f"{lost / interval:.3%} of a run that saves every {interval:.0f} s (a step takes {self.step_seconds:.3f} s)"
        )
        return {
            "benchmark": "checkpoint",
            "way": way,
            "state_bytes": held,
            "seconds_lost": lost,
            "seconds_lost_rounds": losses,
            "seconds_blocked": blocked,
            "step_seconds": self.step_seconds,
            "steps_per_stretch": self._count,
            "interval_seconds": interval,
            "share": lost / interval,
            **environment(ROOT),
        }

    def _checkpoints(self, corpus: Corpus, in_background: bool) -> Checkpoints:
        keys = {"async_save": in_background, "save": f"{corpus.config.checkpoint.save}/{in_background}"}
        Path(keys["save"]).mkdir()  # type: ignore[arg-type]
        changed = Corpus(corpus.config.override(keys), corpus.train, corpus.valid, corpus.tokenizer)
        return Checkpoints(changed, self._engine, self._topology, {"batch": self._batch})

    def _save(self, way: str, checkpoints: Checkpoints) -> None:
        begun = time.perf_counter()
        checkpoints.save(self._step, {})
        self.blocked[way].append(time.perf_counter() - begun)

    def _stretch(self, before: Callable[[], None]) -> float:
        begun = time.perf_counter()
        before()
        self._steps(self._count)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._engine.train_step(self._loader.micro_batches(self._step), 1e-5)
            self._step += 1


if __name__ == "__main__":
    main()
