"""How initial values and learning rates of each kind of weight change with the width (`use_mup`).

For a matrix [out, in], the weights and every step of the optimizer need a spectral norm in proportion to
sqrt(out / in), so that features and their changes keep their size at every width (Yang, Simon and Bernstein 2023,
"A Spectral Condition for Feature Learning"). A step of Adam or Lion has entries of about the learning rate lr. For a
gradient of low rank, the spectral norm of the step is lr sqrt(out in). So the rate must be in proportion to 1 / in.
"""

import re
from typing import NamedTuple

from megatron_coca.config import ModelConfig


class WeightKind(NamedTuple):
    """Exponents of the ratio of a model's width to the width of the base model, for one kind of weight.

    Attributes:
        deviation: the exponent for the standard deviation of the initial values.
        rate: the exponent for the learning rate of Adam and Lion.
        orthogonal_rate: the exponent for the learning rate of Muon, if Muon makes the steps of the weight orthogonal.
    """

    deviation: float
    rate: float
    orthogonal_rate: float = 0.0


CONSTANT = WeightKind(0.0, 0.0)
"""Exponents for vectors and embeddings, which have a constant number of inputs, and for the output head. As the width
grows, `final_logit_scale` falls instead of the head's weights, so that tied and untied heads are alike.
"""
HIDDEN = WeightKind(-0.5, -1.0, -0.5)
"""Exponents for matrices with inputs and outputs that grow with the width. Steps of Muon have the spectral norm
lr sqrt(max(out, in)).
"""
TO_FEW = WeightKind(-1.0, -1.0)
"""Exponents for matrices with inputs that grow with the width and outputs that do not. With HIDDEN's exponents, the
norm of these matrices would exceed sqrt(out / in).
"""

KINDS: tuple[tuple[str, WeightKind], ...] = (
    (r"\.lora_A(\.|$)", HIDDEN),
    (r"\.lora_", CONSTANT),
    (r"norm\.|\.bias$|(^|\.)final_bias$|\blayer_scale\.|\bactivation\.weight$", CONSTANT),
    (r"(^|\.)(word|position)_embeddings\.|(^|\.)final_linear\.", CONSTANT),
    (r"\bmlp\.(\w+\.)*(router|shared_gate)\.", TO_FEW),
    (r"\battention\.position_gates\.", HIDDEN),
    (r"\battention\.position_(bias|sinks|factor|offsets)\.|(^|\.)positions\.", CONSTANT),
    (r"\battention\.(\w+\.)*(query_key_value|(query|key_value)(_down|_up)?|key|value|dense|output_gate)\.", HIDDEN),
    (r"\bmlp\.(\w+\.)*linear[12]\.|\boutput_transform\.dense\.", HIDDEN),
)
"""Patterns of parameter names, each with the kind of the weights; the first match counts."""


def kind_of(name: str) -> WeightKind:
    """Return the kind of the named parameter of a model, of a part of a model, or of a model with adapters."""
    return next(kind for pattern, kind in KINDS if re.search(pattern, name))


def initial_factor(name: str, model: ModelConfig) -> float:
    """Return the factor that `use_mup` applies to the initial values of the named matrix, or 1 without `use_mup`."""
    return model.mup_init_scale * model.width_ratio ** kind_of(name).deviation if model.use_mup else 1.0


def rate_factor(name: str, width_ratio: float, orthogonal: bool = False) -> float:
    """Return the factor on the learning rate of the named parameter. The model is `width_ratio` times as wide as the
    base model. `orthogonal` is True if Muon makes the steps of this parameter orthogonal.
    """
    if width_ratio == 1.0:
        return 1.0
    kind = kind_of(name)
    return float(width_ratio ** (kind.orthogonal_rate if orthogonal else kind.rate))
