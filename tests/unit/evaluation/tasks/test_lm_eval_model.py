"""The harness's model: settings of greedy decoding, prompts and scores, and the import of `evaluate`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.checkpoints import load_checkpoint
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.lm_eval.model import greedy_limits, import_evaluate_library
from megatron_coca.evaluation.tasks.lm_eval.prompts import PromptEncoding
from tests.parity.exported import NEOX, random_checkpoint
from tests.tokenizer_files import train_unigram
from tests.unit.evaluation.harness_cases import WORDS, adapter, requests


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False, "temperature": 1},
        {"do_sample": False, "temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"num_beams": 1},
        {"num_beams": None, "repetition_penalty": 1.0},
    ],
    ids=str,
)
def test_settings_of_greedy_decoding(settings: dict[str, Any]) -> None:
    assert greedy_limits("task", {"until": "x", "max_gen_toks": 7} | settings) == (7, ("x",))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"do_sample": True}, "do_sample"),
        ({"temperature": 0.7}, "do_sample"),
        ({"do_sample": True, "temperature": 0.7}, "do_sample"),
        ({"num_beams": 4, "do_sample": False}, "num_beams"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
    ids=str,
)
def test_settings_of_sampling_are_errors(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(EvaluationError, match=f"task task: generation_kwargs: {named}: only greedy"):
        greedy_limits("task", settings)


def test_no_room_for_a_prompt(tmp_path: Path) -> None:
    model = adapter(load_checkpoint(random_checkpoint(tmp_path / "run", **NEOX)), max_length=48)
    with pytest.raises(EvaluationError, match="48 new tokens leave no room .*--max-length 48; "):
        model.generate_until(requests("generate_until", [("a", {"max_new_tokens": 48})]))


def test_a_token_before_every_text(tmp_path: Path) -> None:
    loaded = load_checkpoint(random_checkpoint(tmp_path / "run", **NEOX))
    begun, plain = adapter(loaded, start=ord("#")), adapter(loaded)
    asked = requests("loglikelihood", [("ab", "cd"), ("", "cd")])
    assert begun.loglikelihood(asked) == plain.loglikelihood(requests("loglikelihood", [("#ab", "cd"), ("#", "cd")]))
    ((whole, _),) = plain.loglikelihood(requests("loglikelihood", [("#", "abc")]))
    assert begun.loglikelihood_rolling(requests("loglikelihood_rolling", [("abc",)])) == [whole]
    settings = {"until": ["\n"], "max_gen_toks": 5}
    texts = [
        model.generate_until(requests("generate_until", [(text, settings)]))
        for model, text in ((begun, "ab"), (plain, "#ab"))
    ]
    assert texts[0] == texts[1]


def test_answers_that_had_not_ended_are_noted(tmp_path: Path) -> None:
    """An answer that ends with its last possible token has ended."""
    model = adapter(load_checkpoint(random_checkpoint(tmp_path / "run", **NEOX)))
    (text,) = model.generate_until(requests("generate_until", [("ab", {"until": [], "max_gen_toks": 5})]))
    assert list(model.unfinished.values()) == [{0}]
    model.unfinished.clear()
    (begun,) = model.generate_until(requests("generate_until", [("ab", {"until": [text[-1]], "max_gen_toks": 5})]))
    assert model.unfinished == {} and text.startswith(begun)


def test_numbers_that_are_not_finite_are_no_scores(tmp_path: Path) -> None:
    """The largest of logits that are NaN would be an answer, right or wrong."""
    loaded = load_checkpoint(random_checkpoint(tmp_path / "run", **NEOX))
    with torch.no_grad():
        next(loaded.model.parameters())[:] = torch.inf
    with pytest.raises(EvaluationError, match="log-likelihood: nan: "):
        adapter(loaded).loglikelihood(requests("loglikelihood", [("ab", "cd")]))


def test_names_that_a_sentencepiece_model_does_not_read_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = train_unigram([" ".join(WORDS)] * 40, 280, tmp_path / "tokenizer.model")
    encoding = PromptEncoding(tokenizer)
    for text in ("the sea", "the sea<eod>", "calm<eod>"):
        encoding.encode(text)
    assert caplog.text.count("<eod>, which SPMTokenizer reads as plain text") == 1


def test_the_library_is_found_beside_our_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's `evaluate`, not the script evaluate.py."""
    (tmp_path / "script").mkdir()
    (tmp_path / "script/evaluate.py").write_text("raise SystemExit('our script')")
    (tmp_path / "site/evaluate").mkdir(parents=True)
    (tmp_path / "site/evaluate/__init__.py").touch()
    path = ["", str(tmp_path / "script"), str(tmp_path / "site")]
    monkeypatch.chdir(tmp_path / "script")
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    import_evaluate_library()
    found = sys.modules.pop("evaluate")
    assert found.__file__ == str(tmp_path / "site/evaluate/__init__.py") and sys.path is path
