"""Values of `rope_scaling.rope_type`: rotary frequencies beyond the training length."""

from dataclasses import replace

from megatron_coca.methods.declaration import FrequencyExtension, Option, StockRope, Use, declare

MEASURED = "original_max_position_embeddings"
"""The key in transformers' rope section that contains L. If it is not set, transformers uses max_position_embeddings.
"""

_FACTOR = Option("factor", "factor", "Scaling factor s.", default=1.0, required=True)
_ATTENTION = Option(
    "attention_factor", "positive", "Multiplier of cos and sin; null: the extension's formula.", default=None
)
_YARN = (
    Option(
        "beta_fast", "positive", "Frequencies with at least this many rotations within L are unchanged.", default=32.0
    ),
    Option(
        "beta_slow", "positive", "Frequencies with at most this many rotations within L are divided by s.", default=1.0
    ),
    _ATTENTION,
    Option(
        "ramp",
        "choice",
        "Interpolate linearly in the dimension (as the authors' code does) or in the number of rotations (as the paper"
        " does).",
        default="dimension",
        choices=("dimension", "rotations"),
    ),
    Option("truncate", "flag", "Round the ends of the ramp to whole dimensions.", default=True),
)
_STRENGTHS = (
    Option(
        "mscale",
        "positive",
        "With mscale_all_dim and without attention_factor, cos and sin are multiplied by (0.1 mscale ln s + 1) / (0.1"
        " mscale_all_dim ln s + 1), as in DeepSeek 2.",
        default=None,
    ),
    Option(
        "mscale_all_dim",
        "positive",
        "All logits are multiplied by (0.1 mscale_all_dim ln s + 1)^2, as in DeepSeek 2. Only with kv_lora_rank; null:"
        " no factor.",
        default=None,
    ),
)


def _target(use: Use) -> str | None:
    target, length = use.options["target_length"], use.original_length
    return None if target >= length else f"target_length {target} is below the training length L = {length}; raise it"


def _betas(use: Use) -> str | None:
    fast, slow = use.options["beta_fast"], use.options["beta_slow"]
    return None if fast > slow else f"beta_fast {fast} must exceed beta_slow {slow}; change one of them"


def _wavelengths(use: Use) -> str | None:
    high, low = use.options["high_freq_factor"], use.options["low_freq_factor"]
    return None if high > low else f"high_freq_factor {high} must exceed low_freq_factor {low}; change one of them"


def _lists(use: Use) -> str | None:
    pairs = use.frequencies
    for name in ("short_factor", "long_factor"):
        if (given := len(use.options[name])) != pairs:
            return f"{name} has {given} numbers, but there are {pairs} frequencies; give one number for each"
    return None


def _some_rotate(use: Use) -> str | None:
    share = use.options["proportion"]
    none = int(share * use.frequencies) == 0
    return (
        f"proportion {share} of {use.frequencies} pairs is less than one pair; raise it, or set pos_emb none"
        if none
        else None
    )


def _logarithm(use: Use) -> str | None:
    short = use.original_length < 2
    return "longrope divides by ln L, which is 0 for a training length of 1; raise seq_length" if short else None


_RESONANCE = Option(
    "resonance", "flag", "Round wavelengths to whole tokens after the extension (Wang et al. 2024); null: no."
)

declare(
    choice if choice.learned else replace(choice, options=(*choice.options, _RESONANCE))
    for choice in (
        FrequencyExtension(name="default", label="", rule="`theta_j`", source="RoFormer", huggingface="stock"),
        FrequencyExtension(
            "linear",
            "PI",
            "position interpolation, Chen et al. 2023",
            meaning="positions are divided by a factor",
            rule="`theta_j / s`",
            options=(_FACTOR,),
            huggingface="stock",
        ),
        FrequencyExtension(
            "ntk",
            "NTK",
            "NTK-aware scaling, 2023",
            meaning="a larger rotary base slows the slow frequencies most",
            rule="`base' = base * s^(d/(d-2))`",
            options=(_FACTOR,),
            least_rotated=4,
        ),
        FrequencyExtension(
            "ntk_fixed",
            "NTK-fixed",
            "Su 2023",
            meaning="a larger rotary base, also for the fastest frequency",
            rule="`theta_j s^(-2(j+1)/d)`",
            options=(_FACTOR,),
        ),
        FrequencyExtension(
            "ntk_mixed",
            "NTK-mixed",
            "Su 2023",
            meaning="a mixture of a larger rotary base and divided positions",
            rule="`theta_j exp(-a (j+1)^b)`, `a (d/2)^b = ln s`",
            options=(_FACTOR, Option("b", "positive", "Exponent of the mix.", default=0.625, most=16.0)),
        ),
        FrequencyExtension(
            "dynamic",
            "dynamic NTK",
            "dynamic NTK, 2023",
            meaning="a rotary base that grows with the length of the input; a number in the name is the factor",
            rule="`theta_j` up to `L`; beyond it `base' = base * alpha^(d/(d-2))`, `alpha = s*l/L - (s-1)`",
            measures_length=True,
            options=(_FACTOR,),
            length_dependent=True,
            huggingface="stock",
            stock=StockRope("max_position_embeddings", by_longest=True),
            least_rotated=4,
        ),
        FrequencyExtension(
            "dynamic_max",
            "dynamic NTK (max)",
            "dynamic NTK made for `L'`",
            meaning="a rotary base that grows with the length of the input, at least that of the target length",
            rule="the same with `alpha = s*max(L', l)/L - (s-1)`, `s = L'/(2L)`",
            measures_length=True,
            options=(Option("target_length", "count", "Largest evaluation length L'.", required=True),),
            length_dependent=True,
            checks=(_target,),
            least_rotated=4,
        ),
        FrequencyExtension(
            "yarn",
            "YaRN",
            "Peng et al. 2023",
            meaning="slow frequencies are divided by a factor, the number in the name, and fast ones stay",
            rule="`theta_j / s` for slow, `theta_j` for fast pairs, a ramp in between; cos, sin times `0.1 ln s + 1`",
            measures_length=True,
            options=(_FACTOR, *_YARN, *_STRENGTHS),
            checks=(_betas,),
            huggingface="stock",
            stock=StockRope(MEASURED, derives_factor=True),
        ),
        FrequencyExtension(
            "dynamic_yarn",
            "dynamic YaRN",
            "Peng et al. 2023",
            meaning="slow frequencies are divided by a factor that grows with the length of the input",
            rule="yarn with `s = max(1, l/L)`",
            measures_length=True,
            options=_YARN,
            length_dependent=True,
            checks=(_betas,),
        ),
        FrequencyExtension(
            "longrope",
            "LongRoPE",
            "Ding et al. 2024",
            meaning="every frequency is divided by a factor of its own",
            rule="`theta_j / lambda_j`, one list up to `L`, one beyond; cos and sin times `sqrt(1 + ln s / ln L)`",
            measures_length=True,
            options=(
                _FACTOR,
                Option(
                    "short_factor", "positives", "Divisors for inputs up to length L, one per frequency.", required=True
                ),
                Option("long_factor", "positives", "Divisors for longer inputs, one per frequency.", required=True),
                _ATTENTION,
            ),
            length_dependent=True,
            switches=True,
            checks=(_lists, _logarithm),
            huggingface="stock",
            stock=StockRope(MEASURED, derives_factor=True, by_longest=True),
        ),
        FrequencyExtension(
            "llama3",
            "Llama 3",
            "Llama 3.1",
            meaning="slow frequencies are divided by a factor, as in Llama 3.1",
            rule="wavelengths up to `L/high_freq_factor`: `theta_j`; from `L/low_freq_factor`: `theta_j/s`; else mixed",
            measures_length=True,
            options=(
                _FACTOR,
                Option(
                    "low_freq_factor",
                    "positive",
                    "Wavelengths longer than L / low_freq_factor are divided by s.",
                    default=1.0,
                ),
                Option(
                    "high_freq_factor",
                    "positive",
                    "Wavelengths shorter than L / high_freq_factor are unchanged.",
                    default=4.0,
                ),
            ),
            checks=(_wavelengths,),
            huggingface="stock",
            stock=StockRope(MEASURED),
        ),
        FrequencyExtension(
            "proportional",
            "p-RoPE",
            "p-RoPE, Barbero et al. 2025; Gemma 4",
            meaning="only the fastest frequencies rotate",
            rule="`theta_j / s` for the `floor(p d/2)` fastest pairs; the others are not rotated",
            options=(
                Option("proportion", "share", "Share p of the pairs that are rotated.", required=True),
                Option("factor", "factor", "Scaling factor s.", default=1.0),
            ),
            of_training=True,
            checks=(_some_rotate,),
        ),
        FrequencyExtension(
            "clex",
            "CLEX",
            "Chen et al. 2024",
            meaning="a learned differential equation changes the frequencies with the length",
            rule="the solution of a learned differential equation in the extension factor `t`",
            measures_length=True,
            options=(
                Option(
                    "max_factor", "count", "Largest scaling factor in training and evaluation.", default=16, most=1024
                ),
                Option(
                    "ode_step",
                    "positive",
                    "Step of the Runge-Kutta solver in units of the scaling factor.",
                    default=0.1,
                    least=1e-3,
                    most=1024.0,
                ),
            ),
            trained=True,
            learned=True,
            of_training=True,
            length_dependent=True,
            neox="GPT-NeoX has no weights for its learned frequencies",
        ),
    )
)
