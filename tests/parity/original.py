"""A stock LLaMA folder with a tokenizer and generation files that do more than map ids, for the tests of exports."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from megatron_coca.checkpoints.exporting import export
from tests.parity.exported import LLAMA, random_checkpoint

LINES = [f"def function_{i}(self):\n    return the value of the argument {i}" for i in range(300)]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
GENERATION: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": [1, 3], "do_sample": True, "temperature": 0.6}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
ROWS = {"vocab_size": 330, "make_vocab_size_divisible_by": 1}
Json = dict[str, Any]


def write(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content))


def changed(path: Path, **values: Any) -> None:
    write(path, (json.loads(path.read_text()) if path.is_file() else {}) | values)


def trained(path: Path, lines: list[str], size: int = 330) -> Path:
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(lines, vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    model._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model.save(str(path))
    return path


def original_folder(place: Path) -> Path:
    """A stock LLaMA folder whose tokenizer does more than give ids."""
    folder = export(random_checkpoint(place / "run", tokenizer=None, **LLAMA | ROWS), place / "source").folder
    trained(folder / "tokenizer.json", LINES)
    write(folder / "tokenizer_config.json", SETTINGS)
    write(folder / "generation_config.json", GENERATION)
    write(folder / "added_tokens.json", {"<|im_end|>": 3})
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    changed(folder / "config.json", **IDS)
    return folder
