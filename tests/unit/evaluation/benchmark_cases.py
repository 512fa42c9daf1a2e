"""Small stand-ins for the data of published benchmarks, with the same files and fields, and a tokenizer for them.

All texts are made up from a few words. Only the schema is that of the published data.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from megatron_coca.data import Tokenizer, load_tokenizer
from megatron_coca.evaluation.tasks.lm_eval import benchmarks
from megatron_coca.evaluation.tasks.lm_eval.benchmarks import place_of

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
]
NAMES = ("Mary", "John", "Daniel", "Sandra")
PLACES = ("kitchen", "garden", "office", "hallway")
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
PROMPTS = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text. Question: Find all variables "
    "that are assigned the value 12345 in the text above. Answer: According to the chain(s) of variable assignment in "
    "the text above, 5 variables are assgined the value 12345, they are: VAR ABC = VAR DEF 1. 2. 3. 4. 5. 6. 7. 8. 9. "
)
LONGBENCH_QUESTIONS = 4
"""Documents of each task of LongBench: short and long ones, for the columns of LongBench-E."""
QUESTIONS = 500
"""The questions that ruler's tasks read from SQuAD and HotpotQA."""


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."


def write_stand_ins(folder: Path) -> Path:
    """Write the data of all benchmarks, as `tools/fetch_benchmarks.py` arranges them, and return the folder."""
    draw = random.Random(5)
    write_longbench(place_of(benchmarks.LONGBENCH, folder), draw)
    write_babilong(place_of(benchmarks.BABILONG, folder), draw)
    write_infinitebench(place_of(benchmarks.BENCHMARKS["infinitebench"][0], folder), draw)
    write_ruler(folder, draw)
    return folder


def write_data_set(place: Path, configs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
    """Write a data set as on the hub: a JSONL file for each split of each configuration, named in README.md."""
    place.mkdir(parents=True)
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {json.dumps(config)}", "  data_files:"]
        for split, rows in splits.items():
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
            write_rows(place / config / f"{split}.jsonl", rows)
    (place / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_longbench(place: Path, draw: random.Random) -> None:
    def rows(task: str) -> list[dict[str, Any]]:
        answer = {"passage_count": "3", "passage_retrieval_en": "Paragraph 2", "passage_retrieval_zh": "段落2"}
        classes = ["Location", "Number"] if task in ("trec", "lsht") else None
        found = []
        for number, words in zip(range(LONGBENCH_QUESTIONS), (900, 4100, 8200, 12000), strict=True):
            own = answer.get(task, classes[0] if classes else "a small boat")
            row = {"question": "What lay near the shore?", "context": sentence(draw, 60), "answers": [own]}
            row |= {"length": words, "dataset": task, "language": "en", "all_classes": classes, "_id": str(number)}
            found.append(row)
        return found

    own = {*sum(benchmarks.LONGBENCH_ENGLISH.values(), ()), *sum(benchmarks.LONGBENCH_CHINESE.values(), ())}
    split = {f"{task}{end}": {"test": rows(task)} for task in sorted(own) for end in ("", "_e")}
    write_data_set(place, split)


def write_babilong(place: Path, draw: random.Random) -> None:
    def rows(sentences: int) -> list[dict[str, str]]:
        found = []
        for _ in range(3):
            name, where = draw.choice(NAMES), draw.choice(PLACES)
            text = " ".join([*(sentence(draw, 8) for _ in range(sentences)), f"{name} went to the {where}."])
            found.append({"input": text, "question": f"Where is {name}? ", "target": where})
        return found

    lengths = {"0k": 0, "1k": 40, "2k": 80}
    write_data_set(
        place,
        {name: {f"qa{n}": rows(size) for n in range(1, 21 if name == "0k" else 6)} for name, size in lengths.items()},
    )


def write_infinitebench(place: Path, draw: random.Random) -> None:
    names = ("passkey", "kv_retrieval", "number_string", "code_run", "code_debug", "math_find", "longdialogue_qa_en")
    names += ("longbook_qa_en", "longbook_sum_en", "longbook_choice_en", "longbook_qa_chn")
    place.mkdir(parents=True)
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for name in names:
        lines += [f"  - split: {name}", f"    path: {name}.jsonl"]
        options = ["north", "south", "east", "west"] if name in ("code_debug", "longbook_choice_en") else []
        row = {"context": sentence(draw, 40), "input": "What is the key? func_1(2)", "options": options}
        write_rows(place / f"{name}.jsonl", [{"id": 0, **row, "answer": [options[0] if options else "12"]}])
    (place / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_ruler(folder: Path, draw: random.Random) -> None:
    essays = [{"text": " ".join(sentence(draw, 10) for _ in range(100))} for _ in range(4)]
    write_data_set(place_of(benchmarks.ESSAYS, folder), {"default": {"train": essays}})
    contexts = [sentence(draw, 12) for _ in range(QUESTIONS)]
    asked = [{"question": "What was calm?", "answers": [{"text": "the sea"}], "is_impossible": False}]
    squad = {"data": [{"paragraphs": [{"context": text, "qas": asked}]} for text in contexts]}
    write_json(place_of(benchmarks.SQUAD, folder), squad)
    hotpot = [
        {"question": "What lay near?", "answer": "a boat", "context": [[f"Page {number}", [text]]]}
        for number, text in enumerate(contexts)
    ]
    write_json(place_of(benchmarks.HOTPOT, folder), hotpot)
    english = folder / benchmarks.PUNKT / "english"  # a sentence splitter without learned exceptions
    english.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (english / name).touch()


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def word_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer in which common words of the stand-ins are one token: ruler's prompts are short enough."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=499, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([FILLER * 20, PROMPTS * 20, " ".join(WORDS) * 20], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    return load_tokenizer("HFTokenizer", folder)
