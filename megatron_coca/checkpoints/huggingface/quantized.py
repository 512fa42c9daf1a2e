"""Read weights in FP8 as full-precision weights. Folders with other quantized weights must be converted first.

In an FP8 folder, a weight of 8-bit floating-point numbers has a second tensor with its scales: one scale for each block
of the matrix, or one for the whole matrix. A weight is its numbers times their scales, in float32.
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
FP8 = "fp8"
SCALE = "_scale_inv"
"""End of the name of a weight's scales, after the name of the weight."""
UNNEEDED = (".activation_scale", ".input_scale")
"""Ends of the names of the scales of a layer's input. They only affect computation in FP8."""
STORED = {"F8_E4M3": torch.float8_e4m3fn}
"""Code of safetensors for the numbers of a quantized weight -> dtype."""

_MODEL = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T"
_SAVED = (
    "save_pretrained({target}, save_original_format=False)"  # the default saves quantized weights again
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
    if kind is None or kind == FP8:
        return
    code = CONVERSIONS.get(kind)
    named = {"source": json.dumps(str(source.parent)), "target": json.dumps(f"{source.parent}-full")}
    remedy = (
        f"convert the folder with\n    python -c {shlex.quote(code.format(**named))}"
        if code is not None
        else "use the model that it was made from: hf download OWNER/NAME --local-dir models/NAME"
    )
    raise CheckpointError(f"{source}: {KEY}: weights of quant_method {kind!r} are not supported; {remedy}")


def is_scale(name: str) -> bool:
    """Return whether a tensor of an FP8 folder is a scale, not a weight."""
    return name.endswith((SCALE, *UNNEEDED))


def open_dequantized(
    open_files: Callable[[Iterable[str]], Weights], names: Iterable[str], known: Collection[str]
) -> Weights:
    """Open weights of an FP8 folder, each multiplied by its scales when it is read.

    `open_files` opens the named tensors, and `known` contains the names of all tensors in the folder. Weights without
    scales are not changed. Raises CheckpointError if the scales of a weight do not fit, or are missing.
    """
    names = list(names)
    scales = {name: f"{name}{SCALE}" for name in names if f"{name}{SCALE}" in known}
    stored = open_files([*names, *scales.values()])
    for name in names:
        dtype, shape = stored.entries[name]
        if dtype in STORED.values() and name not in scales:
            raise CheckpointError(f"{stored.source}: {name}: has no scales ({name}{SCALE}); download the folder again")
        if name in scales and not _fits(shape, stored.entries[scales[name]].shape):
            raise CheckpointError(
                f"{stored.source}: {scales[name]} has shape {list(stored.entries[scales[name]].shape)}, which does not "
                f"divide {name} {list(shape)} into blocks; download the folder again"
            )

    def read(name: str) -> Tensor:
        values = stored.read(name)
        return dequantized(values, stored.read(scales[name])) if name in scales else values

    entries = {
        name: WeightEntry(torch.float32, stored.entries[name].shape) if name in scales else stored.entries[name]
        for name in names
    }
    return replace(stored, entries=entries, read=read)


def _grid(scales: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of blocks in each direction, from the shape of the scales."""
    return (scales[0], scales[1]) if len(scales) == 2 else (1, 1)


def _fits(shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Return whether scales of this shape divide a matrix evenly into blocks."""
    known = len(scales) == 2 or scales in ((), (1,))
    return known and len(shape) == 2 and all(c and n % c == 0 for n, c in zip(shape, _grid(scales), strict=True))


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply a matrix by the scales of its blocks. Return float32."""
    rows, columns = _grid(tuple(scales.shape))
    blocks = values.float().view(rows, len(values) // rows, columns, values.shape[1] // columns)
    return (blocks * scales.float().reshape(rows, 1, columns, 1)).reshape(values.shape)
