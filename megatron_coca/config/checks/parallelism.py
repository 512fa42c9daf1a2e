"""Checks of ZeRO, pipeline stages, tensor and sequence parallelism, and of the features that they do not support."""

from functools import partial

from megatron_coca.config.checks.layers import types_of
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.schema import Settings


def _sequence_key(settings: Settings) -> str:
    """Return the key that divides sequences among ranks."""
    return "sequence_parallel_size" if settings.parallel.sequence_parallel_size > 1 else "context_parallel_size"


def _zero_reduce_scatter(settings: Settings) -> str | None:
    keys = settings.parallel
    given = keys.zero_optimization or {}
    if keys.sequence_ranks == 1 or keys.stage < 3 or given.get("reduce_scatter", True):
        return None
    return (
        f"with {_sequence_key(settings)}, stage 3 needs reduce_scatter: without it DeepSpeed sums some gradients over"
        " the ranks of a sequence and averages others; remove reduce_scatter"
    )


COMMUNICATION = {
    *("stage", "reduce_bucket_size", "allgather_partitions", "allgather_bucket_size", "overlap_comm"),
    *("reduce_scatter", "contiguous_gradients"),
}
"""Keys of `zero_optimization` that the native engine accepts."""


def _native(settings: Settings) -> str | None:
    """Return what the native engine does not support, and what to change."""
    keys, dtype = settings.parallel, settings.precision.dtype
    if keys.engine != "native":
        return None
    if dtype == "fp16":
        return "native has no loss scaling for fp16; set precision=bfloat16, or engine=deepspeed"
    if keys.stage > 1:
        return f"native has no ZeRO {keys.stage}; set zero_optimization.stage to 0 or 1, or engine=deepspeed"
    divided = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size", "context_parallel_size")
    if sizes := [f"{name} {getattr(keys, name)}" for name in divided if getattr(keys, name) > 1]:
        return f"native only divides the samples over ranks, not {' or '.join(sizes)}; set it to 1, or engine=deepspeed"
    if others := sorted((keys.zero_optimization or {}).keys() - COMMUNICATION):
        return f"native does not support zero_optimization: {', '.join(others)}; remove them, or set engine=deepspeed"
    extra = dict(keys.deepspeed_extra_args or {})
    if keys.accumulates_in_fp32 and extra["data_types"].keys() == {"grad_accum_dtype"}:
        del extra["data_types"]
    if extra:
        names = ", ".join(sorted(extra))
        return f"native passes no keys to DeepSpeed ({names}); remove them, or set engine=deepspeed"
    return None


_HOST = "the host reads {} of every batch"
_RECOMPUTED = "recomputation restores the random state on the host"


def _cuda_graphs(settings: Settings) -> str | None:
    """Return why the passes cannot be captured. Each micro-batch must have the same work and must not need the host."""
    if not settings.parallel.cuda_graphs:
        return None
    if settings.parallel.engine != "native":
        return "only the native engine captures CUDA graphs; set engine=native, or cuda_graphs=false"
    reason = _reason_against_graphs(settings)
    return None if reason is None else f"not supported with {reason}; set cuda_graphs=false"


def _reason_against_graphs(settings: Settings) -> str | None:
    """Return `key: reason` for the key that prevents the capture of the passes in a CUDA graph, or None."""
    model, types, lora = settings.model, types_of(settings).values(), settings.optimizer.lora
    of_adapters = 0.0 if lora is None else lora.dropout
    for key in ("reset_attention_mask", "reset_position_ids"):
        if getattr(settings.data, key):
            return f"{key}: {_HOST.format('the documents')}"
    if settings.general.training_positions is not None:
        return f"training_positions: {_HOST.format('the positions')}"
    if any(kind.extension.learned for kind in types):
        return f"rope_scaling: it is trained with stretched positions, and {_HOST.format('the positions')}"
    if model.checkpoint_activations and (model.hidden_dropout or model.attention_dropout or of_adapters):
        return f"checkpoint_activations and dropout: {_RECOMPUTED}"
    if model.attention_dropout and model.attn_logit_softcapping is not None:
        return f"attn_logit_softcapping and attention_dropout: {_RECOMPUTED}"
    if model.attention_dropout and any(kind.gate or kind.embedding.by_query for kind in types):
        return f"attention_dropout: with forgetting gates and FIRE, {_RECOMPUTED}"
    return None


def _pipeline(settings: Settings) -> str | None:
    keys, layers = settings.parallel, settings.model.num_layers
    if keys.pipe_parallel_size <= 1:
        return None
    if keys.pipe_parallel_size > layers:
        return (
            f"{keys.pipe_parallel_size} stages need at least one block each, but num_layers is {layers}; use fewer"
            " stages"
        )
    if keys.stage in (2, 3):
        return (
            "DeepSpeed's pipelines support only ZeRO stages 0 and 1: stages 2 and 3 partition gradients after every"
            " micro-batch, while several are in flight; set zero_optimization.stage to 0 or 1"
        )
    if keys.model_parallel_size > 1:
        return (
            "not supported with model_parallel_size: DeepSpeed's tensor parallelism (AutoTP) has no pipeline stages;"
            " set model_parallel_size=1 or pipe_parallel_size=0"
        )
    if keys.sequence_ranks > 1:
        return (
            f"DeepSpeed's pipelines have no sequence axis in their process grid; set {_sequence_key(settings)}=1 or"
            " pipe_parallel_size=0"
        )
    return None


def _gradient_dtype(settings: Settings) -> str | None:
    both = settings.parallel.accumulates_in_fp32 and settings.parallel.pipe_parallel_size > 1
    if not both or settings.precision.dtype != "bf16":
        return None
    return (
        "data_types.grad_accum_dtype fp32 is not supported with pipe_parallel_size in bfloat16: checkpoints do not"
        " support the optimizer that DeepSpeed's pipelines use in this case; remove it"
    )


def _divides(key: str, settings: Settings) -> str | None:
    model, ranks = settings.model, getattr(settings.parallel, key)
    sizes = {"num_attention_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads}
    sizes |= {
        f"head_shapes.{name}.num_kv_heads": shape.num_kv_heads
        for name, shape in model.head_shapes.items()
        if shape.num_kv_heads is not None
    }
    if key == "model_parallel_size":
        sizes["intermediate_size"] = model.ffn_hidden_size
    else:
        sizes["seq_length"] = model.seq_length
    uneven = [f"{name} {value}" for name, value in sizes.items() if value % ranks]
    return f"{ranks} does not divide {' and '.join(uneven)}; all ranks need equal shares" if uneven else None


def _tensor_and_sequence(settings: Settings) -> str | None:
    if settings.parallel.model_parallel_size == 1 or settings.parallel.sequence_ranks == 1:
        return None
    return (
        f"not supported with {_sequence_key(settings)}: the process grid of DeepSpeed's tensor parallelism (AutoTP) has"
        " only data and tensor ranks; set one of the two to 1"
    )


def _ring(settings: Settings) -> str | None:
    """Return what ring attention does not support, and what to change."""
    model, ranks, heads = (
        settings.model,
        settings.parallel.context_parallel_size,
        settings.parallel.sequence_parallel_size,
    )
    if ranks == 1:
        return None
    if problem := uneven_chunks(model.seq_length, ranks, heads):
        return f"{ranks} ranks cannot divide seq_length: {problem}"
    if model.attention_dropout > 0:
        return "ranks that divide a sequence do not share dropout masks of attention weights; set attention_dropout=0"
    return None


def uneven_chunks(tokens: int, ranks: int, heads: int) -> str | None:
    """Return why `ranks` ranks of a ring, times `heads` ranks that divide the heads, cannot divide `tokens` tokens, or
    None. Each rank of a ring has two chunks of tokens.
    """
    if tokens < 2 * ranks:
        return f"two chunks per rank need {2 * ranks} tokens, not {tokens}; use longer sequences or fewer ranks"
    if heads > 1 and tokens % (2 * ranks * heads):
        return (
            f"with sequence_parallel_size {heads}, {tokens} tokens must be a multiple of {2 * ranks * heads} (two"
            " chunks per rank, in equal parts); change the length"
        )
    return None


def reason_against_compiling(settings: Settings) -> str | None:
    """Return `key: reason` for the key that prevents the compilation of the blocks, or None."""
    model, parallel = settings.model, settings.parallel
    for key in ("model_parallel_size", "sequence_parallel_size"):
        if getattr(parallel, key) > 1:
            return f"{key}: DeepSpeed's collectives within the blocks cannot be compiled"
    if parallel.context_parallel_size > 1:
        return "context_parallel_size: the messages between ranks within the blocks cannot be compiled"
    if model.moe_num_experts > 1:
        return "moe_num_experts: the number of tokens of an expert changes with every batch"
    if parallel.stage == 3:
        return "zero_optimization: ZeRO 3 gathers weights within the blocks"
    if model.checkpoint_activations and model.checkpoint_policy == "selective":
        return "checkpoint_policy: selective needs access to single operations, which compiled blocks do not expose"
    return None


def _torch_compile(settings: Settings) -> str | None:
    reason = reason_against_compiling(settings) if settings.model.torch_compile is True else None
    return None if reason is None else f"not supported with {reason}; set torch_compile=false"


def _selective(settings: Settings) -> str | None:
    """Check that selective recomputation is not used with DeepSpeed's own linear layers. They add biases and partial
    sums in place to the matrix products that recomputation keeps.
    """
    model, parallel = settings.model, settings.parallel
    if not model.checkpoint_activations or model.checkpoint_policy != "selective":
        return None
    if parallel.model_parallel_size > 1:
        return (
            "selective cannot store the matrix products of tensor-parallel layers; set checkpoint_policy=full or"
            " model_parallel_size=1"
        )
    if parallel.stage == 3 and (parallel.zero_optimization or {}).get("memory_efficient_linear", True):
        return (
            "selective cannot store the matrix products of ZeRO 3's linear layers; set checkpoint_policy=full or"
            " zero_optimization.memory_efficient_linear=false"
        )
    return None


CHECKS = (
    Check("engine", _native),
    Check("cuda_graphs", _cuda_graphs),
    Check("pipe_parallel_size", _pipeline),
    Check("deepspeed_extra_args", _gradient_dtype),
    *(Check(key, partial(_divides, key)) for key in ("model_parallel_size", "sequence_parallel_size")),
    Check("model_parallel_size", _tensor_and_sequence),
    Check("context_parallel_size", _ring),
    Check("zero_optimization", _zero_reduce_scatter),
    Check("torch_compile", _torch_compile),
    Check("checkpoint_policy", _selective),
)
