"""Run the whole workflow on a laptop.

Train four position methods on key-value recall, and evaluate them far beyond the training length. Then train one on
text, kill and resume it, and measure its perplexity.

    megatron-coca quickstart
    megatron-coca quickstart train_iters=1000 # any configuration key, for all runs

Every step is an ordinary command of this project, printed before it runs. Models in runs/quickstart are reused.
On a slow or busy machine the run on text and the evaluations are shortened, so that the whole takes about five minutes.
"""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_coca.commands import command_parser
from megatron_coca.commands.configs import shipped
from megatron_coca.evaluation.labels import slug
from megatron_coca.work import processes
from megatron_coca.work.processes import PROGRAM, run_to_its_end
from megatron_coca.work.statuses import exit_status

# PyTorch takes seconds to import, so it is imported after the options are read.

RUNS = Path("runs/quickstart")
RECALL = {"rotary": "RoFormer", "coca": "CoCA-Slack", "coca_strict": "CoCA-Strict", "alibi": "ALiBi"}
"""Labels of the methods that are trained on key-value recall, by `pos_emb`."""
RECALL_KEYS = ("train_iters=400", "warmup=0.125", "checkpoint_factor=400")
DYNAMIC_NTK = ("rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")
REPAIRS = {" + dynamic NTK": DYNAMIC_NTK, " + ReRoPE, log n": ("relative_positions.type=rerope", "logit_scaling=log_n")}
TEXT, TEXT_LABEL = "roformer_coca", "RoFormer + CoCA"
"""Name and label of the run on text, which is killed midway."""
TITLE = "Quickstart: beyond the training length of 64, with facts among random tokens (README's figure: facts in books)"
"""The figure in README has another task and longer training, so methods may rank differently there."""
WINDOWS, STRIDE = "64,128,256,512,1024", "64"
CASES, STEPS, DOCUMENTS = 192, 300, 58
"""If nothing is shortened: the number of questions for each length, the number of steps of the run on text, and the
number of documents for its perplexity.
"""
GOAL, AFTER, LEAST = 300.0, 2.5, 0.1
"""GOAL is the number of seconds that the whole should take. AFTER is the time of all work after the training on recall,
as a multiple of the time of that training. LEAST is the smallest share of this later work that is worth running.
"""
BUSY, AFTER_BUSY = 0.85, 4.5
"""The cores are busy if the training on recall got less than the share BUSY of them. The later work then takes longer,
AFTER_BUSY times as long as that training, because its threads wait for each other.
"""
PASSIVE = ("OMP_WAIT_POLICY", "passive")
"""Environment variable of the later work on busy cores: otherwise, threads spin while they wait (docs/speed.md)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow and return 0. Raises ConfigError, EvaluationError, and SystemExit if a command fails."""
    parser = command_parser("quickstart", __doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="overrides for all configurations")
    keys = parser.parse_args(arguments).keys
    from megatron_coca.evaluation import build_report

    start = time.perf_counter()
    recalled, share = recall(keys)
    train(TEXT, keys, share)
    table = build_report([*recalled, *evaluate(TEXT, share)], RUNS, TITLE)
    seconds = time.perf_counter() - start
    print(f"\n{table}\n\nWrote {RUNS}/report.html and report.md, with figures and tables; {seconds:.0f} s in total.")
    return 0


def share_of_rest(training: float, busy: bool = False) -> float:
    """Return the share of the remaining work that fits into GOAL. Training on recall has taken `training` seconds."""
    rest = (AFTER_BUSY if busy else AFTER) * training
    return min(1.0, max(LEAST, (GOAL - training) / rest)) if training > 0 else 1.0


def used_since(began: os.times_result) -> tuple[float, float]:
    """Return the seconds since `began`, and the cores that child processes which ended since then have used."""
    now = os.times()
    seconds = now.elapsed - began.elapsed
    used = now.children_user + now.children_system - began.children_user - began.children_system
    return seconds, used / max(seconds, 1e-9)


def recall(keys: Sequence[str]) -> tuple[list[Path], float]:
    """Train every method in RECALL on the recall task, and evaluate each without and with extensions.

    Returns the result files, and the share of the work after this function that the machine can do within GOAL.
    """
    from megatron_coca.checkpoints import native
    from megatron_coca.config import load_config

    file, settings = shipped("recall/model.yml"), [*RECALL_KEYS, *keys]
    last = load_config([file], settings).schedule.train_iters
    saves = {name: RUNS / f"recall_{name}" for name in RECALL}
    missing = [name for name, save in saves.items() if last not in native.steps(save)]
    train_recall = ["train", file, *settings, "auto_resume=true"]
    began = os.times()
    run_together([[*train_recall, f"pos_emb={name}", f"save={saves[name]}"] for name in missing])
    training, cores = used_since(began)
    busy = cores < BUSY * min(len(missing), len(os.sched_getaffinity(0)))
    share = share_of_rest(training * len(RECALL) / len(missing), busy) if missing else 1.0
    if share < 1:
        print(f"\n# Training took {training:.0f} s. The rest is shortened to {share:.0%} of its work.", flush=True)
    if missing and busy and PASSIVE[0] not in os.environ:
        os.environ[PASSIVE[0]] = PASSIVE[1]  # of all later commands
        print(f"# Training got {cores:.1f} cores. Other commands run with {'='.join(PASSIVE)}.", flush=True)
    cases = str(max(48, round(CASES * share)))
    files, measures = [], []
    for name, label in RECALL.items():
        repairs = REPAIRS if name != "alibi" else {" + log n": ("logit_scaling=log_n",)}
        command, results = measure("recall", saves[name], label, repairs, "--cases", cases, "--shifts", "0")
        measures.append(command)
        files += results
    run_together(measures)
    return files, share


def train(name: str, keys: Sequence[str], share: float = 1.0) -> None:
    """Train on text for a share of the usual steps. The run is killed midway and resumed from its latest checkpoint. A
    run that an earlier command began keeps its number of steps.
    """
    from megatron_coca.checkpoints import native, open_checkpoint
    from megatron_coca.config import load_config

    file = shipped(f"quickstart/{name}.yml")
    save = Path(str(load_config([file], keys).checkpoint.save))
    steps: int | None = max(30, 30 * round(STEPS * share / 30))
    if native.steps(save):
        steps = open_checkpoint(str(save)).trained.schedule.train_iters
    if steps != STEPS:
        assert steps is not None
        keys = [f"train_iters={steps}", f"checkpoint_factor={steps // 3}", f"eval_interval={steps // 2}", *keys]
    last = load_config([file], keys).schedule.train_iters
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
    process = processes.start([*PROGRAM, *command])
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
    lines = [line for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def evaluate(name: str, share: float = 1.0) -> list[Path]:
    """Measure perplexity with and without an extension on a share of the documents, and return the result files."""
    extended = {" + dynamic NTK": DYNAMIC_NTK}
    fewer = ("--num-documents", str(max(4, round(DOCUMENTS * share)))) if share < 1 else ()
    command, results = measure(
        "perplexity", RUNS / name, TEXT_LABEL, extended, "--windows", WINDOWS, "--stride", STRIDE, *fewer
    )
    run(command)
    return results


def measure(
    task: str, save: Path, label: str, changed: Mapping[str, Sequence[str]], *options: str
) -> tuple[list[str], list[Path]]:
    """Return the command that evaluates a checkpoint unchanged and with each set of keys, and its result files."""
    variants = {label: (), **{f"{label}{end}": keys for end, keys in changed.items()}}
    given = (part for variant, keys in variants.items() for part in ("--variant", variant, *keys))
    command = ["evaluate", task, "--checkpoint", str(save), *options, "--output", str(RUNS), "--overwrite", *given]
    return command, [RUNS / f"{task}_{slug(variant)}.json" for variant in variants]


def run(command: Sequence[str]) -> None:
    """Print and run one command of the project. If it fails, exit with its status."""
    show(command)
    if status := run_to_its_end([*PROGRAM, *command]):
        sys.exit(status)


def run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands at the same time, each with one thread. If any command fails, exit with its status."""
    for command in commands:
        show(command)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    if status := max(processes.run_together([[*PROGRAM, *command] for command in commands], one_thread), default=0):
        sys.exit(status)


def show(command: Sequence[str]) -> None:
    """Print a command as a user would type it."""
    print(f"\n$ {shlex.join(['megatron-coca', *command])}", flush=True)
