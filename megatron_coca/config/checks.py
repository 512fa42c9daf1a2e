"""What must hold between keys. Each check is one line of a literal table."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.position import MAP_OPTIONS, MAP_REQUIRED, ROTATED_METHODS, SCALING_OPTIONS, SCALING_REQUIRED
from megatron_coca.config.run import POLICIES, split_shares
from megatron_coca.config.schema import Settings
from megatron_coca.config.training import ParallelConfig, Part

BASE_CHANGING = frozenset({"ntk", "dynamic", "dynamic_max"})


class Check(NamedTuple):
    """A rule: the keys it reads, the first of which is to blame, and a finder of the fault."""

    keys: tuple[str, ...]
    find: Callable[[Settings], str | None]


def _rotary_dims(settings: Settings) -> str | None:
    model, position = settings.model, settings.position
    dims = int(model.head_dim * position.rotary_pct)
    if position.pos_emb not in ROTATED_METHODS or (dims >= 2 and dims % 2 == 0):
        return None
    return (
        f"{position.rotary_pct} of {model.head_dim} features per head (hidden_size / num_attention_heads) is {dims};"
        " the rotated features must be even and at least 2"
    )


def _scaling_dims(settings: Settings) -> str | None:
    scaling = settings.position.rope_scaling
    dims = int(settings.model.head_dim * settings.position.rotary_pct)
    by_base = scaling is not None and scaling.rope_type in BASE_CHANGING
    return "changing the base needs at least 4 rotated features per head" if by_base and dims < 4 else None


def _scaling(settings: Settings) -> str | None:
    scaling, method = settings.position.rope_scaling, settings.position.pos_emb
    if scaling is None:
        return None
    if scaling.rope_type != "default" and method not in ROTATED_METHODS:
        return (
            f"rope_type {scaling.rope_type} has no meaning with pos_emb {method}, which has no frequencies to scale;"
            " set rope_scaling to null"
        )
    return _options(scaling, f"rope_type {scaling.rope_type}", SCALING_OPTIONS, SCALING_REQUIRED, scaling.rope_type)


def _options(
    given: ConfigGroup, named: str, known: dict[str, tuple[str, ...]], required: dict[str, tuple[str, ...]], choice: str
) -> str | None:
    """An option that this choice does not read, or one that it lacks."""
    always = {"rope_type", "type", "original_max_position_embeddings"}
    for name in sorted(given.model_fields_set - always - set(known[choice])):
        if getattr(given, name) != type(given).model_fields[name].default:
            readers = [other for other, names in known.items() if name in names]
            return f"{name} has no effect with {named}; it belongs to {' | '.join(readers)}"
    unset = {name for name in type(given).model_fields if name not in given.model_fields_set}
    missing = [name for name in required.get(choice, ()) if name in unset or getattr(given, name) is None]
    return f"{named} needs {missing[0]}" if missing else None


def _longrope_lists(settings: Settings) -> str | None:
    scaling, pairs = settings.position.rope_scaling, int(settings.model.head_dim * settings.position.rotary_pct) // 2
    for name in ("short_factor", "long_factor"):
        values = getattr(scaling, name, None)
        if values is not None and len(values) != pairs:
            return f"{name} has {len(values)} numbers; {pairs} pairs of features are rotated, and each needs one"
    return None


def _yarn_ends(settings: Settings) -> str | None:
    scaling = settings.position.rope_scaling
    if scaling is None or scaling.beta_fast > scaling.beta_slow:
        return None
    return f"beta_fast {scaling.beta_fast} must exceed beta_slow {scaling.beta_slow}"


def _llama3_ends(settings: Settings) -> str | None:
    scaling = settings.position.rope_scaling
    if scaling is None or scaling.high_freq_factor > scaling.low_freq_factor:
        return None
    return f"high_freq_factor {scaling.high_freq_factor} must exceed low_freq_factor {scaling.low_freq_factor}"


def _dynamic_max(settings: Settings) -> str | None:
    """The base grows with L' / L, so L' below L would shrink it."""
    scaling = settings.position.rope_scaling
    if scaling is None or scaling.target_length is None:
        return None
    length = settings.position.original_length(settings.model.seq_length)
    return (
        f"target_length {scaling.target_length} is below L, the length {length} that the extension starts from"
        if (scaling.target_length < length)
        else None
    )


def _map(settings: Settings) -> str | None:
    given, method = settings.position.relative_positions, settings.position.pos_emb
    if given is None:
        return None
    if method not in ROTATED_METHODS:
        return (
            f"{given.type} moves rotations, and pos_emb {method} has none; set relative_positions to null or pos_emb to"
            f" one of {' | '.join(sorted(ROTATED_METHODS))}"
        )
    if given.type == "streaming" and method == "coca":
        return (
            "streaming counts positions from the oldest token in the cache, which shifts them from row to row, and the"
            " scores of coca change when positions shift; coca_strict and lm_infinite both work"
        )
    return _options(given, f"type {given.type}", MAP_OPTIONS, MAP_REQUIRED, given.type)


def _map_reach(settings: Settings) -> str | None:
    given = settings.position.relative_positions
    if given is None:
        return None
    length = settings.model.seq_length
    if given.type == "streaming" and given.window is None and (given.sinks or 0) >= length:
        return f"{given.sinks} sinks leave no window within the training length {length}; set window"
    if given.type == "inv_leaky_rerope" and given.target_length is not None and 2 * given.target_length <= length:
        return f"target_length {given.target_length} makes far steps shorter than one; it must exceed {length // 2}"
    return None


def _map_and_clex(settings: Settings) -> str | None:
    scaling, given = settings.position.rope_scaling, settings.position.relative_positions
    both = scaling is not None and scaling.rope_type == "clex" and given is not None
    return "has no meaning with rope_type clex, which draws positions at random in training" if both else None


def _logit_scaling(settings: Settings) -> str | None:
    scaled = settings.position.logit_scaling != "none"
    length = settings.model.seq_length
    return "measures against ln L, which is 0 for a training length of 1" if scaled and length < 2 else None


def _longrope_length(settings: Settings) -> str | None:
    scaling, length = settings.position.rope_scaling, settings.position.original_length(settings.model.seq_length)
    measured = scaling is not None and scaling.rope_type == "longrope"
    return "longrope measures against ln L, which is 0 at 1" if measured and length < 2 else None


def _operand_kernel(settings: Settings) -> str | None:
    position = settings.position
    if position.operand_kernel == "torch":
        return None
    if position.pos_emb not in ROTATED_METHODS:
        return f"triton forms rotated operands, and pos_emb {position.pos_emb} rotates nothing; set torch"
    if position.rope_scaling is not None and position.rope_scaling.rope_type == "clex":
        return "triton gives no gradient to learned frequencies (rope_type clex); set torch"
    if position.logit_scaling != "none" and position.rotary_pct < 1.0:
        return "triton scales no logits on features that are not rotated (rotary_pct below 1); set torch"
    return None


def _buckets(settings: Settings) -> str | None:
    buckets, furthest = settings.position.rpe_num_buckets, settings.position.rpe_max_distance
    exact = buckets // 2
    return f"{furthest} must exceed the {exact} distances that have a row of their own" if furthest <= exact else None


POSITION_CHECKS: tuple[Check, ...] = (
    Check(("rotary_pct", "pos_emb", "hidden_size", "num_attention_heads"), _rotary_dims),
    Check(("rope_scaling", "rotary_pct", "hidden_size", "num_attention_heads"), _scaling_dims),
    Check(("rope_scaling", "pos_emb"), _scaling),
    Check(("rope_scaling", "rotary_pct", "hidden_size", "num_attention_heads"), _longrope_lists),
    Check(("rope_scaling",), _yarn_ends),
    Check(("rope_scaling",), _llama3_ends),
    Check(("rope_scaling", "seq_length"), _dynamic_max),
    Check(("relative_positions", "pos_emb"), _map),
    Check(("relative_positions", "seq_length"), _map_reach),
    Check(("relative_positions", "rope_scaling"), _map_and_clex),
    Check(("logit_scaling", "seq_length"), _logit_scaling),
    Check(("rope_scaling", "seq_length"), _longrope_length),
    Check(("operand_kernel", "pos_emb", "rope_scaling", "logit_scaling", "rotary_pct"), _operand_kernel),
    Check(("rpe_max_distance", "rpe_num_buckets"), _buckets),
)

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

LEARNED_POSITIONS = frozenset({"learned", "rpe", "kerple_log", "kerple_power"})
"""Position methods with weights of their own; CLEX, an extension of frequencies, has some too."""


def _learns_positions(settings: Settings) -> bool:
    scaling = settings.position.rope_scaling
    return settings.position.pos_emb in LEARNED_POSITIONS or (scaling is not None and scaling.rope_type == "clex")


ABSENT: dict[Part, tuple[Callable[[Settings], bool], str]] = {
    "output_head": (
        lambda settings: not settings.model.no_weight_tying,
        "output_head has no weights of its own while no_weight_tying is false: it is the embedding; name embedding",
    ),
    "norms": (
        lambda settings: settings.model.norm == "non_parametric_layernorm",
        "norms have no weights with norm non_parametric_layernorm; leave norms out",
    ),
    "positions": (
        lambda settings: not _learns_positions(settings),
        "positions have no weights with this pos_emb and rope_scaling; leave positions out",
    ),
}
"""Parts that a model may lack: when it does, and what to say."""


def _present(settings: Settings) -> str | None:
    parts = settings.optimizer.trainable or []
    return next((reason for part, (lacks, reason) in ABSENT.items() if part in parts and lacks(settings)), None)


def _named_once(settings: Settings) -> str | None:
    parts = settings.optimizer.trainable or []
    twice = sorted({part for part in parts if parts.count(part) > 1})
    return f"{' and '.join(twice)} named more than once; name each part once" if twice else None


TRAINABLE_CHECKS: tuple[Check, ...] = (
    Check(("trainable",), _named_once),
    Check(("trainable", "no_weight_tying", "norm", "pos_emb", "rope_scaling"), _present),
)

FULL_ATTENTION = frozenset({"global", "flash"})
ABSOLUTE_METHODS = frozenset({"learned", "sinusoidal"})
"""Methods whose positions say nothing of distances: they may begin again while attention goes on."""


def _heads(settings: Settings) -> str | None:
    width, heads = settings.model.hidden_size, settings.model.num_attention_heads
    return f"{heads} heads do not divide hidden_size {width}" if width % heads else None


def _kv_heads(settings: Settings) -> str | None:
    kv_heads, heads = settings.model.num_kv_heads, settings.model.num_attention_heads
    return f"{kv_heads} key/value heads do not divide num_attention_heads {heads}" if heads % kv_heads else None


def _inner_width(settings: Settings) -> str | None:
    both = settings.model.intermediate_size is not None and settings.model.expansion_factor is not None
    return "contradicts intermediate_size; set one of the two" if both else None


def _length(settings: Settings) -> str | None:
    length, rows = settings.model.seq_length, settings.model.max_position_embeddings
    return f"{length} exceeds max_position_embeddings {rows}; raise it or leave it out" if length > rows else None


def _attention_types(settings: Settings) -> str | None:
    config, layers = settings.model.attention_config, settings.model.num_layers
    runs = [_attention_run(item, layers) for item in config or ()]
    if config is None:
        return None
    if None in runs:
        return 'expected the form [[["global"], 12]]'
    absent = sorted({name for run in runs if run for name in run[0]} - FULL_ATTENTION)
    if absent:
        return f"attention type {absent[0]} is not supported yet (global | flash)"
    total = sum(run[1] for run in runs if run)
    return None if total == layers else f"names {total} layers, but num_layers is {layers}; leave it out"


def _attention_run(item: object, layers: int) -> tuple[list[str], int] | None:
    """The types an item of GPT-NeoX's form names and how many layers it covers, or None for another form."""
    match item:
        case str():
            return [item], 1
        case [[*names], "all"] if names and layers % len(names) == 0:
            return [str(name) for name in names], layers
        case [[*names], int(count)] if names:
            return [str(name) for name in names], count * len(names)
    return None


def _lowest_rate(settings: Settings) -> str | None:
    rate, lowest = settings.optimizer.lr, settings.schedule.min_lr
    return f"{lowest} exceeds the learning rate {rate}" if rate is not None and lowest > rate else None


def _warmup_start(settings: Settings) -> str | None:
    rate, start = settings.optimizer.lr, settings.schedule.lr_warmup_init
    return f"{start} exceeds the learning rate {rate}" if rate is not None and start > rate else None


def _batch(settings: Settings) -> str | None:
    sizes = settings.batch
    micro, steps = sizes.train_micro_batch_size_per_gpu or 1, sizes.gradient_accumulation_steps or 1
    if sizes.train_batch_size is None or sizes.train_batch_size % (micro * steps) == 0:
        return None
    return f"{sizes.train_batch_size} is not a multiple of micro batch {micro} x accumulation {steps}"


def _precision(settings: Settings) -> str | None:
    asked = sorted(settings.precision.requested)
    if len(asked) <= 1:
        return None
    return f"{' and '.join(asked)} are both asked for by precision, fp16 and bf16; leave one (others: null)"


def _zero_stage(settings: Settings) -> str | None:
    stage = (settings.parallel.zero_optimization or {}).get("stage", 0)
    valid = isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3
    return None if valid else f"stage {stage!r} is not one of 0 | 1 | 2 | 3"


def _selective(settings: Settings) -> str | None:
    """DeepSpeed's own linear layers add biases and sums over ranks in place to the products that would be kept."""
    model, parallel = settings.model, settings.parallel
    if not model.checkpoint_activations or model.checkpoint_policy != "selective":
        return None
    if parallel.model_parallel_size > 1:
        return "selective cannot keep the products of tensor-parallel layers; set full, or model_parallel_size 1"
    if parallel.stage == 3 and (parallel.zero_optimization or {}).get("memory_efficient_linear", True):
        return "selective cannot keep the products of ZeRO 3's linear layers; set full, or zero_optimization.memory_efficient_linear=false"
    return None


def _checkpoint_ratio(settings: Settings) -> str | None:
    keep = settings.checkpoint
    endless = keep.checkpoint_scale == "log" and keep.checkpoint_factor == 1
    return "1 is no ratio; with checkpoint_scale log set at least 2" if endless else None


def _folder(name: str) -> Callable[[Settings], str | None]:
    def find(settings: Settings) -> str | None:
        return "an empty text names no folder; leave it out" if getattr(settings.checkpoint, name) == "" else None

    return find


def _needs_load(name: str) -> Callable[[Settings], str | None]:
    def find(settings: Settings) -> str | None:
        value = getattr(settings.checkpoint, name)
        lacking = value is not None and value is not False and not settings.checkpoint.load
        return "has no effect without load, the folder to read; set load" if lacking else None

    return find


def _iteration(settings: Settings) -> str | None:
    keep = settings.checkpoint
    if not (keep.auto_resume and keep.iteration is not None and keep.save and keep.load):
        return None
    ignored = Path(keep.load).resolve() == Path(keep.save).resolve()
    return "contradicts auto_resume, which takes the newest step of save; leave one of the two out" if ignored else None


def _copy(settings: Settings) -> str | None:
    keep = settings.checkpoint
    if not keep.save_copy:
        return None
    if not keep.save:
        return "there is nothing to copy without save; set save"
    same = Path(keep.save_copy).resolve() == Path(keep.save).resolve()
    return "is the folder of save; name another one, best on other disks" if same else None


def _profiled_steps(settings: Settings) -> str | None:
    keys = settings.logging
    empty = keys.profile_step_stop <= keys.profile_step_start and (keys.profile or keys.memory_profiling)
    return f"{keys.profile_step_stop} is not after profile_step_start {keys.profile_step_start}" if empty else None


def _rollback(name: str) -> Callable[[Settings], str | None]:
    def find(settings: Settings) -> str | None:
        keep = settings.checkpoint
        none = keep.save is None or (keep.checkpoint_factor is None and not keep.extra_save_iters)
        lacking = none and getattr(settings.faults, name) == "rollback"
        return "rollback needs checkpoints to go back to; set save and checkpoint_factor" if lacking else None

    return find


def _one_source(settings: Settings) -> str | None:
    data = settings.data
    lists = [name for name in ("train", "valid", "test") if getattr(data, f"{name}_data_paths")]
    both = data.data_path is not None and lists
    return f"contradicts {lists[0]}_data_paths; set one of the two" if both else None


def _split(settings: Settings) -> str | None:
    split = settings.data.split
    return None if split_shares(split) else f"{split!r} is not up to three numbers such as `969, 30, 1`"


def _paths(name: str) -> Callable[[Settings], str | None]:
    others = [other for other in ("train", "valid", "test") if other != name]

    def find(settings: Settings) -> str | None:
        given = [other for other in others if getattr(settings.data, f"{other}_data_paths")]
        missing = getattr(settings.data, f"{name}_data_paths") is None and given
        return f"missing although {given[0]}_data_paths is set; give all three or none" if missing else None

    return find


def _weights(name: str) -> Callable[[Settings], str | None]:
    def find(settings: Settings) -> str | None:
        weights = getattr(settings.data, f"{name}_data_weights")
        paths = getattr(settings.data, f"{name}_data_paths") or []
        unequal = weights is not None and len(weights) != len(paths)
        return f"{len(weights)} weights for {len(paths)} {name}_data_paths; give one each" if unequal else None

    return find


def _positions(settings: Settings) -> str | None:
    data, method = settings.data, settings.position.pos_emb
    if not data.reset_position_ids or data.reset_attention_mask or method in ABSOLUTE_METHODS:
        return None
    return f"with pos_emb {method}, attention must not cross documents either; set reset_attention_mask=true"


_ALL_PATHS = ("train_data_paths", "valid_data_paths", "test_data_paths")

CHECKS: tuple[Check, ...] = (
    Check(("num_attention_heads", "hidden_size"), _heads),
    Check(("num_kv_heads", "num_attention_heads"), _kv_heads),
    Check(("expansion_factor", "intermediate_size"), _inner_width),
    Check(("seq_length", "max_position_embeddings"), _length),
    *POSITION_CHECKS,
    Check(("attention_config", "num_layers"), _attention_types),
    Check(("min_lr", "optimizer.params.lr"), _lowest_rate),
    Check(("lr_warmup_init", "optimizer.params.lr"), _warmup_start),
    *TRAINABLE_CHECKS,
    Check(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), _batch),
    Check(("precision", "fp16", "bf16"), _precision),
    Check(("zero_optimization",), _zero_stage),
    *PARALLEL_CHECKS,
    Check(
        ("checkpoint_policy", "checkpoint_activations", "zero_optimization", "model_parallel_size"),
        _selective,
    ),
    Check(("checkpoint_factor", "checkpoint_scale"), _checkpoint_ratio),
    *(Check((name,), _folder(name)) for name in ("save", "save_copy", "load")),
    *(Check((name, "load"), _needs_load(name)) for name in ("finetune", "iteration")),
    Check(("iteration", "load", "save", "auto_resume"), _iteration),
    Check(("save_copy", "save"), _copy),
    Check(("profile_step_stop", "profile_step_start"), _profiled_steps),
    Check(("data_path", *_ALL_PATHS), _one_source),
    Check(("split",), _split),
    Check(("reset_position_ids", "reset_attention_mask", "pos_emb"), _positions),
    *(Check((name, "save", "checkpoint_factor", "extra_save_iters"), _rollback(name)) for name in POLICIES),
    *(Check((f"{name}_data_paths", *_ALL_PATHS), _paths(name)) for name in ("train", "valid", "test")),
    *(Check((f"{name}_data_weights", *_ALL_PATHS), _weights(name)) for name in ("train", "valid", "test")),
)


def find_faults(settings: Settings, unreliable: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Key and fault of every check that fails and reads none of the `unreliable` keys."""
    for check in CHECKS:
        fault = check.find(settings) if unreliable.isdisjoint(check.keys) else None
        if fault is not None:
            yield check.keys[0], fault
