"""The flash-attn libraries, FlashAttention-3 and FlashAttention-2 (Dao 2023): CUDA, half precision, one band.

Not yet run on a GPU: written from the libraries' documented signatures and tested on the CPU against fakes.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, Band, Needs

DEVICE = "cuda"
DTYPES = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256
SEGMENT_REASON = "its libraries take one query and one key operand, and every key or a window of the latest"


@dataclass(frozen=True)
class Library:
    """A library and what it can do.

    Attributes:
        name: for messages.
        module, package: to import and to install.
        oldest: minimum version, or None if the module has no version.
        architectures: supported major compute capabilities.
        formulas: supported biases.
        dropout: support for attention dropout.
    """

    name: str
    module: str
    package: str
    oldest: tuple[int, int] | None
    architectures: range
    formulas: tuple[str | None, ...]
    dropout: bool

    def lacks(self, needs: Needs) -> str | None:
        """None, or the reason why no machine supports it."""
        if needs.bias not in self.formulas:
            return f"{self.name} has no {needs.bias} bias"
        return f"{self.name} has no dropout" if needs.dropout > 0 and not self.dropout else None

    def absent(self) -> str | None:
        """None, or the reason why this machine does not support it."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.name} cannot be imported ({error}); install {self.package}"
        if self.oldest is not None and _version(module.__version__) < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            return f"{self.name} is version {module.__version__}; install {self.package} {oldest} or newer"
        major, minor = torch.cuda.get_device_capability()
        if major not in self.architectures:
            return f"{self.name} has no kernels for compute capability {major}.{minor}"
        return None


LIBRARIES = (
    Library("FlashAttention-3", "flash_attn_interface", "flash-attn-3", None, range(9, 10), (None,), dropout=False),
    Library("FlashAttention-2", "flash_attn", "flash-attn", (2, 4), range(8, 13), (None, "linear"), dropout=True),
)
"""In order of preference: the first is for Hopper alone."""


class FlashBackend:
    """One segment with every key or a window of the latest, ALiBi, dropout, and packed documents without padding."""

    def supports(self, needs: Needs) -> str | None:
        """None, or the reason why this machine does not support it."""
        return self.refuses(needs) or _joined([library.lacks(needs) or library.absent() for library in LIBRARIES])

    def refuses(self, needs: Needs) -> str | None:
        """None, or the reason why it is unsupported, regardless of the installed libraries."""
        if needs.device_type != DEVICE:
            return f"the flash-attn libraries run on CUDA, not {needs.device_type}"
        if needs.head_dim % 8 or needs.head_dim > WIDEST_HEAD:
            return (
                f"its libraries need a head_dim that is a multiple of 8 and at most {WIDEST_HEAD}, not {needs.head_dim}"
            )
        if len(needs.bands) > 1 or needs.bands[0].low != 0 or needs.bands[0].first_keys is not None:
            return SEGMENT_REASON
        return _joined([library.lacks(needs) for library in LIBRARIES])

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """[batch, heads, query_length, head_dim] in the query's dtype.

        Raises:
            TypeError: the operands are neither float16 nor bfloat16.
            ValueError: no library serves these inputs, slopes require gradients, or documents do not cover all queries.
        """
        if inputs.query.dtype not in DTYPES:
            raise TypeError(
                f"attention_backend flash computes in float16 or bfloat16, not {inputs.query.dtype}; "
                "set precision to one of them, or attention_backend to auto"
            )
        library, options = _library(inputs), _options(inputs)
        if inputs.documents is not None:
            return _attend_documents(library, inputs, options)
        operands = (x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value))
        return _output(_function(library, "flash_attn_func")(*operands, **options)).transpose(1, 2)


def _joined(reasons: list[str | None]) -> str | None:
    """All reasons, or None if a library has none."""
    given = [reason for reason in reasons if reason is not None]
    return "; ".join(given) if len(given) == len(reasons) else None


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _library(inputs: AttentionInputs) -> Library:
    """The first library that supports these inputs (without dropout in evaluation)."""
    formula = None if inputs.bias is None else inputs.bias.formula
    bands = tuple(segment.band for segment in inputs.segments)
    return _library_for(Needs(inputs.query.device.type, inputs.query.shape[3], formula, bands, inputs.dropout))


@lru_cache(maxsize=16)
def _library_for(needs: Needs) -> Library:
    reason = FlashBackend().supports(needs)
    if reason is not None:
        raise ValueError(f"flash attention: {reason}")
    return next(library for library in LIBRARIES if (library.lacks(needs) or library.absent()) is None)


def _options(inputs: AttentionInputs) -> dict[str, Any]:
    """Keyword arguments of the library's functions."""
    options = {"softmax_scale": inputs.scale, "causal": True, "window_size": _window(inputs.segments[0].band)}
    if inputs.dropout > 0:
        options["dropout_p"] = inputs.dropout
    if inputs.bias is not None:
        slopes = inputs.bias.coefficients[:, 0]
        if slopes.requires_grad:
            raise ValueError("flash attention computes no gradients for the slopes of a linear bias; keep them fixed")
        options["alibi_slopes"] = slopes.to(inputs.query.device, torch.float32)
    return options


def _window(band: Band) -> tuple[int, int]:
    """The library's (left, right) window: visible keys before and after the query's own, -1 for all."""
    return (-1, -1) if band.high is None else (band.high - 1, 0)


def _function(library: Library, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(library.module), name)
    return function


def _output(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output alone: releases of FlashAttention-3 before `return_attn_probs` returned (output, log-sum-exp)."""
    return result[0] if isinstance(result, tuple) else result


@dataclass(frozen=True)
class _Packing:
    """The documents of a batch as one sequence of tokens, without those that have no queries.

    Attributes:
        query_ends, key_ends: cumulative lengths from 0 on, [documents + 1] int32.
        longest_query, longest_key: tokens of the longest document.
        keys: indices of their keys in the concatenated rows, [kept] int64.
    """

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    keys: Tensor


def _attend_documents(library: Library, inputs: AttentionInputs, options: dict[str, Any]) -> Tensor:
    assert inputs.documents is not None
    batch, _, query_length, _ = inputs.query.shape
    packing = _packing(inputs.documents.spans, inputs.past, inputs.value.shape[2], inputs.value.device)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (inputs.query, inputs.key, inputs.value))
    if inputs.past > 0:
        key, value = key[packing.keys], value[packing.keys]
    result = _function(library, "flash_attn_varlen_func")(
        query,
        key,
        value,
        cu_seqlens_q=packing.query_ends,
        cu_seqlens_k=packing.key_ends,
        max_seqlen_q=packing.longest_query,
        max_seqlen_k=packing.longest_key,
        **options,
    )
    return _output(result).unflatten(0, (batch, query_length)).transpose(1, 2)


@lru_cache(maxsize=4)
def _packing(spans: tuple[tuple[tuple[int, int], ...], ...], past: int, length: int, device: torch.device) -> _Packing:
    """Cached, because all layers have the same documents."""
    documents = [(row, start, stop) for row, of_row in enumerate(spans) for start, stop in of_row if stop > past]
    query_lengths = [stop - max(start, past) for _, start, stop in documents]
    key_lengths = [stop - start for _, start, stop in documents]
    if sum(query_lengths) != len(spans) * (length - past):
        raise ValueError(f"the documents {spans} do not cover the tokens {past} to {length} of every row")
    query_ends, key_ends = (
        torch.tensor([0, *lengths]).cumsum(0).int().to(device) for lengths in (query_lengths, key_lengths)
    )
    keys = torch.cat([torch.arange(row * length + start, row * length + stop) for row, start, stop in documents])
    return _Packing(query_ends, key_ends, max(query_lengths), max(key_lengths), keys.to(device))
