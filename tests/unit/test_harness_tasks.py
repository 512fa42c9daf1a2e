"""The tasks that come with the project, and their files."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import load_checkpoint
from megatron_coca.evaluation.harness.loading import Selection, load_tasks
from megatron_coca.evaluation.harness.task_data import LAYOUTS, load, read_documents
from megatron_coca.evaluation.results import EvaluationError
from tests.parity.exported import NEOX, random_checkpoint
from tests.unit.harness_cases import ROWS, adapter, write_documents, write_rows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("neox") / "run", **NEOX)


PROMPTS = {
    "ax_b": ("Text: a b\nStatement: c\nDoes the statement follow from the text, yes or no?\nAnswer:", [" yes", " no"]),
    "afqmc": ("问题一：甲\n问题二：乙\n两个问题问的是同一件事吗？\n回答：", ["不是", "是"]),
    "csl": ("论文摘要：甲乙丙\n关键词：甲、乙\n这些关键词都属于这篇论文吗？\n回答：", ["不是", "是"]),
    "chid": ("他", ["一心一意了", "三心二意了"]),
    "c3": ("男：你好\n女：好\n问题：谁？\n回答：", ["男", "女"]),
    "ocnli": ("已知：甲乙\n判断：丙\n根据已知内容，这个判断正确吗？\n回答：", ["正确", "不确定", "错误"]),
}


def test_every_task_of_the_project_is_tried() -> None:
    assert ROWS.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("task", ROWS)
def test_the_tasks_of_the_project(task: str, checkpoint: Path, tmp_path: Path) -> None:
    (loaded,) = load_tasks(Selection((task,), data=write_rows(tmp_path, task, ROWS[task]), num_fewshot=1))
    found = loaded.run(adapter(load_checkpoint(checkpoint), max_length=400))
    samples = found["samples"][task]
    assert len(samples) == len([row for row in ROWS[task] if row.get("label") != "-"])
    assert 0 <= found["results"][task]["acc,none"] <= 1 and found["n-shot"][task] == 1
    if task in PROMPTS:
        context, choices = PROMPTS[task]
        prompts = [argument[0] for argument in samples[0]["arguments"]]
        assert all(prompt.endswith(context) and prompt != context for prompt in prompts), "an example stands before it"
        assert [argument[1] for argument in samples[0]["arguments"]] == choices


PAIR = {"sentence1": "a", "sentence2": "b", "label": "0"}
IDIOM = {"content": "他#idiom#了", "candidates": ["一", "三"], "answer": 0}
READING = {"context": "a", "question": "b", "choice": ["c", "d"], "answer": "c"}
BROKEN: dict[str, tuple[str, Any, str]] = {
    "no field": ("afqmc", {"sentence1": "a", "label": "0"}, "line 1: has no sentence2; a line of afqmc has"),
    "label": ("afqmc", PAIR | {"label": "2"}, 'line 1: label is "2", not one of 0, 1'),
    "no label": ("afqmc", PAIR | {"label": None}, "label is null, not one of 0, 1"),
    "marked label": ("ocnli", PAIR, 'label is "0", not one of entailment, neutral, contradiction, -'),
    "null": ("afqmc", PAIR | {"sentence2": None}, "line 1: sentence2 is null, not a non-empty string"),
    "empty text": ("afqmc", PAIR | {"sentence1": " "}, 'sentence1 is " ", not a non-empty string'),
    "no blank": ("chid", IDIOM | {"content": "他了"}, "content is .*, not a string with #idiom# once"),
    "past the candidates": ("chid", IDIOM | {"answer": 2}, "line 1: answer is 2, and candidates has 0 to 1"),
    "before them": ("chid", IDIOM | {"answer": -1}, "line 1: answer is -1, and candidates has 0 to 1"),
    "no index": ("chid", IDIOM | {"answer": True}, "answer is true, not an index"),
    "one text of candidates": (
        "chid",
        IDIOM | {"candidates": "一三"},
        "candidates is .*, not a list of non-empty strings",
    ),
    "one text of keywords": ("csl", {"abst": "a", "keyword": "b", "label": "0"}, "keyword is .*, not a list"),
    "empty choice": ("c3", READING | {"choice": ["c", ""]}, r'choice is \["c", ""\], not a list of non-empty strings'),
    "no such choice": ("c3", READING | {"answer": "e"}, "line 1: answer is 'e', which is not in choice"),
    "no object": ("afqmc", [1], "line 1: is not a JSON object"),
    "only left out": ("ocnli", PAIR | {"label": "-"}, "has no document with a label"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_lines_that_are_refused(name: str, tmp_path: Path) -> None:
    task, row, message = BROKEN[name]
    path = write_documents(tmp_path / f"{task}.jsonl", [row])
    with pytest.raises(EvaluationError, match=f"{task}.jsonl.*{message}"):
        read_documents(task, path)


@pytest.mark.parametrize(("text", "message"), [("\n{", "line 2: is not JSON"), ("", "has no document with a label")])
def test_files_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "afqmc.jsonl").write_text(text)
    (found,) = load_tasks(Selection(("afqmc",), data=tmp_path))
    assert found.fault is not None and message in found.fault


def test_without_documents() -> None:
    (found,) = load_tasks(Selection(("afqmc",)))
    assert "put them into afqmc.jsonl and name the folder with --task-data" in str(found.fault)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_separators_of_unicode_end_no_line(end: str, tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\x0cb"]
    lines = [json.dumps(PAIR | {"sentence1": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "afqmc.jsonl").write_bytes("\ufeff".encode() + end.join(lines).encode())
    assert [row["sentence1"] for row in read_documents("afqmc", tmp_path / "afqmc.jsonl")] == texts


def test_other_fields_are_ignored(tmp_path: Path) -> None:
    """Whatever their types, which a table of documents could not mix."""
    others: list[Any] = [1, "one", ["one"], {"one": 1}, None]
    write_documents(tmp_path / "afqmc.jsonl", [PAIR | {"id": other} for other in others])
    found = load("afqmc", str(tmp_path))["evaluated"]
    assert len(found) == 5 and set(found.column_names) == {"sentence1", "sentence2", "gold"}
