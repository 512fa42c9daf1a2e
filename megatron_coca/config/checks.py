"""Checks between keys: a function for each, and a table of the keys that it reads."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from megatron_coca import methods
from megatron_coca.config.base import shown
from megatron_coca.config.model import GAU, GLOBAL
from megatron_coca.config.position import PositionConfig
from megatron_coca.config.schema import SELECTORS, Settings
from megatron_coca.config.training import QUERY_KEY_VALUE, split_shares, window_tokens


class Check(NamedTuple):
    """A check: the keys it reads, the first of which is reported, and a function that returns the error message."""

    keys: tuple[str, ...]
    find: Callable[[Settings], str | None]


# Shape


def _heads(settings: Settings) -> str | None:
    width, heads = settings.model.hidden_size, settings.model.num_attention_heads
    uneven = width % heads and settings.model.kv_channels is None
    return f"{heads} heads do not divide hidden_size {width}" if uneven else None


def _kv_heads(settings: Settings) -> str | None:
    kv_heads, heads = settings.model.num_kv_heads, settings.model.num_attention_heads
    return f"{kv_heads} key/value heads do not divide num_attention_heads {heads}" if heads % kv_heads else None


_OVER_RANKS = "not available with model_parallel_size: a norm of all heads together would need their sums over ranks"


def _qk_layernorm(settings: Settings) -> str | None:
    model = settings.model
    if not model.use_qk_layernorm:
        return None
    if model.num_kv_heads != model.num_attention_heads:
        return "GPT-NeoX's norm has a weight for every query head, so num_kv_heads must be num_attention_heads"
    return _OVER_RANKS if settings.parallel.model_parallel_size > 1 else None


def _qk_norm(settings: Settings) -> str | None:
    model = settings.model
    if model.qk_norm is not None and model.use_qk_layernorm:
        return "contradicts use_qk_layernorm, GPT-NeoX's norm of queries and keys; set only one of the two"
    together = model.qk_norm == "projection" and settings.parallel.model_parallel_size > 1
    return f"projection is {_OVER_RANKS}" if together else None


def _zero_centered(settings: Settings) -> str | None:
    other = settings.model.zero_centered_norms and settings.model.norm != "rmsnorm"
    return f"needs norm rmsnorm, and norm is {settings.model.norm}" if other else None


def _softcapping(settings: Settings) -> str | None:
    model = settings.model
    unfused = model.final_logit_softcapping is not None and model.loss_kernel == "triton"
    return "not available with loss_kernel triton, which has no capping; set loss_kernel=torch" if unfused else None


def _inner_width(settings: Settings) -> str | None:
    both = settings.model.intermediate_size is not None and settings.model.expansion_factor is not None
    return "contradicts intermediate_size; set only one of the two" if both else None


def _inner_features(settings: Settings) -> str | None:
    return None if settings.model.ffn_hidden_size else "the MLP has no features; raise it, or expansion_factor"


def _length(settings: Settings) -> str | None:
    length, rows = settings.model.seq_length, settings.model.max_position_embeddings
    offset = settings.model.opt_pos_emb_offset
    if settings.position.pos_emb != "learned" or length + offset <= rows:
        return None
    if offset:
        return f"{length} + opt_pos_emb_offset {offset} exceeds max_position_embeddings {rows}; raise the latter"
    return f"{length} exceeds max_position_embeddings {rows}; raise it or leave it out"


def _attention_types(settings: Settings) -> str | None:
    try:
        named = settings.model.layer_names
    except ValueError as error:
        return str(error)
    absent = sorted(set(named) - {GLOBAL, GAU, *settings.position.layer_types})
    if absent:
        return f"attention type {absent[0]:.80} is not supported (global | flash | gau) and not named by layer_types"
    return None


def _gau(settings: Settings) -> str | None:
    """Why gated attention units, where there are any, cannot be had with other keys."""
    model, parallel, position = settings.model, settings.parallel, _types(settings).get(GAU)
    if position is None:
        return None
    if model.gau_features % model.gau_key_width:
        return f"the {model.gau_features} features of its values are not a multiple of gau_key_width"
    trained = [part for part in QUERY_KEY_VALUE if settings.optimizer.trains(part)]
    one_head = "they have one head, whose values are attended to in pieces"
    refusals = (
        ("sink_logits", position.sink_logits, one_head),
        (f"pos_emb {position.pos_emb}", position.embedding.biased, "its bias is by head, and they have one"),
        (f"logit_scaling {position.scaling.name}", position.scaling.learned, one_head),
        ("forgetting_gate", position.gate, one_head),
        ("use_qk_layernorm", model.use_qk_layernorm, "a scale and an offset of each feature take its place"),
        ("qk_norm", model.qk_norm, "a scale and an offset of each feature take its place"),
        ("attention_dropout", model.attention_dropout, one_head),
        ("model_parallel_size", parallel.model_parallel_size > 1, one_head),
        ("sequence_parallel_size", parallel.sequence_parallel_size > 1, one_head),
        ("pipe_parallel_size", parallel.pipe_parallel_size > 1, "stages are divided as if all blocks were alike"),
        ("trainable", len(trained) not in (0, len(QUERY_KEY_VALUE)), f"one projection makes {QUERY_KEY_VALUE}"),
    )
    found = next((f"{name}: {reason}" for name, given, reason in refusals if given), None)
    return None if found is None else f"layers of type gau do not support {found}"


def _layer_types(settings: Settings) -> str | None:
    reserved = sorted({GLOBAL, "flash"} & settings.position.layer_types.keys())
    if reserved:
        return f"{reserved[0]} is the type with the model's own keys; give yours another name"
    odd = [name for name in settings.position.layer_types if not name.isidentifier()]
    if odd:
        return f"{shown(odd[0])} is not a name of letters, digits and underscores"
    unused = sorted(settings.position.layer_types.keys() - _types(settings).keys())
    if unused:
        return f"no layer has the type {unused[0]}; name it in attention_config or leave it out"
    used = {settings.position.pos_emb, *(position.pos_emb for position in _types(settings).values())}
    added = sorted(name for name in used if not methods.find("pos_emb", name).by_distance)
    if added and len(used) > 1:
        return f"pos_emb {added[0]} adds vectors to the embedding, which all layers share; no layer can have another"
    return None


def _types(settings: Settings) -> dict[str, PositionConfig]:
    """The position keys of every type of layers; of the model alone where the types themselves are not valid."""
    try:
        return settings.position.of_types(settings.model.layer_names)
    except ValueError:
        return settings.position.of_types([GLOBAL])


# Position method


def _rotary_dims(settings: Settings) -> str | None:
    for name, position in _types(settings).items():
        head_dim = settings.model.of_type(name).head_dim
        dims = int(head_dim * position.rotary_pct)
        if position.embedding.rotary and (dims < 2 or dims % 2):
            return (
                f"{position.rotary_pct} of {head_dim} features per head (hidden_size /"
                f" num_attention_heads) is {dims}; the number of rotated features must be even and at least 2"
            )
    return None


def _choice(key: str, settings: Settings) -> str | None:
    """The requirements that the declaration of the choice states, in every type of layers."""
    for name, position in _types(settings).items():
        reason = position.refusal(key, settings.model.seq_length, settings.model.of_type(name).head_dim)
        if reason is not None:
            return reason if name == GLOBAL else f"layers of type {name}: {reason}"
    return None


_KEYS_SEEN = ("sliding_window_width", "attention_chunk_size", "relative_positions")
"""Each of them says which keys a query sees, or at which distance."""


def _keys_seen(key: str, settings: Settings) -> str | None:
    for position in _types(settings).values():
        if getattr(position, key) is None:
            continue
        for other in _KEYS_SEEN[_KEYS_SEEN.index(key) + 1 :]:
            if getattr(position, other) is not None:
                return f"contradicts {other}: both say which keys a query sees; set one of them to null"
        if position.embedding.by_query:
            return (
                f"not available with pos_emb {position.pos_emb}, whose bias counts the tokens of the document: those"
                " that a query does not see are not kept; set it to null"
            )
    return None


def _forgetting_gate(settings: Settings) -> str | None:
    if not any(position.gate and position.sink_logits for position in _types(settings).values()):
        return None
    return (
        "not available with sink_logits: kernels know scores with gates up to a number for each row, which softmax"
        " cancels and the score of a sink does not have; set one of the two to null"
    )


def _operand_kernel(settings: Settings) -> str | None:
    rotary = [position for position in _types(settings).values() if position.embedding.rotary]
    if settings.position.operand_kernel != "triton":
        return None
    if not rotary:
        return f"triton needs rotary positions, and pos_emb is {settings.position.pos_emb}; set torch"
    for position in rotary:
        if position.extension.learned:
            return f"triton has no gradient for learned frequencies (rope_type {position.extension.name}); set torch"
        if position.scaling.name != "none" and position.rotary_pct < 1.0:
            return "triton does not support logit_scaling with partial rotation (rotary_pct below 1); set torch"
    return None


def _loss_kernel(settings: Settings) -> str | None:
    unused = settings.model.loss_kernel == "triton" and settings.model.loss_chunk_size == 0
    return "triton takes a chunk of tokens at a time; set loss_chunk_size to auto" if unused else None


def _buckets(settings: Settings) -> str | None:
    furthest, exact = settings.position.rpe_max_distance, settings.position.rpe_num_buckets // 2
    return f"{furthest} must exceed {exact}, the number of buckets of a single distance" if furthest <= exact else None


# Optimizer, batch and precision


def _learning_rate(key: str, settings: Settings) -> str | None:
    peak, rate = settings.optimizer.lr, getattr(settings.schedule, key)
    return f"{rate} exceeds the learning rate {peak}" if peak is not None and rate > peak else None


def _wsd_decay(settings: Settings) -> str | None:
    schedule = settings.schedule
    if schedule.lr_wsd_decay_iters is None or (schedule.train_iters is None and schedule.lr_decay_iters is None):
        return None
    steps, stable = schedule.lr_wsd_decay_iters, int(schedule.decay_iters * (1 - schedule.warmup))
    return f"{steps} exceeds the {stable} steps between the warm-up and the horizon" if steps > stable else None


def _train_epochs(settings: Settings) -> str | None:
    schedule, data = settings.schedule, settings.data
    if schedule.train_epochs is None:
        return None
    if schedule.train_iters is not None or schedule.stages is not None:
        return f"contradicts {'stages' if schedule.stages else 'train_iters'}; set only one of the two"
    if data.synthetic is not None or (data.data_path is None and data.train_data_paths is None):
        return "needs data_path or train_data_paths, whose samples it counts; set train_iters instead"
    if data.weight_by_num_documents or len(set(data.train_data_weights or ())) > 1:
        return "reads every shard equally often, so weights contradict it; leave them out or set train_iters"
    if data.pack_impl != "packed":
        return f"not available with pack_impl {data.pack_impl}, as in GPT-NeoX; set train_iters"
    return None


def _trainable_weights(settings: Settings) -> str | None:
    parts = settings.optimizer.trainable or []
    learned = any(
        kind.embedding.weights or kind.extension.learned or kind.scaling.learned or kind.sink_logits or kind.gate
        for kind in _types(settings).values()
    )
    if "output_head" in parts and not settings.model.no_weight_tying:
        return "output_head is tied to the embedding (no_weight_tying is false); use embedding"
    if "norms" in parts and settings.model.norm == "non_parametric_layernorm":
        return "norms have no weights with norm non_parametric_layernorm; leave norms out"
    if "positions" in parts and not learned:
        return "positions have no weights with this pos_emb and rope_scaling; leave positions out"
    return None


def _batch(settings: Settings) -> str | None:
    sizes = settings.batch
    micro, steps = sizes.train_micro_batch_size_per_gpu or 1, sizes.gradient_accumulation_steps or 1
    if sizes.train_batch_size is None or sizes.train_batch_size % (micro * steps) == 0:
        return None
    return f"{sizes.train_batch_size} is not a multiple of micro-batch {micro} x accumulation {steps}"


def _precision(settings: Settings) -> str | None:
    dtypes = sorted(settings.precision.requested)
    if len(dtypes) <= 1:
        return None
    return f"{' and '.join(dtypes)} are both enabled by precision, fp16 and bf16; keep one and set the others to null"


# Parallelism


def _zero_stage(settings: Settings) -> str | None:
    stage = (settings.parallel.zero_optimization or {}).get("stage", 0)
    valid = isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3
    return None if valid else f"stage {shown(stage)} is not one of 0 | 1 | 2 | 3"


def _zero_reduce_scatter(settings: Settings) -> str | None:
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
        return f"{keys.pipe_parallel_size} stages need at least as many blocks, but num_layers is {layers}; lower it"
    if (keys.zero_optimization or {}).get("stage", 0) in (2, 3):
        return (
            "DeepSpeed's pipelines support only ZeRO stages 0 and 1: stages 2 and 3 partition gradients after every"
            " micro-batch, while several are in flight; set zero_optimization.stage to 0 or 1"
        )
    if keys.model_parallel_size > 1:
        return (
            "not available with model_parallel_size: DeepSpeed's tensor parallelism (AutoTP) has no pipeline stages;"
            " set model_parallel_size 1 or pipe_parallel_size 0"
        )
    if keys.sequence_parallel_size > 1:
        return (
            "DeepSpeed's pipelines have no axis for sequence parallelism in their process grid; set"
            " sequence_parallel_size 1 or pipe_parallel_size 0"
        )
    return None


def _gradient_dtype(settings: Settings) -> str | None:
    both = settings.parallel.accumulates_in_fp32 and settings.parallel.pipe_parallel_size > 1
    if not both or settings.precision.dtype != "bf16":
        return None
    return (
        "data_types.grad_accum_dtype fp32 is not supported with pipe_parallel_size in bfloat16: DeepSpeed's pipelines"
        " sum gradients with an optimizer that checkpoints do not support; leave it out"
    )


def _divides(key: str, settings: Settings) -> str | None:
    model, ranks = settings.model, getattr(settings.parallel, key)
    sizes = {"num_attention_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads}
    if key == "model_parallel_size":
        sizes["intermediate_size"] = model.ffn_hidden_size
    else:
        sizes["seq_length"] = model.seq_length
    uneven = [f"{name} {value}" for name, value in sizes.items() if value % ranks]
    return f"{ranks} does not divide {' and '.join(uneven)}; all ranks need equal shares" if uneven else None


def _tensor_and_sequence(settings: Settings) -> str | None:
    if settings.parallel.model_parallel_size == 1 or settings.parallel.sequence_parallel_size == 1:
        return None
    return (
        "not available with sequence_parallel_size: DeepSpeed's tensor parallelism (AutoTP) uses a process grid of data"
        " and tensor ranks only; set one of the two to 1"
    )


def compile_refusal(settings: Settings) -> str | None:
    """Return the key for which the blocks of a run cannot be compiled, and why, or None."""
    model, parallel = settings.model, settings.parallel
    for key in ("model_parallel_size", "sequence_parallel_size"):
        if getattr(parallel, key) > 1:
            return f"{key}: DeepSpeed's collectives within the blocks cannot be compiled"
    if parallel.stage == 3:
        return "zero_optimization: ZeRO 3 gathers weights within the blocks"
    if model.checkpoint_activations and model.checkpoint_policy == "selective":
        return "checkpoint_policy: selective chooses among operations, which compiled blocks do not show"
    return None


def _torch_compile(settings: Settings) -> str | None:
    reason = compile_refusal(settings) if settings.model.torch_compile is True else None
    return None if reason is None else f"not available with {reason}; set torch_compile=false"


def _selective(settings: Settings) -> str | None:
    """DeepSpeed's own linear layers add biases and sums over ranks in place to the products that would be kept."""
    model, parallel = settings.model, settings.parallel
    if not model.checkpoint_activations or model.checkpoint_policy != "selective":
        return None
    if parallel.model_parallel_size > 1:
        return "selective cannot keep the products of tensor-parallel layers; set full, or model_parallel_size 1"
    if parallel.stage == 3 and (parallel.zero_optimization or {}).get("memory_efficient_linear", True):
        return (
            "selective cannot keep the products of ZeRO 3's linear layers; set full, or"
            " zero_optimization.memory_efficient_linear=false"
        )
    return None


# Checkpoints, faults and logging


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
    return "contradicts auto_resume, which resumes from the latest step; leave one of them out" if ignored else None


def _no_load_optim(settings: Settings) -> str | None:
    keys = settings.checkpoint
    if not (keys.no_load_optim and keys.load and keys.save):
        return None
    same = os.path.realpath(keys.load) == os.path.realpath(keys.save)
    problem = "load is the folder of save, so every restart would begin the optimizer anew; set another save"
    return problem if same else None


def _profiled_steps(settings: Settings) -> str | None:
    keys = settings.logging
    empty = keys.profile_step_stop <= keys.profile_step_start and keys.profile
    return f"{keys.profile_step_stop} is not after profile_step_start {keys.profile_step_start}" if empty else None


def _eval_windows(settings: Settings) -> str | None:
    keys, length, rows = settings.logging, settings.model.seq_length, settings.model.max_position_embeddings
    ranks = settings.parallel.sequence_parallel_size
    for window in keys.eval_windows or ():
        tokens = window_tokens(window, length)
        if tokens is None:
            return f"{shown(window)} is neither a number of tokens above 1 nor a multiple of seq_length such as 4L"
        if settings.position.pos_emb == "learned" and tokens + settings.model.opt_pos_emb_offset > rows:
            return f"{window}: pos_emb learned has vectors for {rows} positions (max_position_embeddings)"
        if tokens % ranks:
            return f"{window}: {tokens} tokens are not a multiple of sequence_parallel_size {ranks}"
    unused = keys.eval_windows and not keys.eval_iters
    return "has no effect with eval_iters 0; raise eval_iters or leave it out" if unused else None


# Data

SETS = ("train", "valid", "test")


def _data_path(settings: Settings) -> str | None:
    data = settings.data
    lists = [name for name in SETS if getattr(data, f"{name}_data_paths")]
    both = data.data_path is not None and lists
    return f"contradicts {lists[0]}_data_paths; set only one of the two" if both else None


def _paths(name: str, settings: Settings) -> str | None:
    given = [other for other in SETS if other != name and getattr(settings.data, f"{other}_data_paths")]
    missing = getattr(settings.data, f"{name}_data_paths") is None and given
    return f"missing, but {given[0]}_data_paths is set; set all three or none" if missing else None


_FOR_EACH_PATH = {
    "{}_data_weights": ("weights", "give one for each"),
    "{}_label_data_paths": ("labels", "give one for each, or null"),
}
"""Lists with an entry for each data path of a set: what they hold, and the remedy for another number."""


def _one_for_each(name: str, pattern: str, settings: Settings) -> str | None:
    given, paths = (getattr(settings.data, key.format(name)) for key in (pattern, "{}_data_paths"))
    held, remedy = _FOR_EACH_PATH[pattern]
    unequal = given is not None and len(given) != len(paths or [])
    return f"{len(given)} {held} for {len(paths or [])} {name}_data_paths; {remedy}" if unequal else None


def _split(settings: Settings) -> str | None:
    split = settings.data.split
    return None if split_shares(split) else f"{shown(split)} is not a list of up to three numbers such as `969, 30, 1`"


def _pack_impl(settings: Settings) -> str | None:
    if settings.data.pack_impl == "packed" or not settings.logging.eval_windows:
        return None
    return "not available with eval_windows, which reads the ends of full samples; set it to packed"


def _positions(settings: Settings) -> str | None:
    data, embedding = settings.data, settings.position.embedding
    if not data.reset_position_ids or data.reset_attention_mask or not embedding.by_distance:
        return None
    return f"with pos_emb {embedding.name}, attention must not cross documents; set reset_attention_mask=true"


def _synthetic(settings: Settings) -> str | None:
    task, data = settings.data.synthetic, settings.data
    if task is None:
        return None
    if task.task in ("recall", "multi_query") and task.facts > task.keys:
        return f"{task.facts} facts need as many different keys, and there are {task.keys}"
    if not task.text and (data.data_path is not None or data.train_data_paths is not None):
        return "reads no data paths, and some are set; remove them, or set synthetic.text=true to fill with their text"
    packed = [name for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss") if getattr(data, name)]
    if data.pack_impl != "packed":
        return "not available with pack_impl: the samples have no documents; set it to packed"
    if packed:
        return f"not available with {packed[0]}: the samples have no documents; set it to false"
    if settings.logging.eval_windows:
        return "not available with eval_windows, which reads documents; leave it out, or use megatron-coca evaluate"
    return None


def _training_positions(settings: Settings) -> str | None:
    given, position, length = settings.general.training_positions, settings.position, settings.model.seq_length
    if given is None:
        return None
    largest = window_tokens(given.max, length)
    if largest is None or largest < length:
        return f"max {given.max!r} is neither a number of at least seq_length {length} nor a multiple such as 16L"
    types = _types(settings).values()
    if not any(kind.embedding.rotary or not kind.embedding.by_distance for kind in types):
        return f"no effect with pos_emb {position.pos_emb}, which reads the order of tokens and no positions; remove it"
    if position.embedding.weights == "table" and largest > settings.model.max_position_embeddings:
        return f"max {given.max} exceeds max_position_embeddings {settings.model.max_position_embeddings}; raise that"
    gaps, choices = given.type != "shifted", [choice for kind in types for choice, _ in kind.choices()]
    counting = [choice for choice in choices if choice.trained and choice.key in _COUNTING]
    counting += [choice for choice in choices if gaps and getattr(choice, "counts_tokens", False)]
    if counting:
        counted = f"{counting[0].key} {counting[0].name}"
        return f"not available with {counted}, which reads the number of tokens from the positions; remove one of them"
    if given.type == "stretched" and largest % length:
        return f"max {given.max} must be a multiple of seq_length {length} with stretched positions"
    learned = [kind.rope_scaling.max_factor for kind in types if kind.rope_scaling and kind.extension.learned]
    if learned and (given.type != "stretched" or largest > max(learned) * length):
        return f"rope_type clex is trained with {{type: stretched, max: {max(learned)}L}}, the default; remove it"
    return None


_COUNTING = ("relative_positions", "logit_scaling")
"""Keys whose trained choices take a position for the number of tokens before it; gates read the text alone."""
_HEADS = ("num_attention_heads", "num_kv_heads", "hidden_size", "kv_channels")
_LAYERS = ("attention_config", "layer_types", "num_layers")
_ROTATED = ("rotary_pct", "hidden_size", "num_attention_heads", "kv_channels")
_CHOICE_KEYS = (*_LAYERS, "pos_emb", *SELECTORS, "seq_length", *_ROTATED)
_DATA_PATHS = tuple(f"{name}_data_paths" for name in SETS)

CHECKS: tuple[Check, ...] = (
    Check(("num_attention_heads", "hidden_size", "kv_channels"), _heads),
    Check(("num_kv_heads", "num_attention_heads"), _kv_heads),
    Check(("use_qk_layernorm", "num_kv_heads", "num_attention_heads", "model_parallel_size"), _qk_layernorm),
    Check(("qk_norm", "use_qk_layernorm", "model_parallel_size"), _qk_norm),
    Check(("zero_centered_norms", "norm"), _zero_centered),
    Check(("final_logit_softcapping", "loss_kernel"), _softcapping),
    Check(("expansion_factor", "intermediate_size"), _inner_width),
    Check(("intermediate_size", "expansion_factor", "hidden_size", "activation", "mlp_multiple_of"), _inner_features),
    Check(("seq_length", "max_position_embeddings", "pos_emb"), _length),
    Check((*_ROTATED, "pos_emb", *_LAYERS), _rotary_dims),
    *(Check((key, *_CHOICE_KEYS), partial(_choice, key)) for key in SELECTORS),
    Check(("loss_kernel", "loss_chunk_size"), _loss_kernel),
    Check(("operand_kernel", "pos_emb", "rope_scaling", "logit_scaling", "rotary_pct", *_LAYERS), _operand_kernel),
    Check(("rpe_max_distance", "rpe_num_buckets"), _buckets),
    Check(("attention_config", "num_layers", "layer_types"), _attention_types),
    Check(("layer_types", "attention_config", "num_layers", "pos_emb"), _layer_types),
    Check(
        (
            *("gau_key_width", "gau_width", "hidden_size", *_LAYERS, "pos_emb", "sink_logits", "logit_scaling"),
            *("forgetting_gate", "use_qk_layernorm", "qk_norm", "attention_dropout", "trainable"),
            *("model_parallel_size", "sequence_parallel_size", "pipe_parallel_size"),
        ),
        _gau,
    ),
    *(
        Check((key, *(other for other in _KEYS_SEEN if other != key), "pos_emb", *_LAYERS), partial(_keys_seen, key))
        for key in _KEYS_SEEN
    ),
    Check(("forgetting_gate", "sink_logits", *_LAYERS), _forgetting_gate),
    Check(
        ("lr_wsd_decay_iters", "train_iters", "lr_decay_iters", "lr_decay_fraction", "warmup"),
        _wsd_decay,
    ),
    *(Check((key, "optimizer.params.lr"), partial(_learning_rate, key)) for key in ("min_lr", "lr_warmup_init")),
    Check(
        ("trainable", "no_weight_tying", "norm", "pos_emb", "rope_scaling", "forgetting_gate", *_LAYERS),
        _trainable_weights,
    ),
    Check(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), _batch),
    Check(("precision", "fp16", "bf16"), _precision),
    Check(("zero_optimization",), _zero_stage),
    Check(
        ("pipe_parallel_size", "num_layers", "zero_optimization", "model_parallel_size", "sequence_parallel_size"),
        _pipeline,
    ),
    Check(("deepspeed_extra_args", "pipe_parallel_size", "precision", "fp16", "bf16"), _gradient_dtype),
    Check(
        ("model_parallel_size", *_HEADS, "intermediate_size", "expansion_factor"),
        partial(_divides, "model_parallel_size"),
    ),
    Check(("sequence_parallel_size", *_HEADS, "seq_length"), partial(_divides, "sequence_parallel_size")),
    Check(("model_parallel_size", "sequence_parallel_size"), _tensor_and_sequence),
    Check(("zero_optimization", "sequence_parallel_size"), _zero_reduce_scatter),
    Check(
        (
            *("torch_compile", "model_parallel_size", "sequence_parallel_size", "zero_optimization"),
            *("checkpoint_activations", "checkpoint_policy"),
        ),
        _torch_compile,
    ),
    Check(("checkpoint_policy", "checkpoint_activations", "zero_optimization", "model_parallel_size"), _selective),
    Check(("checkpoint_factor", "checkpoint_scale"), _checkpoint_factor),
    *(Check((key, "load"), partial(_needs_load, key)) for key in ("finetune", "iteration", "no_load_optim")),
    Check(("no_load_optim", "load", "save"), _no_load_optim),
    Check(("iteration", "load", "save", "auto_resume"), _iteration),
    Check(("profile_step_stop", "profile_step_start"), _profiled_steps),
    Check(
        ("eval_windows", "seq_length", "max_position_embeddings", "pos_emb", "sequence_parallel_size", "eval_iters"),
        _eval_windows,
    ),
    Check(
        (
            *("train_epochs", "train_iters", "stages", "synthetic", "data_path", "train_data_paths"),
            *("train_data_weights", "weight_by_num_documents", "pack_impl"),
        ),
        _train_epochs,
    ),
    Check(("data_path", *_DATA_PATHS), _data_path),
    *(Check((f"{name}_data_paths", *_DATA_PATHS), partial(_paths, name)) for name in SETS),
    *(
        Check((pattern.format(name), *_DATA_PATHS), partial(_one_for_each, name, pattern))
        for pattern in _FOR_EACH_PATH
        for name in SETS
    ),
    Check(("pack_impl", "eval_windows"), _pack_impl),
    Check(("split",), _split),
    Check(("reset_position_ids", "reset_attention_mask", "pos_emb"), _positions),
    Check(
        (
            "synthetic",
            "data_path",
            "train_data_paths",
            "reset_attention_mask",
            "reset_position_ids",
            "eod_mask_loss",
            "eval_windows",
        ),
        _synthetic,
    ),
    Check(
        ("training_positions", "seq_length", "max_position_embeddings", "pos_emb", *SELECTORS, *_LAYERS),
        _training_positions,
    ),
)


def find_faults(settings: Settings, unreliable: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield key and message of every failing check that reads none of the `unreliable` keys."""
    for check in CHECKS:
        message = check.find(settings) if unreliable.isdisjoint(check.keys) else None
        if message is not None:
            yield check.keys[0], message
