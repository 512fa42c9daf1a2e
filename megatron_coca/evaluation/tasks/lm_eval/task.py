"""`megatron-coca evaluate lm-eval`: options and result files."""

from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import JsonValue

from megatron_coca.evaluation.chat_settings import ChatRecord
from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.numbers import Reading
from megatron_coca.evaluation.options import (
    DynamicLength,
    add_batch_option,
    add_chat_options,
    add_dynamic_length_option,
    add_subject_options,
    positive_int,
    task_names,
    token_count,
    whole_number,
)
from megatron_coca.evaluation.results import Record, Result
from megatron_coca.evaluation.tasks.lm_eval.scores import TaskScores
from megatron_coca.support.arguments import json_object, local_path

TruncatedPart = Literal["beginning", "middle"]
TRUNCATED_PARTS: tuple[TruncatedPart, ...] = get_args(TruncatedPart)
"""The choices for the part that a prompt loses if it exceeds the limit."""


class HarnessProtocol(Record):
    text: str
    lm_eval: str  # version of the harness
    max_length: int | None  # None: no limit
    num_fewshot: int | None  # None: each task's own number
    limit: int | None
    seed: int
    tokens_per_batch: int
    dynamic_length: DynamicLength = "total"
    start: int | None = None  # token id put before every text
    rolling_window: int | None = None  # tokens of a window of rolling log-likelihoods; None: max_length
    adds: bool = False  # whether every text gets the start and end tokens that the model's own library adds
    closes: int | None = None  # the token added after every text, if the tokenizer's settings ask for one
    names_tokens: bool = False  # whether names of special tokens in prompts are encoded as these tokens
    prefix: int | None = None  # token before a text without context; None: start, or the end-of-document token
    ends: list[int] = []  # tokens that end an answer; empty if only the end-of-document token does
    chat: ChatRecord | None = None  # None: prompts are plain text
    plain_tasks: list[str] = []  # tasks whose prompts are plain text, although other prompts are chats
    truncate: TruncatedPart = "beginning"  # the part that prompts longer than max_length lose
    metadata: dict[str, JsonValue] = {}  # values passed to the code of the tasks
    local_data: bool = False  # whether data sets come from the folder of --datasets


class HarnessResult(Result):
    task: Literal["lm-eval"] = "lm-eval"
    protocol: HarnessProtocol
    results: list[TaskScores]


def add_lm_eval_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add = parser.add_argument
    add("--tasks", required=True, type=task_names, metavar="NAME,NAME,...", help="lm-eval tasks, groups or tags")
    add(
        "--include-path",
        nargs="+",
        type=local_path,
        default=[],
        metavar="DIR",
        help="folders with additional task files (*.yaml)",
    )
    shots = "number of few-shot examples before each document; default: the task's own number"
    add("--num-fewshot", type=whole_number, metavar="N", help=shots)
    add("--limit", type=positive_int, metavar="N", help="only the first N documents of each task")
    metadata = 'values for the code of the tasks, as in lm_eval, such as {"max_seq_lengths": [4096, 8192]}'
    add("--metadata", type=json_object, default={}, metavar="JSON", help=metadata)
    folder = "folder with the data sets, as tools/fetch_benchmarks.py writes it; default: the Hugging Face hub"
    add("--datasets", type=local_path, metavar="DIR", help=folder)
    longest = (
        "maximum tokens of an input; longer prompts are truncated; default: no limit, but rolling windows have the "
        "training length"
    )
    add("--max-length", type=token_count, metavar="N", help=longest)
    sides = "which part of a prompt is cut off: its beginning, as in lm_eval, or its middle, as in LongBench"
    add("--truncate", choices=TRUNCATED_PARTS, default=TRUNCATED_PARTS[0], help=f"{sides}; default: %(default)s")
    start = "put this token before every text; '' for none; default: the tokens that the model's own"
    start += " library adds; for a checkpoint trained here, none"
    add("--start-token", metavar="TOKEN", help=start)
    add_chat_options(parser, examples=True)
    plain = "with --apply-chat-template: tasks or groups with prompts that stay plain text"
    add("--plain-tasks", type=task_names, default=(), metavar="NAME,NAME,...", help=plain)
    logged = "write every sample with its prompts and answers to RESULT.samples/TASK.jsonl, in the harness's format"
    add("--log-samples", "--log_samples", action="store_true", help=logged)
    add_batch_option(parser, 16384)
    add_dynamic_length_option(parser)
    add("--seed", type=whole_number, default=1234, metavar="N", help="seed for choosing few-shot examples")


def readings(entry: TaskScores) -> Iterator[Reading]:
    """Yield the scores of a task: first by length, then of all samples. Names of metrics come from the harness."""
    for part in entry.by_length:
        whole = part.length.isdecimal()
        name = f"{entry.task} score" if whole else f"{entry.task} score, {part.length}"
        yield Reading(name, int(part.length) if whole else None, part.value)
    for score in entry.scores:
        if score.value is not None:
            name = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
            yield Reading(f"{entry.task} {name}", None, score.value)


LM_EVAL = Task(
    "lm-eval",
    "tasks of lm-evaluation-harness",
    add_lm_eval_options,
    "--checkpoint runs/350M_roformer_coca --tasks piqa,lambada_openai --output results",
    "lm_eval.measure.run",
    HarnessResult,
    readings=readings,
    comparable={
        "version of lm-eval": "protocol.lm_eval",
        "examples": "protocol.num_fewshot",
        "limit": "protocol.limit",
        "seed": "protocol.seed",
        "longest context": "protocol.max_length",
        "rolling window": "protocol.rolling_window",
        "chat": "protocol.chat",
        "plain tasks": "protocol.plain_tasks",
        "truncated part": "protocol.truncate",
        "metadata": "protocol.metadata",
        "dynamic length": "protocol.dynamic_length",
        "protocol": "protocol.text",
    },
    divided_by="tasks",
    sections=(
        TaskSection(
            "benchmarks",
            "Long-context benchmarks",
            "lm_eval.benchmarks_section.benchmark_blocks",
            place=90,
            sentence=50,
        ),
        TaskSection(
            "short",
            "Tasks of lm-evaluation-harness",
            "lm_eval.benchmarks_section.other_blocks",
            place=100,
            sentence=80,
        ),
    ),
    place=70,
)
