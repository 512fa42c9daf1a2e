"""The functions and classes of GPT-NeoX that the plugin relies on: check them, replace them, and check their calls."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_coca.neox_plugin.keys import uses_plugin

TESTED_COMMIT = "ea7aefd8f8e183256992d9fede4d7c71a46d67a5"
"""The commit of EleutherAI/gpt-neox that the plugin is tested with."""


class IncompatibleError(Exception):
    """GPT-NeoX is not importable, or lacks or does not call a function that the plugin relies on."""


class Requirement(NamedTuple):
    """A class or function of GPT-NeoX, with the parameters or dataclass fields that it must have."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


_ARGUMENTS, _NEOX_ARGS = "megatron.neox_arguments.neox_args", "megatron.neox_arguments"
_TRANSFORMER, _RATES = "megatron.model.transformer", "megatron.learning_rates"
_MODEL_FIELDS = (
    "num_layers hidden_size num_attention_heads num_kv_heads seq_length pos_emb rotary_pct rotary_emb_base"
    " attention_config sliding_window_width max_position_embeddings make_vocab_size_divisible_by"
)
_RUN_FIELDS = (
    "user_script optimizer optimizer_type config_files iteration use_mup finetune no_load_optim pipe_parallel_size"
    " steps_per_print deepspeed_extra_args"
)
_ATTENTION_PARAMETERS = (
    "neox_args attention_mask_func init_method output_layer_init_method layer_number rpe rotary use_cache"
    " parallel_output"
)
_QKV = "self query_layer key_layer value_layer"
_FIELDS = (
    (_ARGUMENTS, "NeoXArgsModel", _MODEL_FIELDS),
    (_ARGUMENTS, "NeoXArgsLRScheduler", "lr_decay_style min_lr warmup"),
    (_ARGUMENTS, "NeoXArgsTraining", "attention_dropout train_iters"),
    (_ARGUMENTS, "NeoXArgsTokenizer", "padded_vocab_size"),
    (_ARGUMENTS, "NeoXArgsParallelism", "model_parallel_size"),
    (_NEOX_ARGS, "NeoXArgs", _RUN_FIELDS),
)
_PARAMETERS = (
    (_NEOX_ARGS, "NeoXArgs.from_ymls", "paths_to_yml_files overwrite_values"),
    (_NEOX_ARGS, "NeoXArgs.calculate_derived", "self"),
    (_NEOX_ARGS, "NeoXArgs.validate_values", "self"),
    (_NEOX_ARGS, "NeoXArgs.build_tokenizer", "self"),
    (_NEOX_ARGS, "NeoXArgs.get_deepspeed_main_args", "self"),
    (_TRANSFORMER, "ParallelSelfAttention", _ATTENTION_PARAMETERS),
    (_TRANSFORMER, "ParallelSelfAttention.attention", f"{_QKV} layer_past attention_mask"),
    (_TRANSFORMER, "ParallelSelfAttention.flash_attention", _QKV),
    ("megatron.mpu", "get_cuda_rng_tracker", ""),
    ("megatron.checkpointing", "check_checkpoint_args", "neox_args checkpoint_args"),
    ("megatron.checkpointing", "save_ds_checkpoint", "iteration model neox_args"),
    ("megatron.text_generation_utils", "stream_tokens", "neox_args model context_tokens"),
    ("megatron.training", "get_learning_rate_scheduler", "optimizer neox_args"),
    ("megatron.training", "get_model", "neox_args"),
    ("megatron.training", "forward_step", "data_iterator model neox_args"),
    (_RATES, "AnnealingLR", "optimizer start_lr warmup_iter total_iters decay_style last_iter min_lr"),
    (_RATES, "AnnealingLR.get_lr", "self"),
    (_RATES, "AnnealingLR.step", "self step_num"),
)
REQUIREMENTS = (
    *(Requirement(module, name, fields=tuple(fields.split())) for module, name, fields in _FIELDS),
    *(Requirement(module, name, tuple(parameters.split())) for module, name, parameters in _PARAMETERS),
)


def import_upstream() -> Mapping[str, ModuleType]:
    """Import GPT-NeoX's modules and check REQUIREMENTS; return the modules by name.

    Raises IncompatibleError if a requirement is missing or has other parameters.
    """
    modules: dict[str, ModuleType] = {}
    for name in {requirement.module: None for requirement in REQUIREMENTS}:
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            raise IncompatibleError(
                f"{name} cannot be imported ({error}): run from the root of a GPT-NeoX checkout, or put it on "
                "PYTHONPATH, with its requirements installed; another package named `megatron` (megatron-core) must "
                "not come before it"
            ) from error
        except SyntaxError as error:
            raise IncompatibleError(
                f"{error.filename}, line {error.lineno}: {error.msg}; this GPT-NeoX cannot be run by Python"
                f" {sys.version_info.major}.{sys.version_info.minor}: use the tested commit, {TESTED_COMMIT}"
            ) from error
    problems = []
    for requirement in REQUIREMENTS:
        full_name = f"{requirement.module}.{requirement.name}"
        value: Any = modules[requirement.module]
        for name in requirement.name.split("."):
            value = getattr(value, name, None)
        if value is None:
            problems.append(f"{full_name} is missing")
            continue
        parameters = inspect.signature(value).parameters if requirement.parameters else {}
        missing = [name for name in requirement.parameters if name not in parameters]
        missing += [name for name in requirement.fields if name not in getattr(value, "__dataclass_fields__", {})]
        if missing:
            problems.append(f"{full_name} has no {', '.join(missing)}")
    if problems:
        raise incompatible("lacks what megatron_coca.neox_plugin relies on", problems)
    return modules


def incompatible(message: str, problems: Sequence[str]) -> IncompatibleError:
    """Return the error for the imported checkout, with one line per problem."""
    root = Path(str(sys.modules["megatron.mpu"].__file__)).parents[2]
    lines = "\n".join(f"  {problem}" for problem in problems)
    return IncompatibleError(
        f"{root}: this GPT-NeoX (commit {commit(root) or 'unknown'}) {message}:\n{lines}\n"
        f"Use the tested commit, {TESTED_COMMIT}, or a newer version of the plugin."
    )


def commit(folder: Path) -> str | None:
    """Return the commit of the git checkout whose root is `folder`, or None."""
    try:
        command = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    prefix, _, head = done.stdout.partition("\n")
    return head.strip() if done.returncode == 0 and not prefix else None


Function = Callable[..., Any]

CALLS = "megatron_coca_calls"
"""Attribute of a NeoXArgs: the names of the replaced functions that were called for it."""


def wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    """Replace `owner.name` by `wrapper(original)`, with the original's name and documentation."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrapper(original)))


def record_call(neox_args: Any, name: str) -> None:
    """Record that GPT-NeoX called the replacement of `name`, if the run uses the plugin's attention."""
    if uses_plugin(neox_args):
        vars(neox_args).setdefault(CALLS, set()).add(name)


def has_own_schedule(neox_args: Any) -> bool:
    """Return whether the plugin computes the learning rates."""
    return neox_args.lr_decay_style.lower() == "linear_to_min_lr" or bool(neox_args.lr_warmup_init)


def missing_calls(neox_args: Any, training: bool) -> list[str]:
    """Return a line for each replaced function that GPT-NeoX should have called before the first forward pass."""
    required = (
        (
            "megatron.neox_arguments.NeoXArgs.build_tokenizer",
            neox_args.vocab_size is not None,
            "vocab_size has no effect",
        ),
        (
            "megatron.training.get_learning_rate_scheduler",
            training and has_own_schedule(neox_args),
            "lr_decay_style and lr_warmup_init have no effect",
        ),
        (
            "megatron.checkpointing.check_checkpoint_args",
            bool(neox_args.iteration),
            "the checkpoint may have been trained with another position method",
        ),
    )
    calls: set[str] = getattr(neox_args, CALLS, set())
    return [f"{name}: {effect}" for name, needed, effect in required if needed and name not in calls]
