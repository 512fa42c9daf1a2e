"""python stub_outputs.py CASES.json OUT.json [DENIED ...], with tests/neox/stub and this package on PYTHONPATH.

Write the outputs of the plugin in the stub of GPT-NeoX, by case. The script needs only Python 3.10, PyTorch 2.3, PyYAML
and pydantic: importing a DENIED package fails as if it were not installed.
"""

import importlib.abc
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

LENGTH, PROMPT, BATCH, WIDTH = 24, 9, 2, 32
"""Tokens, longer than the training length of 16; tokens before those that are decoded one by one."""

MODEL = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "seq_length": 16, "train_iters": 20}
MODEL |= {"max_position_embeddings": 64, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Deny(importlib.abc.MetaPathFinder):
    """Finds no package of these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def outputs(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By case: what a layer makes of LENGTH tokens at once (`whole`), of PROMPT tokens and the others one by one in a
    cache (`cached`), and the gradient with respect to its input. Weights and inputs follow from formulas.
    """
    from megatron.neox_arguments import NeoXArgs

    return {name: _layer_outputs(NeoXArgs(**MODEL | dict(keys))) for name, keys in cases.items()}


def _layer_outputs(neox_args: Any) -> dict[str, list[float]]:
    import torch
    from megatron.model import transformer

    rotary = neox_args.pos_emb == "rotary"
    layer = transformer.ParallelSelfAttention(
        neox_args, None, None, None, layer_number=0, rotary=rotary, use_cache=True
    )
    with torch.no_grad():
        for number, weight in enumerate(layer.parameters()):
            weight.copy_((torch.arange(weight.numel()) * (number + 1.0)).sin().reshape(weight.shape) / 3)
    tokens = (torch.arange(LENGTH * BATCH * WIDTH) * 0.7).sin().reshape(LENGTH, BATCH, WIDTH).requires_grad_()
    (whole, _), _ = layer(tokens, None)
    (gradient,) = torch.autograd.grad((whole * torch.arange(WIDTH)).sum(), tokens)
    parts, past = [], None
    with torch.no_grad():
        for part in tokens.split([PROMPT] + [1] * (LENGTH - PROMPT)):
            (out, past), _ = layer.eval()(part, None, layer_past=past)
            parts.append(out)
    found = {"whole": whole, "cached": torch.cat(parts), "gradient": gradient}
    return {name: x.flatten().tolist() for name, x in found.items()}


def main(cases: str, out: str, *denied: str) -> None:
    sys.meta_path.insert(0, Deny(denied))
    from megatron_coca.neox_plugin import activate

    activate()
    Path(out).write_text(json.dumps(outputs(json.loads(Path(cases).read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
