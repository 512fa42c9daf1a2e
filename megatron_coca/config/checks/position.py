"""Checks of position methods: options, combinations, layer types and training positions."""

from functools import partial

from megatron_coca import methods
from megatron_coca.config.base import shown
from megatron_coca.config.checks.layers import types_of
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.data import window_tokens
from megatron_coca.config.model import GLOBAL
from megatron_coca.config.position import PositionKeys
from megatron_coca.config.schema import SELECTORS, Settings


def _length(settings: Settings) -> str | None:
    if settings.position.pos_emb != "learned":
        return None
    length, rows = settings.model.seq_length, settings.model.max_position_embeddings
    offset = settings.model.opt_pos_emb_offset
    if length + offset <= rows:
        return None
    if offset:
        longest = f"{length} + opt_pos_emb_offset {offset}"
        return f"{longest} exceeds max_position_embeddings {rows}; raise max_position_embeddings"
    return f"{length} exceeds max_position_embeddings {rows}; raise max_position_embeddings or leave it out"


def _layer_types(settings: Settings) -> str | None:
    reserved = sorted({GLOBAL, "flash"} & settings.position.layer_types.keys())
    if reserved:
        return f"{reserved[0]} is reserved for layers with the model's own keys; use another name"
    odd = [name for name in settings.position.layer_types if not name.isidentifier()]
    if odd:
        return f"{shown(odd[0])} is not a valid name; use letters, digits and underscores"
    unused = sorted(settings.position.layer_types.keys() - types_of(settings).keys())
    if unused:
        return f"no layer has the type {unused[0]}; name it in attention_config or remove it here"
    used = {settings.position.pos_emb, *(position.pos_emb for position in types_of(settings).values())}
    added = sorted(name for name in used if not methods.find("pos_emb", name).by_distance)
    if added and len(used) > 1:
        return (
            f"pos_emb {added[0]} adds vectors to the embedding, which all layers share; use the same pos_emb in every"
            " layer"
        )
    return None


def _rotary_dims(settings: Settings) -> str | None:
    for name, position in types_of(settings).items():
        head_dim = settings.model.of_type(name).head_dim
        dims = int(head_dim * position.rotary_pct)
        if position.embedding.rotary and (dims < 2 or dims % 2):
            latent = settings.model.kv_lora_rank is not None
            width = "qk_rope_head_dim" if latent else "hidden_size / num_attention_heads"
            return (
                f"{position.rotary_pct} of {head_dim} features per head ({width}) is {dims};"
                " the number of rotated features must be even and at least 2"
            )
    return None


def _base(settings: Settings) -> str | None:
    default = PositionKeys.model_fields["rotary_emb_base"].default
    for position in types_of(settings).values():
        if position.frequencies is not None and position.rotary_emb_base != default:
            return (
                f"{position.rotary_emb_base:g} has no effect with rotary_frequencies {position.frequencies.name}, which"
                f" sets all frequencies; leave it out or set {default:g}"
            )
    return None


def _choice(key: str, settings: Settings) -> str | None:
    """Check the declared requirements of the choice in every layer type."""
    for name, position in types_of(settings).items():
        reason = position.reason_against(key, settings.model.seq_length, settings.model.of_type(name).head_dim)
        if reason is not None:
            return reason if name == GLOBAL else f"layers of type {name}: {reason}"
    return None


_KEYS_SEEN = ("sliding_window_width", "attention_chunk_size", "relative_positions")
"""Configuration keys that determine which attention keys a query sees, or the distances of these keys."""


def _keys_seen(key: str, settings: Settings) -> str | None:
    for position in types_of(settings).values():
        if getattr(position, key) is None:
            continue
        for other in _KEYS_SEEN[_KEYS_SEEN.index(key) + 1 :]:
            if getattr(position, other) is not None:
                return f"contradicts {other}: both set which keys a query sees; set one of them to null"
        if position.embedding.by_query:
            return (
                f"not supported with pos_emb {position.pos_emb}: its bias depends on all earlier tokens of the"
                " document, but tokens that no later query sees are dropped; set it to null"
            )
    return None


def _forgetting_gate(settings: Settings) -> str | None:
    if not any(position.gate and position.sink_logits for position in types_of(settings).values()):
        return None
    return (
        "not supported with sink_logits: the kernels compute gated scores up to a constant per row, and a sink needs"
        " exact scores; set one of the two to null"
    )


def _operand_kernel(settings: Settings) -> str | None:
    if settings.position.operand_kernel != "triton":
        return None
    rotary = [position for position in types_of(settings).values() if position.embedding.rotary]
    if not rotary:
        return f"triton needs rotary positions, but pos_emb is {settings.position.pos_emb}; set operand_kernel=torch"
    for position in rotary:
        if position.extension.learned:
            return (
                f"triton has no gradient for learned frequencies (rope_type {position.extension.name}); set"
                " operand_kernel=torch"
            )
        if position.scaling.name != "none" and position.rotary_pct < 1.0:
            return "triton does not support logit_scaling with rotary_pct below 1; set operand_kernel=torch"
    return None


def _angles(settings: Settings) -> str | None:
    for position in types_of(settings).values():
        options = position.embedding.resolved(position.embedding_options, 0)
        if options.get("initial_angle") and options.get("offset", "none") != "none":
            return f"initial_angle and offset {options['offset']} are two constants in one angle; set offset: none"
    return None


def _buckets(settings: Settings) -> str | None:
    furthest, exact = settings.position.rpe_max_distance, settings.position.rpe_num_buckets // 2
    small = f"{furthest} must exceed {exact}, the number of buckets for single distances; raise it"
    return small if furthest <= exact else None


_COUNTING = ("relative_positions", "logit_scaling")
"""Keys with choices that use a position in training as the number of tokens before it. Gates do not read positions."""


def _training_positions(settings: Settings) -> str | None:
    given, position, length = settings.general.training_positions, settings.position, settings.model.seq_length
    if given is None:
        return None
    largest = window_tokens(given.max, length)
    if largest is None or largest < length:
        return (
            f"max {given.max!r} is not valid; give a number of at least seq_length {length}, or a multiple such as 16L"
        )
    types = types_of(settings).values()
    if not any(kind.embedding.rotary or not kind.embedding.by_distance for kind in types):
        return f"has no effect with pos_emb {position.pos_emb}, which reads only the token order; remove it"
    if position.embedding.weights == "table" and largest > settings.model.max_position_embeddings:
        return f"max {given.max} exceeds max_position_embeddings {settings.model.max_position_embeddings}; lower it"
    gaps, choices = given.type != "shifted", [choice for kind in types for choice, _ in kind.choices()]
    counting = [choice for choice in choices if choice.trained and choice.key in _COUNTING]
    counting += [choice for choice in choices if gaps and getattr(choice, "counts_tokens", False)]
    if counting:
        counted = f"{counting[0].key} {counting[0].name}"
        return f"not supported with {counted}, which uses positions as token counts; remove one of them"
    if given.type == "stretched" and largest % length:
        return f"with type stretched, max must be a multiple of seq_length {length}, not {given.max}; change it"
    learned = [kind.rope_scaling.max_factor for kind in types if kind.rope_scaling and kind.extension.learned]
    if learned and (given.type != "stretched" or largest > max(learned) * length):
        return f"rope_type clex needs {{type: stretched, max: {max(learned)}L}}, which is its default; remove the key"
    return None


CHECKS = (
    Check("seq_length", _length),
    Check("rotary_pct", _rotary_dims),
    Check("rotary_emb_base", _base),
    *(Check(key, partial(_choice, key)) for key in SELECTORS),
    Check("operand_kernel", _operand_kernel),
    Check("pos_emb_options", _angles),
    Check("rpe_max_distance", _buckets),
    Check("layer_types", _layer_types),
    *(Check(key, partial(_keys_seen, key)) for key in _KEYS_SEEN),
    Check("forgetting_gate", _forgetting_gate),
    Check("training_positions", _training_positions),
)
