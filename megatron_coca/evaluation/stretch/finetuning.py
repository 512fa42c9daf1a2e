"""The fine-tuning of `megatron-coca stretch --finetune N`, which trains one model for each method and a control."""

import json
import shlex
import shutil
from argparse import Namespace
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from megatron_coca.config import ConfigError, ModelConfig, parts_with_weights
from megatron_coca.evaluation.report.curves import METRICS
from megatron_coca.evaluation.results import EvaluationError, write_atomically
from megatron_coca.evaluation.stretch.choices import (
    LORA,
    LORA_RATE,
    MOST_LENGTH,
    OWN_WEIGHTS,
    PLAIN,
    RATE,
    trial_keys,
)
from megatron_coca.evaluation.stretch.records import read_plain, result_file
from megatron_coca.evaluation.stretch.trials import Trial
from megatron_coca.work.processes import PROGRAM, run_to_its_end

REPORTS = 20
"""Approximate number of progress reports of the training of a trial."""
CHECKPOINTS = 8
"""Number of checkpoints that the training of a trial writes. Only the last one is kept."""


def check(args: Namespace, methods: Sequence[str]) -> None:
    """Raise EvaluationError if `--finetune` cannot train this model, or cannot use one of the methods.

    Only Hugging Face folders and GGUF files are supported, because `megatron-coca train` reads the shape of the model
    from them.
    """
    from megatron_coca.checkpoints import open_checkpoint
    from megatron_coca.checkpoints.importing import starting_config

    if not texts_of(args):
        raise EvaluationError("--finetune: needs texts to train on; name them with --finetune-data or --data")
    opened = open_checkpoint(args.model, verify=False)
    if opened.settings is None:
        raise EvaluationError(
            "--finetune: needs a Hugging Face folder or a GGUF file; for a run, use megatron-coca train"
        )
    if opened.tokenizer().tokenizer is None:
        raise EvaluationError(
            f"{args.model}: has no tokenizer, which the texts need; put tokenizer.json into the folder"
        )
    for method in methods:
        try:
            keys = keys_of(args, method, opened.trained.model)
            starting_config(args.model, [f"train_iters={args.finetune}", *keys])
        except ConfigError as error:
            raise EvaluationError(f"--finetune-method {method}: {error}") from error


def keys_of(args: Namespace, method: str, model: ModelConfig) -> list[str]:
    """Return the config overrides of a trial that starts from a model. Raises ConfigError.

    With `--lora`, only adapters, norms and the weights that the method adds are trained. Without it, the routers of a
    mixture of experts are frozen, unless `--finetune-set` sets `trainable` or `lora`. The new positions change the
    outputs of attention, and routers that train on these outputs would send tokens to other experts.
    """
    from megatron_coca.checkpoints.importing import starting_config

    length, latent = model.seq_length, model.kv_lora_rank is not None
    common = [f"seq_length={args.finetune_length or min(length, MOST_LENGTH)}"]
    common.append(f"optimizer.params.lr={LORA_RATE if args.lora else RATE}")
    given = [*common, *trial_keys(method, args.to, length, None, latent), *args.finetune_set]
    config = starting_config(args.model, [f"train_iters={args.finetune}", *given])
    parts, lora, more = parts_with_weights(config), None, list[str]()
    if args.lora:
        trained = ("norms", "positions") if method in OWN_WEIGHTS else ("norms",)
        lora = LORA.format(also=", ".join(part for part in trained if part in parts))
    elif "router" in parts and config.optimizer.trainable is None and config.optimizer.lora is None:
        more = [f"trainable=[{', '.join(part for part in parts if part != 'router')}]"]
    return [*common, *trial_keys(method, args.to, length, lora, latent), *more, *args.finetune_set]


def texts_of(args: Namespace) -> list[Path]:
    """Return the paths of the training texts: the value of `--finetune-data`, or else the value of `--data`."""
    return [Path(path) for path in args.finetune_data or args.data or ()]


def trained_folder(output: Path, method: str) -> Path:
    return output / f"finetuned_{method}"


def is_outdated(page: Path, steps: int) -> bool:
    """Return True if the folder `page` has results of a model that was trained for another number of steps."""
    return result_file(page, PLAIN).exists() and read_plain(page).checkpoint.step != steps


def _claim(args: Namespace, folder: Path, trial: dict[str, object]) -> None:
    """Write `trial`, which has the model, data and keys of a trial, into a file beside the folder.

    A later trial with the same model, data and keys can resume this one with more steps. Raises EvaluationError if the
    folder has a different trial or more steps. With `--overwrite`, such a folder is removed instead.
    """
    from megatron_coca.checkpoints import open_checkpoint

    record, content = folder.with_suffix(".json"), json.dumps(trial, indent=1)
    if folder.exists():
        if not record.is_file():
            raise EvaluationError(f"{folder}: is not a trial of {record.name}; remove it, or name another --output")
        problem = ""
        if record.read_text(encoding="utf-8") != content:
            problem = "contains a trial of another model, of other texts, with another --to or other keys"
        elif (folder / "latest").is_file() and (open_checkpoint(folder, verify=False).step or 0) > args.finetune:
            problem = f"has more than {args.finetune} steps"
        if problem and not args.overwrite:
            raise EvaluationError(f"{folder}: {problem}; name another --output, or replace it with --overwrite")
        if problem:
            shutil.rmtree(folder)
    write_atomically(record, content.encode())


def finetune(args: Namespace, method: str) -> int:
    """Prepare the texts, train the model for `--finetune` steps, and return the exit status of the training.

    All methods are trained on the same tokens at the same learning rate.

    Raises InputError.
    """
    from megatron_coca.checkpoints import open_checkpoint
    from megatron_coca.data import CorpusSource, SourceSpec, prepare

    opened = open_checkpoint(args.model)
    tokenizer = opened.tokenizer().tokenizer
    assert tokenizer is not None, "checked before"
    texts = texts_of(args)
    measured = read_plain(args.output)
    prepared = args.output / f"finetune_data_{digest_of(texts, measured.tokenizer)}"
    keys = keys_of(args, method, opened.trained.model)
    folder = trained_folder(args.output, method)
    _claim(args, folder, {"model": measured.checkpoint.identity, "data": prepared.name, "keys": keys})
    if not (prepared / "data.yml").is_file():
        prepare([CorpusSource(SourceSpec("texts", texts), split="train")], prepared, tokenizer)
    keys = [
        f"train_iters={args.finetune}",
        f"checkpoint_factor={-(-args.finetune // CHECKPOINTS)}",
        "keep_last_n_checkpoints=1",
        "train_micro_batch_size_per_gpu=1",
        "lr_decay_style=constant",
        "eval_iters=0",
        f"log_interval={max(1, args.finetune // REPORTS)}",
        f"save={folder}",
        *keys,
    ]
    command = ["train", args.model, str(prepared / "data.yml"), *keys, "--auto-resume"]
    print(f"\n$ {shlex.join(['megatron-coca', *command])}", flush=True)
    return run_to_its_end([*PROGRAM, *command])


def read_trial(output: Path, method: str, page: Path) -> Trial:
    """Return a trained trial. Its tokens, time and memory are from the metrics file of its training."""
    from megatron_coca.checkpoints import open_checkpoint

    folder = trained_folder(output, method)
    opened, steps, seconds, tokens = open_checkpoint(folder, verify=False), 0, 0.0, 0.0
    memory = None
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        report = json.loads(line)
        if "step_seconds" not in report:
            continue
        since, steps = report["step"] - steps, report["step"]
        seconds += since * report["step_seconds"]
        tokens += since * report["step_seconds"] * report["tokens_per_second"]
        memory = report.get("peak_memory_gib", memory)
    done = opened.step or steps
    share = done / steps if steps else 0.0  # metrics of the last steps can be missing
    return Trial(method, folder, page, opened.trained, done, round(tokens * share), seconds * share, memory)


def digest_of(texts: list[Path], tokenizer: str | None) -> str:
    """Return a digest of the tokenizer and of each file's path, size and change time, as a name for the data."""
    files = [file for path in texts for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    stats = [(file, file.stat()) for file in files]
    named = [str(tokenizer), *(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)]
    return sha256("\n".join(named).encode()).hexdigest()[:8]
