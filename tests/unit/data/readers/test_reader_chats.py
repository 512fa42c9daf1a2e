"""Chats in the forms in which data sets store them: one record, whatever the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.data.readers.chats import chat_text
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import ReadingProblems, RejectedRecord, SourceSpec

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "sea"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "How is the sea?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CHAT = [ASKED, CALLED, {"role": "tool", "content": "calm"}, {"role": "assistant", "content": "It is calm."}]


def stored(value: Any) -> Any:
    """Return a value with every object and list below the first level of lists as JSON text."""
    return {key: json.dumps(each) if isinstance(each, dict | list) else each for key, each in value.items()}


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (json.dumps(CHAT), json.dumps([TOOL])),
        ([json.dumps(message) for message in CHAT], [json.dumps(TOOL)]),
        ([stored(message) for message in CHAT], [stored(TOOL)]),
        ([ASKED, CALLED | {"tool_calls": [{**CALL, "function": stored(CALL["function"])}]}, *CHAT[2:]], TOOL),
        ([{"tool_calls": None, "name": None, **message} for message in CHAT], [TOOL]),
        ([{"tool_calls": [], **message} for message in CHAT], [TOOL]),
        ([ASKED, {"role": "assistant", "tool_calls": [CALL | {"id": None}]}, *CHAT[2:]], [TOOL]),
        ([{**CHAT[0], "content": [{"type": "text", "text": "How is "}, "the sea?"]}, *CHAT[1:]], [TOOL]),
        ([{**CHAT[0], "content": b"How is the sea?"}, *CHAT[1:]], [TOOL]),
    ],
)
def test_every_stored_form_is_one_record(messages: Any, tools: Any) -> None:
    assert json.loads(chat_text(messages, tools)) == {"messages": CHAT, "tools": [TOOL]}
    assert chat_text(messages, tools) == chat_text(CHAT, [TOOL])


SYSTEM = {"role": "system", "content": "Be kind."}
SHARED = [{"from": "human", "value": "How is the sea?"}, {"from": "gpt", "value": "Calm."}]
ANSWERED = [ASKED, {"role": "assistant", "content": "Calm."}]


@pytest.mark.parametrize(
    ("messages", "system", "expected"),
    [
        (SHARED, "Be kind.", [SYSTEM, *ANSWERED]),
        (SHARED, b"Be kind.", [SYSTEM, *ANSWERED]),
        (SHARED, " ", ANSWERED),
        (SHARED, None, ANSWERED),
        ([SYSTEM, *ANSWERED], "Be kind.", [SYSTEM, *ANSWERED]),
    ],
)
def test_a_system_message_beside_the_messages_is_the_first_one(messages: Any, system: Any, expected: Any) -> None:
    assert json.loads(chat_text(messages, None, system))["messages"] == expected


@pytest.mark.parametrize(
    ("messages", "system", "kind"),
    [
        (SHARED, 3, "the system message is not text"),
        ([SYSTEM, *ANSWERED], "Be brief.", "two system messages"),
        ([ASKED, ANSWERED[1] | {"weight": 0.5}], None, "the weight of a message is not 0 or 1"),
        ([ASKED, ANSWERED[1] | {"train": "no"}], None, "the weight of a message is not 0 or 1"),
    ],
)
def test_unclear_systems_and_weights_are_faults(messages: Any, system: Any, kind: str) -> None:
    with pytest.raises(RejectedRecord, match=kind):
        chat_text(messages, None, system)


@pytest.mark.parametrize("without", [{"weight": 0}, {"train": False}, {"training": False}, {"trainable": False}])
def test_a_message_that_does_not_count_has_weight_0(without: dict[str, Any]) -> None:
    found = json.loads(chat_text([SHARED[0], SHARED[1] | without], None))["messages"]
    assert found == [ASKED, ANSWERED[1] | {"weight": 0}]
    counting = dict.fromkeys(without, 1)
    assert json.loads(chat_text([SHARED[0], SHARED[1] | counting], None))["messages"] == ANSWERED


def test_texts_that_look_like_json_stay_texts() -> None:
    messages = [{"role": "user", "content": '{"a": 1}'}, {"role": "assistant", "content": "[1]"}]
    assert json.loads(chat_text(messages, "")) == {"messages": messages, "tools": None}


@pytest.mark.parametrize("arguments", ['{"place": ', "sea", b"{'place': 'sea'}", '"sea"'])
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_arguments_that_are_not_json_are_faulty(arguments: str | bytes, key: str) -> None:
    """A template would print them as a text within JSON."""
    function = {"name": "look", "arguments": arguments}
    calls: Any = [{"type": "function", "function": function}] if key == "tool_calls" else function
    with pytest.raises(RejectedRecord, match="the arguments of a call are not a JSON object"):
        chat_text([{"role": "user", "content": "x"}, {"role": "assistant", "content": None, key: calls}], None)


def test_null_arguments_of_a_call_in_json_are_kept() -> None:
    call = {"function": {"name": "look", "arguments": {"place": None}}}
    found = json.loads(chat_text([{"role": "assistant", "content": "", "tool_calls": [call]}], None))
    assert found["messages"][0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("messages", "tools", "kind"),
    [
        ("not JSON", None, "messages are not a list of objects"),
        ([ASKED, 3], None, "messages are not a list of objects"),
        (CHAT, "a tool", "tools are not a list of objects"),
        (CHAT, ["a tool"], "tools are not a list of objects"),
        ([CALLED | {"tool_calls": "look(sea)"}], None, "tool_calls are not a list of objects"),
        ([CALLED | {"tool_calls": ["look(sea)"]}], None, "tool_calls are not a list of objects"),
        ([{"role": "user", "content": {"text": "x"}}], None, "the content of a message is not text"),
        ([{"role": "user", "content": [1, 2]}], None, "the content of a message is not text"),
        ([{"content": "x"}], None, "a message has no role"),
    ],
)
def test_other_forms_are_faults(messages: Any, tools: Any, kind: str) -> None:
    with pytest.raises(RejectedRecord, match=kind):
        chat_text(messages, tools)


def read(path: Path, **spec: Any) -> list[tuple[str, str]]:
    """Return (text, set) of all documents of a file. Faults are errors."""
    reader, problems = FileReader(SourceSpec("s", [path], **spec)), ReadingProblems(strict=True)
    chunks = reader.chunks(reader.units()[0])
    return [(document.text, document.part) for chunk in chunks for document in reader.documents(chunk, problems)]


ROWS = [
    {"messages": CHAT, "tools": [TOOL], "meta": {"pile_set_name": "A"}},
    {"messages": CHAT[:1] + CHAT[3:], "tools": None, "meta": {"pile_set_name": "B"}},
]
"""The first chat has keys that the second has not."""


@pytest.fixture
def as_lines(tmp_path: Path) -> list[tuple[str, str]]:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return read(path, messages="answers", divide=True)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_gives_the_records_of_json_lines(tmp_path: Path, name: str, as_lines: list[tuple[str, str]]) -> None:
    """A struct gives every message all keys, so that absent keys are null."""
    write(tmp_path / name, arrow.Table.from_pylist(ROWS))
    assert read(tmp_path / name, messages="answers", divide=True) == as_lines


@pytest.mark.parametrize("known", [True, False])
def test_columns_of_json_give_the_records_of_json_lines(
    tmp_path: Path, known: bool, as_lines: list[tuple[str, str]]
) -> None:
    """`datasets` writes `Json` as the extension type arrow.json, which old versions of pyarrow do not know."""
    texts = {key: arrow.array([json.dumps(row[key]) for row in ROWS]) for key in ROWS[0]}
    if known:
        columns = {key: arrow.ExtensionArray.from_storage(arrow.json_(), column) for key, column in texts.items()}
        table = arrow.table(columns)
    else:
        fields = [arrow.field(key, arrow.string(), metadata={"ARROW:extension:name": "arrow.json"}) for key in texts]
        table = arrow.table(list(texts.values()), schema=arrow.schema(fields))
    write(tmp_path / "a.parquet", table)
    assert read(tmp_path / "a.parquet", messages="answers", divide=True) == as_lines


def test_a_list_of_json_gives_the_records_of_json_lines(tmp_path: Path, as_lines: list[tuple[str, str]]) -> None:
    """This is how `datasets` stores `List(Json())`."""
    kind = arrow.list_(arrow.json_())
    messages = arrow.array([list(map(json.dumps, row["messages"])) for row in ROWS], arrow.list_(arrow.string()))
    columns = {"messages": messages.cast(kind), "tools": arrow.array([[json.dumps(TOOL)], None])}
    write(tmp_path / "a.parquet", arrow.table({**columns, "meta": [row["meta"] for row in ROWS]}))
    assert read(tmp_path / "a.parquet", messages="answers", divide=True) == as_lines


def write(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    with arrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
