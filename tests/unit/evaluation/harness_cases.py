"""Small tasks of the harness, their documents, and the command on them."""

import json
import random
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from megatron_coca.checkpoints import LoadedModel
from megatron_coca.commands.evaluate import subcommands
from megatron_coca.data import load_saved_tokenizer
from megatron_coca.evaluation.tasks.lm_eval.model import HarnessModel
from megatron_coca.evaluation.tasks.lm_eval.prompts import InputLimits, PromptEncoding
from megatron_coca.evaluation.tasks.lm_eval.task import HarnessResult

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


def write_documents(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_tasks(folder: Path) -> Path:
    """Task files in `folder`, on one file of documents."""
    data = write_documents(folder / "documents.jsonl", documents())
    stops = json.dumps([chr(code) for code in range(ord("a"), ord("h"))] + ["\n"])
    for name, text in {"choice": CHOICE, "until": UNTIL, "rolling": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)).replace("STOPS", stops))
    return folder


def adapter(
    loaded: LoadedModel, tokens_per_batch: int = 400, max_length: int = LENGTH, start: int | None = None
) -> HarnessModel:
    assert loaded.tokenizer_folder is not None and loaded.config.model.vocab_size is not None
    encoding = PromptEncoding(load_saved_tokenizer(loaded.tokenizer_folder), start)
    limits, rows = InputLimits(max_length, max_length), loaded.config.model.vocab_size
    return HarnessModel(loaded.model, encoding, limits, tokens_per_batch, rows)


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("task", i, 1))
        for i, each in enumerate(arguments)
    ]


def command(checkpoint: Path, tasks: Path, names: str, *more: object) -> int:
    fixed = ["--checkpoint", checkpoint, "--include-path", tasks, "--tasks", names, "--device", "cpu"]
    parser = ArgumentParser()
    subcommands()["lm-eval"].add_arguments(parser)
    return subcommands()["lm-eval"].run(parser.parse_args([str(each) for each in [*fixed, *more]]))


def read(path: Path) -> HarnessResult:
    return HarnessResult.model_validate_json(path.read_bytes())
