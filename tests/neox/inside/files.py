"""python -m megatron_coca.neox_plugin .../files.py OUT.json FILE ..., in a GPT-NeoX checkout.

OUT.json gets, for each YAML file, what NeoXArgs makes of it on eight GPUs, or its message.
"""

import json
import sys
from pathlib import Path

from megatron.neox_arguments import NeoXArgs

KEYS = ("pos_emb", "optimizer_type", "gradient_accumulation_steps", "train_batch_size", "vocab_size", "lr_warmup_init")


def read(file: str) -> dict[str, object]:
    try:
        made = NeoXArgs.from_ymls([file], overwrite_values={"global_num_gpus": 8})
    except ValueError as error:
        return {"error": str(error)}
    return {name: getattr(made, name) for name in KEYS}


out, *files = sys.argv[1:]
Path(out).write_text(json.dumps({Path(file).stem: read(file) for file in files}))
