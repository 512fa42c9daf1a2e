"""Values of `forgetting_gate`: a learned bias of each query-key pair, computed from the tokens after the key up to the
query.
"""

from megatron_coca.methods.declaration import ForgettingGate, declare

_FILE = "the modelling file does not support gates"
_NEOX = "GPT-NeoX has no weights for it"

declare(
    (
        ForgettingGate(
            "fox",
            "FoX",
            "Forgetting Transformer, Lin et al. 2025",
            meaning="learned gates lower the scores of earlier tokens",
            rule="`ln sigmoid(w x + b)`",
            trained=True,
            huggingface=_FILE,
            neox=_NEOX,
        ),
        ForgettingGate(
            "cable",
            "CABLE",
            "Veisi et al. 2025",
            meaning="learned gates lower the scores of earlier tokens",
            rule="`-softplus(w x + b)`",
            trained=True,
            huggingface=_FILE,
            neox=_NEOX,
        ),
    )
)
