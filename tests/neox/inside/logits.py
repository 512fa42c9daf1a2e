"""python -m megatron_coca.neox_plugin .../logits.py CASES.json OUT.json, in a GPT-NeoX checkout.

CASES.json has by name the model's keys and a length in tokens. For each, OUT.json gets the standard deviation of our
logits, and the largest differences of GPT-NeoX's from ours with the same weights: `whole` of one pass, `cached` of a
prompt in a cache and tokens one by one behind it, `gradient` of weights relative to the largest one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from models import VOCABULARY, arguments, forward, give_weights, our_config, ours, parameters, theirs
from torch import Tensor
from torch.nn.functional import cross_entropy

SAMPLES, PROMPT = 2, 11


def compare(keys: dict[str, Any], length: int) -> dict[str, float]:
    made, own = arguments(keys), ours(keys)
    model = theirs(made)
    give_weights(model, our_config(keys), dict(own.named_parameters()))
    tokens = torch.randint(VOCABULARY, (SAMPLES, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = own(tokens)
        found = {"spread": whole.std().item(), "whole": _difference(forward(model, tokens), whole)}
    found["gradient"] = _gradient(model, own, our_config(keys), tokens)
    return found | {"cached": _cached(model, own, tokens)}


def _difference(theirs: Tensor, ours: Tensor) -> float:
    return (theirs - ours).abs().max().item()


def _gradient(model: Any, own: Any, config: Any, tokens: Tensor) -> float:
    for logits in (forward(model, tokens), own(tokens)):
        cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    pairs = parameters(model, config, {name: weight.grad for name, weight in own.named_parameters()})
    worst = torch.tensor(max(_difference(weight.grad, grad) / grad.abs().max().item() for weight, grad in pairs))
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return worst.item()


@torch.no_grad()
def _cached(model: Any, own: Any, tokens: Tensor) -> float:
    model.inference_mode(use_cache=True)
    cache, worst = own.new_cache(), 0.0
    steps = [tokens[:, :PROMPT], *tokens[:, PROMPT:].split(1, dim=1)]
    for step in steps:
        expected = own.logits(own.hidden_states(step, cache=cache))
        worst = max(worst, _difference(forward(model, step, begin=len(cache) - step.shape[1]), expected))
    model.clear_cache()
    return worst


def main(cases: str, out: str) -> None:
    asked = json.loads(Path(cases).read_text())
    found = {name: compare(**case) for name, case in asked.items()}
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


main(*sys.argv[1:])
