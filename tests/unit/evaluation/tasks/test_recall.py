"""Key-value recall of a model with known weights: questions, accuracy, shifts, scores of heads, and the report."""

import json
import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.commands.evaluate import main
from megatron_coca.config import load_config
from megatron_coca.data import TaskSettings
from megatron_coca.data.shards import ShardWriter
from megatron_coca.data.synthetic import Draws, recall_question
from megatron_coca.evaluation import EvaluationError
from megatron_coca.evaluation.attention_maps import observed, row_scores
from megatron_coca.evaluation.report.build import build_report
from megatron_coca.evaluation.tasks.recall.measure import synthetic_questions
from megatron_coca.model import build_model
from tests.checkpoint_files import write_checkpoint

SETTINGS = TaskSettings()
KEYS = {"synthetic": {"task": "recall"}, "vocab_size": 320, "seq_length": 32}
SHAPE = {"pos_emb": "coca", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}


def test_a_question_at_the_end_asks_for_one_of_the_facts() -> None:
    draws = Draws(np.arange(2000), 0, "evaluation 100")
    tokens, answers, places = recall_question(SETTINGS, draws.integers(100, 32), draws)
    facts = (tokens >= 32) & (tokens < 288)
    assert (facts.sum(axis=1) == 8).all() and not facts[:, -1].any()
    told = tokens[np.arange(2000), places] - 32
    assert (told // 16 == tokens[:, -1] - 288).all() and (told % 16 == answers - 304).all()
    asked = [set((row[mask] - 32) // 16) for row, mask in zip(tokens, facts, strict=True)]
    assert all(len(keys) == 8 for keys in asked), "keys are different"
    assert abs(places.mean() - 49) < 2.5 and set(places) == set(range(99))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recall") / "run"
    torch.manual_seed(0)
    write_checkpoint(folder, load_config([], SHAPE | KEYS), tokenizer=None)
    return folder


def evaluate(checkpoint: Path, output: Path, *options: str, expected: int = 0) -> dict[str, Any]:
    command = ["recall", "--checkpoint", str(checkpoint), "--label", "model", "--output", str(output)]
    assert main([*command, "--device", "cpu", "--cases", "48", *options]) == expected
    return json.loads(output.read_text())


def test_lengths_without_room_for_the_facts_are_errors(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["recall", "--checkpoint", str(checkpoint), "--output", str(tmp_path), "--device", "cpu", "--cases", "4"]
    assert main([*command, "--lengths", "8,32"]) == 2
    assert "--lengths 8: 8 facts and a question need 9 tokens" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*command, "--lengths", "9", "--shifts", "0", "--diagnosed", "1"]) == 0


def test_cells_by_length_and_shift_and_the_same_file_again(checkpoint: Path, tmp_path: Path) -> None:
    options = ("--lengths", "32,64", "--shifts", "0,5", "--diagnosed", "7")
    result = evaluate(checkpoint, tmp_path / "one.json", *options)
    assert [(cell["length"], cell["shift"], cell["count"]) for cell in result["results"]] == [
        (32, 0, 48),
        (32, 5, 48),
        (64, 0, 48),
    ]
    assert result["protocol"]["chance"] == 1 / 16
    short, shifted, long = result["results"]
    assert short["beyond"] is None and short["inside"]["count"] == 48
    assert long["inside"]["count"] + long["beyond"]["count"] == 48 and long["beyond"]["count"] > 10
    assert short["heads"] and long["heads"] and not shifted["heads"]
    assert short["nll"] != shifted["nll"], "CoCA-Slack depends on the first position"
    other = evaluate(checkpoint, tmp_path / "two.json", *options, "--tokens-per-batch", "100")
    assert [cell["accuracy"] for cell in other["results"]] == [cell["accuracy"] for cell in result["results"]]
    for one, two in zip(result["results"], other["results"], strict=True):
        assert math.isclose(one["nll"], two["nll"], rel_tol=1e-5)
    report = tmp_path / "report"
    text = build_report([tmp_path / "one.json"], report, papers=False)
    assert "Recall by length" in text and "all positions shifted" in text
    assert {file.stem for file in (report / "figures").glob("*.png")} == {"recall-1", "recall-1-heads"}


def test_ordered_recall_counts_each_kind_of_question(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = {"task": "ordered_recall", "facts": 6, "updates": 3}
    write_checkpoint(
        tmp_path / "run", load_config([], SHAPE | KEYS | {"synthetic": task, "vocab_size": 342}), tokenizer=None
    )
    options = ("--lengths", "32,64", "--shifts", "0", "--diagnosed", "4")
    result = evaluate(tmp_path / "run", tmp_path / "one.json", *options)
    protocol = result["protocol"]
    assert protocol["prompts"] == "synthetic ordered_recall, 6 facts, 16 keys, 3 values of each key told"
    assert protocol["text"].startswith("ordered recall")
    for entry in result["results"]:
        kinds = entry["questions"]
        assert set(kinds) == {"latest", "first", "back"} and sum(kind["count"] for kind in kinds.values()) == 48
        assert sum(kind["correct"] for kind in kinds.values()) == entry["correct"]
    single = evaluate(tmp_path / "run", tmp_path / "single.json", *options, "--cases", "1")
    assert all(sum(kind["count"] for kind in entry["questions"].values()) == 1 for entry in single["results"])
    text = build_report([tmp_path / "one.json"], tmp_path / "report", papers=False)
    assert "Recall by the kind of question" in text and "model, back" in text


def test_questions_drawn_by_the_seed_of_training(checkpoint: Path, tmp_path: Path) -> None:
    """Fillers too; the same as with that seed as a number, and comparable over seeds in a report."""
    torch.manual_seed(0)
    write_checkpoint(tmp_path / "run", load_config([], SHAPE | KEYS | {"seed": 7}), tokenizer=None)
    options = ("--lengths", "32", "--shifts", "0", "--diagnosed", "0", "--seed")
    own = evaluate(tmp_path / "run", tmp_path / "own.json", *options, "trained")
    seven = evaluate(tmp_path / "run", tmp_path / "seven.json", *options, "7")
    assert own["results"] == seven["results"] and own["protocol"]["seed"] == "trained"
    other = evaluate(tmp_path / "run", tmp_path / "other.json", *options, "1234")
    assert other["results"][0]["nll"] != own["results"][0]["nll"]
    evaluate(checkpoint, tmp_path / "second.json", *options, "trained")
    text = build_report([tmp_path / "own.json", tmp_path / "second.json"], tmp_path / "report", papers=False)
    assert text.count("Recall by length") == 1, "one table of two seeds"
    assert "seed trained" in (tmp_path / "report" / "report.md").read_text()


def test_the_seed_draws_the_text_between_facts_too(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "text", 512)
    for number in range(300):
        writer.add(np.full(40, number))
    writer.finish()
    settings = TaskSettings("recall", facts=4, text=True, filler_tokens=512)
    data = SimpleNamespace(data_root="data", test_data_paths=[str(tmp_path / "text")], test_data_weights=None)
    opened = SimpleNamespace(step=3, trained=SimpleNamespace(data=data, seed=7))
    options = SimpleNamespace(variants=[SimpleNamespace(overrides=(), files=())], checkpoint="run")
    evaluation: Any = SimpleNamespace(opened=opened, options=options)
    asked = {
        seed: synthetic_questions(Namespace(cases=20, seed=seed, checkpoint="run"), evaluation, settings)(32)[0].ids
        for seed in (7, 8, "trained")
    }
    filler = {seed: set(ids[ids < 300]) for seed, ids in asked.items()}
    assert (asked["trained"] == asked[7]).all() and len(filler[7] ^ filler[8]) > 10
    evaluation.opened.step = None
    with pytest.raises(EvaluationError, match="--seed trained: run does not record"):
        synthetic_questions(Namespace(cases=20, seed="trained", checkpoint="run"), evaluation, settings)


@pytest.mark.parametrize("changes", [{}, {"relative_positions": {"type": "rerope", "window": 8}}, {"pos_emb": "alibi"}])
def test_the_last_row_is_that_of_the_softmax(changes: dict[str, Any]) -> None:
    """Weights from the scores give the output of the attention that the model computed."""
    torch.manual_seed(0)
    model = build_model(load_config([], SHAPE | KEYS | changes)).double().eval()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def visit(q: torch.Tensor, k: torch.Tensor, inputs: Any) -> None:
        weights = row_scores(inputs, torch.tensor([39]))[:, :, 0].double().softmax(dim=-1)
        own = torch.einsum("bhn,bhnd->bhd", weights, inputs.value.double())
        layer = model.blocks[0].attention
        seen.append((own, layer.backend.attend(inputs)[:, :, -1]))

    with torch.no_grad(), observed(model, visit):
        model.hidden_states(torch.randint(0, 320, (3, 40)))
    ((own, attended),) = seen
    assert torch.allclose(own, attended, atol=1e-6)


def test_a_model_without_the_task_is_asked_for_passkeys(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_checkpoint(
        tmp_path / "run", load_config([], SHAPE | {"pos_emb": "rotary", "vocab_size": 512, "seq_length": 64})
    )
    result = evaluate(
        tmp_path / "run",
        tmp_path / "out.json",
        "--lengths",
        "600,1000",
        "--shifts",
        "0",
        "--diagnosed",
        "9",
        expected=2,
    )
    assert result["protocol"]["prompts"] == "passkey" and result["protocol"]["chance"] is None
    cells = {(cell["length"], cell["shift"]): cell for cell in result["results"]}
    assert {head["head"] for head in cells[1000, 0]["heads"]} == {0, 1}
    assert all(0 < head["weight"] < 1 and head["fact"] < head["rest"] for head in cells[1000, 0]["heads"])
    assert result["missing"][0]["at"] == "length 64", "no passkey prompt is that short"


def test_answers_that_overflow_are_no_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([], SHAPE | KEYS)
    weights = {name: torch.full_like(each, torch.inf) for name, each in build_model(config).state_dict().items()}
    run = write_checkpoint(tmp_path / "run", config, weights, tokenizer=None)
    content = evaluate(run, tmp_path / "a.json", "--lengths", "32", "--shifts", "0", "--diagnosed", "0", expected=2)
    assert content["results"] == [] and content["missing"][0]["kind"] == "failed"
    assert "overflowed its dtype" in content["missing"][0]["reason"]
