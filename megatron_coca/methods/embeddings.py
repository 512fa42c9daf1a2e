"""Values of `pos_emb`: operands of the scores, biases, and vectors that are added to the embedding."""

from dataclasses import replace

from megatron_coca.methods.declaration import Option, PositionEmbedding, declare

_OFFSET = Option(
    "offset",
    "choice",
    "Constant angles that each head learns per magnitude, by their initial values: zero or uniform, clamped to"
    " [-2 pi, 0] as in the paper; or free, from zero without limits.",
    default="zero",
    choices=("none", "zero", "uniform", "free"),
)
_ANGLE = Option(
    "initial_angle",
    "angle",
    "phi, a constant that is added to the angle of every term: `cos(r theta_j + phi)`, in radians; `random` draws one"
    " angle per head and term, which stays fixed. It exists to test CoCA's explanation by an intervention.",
    default=0.0,
)
_KERPLE = "GPT-NeoX has no weights for it; use megatron-coca train"

declare(
    (
        PositionEmbedding(
            "rotary",
            "RoFormer",
            "RoFormer, Su et al. 2021",
            description="rotary position embedding (RoPE)",
            query="`R_m q`",
            key_operand="`R_n k`",
            rotary=True,
            huggingface="stock",
            neox="upstream",
        ),
        PositionEmbedding(
            "coca",
            "CoCA-Slack",
            "CoCA, Zhu et al. 2024, in the form that the paper trains",
            description="Collinear Constrained Attention (CoCA), in the form that its paper trains",
            query="`q * (R_m q)`, feature by feature",
            key_operand="`R_n (u, u)`",
            rotary=True,
            shift_invariant=False,
        ),
        PositionEmbedding(
            "coca_strict",
            "CoCA-Strict",
            "CoCA with the constraint on queries too",
            description="Collinear Constrained Attention (CoCA), with the constraint on queries too",
            query="`R_m (\\|q\\|^2, 0)`",
            key_operand="`R_n (u, 0)`",
            options=(_ANGLE,),
            rotary=True,
        ),
        PositionEmbedding(
            "pope",
            "PoPE",
            "PoPE, Gopalakrishnan et al. 2025, arXiv:2509.10534; `mu` is softplus, and each of the d features has a"
            " frequency `theta_c = B^(-c/d)`",
            description="polar coordinate position embedding (PoPE)",
            query="`mu(q) (cos(m theta - delta), sin(m theta - delta))`",
            key_operand="`mu(k) (cos(n theta), sin(n theta))`",
            options=(_OFFSET,),
            rotary=True,
            frequencies="feature",
            weights="layer",
        ),
        PositionEmbedding(
            "polar",
            "polar",
            "the forms between CoCA-Strict and PoPE, by four options; by default PoPE",
            description="a polar position embedding between CoCA-Strict and PoPE",
            query="`m (cos(m theta - delta), sin(m theta - delta))`",
            key_operand="`u (cos(n theta), sin(n theta))`",
            options=(
                Option("power", "count", "Power of the query's magnitude.", default=1, most=2),
                Option(
                    "frequencies",
                    "choice",
                    "One frequency per feature (`B^(-c/d)`) or per pair of features (`B^(-2j/d)`).",
                    default="feature",
                    choices=("feature", "pair"),
                ),
                Option(
                    "magnitude",
                    "choice",
                    "softplus: of every feature of q and k. relu_mean: the length of every pair of features of q, and"
                    " relu of the mean of every pair of k, as in CoCA.",
                    default="softplus",
                    choices=("softplus", "relu_mean"),
                ),
                _OFFSET,
                replace(_ANGLE, default=None),  # not part of the identity of models that were trained before it existed
            ),
            rotary=True,
            frequencies="feature",
            weights="layer",
        ),
        PositionEmbedding(
            "xpos",
            "xPos",
            "xPos, Sun et al. 2022, `zeta_j = (2j/d + 0.4)/1.4`",
            description="xPos",
            query="`R_m q * zeta^((m-c)/512)`",
            key_operand="`R_n k * zeta^((c-n)/512)`",
            rotary=True,
        ),
        PositionEmbedding(
            "alibi",
            "ALiBi",
            "ALiBi, Press et al. 2022",
            description="ALiBi",
            bias="`-slope_h r`",
            biased=True,
            neox="upstream",
        ),
        PositionEmbedding(
            "kerple_log",
            "KERPLE-log",
            "KERPLE, Chi et al. 2022; `p` and `a` are learned per head and layer",
            description="KERPLE, logarithmic",
            bias="`-p ln(1 + a r)`",
            biased=True,
            weights="layer",
            neox=_KERPLE,
        ),
        PositionEmbedding(
            "kerple_power",
            "KERPLE-power",
            "KERPLE, Chi et al. 2022; `p` and `a` are learned per head and layer",
            description="KERPLE, power",
            bias="`-a r^p`",
            biased=True,
            weights="layer",
            neox=_KERPLE,
        ),
        PositionEmbedding(
            "sandwich",
            "Sandwich",
            "Sandwich, Chi et al. 2023, with 64 frequencies and base 10,000",
            description="Sandwich, the inner products of sinusoidal embeddings",
            bias="`H/(8h) sum_j (cos(r theta_j) - 1)`",
            biased=True,
            neox="GPT-NeoX has no such bias; use megatron-coca train",
        ),
        PositionEmbedding(
            "fire",
            "FIRE",
            "FIRE, Li et al. 2024; the network `f`, `c` and `a` are learned per layer; `psi(x) = ln(\\|c\\| x + 1)`",
            description="FIRE, functional interpolation for relative positions",
            bias="`f(psi(r) / psi(max(m, \\|a\\| 512)))`",
            biased=True,
            by_query=True,
            weights="layer",
            huggingface="its bias also depends on the query's position, which the modelling file does not support",
            neox=_KERPLE,
        ),
        PositionEmbedding(
            "rpe",
            "T5 bias",
            "T5, Raffel et al. 2020, with GPT-NeoX's factor; one table for all layers",
            description="T5's relative position bias",
            bias="`sqrt(head_dim)` times a table entry",
            biased=True,
            weights="shared",
            neox="upstream",
        ),
        PositionEmbedding(
            "learned",
            "learned positions",
            "a learned vector per position, added to the embedding",
            description="learned absolute positions",
            by_distance=False,
            weights="table",
            neox="upstream",
        ),
        PositionEmbedding(
            "sinusoidal",
            "sinusoidal positions",
            "sines and cosines added to the embedding, Vaswani et al. 2017",
            description="sinusoidal absolute positions",
            by_distance=False,
            neox="upstream",
        ),
        PositionEmbedding(
            "none",
            "NoPE",
            "no position information except the causal mask",
            description="no position encoding",
            neox="upstream",
        ),
    )
)
