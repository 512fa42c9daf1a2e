"""Checks of checkpoints, profiling and validation."""

import os
from functools import partial

from megatron_coca.config.base import shown
from megatron_coca.config.checks.parallelism import uneven_chunks
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.data import window_tokens
from megatron_coca.config.schema import Settings


def _checkpoint_factor(settings: Settings) -> str | None:
    scale, factor = settings.checkpoint.checkpoint_scale, settings.checkpoint.checkpoint_factor
    if factor is None:
        return None
    if scale == "log":
        return None if factor > 1 else "must be above 1 with `checkpoint_scale: log`, for example 2"
    whole = float(factor).is_integer()
    return (
        None if whole else "must be a whole number of steps with `checkpoint_scale: linear`; set checkpoint_scale=log"
    )


def _needs_load(key: str, settings: Settings) -> str | None:
    value = getattr(settings.checkpoint, key)
    unused = value is not None and value is not False and not settings.checkpoint.load
    return "has no effect without load; set load to the folder to read" if unused else None


def _iteration(settings: Settings) -> str | None:
    keys = settings.checkpoint
    if not (keys.auto_resume and keys.iteration is not None and keys.save and keys.load):
        return None
    ignored = os.path.realpath(keys.load) == os.path.realpath(keys.save)
    return "contradicts auto_resume, which resumes from the latest step; remove one of them" if ignored else None


def _no_load_optim(settings: Settings) -> str | None:
    keys = settings.checkpoint
    if not (keys.no_load_optim and keys.load and keys.save):
        return None
    same = os.path.realpath(keys.load) == os.path.realpath(keys.save)
    problem = "load and save are the same folder, so every restart would reset the optimizer; set another save"
    return problem if same else None


def _profiled_steps(settings: Settings) -> str | None:
    keys = settings.logging
    empty = keys.profile_step_stop <= keys.profile_step_start and keys.profile
    late = f"{keys.profile_step_stop} is not after profile_step_start {keys.profile_step_start}; raise it"
    return late if empty else None


def _eval_windows(settings: Settings) -> str | None:
    keys, length, rows = settings.logging, settings.model.seq_length, settings.model.max_position_embeddings
    ring, ranks = settings.parallel.context_parallel_size, settings.parallel.sequence_parallel_size
    for window in keys.eval_windows or ():
        tokens = window_tokens(window, length)
        if tokens is None:
            return f"{shown(window)} is neither a number of tokens above 1 nor a multiple of seq_length such as 4L"
        if settings.position.pos_emb == "learned" and tokens + settings.model.opt_pos_emb_offset > rows:
            return f"{window} exceeds the {rows} positions of pos_emb learned (max_position_embeddings); remove it"
        if tokens % ranks:
            return f"{window} is {tokens} tokens, not a multiple of sequence_parallel_size {ranks}; change it"
        if ring > 1 and (problem := uneven_chunks(tokens, ring, ranks)):
            return f"context_parallel_size {ring} cannot divide {window}: {problem}"
    unused = keys.eval_windows and not keys.eval_iters
    return "has no effect with eval_iters 0; raise eval_iters or remove it" if unused else None


CHECKS = (
    Check("checkpoint_factor", _checkpoint_factor),
    *(Check(key, partial(_needs_load, key)) for key in ("finetune", "iteration", "no_load_optim")),
    Check("no_load_optim", _no_load_optim),
    Check("iteration", _iteration),
    Check("profile_step_stop", _profiled_steps),
    Check("eval_windows", _eval_windows),
)
