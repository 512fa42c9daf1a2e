"""Generation with the cache, with a plain loop over full passes, and with transformers gives the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from megatron_coca import load_model, methods
from megatron_coca.config import load_config
from megatron_coca.model import DYNAMIC_LENGTHS, GPT, Sampling, build_model, generate

TRAINED, PROMPT, NEW, VOCABULARY = 16, 30, 12, 90
SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": TRAINED,
    "max_position_embeddings": PROMPT + NEW,
    "vocab_size": VOCABULARY,
    "no_weight_tying": True,
}
LONG = [1.0 + 0.5 * j for j in range(8)]
EXTENSIONS: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic_yarn"}},
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": LONG, "factor": 4.0}},
    {"logit_scaling": "log_n"},
    {"relative_positions": {"type": "rerope", "window": 6}},
    {"relative_positions": {"type": "leaky_rerope", "window": 6}},
    {"relative_positions": {"type": "self_extend", "window": 6, "group_size": 4}},
    {"relative_positions": {"type": "lm_infinite", "window": 12, "sinks": 3}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "relative_positions": {"type": "rerope"}}
    | {"logit_scaling": "log_n"},
]
ROTATED = ("rotary", "coca", "coca_strict", "xpos")
CASES = [{"pos_emb": name} for name in methods.names("pos_emb")]
CASES += [{"pos_emb": ROTATED[number % 4]} | extension for number, extension in enumerate(EXTENSIONS)]
CASES += [{"pos_emb": "coca"} | extension for extension in EXTENSIONS[2::2]]
CASES += [
    {"pos_emb": "rotary", "relative_positions": {"type": "streaming", "window": 12, "sinks": 3}},
    {"pos_emb": "alibi", "logit_scaling": "log_n"},
    {"pos_emb": "coca", "num_kv_heads": 1, "rotary_pct": 0.5, "gpt_j_residual": True},
]


def random_model(**keys: Any) -> GPT:
    """Weights so large that what is generated depends on the prompt, and rarely repeats."""
    model = build_model(load_config([], SHAPE | keys), training=False).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def prompts(length: int = PROMPT) -> Tensor:
    return torch.randint(VOCABULARY, (3, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def by_full_passes(model: GPT, ids: Tensor, new: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """The tokens, and by how much each was ahead of the next best one: all logits of every pass, the last one used. An
    extension sees `length`, or at each pass the number of its tokens.
    """
    margins = []
    for _ in range(new):
        last = model.logits(model.hidden_states(ids, length=length or ids.shape[1]))[:, -1, :VOCABULARY]
        best = last.topk(2).values
        margins.append(best[:, 0] - best[:, 1])
        ids = torch.cat((ids, last.argmax(-1, keepdim=True)), dim=1)
    return ids[:, -new:], torch.stack(margins, dim=1)


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_the_cache_changes_nothing(keys: dict[str, Any]) -> None:
    model, ids = random_model(**keys), prompts()
    wanted, margins = by_full_passes(model, ids, NEW, PROMPT + NEW)
    assert margins.min() > 1e-4, "float32 decides which token is the largest: another seed is needed"
    assert torch.equal(generate(model, ids, NEW, dynamic_length="total"), wanted)


GROWING: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "dynamic_max": {"target_length": 40},
    "dynamic_yarn": {"beta_fast": 4.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": LONG, "factor": 4.0},
    "clex": {"max_factor": 8},
}
SHORT = TRAINED - 4
"""Tokens of a prompt from which a generation leaves the training length on its way."""


@pytest.mark.parametrize(
    ("rope_type", "dynamic_length"),
    [*((name, ("prompt", "total")[number % 2]) for number, name in enumerate(GROWING)), ("dynamic", "total")],
)
def test_a_fixed_length_is_seen_at_every_token(rope_type: str, dynamic_length: Any) -> None:
    scaling = {"rope_type": rope_type} | GROWING[rope_type]
    model, length = random_model(pos_emb="coca", rope_scaling=scaling), {"prompt": SHORT, "total": SHORT + NEW}
    wanted, margins = by_full_passes(model, prompts(SHORT), NEW, length[dynamic_length])
    assert margins.min() > 1e-4
    assert torch.equal(generate(model, prompts(SHORT), NEW, dynamic_length=dynamic_length), wanted)


@pytest.mark.parametrize(
    ("rope_type", "pos_emb"),
    [*zip(GROWING, ("coca", "rotary", "xpos", "coca_strict", "coca"), strict=True), ("dynamic_yarn", "coca")],
)
def test_a_growing_length_is_seen_at_every_token(rope_type: str, pos_emb: str) -> None:
    """By default. What one layer keeps depends on no frequency, so a step with the cache is the pass from scratch."""
    scaling = {"rope_type": rope_type} | GROWING[rope_type]
    model = random_model(pos_emb=pos_emb, rope_scaling=scaling, num_layers=1)
    wanted, margins = by_full_passes(model, prompts(SHORT), NEW)
    assert margins.min() > 2e-5, "float32 decides which token is the largest: another seed is needed"
    assert torch.equal(generate(model, prompts(SHORT), NEW), wanted)


@pytest.mark.parametrize("pos_emb", ["coca", "rotary"])
def test_longrope_computes_all_tokens_again_at_its_switch(pos_emb: str) -> None:
    """Of several layers, so that the tokens are those of full passes at the length so far."""
    scaling = {"rope_type": "longrope"} | GROWING["longrope"]
    model = random_model(pos_emb=pos_emb, rope_scaling=scaling)
    wanted, margins = by_full_passes(model, prompts(SHORT), NEW)
    assert margins.min() > 2e-5
    for penalty in (1.0, 1.4):
        found = generate(model, prompts(SHORT), NEW, sampling=Sampling(repetition_penalty=penalty))
        assert torch.equal(found, wanted) == (penalty == 1.0)


@torch.no_grad()
def test_a_growing_length_rotates_all_cached_keys_anew() -> None:
    """Logits of one layer at each step, against the pass from scratch."""
    model = random_model(pos_emb="coca", rope_scaling={"rope_type": "dynamic", "factor": 4.0}, num_layers=1)
    ids, cache = prompts(PROMPT), model.new_cache()
    model(ids[:, :SHORT], cache=cache)
    for step in range(SHORT, PROMPT):
        logits = model(ids[:, step : step + 1], cache=cache)[:, -1]
        torch.testing.assert_close(logits, model(ids[:, : step + 1])[:, -1], rtol=1e-4, atol=1e-4)


def test_rows_do_not_look_at_one_another() -> None:
    model, ids = random_model(pos_emb="coca"), prompts()
    alone = torch.cat([generate(model, row[None], NEW) for row in ids])
    assert torch.equal(generate(model, ids, NEW), alone)
    assert len(set(map(tuple, alone.tolist()))) == 3


def test_the_length_that_a_dynamic_extension_sees_changes_what_is_generated() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model, plain = random_model(pos_emb="rotary", rope_scaling=scaling), random_model(pos_emb="rotary")
    ids = prompts(TRAINED)
    found = {name: generate(model, ids, NEW, dynamic_length=name) for name in DYNAMIC_LENGTHS}
    assert len({tuple(each.flatten().tolist()) for each in found.values()}) == 3
    without = generate(plain, ids, NEW)
    assert torch.equal(found["prompt"], without), "a prompt of the training length has the plain frequencies"
    assert torch.equal(found["current"][:, 0], without[:, 0]) and not torch.equal(found["total"][:, 0], without[:, 0])


COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
THEIRS = [
    GPTNeoXConfig(**COMMON, intermediate_size=80, rope_parameters=ROPE | {"partial_rotary_factor": 0.25}),
    LlamaConfig(**COMMON, intermediate_size=52, rope_parameters=ROPE, num_key_value_heads=2),
]


@pytest.mark.parametrize("config", THEIRS, ids=lambda config: config.model_type)
def test_transformers_generates_the_same(config: PreTrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    theirs.save_pretrained(tmp_path)
    ids = prompts()
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    ours = load_model(tmp_path)
    for penalty in (1.0, 1.3):
        wanted = theirs.generate(ids, max_new_tokens=NEW, do_sample=False, repetition_penalty=penalty, **options)
        assert torch.equal(generate(ours, ids, NEW, sampling=Sampling(repetition_penalty=penalty)), wanted[:, PROMPT:])
