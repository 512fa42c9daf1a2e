"""Build the position method and the attention backend of a configuration."""

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

from megatron_coca.attention import backends
from megatron_coca.attention.backends.triton import FORMULAS
from megatron_coca.attention.inputs import Backend, BackendError, Needs
from megatron_coca.attention.method import LatentWidths, OperandMaker, PositionMethod, operand_maker
from megatron_coca.attention.positions.bias import BIASES, BiasSource, HeadWeights, LearnedBias
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.distance_maps import DISTANCE_MAPS, UNMAPPED, Band
from megatron_coca.attention.positions.forms import ScoreForm, score_form, without_kernels
from megatron_coca.attention.positions.frequencies import FREQUENCIES, Rotary, Scaling
from megatron_coca.attention.positions.gates import GATES, HeadGates
from megatron_coca.attention.positions.logit_scalings import LOGIT_SCALINGS
from megatron_coca.attention.positions.offsets import HeadOffsets, layer_offsets
from megatron_coca.config import Config, ModelConfig, PositionConfig
from megatron_coca.config.backends import AUTOMATIC, DeclaredBackend
from megatron_coca.config.backends import BACKENDS as DECLARED

LEARNED_MODULES = (LearnedBias, HeadWeights, HeadGates, HeadOffsets, Clex)
"""Learned modules of position methods. Each module initialises its own parameters."""


def build_methods(config: Config) -> dict[str, PositionMethod]:
    """Build one position method per layer type, ordered by the first layer of each type."""
    return {name: build_method(position, config.model.of_type(name)) for name, position in config.layer_types.items()}


def build_method(position: PositionConfig, model: ModelConfig) -> PositionMethod:
    """Build the position method of one layer type for the model's head shape and training length."""
    options = {choice.key: given for choice, given in position.choices()}
    factors = position.scaling.resolved(options["logit_scaling"], model.seq_length)
    initial, biased = (factors.pop(key, None) if position.scaling.learned else None for key in ("initial", "bias"))
    embedding, distances, scaling = position.embedding, position.distance_map, position.scaling
    scale = scaling.compute or LOGIT_SCALINGS.get(scaling.name)
    of_embedding = embedding.resolved(options["pos_emb"], model.seq_length)
    own_form = without_kernels(embedding.compute) if embedding.compute and embedding.rotary else None
    form = own_form or score_form(embedding.name, of_embedding)
    rotated = int(model.head_dim * position.rotary_pct)
    magnitudes = form.operand_features * rotated // 2
    make_bias = embedding.compute or BIASES[embedding.name] if embedding.biased else None
    bias_options = options["pos_emb"] | of_embedding  # values of the model too, as rpe_num_buckets
    bands: tuple[Band, ...] = UNMAPPED
    if position.sliding_window_width is not None:
        bands = (Band(high=position.sliding_window_width + 1),)
    if distances is not None:
        divide = distances.compute or DISTANCE_MAPS[distances.name]
        bands = divide(distances.resolved(options[distances.key], model.seq_length), model.seq_length)
    return PositionMethod(
        name=position.pos_emb,
        form=form,
        rotary=_rotary(position, model) if form.rotary else None,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        training_length=model.seq_length,
        bias=make_bias(model.num_attention_heads, model.head_dim, bias_options) if make_bias else BiasSource(),
        clex=_clex(position, model) if position.extension.learned else None,
        bands=UNMAPPED if distances is not None and distances.training_only else bands,
        trained_bands=bands,
        logit_scaling=partial(scale, **factors) if scale else None,
        scales_training=not scaling.evaluation_only,
        operands=_operands(position, form),
        softmax_scale=model.softmax_scale,
        softcap=model.attn_logit_softcapping,
        sinks=bool(position.sink_logits),
        chunk=position.attention_chunk_size,
        initial_factor=initial,
        factor_bias=bool(biased),
        gates=_gates(position, model),
        offsets=layer_offsets(of_embedding, model.num_attention_heads, magnitudes) if of_embedding else None,
        queries_per_key=model.num_attention_heads // model.num_kv_heads,
        norms_rotated=model.qk_norm_after_rotation,
        latent=_latent(model),
    )


def _latent(model: ModelConfig) -> LatentWidths | None:
    rank = model.kv_lora_rank
    return None if rank is None else LatentWidths(rank, model.unrotated_dim, model.value_dim)


def _operands(position: PositionConfig, form: ScoreForm) -> OperandMaker:
    if position.operand_kernel == "triton" and form.rotary and not form.fused:
        given = position.pos_emb_options
        options = f" with pos_emb_options {given.model_dump(exclude={'type'})}" if given is not None else ""
        raise BackendError(
            f"operand_kernel: triton does not support pos_emb {position.pos_emb}{options}; set operand_kernel to torch"
        )
    return operand_maker(position.operand_kernel)


def _rotary(position: PositionConfig, model: ModelConfig) -> Rotary:
    given = position.rope_scaling
    scaling = Scaling(given.rope_type, **given.given) if given is not None else Scaling()
    original, dim = position.original_length(model.seq_length), _rotary_dim(position, model)
    fastest, base, chosen = 1.0, float(position.rotary_emb_base), position.frequencies
    if chosen is not None and position.rotary_frequencies is not None:
        compute = chosen.compute or FREQUENCIES[chosen.name]
        fastest, base = compute(dim, position.rotary_frequencies.settings(original), original)
    return Rotary(dim, base, original, scaling, fastest)


def _rotary_dim(position: PositionConfig, model: ModelConfig) -> int:
    """Return twice the number of frequencies, which is the number of rotated features if each pair has a frequency."""
    return 2 * position.frequency_count(model.head_dim)


def _gates(position: PositionConfig, model: ModelConfig) -> Callable[[], HeadGates] | None:
    gate = position.gate
    if gate is None:
        return None
    std, log_gate = model.init_method_std, gate.compute or GATES[gate.name]
    std *= model.mup_init_scale * model.width_ratio**-0.5 if model.use_mup else 1.0
    return partial(HeadGates, model.hidden_size, model.num_attention_heads, std, log_gate)


def _clex(position: PositionConfig, model: ModelConfig) -> Callable[[], Clex]:
    dim, base = _rotary_dim(position, model), float(position.rotary_emb_base)
    original, options = position.original_length(model.seq_length), position.rope_scaling
    assert options is not None
    return lambda: Clex(dim, base, original, options.max_factor, options.ode_step)


logger = logging.getLogger(__name__)


def _loaded(declared: DeclaredBackend) -> Backend:
    module, _, name = declared.place.rpartition(".")
    backend: Backend = getattr(import_module(f"{backends.__name__}.{module}"), name)()
    return backend


BACKENDS = {name: _loaded(declared) for name, declared in DECLARED.items()}
"""An instance of every backend that `config/backends.py` declares."""


class Preference(NamedTuple):
    """The backend that `auto` tries first on CUDA for models with a certain need.

    Attributes:
        backend: the name of the backend.
        applies: whether a model has the need.
        measured: the GPU and the commit of the measurement that led to the choice, or None if there is none yet.
    """

    backend: str
    applies: Callable[[Needs], bool]
    measured: str | None = None


PREFERRED: dict[str, Preference] = {
    "deterministic": Preference("triton", lambda needs: needs.deterministic),
    "soft-capping": Preference("flex", lambda needs: needs.softcap is not None),
    "packed documents": Preference("flex", lambda needs: needs.packed),
    "formula of the distance": Preference("triton", lambda needs: needs.bias in FORMULAS, "H100, fa0f946"),
    "distance bias": Preference("flex", lambda needs: needs.bias is not None),
}
"""The backend that `auto` tries first, by need. If several rows apply, the first one counts. `sdpa` is not tried
first for the first three needs, because it is not deterministic in float32, computes dense scores for soft-capping, and
makes one call per document.

ALiBi and KERPLE use `triton` for three reasons. From 2,048 tokens on, the kernels of `triton` for two segments took 0.5
to 0.7 times as long as ALiBi took with `flex`. The values of these kernels were compared on the GPU. Blocks with `flex`
are not compiled. Two cases have not been timed: one segment with a bias, and `flex` with slopes in its kernel.

Packed documents and other biases use PyTorch's FlexAttention until the kernels of `triton` have been measured. The part
`attention` of the GPU report (benchmarks/gpu_report.md) times `triton`, `flex` and PyTorch's varlen kernel side by
side. Use its results to set the faster backend and `measured` here.
"""


def automatic(needs: Needs) -> list[str]:
    """Return the candidates for `auto` in order of preference."""
    if needs.ring:
        return [name for name, declared in DECLARED.items() if declared.rings]
    candidates = AUTOMATIC.get(needs.device_type, AUTOMATIC["cpu"])
    first = next((row.backend for row in PREFERRED.values() if row.applies(needs)), None)
    return sorted(candidates, key=lambda name: name != first)


def find_backend(name: str, needs: Needs) -> tuple[str, dict[str, str]]:
    """Return the backend's name for `attention_backend: name`, and the reason why each skipped candidate was skipped.

    Raises:
        BackendError: the named backend does not support `needs`, or no candidate of `auto` supports them. A named
            backend is never replaced by another one.
    """
    reasons: dict[str, str] = {}
    for candidate in automatic(needs) if name == "auto" else (name,):
        reason = (
            uncapped(candidate, needs)
            or without_sinks(candidate, needs)
            or without_ring(candidate, needs)
            or BACKENDS[candidate].supports(needs)
            or varies(candidate, needs)
        )
        if reason is None:
            return candidate, reasons
        reasons[candidate] = reason
    if name == "auto":
        listed = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
        raise BackendError(
            f"attention_backend: no fast backend supports this model ({listed}); set attention_backend: reference"
        )
    raise BackendError(
        f"attention_backend: {name} cannot compute this model ({reasons[name]}); set another one, or "
        "attention_backend: auto"
    )


def select_backend(name: str, needs: Needs) -> tuple[str, Backend]:
    """Return (name, backend) for `attention_backend: name`, and log skipped candidates. Raises BackendError under the
    same conditions as `find_backend`.
    """
    chosen, reasons = find_backend(name, needs)
    if reasons:
        skipped = "".join(f"; not {candidate}: {reason}" for candidate, reason in reasons.items())
        logger.info("attention backend %s%s", chosen, skipped)
    return chosen, BACKENDS[chosen]


def uncapped(name: str, needs: Needs) -> str | None:
    """Return None, or the reason why the backend cannot cap the model's scores."""
    return None if needs.softcap is None or DECLARED[name].caps else "it has no attn_logit_softcapping"


def without_sinks(name: str, needs: Needs) -> str | None:
    """Return None, or the reason why the backend does not support the model's sink logits."""
    return None if not needs.sinks or DECLARED[name].sinks else "its kernels have no sink_logits"


def without_ring(name: str, needs: Needs) -> str | None:
    """Return None, or the reason why ranks that divide a sequence cannot use the backend."""
    if not needs.ring or DECLARED[name].rings:
        return None
    able = " and ".join(other for other, declared in DECLARED.items() if declared.rings)
    return f"context_parallel_size merges the parts of a sequence by their log-sum-exp; only {able} return it"


def varies(name: str, needs: Needs) -> str | None:
    """Return None, or the reason why gradients are not bitwise reproducible although `needs` requires it."""
    if not needs.deterministic or needs.device_type != "cuda":
        return None
    if needs.gates:
        return "deterministic: on CUDA, PyTorch computes the running sum of forgetting gates in no fixed order"
    if name == "flex" and needs.bias:
        return "deterministic: its kernels sum bias gradients in no fixed order"
    return None
