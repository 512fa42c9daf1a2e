"""Decoding with fixed shapes: the logits and tokens of the growing cache, whatever the method, and the same operations
for every token.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_coca import methods
from megatron_coca.attention.layer import Cache
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.config.model import GAU
from megatron_coca.model import GPT, Sampling, SharedPrefix, generate, generate_tokens, static_decoding
from megatron_coca.model.generate import TokenChoice
from megatron_coca.model.static_decoding import StaticDecoder, unsupported
from tests.conftest import ROOT
from tests.unit.attention.test_cache import COMBINED, EXTENDED, FORMS, LENGTH, MAPPED, PROMPT, make, scaling, tokens

NEW = LENGTH - PROMPT
GROUPED = {"num_attention_heads": 4, "num_kv_heads": 2}
OTHERS: list[dict[str, Any]] = [
    {"sliding_window_width": 5},
    {"pos_emb": "alibi", "sliding_window_width": 30} | GROUPED,
    {"pos_emb": "none", "forgetting_gate": "fox"} | GROUPED,
    {"pos_emb": "fire"} | GROUPED,
    {"pos_emb": "kerple_log"} | GROUPED,
    {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    {"pos_emb": "rotary", "sliding_window_width": 3, "sink_logits": True} | GROUPED,
    {"pos_emb": "rotary", "attention_chunk_size": 7},
    {"pos_emb": "learned", "opt_pos_emb_offset": 2, "max_position_embeddings": 60, "embedding_scale": 3.0},
    {"attention_config": [GAU, "global"], "gau_key_width": 16, "pos_emb": "rotary"},
    {"attention_config": ["global", "near"], "layer_types": {"near": {"sliding_window_width": 6, "pos_emb": "alibi"}}},
    {"pos_emb": "rotary", "attention_output_gate": "feature", "qk_norm": "head"},
]
SUPPORTED = [keys for keys in [*FORMS, *EXTENDED, *MAPPED, *COMBINED, *OTHERS] if keys.get("pos_emb") != "xpos"]
SAMPLED = Sampling(0.9, top_k=20, top_p=0.95, repetition_penalty=1.2, seed=3)


@pytest.fixture(autouse=True)
def _short_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extent doubles several times in a short text."""
    monkeypatch.setattr(static_decoding, "LEAST_EXTENT", 8)


class Forced:
    """Chooses given tokens, [batch, tokens], and keeps the logits."""

    def __init__(self, ids: Tensor) -> None:
        self.ids, self.logits = ids, list[Tensor]()

    def __call__(self, logits: Tensor, ids: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        self.logits.append(logits)
        return self.ids.index_select(1, number), torch.ones(len(logits), 1, dtype=torch.bool)


def filled(model: GPT, ids: Tensor, length: int | None = None) -> Cache:
    cache = model.new_cache(length, capacity=LENGTH)
    model.hidden_states(ids, cache=cache)
    return cache


FOLLOWING: list[dict[str, Any]] = [*EXTENDED, COMBINED[0], COMBINED[-1]]
"""Extensions that may follow the number of tokens."""
CASES = [*((keys, LENGTH) for keys in SUPPORTED), *((keys, None) for keys in FOLLOWING)]


@pytest.mark.fewest
@pytest.mark.parametrize(("keys", "length"), CASES, ids=str)
@torch.inference_mode()
def test_the_logits_are_those_of_the_growing_cache(keys: dict[str, Any], length: int | None) -> None:
    """In float64; the greatest difference is the order of sums. Without a length, frequencies follow the text."""
    model, ids = make(**keys).double(), tokens()
    growing, cache = filled(model, ids[:, :PROMPT], length), filled(model, ids[:, :PROMPT], length)
    wanted = torch.cat([model(ids[:, at : at + 1], cache=growing) for at in range(PROMPT, LENGTH)], dim=1)
    forced = Forced(torch.cat((ids[:, PROMPT + 1 :], ids[:, :1]), dim=1))
    assert unsupported(model, cache, LENGTH, PROMPT) is None
    steps = StaticDecoder(model, cache, 2, LENGTH, forced, past=PROMPT).tokens(
        cache, ids[:, PROMPT : PROMPT + 1], 0, NEW
    )
    assert torch.equal(torch.stack([found[:, 0] for found in steps], dim=1), forced.ids)
    torch.testing.assert_close(torch.stack(forced.logits, dim=1), wanted, rtol=0, atol=1e-11)
    assert len(cache) == LENGTH == cache.reached
    if "learned" not in str(keys):  # whose table ends here
        more = tokens(4)
        torch.testing.assert_close(model(more, cache=cache), model(more, cache=growing), rtol=0, atol=1e-11)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("keys", [{}, {"pos_emb": "alibi", "sliding_window_width": 9}, COMBINED[1]], ids=str)
def test_the_tokens_are_those_of_the_growing_cache(keys: dict[str, Any], sampling: Sampling) -> None:
    model, ids = make(**keys), tokens(PROMPT, batch=3)
    for prompt in (ids, ids[:, :1]):
        wanted = generate(model, prompt, NEW, sampling=sampling, decoding="growing")
        assert torch.equal(generate(model, prompt, NEW, sampling=sampling, decoding="static"), wanted)


@pytest.mark.parametrize("dynamic_length", ["current", "total"])
@pytest.mark.parametrize("name", sorted(methods.names("rope_scaling")))
def test_every_extension_generates_the_tokens_of_the_growing_cache(name: str, dynamic_length: Any) -> None:
    model, ids = make(rope_scaling=scaling(name)), tokens(PROMPT)
    wanted = generate(model, ids, NEW, dynamic_length=dynamic_length, decoding="growing")
    assert torch.equal(generate(model, ids, NEW, dynamic_length=dynamic_length, decoding="static"), wanted)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        (name, window)
        for name in sorted(methods.names("pos_emb"))
        for window in (None, 9)
        if (name, window) != ("fire", 9)
    ],
)
def test_latents_generate_the_tokens_of_the_growing_cache(name: str, window: int | None) -> None:
    """Keys that are not rotated stay as they are cached, also in a window."""
    model, ids = make(pos_emb=name, kv_lora_rank=8, sliding_window_width=window), tokens(PROMPT)
    if (reason := unsupported(model, model.new_cache(), LENGTH, PROMPT)) is not None:
        rotated = model.methods["global"].rotary is not None
        assert rotated and ("window" in reason or "factors of all keys" in reason), reason
        return
    wanted = generate(model, ids, NEW, decoding="growing")
    assert torch.equal(generate(model, ids, NEW, decoding="static"), wanted)


def test_a_text_that_crosses_the_switch_of_longrope_keeps_the_growing_cache() -> None:
    model = make(rope_scaling=scaling("longrope"))
    reasons = [
        unsupported(model, model.new_cache(), total, past) for past, total in [(9, 16), (9, 17), (16, 17), (17, 40)]
    ]
    assert [reason is None for reason in reasons] == [True, False, False, True]
    assert "at 16 tokens" in (reasons[1] or "")
    assert unsupported(model, model.new_cache(length=40), 40, 9) is None
    with pytest.raises(ValueError, match="decoding: static does not support.*use growing"):
        generate(model, tokens(9), 20, decoding="static")
    assert generate(model, tokens(9), 20, decoding="auto").shape == (2, 20)


def test_the_table_of_the_guide_names_every_extension() -> None:
    lines = [line.split("|") for line in (ROOT / "docs/serving.md").read_text().splitlines() if line.startswith("|")]
    still, turned = (
        set(re.findall("`([a-z0-9_]+)`", what))
        for _, what, *_ in lines
        if what.startswith((" `default`", " `dynamic`"))
    )
    named = set(methods.names("rope_scaling"))
    stay = {name for name in named if make(rope_scaling=scaling(name)).methods["global"].keys_stay(None)}
    assert (still, turned) == (stay, named - stay), "add the extension to the table in docs/serving.md"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"pos_emb": "xpos"}, "factors of all keys"),
        ({"pos_emb": "none", "forgetting_gate": "fox", "sliding_window_width": 5}, "forgetting gates"),
        ({"rope_scaling": scaling("dynamic"), "sliding_window_width": 5}, "keys that are rotated again"),
        ({"pos_emb": "learned", "max_position_embeddings": 44}, "learned positions"),
    ],
    ids=str,
)
def test_models_that_keep_the_growing_cache(keys: dict[str, Any], reason: str) -> None:
    model = make(**keys)
    assert reason in (unsupported(model, model.new_cache(), LENGTH) or "")


@torch.inference_mode()
def test_rows_with_their_own_positions_keep_the_growing_cache() -> None:
    model, ids, cache = make(), tokens(4), make().new_cache()
    model(ids, positions=torch.arange(4).expand(2, -1), cache=cache)
    assert "different positions" in (unsupported(model, cache, LENGTH) or "")


def test_a_table_of_positions_ends_where_it_does_with_the_growing_cache() -> None:
    model, ids = make(pos_emb="learned"), tokens(PROMPT)
    assert generate(model, ids, NEW + 1, decoding="static").shape == (2, NEW + 1), "the last token is not read"
    with pytest.raises(PositionRangeError):
        generate(model, ids, NEW + 2, decoding="growing")
    with pytest.raises(ValueError, match="use growing"):
        generate(model, ids, NEW + 2, decoding="static")


class Operations(TorchDispatchMode):
    """Records the operations with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in torch.utils._pytree.tree_leaves(args)]
        self.seen.append(f"{func} {shapes}")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("keys", [*OTHERS, MAPPED[0], COMBINED[0], COMBINED[1], {"pos_emb": "rpe"}], ids=str)
@torch.inference_mode()
def test_every_token_runs_the_same_operations_and_none_waits(keys: dict[str, Any]) -> None:
    """A CUDA graph would repeat them; reading a number on the host or a size that depends on values would be a wait."""
    model, ids = make(**keys), tokens(PROMPT)
    cache = filled(model, ids)
    choose = TokenChoice(SAMPLED, 50, torch.rand(2, LENGTH, dtype=torch.float64))
    decoder = StaticDecoder(model, cache, 2, LENGTH, choose)
    steps = decoder.tokens(cache, ids[:, :1], 1, NEW)
    next(steps)  # computes the tables of biases
    found = []
    for _ in range(3):
        with Operations() as operations:
            decoder._step(32)
        found.append(operations.seen)
    assert found[0] == found[1] == found[2]
    forbidden = ("_local_scalar_dense", "nonzero", "unique", "_to_copy.default [] cpu", "equal.default")
    assert not [each for each in found[0] if any(name in each for name in forbidden)]


@torch.inference_mode()
def test_prompts_that_share_a_beginning_use_the_decoder_again() -> None:
    model, ids = make().double(), tokens(PROMPT, batch=3)
    ids[1:, :9] = ids[0, :9]
    shared, decoders = SharedPrefix(model), set()
    for row in ids:
        cache = shared.cache_for(row.numpy(), NEW)
        found = generate(model, row[None], NEW, cache=cache, decoding="static")
        shared.keep(row.numpy(), cache)
        assert torch.equal(found, generate(model, row[None], NEW, decoding="growing"))
        decoders.add(id(cache.decoder))
    assert len(decoders) == 1
    generate(model, ids[:1], NEW, cache=shared.cache_for(ids[0].numpy(), NEW), vocab_size=9, decoding="static")
    assert id(cache.decoder) not in decoders, "another limit of the ids is another choice"


def test_text_that_ends_early_leaves_a_cache_that_goes_on() -> None:
    model, ids, cache = make(sliding_window_width=6).double(), tokens(PROMPT), make().new_cache()
    cache = model.new_cache()
    steps = generate_tokens(model, ids, NEW, cache=cache, decoding="static")
    first = torch.stack([next(steps) for _ in range(9)], dim=1)
    steps.close()
    assert len(cache) == PROMPT + 8, "of the last token nothing is cached yet"
    text = torch.cat((ids, first), dim=1)
    rest = generate(model, text, 5, cache=cache, decoding="growing")
    assert torch.equal(torch.cat((first, rest), dim=1), generate(model, ids, 14, decoding="growing"))


@pytest.mark.parametrize("decoding", ["growing", "static"])
def test_logits_that_are_not_finite_are_an_error_at_their_token(decoding: Any) -> None:
    model, ids = make(pos_emb="learned"), tokens(PROMPT)
    wanted = generate(model, ids, 2)
    with torch.no_grad():
        model.embedding.position_embeddings.weight[PROMPT + 1] = torch.inf  # of the second generated token
    steps = generate_tokens(model, ids, 9, decoding=decoding)
    assert torch.equal(torch.stack([next(steps), next(steps)], dim=1), wanted)
    with pytest.raises(FloatingPointError, match="logits: infinite or NaN"):
        next(steps)


@pytest.mark.parametrize("named", [{}, {"decoding": "auto"}], ids=str)
def test_a_step_on_the_cpu_is_the_growing_one_unless_named(named: Any) -> None:
    """`auto` uses fixed shapes on CUDA only: on the CPU they are not faster."""
    model, ids, cache = make(), tokens(PROMPT), make().new_cache()
    generate(model, ids, 3, cache=cache, **named)
    assert cache.decoder is None
