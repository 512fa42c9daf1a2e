"""A task that cannot be loaded or run is told under `missing`, and the others go on."""

from pathlib import Path

import pytest

from tests.parity.exported import NEOX, random_checkpoint
from tests.unit.evaluation.harness_cases import CHOICE, UNTIL, command, documents, read, write_documents

BROKEN = CHOICE.replace("local_choice", "broken")

CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "absent documents": (BROKEN.replace("DATA", "/absent.jsonl"), ("FileNotFoundError", "/absent.jsonl")),
    "empty documents": (BROKEN.replace("DATA", "EMPTY"), ("StopIteration",)),
    "bad documents": (BROKEN.replace("DATA", "BAD"), ("caused by ArrowInvalid: JSON",)),
    "unreachable": (BROKEN.replace("dataset_path: json", "dataset_path: /no/such"), ("/no/such",)),
    "field": (BROKEN.replace("{{question}}", "{{question.a.b}}"), ("UndefinedError",)),
    "filter": (BROKEN.replace("{{question}}", "{{question | nothing}}"), ("nothing",)),
    "gold": (BROKEN.replace("doc_to_target: gold", "doc_to_target: 7"), ("IndexError",)),
    "choice": (BROKEN.replace('"{{choices}}"', '["", "b"]'), ("IndexError",)),
    "function": (BROKEN + "process_docs: !function nothing.here\n", ("nothing",)),
    "metric only": (BROKEN.replace("{metric: acc_norm}", "{metric: acc_nrom}"), ("KeyError",)),
    "sampling": (
        UNTIL.replace("local_until", "broken").replace("STOPS", '["."]').replace("do_sample: false", "temperature: 1"),
        ("generation_kwargs: do_sample",),
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("neox") / "run", **NEOX)


def write(folder: Path, broken: str) -> Path:
    """A task that cannot be run, beside one that can."""
    files = {"DATA": write_documents(folder / "documents.jsonl", documents())}
    files |= {"EMPTY": folder / "empty.jsonl", "BAD": folder / "bad.jsonl"}
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text('{"question": "a"}\n{"question": \n')
    for name, text in {"broken": broken, "choice": CHOICE}.items():
        for word, path in files.items():
            text = text.replace(word, str(path))
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_others_go_on(name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = CASES[name]
    output = tmp_path / "a.json"
    options = ["--limit", 3, "--output", output]
    assert command(checkpoint, write(tmp_path, text), "broken,local_choice", *options) == 2
    result = read(output)
    (missing,) = result.missing
    assert (missing.at, missing.kind) == ("task broken", "failed")
    assert all(each in missing.reason for each in said) and "\n" not in missing.reason
    assert [cell.task for cell in result.results] == ["local_choice"]
    assert missing.reason in capsys.readouterr().err


def test_more_examples_than_documents(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    assert command(checkpoint, write(tmp_path, BROKEN), "local_choice", "--num-fewshot", 20, "--output", output) == 2
    assert "ValueError" in read(output).missing[0].reason


def test_a_mended_task_is_missing_no_more(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    folder = write(tmp_path, BROKEN.replace("{{question}}", "{{question.a.b}}"))
    assert command(checkpoint, folder, "broken", "--limit", 3, "--output", output) == 2
    assert command(checkpoint, write(tmp_path, BROKEN), "broken", "--limit", 3, "--output", output) == 0
    assert not read(output).missing
