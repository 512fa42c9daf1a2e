"""Models of transformers imported into our checkpoints: the same logits, and the same bits after an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from megatron_coca import load_model
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.commands.evaluate import main as evaluate
from megatron_coca.config import load_config
from megatron_coca.training.checkpointing.initial_model import initial_model
from tests.parity.exported import LLAMA, NEOX, random_checkpoint
from tests.parity.foreign import DYNAMIC, LLAMA3, LONGROPE, TRAINED, YARN, assert_same_logits, llama, neox, write

SINGLE = "model.safetensors"
MODELS: dict[str, PreTrainedConfig] = {
    "neox": neox(),
    "neox sequential, tied, dynamic": neox(
        use_parallel_residual=False, tie_word_embeddings=True, rope=DYNAMIC, rotary_pct=0.5
    ),
    "neox without attention biases": neox(attention_bias=False),
    "llama": llama(),
    "llama tied, llama3": llama(tie_word_embeddings=True, rope=LLAMA3),
    "llama grouped queries, longrope": llama(num_key_value_heads=2, rope=LONGROPE),
    "llama one key head, biases, yarn": llama(num_key_value_heads=1, attention_bias=True, mlp_bias=True, rope=YARN),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    source = write(MODELS[name], tmp_path / "source")
    done = import_checkpoint(source, tmp_path / "save")
    assert_same_logits(source, TRAINED, 3 * TRAINED, ours=done.folder)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_there_and_back_is_the_same_bit_by_bit(number: int, name: str, tmp_path: Path) -> None:
    dtype = DTYPES[number % 3]
    source = write(MODELS[name], tmp_path / "source", dtype)
    import_checkpoint(source, tmp_path / "save")
    back = export(tmp_path / "save", tmp_path / "back").folder
    expected, found = load_file(source / SINGLE), load_file(back / SINGLE)
    assert found.keys() == expected.keys()
    assert all(found[key].dtype == dtype and torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("old", [False, True])
def test_pickles_as_transformers_4_wrote_them(old: bool, tmp_path: Path) -> None:
    """A tied model's .bin has the head as well."""
    source = write(llama(tie_word_embeddings=True, num_key_value_heads=2), tmp_path / "source")
    held = load_file(source / SINGLE)
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    index = {name: names[number % 2] for number, name in enumerate(sorted(held))}
    (source / SINGLE).unlink()
    for file in names:
        part = {name: held[name] for name, place in index.items() if place == file}
        torch.save(part, source / file, _use_new_zipfile_serialization=not old)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    done = import_checkpoint(source, tmp_path / "save")
    assert_same_logits(source, TRAINED, ours=done.folder)


REMOTE: dict[str, dict[str, Any]] = {
    "coca": LLAMA | {"pos_emb": "coca", "num_kv_heads": 2},
    "coca, neox, half rotated": NEOX | {"pos_emb": "coca"},
    "coca with an extension and a map": LLAMA
    | {
        "pos_emb": "coca",
        "rope_scaling": {"rope_type": "ntk_mixed", "factor": 4.0},
        "relative_positions": {"type": "rerope", "window": 8},
        "logit_scaling": "log_n",
    },
    "learned": NEOX | {"pos_emb": "learned", "rotary_pct": 1.0, "max_position_embeddings": 128},
    "kerple": LLAMA | {"pos_emb": "kerple_log"},
    "rpe, tied": LLAMA | {"pos_emb": "rpe", "rpe_num_buckets": 8, "no_weight_tying": False},
    "clex": LLAMA | {"pos_emb": "rotary", "rope_scaling": {"rope_type": "clex", "max_factor": 4}},
}


@pytest.mark.parametrize("name", REMOTE)
def test_folders_with_our_modelling_file_come_back(name: str, tmp_path: Path) -> None:
    ours = random_checkpoint(tmp_path / "run", tokenizer=None, **REMOTE[name])
    export(ours, tmp_path / "exported")
    done = import_checkpoint(tmp_path / "exported", tmp_path / "save")
    first, again = load_model(ours), load_model(done.folder)
    expected, found = first.state_dict(), again.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    ids = torch.randint(500, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(first(ids), again(ids))


def test_a_run_starts_from_it(tmp_path: Path) -> None:
    source = write(llama(), tmp_path / "source")
    done = import_checkpoint(source, tmp_path / "save")
    keys = done.config.flat() | {"pos_emb": "coca", "load": str(done.folder), "finetune": True}
    shape = {name: keys[name] for name in keys if keys[name] is not None}
    begun = initial_model(load_config([], shape), "cpu").model.state_dict()
    expected = load_model(source).state_dict()
    assert all(torch.equal(begun[name], expected[name]) for name in expected)


def test_it_is_evaluated_with_its_tokenizer(tmp_path: Path) -> None:
    """What our own checkpoint gives, its export gives after import."""
    ours = random_checkpoint(tmp_path / "run", **LLAMA)
    export(ours, tmp_path / "exported")
    done = import_checkpoint(tmp_path / "exported", tmp_path / "save")
    assert done.tokenizer_note is None
    text = tmp_path / "text.txt"
    text.write_text("a small boat lay near its shore until morning came over the hills. " * 3)
    found = []
    for number, checkpoint in enumerate((ours, done.folder, tmp_path / "exported")):
        result = tmp_path / f"{number}.json"
        asked = ["--checkpoint", str(checkpoint), "--data", str(text), "--windows", "64", "--stride", "32"]
        assert evaluate(["perplexity", *asked, "--device", "cpu", "--output", str(result)]) == 0
        found.append(json.loads(result.read_text())["results"])
    assert found[0] == found[1] == found[2]
