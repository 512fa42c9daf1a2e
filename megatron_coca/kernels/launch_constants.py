"""Constants for a call of the attention kernels: scale, bands, formula and block sizes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_coca.kernels.tiles import OPTIONS, operand, table

WIDEST = 256
"""The largest head_dim in CONFIGS."""
WIDEST_MAGNITUDES = 128
"""The largest number of magnitudes per head from which the kernels compute Q' and K' without spilling registers."""


class Launch(NamedTuple):
    """Launch parameters of one kernel: queries (`rows`) and keys per tile, warps per program, pipeline stages of the
    loop, and the maximum number of registers per thread (None: chosen by the compiler).
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


class Launches(NamedTuple):
    """The launch parameters of the three kernels."""

    forward: Launch
    key_gradients: Launch
    query_gradients: Launch


SMALL = Launches(Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1))
"""Launch parameters for the interpreter. Tiles are small, because tests need several tiles and the interpreter takes
the same time for all sizes.
"""

_SINGLE = Launch(32, 16, 8, 1)
"""Launch parameters for float32 with 256 features. Larger tiles need more than 99 KiB of shared memory or spill
registers. With two segments, registers always spill.
"""
_WIDE = {
    (1, 512): Launches(Launch(64, 32, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1)),
    (2, 512): Launches(Launch(32, 32, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1)),
    (1, 2048): Launches(_SINGLE, _SINGLE, _SINGLE),
    (2, 2048): Launches(*(Launch(16, 16, 8, 1),) * 3),
}
_AMPERE_64 = Launches(Launch(128, 32, 4, 3), Launch(32, 64, 4, 2), Launch(128, 32, 8, 2))
_HOPPER_64 = Launches(Launch(128, 64, 8, 3, 128), Launch(32, 64, 4, 2), Launch(128, 32, 8, 2))
_TWO_64 = Launches(Launch(128, 64, 8, 2), Launch(32, 64, 4, 2), Launch(128, 32, 8, 2))
_TWO_BLACKWELL_64 = Launches(Launch(128, 64, 8, 2), Launch(32, 64, 4, 2), Launch(64, 32, 8, 2))
_BLACKWELL_64 = Launches(Launch(128, 64, 8, 3), Launch(32, 64, 4, 2), Launch(128, 32, 8, 2))
CONFIGS: dict[int, dict[tuple[int, int], Launches]] = {
    80: {
        **{(1, row): _AMPERE_64 for row in (32, 64, 128)},
        (1, 256): Launches(Launch(128, 32, 8, 3), Launch(32, 64, 8, 2), Launch(64, 32, 8, 2)),
        **{(2, row): _TWO_64 for row in (32, 64, 128)},
        (2, 256): Launches(Launch(64, 64, 8, 2), Launch(32, 64, 8, 2), Launch(64, 32, 8, 2)),
        **_WIDE,
    },
    90: {
        **{(1, row): _HOPPER_64 for row in (32, 64, 128)},
        (1, 256): Launches(Launch(128, 64, 8, 2), Launch(16, 128, 8, 2), Launch(128, 32, 8, 2)),
        **{(2, row): _TWO_64 for row in (32, 64, 128)},
        (2, 256): Launches(Launch(64, 64, 8, 2), Launch(16, 128, 8, 2), Launch(64, 32, 8, 2)),
        **_WIDE,
    },
    100: {
        **{(1, row): _BLACKWELL_64 for row in (32, 64, 128)},
        (1, 256): Launches(Launch(128, 64, 8, 2), Launch(32, 32, 8, 2), Launch(128, 32, 8, 2)),
        **{(2, row): _TWO_BLACKWELL_64 for row in (32, 64, 128)},
        (2, 256): Launches(Launch(64, 64, 8, 2), Launch(32, 32, 8, 2), Launch(128, 32, 8, 2)),
        **_WIDE,
    },
}
"""Block sizes on CUDA, by architecture and then by (number of segments, `row_class` of the operands).

These sizes have not been compared with other sizes on a GPU. They were chosen from the compiler's reports (recorded in
benchmarks/kernels/budgets.json) so that registers do not spill and loads are pipelined. `with_measured` replaces them
by sizes that were timed on a GPU, if `MEASURED` contains any.
"""
MEASURED = Path(__file__).with_name("measured_blocks.json")
"""Block sizes that tools/gpu/sweep.py found to be faster on a GPU: architecture -> "SEGMENTS ROW_CLASS" -> kernel ->
{"launch": [rows, keys, warps, stages, registers or null], and the measurements}.
"""


def with_measured(
    configs: dict[int, dict[tuple[int, int], Launches]], measured: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[int, dict[tuple[int, int], Launches]]:
    """Return `configs` with the launch parameters in `measured` in place of its own. `measured` has the layout of
    `MEASURED`.
    """
    result = {number: dict(rows) for number, rows in configs.items()}
    for number, rows in measured.items():
        for row, kernels in rows.items():
            segments, size = map(int, row.split())
            launches = {kernel: Launch(*found["launch"]) for kernel, found in kernels.items()}
            result[int(number)][segments, size] = result[int(number)][segments, size]._replace(**launches)
    return result


CONFIGS = with_measured(CONFIGS, json.loads(MEASURED.read_text(encoding="utf-8")))


_MAGNITUDES_80 = Launches(Launch(128, 64, 8, 2), Launch(32, 32, 8, 1), Launch(64, 32, 8, 2))
_MAGNITUDES_90 = Launches(Launch(128, 64, 8, 2), Launch(32, 32, 8, 2), Launch(64, 32, 8, 2))
_WIDE_MAGNITUDES_80 = Launches(Launch(64, 32, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1))
_WIDE_MAGNITUDES_90 = Launches(Launch(64, 64, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1))
MAGNITUDES: dict[int, dict[int, Launches]] = {
    80: {**dict.fromkeys((32, 64, 128), _MAGNITUDES_80), 256: _WIDE_MAGNITUDES_80},
    90: {**dict.fromkeys((32, 64, 128), _MAGNITUDES_90), 256: _WIDE_MAGNITUDES_90},
    100: {**dict.fromkeys((32, 64, 128), _MAGNITUDES_90), 256: _WIDE_MAGNITUDES_90},
}
"""Block sizes for 16-bit operands that are given as magnitudes, by architecture and `row_class` of the magnitudes.
Magnitudes in float32 use the block sizes of operands with 256 features. The sizes were chosen in the same way as those
in CONFIGS.
"""


def architecture(capability: tuple[int, int]) -> int:
    """Return the key in CONFIGS for a compute capability. The launches for 8.0 also fit in the 99 KiB of shared memory
    that 8.6, 8.9 and 12.0 have.
    """
    return {9: 90, 10: 100}.get(capability[0], 80)


def padded(head_dim: int) -> int:
    """Return the number of columns of a tile: the next power of two, but at least 16, the minimum for `tl.dot`."""
    return max(16, triton.next_power_of_2(head_dim))


def row_class(query: Tensor) -> int:
    """Return the class of the operands' rows, a key of `CONFIGS`: the number of bytes in a padded row.

    This number is doubled for float32, because float32 products do not use tensor cores and need more registers. Rows
    of 1,024 bytes are in the class 512.
    """
    factor = 2 if query.dtype == torch.float32 else 1
    size = padded(query.shape[-1]) * query.element_size() * factor
    return 512 if size == 1024 else size


def blocks_for(query: Tensor, segments: int, magnitudes: bool = False) -> Launches:
    """Return the entry of CONFIGS for these operands or, on the CPU (in the interpreter), SMALL."""
    if query.device.type == "cpu":
        return SMALL
    return launches(architecture(torch.cuda.get_device_capability(query.device)), query, segments, magnitudes)


def launches(number: int, query: Tensor, segments: int, magnitudes: bool) -> Launches:
    """Return the launch parameters for the architecture `number`, a key of `CONFIGS`."""
    row = row_class(query)
    if magnitudes and query.dtype != torch.float32:
        return MAGNITUDES[number][row]
    return CONFIGS[number][(1, 2048) if magnitudes else (segments, row)]


class KernelKind(NamedTuple):
    """Compile-time constants of a kernel.

    `far`, `window`, `first` and `documents`: whether there is a far segment, a window, a limit `first_keys` and
    documents. `width`: features of Q' and K' or, if operands are given as magnitudes, of the magnitudes. `value_width`:
    features of V. `columns` and `value_columns` are these widths with padding. `rows` and `keys`: queries and keys per
    tile. `frequencies`: number of rotated magnitudes, or 0 if Q' and K' are given. `offset`: whether heads have
    constant angles.
    """

    far: bool
    window: bool
    first: bool
    documents: bool
    formula: str
    width: int
    columns: int
    value_width: int
    value_columns: int
    rows: int
    keys: int
    frequencies: int
    offset: bool


@dataclass(frozen=True)
class AttentionCall:
    """The constants of an attention call.

    Attributes:
        scale: factor on the dot products.
        window: the first segment scores the distances below this number; None if it scores all distances.
        first_keys: number of keys at the start of a document that the second segment scores; None for all.
        formula: formula of the bias; "none" if there is no bias.
        blocks: launch parameters.
    """

    scale: float
    window: int | None
    first_keys: int | None
    formula: str
    blocks: Launches

    @property
    def limits(self) -> tuple[int, int]:
        """Return (window, first_keys) for the kernels, with 0 instead of None."""
        return self.window or 0, self.first_keys or 0

    def options(self, launch: Launch, operands: "Operands") -> dict[str, Any]:
        """Return the compile-time argument KIND of a kernel and its launch options."""
        width, value_width = operands.query.shape[3], operands.value.shape[3]
        kind = KernelKind(
            far=operands.far_query is not None,
            window=self.window is not None,
            first=self.first_keys is not None and operands.far_query is not None,
            documents=operands.starts is not None,
            formula=self.formula,
            width=width,
            columns=padded(width),
            value_width=value_width,
            value_columns=padded(value_width),
            rows=launch.rows,
            keys=launch.keys,
            frequencies=operands.tables[0].shape[-1] if operands.tables else 0,
            offset=operands.offset is not None,
        )
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **OPTIONS}
        return {"KIND": kind, **options} | ({"maxnreg": launch.maxnreg} if launch.maxnreg else {})


@dataclass(frozen=True)
class Operands:
    """The tensors of an attention call. Their last dimensions are contiguous.

    Attributes:
        query, key: Q' and K' of the first segment, [batch, heads, query_length, head_dim] and [batch, kv_heads,
            key_length, head_dim].
        far_query, far_key: Q' and K' of the second segment, or None.
        value: [batch, kv_heads, key_length, width of V].
        coefficients: coefficients of the bias, float32 [heads, 2], or None.
        starts: index of the first token of each token's document, int64 [batch, key_length], or None.
        tables: empty, or cos and sin of the queries and of the keys, if `query` and `key` are magnitudes.
        offset: constants that are subtracted from the angles of the queries, float32 [heads, frequencies], or None.
    """

    query: Tensor
    key: Tensor
    far_query: Tensor | None
    far_key: Tensor | None
    value: Tensor
    coefficients: Tensor | None
    starts: Tensor | None
    tables: tuple[Tensor, ...] = ()
    offset: Tensor | None = None

    @property
    def turns(self) -> tuple[Any, ...]:
        """Return the tables of the queries and of the keys, and cos and sin of the constant angles, as kernel
        arguments.
        """
        if not self.tables:
            unused = (self.value, self.value, 0, 0)
            return unused, unused, self.value
        query_cos, query_sin, key_cos, key_sin = self.tables
        batch = self.query.shape[0]
        angles = None if self.offset is None else torch.cat((self.offset.cos(), self.offset.sin()), dim=-1)
        return table(query_cos, query_sin, batch), table(key_cos, key_sin, batch), self.filled(angles)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return (heads, query heads per key head, query_length, key_length)."""
        heads, query_length = self.query.shape[1:3]
        return heads, heads // self.key.shape[1], query_length, self.key.shape[2]

    def filled(self, x: Tensor | None) -> Tensor:
        """Return `x` or, if it is None, another tensor. The kernel does not read this other tensor."""
        return self.value if x is None else x

    @property
    def tuples(self) -> tuple[tuple[Tensor, int, int, int], ...]:
        """Return query, key, far query, far key and value as kernel arguments (see `operand`)."""
        tensors = (self.query, self.key, self.far_query, self.far_key, self.value)
        return tuple(operand(self.filled(x)) for x in tensors)
