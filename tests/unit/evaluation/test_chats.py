"""Passkeys, needles and RULER-style tasks as chats: prompts, where an answer begins and ends, their record."""

import datetime
import json
import re
from argparse import ArgumentParser, Namespace
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_coca.commands.evaluate import subcommands
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.evaluation.chats import chat_record
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.retrieval import cases as tasks
from megatron_coca.evaluation.tasks.retrieval.prompts import FILLER_HAYSTACK, PromptForm
from megatron_coca.text_generation import load_generator
from tests.unit.data.tokenizers.test_chat import checkpoint, folder, ours

__all__ = ["checkpoint", "folder", "ours"]

KINDS = {
    "passkey": tasks.passkey,
    "needle": lambda stub: tasks.needle(40, FILLER_HAYSTACK, stub),
    "ruler": lambda stub: tasks.ruler("multi_query", FILLER_HAYSTACK, stub),
}


@pytest.mark.parametrize("stub", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_those_of_transformers(name: str, stub: bool, folder: Path, ours: Tokenizer) -> None:
    """With the beginning of the answer behind them, and the places of their facts."""
    form = PromptForm(ours, chat=ours.chat, system="Be brief.")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for case in KINDS[name](stub).make_cases(form, 1200, 2, 0):
        whole = ours.spell(case.prompt)
        message, _, answer = whole.partition("<|im_start|>user\n")[2].partition("<|im_end|>\n<|im_start|>assistant\n")
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": message}]
        expected: Any = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert case.prompt[: len(expected)].tolist() == expected and len(case.prompt) <= 1200
        assert answer == (whole.rpartition("\n")[2] if stub else "") and bool(answer) == stub
        for fact, found in zip(case.facts, case.expected, strict=False):
            assert len(case.facts) > 1 or found in ours.decode(case.prompt[-fact.distance :])
            assert ours.decode(case.prompt[-fact.distance :]).lstrip()[:4].strip(" .") in whole


def test_a_start_token_counts_and_changes_no_distance(ours: Tokenizer) -> None:
    bos = ours.token("<s>")
    (begun,) = tasks.passkey().make_cases(PromptForm(ours, bos), 1200, 1, 0)
    (plain,) = tasks.passkey().make_cases(ours, 1199, 1, 0)
    assert begun.prompt[0] == bos and len(begun.prompt) <= 1200 and bos not in begun.prompt[1:]
    assert ours.decode(begun.prompt[-begun.facts[0].distance :]).lstrip()[:5] == begun.expected[0]
    assert bos not in plain.prompt


def test_the_date_of_a_template_is_part_of_the_record(ours: Tokenizer) -> None:
    """Its prompts are others tomorrow."""
    options = Namespace(apply_chat_template=True, system_instruction=None, chat_template_kwargs=None)
    assert ours.chat is not None
    before = chat_record(options, ours)
    dated = copy(ours)
    dated.chat = ChatTemplate("{{ strftime_now('%d %b %Y') }}" + ours.chat.source, ours.chat.symbols)
    record = chat_record(options, dated)
    assert before is not None and before.date is None
    assert record is not None and record.date == datetime.date.today().isoformat()


def test_symbols_that_a_template_prints_are_part_of_the_record(ours: Tokenizer) -> None:
    """The symbols that it names, but no others: their names in the tokenizer's files may change without effect."""
    options = Namespace(apply_chat_template=True, system_instruction=None, chat_template_kwargs=None)
    assert ours.chat is not None
    records = []
    for symbols in ({"bos_token": "<s>"}, {"bos_token": "<|im_start|>"}, {"bos_token": "<s>", "unk_token": "a"}):
        begun = copy(ours)
        begun.chat = ChatTemplate("{{ bos_token }}" + ours.chat.source, symbols)
        records.append(chat_record(options, begun))
    assert records[0] == records[2] != records[1]


def test_a_template_that_changes_messages_is_an_error(ours: Tokenizer) -> None:
    form = PromptForm(ours, chat=ChatTemplate("{{ messages[0].content | upper }}", {}))
    with pytest.raises(EvaluationError, match="changes the text of a message"):
        tasks.passkey().make_cases(form, 800, 1, 0)


def run(checkpoint: Path, output: Path, *options: str) -> int:
    parser = ArgumentParser()
    subcommands()["passkey"].add_arguments(parser)
    fixed = ["--checkpoint", str(checkpoint), "--lengths", "700", "--cases", "2", "--device", "cpu"]
    fixed += ["--max-new-tokens", "12"]
    return subcommands()["passkey"].run(parser.parse_args([*fixed, "--output", str(output), *options]))


def test_the_command_answers_as_generation_does(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option and its message are part of the identity; without it nothing is recorded."""
    output = tmp_path / "chat.json"
    assert run(checkpoint, output, "--apply_chat_template", "--system-instruction", "S") == 0
    content = json.loads(output.read_text())
    assert content["protocol"]["chat"]["system"] == "S" and "prompts are chats" in capsys.readouterr().out
    generator = load_generator(checkpoint)
    form = PromptForm(generator.tokenizer, chat=generator.tokenizer.chat, system="S")
    for case, record in zip(tasks.passkey().make_cases(form, 700, 2, 0), content["results"][0]["cases"], strict=True):
        message = generator.tokenizer.decode(case.prompt).removeprefix("system:S.user:").removesuffix(".assistant:")
        (row,) = generator.answer([[{"role": "system", "content": "S"}, {"role": "user", "content": message}]], 12)
        assert record["answer"] == row.text and record["tokens"] == len(case.prompt)
    with pytest.raises(EvaluationError, match=r"contains another measurement \(different protocol.chat"):
        run(checkpoint, output)
    plain = tmp_path / "plain.json"
    assert run(checkpoint, plain) == 0
    protocol = json.loads(plain.read_text())["protocol"]
    assert (protocol["chat"], protocol["start"], protocol["ends"]) == (None, None, [])


def test_variables_of_the_template_are_part_of_the_record(ours: Tokenizer) -> None:
    """They change the prompts, and a name that the template does not read is an error."""
    options = Namespace(apply_chat_template=True, system_instruction=None, chat_template_kwargs={"brief": True})
    thinking = copy(ours)
    assert ours.chat is not None
    thinking.chat = ChatTemplate(ours.chat.source + "{% if brief %}!{% endif %}", ours.chat.symbols)
    record = chat_record(options, thinking)
    assert record is not None and record.variables == {"brief": True} and 'with {"brief": true}' in str(record)
    assert thinking.chat.render([{"role": "user", "content": "a"}]).endswith("!")
    with pytest.raises(DataError, match="does not read 'brief'"):
        chat_record(options, copy(ours))
    options.apply_chat_template = False
    with pytest.raises(EvaluationError, match="--chat-template-kwargs: .* without --apply-chat-template"):
        chat_record(options, thinking)


def test_answers_that_had_not_ended_are_counted(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that ends with the last possible token has ended."""
    generator = load_generator(checkpoint)
    results = {}
    for new_tokens in (1, 12):
        output = tmp_path / f"{new_tokens}.json"
        assert run(checkpoint, output, "--apply-chat-template", "--max-new-tokens", str(new_tokens)) == 0
        (results[new_tokens],) = json.loads(output.read_text())["results"]
        form = PromptForm(generator.tokenizer, chat=generator.tokenizer.chat)
        for case, record in zip(tasks.passkey().make_cases(form, 700, 2, 0), results[new_tokens]["cases"], strict=True):
            message = generator.tokenizer.decode(case.prompt).removeprefix("user:").removesuffix(".assistant:")
            (row,) = generator.answer([[{"role": "user", "content": message}]], new_tokens)
            assert record["unfinished"] == (row.finish == "length")
        assert results[new_tokens]["unfinished"] == sum(each["unfinished"] for each in results[new_tokens]["cases"])
    assert results[1]["unfinished"] == 2
    assert re.search("2 of 2 answers .* after 1 tokens; raise --max-new-tokens", caplog.text)


def test_options_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="--system-instruction: .* without --apply-chat-template"):
        run(checkpoint, tmp_path / "a.json", "--system-instruction", "S")
    with pytest.raises(EvaluationError, match="--start-token: .*remove the option"):
        run(checkpoint, tmp_path / "a.json", "--apply-chat-template", "--start-token", "a")
