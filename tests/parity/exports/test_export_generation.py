"""Use of exports with a modelling file: padding, the cache, generation, training."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import StaticCache

from megatron_coca.checkpoints import load_model
from megatron_coca.checkpoints.exporting import export
from megatron_coca.model.generate import generate
from tests.parity.exported import DENSE, GROUPED, LLAMA, NEOX, TRAINED, modules_cache, random_checkpoint, remote, tokens

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
LISTS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
STRICT = {"rtol": 1e-5, "atol": 1e-5}
FIXED: dict[str, dict[str, Any]] = {
    "coca": NEOX | {"pos_emb": "coca"},
    "coca, dense": DENSE | {"pos_emb": "coca"},
    "coca_strict, yarn": GROUPED | {"pos_emb": "coca_strict", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "coca, rerope, log n": GROUPED
    | {"pos_emb": "coca", "relative_positions": {"type": "rerope", "window": 8}, "logit_scaling": "log_n"},
    "rotary, lm_infinite": LLAMA | {"relative_positions": {"type": "lm_infinite", "window": 12, "sinks": 2}},
    "coca, STRING, temperature": GROUPED
    | {"pos_emb": "coca", "relative_positions": {"type": "string", "window": 9, "local": 3}}
    | {"logit_scaling": {"type": "temperature", "period": 5}},
    "coca, dual chunks": LLAMA
    | {"pos_emb": "coca", "relative_positions": {"type": "dual_chunk", "chunk_size": 7, "max_position": 10}},
    "coca, chunks by layer, resonance": LLAMA
    | {"pos_emb": "coca", "attention_config": [[["chunked", "nope"], "all"]]}
    | {"layer_types": {"chunked": {"attention_chunk_size": 7}, "nope": {"pos_emb": "none"}}}
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "resonance": True}},
    "sandwich": NEOX | {"pos_emb": "sandwich"},
    "xpos": LLAMA | {"pos_emb": "xpos"},
    "pope": GROUPED | {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}},
    "alibi": GROUPED | {"pos_emb": "alibi"},
    "kerple_log": NEOX | {"pos_emb": "kerple_log"},
    "rpe": GROUPED | {"pos_emb": "rpe"},
    "learned": NEOX | {"pos_emb": "learned", "max_position_embeddings": 128},
    "sinusoidal": LLAMA | {"pos_emb": "sinusoidal"},
    "none": LLAMA | {"pos_emb": "none"},
    "windows by layer": LLAMA
    | {"pos_emb": "coca", "attention_config": [[["local", "global"], "all"]]}
    | {"layer_types": {"local": {"sliding_window_width": 6, "rotary_emb_base": 500.0}}},
}
"""Methods to which a length means nothing."""
GROWING: dict[str, dict[str, Any]] = {
    "coca, dynamic": GROUPED | {"pos_emb": "coca"} | DYNAMIC,
    "coca, dynamic, partial": NEOX | {"pos_emb": "coca"} | DYNAMIC,
    "polar, dynamic": NEOX | {"pos_emb": "polar", "pos_emb_options": {"magnitude": "relu_mean"}} | DYNAMIC,
    "coca, dynamic_yarn": LLAMA | {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic_yarn", "beta_fast": 4.0}},
    "xpos, dynamic_max": LLAMA | {"pos_emb": "xpos", "rope_scaling": {"rope_type": "dynamic_max", "target_length": 40}},
    "coca, longrope": GROUPED | {"pos_emb": "coca", "rope_scaling": {"rope_type": "longrope", "factor": 4.0} | LISTS},
    "coca, clex": LLAMA | {"pos_emb": "coca", "rope_scaling": {"rope_type": "clex", "max_factor": 4}},
}
ALL = FIXED | GROWING
FEW = ("coca", "coca, rerope, log n", "rotary, lm_infinite", "alibi", "coca, dynamic", "coca, clex")
"""One for each kind of cache: kept rotated or not, with segments, with a window, without rotation, per length."""


def exported(name: str, tmp_path: Path, **settings: Any) -> Any:
    return remote(random_checkpoint(tmp_path / "run", **ALL[name]), tmp_path / "exported", **settings)


def padded(lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows of these lengths, the batch of them with padding before each, and its mask."""
    rows = [tokens(length, 1) for length in lengths]
    width = max(lengths)
    batch = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=17) for row in rows])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return rows, batch, mask


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "sdpa") for name in ("coca", "coca, dense", "coca_strict, yarn", "rotary, lm_infinite", "xpos")),
        *((name, "sdpa") for name in ("alibi", "learned", "sinusoidal", "coca, dynamic, partial", "coca, clex")),
        *((name, "sdpa") for name in ("windows by layer", "coca, STRING, temperature", "coca, dual chunks")),
        *((name, "sdpa") for name in ("coca, chunks by layer, resonance", "sandwich", "pope", "polar, dynamic")),
        *((name, "eager") for name in ("coca, dynamic_yarn", "rpe", "coca, rerope, log n")),
    ],
)
def test_padding_on_the_left_changes_nothing(name: str, attention: str, tmp_path: Path) -> None:
    """In one pass and in steps with the cache, whoever counts the positions: each row as if it were alone."""
    model = exported(name, tmp_path, attention=attention)
    rows, batch, mask = padded((70, 23, 40))
    alone = [model(row).logits[0] for row in rows]
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    for given in ({}, {"position_ids": counted}):
        together = model(batch, attention_mask=mask, **given).logits
        assert together.isfinite().all(), "rows of padding see no key"
        for row, logits in enumerate(alone):
            torch.testing.assert_close(together[row, -len(logits) :], logits, **STRICT)
    cache, split = None, 50
    for start, stop in ((0, split), (split, 69), (69, 70)):
        step = model(batch[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
    singles = []
    for row in rows:  # the same steps for each row alone
        hidden, kept = 70 - row.shape[1], None
        for start, stop in ((0, split), (split, 69), (69, 70)):
            part = row[:, max(start - hidden, 0) : max(stop - hidden, 0)]
            if part.shape[1]:
                last = model(part, past_key_values=kept, use_cache=True)
                kept = last.past_key_values
        singles.append(last.logits[0, -1])
    torch.testing.assert_close(step.logits[:, -1], torch.stack(singles), **STRICT)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.slow)
        for name in ALL
        if name not in ("coca, dense", "kerple_log", "none")
    ],
)
def test_steps_with_the_cache_are_ours(name: str, tmp_path: Path) -> None:
    """Each step sees the length so far, as with our cache that is not told a length; then a short input again."""
    checkpoint = random_checkpoint(tmp_path / "run", **ALL[name])
    theirs, ours = remote(checkpoint, tmp_path / "exported"), load_model(checkpoint)
    batch, own, kept = tokens(2 * TRAINED + 8), ours.new_cache(), None
    for start, stop in ((0, 20), (20, 34), (34, 35), (35, 60), (60, 61), (61, 72)):
        expected = ours(batch[:, start:stop], cache=own)
        step = theirs(batch[:, start:stop], past_key_values=kept, use_cache=True)
        kept = step.past_key_values
        torch.testing.assert_close(step.logits, expected, **STRICT)
        whole = theirs(batch[:, :stop]).logits[:, start:]
        if name in FIXED:
            torch.testing.assert_close(step.logits, whole, **STRICT)
    torch.testing.assert_close(theirs(batch[:, :9]).logits, ours(batch[:, :9]), **STRICT)
    keys, values = kept.layers[0].keys, kept.layers[0].values
    assert keys.shape[-1] == values.shape[-1] == 8, "keys are kept before their rotation"


@pytest.mark.parametrize("name", ["coca", "coca, dense", "coca, rerope, log n", "kerple_log", "windows by layer"])
def test_greedy_generation_is_ours(name: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **FIXED[name])
    theirs, prompt = remote(checkpoint, tmp_path / "exported"), tokens(30)
    expected = generate(load_model(checkpoint), prompt, 20, vocab_size=500)
    settings = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    assert torch.equal(theirs.generate(prompt, **settings)[:, 30:], expected)
    assert torch.equal(theirs.generate(prompt, use_cache=False, **settings)[:, 30:], expected)


@torch.no_grad()
def by_full_passes(model: torch.nn.Module, prompt: Tensor, new: int) -> Tensor:
    """The likeliest token after every pass over all tokens so far."""
    for _ in range(new):
        best = model(prompt)[:, -1, :500].argmax(-1, keepdim=True)
        prompt = torch.cat((prompt, best), dim=1)
    return prompt[:, -new:]


@pytest.mark.parametrize(
    ("name", "use_cache"),
    [
        *((name, True) for name in GROWING),
        *((name, False) for name in ("coca, dynamic", "coca, clex", "coca, longrope")),
    ],
)
def test_greedy_generation_at_a_growing_length_is_ours(name: str, use_cache: bool, tmp_path: Path) -> None:
    """By the default of both: each step sees the length so far. Generation leaves the training length as it
    proceeds.
    """
    checkpoint = random_checkpoint(tmp_path / "run", **GROWING[name])
    theirs, prompt, ours = remote(checkpoint, tmp_path / "exported"), tokens(28), load_model(checkpoint)
    expected = generate(ours, prompt, 30, vocab_size=500) if use_cache else by_full_passes(ours, prompt, 30)
    settings = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False, "use_cache": use_cache}
    assert torch.equal(theirs.generate(prompt, **settings)[:, 28:], expected)
    if name == "coca, longrope" and use_cache:
        rows, batch, mask = padded((31, 22))  # leave the length of the short factors at other steps
        alone = [theirs.generate(row, pad_token_id=17, **settings)[0, row.shape[1] :] for row in rows]
        together = theirs.generate(batch, attention_mask=mask, pad_token_id=17, **settings)[:, 31:]
        assert torch.equal(together, torch.stack(alone))
    if name == "coca, longrope":
        assert torch.equal(expected, by_full_passes(ours, prompt, 30)), "all tokens are computed again at the switch"
    if name == "coca, dynamic":
        others = [generate(ours, prompt, 30, vocab_size=500, dynamic_length=each) for each in ("prompt", "total")]
        assert not any(torch.equal(each, expected) for each in others), "the length does count"


@pytest.mark.parametrize("name", ["coca", "coca, dynamic", "coca, rerope, log n", "alibi"])
def test_other_ways_to_generate(name: str, tmp_path: Path) -> None:
    """Beams, a cache of fixed size, a drafting model, prompts of several lengths, sampling."""
    model = exported(name, tmp_path)
    rows, batch, mask = padded((26, 11))
    settings = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 17}
    greedy = [model.generate(row, **settings)[0, row.shape[1] :] for row in rows]
    together = model.generate(batch, attention_mask=mask, **settings)[:, 26:]
    assert torch.equal(together, torch.stack(greedy))
    fixed = model.generate(batch, attention_mask=mask, cache_implementation="static", **settings)[:, 26:]
    assert torch.equal(fixed, together)
    beams = model.generate(batch, attention_mask=mask, num_beams=3, **settings)[:, 26:]
    alone = [model.generate(row, num_beams=3, **settings)[0, row.shape[1] :] for row in rows]
    assert torch.equal(beams, torch.stack(alone))
    torch.manual_seed(1)
    assert model.generate(batch, attention_mask=mask, do_sample=True, **settings).shape == (2, 32)
    if name in FIXED:
        drafted = model.generate(rows[0], assistant_model=model, **settings)[0, 26:]
        assert torch.equal(drafted, greedy[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["coca", "coca, dynamic", "rpe"])
def test_a_cache_of_fixed_size(name: str, tmp_path: Path) -> None:
    model = exported(name, tmp_path)
    batch, cache = tokens(50), StaticCache(config=model.config, max_cache_len=64)
    kept = None
    for start, stop in ((0, 30), (30, 31), (31, 50)):
        expected = model(batch[:, start:stop], past_key_values=kept, use_cache=True)
        kept = expected.past_key_values
        logits = model(batch[:, start:stop], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(logits, expected.logits, **STRICT)


def test_the_pipeline_answers(tmp_path: Path) -> None:
    folder = export(random_checkpoint(tmp_path / "run", **ALL["coca"]), tmp_path / "exported").folder
    pipe = transformers.pipeline("text-generation", str(folder), trust_remote_code=True)
    tokenizer = pipe.tokenizer
    assert tokenizer.padding_side == "left" and pipe.model.generation_config.pad_token_id == tokenizer.eos_token_id
    assert pipe.model.config.pad_token_id is None and pipe.model.get_input_embeddings().padding_idx is None
    texts = ["The sea was calm", "and"]
    settings = {"max_new_tokens": 5, "do_sample": False, "return_tensors": True}
    alone = [pipe(text, **settings)[0]["generated_token_ids"] for text in texts]
    together = [row[0]["generated_token_ids"] for row in pipe(texts, batch_size=2, **settings)]
    width = len(tokenizer(texts[0]).input_ids)
    assert [len(row) for row in alone] == [width + 5, len(tokenizer("and").input_ids) + 5]
    assert together[0] == alone[0]
    hidden = width - len(tokenizer("and").input_ids)
    assert together[1] == [tokenizer.eos_token_id] * hidden + alone[1]


@pytest.mark.parametrize("name", ["coca", "coca_strict, yarn", "kerple_log", "rpe", "learned"])
def test_training(name: str, tmp_path: Path) -> None:
    """Gradients are ours, and recomputing activations changes none of them."""
    checkpoint = random_checkpoint(tmp_path / "run", **ALL[name])
    theirs, ours = remote(checkpoint, tmp_path / "exported").train(), load_model(checkpoint).train()
    batch = tokens(48)
    found = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            theirs.gradient_checkpointing_enable({"use_reentrant": reentrant})
        theirs.zero_grad()
        theirs(batch, labels=batch).loss.backward()
        found.append({key: weight.grad for key, weight in theirs.named_parameters() if weight.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.allclose(other[key], found[0][key], atol=1e-7) for key in other)
    ours.loss(ours.hidden_states(batch)[:, :-1], batch[:, 1:]).backward()
    word = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(word, ours.embedding.word_embeddings.weight.grad, rtol=1e-3, atol=1e-6)
    learned = [weight.grad for key, weight in theirs.named_parameters() if "position" in key]
    assert all(each is not None and each.abs().max() > 0 for each in learned)


def test_a_map_that_only_trains(tmp_path: Path) -> None:
    keys = LLAMA | {"pos_emb": "coca", "relative_positions": {"type": "inv_leaky_rerope", "target_length": 64}}
    checkpoint = random_checkpoint(tmp_path / "run", **keys)
    theirs = remote(checkpoint, tmp_path / "exported").train()
    ours = load_model(checkpoint, {"attention_backend": "reference"}).train()
    batch = tokens(TRAINED)
    trained = theirs(batch).logits
    torch.testing.assert_close(trained, ours(batch), **STRICT)
    assert not torch.allclose(theirs.eval()(batch).logits, trained, atol=1e-3)
    with pytest.raises(ValueError, match="training=True for a training-only map"):
        load_model(checkpoint).train()(batch)


@torch.no_grad()
def test_positions_that_are_given(tmp_path: Path) -> None:
    """CoCA is not shift-invariant: a shift by the caller is seen, as in our model."""
    checkpoint = random_checkpoint(tmp_path / "run", **ALL["coca"])
    theirs, ours = remote(checkpoint, tmp_path / "exported"), load_model(checkpoint)
    batch, moved = tokens(20), torch.arange(100, 120)
    logits = theirs(batch, position_ids=moved[None]).logits
    torch.testing.assert_close(logits, ours(batch, positions=moved), **STRICT)
    assert not torch.allclose(logits, theirs(batch).logits, atol=1e-3)
    for given in ({"inputs_embeds": theirs.get_input_embeddings()(batch)}, {"input_ids": batch}):
        torch.testing.assert_close(theirs(**given).logits, ours(batch), **STRICT)


@torch.no_grad()
@pytest.mark.parametrize("name", ["coca", "coca, rerope, log n", "alibi", "coca, dynamic", "learned"])
def test_positions_that_are_given_in_steps(name: str, tmp_path: Path) -> None:
    """With a cache, from 40 on; and those that count padding on the left: each row as our model has it alone."""
    checkpoint = random_checkpoint(tmp_path / "run", **ALL[name])
    theirs, ours = remote(checkpoint, tmp_path / "exported"), load_model(checkpoint)
    batch, moved = tokens(20), torch.arange(40, 60)
    own, kept = ours.new_cache(), None
    for start, stop in ((0, 12), (12, 17), (17, 18), (18, 20)):
        expected = ours(batch[:, start:stop], positions=moved[start:stop], cache=own)
        given = {"position_ids": moved[None, start:stop], "past_key_values": kept, "use_cache": True}
        step = theirs(batch[:, start:stop], **given)
        kept = step.past_key_values
        torch.testing.assert_close(step.logits, expected, **STRICT)
    rows, padded_batch, mask = padded((20, 13))
    kept = None
    for start, stop in ((0, 15), (15, 16), (16, 20)):
        given = {"position_ids": torch.arange(start, stop)[None].expand(2, -1), "past_key_values": kept}
        step = theirs(padded_batch[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **given)
        kept = step.past_key_values
    own = ours.new_cache()
    for first, start, stop in ((7, 0, 8), (15, 8, 9), (16, 9, 13)):
        places = torch.arange(first, first + stop - start)
        expected = ours(rows[1][:, start:stop], positions=places, cache=own)
    torch.testing.assert_close(step.logits[1:], expected, **STRICT)


@torch.no_grad()
def test_positions_that_a_cache_cannot_keep_are_an_error(tmp_path: Path) -> None:
    theirs, gaps = exported("coca", tmp_path), torch.tensor([[0, 1, 5, 6]])
    cache = theirs(tokens(2, 1), use_cache=True).past_key_values
    for given in ({"position_ids": gaps}, {"position_ids": gaps + 2}):
        with pytest.raises(ValueError, match="must increase by 1.*use_cache=False"):
            theirs(tokens(4, 1), past_key_values=cache, **given)
    assert theirs(tokens(4, 1), position_ids=gaps, use_cache=False).logits.shape[1] == 4


@torch.no_grad()
@pytest.mark.parametrize(
    ("scaling", "same"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, True),
        ({"rope_type": "dynamic_max", "target_length": 128}, True),
        ({"rope_type": "dynamic", "factor": 4.0}, False),
        ({"rope_type": "clex", "max_factor": 4}, False),
    ],
)
def test_ways_of_decoding_that_the_model_card_tells_apart(scaling: dict[str, Any], same: bool, tmp_path: Path) -> None:
    """Token by token with the cache, as in greedy decoding; some tokens in one step, as prompt lookup does; no
    cache."""
    model = remote(
        random_checkpoint(tmp_path / "run", **GROUPED, pos_emb="coca", rope_scaling=scaling), tmp_path / "out"
    )
    batch = tokens(90, 1)
    found = []
    for width in (1, 7):
        cache = model(batch[:, :60], use_cache=True).past_key_values
        steps = batch[:, 60:].split(width, dim=1)
        found.append(torch.cat([model(step, past_key_values=cache).logits for step in steps], dim=1)[0, -1])
    found.append(model(batch, use_cache=False).logits[0, -1])
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=1e-4) == same


@torch.no_grad()
def test_beyond_what_can_be_computed(tmp_path: Path) -> None:
    learned = exported("learned", tmp_path / "learned")
    with pytest.raises(ValueError, match="position 128 is beyond the 128 learned positions"):
        learned(tokens(129, 1))
    xpos = exported("xpos", tmp_path / "xpos", dtype=torch.float16)
    with pytest.raises(ValueError, match="xpos overflows torch.float16 at 9999.*at most 5"):
        xpos(tokens(3, 1), position_ids=torch.tensor([[0, 1, 9999]]))
