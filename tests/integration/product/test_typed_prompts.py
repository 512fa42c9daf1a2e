"""Prompts typed at a pseudo-terminal."""

import sys
from pathlib import Path

import pytest

from megatron_coca.config import load_config
from megatron_coca.data import load_tokenizer
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.text_generation import load_generator
from tests.checkpoint_files import TINY, talkative_model, write_checkpoint
from tests.terminal import on_terminal, screen

pytestmark = pytest.mark.slow
UP, ENTER, CTRL_D = b"\x1b[A", b"\n", b"\x04"


@pytest.mark.parametrize(
    ("chat", "options"),
    [(False, []), (True, []), (True, ["--decoding", "static"])],
    ids=["prompts", "chat", "chat, static decoding"],
)
def test_typed_lines_with_history_until_ctrl_d(chat: bool, options: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer("CharLevelTokenizer")
    source = "{% for each in messages %}{{ each.role }}:{{ each.content }}.{% endfor %}"
    tokenizer.chat = ChatTemplate(source + "{% if add_generation_prompt %}assistant:{% endif %}", {})
    config = load_config([], TINY | {"vocab_size": 512, "max_position_embeddings": 256})
    write_checkpoint(tmp_path / "run", config, talkative_model(config).state_dict(), tokenizer=tokenizer)
    command = [sys.executable, "-m", "megatron_coca", *(["chat"] if chat else ["generate", "--checkpoint"])]
    command += [str(tmp_path / "run"), "--max-new-tokens", "12", *options]
    keys = [b"the sea" + ENTER, UP + ENTER, CTRL_D]
    status, written = on_terminal(command, 200, typed=("> ", keys))
    generator, messages, answers = load_generator(tmp_path / "run"), [], []
    for _ in range(2):
        messages.append({"role": "user", "content": "the sea"})
        row = generator.answer([messages], 12)[0] if chat else generator.complete(["the sea"], 12)[0]
        messages.append({"role": "assistant", "content": row.text})
        answers.append(row.text)
    lines = screen(written.replace("\x1b[?2004h", "").replace("\x1b[?2004l\r", ""), 200)
    assert status == 0 and lines[0].startswith("loading") and "Ctrl-D" in lines[1]
    shown = [line for line in lines[2:] if line]
    assert shown == ["> the sea", answers[0], "> the sea", answers[1], ">"]
