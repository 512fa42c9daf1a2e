"""Chat templates of strangers: the same texts as with jinja2, and an end for every template, at the same step."""

import contextlib
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest

from megatron_coca.commands import generate, prepare
from megatron_coca.config import load_config
from megatron_coca.data import DataError, Shard, load_saved_tokenizer, load_tokenizer
from megatron_coca.data.tokenizers import chat as chat_module
from megatron_coca.data.tokenizers.chat import ChatTemplate, find_template
from megatron_coca.data.tokenizers.chat_sandbox import METHODS, REMOVED, Budget, TooManySteps, compiled
from megatron_coca.data.tokenizers.text_rules import TextRules, find_rules
from tests.checkpoint_files import TINY, talkative_model, write_checkpoint

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. 😀"},
    {"role": "user", "content": " What is 2 + 2?\n"},
    {"role": "assistant", "content": "<think>add</think>\n4", "tool_calls": [{"name": "add", "arguments": {"a": 2.5}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
]
HONEST = [
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m.content | trim + eos_token }}{% endfor %}",
    "{% set ns = namespace(found=false, n=0) %}{% for m in messages[::-1] %}"
    "{% set index = messages|length - 1 - loop.index0 %}{% if m.role == 'user' and not ns.found %}"
    "{% set ns.found = true %}{% set ns.n = index %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.found }}",
    "{% for m in messages if m.role not in ['tool', 'system'] %}{{ loop.index }}/{{ loop.length }}"
    "{% if loop.last %}!{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{{ loop.previtem.role if loop.previtem }}{% endfor %}",
    "{% macro show(value, depth=0) %}{% if value is mapping %}{% for k, v in value|dictsort %}{{ '  ' * depth ~ k }}:"
    "{{ show(v, depth + 1) }}{% endfor %}{% else %}{{ value }};{% endif %}{% endmacro %}{% for m in messages %}"
    "{{ show(m) }}{% endfor %}",
    "{{ messages|map(attribute='role')|unique|join(', ') }}{{ (messages|groupby('role'))|length }}"
    "{{ messages|selectattr('role', 'equalto', 'tool')|list|length }}"
    "{{ messages|rejectattr('tool_calls')|map(attribute='content')|list|tojson }}",
    "{{ messages|tojson(indent=2) }}{{ messages[2].tool_calls[0].arguments.items()|list }}{{ messages[1:3]|length }}",
    "{{ '%s-%03d' % ('a', 7) }}{{ '{:>8}|{}'.format('b', 3) }}{{ 'a,b'.replace(',', ';').title() }}"
    "{{ 7 // 2 * 2 ** 3 }}{{ messages[0].content|replace('e', 'E')|upper|indent(3) }}{{ [1, 2] + [3] }}"
    "{{ 'x'.join(['a', 'b']) }}{{ missing }}{{ messages[0].get('none', 'absent') }}",
    "{% set text %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ text }}{% filter upper %}{{ text }}"
    "{% endfilter %}{% block b %}{{ eos_token }}{% endblock %}",
]


@pytest.mark.parametrize("source", HONEST)
def test_honest_templates_have_the_texts_of_jinja2(source: str) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    wanted = environment.from_string(source).render(messages=CHAT, eos_token="</s>")
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(CHAT) == wanted != ""


TWICE = "{% set ns = namespace(s='xy', t=[1]) %}{% for i in range(80) %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "empty loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a range": "{{ range(10**9) }}",
    "a product": "{{ 'x' * 10**9 }}{{ [1] * 10**9 }}",
    "a power": "{{ 10 ** 99999 }}",
    "a doubled text": TWICE + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a doubled sum": TWICE + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a doubled list": TWICE + "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t }}",
    "a doubled mapping": TWICE + "{% set ns.t = dict(a=ns.t, b=ns.t) %}{% endfor %}{{ ns.t|tojson }}",
    "doubled groups": TWICE
    + "{% for g in [ns.t, ns.t]|groupby('0') %}{% set ns.t = g %}{% endfor %}{% endfor %}{{ ns.t }}",
    "doubled namespaces": TWICE + "{% set ns.t = namespace(a=ns.t, b=ns.t) %}{% endfor %}{{ ns.t|string }}",
    "a doubled macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive block": "{% block b %}{{ self.b() }}{% endblock %}",
    "a captured text": "{% set x %}{% for i in range(99999) %}{{ 'x' * 60000 }}{% endfor %}{% endset %}",
    "template text": "{% set x %}{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "a width": "{{ 'x'|center(10**9) }}",
    "a method's width": "{{ 'x'.center(10**9) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format's argument": "{{ '%*d' % (10**9, 1) }}",
    "a filter's format": "{{ '%1000000000d'|format(1) }}",
    "a brace format": "{{ '{:1000000000}'.format(1) }}",
    "a brace format's width": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "a width in a list": "{{ '{:>{w[0]}}'.format_map({'w': ['1000000000']}) }}",
    "a repeated place": "{{ ('{0}' * 9999).format('x' * 99999) }}",
    "an indentation": "{{ [1]|tojson(indent=10**9) }}",
    "an indented text": "{{ ('\n' * 9999)|indent('x' * 99999) }}",
    "replacements": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "a filter's replacements": "{{ ('x' * 99999)|replace('x', 'y' * 99999) }}",
    "separators": "{{ range(99999)|join('x' * 99999) }}",
    "a method's separators": "{{ ('x' * 99999).join(range(99999)|map('string')) }}",
    "a slow search": "{{ ('x' * 999999).rfind('y' + 'x' * 499999) }}",
    "mapped items": "{% for i in range(999) %}{{ range(99999)|map(attribute='x')|select|list }}{% endfor %}",
    "a membership": "{% set x = range(99999)|list %}{% for a in x %}{{ 'y' in x }}{% endfor %}",
    "slices": "{% set x = range(99999)|list %}{% for a in x %}{% set y = x[1:] %}{% endfor %}",
    "a named width of tabs": "{{ ('\\t' * 999).expandtabs(tabsize=10**9) }}",
    "a large number": "{% set n = ('f' * 999999)|int(base=16) %}{{ n // 3 % 7 }}",
    "a named argument of a format": "{{ ('{a}' * 999).format(a='x' * 99999) }}",
    "arguments by name": "{{ ('x' * 9999)|replace(new='y' * 9999, old='x') }}",
    "other line ends": "{{ ('\\r' * 9999)|indent('x' * 9999, blank=true) }}",
    "a path of attributes": "{{ range(9999)|map('string')|map(attribute='" + "0." * 9999 + "0')|list }}",
    "a sort by a path": "{{ range(3000)|list|sort(attribute='real" + ".real" * 9 + "')|length }}",
    "the largest by a path": "{{ range(3000)|max(attribute='real" + ".real" * 9 + "') }}",
    "arguments from a list": "{% set x = range(9999)|list %}{% for i in x %}{{ cycler(*x) }}{% endfor %}",
    "arguments from a text": "{% set x = '\u4e2d' * 999999 %}{{ cycler(*x) }}",
    "a deep key": "{% set ns = namespace(t=()) %}{% for i in range(9999) %}{% set ns.t = (ns.t,) %}{% endfor %}"
    "{{ {ns.t: 1} }}",
    "a wide key": TWICE + "{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {1: 2}[ns.t] }}",
    "a message": TWICE + "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ raise_exception(ns.t) }}",
    "a test of a text": TWICE + "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t is upper }}",
    "changes": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(9) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
    "{% for i in range(9999) %}{{ loop.changed(ns.a) }}{{ loop.changed(ns.b) }}{% endfor %}",
    "values": "{% set d = {'a': range(9999)|list} %}{% for i in range(9999) %}{{ 'y' in d.values() }}{% endfor %}",
    "constants": "{% for i in range(9999) %}{% set x = [" + "1," * 9999 + "] %}{% endfor %}",
    "nodes": "{{ a }}" * 20_000,
    "separators of JSON": "{{ range(9999)|list|tojson(separators=['x' * 400, 'y' * 400]) }}",
    "a list of characters": "{{ ('x' * 999999)|list }}",
    "words": "{{ ('x ' * 499999).split() }}",
    "titles": "{{ ('x-' * 499999)|title }}",
    "a long time": "{{ strftime_now('%1000000000Y') }}",
    "parentheses": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "blocks": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "its size": "x" * 300_000,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_every_template_ends_at_the_same_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error that a preparation counts, without much memory or time."""
    monkeypatch.setattr(chat_module, "STEPS", 30_000)
    errors = []
    for _ in range(2):
        with pytest.raises(DataError, match=r"^chat template: (cannot be used|does not accept)") as raised:
            ChatTemplate(ENDLESS[name], {}).render(CHAT)
        errors.append(str(raised.value))
    assert errors[0] == errors[1] and len(errors[0]) < 400


@pytest.mark.parametrize(
    "source",
    [
        *("{{ [1, 2]|random }}", "{{ lipsum() }}", "{{ strftime_now('%d %-s') }}"),
        *(
            "{{ raise_exception }}",
            "{{ messages|map('string') }}",
            "{{ 'a' ~ cycler(1) }}",
            "{{ [messages.count]|string }}",
        ),
    ],
)
def test_texts_that_differ_from_run_to_run_are_errors(source: str) -> None:
    with pytest.raises(DataError, match="run to run|every process|time zone"):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        *("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}"),
        *(
            "{{ cycler.__init__.__globals__ }}",
            "{{ messages.count.__self__.__class__.x }}",
            "{% include '/etc/passwd' %}",
        ),
        *("{{ dict.fromkeys([1]) }}", "{{ 'x'.encode('idna') }}", "{{ (1).to_bytes(10**9, 'big') }}"),
        *("{{ 1 // 0 }}", "{{ [][1].x }}", "{{ raise_exception('\x1b[31m' * 9999) }}", "{% if %}", "{{ none() }}"),
        "{{ '\\ud800' }}",
    ],
)
def test_the_sandbox_holds_and_errors_are_messages(source: str) -> None:
    with pytest.raises(DataError, match="does not accept the messages") as raised:
        ChatTemplate(source, {}).render(CHAT)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 2000


def test_answers_among_characters_for_private_use() -> None:
    """A mark is found in one pass; if the chat has them all, it is a problem of that chat."""
    source = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    private = "".join(map(chr, range(0xE000, 0xF900)))
    text, spans = ChatTemplate(source, {}).answers([{"role": "assistant", "content": private * 20}])
    assert [text[first:last] for first, last in spans] == [private * 20]
    every = "".join(map(chr, itertools.chain(*chat_module._MARKS)))
    with pytest.raises(DataError, match="contains every private-use character"):
        ChatTemplate(source, {}).answers([{"role": "assistant", "content": every}])


def test_a_chat_of_thousands_of_messages_is_rendered_or_an_error_at_once() -> None:
    """Renderings of its beginnings take too many steps; with marked answers two renderings do."""
    turns = "{% for m in messages %}{{ m.role }}:{{ CONTENT }}.{% endfor %}"
    turns += "{% if add_generation_prompt %}assistant:{% endif %}"
    messages = [{"role": ("user", "assistant")[number % 2], "content": "text"} for number in range(8000)]
    with pytest.raises(DataError, match=r"answers among 8000 messages; .*{% generation %}"):
        ChatTemplate(turns.replace("CONTENT", "m.content"), {}).answers(messages)
    marked = "{% generation %}{{ m.content }}{% endgeneration %}" + "{# #}"
    _, spans = ChatTemplate(turns.replace("{{ CONTENT }}", marked), {}).answers(messages)
    assert len(spans) == 8000


TIMED = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def write_chats(folder: Path, *contents: str) -> list[str]:
    """Arguments of `prepare` for chats of one message each."""
    rows = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--input", f"c={folder / 'chats.jsonl'}", "--messages", "all", "--tokenizer-type", "CharLevelTokenizer"]
    given += ["--chat-template", str(folder / "chat.jinja"), "--valid-fraction", "0", "--test-fraction", "0"]
    return [*given, "--workers", "0", "--output", str(folder / "out")]


def texts_of(folder: Path) -> list[str]:
    shard, tokenizer = Shard(folder / "c_train"), load_saved_tokenizer(folder)
    return [tokenizer.decode(shard.document(number)) for number in range(shard.documents)]


def test_a_preparation_has_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts and a resumed command use the recorded one; a text that is generated later has its own."""
    (tmp_path / "chat.jinja").write_text(TIMED)
    given = write_chats(tmp_path, *(f"chat {number}" for number in range(50)))
    with monkeypatch.context() as patched:
        patched.setattr("megatron_coca.data.preparation.run.run_stages", lambda *_: (_ for _ in ()).throw(KeyError))
        with pytest.raises(KeyError):
            prepare.main(given)
    prepare.main([*given, "--part", "1/1"])
    prepare.main(given)
    texts = texts_of(tmp_path / "out")
    (time,) = {text.partition("chat")[0] for text in texts}
    chat = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]["chat"]
    assert ChatTemplate(TIMED, {}, chat["time"]).render([{"content": ""}]) == time
    saved = load_saved_tokenizer(tmp_path / "out").chat
    assert saved is not None and saved.now is None and saved.render([{"content": ""}]) != time
    again = [*given, "--output", str(tmp_path / "again"), "--chat-time"]
    prepare.main([*again, chat["time"]])
    for name in ("c_train.bin", "tokenizer_type.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("out", "again"))
    assert first.pop("made_from") != second.pop("made_from"), "the time is an input of the second command only"
    assert first == second
    with pytest.raises(DataError, match="chat_time: Input should be a valid datetime"):
        prepare.main([*again[:-2], str(tmp_path / "b"), "--chat-time", "now"])


def test_chats_of_any_depth_are_counted_problems(tmp_path: Path) -> None:
    """Whichever part reaches the limit of recursion: reading, writing, rendering."""
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.deep|tojson }}{{ m.deep }}{{ m.content }}{% endfor %}"
    )
    given = write_chats(tmp_path, "text")
    with (tmp_path / "chats.jsonl").open("a") as stream:
        for depth in range(100, 1100, 9):
            stream.write('{"messages": [{"role": "user", "deep": ' + "[" * depth + "]" * depth + "}]}\n")
    prepare.main([*given, "--max-faulty", "1"])
    (found,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"]
    assert found["records"] == 113 and found["problems"]["chat that cannot be rendered"] > 40


def test_one_endless_chat_is_a_counted_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "STEPS", 30_000)
    (tmp_path / "chat.jinja").write_text("{% for i in range(messages[0].content|int) %}x{% endfor %}")
    given = write_chats(tmp_path, "3", "99999", "2")
    prepare.main(given)
    assert texts_of(tmp_path / "out") == ["xxx", "xx"]
    (found,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"]
    assert found["problems"] == {"chat that cannot be rendered": 1} and "too many steps" in found["problems_named"][0]


def test_an_endless_template_of_a_downloaded_model_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the prompt, and where the end of a turn is looked for."""
    monkeypatch.setattr(chat_module, "STEPS", 30_000)
    config, tokenizer = load_config([], TINY | {"vocab_size": 512}), load_tokenizer("CharLevelTokenizer")
    given = ["--checkpoint", str(tmp_path / "run"), "--chat", "--prompt", "hello", "--max-new-tokens", "2"]
    for number, source in enumerate(
        (ENDLESS["loops"], "{% if not add_generation_prompt %}" + ENDLESS["loops"] + "{% endif %}")
    ):
        tokenizer.chat = ChatTemplate(source, {})
        folder = write_checkpoint(
            tmp_path / f"run{number}", config, talkative_model(config).state_dict(), tokenizer=tokenizer
        )
        with pytest.raises(DataError, match="too many steps"):
            generate.main([*given, "--checkpoint", str(folder)])


@pytest.mark.parametrize(
    "content",
    [
        '["a"]',
        '{"chat_template": 3}',
        '{"chat_template": [3, {"name": "default"}]}',
        "{broken",
        "[" * 9999,
        '{"a_token": [1]}',
    ],
)
def test_strange_files_of_a_folder_have_no_template(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert find_template(tmp_path) is None and find_rules(tmp_path) == TextRules()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="chat_template.jinja: .*cannot be read"):
        find_template(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [{"chat_template": 3}, {"chat_symbols": [1]}, {"chat_symbols": {"a": 1}}, {"chat_time": 5}, {"start_symbol": 5}],
)
def test_strange_descriptions_of_a_saved_tokenizer_are_errors(changed: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load_tokenizer("CharLevelTokenizer")
    tokenizer.chat = ChatTemplate("{{ strftime_now('%Y') }}", {}, "no time")
    tokenizer.save(tmp_path)
    loaded = load_saved_tokenizer(tmp_path).chat
    assert loaded == tokenizer.chat
    with pytest.raises(DataError, match="Invalid isoformat"):
        loaded.render(CHAT)
    path = tmp_path / "tokenizer_type.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(DataError, match=r"cannot be read \(.* not text\)"):
        load_saved_tokenizer(tmp_path)


def test_each_value_is_paid_before_it_is_made() -> None:
    """A method or filter with huge arguments, by place and by name, needs little memory."""
    methods = [f"{{{{ text.{name}(ARGUMENTS) }}}}" for name in METHODS[str]]
    filters = [f"{{{{ text|{name}(ARGUMENTS) }}}}" for name in jinja2.Environment().filters.keys() - REMOVED]
    given = ["10**9", "text", "text, text, 10**9", "tabsize=10**9", "width=text", "new=text, old='x'", "a=text"]
    text = "{% set text = 'x\\t\\n{a}{a}%s%s' * 2000 %}"
    tracemalloc.start()
    for source, arguments in itertools.product([*methods, *filters], given):
        with contextlib.suppress(DataError):
            ChatTemplate(text + source.replace("ARGUMENTS", arguments), {}).render([])
        compiled.cache_clear()
        assert tracemalloc.get_traced_memory()[1] < 1 << 27, (source, arguments)
    tracemalloc.stop()


def test_each_prefix_of_a_chat_has_the_budget_of_one_rendering() -> None:
    whole = Budget(1000, 100)
    part = whole.part()
    part.spend(60)
    assert whole.spent == 60
    with pytest.raises(TooManySteps):
        part.spend(41)
    whole.spend(890)
    with pytest.raises(TooManySteps):
        whole.part().spend(60)
