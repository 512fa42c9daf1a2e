"""Exports read by another version of transformers, in another environment.

python -m tests.parity.older_transformers write FOLDER        here: models, exports, and the logits of the checkpoints
OTHER/bin/python tests/parity/older_transformers.py FOLDER    there: load every export, print the error of its logits
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LENGTHS = (20, 100)
LISTS = {"short_factor": [1.0, 1.5, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}
EIGHT = {"original_max_position_embeddings": 8}
EXTENSIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "base": {"rotary_emb_base": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic from 8": {"rope_type": "dynamic", "factor": 4.0} | EIGHT,
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn from 8, options": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 8.0, "attention_factor": 1.3} | EIGHT,
    "yarn, not truncated": {"rope_type": "yarn", "factor": 8.0, "truncate": False},
    "llama3 from 8": {"rope_type": "llama3", "factor": 8.0} | EIGHT,
    "longrope": {"rope_type": "longrope", "factor": 4.0} | LISTS,
    "longrope from 8": {"rope_type": "longrope", "factor": 8.0} | LISTS | EIGHT,
    "longrope, attention factor": {"rope_type": "longrope", "factor": 8.0, "attention_factor": 1.2} | LISTS | EIGHT,
}
NO_WINDOW = {"sliding_window_width": 6, "attention_config": [[["global", "full"], 1]]}
NO_WINDOW |= {"layer_types": {"full": {"sliding_window_width": None}}}
FILES: dict[str, dict[str, Any]] = {
    "coca": {"pos_emb": "coca"},
    "coca yarn": {"pos_emb": "coca", "rope_scaling": EXTENSIONS["yarn"]},
    "coca dynamic": {"pos_emb": "coca", "rope_scaling": EXTENSIONS["dynamic"]},
    "coca, windows in one type": {"pos_emb": "coca"} | NO_WINDOW,
    "alibi": {"pos_emb": "alibi"},
    "rerope": {"relative_positions": {"type": "rerope", "window": 5}},
}
"""Models that need the modelling file."""


def sources(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield names, checkpoints and sizes of the vocabulary."""
    from tests.parity.exported import GROUPED, NEOX, random_checkpoint
    from tests.parity.families import test_families

    for name, options in EXTENSIONS.items():
        keys = options if "rope_type" not in options else {"rope_scaling": options}
        whole = {"rotary_pct": 1.0} if "short_factor" in options else {}
        for kind, shape in (("neox", NEOX | whole), ("llama", GROUPED)):
            yield f"{kind}, {name}", random_checkpoint(folder / f"{kind} {name}", **shape | keys), 500
    for name, keys in FILES.items():
        yield f"file, {name}", random_checkpoint(folder / f"file {name}", **GROUPED | keys), 500
    for name in test_families.CASES:
        test_families.build(name).save_pretrained(folder / name)
        yield name, folder / name, 96


@torch.no_grad()
def write(folder: Path) -> None:
    """Write all exports to `folder`, each with the logits of its source."""
    from megatron_coca import load_model
    from megatron_coca.checkpoints.exporting import export

    names = []
    for number, (name, source, vocabulary) in enumerate(sources(folder / "sources")):
        done, model = export(source, folder / str(number)), load_model(source)
        rows = [torch.randint(vocabulary, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
        torch.save([(ids, model(ids)) for ids in rows], done.folder / "logits.pt")
        names.append((name, done.model_type))
    (folder / "names.json").write_text(json.dumps(names))


@torch.no_grad()
def read(folder: Path) -> None:
    """Print the largest difference of every export."""
    import transformers

    print(f"transformers {transformers.__version__}")
    for number, (name, kind) in enumerate(json.loads((folder / "names.json").read_text())):
        attention = "sdpa" if kind == "falcon" else "eager"  # eager adds Falcon's ALiBi twice
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder / str(number), trust_remote_code=True, attn_implementation=attention
            ).eval()
            rows = torch.load(folder / str(number) / "logits.pt")
            apart = max(float((model(ids).logits - expected).abs().max()) for ids, expected in rows)
            print(f"{apart:.1e}  {kind:12} {name}")
        except Exception as error:  # of a model that this version cannot express
            print(f"error    {kind:12} {name}: {type(error).__name__}: {str(error)[:90]}")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        read(Path(sys.argv[1]))
