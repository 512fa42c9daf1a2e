"""Chats: rendered and masked as transformers does, prepared into label shards, and trained on as by a loop by hand."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_coca.commands import generate, inspect, prepare
from megatron_coca.config import load_config
from megatron_coca.data import DataError, Shard, Tokenizer, load_saved_tokenizer, load_tokenizer, train_sentencepiece
from megatron_coca.data.tokenizers.chat import ChatTemplate, find_template, shipped_templates, with_variables
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.support.plain_text import plain
from megatron_coca.text_generation import Continuation, load_generator
from megatron_coca.training.corpus import open_corpus
from tests.checkpoint_files import TINY, talkative_model, write_checkpoint
from tests.terminal import Terminal, type_lines

CHATML = """\
{{- bos_token }}{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{% for message in messages %}
    {%- if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

    {%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {%- endif %}
    {%- if loop.last and message.role == 'tool' %}{{ raise_exception('unanswered') }}{% endif %}
{% endfor %}"""
FORGETS = """\
{% for message in messages %}[{{ message.role }}]{% if loop.last %}{{ message.content }}{% endif %}{% endfor %}"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you? <|im_end|> 😀"},
    {"role": "assistant", "content": "A small model, naïve 😀."},
    {"role": "user", "content": "  And now?"},
    {"role": "assistant", "content": "Still."},
]
CHATS = [CHAT, CHAT[:3], CHAT[1:], [*CHAT, CHAT[1]], [{"role": "user", "content": "alone"}]]
SYMBOLS = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a byte-level BPE with special tokens and a template."""
    made = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"]
    texts = [message["content"] for message in CHAT] * 20
    made.train_from_iterator(texts, vocab_size=300, min_frequency=2, special_tokens=special, show_progress=False)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **SYMBOLS)
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return load_tokenizer("HFTokenizer", folder)


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["chatml", "marked"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [False, True])
def test_rendered_and_encoded_as_by_transformers(
    folder: Path, ours: Tokenizer, source: str, chat: list[dict[str, str]], prompt: bool
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    tools = [{"name": "<clock>", "größe": 1}] if source == MARKED else None
    template = ChatTemplate(source, SYMBOLS)
    text = template.render(chat, tools, prompt)
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, "chat_template": source}
    assert text == theirs.apply_chat_template(chat, tokenize=False, **options)
    assert ours.encode_rendered(text)[0] == theirs.apply_chat_template(chat, return_dict=True, **options)["input_ids"]


def counted(tokenizer: Tokenizer, text: str, spans: list[tuple[int, int]]) -> list[int]:
    return [
        int(any(begin < last and end > first for first, last in spans))
        for begin, end in tokenizer.encode_rendered(text)[1]
    ]


@pytest.mark.parametrize("chat", CHATS)
def test_generation_blocks_are_the_assistant_mask_of_transformers(
    folder: Path, ours: Tokenizer, chat: list[dict[str, str]]
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        chat, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert counted(ours, *ChatTemplate(MARKED, SYMBOLS).answers(chat)) == theirs["assistant_masks"]


def test_prefix_rendering_finds_the_answers_by_hand() -> None:
    text, spans = ChatTemplate(CHATML, SYMBOLS).answers(CHAT)
    assert [text[first:last] for first, last in spans] == ["A small model, naïve 😀.<|im_end|>\n", "Still.<|im_end|>\n"]
    with pytest.raises(DataError, match="renders a message differently if further messages follow"):
        ChatTemplate(FORGETS, {}).answers(CHAT)
    with pytest.raises(DataError, match="does not accept the messages"):
        ChatTemplate("{{ messages[0].content.missing.more }}", {}).render(CHAT)


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["chatml", "marked"])
def test_answers_of_weight_0_do_not_count(source: str) -> None:
    template = ChatTemplate(source, SYMBOLS)
    answers = [number for number, message in enumerate(CHAT) if message["role"] == "assistant"]
    text, spans = template.answers(CHAT)
    weighted = [message | ({"weight": 0} if number == answers[0] else {}) for number, message in enumerate(CHAT)]
    assert template.answers(weighted) == (text, spans[1:])
    assert template.answers(weighted, last=True) == (text, spans[-1:])
    weighted[answers[-1]] = weighted[answers[-1]] | {"weight": 0}
    assert template.answers(weighted, last=True) == (text, [])
    one_block = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(DataError, match=r"prints 2 answers in 1 {% generation %} blocks"):
        ChatTemplate(one_block, {}).answers(weighted)


def test_variables_of_a_template(ours: Tokenizer, tmp_path: Path) -> None:
    """They are saved with the tokenizer, and a name that the template does not read is an error."""
    source = CHATML + "{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    silent = with_variables(ChatTemplate(source, SYMBOLS), {"enable_thinking": False})
    assert silent.render(CHAT) == ChatTemplate(source, SYMBOLS).render(CHAT) + "<think></think>"
    with pytest.raises(DataError, match="does not read 'enable_thinkin'"):
        with_variables(silent, {"enable_thinkin": False})
    for name in ("messages", "bos_token"):
        with pytest.raises(DataError, match=f"{name} is set by this program"):
            with_variables(silent, {name: "x"})
    ours.chat, before = silent, ours.chat
    ours.save(tmp_path)
    ours.chat = before
    assert load_saved_tokenizer(tmp_path).chat == silent


def test_templates_are_found_and_saved(folder: Path, ours: Tokenizer, tmp_path: Path) -> None:
    assert ours.chat is not None and ours.chat.source == CHATML and ours.chat.symbols["bos_token"] == "<s>"
    ours.save(tmp_path)
    assert load_saved_tokenizer(tmp_path).chat == ours.chat
    entry = {"name": "default", "template": MARKED}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [entry], "eos_token": {"content": "e"}})
    )
    assert find_template(tmp_path) == ChatTemplate(MARKED, {"eos_token": "e"})
    assert ours.chat.end_of_turn() == "<|im_end|>\n"


def test_the_template_of_a_processor_is_found(tmp_path: Path) -> None:
    """Folders of models with images may have the template only in `chat_template.json`."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert find_template(tmp_path) == ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of the tokenizer"}')
    assert find_template(tmp_path) == ChatTemplate("of the tokenizer", {})


@pytest.mark.parametrize("messages", ["answers", "last", "all"])
@pytest.mark.parametrize("workers", [0, 1])
def test_prepared_labels_by_hand(folder: Path, ours: Tokenizer, tmp_path: Path, messages: str, workers: int) -> None:
    """Token shard, label shard and data.yml; records without messages are counted, ShareGPT's are understood."""
    shared = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}
    rows = [{"messages": CHAT}, {"text": "no chat"}, shared, {"messages": CHAT[:2]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out"
    prepare.main(
        [
            *("--input", f"chats={tmp_path / 'chats.jsonl'}", "--output", str(output), "--messages", messages),
            *("--tokenizer-type", "HFTokenizer", "--vocab-file", str(folder / "tokenizer.json")),
            *("--valid-fraction", "0", "--test-fraction", "0", "--workers", str(workers)),
        ]
    )
    hello = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    answers = {"answers": [2, 4], "last": [4], "all": []}[messages]
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8, "pos_emb": "none"}
    corpus = open_corpus(load_config([output / "data.yml"], shape | {"train_iters": 1}))
    (shard,) = corpus.train.shards
    assert corpus.tokenizer is not None and corpus.tokenizer.chat == ours.chat
    expected_chats = [(CHAT, answers), (hello, [1]), (CHAT[:2], [])][: 3 if messages == "all" else 2]
    assert shard.documents == len(expected_chats) and (shard.labels is None) == (messages == "all")
    assert ours.chat is not None
    for number, (chat, places) in enumerate(expected_chats):
        ids = [*ours.encode_rendered(ours.chat.render(chat))[0], ours.eod]
        assert shard.document(number).tolist() == ids
        expected = np.full(len(ids), -100)
        for place in places:
            lengths = [
                len(ours.encode_rendered(ours.chat.render(chat[:end], prompt=prompt))[0])
                for end, prompt in ((place, True), (place + 1, False))
            ]
            expected[slice(*lengths)] = ids[slice(*lengths)]
            expected[-1] = ids[-1] if place == len(chat) - 1 else expected[-1]
        if shard.labels is not None:
            assert shard.labels.document(number).tolist() == expected.tolist()
    manifest = json.loads((output / "manifest.json").read_text())
    unanswered = {} if messages == "all" else {"chat without an answer": 1}
    assert manifest["inputs"][0]["problems"] == {"missing messages": 1} | unanswered


def test_wrong_preparations_are_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    given = ["--input", f"chats={tmp_path / 'chats.jsonl'}", "--output", str(tmp_path / "out"), "--messages", "last"]
    given += ["--tokenizer-type", "CharLevelTokenizer", "--workers", "0"]
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        prepare.main(given)
    (tmp_path / "broken.jinja").write_text("a\n{% if %}")
    with pytest.raises(DataError, match=r"broken.jinja:2: "):
        prepare.main([*given, "--chat-template", str(tmp_path / "broken.jinja")])
    (tmp_path / "chatml.jinja").write_text(CHATML)
    prepare.main([*given, "--chat-template", str(tmp_path / "chatml.jinja"), "--test-fraction", "0"])
    (shard,) = (tmp_path / "out").glob("*_label.bin")
    labels = Shard(shard.with_suffix("")).document(0)
    assert bytes(labels[labels >= 0].astype(np.uint8)) == b"Still.<|im_end|>\n\0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes with a template in which turns end with a full stop."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    tokenizer = load_tokenizer("CharLevelTokenizer")
    source = "{% for each in messages %}{{ each.role }}:{{ each.content }}.{% endfor %}"
    tokenizer.chat = ChatTemplate(source + "{% if add_generation_prompt %}assistant:{% endif %}", {})
    config = load_config([], TINY | {"vocab_size": 512, "max_position_embeddings": 256})
    write_checkpoint(folder, config, talkative_model(config).state_dict(), tokenizer=tokenizer)
    return folder


def test_answers_continue_the_rendered_chat(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = load_generator(checkpoint)
    whole = generator.complete(["system:S.user:hello.assistant:"], 30)[0].text
    wanted = whole.partition(".")[0]
    given = ["--checkpoint", str(checkpoint), "--chat", "--prompt", "hello", "--max-new-tokens", "30"]
    assert generate.main([*given, "--system", "S"]) == 0
    assert capsys.readouterr().out == wanted + "\n"


def test_variables_reach_generation_and_prepared_data(
    checkpoint: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template by its name, and with a value that only its prompts show."""
    kwargs = ["--chat-template-kwargs", '{"enable_thinking": false}']
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    given = ["--input", f"chats={tmp_path / 'chats.jsonl'}", "--output", str(tmp_path / "out"), "--messages", "answers"]
    given += ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(folder / "tokenizer.json"), "--workers", "0"]
    with pytest.raises(DataError, match="--chat-template-kwargs: .*not read 'enable_thinking'"):
        prepare.main([*given, *kwargs])
    assert prepare.main([*given, *kwargs, "--chat-template", "qwen3", "--test-fraction", "0"]) == 0
    saved = load_saved_tokenizer(tmp_path / "out")
    assert saved.chat is not None and saved.chat.variables == {"enable_thinking": False}
    assert saved.chat.source == shipped_templates()["qwen3"].read_text()
    tokenizer = load_generator(checkpoint).tokenizer
    assert tokenizer.chat is not None
    source = tokenizer.chat.source + "{% if add_generation_prompt and enable_thinking is false %}:{% endif %}"
    tokenizer.chat = ChatTemplate(source, {})
    config = load_config([], TINY | {"vocab_size": 512, "max_position_embeddings": 256})
    write_checkpoint(tmp_path / "run", config, talkative_model(config).state_dict(), tokenizer=tokenizer)
    whole = load_generator(checkpoint).complete(["user:hello.assistant::"], 30)[0].text
    asked = ["--checkpoint", str(tmp_path / "run"), "--prompt", "hello", "--max-new-tokens", "30", *kwargs]
    capsys.readouterr()
    assert generate.main([*asked, "--chat"]) == 0
    assert capsys.readouterr().out == whole.partition(".")[0] + "\n"
    with pytest.raises(EvaluationError, match="--chat-template-kwargs: has no effect without --chat"):
        generate.main(asked)


def test_answers_to_several_messages_go_to_a_file(checkpoint: Path, tmp_path: Path) -> None:
    """Each is a chat of its own; the last messages of a longer chat are answered in Python."""
    output, generator = tmp_path / "out.jsonl", load_generator(checkpoint)
    given = ["--checkpoint", str(checkpoint), "--chat", "--prompt", "one", "--prompt", "two", "--max-new-tokens", "10"]
    assert generate.main([*given, "--output", str(output)]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    answers = generator.answer(chats, 10)
    assert [record["text"] for record in records] == [row.text for row in answers]
    assert answers[0].text == generator.complete(["user:one.assistant:"], 10)[0].text.partition(".")[0]


def test_typed_messages_are_one_conversation(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "one", "two")
    given = ["--checkpoint", str(checkpoint), "--chat", "--system", "S", "--max-new-tokens", "10"]
    assert generate.main(given) == 0
    chat, generator, shown = [{"role": "system", "content": "S"}], load_generator(checkpoint), ""
    for text in ("one", "two"):
        chat.append({"role": "user", "content": text})
        chat.append({"role": "assistant", "content": generator.answer([chat], 10)[0].text})
        shown += chat[-1]["content"] + "\n"
    assert isinstance(sys.stdout, Terminal) and sys.stdout.getvalue() == shown + "\n"


def test_a_conversation_that_outgrows_the_positions_goes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first messages are left out; a message that is too long alone is not taken."""
    config = load_config([], TINY | {"vocab_size": 512, "max_position_embeddings": 72, "pos_emb": "learned"})
    write_checkpoint(tmp_path / "run", config, tokenizer=load_generator(checkpoint).tokenizer)
    type_lines(monkeypatch, "one", "two", "x" * 60, "three")
    given = ["--checkpoint", str(tmp_path / "run"), "--chat", "--system", "S", "--max-new-tokens", "20"]
    assert generate.main(given) == 0
    system, generator, shown = {"role": "system", "content": "S"}, load_generator(tmp_path / "run"), ""
    for text in ("one", "two", "three"):  # two turns do not fit
        shown += plain(generator.answer([[system, {"role": "user", "content": text}]], 20)[0].text) + "\n"
    assert isinstance(sys.stdout, Terminal) and sys.stdout.getvalue() == shown + "\n"
    told = capsys.readouterr().err
    assert told.count("the first 2 messages are left out") == 2 and "beyond the 72 learned positions" in told


def test_a_special_token_ends_an_answer(ours: Tokenizer) -> None:
    """Its id ends it, because it is not in the text."""
    end = ours.encode_rendered("<|im_end|>")[0]
    row = Continuation(ours, [], (), end)
    for token in (*ours.encode("Hi"), *end):
        row.push(token)
    assert row.text == "Hi" and row.finish == "eod"


def test_a_model_without_a_template_does_not_chat(checkpoint: Path) -> None:
    with pytest.raises(EvaluationError, match="--system: has no effect without --chat"):
        generate.main(["--checkpoint", str(checkpoint), "--prompt", "a", "--system", "b"])
    generator = load_generator(checkpoint)
    generator.tokenizer.chat = None
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        generator.answer([CHAT])


@pytest.fixture
def labelled(folder: Path, tmp_path: Path) -> Path:
    """A prepared folder of chats with labels."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS[:3]))
    given = ["--input", f"chats={tmp_path / 'chats.jsonl'}", "--output", str(tmp_path / "out"), "--messages", "answers"]
    given += ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(folder / "tokenizer.json"), "--test-fraction", "0"]
    prepare.main([*given, "--workers", "0"])
    return tmp_path / "out"


def test_label_shards_are_verified(labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["verify", str(labelled)]) == 0
    assert "no fault was found" in capsys.readouterr().out
    path = labelled / "chats_train_label.bin"
    labels = np.fromfile(path, dtype=np.int32)
    labels[np.flatnonzero(labels >= 0)[0]] = -100
    labels.tofile(path)
    assert inspect.main(["verify", str(labelled)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("FAULT") == 1 and "chats_train_label.bin: the content has changed" in shown


def test_a_sample_shows_what_counts(labelled: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = ["num_layers=1", "hidden_size=32", "num_attention_heads=2", "seq_length=200", "pos_emb=none"]
    given = ["sample", str(labelled / "data.yml"), *shape, "pack_impl=unpacked", "--json", str(tmp_path / "facts.json")]
    chats = set()
    for number in range(3):
        assert inspect.main([*given, "--number", str(number)]) == 0
        shown = capsys.readouterr().out
        facts = json.loads((tmp_path / "facts.json").read_text())
        assert f"mark the {facts['tokens_in_loss']} tokens that count in the loss" in shown and "⟦Be brief" not in shown
        answers = [answer for answer in ("A small model, naïve 😀.", "Still.") if answer in shown]
        assert all(f"⟦{answer}\n" in shown for answer in answers)
        assert facts["tokens_in_loss"] >= sum(map(len, answers)) // 3
        chats.add(len(answers))
    assert chats == {1, 2}
    assert inspect.main([*given, "--number", "0", "--tokens"]) == 0
    assert capsys.readouterr().out.count("⟦") >= 2


def test_a_sentencepiece_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "chat.jinja").write_text(CHATML)
    train_sentencepiece([message["content"] for message in CHAT] * 20, 300, tmp_path / "tokenizer.model")
    given = ["--input", f"chats={tmp_path / 'chats.jsonl'}", "--output", str(tmp_path / "out"), "--messages", "answers"]
    given += ["--tokenizer-type", "SPMTokenizer", "--vocab-file", str(tmp_path / "tokenizer.model"), "--workers", "0"]
    with pytest.raises(DataError, match="SPMTokenizer: cannot encode chats; use HFTokenizer"):
        prepare.main([*given, "--chat-template", str(tmp_path / "chat.jinja")])
