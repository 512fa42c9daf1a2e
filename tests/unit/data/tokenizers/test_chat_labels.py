"""Which tokens of a chat count in the loss, with templates that change answers, and how `inspect chat` shows them."""

import json
import sys
from pathlib import Path

import pytest

from megatron_coca.commands import inspect, prepare
from megatron_coca.data import DataError
from megatron_coca.data.tokenizers.chat import ChatTemplate
from tests.unit.data.tokenizers.test_chat import CHAT, CHATML, MARKED, SYMBOLS, folder

__all__ = ["folder"]

FORGETS_THOUGHTS = """\
{% for message in messages %}<{{ message.role }}>\
{% if message.role == 'assistant' and loop.last %}[{{ message.thinking }}]{% endif %}{{ message.content }}</>\
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""As Qwen 3 and gpt-oss: only the last answer has its thought."""
OPENS_A_THOUGHT = """\
{% for message in messages %}<{{ message.role }}>{{ message.content.split('</think>')[-1] }}</>\
{% endfor %}{% if add_generation_prompt %}<assistant><think>
{% endif %}"""
"""As DeepSeek R1: the prompt begins a thought, and rendered answers have none."""


def test_the_last_answer_of_a_template_that_drops_earlier_thoughts() -> None:
    template = ChatTemplate(FORGETS_THOUGHTS, {})
    chat = [{**message, "thinking": "T"} if message["role"] == "assistant" else message for message in CHAT]
    text, ((first, last),) = template.answers(chat, last=True)
    assert text[first:last] == "[T]Still.</>" and text.count("[T]") == 1
    with pytest.raises(DataError, match="if further messages follow.*keeps every turn"):
        template.answers(chat)
    with pytest.raises(DataError, match="if further messages follow"):
        template.answers(chat[:-1], last=True)  # a further message follows the last answer


@pytest.mark.parametrize("content", ["Still.", "<think>a</think><b>", "<thin", ""])
def test_answers_after_a_prompt_that_opens_a_thought(content: str) -> None:
    """They begin after the part of the prompt that every answer has, whatever their own first characters are."""
    chat = [*CHAT[:4], {"role": "assistant", "content": content}]
    text, spans = ChatTemplate(OPENS_A_THOUGHT, {}).answers(chat)
    wanted = [f"{answer.split('</think>')[-1]}</>" for answer in (CHAT[2]["content"], content)]
    assert [text[first:last] for first, last in spans] == wanted
    other = "{% for each in messages %}{{ each.content }}{% endfor %}{% if add_generation_prompt %}Now:{% endif %}"
    with pytest.raises(DataError, match="prompt .*ends with 'Now:', but answers"):
        ChatTemplate(other, {}).answers(CHAT)


@pytest.mark.parametrize("role", ["model", "bot", "Assistant"])
@pytest.mark.parametrize("affected", [1.0, 0.5, 0.05])
@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["chatml", "marked"])
def test_chats_without_an_answer_are_faulty(
    folder: Path,
    tmp_path: Path,
    role: str,
    affected: float,
    source: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Roles that no template knows as answers leave nothing to learn from."""
    (tmp_path / "chat.jinja").write_text(source)
    rows = [
        [{"role": "user", "content": f"{n}?"}, {"role": role if n < 40 * affected else "assistant", "content": f"{n}."}]
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in rows))
    given = ["--input", f"chats={tmp_path / 'chats.jsonl'}", "--output", str(tmp_path / "out"), "--messages", "answers"]
    given += ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(folder / "tokenizer.json"), "--workers", "0"]
    given += ["--test-fraction", "0", "--chat-template", str(tmp_path / "chat.jinja")]
    if affected > 0.1:
        reason = f"{40 * affected:.0f} of 40 records .*without an answer .*user, {role}"
        with pytest.raises(DataError, match=f"{reason}.*; rename the role of the answers to assistant"):
            prepare.main(given)
    else:
        assert prepare.main(given) == 0
        assert "2 x chat without an answer" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "colour"])
def test_a_chat_shows_what_will_count(
    folder: Path, tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unanswered = [{"role": "user", "content": "\x1b[2J"}, {"role": "bot", "content": "a"}]
    rows = [{"text": "no chat"}, {"messages": CHAT}, {"messages": unanswered}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["chat", str(tmp_path / "chats.jsonl"), "--vocab-file", str(folder)]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    begin, end = ("\x1b[32m", "\x1b[0m") if terminal else ("⟦", "⟧")
    for messages, count in (("answers", 2), ("last", 1), ("all", 1)):
        assert inspect.main([*given, "--messages", messages]) == 0
        heading, _, shown = capsys.readouterr().out.partition("\n\n")
        assert "tokens that count in the loss" in heading and shown.count(begin) == shown.count(end) == count
        assert messages == "all" or f"{begin}Still.<|im_end|>\n<|endoftext|>{end}" in shown
        unmarked = shown.replace(begin, "").replace(end, "")
        assert unmarked.removesuffix("<|endoftext|>\n") == ChatTemplate(CHATML, SYMBOLS).render(CHAT)
    assert inspect.main([*given, "--number", "1"]) == 0
    shown = capsys.readouterr().out
    assert "no token counts in the loss (" in shown and "user, bot)" in shown and "\\x1b[2J" in shown
    assert inspect.main([*given, "--chat-template", "chatml", "--tokens", "--json", str(tmp_path / "facts.json")]) == 0
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert len(facts["tokens"]) == len(facts["counts"]) and f"{facts['tokens'][-1]}:" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"2 chats and 1 faulty records.*--number from 0 to 1"):
        inspect.main([*given, "--number", "2"])
