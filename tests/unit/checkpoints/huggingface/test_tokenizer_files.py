"""Tokenizer and generation files of the original model in an export, and notes of an import about lost text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron_coca import cli
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface.tokenizer_files import TOKENIZER_FILES
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.commands import export as export_command
from megatron_coca.commands import import_checkpoint as import_tool
from megatron_coca.data import load_tokenizer
from megatron_coca.evaluation.options import SubjectOptions, Variant
from megatron_coca.evaluation.subject import Evaluation
from tests.parity.exported import LLAMA, random_checkpoint
from tests.parity.original import GENERATION, IDS, LINES, Json, changed, original_folder, trained, write


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_folder(tmp_path_factory.mktemp("original"))


def same_files(one: Path, other: Path) -> bool:
    names = [name for name in TOKENIZER_FILES if (one / name).is_file()]
    assert len(names) == 5
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def ids(folder: Path) -> Json:
    config = json.loads((folder / "config.json").read_text())
    return {name: config[name] for name in IDS}


@pytest.mark.parametrize("overrides", [{}, {"pos_emb": "coca"}], ids=["stock", "CoCA"])
def test_imported_and_exported_with_the_original(overrides: Json, source: Path, tmp_path: Path) -> None:
    done = import_checkpoint(source, tmp_path / "save", overrides)
    plain = export(done.folder, tmp_path / "plain").folder
    assert not (plain / "chat_template.jinja").exists() and ids(plain)["bos_token_id"] is None
    kept = export(done.folder, tmp_path / "kept", tokenizer=source)
    assert kept.tokenizer_note is None and same_files(source, kept.folder) and ids(kept.folder) == IDS
    again = export(kept.folder, tmp_path / "again")
    assert same_files(source, again.folder) and ids(again.folder) == IDS


def test_an_export_of_the_folder_itself_keeps_everything(source: Path, tmp_path: Path) -> None:
    for name, options in (("own", {}), ("named", {"tokenizer": source})):
        folder = export(source, tmp_path / name, **options).folder
        assert same_files(source, folder) and ids(folder) == IDS


def test_padding_is_never_generated(source: Path, tmp_path: Path) -> None:
    """The original's settings do not exclude rows that padding added, so the export adds that. Other settings stay."""
    ours = load_tokenizer("HFTokenizer", source, eod="</s>")
    run = random_checkpoint(tmp_path / "run", tokenizer=ours, **LLAMA)
    folder = export(run, tmp_path / "kept", tokenizer=source).folder
    said = json.loads((folder / "generation_config.json").read_text())
    assert said == GENERATION | {"suppress_tokens": list(range(500, 512))}


def another(folder: Path) -> None:
    trained(folder / "tokenizer.json", [line[::-1] for line in LINES])


def without(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def larger(folder: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens([f"<extra{i}>" for i in range(180)])
    model.save(str(folder / "tokenizer.json"))


def ending(folder: Path) -> None:
    changed(folder / "config.json", eos_token_id=3)
    changed(folder / "generation_config.json", eos_token_id=3)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "other ids": (another, r"produces other ids than the checkpoint's HFTokenizer for 'The quick"),
    "no tokenizer": (without, "no tokenizer for the export .* has none"),
    "too many": (larger, "has token id 509, but the model has only 500 tokens"),
    "added outside": (
        lambda f: write(f / "added_tokens.json", {"<x>": 500}),
        "has token id 500, but the model has only 500 tokens",
    ),
    "declared outside": (
        lambda f: changed(f / "tokenizer_config.json", added_tokens_decoder={"511": {"content": "<x>"}}),
        "has token id 511",
    ),
    "pad outside": (lambda f: changed(f / "config.json", pad_token_id=700), "has token id 700"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_tokenizer_is_an_error(name: str, source: Path, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    ours = load_tokenizer("HFTokenizer", source, eod="</s>")
    run = random_checkpoint(tmp_path / "run", tokenizer=ours, **LLAMA)
    folder = shutil.copytree(source, tmp_path / "original")
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        export(run, tmp_path / "kept", tokenizer=folder)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("generation", [True, False], ids=["both files", "config.json"])
def test_another_end_of_text_is_added(generation: bool, source: Path, tmp_path: Path) -> None:
    ours = load_tokenizer("HFTokenizer", source, eod="</s>")
    run = random_checkpoint(tmp_path / "run", tokenizer=ours, **LLAMA)
    original = shutil.copytree(source, tmp_path / "original")
    ending(original)
    if not generation:
        (original / "generation_config.json").unlink()
    done = export(run, tmp_path / "kept", tokenizer=original)
    files = [json.loads((done.folder / name).read_text()) for name in ("config.json", "generation_config.json")]
    assert [content["eos_token_id"] for content in files] == [[3, 1], [3, 1]]
    assert done.tokenizer_note is not None and "because the checkpoint ends texts with 1" in done.tokenizer_note
    opened = open_checkpoint(done.folder)
    tokenizer, _ = opened.tokenizer()
    assert tokenizer is not None and set(tokenizer.ends) == {3, 1}


def test_nothing_to_compare_with(source: Path, tmp_path: Path) -> None:
    run = random_checkpoint(tmp_path / "run", tokenizer=None, **LLAMA)
    done = export(run, tmp_path / "kept", tokenizer=source)
    assert done.tokenizer_note is not None and "was not compared" in done.tokenizer_note
    assert ids(done.folder) == IDS


def test_the_tools(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_tool.main([str(source), str(tmp_path / "save")]) == 0
    said = capsys.readouterr().err
    assert f"are not imported; export with --tokenizer {source} to copy them from the source" in said
    asked = ["huggingface", str(tmp_path / "save"), str(tmp_path / "kept"), "--tokenizer", str(source)]
    assert export_command.main(asked) == 0 and same_files(source, tmp_path / "kept")
    asked = ["huggingface", str(tmp_path / "save"), str(tmp_path / "other"), "--tokenizer", str(tmp_path)]
    assert cli.main(["export", *asked]) == 2 and "no tokenizer for the export" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rotary", "coca"])
def test_padding_comes_back_as_padding(method: str, tmp_path: Path) -> None:
    once = export(random_checkpoint(tmp_path / "run", **LLAMA, pos_emb=method), tmp_path / "once").folder
    done = import_checkpoint(once, tmp_path / "save")
    for checkpoint in (once, done.folder):
        model = open_checkpoint(checkpoint).trained.model
        assert (model.vocab_size, model.padded_vocab_size) == (500, 512)
    again = export(done.folder, tmp_path / "again").folder
    said = json.loads((again / "generation_config.json").read_text())
    assert said["suppress_tokens"] == list(range(500, 512))


@pytest.mark.parametrize("tokens", [[3, 4], [510, 511, 7], [509, 510], list(range(512)), [], ["x"], "x"])
def test_other_suppressed_tokens_are_no_padding(tokens: Any, tmp_path: Path) -> None:
    once = export(random_checkpoint(tmp_path / "run", **LLAMA), tmp_path / "once").folder
    changed(once / "generation_config.json", suppress_tokens=tokens)
    model = open_checkpoint(once).trained.model
    assert (model.vocab_size, model.padded_vocab_size) == (512, 512)


LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
EXTENDED: dict[str, Json] = {
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 4.0} | LONG,
}


@pytest.mark.parametrize("kind", EXTENDED)
def test_a_stock_model_keeps_the_length_that_it_reaches(kind: str, source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 32} | EXTENDED[kind]
    changed(folder / "config.json", max_position_embeddings=128, rope_parameters=scaling)
    again = export(folder, tmp_path / "again").folder
    config = json.loads((again / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert config["rope_parameters"]["original_max_position_embeddings"] == 32
    before, after = (open_checkpoint(place).trained for place in (folder, again))
    assert after.position == before.position and after.model == before.model
    assert (after.model.seq_length, after.position.original_length(after.model.seq_length)) == (128, 32)
    for place in (folder, again):
        options = SubjectOptions(str(place), (Variant("as trained"),), "cpu", "float32", None, False)
        (subject,) = Evaluation(options, "perplexity").subjects()
        assert subject.header.checkpoint.seq_length == 128, "the length at which evaluation truncates"
