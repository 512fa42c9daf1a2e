"""Carry out "A model family" of CONTRIBUTING.md: add its row, then import, evaluate and export a model of the class."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, StableLmConfig

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface import families, weight_map
from megatron_coca.checkpoints.huggingface.families import llama_like
from megatron_coca.checkpoints.huggingface.write import EXPORTERS, family_exporter
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.commands.evaluate import main as evaluate
from tests.conftest import ROOT

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 24, "bos_token_id": None, "eos_token_id": None}


def row_of_the_guide(right: str = "", wrong: str = "") -> tuple[str, llama_like.Family]:
    """The row in the guide, with a text replaced by a wrong one."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## A model family")[2].partition("\n## ")[0]
    row = section.partition("```text\n")[2].partition("```")[0]
    assert right in row
    changed = row.replace(right, wrong, 1) if right else row
    ((name, family),) = eval(f"{{{changed}}}", vars(weight_map) | vars(llama_like)).items()
    return name, family


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(StableLmConfig(**SHAPE, use_qkv_bias=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_the_row_of_the_guide_is_all_that_a_family_needs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, family = row_of_the_guide()
    monkeypatch.delitem(families.FAMILIES, name)  # the row of the package, which has more keys
    with pytest.raises(CheckpointError, match="model_type: 'stablelm' is not supported"):
        load_model(source)
    monkeypatch.setitem(families.FAMILIES, name, family)
    monkeypatch.setitem(EXPORTERS, name, family_exporter(name))
    ids = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(load_model(source)(ids), expected, rtol=1e-4, atol=1e-4)
    imported = import_checkpoint(source, tmp_path / "imported").folder
    texts = tmp_path / "texts.txt"
    texts.write_text("a" * 60)
    command = ["perplexity", "--checkpoint", str(imported), "--data", str(texts), "--windows", "24", "--stride", "12"]
    assert evaluate([*command, "--set", "tokenizer_type=CharLevelTokenizer", "--output", str(tmp_path / "out")]) == 0
    done = export(imported, tmp_path / "exported")
    assert (done.model_type, done.compared.partition(" ")[0]) == (name, "transformers")
    written, read = (load_file(folder / "model.safetensors") for folder in (done.folder, source))
    assert written.keys() == read.keys() and all(torch.equal(written[key], read[key]) for key in read)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(done.folder).eval()(ids).logits, expected)


@pytest.mark.parametrize("changes", [{"qk_layernorm": True}, {"attention_chunk_size": 8}], ids=["only", "unknown key"])
def test_a_key_that_the_row_does_not_express_is_an_error(
    changes: dict[str, object], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, family = row_of_the_guide()
    monkeypatch.setitem(families.FAMILIES, name, family)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        load_model(source)
