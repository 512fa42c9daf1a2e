"""Checks of the network: widths, heads, norms, the loss, and gated attention units."""

from megatron_coca.config.base import shown
from megatron_coca.config.checks.layers import types_of
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.model import GAU, GLOBAL
from megatron_coca.config.optimization import QUERY_KEY_VALUE
from megatron_coca.config.schema import Settings


def _heads(settings: Settings) -> str | None:
    width, heads, latent = settings.model.hidden_size, settings.model.num_attention_heads, settings.model.kv_lora_rank
    given = settings.model.kv_channels if latent is None else settings.model.qk_nope_head_dim
    if given is not None or width % heads == 0:
        return None
    own = "kv_channels" if latent is None else "qk_nope_head_dim"
    return f"{heads} heads do not divide hidden_size {width}; change one of them, or set {own}"


def _kv_heads(settings: Settings) -> str | None:
    kv_heads, heads = settings.model.num_kv_heads, settings.model.num_attention_heads
    uneven = f"{kv_heads} key/value heads do not divide num_attention_heads {heads}; change one of them"
    return uneven if heads % kv_heads else None


def _head_shapes(settings: Settings) -> str | None:
    model = settings.model
    if reserved := sorted({GLOBAL, "flash", GAU} & model.head_shapes.keys()):
        return f"{reserved[0]} is reserved; set the model's own keys, and name another layer type here"
    if unused := sorted(model.head_shapes.keys() - types_of(settings).keys()):
        return f"no layer has the type {shown(unused[0])}; name it in attention_config or remove it here"
    heads = model.num_attention_heads
    for name in model.head_shapes:
        keys = model.with_heads(name).num_kv_heads
        if heads % keys:
            return f"{keys} key heads of type {name} do not divide num_attention_heads {heads}; change one of them"
    return None


_OVER_RANKS = (
    "not supported with model_parallel_size: the norm spans all heads, which are on different ranks; set"
    " model_parallel_size=1"
)


def _qk_layernorm(settings: Settings) -> str | None:
    model = settings.model
    if not model.use_qk_layernorm:
        return None
    if any(model.with_heads(name).num_kv_heads != model.num_attention_heads for name in types_of(settings)):
        return (
            "GPT-NeoX's norm has a weight for every query head, but num_kv_heads differs from num_attention_heads;"
            " make them equal, or set qk_norm=head instead"
        )
    return _OVER_RANKS if settings.parallel.model_parallel_size > 1 else None


def _qk_norm(settings: Settings) -> str | None:
    model = settings.model
    if model.qk_norm is not None and model.use_qk_layernorm:
        return "contradicts use_qk_layernorm, GPT-NeoX's norm of queries and keys; set only one of the two"
    if settings.parallel.model_parallel_size == 1:
        return None
    if model.qk_norm == "layernorm_by_head":
        return (
            "layernorm_by_head is not supported with model_parallel_size: it has weights for every head, which are on"
            " different ranks; set model_parallel_size=1"
        )
    return f"projection is {_OVER_RANKS}" if model.qk_norm == "projection" else None


def _norm_position(settings: Settings) -> str | None:
    unclear = settings.model.norm_position == "residual" and settings.model.gpt_j_residual
    return "residual is not supported with gpt_j_residual; set gpt_j_residual=false" if unclear else None


def _first_norm(settings: Settings) -> str | None:
    absent = settings.model.skip_first_norm and settings.model.norm_position not in ("pre", "sandwich")
    return "the layers have no norms on their inputs; set skip_first_norm=false" if absent else None


def _output_transform(settings: Settings) -> str | None:
    model = settings.model
    if not model.use_output_transform:
        return None
    if model.embedding_width is not None:
        return "not supported with embedding_width; remove one of the two"
    return "not supported with activation xielu; set another activation" if model.activation == "xielu" else None


def _zero_centered(settings: Settings) -> str | None:
    other = settings.model.zero_centered_norms and settings.model.norm not in ("rmsnorm", "layernorm")
    return f"needs a norm with weights, but norm is {settings.model.norm}; set norm=rmsnorm" if other else None


def _norm_after_rotation(settings: Settings) -> str | None:
    """Check the norm of rotated queries and keys, because this norm removes every factor that the rotation applies."""
    if not settings.model.qk_norm_after_rotation:
        return None
    if settings.model.qk_norm != "head":
        return f"needs qk_norm head, but qk_norm is {settings.model.qk_norm}; set qk_norm=head"
    for position in types_of(settings).values():
        if position.pos_emb not in ("rotary", "none"):
            return f"not supported with pos_emb {position.pos_emb}; set pos_emb=rotary, or qk_norm_after_rotation=false"
        if position.relative_positions is not None or position.scaling.name != "none":
            return "not supported with relative_positions or logit_scaling; remove one of the two"
    return None


def _unweighted_norm(settings: Settings) -> str | None:
    if not settings.model.unweighted_qk_norm:
        return None
    if settings.model.qk_norm is not None or settings.model.use_qk_layernorm:
        return "contradicts qk_norm and use_qk_layernorm; set only one of the three"
    others = (kind.pos_emb for kind in types_of(settings).values() if kind.pos_emb not in ("rotary", "none"))
    found = next(others, None)
    return f"not supported with pos_emb {found}; set pos_emb=rotary, or unweighted_qk_norm=false" if found else None


def _xielu(settings: Settings) -> str | None:
    split = settings.model.activation == "xielu" and settings.parallel.model_parallel_size > 1
    return "xielu is not supported with model_parallel_size; set model_parallel_size=1" if split else None


def _head_bias(settings: Settings) -> str | None:
    model = settings.model
    if not model.use_bias_in_output_head or model.final_logit_scale == 1:
        return None
    if model.use_mup:
        return "not supported with use_mup, which scales logits; set use_bias_in_output_head=false"
    return "not supported with final_logit_scale; set final_logit_scale=1"


def _softcapping(settings: Settings) -> str | None:
    model = settings.model
    unfused = model.final_logit_softcapping is not None and model.loss_kernel == "triton"
    return "not supported by loss_kernel triton; set loss_kernel=torch" if unfused else None


def _loss_kernel(settings: Settings) -> str | None:
    unused = settings.model.loss_kernel == "triton" and settings.model.loss_chunk_size == 0
    return "triton needs chunks of tokens, but loss_chunk_size is 0; set loss_chunk_size=auto" if unused else None


def _inner_width(settings: Settings) -> str | None:
    both = settings.model.intermediate_size is not None and settings.model.expansion_factor is not None
    return "contradicts intermediate_size; set only one of the two" if both else None


def _inner_features(settings: Settings) -> str | None:
    return (
        None
        if settings.model.ffn_hidden_size
        else "the inner width of the MLP is 0; raise intermediate_size or expansion_factor"
    )


def _attention_types(settings: Settings) -> str | None:
    try:
        named = settings.model.layer_names
    except ValueError as error:
        return str(error)
    absent = sorted(set(named) - {GLOBAL, GAU, *settings.position.layer_types})
    if not absent:
        return None
    return f"unknown attention type {absent[0]:.80}; use global, flash or gau, or define it in layer_types"


def _gau(settings: Settings) -> str | None:
    """Check gated attention units, if the model has any, because they do not support all other keys."""
    model, parallel, position = settings.model, settings.parallel, types_of(settings).get(GAU)
    if position is None:
        return None
    if model.gau_features % model.gau_key_width:
        return f"{model.gau_key_width} does not divide the {model.gau_features} value features; change it or gau_width"
    trained = [part for part in QUERY_KEY_VALUE if settings.optimizer.trains(part)]
    one_head = "they have a single head"
    unsupported = (
        ("sink_logits", position.sink_logits, one_head),
        (
            f"pos_emb {position.pos_emb}",
            position.embedding.biased,
            "its bias differs by head, but they have a single head",
        ),
        (f"logit_scaling {position.scaling.name}", position.scaling.learned, one_head),
        ("forgetting_gate", position.gate, one_head),
        ("use_qk_layernorm", model.use_qk_layernorm, "they have a scale and an offset for each feature instead"),
        ("qk_norm", model.qk_norm, "they have a scale and an offset for each feature instead"),
        ("unweighted_qk_norm", model.unweighted_qk_norm, "they have a scale and an offset for each feature instead"),
        ("value_norm", model.value_norm, "they have no norms of values"),
        ("values_from_keys", model.values_from_keys, "one projection computes queries and keys"),
        ("clip_qkv", model.clip_qkv, "their features are products with an activation"),
        ("attention_output_gate", model.attention_output_gate, "they multiply their output by a gate of their own"),
        ("attention_dropout", model.attention_dropout, one_head),
        ("model_parallel_size", parallel.model_parallel_size > 1, one_head),
        ("sequence_parallel_size", parallel.sequence_parallel_size > 1, one_head),
        ("pipe_parallel_size", parallel.pipe_parallel_size > 1, "pipeline stages assume that all blocks are alike"),
        (
            "trainable",
            len(trained) not in (0, len(QUERY_KEY_VALUE)),
            "one projection computes query, key and value",
        ),
    )
    found = next((f"{name}: {reason}" for name, given, reason in unsupported if given), None)
    return None if found is None else f"layers of type gau do not support {found}; remove one of the two"


CHECKS = (
    Check("num_attention_heads", _heads),
    Check("num_kv_heads", _kv_heads),
    Check("head_shapes", _head_shapes),
    Check("use_qk_layernorm", _qk_layernorm),
    Check("qk_norm", _qk_norm),
    Check("norm_position", _norm_position),
    Check("skip_first_norm", _first_norm),
    Check("use_output_transform", _output_transform),
    Check("zero_centered_norms", _zero_centered),
    Check("qk_norm_after_rotation", _norm_after_rotation),
    Check("unweighted_qk_norm", _unweighted_norm),
    Check("activation", _xielu),
    Check("use_bias_in_output_head", _head_bias),
    Check("final_logit_softcapping", _softcapping),
    Check("expansion_factor", _inner_width),
    Check("intermediate_size", _inner_features),
    Check("loss_kernel", _loss_kernel),
    Check("attention_config", _attention_types),
    Check("gau_key_width", _gau),
)
