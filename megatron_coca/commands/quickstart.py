"""Run the whole workflow on a laptop.

Train four position methods on key-value recall, and evaluate them far beyond the training length. Then train one on
text, kill and resume it, and measure its perplexity.

    megatron-coca quickstart
    megatron-coca quickstart train_iters=1000 # any configuration key, for all runs

Every step is an ordinary command of this project, printed before it runs. Models in runs/quickstart are reused.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_coca.commands import command_parser
from megatron_coca.commands.configs import shipped
from megatron_coca.evaluation.options import slug
from megatron_coca.support.processes import PROGRAM, exit_status

# PyTorch takes seconds to import, so it is imported after the options are read.

RUNS = Path("runs/quickstart")
RECALL = {"rotary": "RoFormer", "coca": "CoCA-Slack", "coca_strict": "CoCA-Strict", "alibi": "ALiBi"}
"""Labels of the methods that are trained on key-value recall, by `pos_emb`."""
RECALL_KEYS = ("train_iters=400", "warmup=0.125", "checkpoint_factor=400")
DYNAMIC_NTK = ("rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")
REPAIRS = {" + dynamic NTK": DYNAMIC_NTK, " + ReRoPE, log n": ("relative_positions.type=rerope", "logit_scaling=log_n")}
TEXT, TEXT_LABEL = "roformer_coca", "RoFormer + CoCA"
"""Name and label of the run on text, which is killed midway."""
WINDOWS, STRIDE = "64,128,256,512,1024", "64"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow and return 0. Raises ConfigError, EvaluationError, and SystemExit if a command fails."""
    parser = command_parser("quickstart", __doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="overrides for all configurations")
    keys = parser.parse_args(arguments).keys
    from megatron_coca.evaluation import build_report

    start = time.perf_counter()
    recalled = recall(keys)
    train(TEXT, keys)
    table = build_report([*recalled, *evaluate(TEXT)], RUNS, "Quickstart: beyond the training length of 64")
    seconds = time.perf_counter() - start
    print(f"\n{table}\n\nWrote {RUNS}/report.html and report.md, with figures and tables; {seconds:.0f} s in total.")
    return 0


def recall(keys: Sequence[str]) -> list[Path]:
    """Train every method in RECALL on the recall task, and evaluate each without and with extensions.

    Returns the result files.
    """
    from megatron_coca.checkpoints import native
    from megatron_coca.config import load_config

    file, settings = shipped("recall/model.yml"), [*RECALL_KEYS, *keys]
    last = load_config([file], settings).schedule.train_iters
    saves = {name: RUNS / f"recall_{name}" for name in RECALL}
    missing = [name for name, save in saves.items() if last not in native.steps(save)]
    train_recall = ["train", file, *settings, "auto_resume=true"]
    run_together([[*train_recall, f"pos_emb={name}", f"save={saves[name]}"] for name in missing])
    files, measures = [], []
    for name, label in RECALL.items():
        repairs = REPAIRS if name != "alibi" else {" + log n": ("logit_scaling=log_n",)}
        command, results = measure("recall", saves[name], label, repairs, "--cases", "192", "--shifts", "0")
        measures.append(command)
        files += results
    run_together(measures)
    return files


def train(name: str, keys: Sequence[str]) -> None:
    """Train on text to the last step. The run is killed midway and resumed from its latest checkpoint."""
    from megatron_coca.checkpoints import native
    from megatron_coca.config import load_config

    file = shipped(f"quickstart/{name}.yml")
    config = load_config([file], keys)
    save, last = Path(str(config.checkpoint.save)), config.schedule.train_iters
    assert last is not None
    if last in native.steps(save):
        print(f"# {save}: step {last} is already saved")
        return
    command = ["train", file, *keys, f"load={save}"]
    if not native.steps(save):
        kill_after_step(command, save, last // 2)
    run(command)


def kill_after_step(command: Sequence[str], save: Path, step: int) -> None:
    """Start a training run, and kill it with SIGKILL after it has reported `step`."""
    from megatron_coca.checkpoints import native

    show(command)
    process = subprocess.Popen([*PROGRAM, *command])
    while process.poll() is None and reported_step(save) < step:
        time.sleep(0.1)
    if process.poll() not in (None, 0):
        sys.exit(exit_status(process.returncode))
    process.send_signal(signal.SIGKILL)
    process.wait()
    latest = max(native.steps(save), default=0)
    print(
        f"\n# killed after step {reported_step(save)}; resuming from the latest checkpoint, step {latest}", flush=True
    )


def reported_step(save: Path) -> int:
    """Return the last step in the metrics of the run; 0 before the first report."""
    metrics = save / "metrics.jsonl"
    if not metrics.is_file():
        return 0
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def evaluate(name: str) -> list[Path]:
    """Measure perplexity with and without an extension, and return the result files."""
    extended = {" + dynamic NTK": DYNAMIC_NTK}
    command, results = measure(
        "perplexity", RUNS / name, TEXT_LABEL, extended, "--windows", WINDOWS, "--stride", STRIDE
    )
    run(command)
    return results


def measure(
    task: str, save: Path, label: str, changed: Mapping[str, Sequence[str]], *options: str
) -> tuple[list[str], list[Path]]:
    """Return a command, which evaluates a checkpoint unchanged and with each set of keys, and its result files."""
    variants = {label: (), **{f"{label}{end}": keys for end, keys in changed.items()}}
    given = (part for variant, keys in variants.items() for part in ("--variant", variant, *keys))
    command = ["evaluate", task, "--checkpoint", str(save), *options, "--output", str(RUNS), "--overwrite", *given]
    return command, [RUNS / f"{task}_{slug(variant)}.json" for variant in variants]


def run(command: Sequence[str]) -> None:
    """Print and run one command of the project. If it fails, exit with its status."""
    show(command)
    if status := subprocess.run([*PROGRAM, *command], check=False).returncode:
        sys.exit(exit_status(status))


def run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands at the same time, each with one thread. If any command fails, exit with its status."""
    for command in commands:
        show(command)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*PROGRAM, *command], env=one_thread) for command in commands]
    if status := max((exit_status(process.wait()) for process in processes), default=0):
        sys.exit(status)


def show(command: Sequence[str]) -> None:
    """Print a command as a user would type it."""
    print(f"\n$ {shlex.join(['megatron-coca', *command])}", flush=True)
