"""Detect PEFT adapters in a folder. Transformers applies them when it loads the folder, so they change the model."""

import os
import shlex
from pathlib import Path

from megatron_coca.checkpoints.files import CheckpointError, read_json

CONFIG = "adapter_config.json"
PATTERN = "adapter_model*"


def check_no_adapters(folder: Path) -> None:
    """Raise CheckpointError if a folder has PEFT adapters. The message contains the commands that merge them."""
    described = os.path.isfile(folder / CONFIG)
    found = [CONFIG] * described + sorted(path.name for path in folder.glob(PATTERN) if os.path.isfile(path))
    if not found:
        return
    if not described:
        raise CheckpointError(
            f"{folder}: has {found[0]} but no {CONFIG}, which describes it; add {CONFIG}, or move {found[0]} elsewhere"
        )
    raise CheckpointError(
        f"{folder}: has PEFT adapters ({', '.join(found)}), which only transformers applies; merge them into their "
        "base model, and use the merged folder:\n" + "\n".join(f"    {line}" for line in merging_lines(folder))
    )


def merging_lines(folder: Path) -> list[str]:
    """Return the shell commands that merge the adapters in a folder into the base model and save FOLDER-merged."""
    named = read_json(folder / CONFIG).get("base_model_name_or_path")
    within = not isinstance(named, str) or not named or Path(named).resolve() == folder.resolve()
    base, adapters, merged = (folder if within else named), str(folder), f"{folder}-merged"
    lines = []
    if within:  # transformers would apply adapters beside the base model when it loads the base model
        adapters = f"{folder}-adapters"
        lines += [
            f"mkdir {shlex.quote(adapters)}",
            f"mv {shlex.quote(str(folder))}/adapter_* {shlex.quote(adapters)}",
        ]
    code = (
        "from peft import PeftModel as P; from transformers import AutoModelForCausalLM as M; "
        f"P.from_pretrained(M.from_pretrained({str(base)!r}), {adapters!r}).merge_and_unload()"
        f".save_pretrained({merged!r})"
    )
    return [*lines, f"python -c {shlex.quote(code)}"]
