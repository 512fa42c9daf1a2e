"""Keys that select the position method."""

from typing import Any, Literal

from pydantic import Field

from megatron_coca.config.base import ConfigGroup, Count, Positive, WholeNumber, key

PositionMethod = Literal[
    "rotary",
    "coca",
    "coca_strict",
    "xpos",
    "alibi",
    "kerple_log",
    "kerple_power",
    "rpe",
    "learned",
    "sinusoidal",
    "none",
]
ROTATED_METHODS = frozenset({"rotary", "coca", "coca_strict", "xpos"})
BIASED_METHODS = frozenset({"alibi", "kerple_log", "kerple_power", "rpe"})
RopeType = Literal[
    "default",
    "linear",
    "ntk",
    "ntk_fixed",
    "ntk_mixed",
    "dynamic",
    "dynamic_max",
    "yarn",
    "dynamic_yarn",
    "longrope",
    "llama3",
    "clex",
]
MapType = Literal["rerope", "leaky_rerope", "inv_leaky_rerope", "self_extend", "lm_infinite", "streaming"]

_YARN = ("beta_fast", "beta_slow", "attention_factor", "ramp", "truncate")
SCALING_OPTIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "ntk_fixed": ("factor",),
    "ntk_mixed": ("factor", "b"),
    "dynamic": ("factor",),
    "dynamic_max": ("target_length",),
    "yarn": ("factor", *_YARN),
    "dynamic_yarn": _YARN,
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "clex": ("max_factor", "ode_step"),
}
"""Which names of `rope_scaling` mean something to which extension; any other is refused."""

SCALING_REQUIRED: dict[str, tuple[str, ...]] = {
    **{name: ("factor",) for name in ("linear", "ntk", "ntk_fixed", "ntk_mixed", "dynamic", "yarn", "llama3")},
    "dynamic_max": ("target_length",),
    "longrope": ("factor", "short_factor", "long_factor"),
}
"""What an extension does nothing without."""

MAP_OPTIONS: dict[str, tuple[str, ...]] = {
    "rerope": ("window",),
    "leaky_rerope": ("window", "leak"),
    "inv_leaky_rerope": ("window", "target_length"),
    "self_extend": ("window", "group_size"),
    "lm_infinite": ("window", "sinks"),
    "streaming": ("window", "sinks"),
}
MAP_REQUIRED: dict[str, tuple[str, ...]] = {"inv_leaky_rerope": ("target_length",)}
LM_INFINITE_SINKS, STREAMING_SINKS = 10, 4


class RopeScaling(ConfigGroup):
    """Extension of the rotary frequencies, in the terms of Hugging Face's `rope_scaling` where it has them."""

    rope_type: RopeType = key("default", "The extension; see docs/attention.md for the formulas.")
    factor: float = Field(default=1.0, ge=1.0, le=1.0e6, description="Scaling factor s.")
    original_max_position_embeddings: Count | None = key(
        None,
        "Length that the extension's formula measures against, L, where it is not seq_length: for a model that was"
        " fine-tuned at seq_length, the length of the training before.",
    )
    target_length: Count | None = key(None, "dynamic_max: the length L' that the extension is meant to reach.")
    beta_fast: Positive = key(32.0, "yarn: rotations within L from which on a frequency is kept.")
    beta_slow: Positive = key(1.0, "yarn: rotations within L up to which a frequency is divided by s.")
    attention_factor: Positive | None = key(
        None, "yarn, longrope: multiplier of cos and sin, instead of the formula's."
    )
    ramp: Literal["dimension", "rotations"] = key(
        "dimension", "yarn: what the ramp between the two is linear in; the paper has rotations, its code dimension."
    )
    truncate: bool = key(True, "yarn: round the ends of the ramp to whole dimensions.")
    b: Positive = key(0.625, "ntk_mixed: exponent of the mix.")
    low_freq_factor: Positive = key(1.0, "llama3: wavelengths beyond L / this are divided by s.")
    high_freq_factor: Positive = key(4.0, "llama3: wavelengths below L / this are kept.")
    short_factor: list[Positive] | None = key(None, "longrope: a divisor for each frequency, up to L.")
    long_factor: list[Positive] | None = key(None, "longrope: a divisor for each frequency, beyond L.")
    max_factor: Count = key(16, "clex: the largest extension that training draws and evaluation uses.")
    ode_step: Positive = key(0.1, "clex: step of the Runge-Kutta solver in units of the extension factor.")

    def rules(self) -> dict[str, Any]:
        """What the frequencies depend on beside L, lists as tuples; not for clex."""
        absent = {"original_max_position_embeddings", "max_factor", "ode_step"}
        values = self.model_dump(exclude=absent)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


class RelativePositions(ConfigGroup):
    """Relative-position map: distant pairs are scored at another distance than their own."""

    type: MapType = Field(description="The map; see docs/attention.md for the formulas.")
    window: Count | None = key(
        None,
        "Distances below it are left alone. Default, for the training length L: L/2 (rerope, leaky_rerope), L/4"
        " (inv_leaky_rerope, self_extend), L (lm_infinite), L less the sinks (streaming).",
    )
    leak: Positive = key(16.0, "leaky_rerope: k, distances beyond the window grow by 1/k a token.")
    group_size: Count = key(8, "self_extend: G, positions beyond the window are counted in groups of so many.")
    sinks: WholeNumber | None = key(
        None, "Keys at the beginning that every query sees. Default: 10 (lm_infinite), 4 (streaming)."
    )
    target_length: Count | None = key(None, "inv_leaky_rerope: the length L' that evaluation is to reach.")

    def settings(self, training_length: int) -> dict[str, Any]:
        """The map's parameters, defaults filled in for the training length L."""
        sinks = {"lm_infinite": LM_INFINITE_SINKS, "streaming": STREAMING_SINKS}.get(self.type, 0)
        sinks = sinks if self.sinks is None else self.sinks
        windows = {
            "rerope": training_length // 2,
            "leaky_rerope": training_length // 2,
            "inv_leaky_rerope": training_length // 4,
            "self_extend": training_length // 4,
            "lm_infinite": training_length,
            "streaming": training_length - sinks,
        }
        leak = self.leak
        if self.type == "inv_leaky_rerope" and self.target_length is not None:
            leak = training_length / (2 * self.target_length)
        window = max(windows[self.type], 1) if self.window is None else self.window
        return {"window": window, "leak": leak, "group_size": self.group_size, "sinks": sinks}


class PositionConfig(ConfigGroup):
    """The position method and the attention backend."""

    def original_length(self, seq_length: int) -> int:
        """L of the extension's formula: seq_length, unless rope_scaling says otherwise.

        It is not the length that the weights were trained at last. That is seq_length, against which everything else
        measures: relative-position maps, logit scaling, evaluation.
        """
        return (self.rope_scaling and self.rope_scaling.original_max_position_embeddings) or seq_length

    pos_emb: PositionMethod = key(
        "learned",
        "Position method. Positions count from 0, as in the CoCA authors' code; their paper counts from 1. Of the rotated"
        " methods `coca` alone (CoCA-Slack) is not shift-invariant: where the count starts changes its scores.",
    )
    rotary_pct: float = Field(default=1.0, gt=0.0, le=1.0, description="Share of each head's features that is rotated.")
    rotary_emb_base: float = Field(default=10000.0, gt=1.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = key(None, "Extension of the rotary frequencies beyond the training length.")
    relative_positions: RelativePositions | None = key(None, "Relative-position map beyond a window.")
    logit_scaling: Literal["none", "log_n", "log_n_trained"] = key(
        "none",
        "Factor on the logits of position m, for the training length L: log_n: max(1, ln(m+1)/ln L), for evaluation;"
        " log_n_trained: ln(m+1)/ln L, from the first step of training.",
    )
    rpe_num_buckets: int = Field(default=32, ge=4, description="rpe: rows of the table of distances.")
    rpe_max_distance: int = Field(default=128, ge=2, description="rpe: distance from which on all share the last row.")
    attention_backend: Literal["auto", "sdpa", "merge", "flash", "flex", "triton", "reference"] = key(
        "auto", "Implementation of attention."
    )
    operand_kernel: Literal["torch", "triton"] = key(
        "torch", "What forms rotated operands: PyTorch, or one fused kernel where Triton runs."
    )
