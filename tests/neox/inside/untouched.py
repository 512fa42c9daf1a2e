"""python [-m megatron_coca.neox_plugin] .../untouched.py OUT.json, in a GPT-NeoX checkout.

OUT.json gets the sha256 of logits and gradients of GPT-NeoX's own position methods: equal with the plugin and without.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from models import VOCABULARY, arguments, forward, theirs
from torch.nn.functional import cross_entropy

METHODS = ("rotary", "alibi", "learned", "sinusoidal", "rpe", "none")


def digest(method: str) -> str:
    model = theirs(arguments({"pos_emb": method, "attention_dropout": 0.1}))
    model.train_mode()
    tokens = torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(3))
    logits = forward(model, tokens)
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    tensors = [logits, *(weight.grad for weight in model.parameters())]
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in tensors)).hexdigest()


Path(sys.argv[1]).write_text(json.dumps({method: digest(method) for method in METHODS}))
