"""Recognize folders of other trainers: weight names that contain wrappers, and saves that transformers cannot load."""

import re
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_coca.checkpoints.weights import WeightEntry

_WRAPPERS = re.compile(r"^(?:module\.)+|(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that wrappers of modules add to weight names. DistributedDataParallel adds its part only at the start. The
other wrappers are torch.compile, FSDP and activation checkpointing.
"""


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Map the name of each weight without wrappers to its name in the files.

    If two names would become equal without their wrappers, the names do not belong to one model, and none is shortened.
    """
    plain = {_WRAPPERS.sub("", name): name for name in names}
    return plain if len(plain) == len(names) else {name: name for name in names}


def empty_weights(entries: Mapping[str, WeightEntry]) -> str | None:
    """Return the problem and its remedy if some weights have no elements, or None."""
    empty = [name for name, entry in entries.items() if 0 in entry.shape]
    if not empty:
        return None
    return (
        f"{len(empty)} of {len(entries)} weights have no values, for example {empty[0]}, because ZeRO stage 3 keeps "
        "them in parts; save with stage3_gather_16bit_weights_on_model_save, or write the weights with zero_to_fp32.py "
        "of the DeepSpeed checkpoint"
    )


class _Save(NamedTuple):
    """A pattern of files that show how a folder was saved, a description of these files, and the remedy."""

    pattern: str
    what: str
    remedy: Callable[[Path], str]


_OTHER_SAVES = (
    _Save(
        "*-of-*.safetensors",
        "safetensors files without their index",
        lambda folder: "add model.safetensors.index.json from the same place",
    ),
    _Save(
        "pytorch_model-*-of-*.bin",
        "pickles without their index",
        lambda folder: "add pytorch_model.bin.index.json from the same place",
    ),
    _Save(
        "zero_to_fp32.py",
        "a checkpoint of DeepSpeed",
        lambda folder: (
            f"write the weights into the folder with\n    cd {shlex.quote(str(folder))} && "
            "python zero_to_fp32.py . . --safe_serialization"
        ),
    ),
    _Save(
        "pytorch_model_fsdp_*",
        "a sharded checkpoint of FSDP",
        lambda folder: (
            "write the weights into the folder with\n    accelerate merge-weights "
            f"{shlex.quote(str(folder / 'pytorch_model_fsdp_0'))} {shlex.quote(str(folder))}"
        ),
    ),
    _Save(
        "checkpoint-*",
        "the checkpoints of a Hugging Face Trainer",
        lambda folder: "use one of these subfolders",
    ),
    _Save(
        "consolidated*",
        "weights in the model authors' own layout",
        lambda folder: "use the files that the authors published for transformers",
    ),
    *(
        _Save(name, f"weights of {library}", lambda folder: "use a revision of the model with PyTorch weights")
        for name, library in (("tf_model*.h5", "TensorFlow"), ("flax_model*.msgpack", "Flax"))
    ),
)
"""Kinds of saves that transformers' PyTorch classes cannot load. The first pattern that matches decides."""


def other_save(folder: Path) -> str | None:
    """Return what a folder without weights contains instead, and the remedy, or None if that is unknown."""
    for pattern, what, remedy in _OTHER_SAVES:
        found = next(iter(sorted(folder.glob(pattern))), None)
        if found is not None:
            return f"the folder contains {what} ({found.name}); {remedy(folder)}"
    return None
