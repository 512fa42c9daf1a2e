"""Margins of hidden facts and losses: their values, when a number counts as found, interruptions and parts."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca import build_model, load_config, load_model
from megatron_coca.commands.evaluate import main
from megatron_coca.evaluation.results import Store
from megatron_coca.evaluation.suite import option_arguments
from megatron_coca.evaluation.tasks import measurements
from megatron_coca.evaluation.tasks.margin.measure import _scores
from megatron_coca.evaluation.tasks.margin.task import CaseMargin, MarginEntry, MarginResult
from megatron_coca.evaluation.tasks.retrieval.cases import needle, passkey
from megatron_coca.evaluation.tasks.retrieval.prompts import FILLER_HAYSTACK
from megatron_coca.work.statuses import INTERRUPTED
from tests.checkpoint_files import BYTES, write_checkpoint

STUB, A, SPACE, ONE, TWO, SIX = range(6)
NEXT = {STUB: (A, SPACE), SPACE: (ONE, SIX), ONE: (TWO, SIX), TWO: (A, ONE), SIX: (TWO, A)}
"""The likeliest and the second likeliest token after each token."""


class Bigrams:
    """A model that knows the number 12, but would write "a" before it."""

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)

    def hidden_states(self, ids: torch.Tensor, cache: Any = None, last: int = 0) -> torch.Tensor:
        return ids[:, -last:] if last else ids

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(len(NEXT) + 1, 6)
        for token, (first, second) in NEXT.items():
            table[token, first], table[token, second] = 6.0, 4.0
        return table[hidden]


class NoCache:
    def __len__(self) -> int:
        return 0

    def cut(self, length: int) -> None: ...

    def cache_for(self, *_: Any) -> "NoCache":
        return self

    def keep(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([[SPACE, ONE, TWO], [SPACE, SIX, SIX]], True),  # the space tells nothing about the number
        ([[SPACE, SIX, TWO], [SPACE, ONE, TWO]], False),
        ([[SPACE, ONE, TWO], [A, SIX, SIX]], False),  # the answers do not begin with the same token
        ([[A], [SPACE]], True),
        ([[SPACE], [A]], False),
    ],
)
def test_tokens_of_all_numbers_do_not_decide(answers: list[list[int]], found: bool) -> None:
    model: Any = Bigrams()
    shared: Any = NoCache()
    scores, greedy = _scores(model, shared, np.array([STUB]), answers)
    assert greedy is found and len(scores) == 2


SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 512, "vocab_size": 512}
SHAPE |= {"no_weight_tying": True, "pos_emb": "rotary", "tokenizer_type": "CharLevelTokenizer"}
LENGTHS, FACTS, SCORED = (512, 700), 3, 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = load_config([], SHAPE)
    weights = {name: 3 * weight for name, weight in build_model(config).state_dict().items()}
    return write_checkpoint(tmp_path_factory.mktemp("run"), config, weights)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = ("Call me Ishmael. " * 50, "It is a truth universally acknowledged. " * 20, "In the beginning. " * 30)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def arguments(run: Path, text: Path) -> list[str]:
    line = ["margin", "--checkpoint", run, "--data", text, "--lengths", ",".join(map(str, LENGTHS)), "--facts", FACTS]
    line += ["--num-documents", 2, "--scored", SCORED, "--seed", 5, "--device", "cpu", "--variant", "plain"]
    return [*map(str, line), "--variant", "ReRoPE", "relative_positions.type=rerope"]


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert main([*arguments, "--output", str(folder)]) == 0
    return folder


def result_of(folder: Path, label: str = "plain") -> MarginResult:
    return MarginResult.model_validate_json((folder / f"margin_{label}.json").read_bytes())


def numbers(folder: Path, label: str = "plain") -> dict[str, Any]:
    """Losses, and margins rounded, because they depend on the prompt before."""
    entries = result_of(folder, label).results
    found = {f"losses {entry.length}": entry.nlls for entry in entries}
    return found | {f"margins {entry.length}": [round(each, 3) for each in entry.margins] for entry in entries}


@torch.inference_mode()
def log_probabilities(model: Any, ids: list[int], last: int) -> torch.Tensor:
    """The log-probabilities of the last tokens, in float64 and without a cache."""
    logits = model(torch.tensor([ids[:-1]]))[0, -last:]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[-last:])[:, None])[:, 0]


@pytest.mark.parametrize(("label", "changes"), [("plain", {}), ("rerope", {"relative_positions.type": "rerope"})])
def test_margins_and_losses_are_those_of_a_computation_in_float64(
    run: Path, text: Path, whole: Path, label: str, changes: dict[str, str]
) -> None:
    model = load_model(run, changes).double()
    result = result_of(whole, label)
    documents = [json.loads(line)["text"].encode() + b"\0" for line in text.read_text().splitlines()]
    assert len(documents[0]) > LENGTHS[1] < len(documents[1]) and result.documents.count == 2
    draws = {"passkey": passkey(True, 7), "needle": needle(50, FILLER_HAYSTACK, True)}
    for entry in result.results:
        expected = [
            -float(log_probabilities(model, list(document[: LENGTHS[1] + 1])[-entry.length - 1 :], SCORED).sum())
            for document in documents[:2]
        ]
        assert entry.nlls == pytest.approx(expected, rel=1e-5)
        assert entry.perplexity == pytest.approx(math.exp(sum(expected) / 2 / SCORED), rel=1e-5)
        assert [case.task for case in entry.cases] == ["passkey", "needle", "passkey"]
        for case in entry.cases:
            seed = 5 * 1_000_000 if case.task == "needle" else 5
            own = draws[case.task].make_cases(BYTES, entry.length - 8, 1 + case.number // 2, seed)[case.number // 2]
            (right,) = own.expected
            random = Random(f"{case.task} {own.number} {right}")
            foils = {str(random.randrange(10**6, 10**7)) for _ in range(7)}
            assert right not in foils and len(foils) == 7
            scores = {}
            for answer in (right, *foils):
                ids = [*own.prompt.tolist(), *f" {answer}".encode()]
                scores[answer] = float(log_probabilities(model, ids, 8).sum())
            assert case.margin == pytest.approx(scores[right] - max(scores[foil] for foil in foils), abs=1e-3)
            assert case.tokens == len(own.prompt) <= entry.length - 8
        assert entry.margin == pytest.approx(fmean(case.margin for case in entry.cases))


def test_an_interrupted_measurement_resumes_with_the_next_input(
    arguments: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, put = 0, Store.put

    def stop(self: Store[Any], *given: Any) -> None:
        nonlocal stored
        put(self, *given)
        stored += 1
        if stored in stops:
            raise KeyboardInterrupt

    stops = {1, 4, 12}
    monkeypatch.setattr(Store, "put", stop)
    for _ in stops:
        assert main([*arguments, "--output", str(tmp_path)]) == INTERRUPTED
    begun = [entry for label in ("plain", "rerope") for entry in result_of(tmp_path, label).results]
    assert sum(len(entry.nlls) + len(entry.cases) for entry in begun) == stored == 12
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    assert stored == 2 * len(LENGTHS) * (2 + FACTS), "every input is measured once"
    for label in ("plain", "rerope"):
        assert numbers(tmp_path, label) == numbers(whole, label)


def test_more_facts_keep_the_earlier_ones(arguments: list[str], whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    assert main([*arguments, "--output", str(tmp_path), "--facts", str(FACTS + 2)]) == 0
    for before, after in zip(result_of(whole).results, result_of(tmp_path).results, strict=True):
        assert after.cases[:FACTS] == before.cases and len(after.facts) == FACTS + 2 and after.nlls == before.nlls
        assert after.found is not None and after.found.count == FACTS + 2


def test_parts_write_the_result_of_one_process(arguments: list[str], whole: Path, tmp_path: Path) -> None:
    """Two variants are too few for three parts, so they are also divided by length."""
    for part in ("3/3", "1/3", "2/3"):
        assert main([*arguments, "--output", str(tmp_path), "--part", part]) == 0
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    for label in ("plain", "rerope"):
        name = f"margin_{label}.json"
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_the_table_shows_margins_facts_and_perplexities(
    arguments: list[str], whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(whole)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for caption in ("Margin of hidden facts by length, nats", "Share of hidden facts found by length"):
        assert caption in shown
    entry = result_of(whole).results[0]
    assert f"{entry.margin:.1f}" in shown and f"{entry.perplexity:.2f}" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "64", "--scored", "65"], "--lengths 64: is shorter than the 65 scored"),
        (["--max-length", "600"], "--max-length 600: must be at least 700,"),
        (["--num-documents", "9"], "has text for only 3 documents of 701 tokens, not 9"),
        (["--max-length", "9999"], "has fewer than 10000 tokens"),
        (["--system-instruction", "Be brief."], "has no effect without --apply-chat-template"),
    ],
)
def test_mistakes(
    arguments: list[str], tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_length_that_is_too_short_for_a_fact_still_has_a_loss(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path), "--lengths", "128"]) == 2
    (entry,) = result_of(tmp_path).results
    assert len(entry.nlls) == 2 and not entry.cases and entry.margin is None and entry.found is None
    (missing,) = result_of(tmp_path).missing
    assert missing.at == "length 128" and missing.kind == "refused" and "even without filler" in missing.reason
    assert "plain: length 128: not supported" in capsys.readouterr().err


def test_perplexities_of_some_documents_are_not_shown() -> None:
    """Models would be compared by different documents. Facts are shown as far as they are measured."""
    entry = MarginEntry(length=64, documents=2, scored=10, nlls=[30.0])
    assert entry.nll is entry.perplexity is None
    assert entry.model_copy(update={"nlls": [30.0, 10.0]}).nll == 2.0
    cases = [CaseMargin(task="needle", number=n, tokens=9, depth=0.5, margin=n, found=n > 0) for n in (0, 1, 3)]
    entry = entry.model_copy(update={"cases": cases})
    assert entry.margins == [0.0, 1.0] and entry.margin == 0.5 and entry.found is not None and entry.found.correct == 1


def test_suites_know_the_task() -> None:
    options = {"lengths": ["1L", "2L"], "facts": 8, "apply_chat_template": True}
    given = option_arguments("margin", options, 512)
    assert given == ["--lengths", "512,1024", "--facts", "8", "--apply-chat-template"] and "margin" in measurements()
