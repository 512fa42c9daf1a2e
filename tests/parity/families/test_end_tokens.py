"""Several tokens that end a text or a turn of a chat, as in transformers: in Hugging Face folders, in our checkpoints,
in exports and in generation.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.commands import generate
from megatron_coca.config import load_config
from megatron_coca.data import Tokenizer
from megatron_coca.model import build_model
from megatron_coca.text_generation import load_generator
from tests.checkpoint_files import TINY, write_checkpoint
from tests.parity.evaluation.test_harness_prompts import END, TURN, llama
from tests.unit.data.tokenizers.test_chat import CHAT, folder, ours
from tests.unit.evaluation.harness_cases import documents

__all__ = ["folder", "ours"]

PLACES: dict[str, dict[str, Any]] = {
    "config.json": {"ends": [END, TURN]},
    "generation_config.json": {"generation": [END, TURN]},
}


@pytest.mark.parametrize("place", [pytest.param("config.json", marks=pytest.mark.slow), "generation_config.json"])
def test_lists_stay_lists(place: str, tmp_path: Path) -> None:
    """A folder, its import, and the export of that generate the texts of transformers, from prompts with special
    tokens.
    """
    original = llama(tmp_path / "original", **PLACES[place])
    imported = import_checkpoint(original, tmp_path / "imported").folder
    exported = export(imported, tmp_path / "exported").folder
    again = export(original, tmp_path / "again").folder
    tokenizer, model = AutoTokenizer.from_pretrained(original), AutoModelForCausalLM.from_pretrained(original).eval()
    prompts = [f"<|im_start|>user\n{each['question']}<|im_end|>\n" for each in documents()[:3]]
    rows = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
    expected = [model.generate(row, max_new_tokens=12, do_sample=False)[0, row.shape[1] :].tolist() for row in rows]
    assert any(row[-1] == TURN for row in expected)
    for place in (original, imported, exported, again):
        assert [row.tokens for row in load_generator(place).complete(prompts, 12)] == expected
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    assert [theirs.generate(row, max_new_tokens=12)[0, row.shape[1] :].tolist() for row in rows] == expected
    for name in ("config.json", "generation_config.json"):
        assert json.loads((exported / name).read_text())["eos_token_id"] == [END, TURN]
    assert "Each of the tokens 0, 2 ends a text" in (exported / "README.md").read_text()
    opened = open_checkpoint(imported).tokenizer().tokenizer
    assert opened is not None and opened.ends == (END, TURN) and opened.bos == 1


def test_the_ends_of_a_model_with_a_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    """They are the model's, in its folder and in an import of it."""
    original = llama(tmp_path / "original", ends=[END, TURN])
    imported = import_checkpoint(original, tmp_path / "imported").folder
    other = tmp_path / "other.json"
    other.write_bytes((original / "tokenizer.json").read_bytes())
    for place in (original, imported):
        for given in ({}, {"tokenizer_type": "HFTokenizer", "vocab_file": str(other)}):
            found = open_checkpoint(place).tokenizer(given).tokenizer
            assert found is not None and found.ends == (END, TURN)


def test_an_empty_list_names_no_end(tmp_path: Path) -> None:
    original = llama(tmp_path / "original", ends=[])
    exported = export(original, tmp_path / "exported").folder
    for name in ("config.json", "generation_config.json"):
        assert json.loads((exported / name).read_text())["eos_token_id"] == [END, TURN]


def test_the_command_reads_special_tokens_in_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(tmp_path / "model", ends=[END, TURN])
    prompt = "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n"
    fixed = ["--checkpoint", str(model), "--max-new-tokens", "12"]
    texts = []
    for given in (["--prompt", prompt], ["--chat", "--prompt", "the sea"]):
        assert generate.main([*fixed, *given]) == 0
        texts.append(capsys.readouterr().out)
    assert load_generator(model).tokenizer.encode_prompt(prompt)[0] == 3
    tokenizer, theirs = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    for text, begun in zip(texts, ("", "<s>"), strict=True):  # the template prints <s>
        row = tokenizer(begun + prompt, return_tensors="pt").input_ids
        ids = theirs.generate(row, max_new_tokens=12, do_sample=False)[0, row.shape[1] :]
        assert text == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def test_an_export_of_a_chat_model_chats(ours: Tokenizer, tmp_path: Path) -> None:
    """It has the template, reads the names of special tokens in it as these, and ends at the end of a turn."""
    config = load_config([], TINY | {"vocab_size": ours.vocab_size, "pos_emb": "rotary"})
    run = write_checkpoint(tmp_path / "run", config, build_model(config).state_dict(), tokenizer=ours)
    exported = export(run, tmp_path / "exported").folder
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    assert ours.chat is not None
    for prompt in (False, True):
        ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=True)["input_ids"]
        assert ids == ours.encode_rendered(ours.chat.render(CHAT, prompt=prompt))[0]
    turn = ours.token("<|im_end|>")
    assert AutoModelForCausalLM.from_pretrained(exported).generation_config.eos_token_id == [ours.eod, turn]
    assert tokenizer.eos_token_id == ours.eod and ours.turn_ends()[0] == [turn]
