"""The fine-tuning of `megatron-coca stretch --finetune N`: a first trial of position interpolation or CoCA."""

import shlex
import subprocess
from argparse import Namespace
from hashlib import sha256
from pathlib import Path

from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.support.processes import PROGRAM, exit_status

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
    prepared = args.output / f"finetune_data_{_digest(texts)}"
    if not (prepared / "data.yml").is_file():
        prepare([CorpusSource(SourceSpec("texts", texts), split="train")], prepared, tokenizer)
    length = opened.trained.model.seq_length
    keys = [
        *position_keys(args.finetune_method, args.to, length),
        f"seq_length={min(length, MOST_LENGTH)}",
        f"train_iters={args.finetune}",
        f"checkpoint_factor={args.finetune}",
        "train_micro_batch_size_per_gpu=1",
        "optimizer.params.lr=2e-5",
        "lr_decay_style=constant",
        "eval_iters=0",
        f"save={args.output / f'finetuned_{args.finetune_method}'}",
    ]
    command = ["train", args.model, str(prepared / "data.yml"), *keys, "--auto-resume"]
    print(f"\n$ {shlex.join(['megatron-coca', *command])}", flush=True)
    return exit_status(subprocess.run([*PROGRAM, *command], check=False).returncode)


def _digest(texts: list[Path]) -> str:
    """Return a name for the prepared data, which differs for other files."""
    named = [f"{path} {path.stat().st_size if path.is_file() else ''}" for path in texts]
    return sha256("\n".join(named).encode()).hexdigest()[:8]
