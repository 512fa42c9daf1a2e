"""The chat templates of the package: the forms of the original models by hand, and that every turn stays as it was."""

from typing import Any

import pytest

from megatron_coca.data import DataError
from megatron_coca.data.tokenizers.chat import ChatTemplate, shipped_templates

SYMBOLS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM, ASKED, AGAIN = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "user", "content": "And now?"},
)
FIRST, SECOND = ({"role": "assistant", "content": text} for text in ("A model.", "Still."))
CHAT = [SYSTEM, ASKED, FIRST, AGAIN, SECOND]
RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    "[A model.<|im_end|>]\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n[Still.<|im_end|>]\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    "[<think>\n\n</think>\n\nA model.<|im_end|>]\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    "[<think>\n\n</think>\n\nStill.<|im_end|>]\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "[A model.<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Still.<|eot_id|>]",
    "mistral": "<s>[INST] Be brief.\n\nWho?[/INST][ A model.</s>][INST] And now?[/INST][ Still.</s>]",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nWho?<end_of_turn>\n<start_of_turn>model\n[A model.<end_of_turn>]\n"
    "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n[Still.<end_of_turn>]\n",
}
"""The answers of CHAT are in brackets, except that those of mistral's [INST] belong to the text."""


def shipped(name: str) -> ChatTemplate:
    return ChatTemplate(shipped_templates()[name].read_text(), SYMBOLS)


def bracketed(template: ChatTemplate, chat: list[dict[str, Any]]) -> str:
    text, spans = template.answers(chat)
    for first, last in reversed(spans):
        text = f"{text[:first]}[{text[first:last]}]{text[last:]}"
    return text


def test_every_template_has_its_form() -> None:
    assert shipped_templates().keys() == RENDERED.keys()


@pytest.mark.parametrize("name", RENDERED)
def test_the_form_of_the_original(name: str) -> None:
    assert bracketed(shipped(name), CHAT) == RENDERED[name]


def test_the_published_examples_of_mistral() -> None:
    """Mistral's cookbook on chat templates for its tokenizer V3, and a chat that its library encoded for the discussion
    of the space before [/INST] (tokens <s>, [INST], one with a space before "Hi"). The library puts a system message in
    the last message of the user, which is the first one here.
    """
    template = shipped("mistral")
    turns = [("user", "user message"), ("assistant", "assistant message"), ("user", "new user message")]
    chat = [{"role": role, "content": content} for role, content in turns]
    published = "<s>[INST] user message[/INST] assistant message</s>[INST] new user message[/INST]"
    assert template.render(chat, prompt=True) == published
    chat[1]["content"] = "  assistant message\n"
    assert template.render(chat, prompt=True) == published, "white space around an answer is dropped"
    hi = {"role": "user", "content": "Hi, how are you?"}
    assert template.render([hi], prompt=True) == "<s>[INST] Hi, how are you?[/INST]"
    told = [{"role": "system", "content": "system prompt"}, hi]
    assert template.render(told, prompt=True) == "<s>[INST] system prompt\n\nHi, how are you?[/INST]"


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:]], ids=["system", "plain"])
@pytest.mark.parametrize("name", RENDERED)
def test_every_turn_stays_as_it_was_answered(name: str, chat: list[dict[str, Any]]) -> None:
    """A longer chat begins with the shorter one, and each answer follows its prompt."""
    template = shipped(name)
    whole = template.render(chat)
    _, spans = template.answers(chat)
    numbers = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
    for number, (first, last) in zip(numbers, spans, strict=True):
        prompt, after = template.render(chat[:number], prompt=True), template.render(chat[: number + 1])
        assert whole.startswith(after) and after.startswith(prompt) and first == len(prompt)
        assert after[last:].strip() == "" and after.endswith(template.end_of_turn())
    assert template.answers(chat, last=True)[1] == spans[-1:]


def test_thoughts_of_qwen_3_stay() -> None:
    first, second = FIRST | {"reasoning_content": "Hm.\n"}, SECOND | {"content": "<think>\nOh.\n</think>\nStill."}
    thoughtful = [ASKED, first, AGAIN, second]
    shown = bracketed(shipped("qwen3"), thoughtful)
    assert "[<think>\nHm.\n</think>\n\nA model.<|im_end|>]" in shown
    assert "[<think>\nOh.\n</think>\n\nStill.<|im_end|>]" in shown
    silent = ChatTemplate(shipped("qwen3").source, SYMBOLS, variables={"enable_thinking": False})
    assert silent.render([ASKED], prompt=True).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", RENDERED)
def test_what_a_template_cannot_express_is_an_error(name: str) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for chat, tools in (([ASKED, call], None), ([ASKED, {"role": "tool", "content": "1"}], None), ([ASKED], [{}])):
        with pytest.raises(DataError, match="no form for|must alternate"):
            shipped(name).render(chat, tools)
