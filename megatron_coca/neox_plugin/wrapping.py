"""Replacing functions of upstream's by ones that call them, and knowing whether upstream called the replacement."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_coca.neox_plugin.keys import is_asked_for

TESTED_COMMIT = "ea7aefd8f8e183256992d9fede4d7c71a46d67a5"
"""The commit of EleutherAI/gpt-neox that the plugin is tested with."""


class IncompatibleError(Exception):
    """GPT-NeoX is not importable, or lacks or does not call what the plugin relies on; the message names all of it."""


class Seam(NamedTuple):
    """A name of upstream's, and the parameters or fields that it must have at least."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


SEAMS: tuple[Seam, ...] = (
    Seam(
        "megatron.neox_arguments.neox_args",
        "NeoXArgsModel",
        fields=(
            *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "pos_emb"),
            *("rotary_pct", "rotary_emb_base", "attention_config", "sliding_window_width", "max_position_embeddings"),
            "make_vocab_size_divisible_by",
        ),
    ),
    Seam("megatron.neox_arguments.neox_args", "NeoXArgsLRScheduler", fields=("lr_decay_style", "min_lr", "warmup")),
    Seam("megatron.neox_arguments.neox_args", "NeoXArgsTraining", fields=("attention_dropout", "train_iters")),
    Seam("megatron.neox_arguments.neox_args", "NeoXArgsTokenizer", fields=("padded_vocab_size",)),
    Seam("megatron.neox_arguments.neox_args", "NeoXArgsParallelism", fields=("model_parallel_size",)),
    Seam(
        "megatron.neox_arguments",
        "NeoXArgs",
        fields=("user_script", "optimizer", "optimizer_type", "config_files", "iteration", "use_mup"),
    ),
    Seam("megatron.neox_arguments", "NeoXArgs", fields=("finetune", "no_load_optim", "pipe_parallel_size")),
    Seam("megatron.neox_arguments", "NeoXArgs.from_ymls", ("paths_to_yml_files", "overwrite_values")),
    Seam("megatron.neox_arguments", "NeoXArgs.calculate_derived", ("self",)),
    Seam("megatron.neox_arguments", "NeoXArgs.validate_values", ("self",)),
    Seam("megatron.neox_arguments", "NeoXArgs.build_tokenizer", ("self",)),
    Seam("megatron.neox_arguments", "NeoXArgs.get_deepspeed_main_args", ("self",)),
    Seam(
        "megatron.model.transformer",
        "ParallelSelfAttention",
        (
            *("neox_args", "attention_mask_func", "init_method", "output_layer_init_method", "layer_number"),
            *("rpe", "rotary", "use_cache", "parallel_output"),
        ),
    ),
    Seam(
        "megatron.model.transformer",
        "ParallelSelfAttention.attention",
        ("self", "query_layer", "key_layer", "value_layer", "layer_past", "attention_mask"),
    ),
    Seam(
        "megatron.model.transformer",
        "ParallelSelfAttention.flash_attention",
        ("self", "query_layer", "key_layer", "value_layer"),
    ),
    Seam("megatron.mpu", "get_cuda_rng_tracker"),
    Seam("megatron.checkpointing", "check_checkpoint_args", ("neox_args", "checkpoint_args")),
    Seam("megatron.checkpointing", "save_ds_checkpoint", ("iteration", "model", "neox_args")),
    Seam("megatron.text_generation_utils", "stream_tokens", ("neox_args", "model", "context_tokens")),
    Seam("megatron.training", "get_learning_rate_scheduler", ("optimizer", "neox_args")),
    Seam("megatron.training", "get_model", ("neox_args",)),
    Seam(
        "megatron.learning_rates",
        "AnnealingLR",
        ("optimizer", "start_lr", "warmup_iter", "total_iters", "decay_style", "last_iter", "min_lr"),
    ),
    Seam("megatron.learning_rates", "AnnealingLR.get_lr", ("self",)),
    Seam("megatron.learning_rates", "AnnealingLR.step", ("self", "step_num")),
)


def upstream() -> Mapping[str, ModuleType]:
    """Upstream's modules by name, once all that is relied on is there.

    Raises:
        IncompatibleError: something is missing or has other parameters.
    """
    modules = {seam.module: _imported(seam.module) for seam in SEAMS}
    problems = [problem for seam in SEAMS if (problem := _problem(seam, modules[seam.module])) is not None]
    if problems:
        raise incompatible("has changed what megatron_coca.neox_plugin relies on", problems)
    return modules


def incompatible(what: str, problems: Sequence[str]) -> IncompatibleError:
    """The error for the imported checkout, which `what` is said of."""
    root = Path(str(sys.modules["megatron.mpu"].__file__)).parents[2]
    lines = "\n".join(f"  {problem}" for problem in problems)
    return IncompatibleError(
        f"{root}: this GPT-NeoX (commit {commit(root) or 'unknown'}) {what}:\n{lines}\n"
        f"Use the tested commit, {TESTED_COMMIT}, or a newer plugin."
    )


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise IncompatibleError(
            f"{name} cannot be imported ({error}): run from the root of a GPT-NeoX checkout, or put it on PYTHONPATH, with "
            "its requirements installed; another package named `megatron` (megatron-core) must not come before it"
        ) from error


def _problem(seam: Seam, module: ModuleType) -> str | None:
    found: Any = module
    for part in seam.name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return f"{seam.module}.{seam.name} is missing"
    has = list(inspect.signature(found).parameters) if seam.parameters else []
    lacking = [name for name in seam.parameters if name not in has]
    lacking += [name for name in seam.fields if name not in getattr(found, "__dataclass_fields__", {})]
    return f"{seam.module}.{seam.name} has no {', '.join(lacking)}" if lacking else None


def commit(folder: Path) -> str | None:
    """The commit of the git checkout that `folder` is the root of, or None."""
    try:
        command = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # without git, nothing is known
        return None
    below, _, found = done.stdout.partition("\n")
    return found.strip() if done.returncode == 0 and not below else None


Function = Callable[..., Any]

CALLS = "megatron_coca_calls"
"""An attribute of a NeoXArgs: the names of replaced functions that were called for it."""


def wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    """Put `wrapper(original)`, under the original's name and documentation, in place of `owner.name`."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrapper(original)))


def called(neox_args: Any, name: str) -> None:
    """Note that upstream called the replacement of `name`, where the plugin's attention is used."""
    if is_asked_for(neox_args):
        vars(neox_args).setdefault(CALLS, set()).add(name)


class Expected(NamedTuple):
    """A replaced function that upstream calls before the first forward pass.

    Attributes:
        when: whether it must have been called, by NeoXArgs and whether the model is in training.
        effect: what would be wrong in silence without.
    """

    name: str
    when: Callable[[Any, bool], bool]
    effect: str


EXPECTED: tuple[Expected, ...] = (
    Expected(
        "megatron.neox_arguments.NeoXArgs.build_tokenizer",
        lambda neox_args, training: neox_args.vocab_size is not None,
        "vocab_size has no effect",
    ),
    Expected(
        "megatron.training.get_learning_rate_scheduler",
        lambda neox_args, training: training and has_own_schedule(neox_args),
        "lr_decay_style and lr_warmup_init have no effect",
    ),
    Expected(
        "megatron.checkpointing.check_checkpoint_args",
        lambda neox_args, training: bool(neox_args.iteration),
        "the checkpoint may have been trained with other positions",
    ),
)


def has_own_schedule(neox_args: Any) -> bool:
    """Whether the learning rates are the plugin's to compute."""
    return neox_args.lr_decay_style.lower() == "linear_to_min_lr" or bool(neox_args.lr_warmup_init)


def not_called(neox_args: Any, training: bool) -> list[str]:
    """A line for every replaced function that upstream should have called by now."""
    calls = getattr(neox_args, CALLS, set())
    return [
        f"{each.name}: {each.effect}" for each in EXPECTED if each.name not in calls and each.when(neox_args, training)
    ]
