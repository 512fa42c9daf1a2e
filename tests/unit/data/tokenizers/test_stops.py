"""Stop strings in the spelling of generated tokens, in which special tokens have names."""

import pytest

from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.data.tokenizers.stops import text_before_stop
from megatron_coca.text_generation import Continuation
from tests.unit.data.tokenizers.test_chat import folder, ours

__all__ = ["folder", "ours"]


@pytest.mark.parametrize(
    ("generated", "stops", "text"),
    [
        ("Still.<|im_end|>\nHuman: more", ["<|im_end|>"], "Still."),
        ("Still.<|im_end|>\n<|im_start|>user", ["<|im_end|>\n"], "Still."),
        ("naïve 😀.\n<|im_end|>", ["\n<|im_end|>"], "naïve 😀."),
        ("naïve 😀 small model", ["😀"], "naïve "),
        ("A small<s> model", ["l<s> m"], "A smal"),
        ("A small<s> model", ["small model", "mod"], "A small "),
        ("A small model", ["<|im_end|>"], "A small model"),
        ("A small model", [], "A small model"),
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    ours: Tokenizer, generated: str, stops: list[str], text: str
) -> None:
    ids, context = ours.encode_rendered(generated)[0], ours.encode("And now?")
    found = any(stop in generated for stop in stops)
    assert text_before_stop(ours, ids, stops, context) == (text, found)
    row = Continuation(ours, context, stops)
    for token in ids:
        row.push(token)
        assert text.startswith(row.settled) or not found
        if row.finish != "length":
            break
    assert (row.text, row.finish) == (text, "stop" if found else "length")


def test_a_turn_that_ends_with_text_and_a_special_token(ours: Tokenizer) -> None:
    """Its end is a text that contains the name of the token."""
    assert ours.chat is not None
    chat, ours.chat = ours.chat, ChatTemplate("{% for m in messages %}{{ m.content }}\n<|im_end|>{% endfor %}", {})
    ends, texts = ours.turn_ends()
    ours.chat = chat
    ids = ours.encode_rendered("Still.\n<|im_end|>A small")[0]
    assert ends == [] and text_before_stop(ours, ids, texts)[0].rstrip() == "Still."
