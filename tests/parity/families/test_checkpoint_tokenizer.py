"""One rule for the tokenizer of a checkpoint: from the files of GPT-NeoX to an export that ends its texts and never
chooses a padding row.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_coca import cli
from megatron_coca.checkpoints import CheckpointError, load_model, open_checkpoint
from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.config import load_config
from megatron_coca.data import DataError, load_tokenizer, train_sentencepiece
from megatron_coca.evaluation.options import SubjectOptions, Variant
from megatron_coca.evaluation.subject import Evaluation, Subject
from megatron_coca.model import build_model, generate
from tests.neox_files import write_neox
from tests.parity.exported import modules_cache

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

LINES = [f"def function_{i}(self):\n    return the value of the argument {i}" for i in range(300)]
IDS, ROWS, END = 330, 384, 1
"""Of the tokenizer; of the embedding, padded to a multiple of 128; `<|endoftext|>`."""
KEYS: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32}
KEYS |= {"vocab_size": ROWS, "pos_emb": "coca", "no_weight_tying": True, "pipe_parallel_size": 1}
PLUGIN = KEYS | {"norm": "rmsnorm", "num_kv_heads": 2, "gpt_j_residual": True}
"""A network that GPT-NeoX trains with the plugin and that has the shape of no stock model."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with 330 ids, in which 0 is a usual end of text too, but not GPT-NeoX's."""
    path = tmp_path_factory.mktemp("vocabulary") / "some_name.json"
    model = tokenizers.ByteLevelBPETokenizer()
    special = ["<eod>", "<|endoftext|>"]
    model.train_from_iterator(LINES, vocab_size=IDS, special_tokens=special, show_progress=False)
    model.save(str(path))
    return path


def saved(save: Path, keys: dict[str, Any], **run: Any) -> Path:
    """What GPT-NeoX saves of a model with random weights."""
    torch.manual_seed(0)
    network = {name: value for name, value in keys.items() if name != "pipe_parallel_size"}
    weights = build_model(load_config([], network)).state_dict()
    weights = {name: weight + 0.1 * torch.randn(weight.shape) for name, weight in weights.items()}
    return write_neox(save, keys | run, rigged(weights) if "norm.bias" in weights else weights)


def rigged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by which a padding row always has the largest logit, then the end of text."""
    constant, head = torch.randn(32), weights["final_linear.weight"]
    head = head - 100 * constant * torch.ones(len(head), 1)
    head[END], head[IDS:] = constant, 2 * constant
    return weights | {"norm.weight": torch.zeros(32), "norm.bias": constant, "final_linear.weight": head}


def recorded(save: Path, vocabulary: Path, keys: dict[str, Any]) -> tuple[Path, list[str]]:
    return saved(save, keys, tokenizer_type="HFTokenizer", vocab_file=str(vocabulary)), []


def relative(save: Path, vocabulary: Path, keys: dict[str, Any]) -> tuple[Path, list[str]]:
    """As GPT-NeoX's own configurations say it; from the working directory."""
    shutil.copy(vocabulary, save.parent / "tokens.json")
    return saved(save, keys, tokenizer_type="HFTokenizer", vocab_file="tokens.json"), []


def in_the_folder(save: Path, vocabulary: Path, keys: dict[str, Any]) -> tuple[Path, list[str]]:
    folder = saved(save, keys, tokenizer_type="HFTokenizer", vocab_file="/elsewhere/20B_tokenizer.json")
    shutil.copy(vocabulary, folder / "tokenizer.json")
    return folder, []


def named(save: Path, vocabulary: Path, keys: dict[str, Any]) -> tuple[Path, list[str]]:
    """Before what the configuration records, which is another tokenizer here."""
    folder = saved(save, keys, tokenizer_type="CharLevelTokenizer")
    return folder, ["tokenizer_type=HFTokenizer", f"vocab_file={vocabulary}"]


PLACES: dict[str, Callable[[Path, Path, dict[str, Any]], tuple[Path, list[str]]]] = {
    "recorded": recorded,
    "relative": relative,
    "in the folder": in_the_folder,
    "named": named,
}
ROUTES = ("exported", "imported and exported")
WAYS = list(zip(PLACES, ROUTES * 2, strict=True))
TOOLS = [["import"], ["export", "neox"], ["export", "huggingface"]]


def exported(folder: Path, said: list[str], route: str, place: Path) -> Path:
    """By the tools, as users do it."""
    setting = ["--set", *said] if said else []
    if route != "exported":
        assert cli.main(["import", str(folder), str(place / "imported"), *setting]) == 0
        folder, setting = place / "imported", []
    assert cli.main(["export", "huggingface", str(folder), str(place / "out"), *setting]) == 0
    return place / "out"


@pytest.mark.parametrize(("where", "route"), WAYS)
def test_an_export_ends_its_texts_and_never_pads_them(
    where: str, route: str, vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, said = PLACES[where](tmp_path / "save", vocabulary, KEYS)
    out = exported(folder, said, route, tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(out, trust_remote_code=True), load_tokenizer("HFTokenizer", vocabulary)
    assert theirs(LINES[0]).input_ids == ours.encode(LINES[0]) and theirs.eos_token_id == theirs.pad_token_id == END
    config, generation = (json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert config["eos_token_id"] == generation["eos_token_id"] == generation["pad_token_id"] == END
    assert generation["suppress_tokens"] == list(range(IDS, ROWS)) and config["vocab_size"] == ROWS
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    batch = theirs([LINES[0], "def"], padding=True, return_tensors="pt")
    answer = model.generate(**batch, max_new_tokens=8)
    assert answer[:, batch.input_ids.shape[1] :].tolist() == [[END], [END]]


@pytest.mark.parametrize("where", PLACES)
def test_our_own_generation_and_evaluation_agree(
    where: str, vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, said = PLACES[where](tmp_path / "save", vocabulary, KEYS)
    prompt = torch.arange(2, 12)[None]
    assert generate(load_model(folder, said), prompt, 3).tolist() == [[END] * 3]
    options = SubjectOptions(str(folder), (Variant("it", (), tuple(said)),), "cpu", "float32", None, False)
    (subject,) = Evaluation(options, "perplexity").subjects()
    assert isinstance(subject, Subject) and subject.tokenizer is not None
    assert (subject.tokenizer.eod, subject.tokenizer.vocab_size, subject.vocab_size) == (END, IDS, IDS)


@torch.no_grad()
def test_what_the_plugin_trains_keeps_its_values_and_bits(vocabulary: Path, tmp_path: Path) -> None:
    folder, _ = recorded(tmp_path / "save", vocabulary, PLUGIN)
    out = export(folder, tmp_path / "out").folder
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    batch = torch.randint(IDS, (2, 96), generator=torch.Generator().manual_seed(1))
    logits = theirs(batch).logits
    assert theirs.config.model_type == "coca_dense" and logits.std() > 0.1
    torch.testing.assert_close(logits, load_model(folder)(batch), rtol=1e-5, atol=1e-5)
    back = import_checkpoint(out, tmp_path / "back").folder
    again = export_neox(back, tmp_path / "again").folder
    before, *others = (dict(open_checkpoint(place).weights()) for place in (folder, out, back, again))
    for after in others:
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    found = open_checkpoint(again).tokenizer().tokenizer
    assert found is not None and found.eod == END, "an export to GPT-NeoX carries the tokenizer"


def test_without_its_tokenizer_the_remedy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "save", KEYS, tokenizer_type="HFTokenizer", vocab_file="/elsewhere/tokens.json")
    for number, tool in enumerate(TOOLS):
        assert cli.main([*tool, str(folder), str(tmp_path / f"{number}")]) == 0
        told = capsys.readouterr().err
        assert "HFTokenizer" in told and "/elsewhere/tokens.json, which cannot be read here" in told
        assert "vocab_file=PATH" in told and f"or copy the tokenizer's file into {folder}" in told
    assert "generate() always runs to its length limit" in told
    options = SubjectOptions(str(folder), (Variant("it"),), "cpu", "float32", None, False)
    assert Evaluation(options, "perplexity").tokenizer is None
    assert "which cannot be read here" in caplog.text and f"or copy the tokenizer's file into {folder}" in caplog.text


@pytest.mark.parametrize("tool", TOOLS)
def test_a_named_tokenizer_that_cannot_be_opened_ends_a_tool_with_its_message(
    tool: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, said = saved(tmp_path / "save", KEYS), ["tokenizer_type=HFTokenizer", "vocab_file=none.json"]
    assert cli.main([*tool, str(folder), str(tmp_path / "out"), "--set", *said]) == 2
    assert ": none.json: cannot be read" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_tokenizers_that_do_not_fit(vocabulary: Path, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", KEYS | {"vocab_size": 256}, tokenizer_type="CharLevelTokenizer")
    opened, said = open_checkpoint(folder), ["tokenizer_type=HFTokenizer", f"vocab_file={vocabulary}"]
    assert re.search("CharLevelTokenizer, .*512 ids, .*256 rows", opened.tokenizer().note or "")
    for use in (lambda: import_checkpoint(folder, tmp_path / "i", said), lambda: export(folder, tmp_path / "e", said)):
        with pytest.raises(CheckpointError, match="some_name.json: has 330 ids, .*256 rows"):
            use()
    with pytest.raises(DataError, match="none.json: cannot be read"):
        export(folder, tmp_path / "e", ["tokenizer_type=HFTokenizer", "vocab_file=none.json"])
    assert not (tmp_path / "i").exists() and not (tmp_path / "e").exists()


def test_a_vocabulary_without_the_end_of_gpt_neox(tmp_path: Path) -> None:
    train_sentencepiece(LINES, IDS, tmp_path / "tokenizer.model")
    folder = saved(tmp_path / "save", KEYS, tokenizer_type="SPMTokenizer", vocab_file=str(tmp_path / "tokenizer.model"))
    done = export(folder, tmp_path / "out")
    assert re.search(r"has no '<\|endoftext\|>', .*using '<eod>'", done.tokenizer_note or "")
    eos = json.loads((done.folder / "generation_config.json").read_text())["eos_token_id"]
    assert eos == load_tokenizer("SPMTokenizer", tmp_path / "tokenizer.model").eod


def test_a_hugging_face_folder_counts_what_lies_beside_its_tokenizer(vocabulary: Path, tmp_path: Path) -> None:
    """Rows behind the tokenizer are padding, but for those that its other files name."""
    folder = exported(*named(tmp_path / "save", vocabulary, KEYS), "exported", tmp_path)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).configure().model.vocab_size == IDS
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": IDS + 4}))
    model = open_checkpoint(folder).configure().model
    assert (model.vocab_size, model.padded_vocab_size) == (IDS + 5, ROWS)
    done = export(folder, tmp_path / "again").folder
    said = json.loads((done / "generation_config.json").read_text())
    assert said["eos_token_id"] == END and said["suppress_tokens"] == list(range(IDS + 5, ROWS))
