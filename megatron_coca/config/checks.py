"""What must hold between keys. Each check is one line of a literal table."""

from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_coca.config.faults import POLICIES
from megatron_coca.config.parallel_checks import PARALLEL_CHECKS
from megatron_coca.config.position_checks import POSITION_CHECKS, Check
from megatron_coca.config.running import split_shares
from megatron_coca.config.schema import Settings
from megatron_coca.config.trainable_checks import TRAINABLE_CHECKS

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
