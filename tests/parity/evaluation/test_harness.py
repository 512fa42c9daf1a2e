"""Our adapter against the harness's own HFLM on the exported model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from megatron_coca.checkpoints import load_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.lm_eval.model import evaluate_task, index_tasks
from tests.parity.exported import LLAMA, NEOX, modules_cache, random_checkpoint
from tests.unit.evaluation.harness_cases import LENGTH, adapter, documents, requests, write_tasks

__all__ = ["modules_cache"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files on one file of documents."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("neox") / "run", **NEOX)


def flat(values: Any) -> list[Any]:
    return [each for value in values for each in flat(value)] if isinstance(values, list | tuple) else [values]


@pytest.mark.parametrize(
    ("name", "shots"), [("local_choice", 0), ("local_choice", 2), ("local_until", 0), ("local_rolling", 0)]
)
@pytest.mark.parametrize("shape", [NEOX, LLAMA], ids=["neox", "llama"])
def test_scores_equal_those_of_hflm_on_the_export(
    name: str, shots: int, shape: dict[str, Any], tasks: Path, tmp_path: Path
) -> None:
    """Every sample's log-likelihoods or text, and every score with its error."""
    run = random_checkpoint(tmp_path / "run", **shape)
    theirs = HFLM(
        pretrained=str(export(run, tmp_path / "exported").folder), device="cpu", batch_size=4, max_length=LENGTH
    )
    manager = index_tasks([name], [tasks])
    models = (theirs, adapter(load_checkpoint(run)))
    expected, found = (evaluate_task(model, manager, name, shots, None, 1234) for model in models)
    for one, other in zip(expected["samples"][name], found["samples"][name], strict=True):
        assert one["prompt_hash"] == other["prompt_hash"]
        assert flat(other["resps"]) == pytest.approx(flat(one["resps"]), abs=1e-4)
    metrics = {key: value for key, value in expected["results"][name].items() if isinstance(value, float)}
    assert metrics and {key: found["results"][name][key] for key in metrics} == pytest.approx(metrics, rel=1e-4)
    if name == "local_until":
        lengths = {len(flat(sample["resps"])[0]) for sample in found["samples"][name]}
        assert min(lengths) < 12 and max(lengths) > 0, "some are stopped, and something is written"


def test_texts_of_a_dynamic_extension_are_those_of_hflm(tmp_path: Path, modules_cache: Path) -> None:
    """By the defaults of both; the texts leave the training length on their way."""
    keys = {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    run = random_checkpoint(tmp_path / "run", **LLAMA | keys)
    folder = str(export(run, tmp_path / "exported").folder)
    theirs = HFLM(pretrained=folder, device="cpu", batch_size=4, max_length=LENGTH, trust_remote_code=True)
    pairs = [(document["text"], {"until": ["\n"], "max_gen_toks": 30}) for document in documents()]
    expected = theirs.generate_until(requests("generate_until", pairs))
    assert adapter(load_checkpoint(run)).generate_until(requests("generate_until", pairs)) == expected


METHODS: dict[str, dict[str, Any]] = {
    "coca, dynamic": {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "dynamic, fine-tuned at more": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8}
    },
    "rerope": {"relative_positions": {"type": "rerope", "window": 8}},
    "xpos": {"pos_emb": "xpos"},
    "alibi": {"pos_emb": "alibi"},
    "streaming": {"relative_positions": {"type": "streaming", "window": 8}},
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    },
}


@pytest.mark.parametrize("name", METHODS)
def test_batches_and_order_change_nothing(name: str, tmp_path: Path) -> None:
    """Long and short inputs together, against one at a time: a length-dependent extension sees each input's own."""
    keys = {"rotary_pct": 1.0} | METHODS[name]
    loaded = load_checkpoint(random_checkpoint(tmp_path / "run", **keys))
    pairs = [(document["text"], " " + document["choices"][0]) for document in documents()[:5]] + [("", "alone")]
    together, alone = adapter(loaded, 10_000, 400), adapter(loaded, 1, 400)
    scored = together.loglikelihood(requests("loglikelihood", pairs))
    single = [alone.loglikelihood(requests("loglikelihood", [pair]))[0] for pair in pairs]
    assert [total for total, _ in scored] == pytest.approx([total for total, _ in single], abs=2e-4)
    assert together.loglikelihood(requests("loglikelihood", pairs[::-1])) == scored[::-1]
    prompts = [(text, {"until": ["e"], "max_gen_toks": 6}) for text, _ in pairs]
    written = together.generate_until(requests("generate_until", prompts))
    assert written == [alone.generate_until(requests("generate_until", [prompt]))[0] for prompt in prompts]
    assert together.generate_until(requests("generate_until", prompts[::-1])) == written[::-1]


def test_a_log_likelihood_by_hand(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint)
    ((total, greedy),) = adapter(loaded).loglikelihood(requests("loglikelihood", [("ab ", "cd")]))
    with torch.no_grad():
        logs = loaded.model(torch.tensor([list(b"ab cd")])).double().log_softmax(-1)[0]
    assert total == pytest.approx(
        sum(logs[place, token].item() for place, token in ((1, 32), (2, 99), (3, 100))), abs=1e-4
    )
    assert not greedy
    best = int(logs[3].argmax())
    if best < 128:
        assert adapter(loaded).loglikelihood(requests("loglikelihood", [("ab c", chr(best))]))[0][1]


def test_a_continuation_longer_than_the_model_reads(checkpoint: Path) -> None:
    with pytest.raises(EvaluationError, match="has 49 tokens, but 1 to 48 can be scored"):
        adapter(load_checkpoint(checkpoint)).loglikelihood(requests("loglikelihood", [("a", "b" * 49)]))
