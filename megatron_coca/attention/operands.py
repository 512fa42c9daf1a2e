"""How the operands of a segment are formed: by PyTorch, or by one fused kernel over q and k.

The kernel gives the numbers of the PyTorch path to within a rounding, so the choice changes speed and memory, never
the method.
"""

from typing import Protocol

from torch import Tensor

from megatron_coca.attention.compiler import missing_compiler
from megatron_coca.attention.frame import SegmentTables
from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.positions.forms import ScoreForm


class OperandMaker(Protocol):
    """q [batch, heads, length, head_dim], k [batch, kv_heads, length, head_dim] -> (Q', K') in the same shapes."""

    def __call__(
        self, form: ScoreForm, q: Tensor, k: Tensor, tables: SegmentTables, factor: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


def with_torch(
    form: ScoreForm, q: Tensor, k: Tensor, tables: SegmentTables, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The formulas as `positions.forms` writes them."""
    return form.query_operand(q, tables.query, factor), form.key_operand(k, tables.key)


def with_triton(
    form: ScoreForm, q: Tensor, k: Tensor, tables: SegmentTables, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One kernel launch, float32 inside, one rounding; backward from q, k and the tables alone.

    Raises:
        ValueError: the form turns nothing, or the kernel cannot serve these tensors.
    """
    # Not at the top: triton exists on some platforms only, and everything else must work without it.
    from megatron_coca.kernels.operands import fused_operands

    if tables.query is None or tables.key is None or form.kernel is None:
        raise ValueError("operand_kernel: triton forms rotated operands, and this method rotates nothing")
    if factor is not None and 2 * tables.query.cos.shape[-1] < q.shape[-1]:
        raise ValueError("operand_kernel: triton has no logit scaling on features that are not rotated")
    return fused_operands(q, k, *tables.query, *tables.key, form.kernel)


OPERAND_MAKERS: dict[str, OperandMaker] = {"torch": with_torch, "triton": with_triton}


def check_operand_kernel(name: str, device_type: str) -> None:
    """Check that the named way to form operands runs on a device.

    Raises:
        BackendError: it does not.
    """
    reason = missing_compiler(device_type) if name == "triton" else None
    if reason is not None:
        raise BackendError(f"operand_kernel triton cannot serve this model: {reason}; set operand_kernel to torch")
