"""The tables that compare fine-tuned models with the control and with the model before."""

from math import exp
from pathlib import Path

import pytest

from megatron_coca.config import load_config
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.stretch.choices import (
    CHOICES,
    FINETUNED,
    LORA,
    PLAIN,
    simplicity,
    trial_keys,
    trial_methods,
)
from megatron_coca.evaluation.stretch.trials import Trial, difference_table, training_table
from tests.unit.evaluation.stretch_cases import TRAINED, config_of, small_result

FOUND, MISSED = (True, 9.0), (False, -2.0)


def trial(method: str, memory: float | None = 1.25) -> Trial:
    return Trial(
        method, Path(f"out/finetuned_{method}"), Path(f"out/after_{method}"), config_of("yarn"), 20, 4096, 7.2, memory
    )


def test_differences_are_paired_with_the_control_and_with_the_method_before() -> None:
    facts = {
        "none (trained)": {2 * TRAINED: [MISSED] * 8},
        "pi (trained)": {2 * TRAINED: [FOUND] * 6 + [MISSED] * 2},
        "pi": {2 * TRAINED: [FOUND, MISSED] * 4},
        "coca (trained)": {2 * TRAINED: [FOUND] * 4},
    }
    losses = {("none (trained)", 2 * TRAINED): [4.0, 5.0], ("pi (trained)", 2 * TRAINED): [3.5, 4.4]}
    table = difference_table(small_result(facts, losses), [trial("none"), trial("pi"), trial("coca")])
    rows = {(row.name, *(cell.text for cell in row.cells[:2])): row.cells[2:] for row in table.rows}
    pairs = [("pi (trained)", "none (trained)"), ("coca (trained)", "none (trained)"), ("pi (trained)", "pi")]
    pairs.append(("none (trained)", "plain"))
    assert list(rows) == [(*pair, f"{length:,}") for pair in pairs for length in (TRAINED, 2 * TRAINED)]
    perplexity, share, margin = rows["pi (trained)", "none (trained)", f"{2 * TRAINED:,}"]
    assert perplexity.value == pytest.approx(exp(-0.55)) and perplexity.detail.endswith("n = 2")
    assert share.text == "+75%" and share.detail.endswith("n = 8")
    assert margin.value == pytest.approx(6 / 8 * 11)
    assert rows["pi (trained)", "pi", f"{2 * TRAINED:,}"][1].text == "+25%"
    assert rows["coca (trained)", "none (trained)", f"{2 * TRAINED:,}"][1].detail.endswith("n = 4")
    assert rows["none (trained)", "plain", f"{2 * TRAINED:,}"][1].text == "", "the plain model has no facts there"


def test_what_was_trained() -> None:
    first, second = training_table([trial("none"), trial("pi", None)]).rows
    assert (first.name, *(cell.text for cell in first.cells)) == (
        *("none (trained)", "20", "4,096", "0:00:08", "1.2", "finetuned_none"),
    )
    assert second.cells[3].text == ""


def test_fine_tuned_models_are_the_least_simple() -> None:
    names = [*CHOICES, *(f"{name} (trained)" for name in FINETUNED)]
    assert min(names, key=simplicity) == PLAIN
    assert sorted(names, key=simplicity)[len(CHOICES)] == "none (trained)"


def test_the_control_is_always_trained() -> None:
    assert trial_methods(["pi", "none", "pi"]) == ["none", "pi"]
    with pytest.raises(EvaluationError, match="--finetune-method yarm: unknown method; .*none, pi, yarn"):
        trial_methods(["yarm"])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", FINETUNED)
def test_the_keys_of_a_method_fit_a_rotary_model(method: str, lora: bool) -> None:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 64, "vocab_size": 512}
    keys = [f"{name}={value}" for name, value in (shape | {"pos_emb": "rotary", "train_iters": 30}).items()]
    config = load_config([], [*keys, *trial_keys(method, 4.0, 64, LORA.format(also="norms") if lora else None)])
    assert (config.position != load_config([], keys).position) == (method != "none")
    assert (config.run_stages()[-1].config.optimizer.lora is not None) == lora
