"""Our adapter against the harness's own HFLM on the exported model, and the tasks that come with the project."""

import json
import random
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from megatron_coca.checkpoints import Loaded, load_checkpoint
from megatron_coca.checkpoints.export import export
from megatron_coca.data import load_saved_tokenizer
from megatron_coca.evaluation.harness.adapter import HarnessModel
from megatron_coca.evaluation.harness.command import LM_EVAL
from megatron_coca.evaluation.harness.records import HarnessResult
from megatron_coca.evaluation.harness.suite import Selection, load_suites
from megatron_coca.evaluation.harness.task_data import LAYOUTS
from megatron_coca.evaluation.results import EvaluationError
from tests.parity.exported import LLAMA, NEOX, TRAINED, random_checkpoint

LENGTH = 48
"""Tokens read at most: beyond the training length, and less than some documents have."""

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
metadata: {version: 2.5}
"""
UNTIL = """
task: local_until
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: answer
generation_kwargs: {until: STOPS, max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
WORDS = [
    "the",
    "sea",
    "was",
    "calm",
    "and",
    "a",
    "small",
    "boat",
    "lay",
    "near",
    "its",
    "shore",
    "until",
    "morning",
    "came",
    "over",
    "hills",
]


def documents() -> list[dict[str, Any]]:
    draw = random.Random(3)
    some = lambda least, most: " ".join(draw.choices(WORDS, k=draw.randint(least, most)))  # noqa: E731
    return [
        {
            "question": some(1, 14),
            "choices": [some(1, 1), some(1, 3), "x"],
            "gold": draw.randrange(3),
            "answer": some(1, 1),
            "text": some(1, 40),
        }
        for _ in range(9)
    ]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files on one file of documents."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents()))
    stops = json.dumps([chr(code) for code in range(ord("a"), ord("h"))] + ["\n"])
    for name, text in {"choice": CHOICE, "until": UNTIL, "rolling": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)).replace("STOPS", stops))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("neox") / "run", **NEOX)


def adapter(loaded: Loaded, tokens_per_batch: int = 400, max_length: int = LENGTH) -> HarnessModel:
    assert loaded.tokenizer_folder is not None and loaded.config.model.vocab_size is not None
    tokenizer = load_saved_tokenizer(loaded.tokenizer_folder)
    return HarnessModel(loaded.model, tokenizer, max_length, tokens_per_batch, loaded.config.model.vocab_size)


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
    (suite,) = load_suites(Selection((name,), (tasks,), num_fewshot=shots))
    expected, found = suite.run(theirs), suite.run(adapter(load_checkpoint(run)))
    for one, other in zip(expected["samples"][name], found["samples"][name], strict=True):
        assert one["prompt_hash"] == other["prompt_hash"]
        assert flat(other["resps"]) == pytest.approx(flat(one["resps"]), abs=1e-4)
    metrics = {key: value for key, value in expected["results"][name].items() if isinstance(value, float)}
    assert metrics and {key: found["results"][name][key] for key in metrics} == pytest.approx(metrics, rel=1e-4)
    if name == "local_until":
        lengths = {len(flat(sample["resps"])[0]) for sample in found["samples"][name]}
        assert min(lengths) < 12 and max(lengths) > 0, "some are stopped, and something is written"


METHODS: dict[str, dict[str, Any]] = {
    "coca, dynamic": {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "rerope": {"relative_positions": {"type": "rerope", "window": 8}},
    "xpos": {"pos_emb": "xpos"},
    "alibi": {"pos_emb": "alibi"},
    "streaming": {"relative_positions": {"type": "streaming", "window": 8}},
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    },
}


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("task", i, 1))  # type: ignore[arg-type]
        for i, each in enumerate(arguments)
    ]


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


@pytest.mark.parametrize(
    ("settings", "length", "message"),
    [
        ({"do_sample": True}, 48, "task task: generation_kwargs ask for do_sample, and only greedy"),
        ({"temperature": 0.7}, 48, "only greedy"),
        ({"num_beams": 4}, 48, "ask for num_beams"),
        ({"max_new_tokens": 48}, 48, "48 new tokens leave no room for a prompt in 48; raise --max-length"),
    ],
)
def test_generation_that_is_not_done(settings: dict[str, Any], length: int, message: str, checkpoint: Path) -> None:
    with pytest.raises(EvaluationError, match=message):
        adapter(load_checkpoint(checkpoint), max_length=length).generate_until(
            requests("generate_until", [("a", settings)])
        )


def test_a_continuation_longer_than_the_model_reads(checkpoint: Path) -> None:
    with pytest.raises(EvaluationError, match="has 49 tokens of its own, and 1 to 48 can be scored"):
        adapter(load_checkpoint(checkpoint)).loglikelihood(requests("loglikelihood", [("a", "b" * 49)]))


PAIRS = [
    {"sentence1": "甲乙", "sentence2": "丙", "label": label} for label in ("entailment", "neutral", "contradiction")
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "ax_b": [{"sentence1": "a b", "sentence2": "c", "label": label} for label in ("entailment", "not_entailment")] * 2,
    "ax_g": [{"premise": "a b", "hypothesis": "c", "label": label} for label in ("entailment", "not_entailment")] * 2,
    "ocnli": [*PAIRS, {"sentence1": "甲", "sentence2": "乙", "label": "-"}],
    "cmnli": PAIRS,
    "afqmc": [{"sentence1": "甲", "sentence2": "乙", "label": label} for label in ("0", "1", 1)],
    "csl": [{"abst": "甲乙丙", "keyword": ["甲", "乙"], "label": label} for label in ("0", "1", "0")],
    "eprstmt": [
        {"id": i, "sentence": "很好", "label": label} for i, label in enumerate(("Positive", "Negative", "Positive"))
    ],
    "chid": [{"content": "他#idiom#了", "candidates": ["一心一意", "三心二意"], "answer": i} for i in (0, 1, 0)],
    "c3": [
        {"context": ["男：你好", "女：好"], "question": "谁？", "choice": ["男", "女"], "answer": "女"},
        {"context": "一段话", "question": "什么？", "choice": ["甲", "乙", "丙"], "answer": "丙"},
        {"context": "一段话", "question": "何时？", "choice": ["早", "晚"], "answer": "早"},
    ],
}
PROMPTS = {
    "ax_b": ("Text: a b\nStatement: c\nDoes the statement follow from the text, yes or no?\nAnswer:", [" yes", " no"]),
    "afqmc": ("问题一：甲\n问题二：乙\n两个问题问的是同一件事吗？\n回答：", ["不是", "是"]),
    "csl": ("论文摘要：甲乙丙\n关键词：甲、乙\n这些关键词都属于这篇论文吗？\n回答：", ["不是", "是"]),
    "chid": ("他", ["一心一意了", "三心二意了"]),
    "c3": ("男：你好\n女：好\n问题：谁？\n回答：", ["男", "女"]),
    "ocnli": ("已知：甲乙\n判断：丙\n根据已知内容，这个判断正确吗？\n回答：", ["正确", "不确定", "错误"]),
}


def write_rows(folder: Path, task: str, rows: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return folder


def test_every_task_of_the_project_is_tried() -> None:
    assert ROWS.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("task", ROWS)
def test_the_tasks_of_the_project(task: str, checkpoint: Path, tmp_path: Path) -> None:
    (suite,) = load_suites(Selection((task,), data=write_rows(tmp_path, task, ROWS[task]), num_fewshot=1))
    found = suite.run(adapter(load_checkpoint(checkpoint), max_length=400))
    samples = found["samples"][task]
    assert len(samples) == len([row for row in ROWS[task] if row.get("label") != "-"])
    assert 0 <= found["results"][task]["acc,none"] <= 1 and found["n-shot"][task] == 1
    if task in PROMPTS:
        context, choices = PROMPTS[task]
        prompts = [argument[0] for argument in samples[0]["arguments"]]
        assert all(prompt.endswith(context) and prompt != context for prompt in prompts), "an example stands before it"
        assert [argument[1] for argument in samples[0]["arguments"]] == choices


BROKEN: dict[str, tuple[str, str]] = {
    "no field": ('{"sentence1": "a", "label": "0"}', "afqmc.jsonl, line 1: has no sentence2; a line of afqmc has"),
    "label": ('{"sentence1": "a", "sentence2": "b", "label": "2"}', "line 1: is not a line of afqmc"),
    "not JSON": ("\n{", "line 2: is not JSON"),
    "empty": ("", "has no document with a label"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_documents_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    text, message = BROKEN[name]
    (tmp_path / "afqmc.jsonl").write_text(text)
    with pytest.raises(EvaluationError, match=message):
        load_suites(Selection(("afqmc",), data=tmp_path))
    with pytest.raises(EvaluationError, match=r"put them into afqmc.jsonl and name the folder with --task-data"):
        load_suites(Selection(("afqmc",)))


def command(checkpoint: Path, tasks: Path, names: str, *more: object) -> int:
    fixed = ["--checkpoint", checkpoint, "--include-path", tasks, "--tasks", names, "--device", "cpu"]
    parser = ArgumentParser()
    LM_EVAL.add_arguments(parser)
    return LM_EVAL.run(parser.parse_args([str(each) for each in [*fixed, *more]]))


def test_the_command(checkpoint: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two variants; the order of tasks changes nothing; what is there is not measured again; a failed task is told."""
    (tasks / "both.yaml").write_text(
        "group: both\ntask: [local_choice, local_rolling]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    variants = ["--variant", "plain", "--variant", "dynamic", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"]
    options = [*variants, "--max-length", LENGTH, "--limit", 5]
    assert command(checkpoint, tasks, "local_choice,local_rolling", *options, "--output", tmp_path / "a") == 0
    assert "local_choice" in capsys.readouterr().out
    assert command(checkpoint, tasks, "local_rolling", *options, "--output", tmp_path / "b") == 0
    assert command(checkpoint, tasks, "local_choice", *options, "--output", tmp_path / "b") == 0
    for name in ("lm-eval_plain.json", "lm-eval_dynamic.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    result = HarnessResult.model_validate_json((tmp_path / "a" / "lm-eval_plain.json").read_bytes())
    assert [each.task for each in result.results] == ["local_choice", "local_rolling"]
    assert result.results[0].version == "2.5" and result.results[0].samples == 5
    assert {score.metric for score in result.results[0].scores} == {"acc", "acc_norm", "acc_bytes"}
    assert str(tasks) not in (tmp_path / "a" / "lm-eval_plain.json").read_text()
    assert command(checkpoint, tasks, "both", "--limit", 5, "--output", tmp_path / "c.json") == 0
    group = HarnessResult.model_validate_json((tmp_path / "c.json").read_bytes()).results[0]
    assert (group.task, group.samples, group.config_sha256) == ("both", 10, None)
    assert command(checkpoint, tasks, "local_until", "--max-length", 12) == 2
    assert "12 new tokens leave no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(
            "local_choise", "--tasks local_choise: no such task.*near it are local_choice", marks=pytest.mark.slow
        ),
        ("afqmc", "with --task-data"),
    ],
)
def test_the_command_refuses(names: str, message: str, checkpoint: Path, tasks: Path) -> None:
    with pytest.raises(EvaluationError, match=message):
        command(checkpoint, tasks, names)


def test_without_the_harness(checkpoint: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("megatron_coca.evaluation.harness.command.version", absent)
    with pytest.raises(EvaluationError, match="pip install 'lm-eval==0.4.13'"):
        command(checkpoint, tasks, "local_choice")


def test_the_training_length_is_read_by_default(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    assert command(checkpoint, tasks, "local_rolling", "--limit", 2, "--output", tmp_path / "a.json") == 0
    result = HarnessResult.model_validate_json((tmp_path / "a.json").read_bytes())
    assert result.protocol.max_length == TRAINED
