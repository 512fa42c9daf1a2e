"""The choice of a backend: made once, when a model is built, and logged with what was passed over and why."""

import logging

from megatron_coca.attention.backends.flash import FlashBackend
from megatron_coca.attention.backends.flex import FlexBackend
from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import SdpaBackend
from megatron_coca.attention.backends.triton import TritonBackend
from megatron_coca.attention.inputs import Backend, BackendError, Needs

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    "sdpa": SdpaBackend(),
    "merge": MergeBackend(),
    "flash": FlashBackend(),
    "flex": FlexBackend(),
    "triton": TritonBackend(),
    "reference": ReferenceBackend(),
}
AUTOMATIC = ("sdpa", "merge", "flex")
"""What `auto` may take, in order of preference. `flash` and `triton` are taken only by name, until a measurement shows
where they are faster; the reference only by name, because it needs O(N^2) memory.
"""


def select_backend(name: str, needs: Needs) -> tuple[str, Backend]:
    """(name, backend) for `attention_backend: name`.

    Raises:
        BackendError: the named backend cannot serve `needs` (it is never replaced silently), or none of the
        automatic ones can.
    """
    candidates = AUTOMATIC if name == "auto" else (name,)
    reasons: dict[str, str] = {}
    for candidate in candidates:
        reason = BACKENDS[candidate].supports(needs)
        if reason is None:
            logger.info("attention backend %s%s", candidate, _passed_over(reasons))
            return candidate, BACKENDS[candidate]
        reasons[candidate] = reason
    remedy = (
        "; set attention_backend to another one or to auto"
        if name != "auto"
        else "; attention_backend: reference runs anything, slowly"
    )
    raise BackendError(f"attention_backend {name} cannot serve this model{_passed_over(reasons)}{remedy}")


def _passed_over(reasons: dict[str, str]) -> str:
    return "".join(f"; not {name}: {reason}" for name, reason in reasons.items())
