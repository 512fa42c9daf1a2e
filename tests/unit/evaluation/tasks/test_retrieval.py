"""From options to result files with models that give chosen answers: scores, batches, interruptions, missing
cells."""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.commands.evaluate import subcommands
from megatron_coca.config import load_config
from megatron_coca.data import load_tokenizer
from megatron_coca.evaluation.options import SubjectOptions
from megatron_coca.evaluation.report.build import tables_of_results
from megatron_coca.evaluation.results import CheckpointRecord, EnvironmentRecord, EvaluationError, Store, read_costs
from megatron_coca.evaluation.subject import Evaluation, Header, Subject
from megatron_coca.evaluation.tasks.retrieval import measure as retrieval_tasks
from megatron_coca.model.generate import equal_length_batches

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 256}
CONFIG = load_config([], SHAPE | {"vocab_size": 512})
TOKENIZER = load_tokenizer("CharLevelTokenizer")

RETRIEVAL = ("passkey", "needle", "ruler")


class Speaker:
    """A model in name only: reads the prompt as text and spells the answer that `says` gives, byte by byte; then the
    end-of-document token. Notes the shapes of its prompts.
    """

    training = False

    def __init__(self, says: Callable[[str], str]) -> None:
        self.says, self.prompts, self.methods = says, list[tuple[int, ...]](), dict[str, Any]()

    def parameters(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1)])

    def new_cache(self, length: int | None = None, capacity: int | None = None) -> list[Iterator[int]]:
        return []

    def outgrown(self, cache: list[Iterator[int]], new: int) -> bool:
        return False

    def hidden_states(self, ids: Tensor, cache: list[Iterator[int]], last: int) -> Tensor:
        if not cache:
            self.prompts.append(tuple(ids.shape))
            answers = [TOKENIZER.encode(self.says(TOKENIZER.decode(row))) for row in ids.tolist()]
            cache += [iter([*answer, TOKENIZER.eod, *[ord("9")] * 99]) for answer in answers]
        return torch.tensor([[[next(answer)]] for answer in cache])

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0], 512).float()


def subject(says: Callable[[str], str] = lambda prompt: "") -> Subject:
    checkpoint = CheckpointRecord(path="run", identity="x", step=1, seq_length=256, pos_emb="coca")
    environment = EnvironmentRecord(dtype="float32", backend="sdpa", device="cpu", torch="2")
    header = Header("a model", checkpoint, {}, TOKENIZER.fingerprint, environment)
    return Subject(header, Speaker(says), CONFIG, TOKENIZER)  # type: ignore[arg-type]


def run(task: str, model: Subject, *options: object, path: Path | None = None, tokenizer: Any = TOKENIZER) -> Any:
    """Run a task on `model` in place of a checkpoint; returns the result."""
    parser = ArgumentParser()
    subcommands()[task].add_arguments(parser)
    args = parser.parse_args(["--checkpoint", "run", "--cases", "4", *map(str, options)])
    stores: list[Store[Any]] = []

    class OneSubject(Evaluation):
        def __init__(self, options: SubjectOptions, task: str, show: Any) -> None:
            self.opened: Any = SimpleNamespace(trained=CONFIG)
            self.options, self.tokenizer, self.status = options, tokenizer, 0

        def variants(self, kind: Any, **fields: Any) -> Iterator[tuple[Subject, Store[Any]]]:
            stores.append(Store(path, kind(**vars(model.header), **fields, results=[], missing=[])))
            yield model, stores[0]
            assert tables_of_results([stores[0].result]).startswith("a model: ")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval_tasks, "Evaluation", OneSubject)
        assert getattr(retrieval_tasks, task)(args, lambda result: None) == 0
    return stores[0].result


def measured(task: str, says: Callable[[str], str], *options: object, path: Path | None = None) -> Any:
    return run(task, subject(says), *options, path=path)


def after(prompt: str, *words: str) -> str:
    """The text after some words, up to the next full stop."""
    return " ".join(prompt.split(word, 1)[1].split(".", 1)[0].strip() for word in words)


def test_a_model_that_knows_is_always_right_and_one_that_guesses_never() -> None:
    right = measured("passkey", lambda prompt: f" {after(prompt, 'passkey is')}.", "--lengths", "400,900")
    assert [(cell.length, cell.accuracy, cell.correct) for cell in right.results] == [(400, 1.0, 4), (900, 1.0, 4)]
    wrong = measured("passkey", lambda prompt: " 1234567, 00000.", "--lengths", "400")
    assert [(cell.accuracy, cell.correct) for cell in wrong.results] == [(0.0, 0)]
    assert wrong.results[0].cases[0].answer == " 1234567, 00000."


@pytest.mark.parametrize("stub", [[], ["--answer-stub"]])
def test_the_needle_is_found(stub: list[str]) -> None:
    def says(prompt: str) -> str:
        city = prompt.split("What is the code of ")[1].split("?")[0]
        return after(prompt, f"The code of {city} is")

    result = measured("needle", says, "--lengths", "700,400", "--depths", "0,50,100", *stub)
    keys = [(length, depth) for length in (400, 700) for depth in (0, 50, 100)]
    assert [cell.key for cell in result.results] == keys and {cell.accuracy for cell in result.results} == {1.0}


def test_partial_answers_count_in_part() -> None:
    half = measured("ruler", lambda prompt: _codes(prompt)[0] + _codes(prompt)[1], "--lengths", "512")
    found = {cell.task: cell.accuracy for cell in half.results}
    assert found["multi_value"] == found["multi_query"] == 0.5
    assert [cell.correct for cell in half.results if cell.task == "multi_value"] == [0]


def _codes(prompt: str) -> list[str]:
    found = [part.split(".")[0] for part in prompt.split(" is ")[1:]]
    return [code for code in found if code.isdigit()] or ["", ""]


def test_an_answer_ends_with_its_document() -> None:
    """Behind the end-of-document token the speaker says 99999..."""
    result = measured("passkey", lambda prompt: "", "--lengths", "400")
    assert {case.answer for case in result.results[0].cases} == {""}


def test_batches_hold_prompts_of_one_length_and_no_more_tokens_than_asked() -> None:
    lengths = [30, 10, 30, 10, 30, 50]
    found = list(equal_length_batches(lengths, max_new_tokens=10, tokens_per_batch=80))
    assert found == [[1, 3], [0, 2], [4], [5]]
    assert list(equal_length_batches([100, 100], 10, 1)) == [[0], [1]], "one prompt at least"


def test_whole_batches_are_generated() -> None:
    model = subject()
    run("passkey", model, "--lengths", "400")
    shapes = model.model.prompts  # type: ignore[attr-defined]
    assert sum(rows for rows, _ in shapes) == 4 and len(shapes) == len({length for _, length in shapes})


def test_files_do_not_depend_on_the_order(tmp_path: Path) -> None:
    for name, lengths, depths, tasks in (
        ("one", "400,640,512", "0,100,30", "multi_key,multi_value"),
        ("two", "640,512,400", "30,0,100", "multi_value,multi_key"),
    ):
        for task, more in {"passkey": [], "needle": ["--depths", depths], "ruler": ["--tasks", tasks]}.items():
            (tmp_path / name).mkdir(exist_ok=True)
            measured(
                task, lambda prompt: prompt[-80:], "--lengths", lengths, *more, path=tmp_path / name / f"{task}.json"
            )
    for task in RETRIEVAL:
        one, two = ((tmp_path / name / f"{task}.json").read_bytes() for name in ("one", "two"))
        assert one == two and len(one) > 1000


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    path, whole = tmp_path / "passkey.json", tmp_path / "whole.json"
    calls: list[str] = []

    def says(prompt: str) -> str:
        calls.append(prompt)
        if len(prompt) > 600 and len(calls) == 5:
            raise KeyboardInterrupt
        return "12345"

    measured("passkey", lambda prompt: "12345", "--lengths", "400,700", path=whole)
    with pytest.raises(KeyboardInterrupt):
        measured("passkey", says, "--lengths", "400,700", path=path)
    assert len(calls) == 5, "four cases of the first length, one of the second"
    measured("passkey", says, "--lengths", "700,400", path=path)
    assert len(calls) > 5 and all(len(prompt) > 600 for prompt in calls[4:]), "finished cases are not asked again"
    assert path.read_bytes() == whole.read_bytes()
    costs = read_costs(path)
    assert costs is not None and [cost.at for cost in costs.costs] == ["length 400", "length 700"]
    with pytest.raises(EvaluationError, match=r"another measurement \(different protocol.seed"):
        measured("passkey", says, "--lengths", "400", "--seed", "1", path=path)
    seeded = whole.read_text().replace('"seed": null', '"seed": 1234')
    assert seeded != whole.read_text()
    path.write_text(seeded)
    measured("passkey", says, "--lengths", "400", path=path)
    assert json.loads(path.read_text())["results"] == json.loads(whole.read_text())["results"], "the same weights"


FAULTS = {
    "out of memory": (torch.OutOfMemoryError("no"), "lower --tokens-per-batch"),
    "refused": (ValueError("pos_emb: learned has 500 positions"), "learned has 500 positions"),
    "failed": (FloatingPointError("torch.float16 overflowed"), "overflowed"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_length_that_fails_is_noted_and_the_others_go_on(kind: str) -> None:
    error, reason = FAULTS[kind]

    def says(prompt: str) -> str:
        if 500 < len(prompt) < 600:
            raise error
        return ""

    result = measured("passkey", says, "--lengths", "400,600,800")
    assert [cell.length for cell in result.results] == [400, 800]
    (missing,) = result.missing
    assert (missing.at, missing.kind) == ("length 600", kind) and reason in missing.reason


def test_a_length_without_room_is_noted_and_other_errors_are_raised() -> None:
    result = measured("needle", lambda prompt: "", "--lengths", "50,400", "--depths", "50")
    assert [(missing.at, missing.kind) for missing in result.missing] == [("length 50", "refused")]
    assert [cell.key for cell in result.results] == [(400, 50)]

    def broken(prompt: str) -> str:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        measured("needle", broken, "--lengths", "400")


def test_prompts_need_a_tokenizer() -> None:
    with pytest.raises(EvaluationError, match="run: has no tokenizer, which this task needs"):
        run("ruler", subject(), tokenizer=None)


@pytest.mark.parametrize(
    ("task", "option", "value", "message"),
    [
        ("needle", "--depths", "0,101", "not a list of whole percentages"),
        ("ruler", "--tasks", "multi_key,other", "'other' is not one of multi_key"),
        ("passkey", "--lengths", "0", "at least 1"),
    ],
)
def test_options_that_mean_nothing(
    task: str, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(task, subject(), option, value)
    assert message in capsys.readouterr().err


def test_ids_that_the_tokenizer_does_not_have_are_not_generated() -> None:
    """A vocabulary is often declared larger than the tokenizer's; its last rows are never trained."""
    model = subject(lambda prompt: "5")
    model.model.logits = lambda hidden: torch.arange(600.0).expand(len(hidden), 600)  # type: ignore[method-assign]
    wide = Subject(model.header, model.model, load_config([], SHAPE | {"vocab_size": 600}), TOKENIZER)
    result = run("passkey", wide, "--lengths", "400", "--max-new-tokens", "3")
    assert len(result.results) == 1, "every id could be decoded"
