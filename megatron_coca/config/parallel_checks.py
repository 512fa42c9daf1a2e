"""What must hold where several ranks hold one model (pipeline stages, tensor parallelism) or one sequence."""

from collections.abc import Callable

from megatron_coca.config.position_checks import Check
from megatron_coca.config.schema import Settings
from megatron_coca.config.training import ParallelConfig

Quantities = Callable[[Settings], dict[str, int]]

PIPELINE_REFUSALS: tuple[tuple[Callable[[ParallelConfig], bool], str], ...] = (
    (
        lambda keys: (keys.zero_optimization or {}).get("stage", 0) in (2, 3),
        "DeepSpeed's pipelines have ZeRO stages 0 and 1 only: stages 2 and 3 give gradients away after every micro"
        " batch, of which several are under way; set zero_optimization.stage to 0 or 1",
    ),
    (
        lambda keys: keys.model_parallel_size > 1,
        "DeepSpeed's tensor parallelism (AutoTP) puts its own grid of processes in the place of the pipeline's; set"
        " model_parallel_size 1 or pipe_parallel_size 0",
    ),
    (
        lambda keys: keys.sequence_parallel_size > 1,
        "DeepSpeed's pipelines have no axis for sequence parallelism in their grid of processes; set"
        " sequence_parallel_size 1 or pipe_parallel_size 0",
    ),
)
"""What DeepSpeed cannot do together with pipeline stages, and why."""


def _tensor_quantities(settings: Settings) -> dict[str, int]:
    return _head_counts(settings) | {"intermediate_size": settings.model.ffn_hidden_size}


def _sequence_quantities(settings: Settings) -> dict[str, int]:
    return _head_counts(settings) | {"seq_length": settings.model.seq_length}


def _head_counts(settings: Settings) -> dict[str, int]:
    model = settings.model
    return {"num_attention_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads}


def _divides(key: str, quantities: Quantities) -> Callable[[Settings], str | None]:
    """A check that the ranks of `key` have equal parts of every quantity."""

    def find(settings: Settings) -> str | None:
        ranks = getattr(settings.parallel, key)
        uneven = [f"{name} {value}" for name, value in quantities(settings).items() if value % ranks]
        return f"{ranks} does not divide {' and '.join(uneven)}; every rank has an equal part" if uneven else None

    return find


def _both(settings: Settings) -> str | None:
    keys = settings.parallel
    if keys.model_parallel_size == 1 or keys.sequence_parallel_size == 1:
        return None
    return (
        "not together with sequence_parallel_size: DeepSpeed's tensor parallelism (AutoTP) puts a grid of data and tensor"
        " ranks in the place of every other; set one of the two to 1"
    )


def _one_gradient_scale(settings: Settings) -> str | None:
    keys = settings.parallel
    given = keys.zero_optimization or {}
    if keys.sequence_parallel_size == 1 or keys.stage < 3 or given.get("reduce_scatter", True):
        return None
    return (
        "with sequence_parallel_size, stage 3 needs reduce_scatter: without it DeepSpeed sums some gradients over the"
        " ranks of a sequence and averages others; leave reduce_scatter out"
    )


def _pipeline(settings: Settings) -> str | None:
    keys, layers = settings.parallel, settings.model.num_layers
    if keys.pipe_parallel_size <= 1:
        return None
    if keys.pipe_parallel_size > layers:
        return f"{keys.pipe_parallel_size} stages have no block each with num_layers {layers}; lower it"
    return next((reason for refused, reason in PIPELINE_REFUSALS if refused(keys)), None)


def _not_compiled(key: str) -> Callable[[Settings], str | None]:
    """A check that blocks with the collectives of `key` in them are not compiled."""

    def find(settings: Settings) -> str | None:
        if getattr(settings.parallel, key) == 1 or not settings.model.torch_compile:
            return None
        return (
            "not with torch_compile: the blocks exchange data between ranks through functions of DeepSpeed that are not"
            " made for compiling; set torch_compile=false"
        )

    return find


_SHAPE = ("num_attention_heads", "num_kv_heads", "hidden_size")

PARALLEL_CHECKS: tuple[Check, ...] = (
    Check(
        ("pipe_parallel_size", "num_layers", "zero_optimization", "model_parallel_size", "sequence_parallel_size"),
        _pipeline,
    ),
    Check(
        ("model_parallel_size", *_SHAPE, "intermediate_size", "expansion_factor"),
        _divides("model_parallel_size", _tensor_quantities),
    ),
    Check(("sequence_parallel_size", *_SHAPE, "seq_length"), _divides("sequence_parallel_size", _sequence_quantities)),
    Check(("model_parallel_size", "sequence_parallel_size"), _both),
    Check(("zero_optimization", "sequence_parallel_size"), _one_gradient_scale),
    *(Check((key, "torch_compile"), _not_compiled(key)) for key in ("model_parallel_size", "sequence_parallel_size")),
)
