"""Declarations of the attention backends, readable without PyTorch. `attention/build.py` loads their classes."""

from typing import NamedTuple


class DeclaredBackend(NamedTuple):
    """The properties of an attention backend that other code reads.

    Attributes:
        place: its module in `attention/backends` and its class, as `module.Class`.
        summary: its description in docs/backends.md.
        caps: whether it supports soft-capping of scores.
        sinks: whether it supports sink logits.
        rings: whether ranks that divide a sequence can use it.
        uncompiled: the reason why blocks with this backend are not compiled; None if they are compiled.
    """

    place: str
    summary: str
    caps: bool = False
    sinks: bool = False
    rings: bool = False
    uncompiled: str | None = None


BACKENDS: dict[str, DeclaredBackend] = {
    "sdpa": DeclaredBackend(
        "sdpa.SdpaBackend",
        "PyTorch's scaled_dot_product_attention, with cuDNN from Hopper on; biases on the CPU need no N x N tensor",
        caps=True,
    ),
    "merge": DeclaredBackend(
        "merge.MergeBackend",
        "several calls of PyTorch's flash kernels, merged by log-sum-exp; on a GPU only in half precision",
        sinks=True,  # it computes the log-sum-exp of every row
        rings=True,
    ),
    "flex": DeclaredBackend(
        "flex.FlexBackend",
        "PyTorch's FlexAttention, compiled",
        caps=True,
        uncompiled="its kernel is compiled separately, and a compiled block would compute the mask again in every"
        " layer",
    ),
    "triton": DeclaredBackend("triton.TritonBackend", "the kernels of megatron_coca.kernels"),
    "reference": DeclaredBackend(
        "reference.ReferenceBackend",
        "dense, with O(N^2) memory, in any precision; the tests compare the other backends with it",
        caps=True,
        sinks=True,
        rings=True,
        uncompiled="this backend is the reference for the other backends and runs one operation at a time",
    ),
}
AUTOMATIC = {"cuda": ("sdpa", "triton", "flex", "merge"), "cpu": ("sdpa", "merge")}
"""Candidates for `auto` by device type, in order of preference; `PREFERRED` in attention/build.py has exceptions.
`triton` comes before `merge` because it needs 5 kernel launches instead of 23 (docs/attention.md), and `merge` has not
been timed on a GPU. On the CPU, `triton` would run in Triton's slow interpreter. `reference` is never chosen
automatically, because it needs O(N^2) memory.
"""
