"""Exported folders: logits of stock transformers on the whole padded vocabulary, and equal weights when read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_coca.checkpoints import load_model, open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.data import load_tokenizer
from megatron_coca.data.tokenizers.training import train_sentencepiece
from tests.parity.exported import LLAMA, NEOX, TRAINED, random_checkpoint
from tests.tokenizer_files import train_bpe

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SHAPES: dict[str, dict[str, Any]] = {
    "neox": NEOX,
    "neox sequential, tied": NEOX | {"gpt_j_residual": False, "rotary_pct": 1.0, "no_weight_tying": False},
    "neox without attention biases, silu": NEOX | {"use_bias_in_attn_linear": False, "activation": "silu"},
    "neox tanh gelu, other base, epsilon": NEOX
    | {"bias_gelu_fusion": True, "rotary_emb_base": 5000.5, "layernorm_epsilon": 1e-3},
    "llama tied": LLAMA | {"no_weight_tying": False},
    "llama grouped queries": LLAMA | {"num_kv_heads": 2, "rms_norm_epsilon": 1e-3},
    "llama one key head": LLAMA | {"num_kv_heads": 1},
    "neox dynamic": NEOX | {"rope_scaling": DYNAMIC, "rotary_pct": 1.0},
    "neox linear, partial": NEOX | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "neox yarn, partial": NEOX | {"rope_scaling": YARN},
    "llama dynamic, trained at less": LLAMA | {"rope_scaling": DYNAMIC | {"original_max_position_embeddings": 16}},
    "llama yarn": LLAMA | {"rope_scaling": YARN | {"beta_fast": 8.0, "truncate": False}},
    "llama yarn, own temperature": LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.3}},
    "llama yarn, trained at less": LLAMA | {"rope_scaling": YARN | {"original_max_position_embeddings": 8}},
    "llama llama3, trained at less": LLAMA
    | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}},
    "llama longrope, trained at less": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 3.0,  # not the ratio of the lengths: the multiplier follows from this one
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        }
    },
    "llama longrope": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        }
    },
}


def tokens(length: int) -> Tensor:
    return torch.randint(500, (2, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_weights(name: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **SHAPES[name])
    folder = export(checkpoint, tmp_path / "exported").folder
    ours = load_model(checkpoint)
    for length in (3 * TRAINED, TRAINED):
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        expected = theirs(tokens(length)).logits
        assert expected.std() > 0.1 and expected.shape[-1] == 512
        torch.testing.assert_close(ours(tokens(length)), expected, rtol=1e-5, atol=1e-5)
    back = load_model(folder)
    torch.testing.assert_close(back(tokens(3 * TRAINED)), ours(tokens(3 * TRAINED)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (NEOX, torch.float32),
        (LLAMA, torch.bfloat16),
        (LLAMA | {"num_kv_heads": 2}, torch.bfloat16),
        (LLAMA | {"num_kv_heads": 2}, torch.float32),
    ],
)
def test_read_back_bit_by_bit(shape: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", dtype=dtype, **shape)
    folder = export(checkpoint, tmp_path / "exported").folder
    before, after = (dict(open_checkpoint(place).weights()) for place in (checkpoint, folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == dtype for name in before)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == dtype


def test_padding_is_never_generated(tmp_path: Path) -> None:
    folder = export(random_checkpoint(tmp_path / "run", **NEOX), tmp_path / "exported").folder
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.generation_config.suppress_tokens == list(range(500, 512))
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[500:] = 10 * head[:12]
        allowed = model.generate(tokens(8), max_new_tokens=16)
        free = model.generate(tokens(8), max_new_tokens=16, suppress_tokens=None)
    assert allowed.max() < 500 <= free.max()


CORPUS = [
    "The king of spain went to 12 towns.\n  He saw a sheep, a goat and 33 dogs; none of them was his. Ça va?"
] * 40
TEXTS = [
    "The king was  in Spain,\n\tand   naïve: 12345 <|endoftext|> <eod> 日本 😀",
    " the dog",
    "then he\n\n  went",
    "aaaa",
    "",
]
TRAINERS = {
    "HFTokenizer": train_bpe,
    "SPMTokenizer": train_sentencepiece,
    "CharLevelTokenizer": None,
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_tokenizers_give_the_same_ids(kind: str, tmp_path: Path) -> None:
    """Text that spells the end of a document is ordinary text, in both."""
    train = TRAINERS[kind]
    ours = load_tokenizer(kind) if train is None else train(CORPUS, 320, tmp_path / "tokenizer")
    done = export(random_checkpoint(tmp_path / "run", tokenizer=ours, **NEOX), tmp_path / "exported")
    assert done.tokenizer_note is None
    theirs = AutoTokenizer.from_pretrained(done.folder)
    for text in TEXTS:
        assert theirs(text).input_ids == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert (
        theirs.pad_token_id == theirs.eos_token_id == ours.eod
        and theirs.decode([ours.eod], skip_special_tokens=True) == ""
    )
    config = json.loads((done.folder / "config.json").read_text())
    assert config["eos_token_id"] == ours.eod
