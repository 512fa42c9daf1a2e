"""The fine-tuning of `megatron-coca stretch --finetune N`: a first trial of position interpolation or CoCA."""

import json
import shlex
import shutil
from argparse import Namespace
from hashlib import sha256
from pathlib import Path

from megatron_coca.evaluation.results import EvaluationError, write_atomically
from megatron_coca.evaluation.stretch.choices import PLAIN
from megatron_coca.evaluation.stretch.records import read_plain, result_file
from megatron_coca.work.processes import PROGRAM, run_to_its_end

MOST_LENGTH = 2048
"""Length of the training samples, unless the model was trained on shorter ones."""


def position_keys(method: str, to: float, length: int) -> list[str]:
    """Return the config keys of the new position method for a model trained at `length` tokens."""
    original = f"rope_scaling.original_max_position_embeddings={length}"
    return {
        "pi": ["rope_scaling.rope_type=linear", f"rope_scaling.factor={to:g}", original],
        "coca": ["pos_emb=coca"],
    }[method]


def check(args: Namespace) -> None:
    """Raise EvaluationError if `--finetune` cannot train this model.

    Only models that transformers could load are supported, because `megatron-coca train` reads their shape from the
    folder.
    """
    from megatron_coca.checkpoints import open_checkpoint

    if not args.data:
        raise EvaluationError("--finetune: needs texts to train on; name them with --data")
    opened = open_checkpoint(args.model, verify=False)
    if opened.settings is None:
        raise EvaluationError(
            "--finetune: needs a Hugging Face folder or a GGUF file; for a run, use megatron-coca train"
        )
    if opened.tokenizer().tokenizer is None:
        raise EvaluationError(
            f"{args.model}: has no tokenizer, which the texts need; put tokenizer.json into the folder"
        )


def trained_folder(args: Namespace) -> Path:
    return Path(args.output) / f"finetuned_{args.finetune_method}"


def is_outdated(page: Path, steps: int) -> bool:
    """Return True if the results beside the page belong to another number of steps."""
    return result_file(page, PLAIN).exists() and read_plain(page).checkpoint.step != steps


def _claim(args: Namespace, folder: Path, trial: dict[str, object]) -> None:
    """Write the model, data and keys of the trial beside its folder. A longer trial of the same ones can continue it.

    Raises EvaluationError if the folder has another trial or more steps, unless it may be overwritten.
    """
    from megatron_coca.checkpoints import open_checkpoint

    record, content = folder.with_suffix(".json"), json.dumps(trial, indent=1)
    if folder.exists():
        if not record.is_file():
            raise EvaluationError(f"{folder}: is not a trial of {record.name}; remove it, or name another --output")
        problem = ""
        if record.read_text(encoding="utf-8") != content:
            problem = "contains a trial of another model, other --data or another --to"
        elif (folder / "latest").is_file() and (open_checkpoint(folder, verify=False).step or 0) > args.finetune:
            problem = f"has more than {args.finetune} steps"
        if problem and not args.overwrite:
            raise EvaluationError(f"{folder}: {problem}; name another --output, or replace it with --overwrite")
        if problem:
            shutil.rmtree(folder)
    write_atomically(record, content.encode())


def finetune(args: Namespace) -> int:
    """Prepare `--data`, train `--finetune` steps from the model, and return the exit status of the training.

    Raises InputError.
    """
    from megatron_coca.checkpoints import open_checkpoint
    from megatron_coca.data import CorpusSource, SourceSpec, prepare

    opened = open_checkpoint(args.model)
    tokenizer = opened.tokenizer().tokenizer
    assert tokenizer is not None, "checked before"
    texts = [Path(path) for path in args.data]
    measured = read_plain(args.output)
    prepared = args.output / f"finetune_data_{digest_of(texts, measured.tokenizer)}"
    keys = position_keys(args.finetune_method, args.to, opened.trained.model.seq_length)
    folder = trained_folder(args)
    _claim(args, folder, {"model": measured.checkpoint.identity, "data": prepared.name, "keys": keys})
    if not (prepared / "data.yml").is_file():
        prepare([CorpusSource(SourceSpec("texts", texts), split="train")], prepared, tokenizer)
    keys += [
        f"seq_length={min(opened.trained.model.seq_length, MOST_LENGTH)}",
        f"train_iters={args.finetune}",
        f"checkpoint_factor={args.finetune}",
        "train_micro_batch_size_per_gpu=1",
        "optimizer.params.lr=2e-5",
        "lr_decay_style=constant",
        "eval_iters=0",
        f"save={folder}",
    ]
    command = ["train", args.model, str(prepared / "data.yml"), *keys, "--auto-resume"]
    print(f"\n$ {shlex.join(['megatron-coca', *command])}", flush=True)
    return run_to_its_end([*PROGRAM, *command])


def digest_of(texts: list[Path], tokenizer: str | None) -> str:
    """Return a name for the prepared data, which differs for other or changed files and for another tokenizer."""
    files = [file for path in texts for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    stats = [(file, file.stat()) for file in files]
    named = [str(tokenizer), *(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)]
    return sha256("\n".join(named).encode()).hexdigest()[:8]
