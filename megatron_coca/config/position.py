"""Keys that select the position method."""

from typing import Literal

from pydantic import Field

from megatron_coca.config.fields import Count, Group, Positive, key

PositionMethod = Literal["rotary", "coca", "coca_strict", "alibi", "learned", "none"]
ROTATED_METHODS = frozenset({"rotary", "coca", "coca_strict"})


class RopeScaling(Group):
    """Extension of the rotary frequencies, in the terms of Hugging Face's `rope_scaling`."""

    rope_type: Literal["default", "linear", "ntk", "dynamic"] = key(
        "default", "default: none; linear: position interpolation; ntk: a larger base; dynamic: NTK by length."
    )
    factor: float = Field(default=1.0, ge=1.0, description="Scaling factor.")
    original_max_position_embeddings: Count | None = key(
        None, "Length the weights were trained at, where it is not seq_length (imported models)."
    )


class PositionConfig(Group):
    """The position method and the attention backend."""

    pos_emb: PositionMethod = key("learned", "Position method.")
    rotary_pct: float = Field(default=1.0, gt=0.0, le=1.0, description="Share of each head's features that is rotated.")
    rotary_emb_base: Positive = key(10000.0, "Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = key(None, "Extension of the rotary frequencies beyond the training length.")
    attention_backend: Literal["auto", "sdpa", "flex", "reference"] = key("auto", "Implementation of attention.")
