"""Read weights in FP8 and MXFP4 in full precision. Folders with other quantized weights must be converted first.

In an FP8 folder, a weight of 8-bit floating-point numbers has a second tensor with its scales: one scale for each block
of the matrix, one for each row, or one for the whole matrix. The blocks at the ends of rows and columns may be smaller
than the others. A weight is its numbers times their scales, in float32.

In an MXFP4 folder, two tensors contain the matrices of all experts. `NAME_blocks`, uint8 [experts, rows, groups, 16],
has two 4-bit numbers in each byte, the first one in the lower bits. `NAME_scales`, uint8 [experts, rows, groups], has
the exponent of each group of 32 numbers. A value is a number of FP4 times 2^(exponent - 127), which bfloat16 represents
exactly (Rouhani et al. 2023, "Microscaling Data Formats for Deep Learning"). A weight is [experts, columns, rows].
"""

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.weights import WeightEntry, Weights

Json = Mapping[str, Any]
KEY = "quantization_config"
FP8, FBGEMM, MXFP4 = "fp8", "fbgemm_fp8", "mxfp4"
READ: dict[str, tuple[str, str]] = {FP8: ("FP8", "float32"), FBGEMM: ("FP8", "float32"), MXFP4: ("MXFP4", "bfloat16")}
"""The `quant_method` of folders that are read -> name of the format, and the dtype of dequantized weights."""
SCALES = ("_scale_inv", "_scale")
"""Endings that are added to a weight's name to name its scales. The weight is always its numbers times the scales."""
UNNEEDED = (".activation_scale", ".input_scale", ".input_scale_ub", ".k_scale", ".v_scale")
"""Ends of the names of scales of a layer's input and of cached keys and values. They only affect FP8 computation."""
SIZE = "weight_block_size"
STORED = {FP8: {"F8_E4M3": torch.float8_e4m3fn}, MXFP4: {"U8": torch.uint8}}
STORED[FBGEMM] = STORED[FP8]
"""`quant_method` -> (code in safetensors files for the numbers of a quantized weight -> their dtype)."""
BLOCKS, EXPONENTS = "_blocks", "_scales"
"""Ends of the names of the two tensors of an MXFP4 weight."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The absolute values of 4-bit numbers, by their lower three bits. The upper bit is the sign."""
IN_BYTE, BIAS = 2, 127

_MODEL = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T"
_SAVED = (
    "save_pretrained({target}, save_original_format=False)"  # by default, quantized weights are saved again
    "; T.from_pretrained({source}).save_pretrained({target})"
)
_DEQUANTIZED = f"{_MODEL}; M.from_pretrained({{source}}).dequantize().{_SAVED}"
_DENSE = (
    f"{_MODEL}, CompressedTensorsConfig as C; "
    f'M.from_pretrained({{source}}, quantization_config=C(dequantize=True), dtype="bfloat16").{_SAVED}'
)
CONVERSIONS: dict[str, str] = {
    "bitsandbytes": _DEQUANTIZED,
    "higgs": _DEQUANTIZED,
    "compressed-tensors": _DENSE,
}
"""`quant_method` -> Python code that writes a folder without quantization."""


def method(config: Json) -> str | None:
    """Return the `quant_method` of a config.json, or None if the weights are not quantized."""
    section = config.get(KEY)
    if not section:
        return None
    return str(section.get("quant_method") or "unknown") if isinstance(section, Mapping) else "unknown"


def check_supported(config: Json, source: Path) -> None:
    """Raise CheckpointError if the weights of a folder are quantized in a way that cannot be read."""
    kind = method(config)
    if kind is None or kind in READ:
        return
    code = CONVERSIONS.get(kind)
    named = {"source": json.dumps(str(source.parent)), "target": json.dumps(f"{source.parent}-full")}
    remedy = (
        f"convert the folder with\n    python -c {shlex.quote(code.format(**named))}"
        if code is not None
        else "use the original, unquantized model: hf download OWNER/NAME --local-dir models/NAME"
    )
    raise CheckpointError(f"{source}: {KEY}: weights of quant_method {kind!r} are not supported; {remedy}")


def block_size(config: Json, source: Path) -> tuple[int, int] | None:
    """Return rows and columns of the blocks in a quantized folder, or None if config.json does not state them.

    Raises CheckpointError.
    """
    size = config[KEY].get(SIZE)
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise CheckpointError(f"{source}: {KEY}.{SIZE}: {size!r:.80} is not two numbers; download the folder again")
    return size[0], size[1]


def weights_in(kind: str, names: Mapping[str, str]) -> dict[str, str]:
    """Map each weight in a quantized folder to the name of its tensor of numbers in the files.

    `names` maps the names of all tensors to their names in the files.
    """
    if kind == MXFP4:
        kept = {name: file for name, file in names.items() if not _scales_blocks(name, names)}
        return {name.removesuffix(BLOCKS): file for name, file in kept.items()}
    scales = (*(f".weight{end}" for end in SCALES), *UNNEEDED)
    return {name: file for name, file in names.items() if not name.endswith(scales)}


def _scales_blocks(name: str, names: Collection[str]) -> bool:
    return name.endswith(EXPONENTS) and name.removesuffix(EXPONENTS) + BLOCKS in names


def open_dequantized(
    kind: str,
    open_files: Callable[[Iterable[str]], Weights],
    names: Iterable[str],
    known: Collection[str],
    size: tuple[int, int] | None,
) -> Weights:
    """Open weights of a quantized folder, each dequantized when it is read.

    `kind` is a key of READ. `open_files` opens the named tensors, `known` contains the names of all tensors in the
    folder, and `size` is the result of `block_size`. Weights without scales are not changed. Raises CheckpointError if
    the scales of a weight do not fit, or are missing.
    """
    names = list(names)
    return _open_blocks(open_files, names, known) if kind == MXFP4 else _open_scaled(open_files, names, known, size)


def _open_scaled(
    open_files: Callable[[Iterable[str]], Weights],
    names: list[str],
    known: Collection[str],
    size: tuple[int, int] | None,
) -> Weights:
    scales = {name: f"{name}{end}" for name in names for end in SCALES if f"{name}{end}" in known}
    stored = open_files([*names, *scales.values()])
    for name in names:
        dtype, shape = stored.entries[name]
        if dtype in STORED[FP8].values() and name not in scales:
            raise CheckpointError(
                f"{stored.source}: {name}: has no scales ({name}{SCALES[0]}); download the folder again"
            )
        if name in scales and _blocks(shape, stored.entries[scales[name]].shape, size) is None:
            told = "into blocks" if size is None else f"into blocks of {size[0]} x {size[1]}"
            raise CheckpointError(
                f"{stored.source}: {scales[name]} has shape {list(stored.entries[scales[name]].shape)}, which does not "
                f"divide {name} {list(shape)} {told}; download the folder again"
            )

    def read(name: str) -> Tensor:
        values = stored.read(name)
        return dequantized(values, stored.read(scales[name]), size) if name in scales else values

    entries = {
        name: WeightEntry(torch.float32, stored.entries[name].shape) if name in scales else stored.entries[name]
        for name in names
    }
    return replace(stored, entries=entries, read=read)


def _blocks(shape: tuple[int, ...], scales: tuple[int, ...], size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of a matrix, or None if its scales do not fit.

    `size` is the size of blocks that config.json states. If it is None, all blocks have the size that the shapes imply.
    """
    if len(shape) != 2:
        return None
    if scales in ((), (1,)):
        return shape[0], shape[1]
    if len(scales) != 2 or 0 in scales:
        return None
    if size is not None:
        return size if all(-(-n // b) == c for n, b, c in zip(shape, size, scales, strict=True)) else None
    even = all(n % c == 0 for n, c in zip(shape, scales, strict=True))
    return (shape[0] // scales[0], shape[1] // scales[1]) if even else None


def dequantized(values: Tensor, scales: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """Multiply a matrix by the scales of its blocks, of `size` rows and columns. Return float32."""
    blocks = _blocks(tuple(values.shape), tuple(scales.shape), size)
    assert blocks is not None
    wide = scales.float().reshape(-(-values.shape[0] // blocks[0]), -1)
    for axis, length in enumerate(blocks):
        wide = wide.repeat_interleave(length, axis).narrow(axis, 0, values.shape[axis])
    return values.float() * wide


def _open_blocks(open_files: Callable[[Iterable[str]], Weights], names: list[str], known: Collection[str]) -> Weights:
    blocks = {name: f"{name}{BLOCKS}" for name in names if f"{name}{BLOCKS}" in known}
    exponents = {name: f"{name}{EXPONENTS}" for name in blocks}
    absent = [name for name in exponents.values() if name not in known]
    stored = open_files([*(blocks.get(name, name) for name in names), *(set(exponents.values()) - {*absent})])
    if absent:
        raise CheckpointError(
            f"{stored.source}: {absent[0].removesuffix(EXPONENTS)}: has no scales ({absent[0]}); "
            "download the folder again"
        )
    entries = {}
    for name in names:
        if name not in blocks:
            entries[name] = stored.entries[name]
            continue
        shape, groups = stored.entries[blocks[name]].shape, stored.entries[exponents[name]].shape
        if len(shape) != 4 or shape[:-1] != groups:
            raise CheckpointError(
                f"{stored.source}: {exponents[name]} has shape {list(groups)}, which does not fit {blocks[name]} "
                f"{list(shape)}; download the folder again"
            )
        entries[name] = WeightEntry(torch.bfloat16, (shape[0], IN_BYTE * shape[2] * shape[3], shape[1]))

    def read(name: str) -> Tensor:
        if name not in blocks:
            return stored.read(name)
        return from_blocks(stored.read(blocks[name]), stored.read(exponents[name]))

    return replace(stored, entries=entries, read=read)


def from_blocks(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return an MXFP4 weight in bfloat16, [experts, columns, rows].

    `blocks` are uint8 [experts, rows, groups, bytes], and `exponents` are uint8 [experts, rows, groups]. Besides the
    result, at most one expert is in memory with full precision.
    """
    experts, rows, groups, size = blocks.shape
    numbers = torch.tensor([*FP4, *(-value for value in FP4)])
    found = torch.empty(experts, IN_BYTE * groups * size, rows, dtype=torch.bfloat16)
    for weight, expert, scales in zip(found, blocks, exponents, strict=True):
        both = torch.stack((expert & 15, expert >> 4), dim=-1).flatten(-2)
        wide = torch.ldexp(numbers[both.int()], scales.int()[..., None] - BIAS)
        weight.copy_(wide.view(rows, -1).t())
    return found
