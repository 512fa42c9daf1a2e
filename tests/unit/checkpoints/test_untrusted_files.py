"""Nothing in a downloaded file is run: every file here has a payload that would write a marker.

tests/untrusted_files.md lists them.
"""

import ast
import io
import json
import os
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from megatron_coca import cli
from megatron_coca.ablation.file import read_ablation
from megatron_coca.checkpoints import CheckpointError, load_model
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.neox.optimizer import TYPES
from megatron_coca.checkpoints.weights import RANDOM_STATE, load_pickle, names_in_pickle, open_pickles
from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import CorpusSource, DataError, Execution, Rules, load_tokenizer, prepare
from megatron_coca.data.preparation.block_files import _decoded
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.recipe import read_recipe
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.folders import corpus_files, saved_splits
from megatron_coca.data.readers.source import ReadingProblems, SourceSpec
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.data.tokenizers.kinds import DESCRIPTION
from megatron_coca.evaluation.report.curves import metrics
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.suite import read_suite
from megatron_coca.sinks.json_lines import continues
from megatron_coca.training.randomness import load_rng_states
from megatron_coca.work.processes import PROGRAM
from tests.checkpoint_files import TINY, write_checkpoint

ROOT = Path(__file__).parents[3]


class Payload:
    """Makes the folder `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    marker = tmp_path / "marker"
    yield marker
    assert not marker.exists()


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("allowed", [(), RANDOM_STATE, tuple(TYPES)], ids=["weights", "GPT-NeoX", "its optimizer"])
@pytest.mark.parametrize("place", [lambda evil: evil, lambda evil: {"a": [evil]}, lambda evil: {evil: 1}])
def test_pickles(allowed: Any, place: Callable[[Any], Any], marker: Path, tmp_path: Path) -> None:
    """Weights of Hugging Face and GPT-NeoX, its optimizer states, and our random states have one reader."""
    path = tmp_path / "file.pt"
    for write in (
        lambda content: torch.save(content, path),
        lambda content: torch.save(content, path, _use_new_zipfile_serialization=False),
        lambda content: path.write_bytes(pickle.dumps(content)),
    ):
        write(place(Payload(marker)))
        with pytest.raises(CheckpointError, match="contains objects other than tensors|a pickle without weights"):
            load_pickle(path, allowed)
        with pytest.raises(CheckpointError, match="contains objects other than tensors|a pickle without weights"):
            load_rng_states(path)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    """A file of some kilobytes could otherwise fill the memory."""
    plain, path = tmp_path / "plain.bin", tmp_path / "bomb.bin"
    torch.save({"a": torch.zeros(2)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            padding = b"\0" * (1 << 24) if entry.filename.endswith("data.pkl") else b""
            target.writestr(entry.filename, source.read(entry) + padding)
    assert path.stat().st_size < 1 << 17
    for load in (load_pickle, names_in_pickle, load_rng_states):
        with pytest.raises(CheckpointError, match=r"bomb.bin: .*data.pkl is compressed \(16,.* bytes\)"):
            load(path)
    assert names_in_pickle(plain) == ["a"]


def test_nested_tensors(tmp_path: Path) -> None:
    path = tmp_path / "nested.bin"
    torch.save({"a": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}, path)
    with pytest.raises(CheckpointError, match="a has nested tensors and torch.float32"):
        open_pickles({"a": path}, tmp_path)


def test_arrays_of_objects(marker: Path, tmp_path: Path) -> None:
    """Blocks that another host tokenized."""
    stream = io.BytesIO()
    np.savez(stream, facts=np.array([Payload(marker)], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        _decoded(stream.getvalue())


def test_types_in_parquet_files(marker: Path, tmp_path: Path) -> None:
    """pyarrow before 14.0.1 unpickled the extension types of a file."""
    name = {"ARROW:extension:name": "arrow.py_extension_type"}
    name |= {"ARROW:extension:metadata": pickle.dumps(Payload(marker), protocol=0)}
    field = pyarrow.field("text", pyarrow.string(), metadata=name)
    table = pyarrow.table({"text": ["a text"] * 9}, schema=pyarrow.schema([field]))
    parquet.write_table(table, tmp_path / "a.parquet")
    source = CorpusSource(SourceSpec("a", [tmp_path / "a.parquet"]))
    rules, quiet = Rules(valid_fraction=0.1, test_fraction=0.1), Execution(0, progress=False)
    prepare([source], tmp_path / "out", load_tokenizer("CharLevelTokenizer"), rules, quiet)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir [MARKER]", "!!python/object/new:os.mkdir [MARKER]"])
@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda path: load_config([path]), ConfigError),
        (read_suite, EvaluationError),
        (read_ablation, EvaluationError),
        (read_recipe, DataError),
    ],
    ids=["configuration", "suite", "ablation", "recipe"],
)
def test_yaml(read: Callable[[Path], Any], error: type[Exception], tag: str, marker: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(f"title: {tag.replace('MARKER', json.dumps(str(marker)))}\n")
    with pytest.raises(error, match="could not determine a constructor|unknown key"):
        read(tmp_path / "a.yml")


def test_code_beside_a_hugging_face_model(marker: Path, tmp_path: Path) -> None:
    """`auto_map` and a tokenizer's class name files that transformers would run with trust_remote_code."""
    folder = export(write_checkpoint(tmp_path / "run", load_config([], TINY)), tmp_path / "hf").folder
    code = f"import os\nos.mkdir({str(marker)!r})\n"
    for path in (*folder.glob("*.py"), folder / "tokenization_evil.py", folder / "__init__.py"):
        path.write_text(code)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "auto_map" in json.loads((folder / "config.json").read_text())
    load_model(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.mkdir('MARKER') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('MARKER', 'w') }}",
        "{{ strftime_now.__globals__ }}",
        "{{ messages|map(attribute='__class__')|list }}{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}{{ ('%s' % messages).__class__ }}",
        "{% set f = 'a'.format %}{{ f.__self__.__class__.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include 'file.jinja' %}",
        "{% import 'os' as os %}{{ os.mkdir('MARKER') }}",
    ],
)
def test_chat_templates(template: str, marker: Path) -> None:
    text = template.replace("MARKER", str(marker))
    with suppress(DataError):
        assert ChatTemplate(text, {}).render([{"role": "user", "content": "a"}]) == ""


def test_scripts_of_data_sets(marker: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "set.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    source = CorpusSource(SourceSpec("a", [folder], reader="huggingface"))
    rules, quiet = Rules(valid_fraction=0.1, test_fraction=0.1), Execution(0, progress=False)
    with pytest.raises(DataError, match="cannot be read by datasets"):
        prepare([source], tmp_path / "out", load_tokenizer("CharLevelTokenizer"), rules, quiet)


COMMANDS = {
    "train": ("train none.yml", "none.yml: no such file"),
    "workers": ("prepare --input a=a.jsonl --tokenizer CharLevelTokenizer --workers 1 --output out", "no usable doc"),
}


@pytest.mark.parametrize(("command", "said"), COMMANDS.values(), ids=COMMANDS)
def test_modules_in_the_working_folder(command: str, said: str, marker: Path, tmp_path: Path) -> None:
    """A command that is started inside a downloaded folder imports nothing from it; nor do the processes it starts."""
    names = ("torch", "yaml", "pydantic", "numpy", "megatron_coca", "typing_extensions", "sitecustomize")
    for name in (*names, "multiprocessing", "concurrent"):
        (tmp_path / f"{name}.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [*PROGRAM, *command.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_a_link_out_of_a_model_is_not_copied_into_an_export(name: str, tmp_path: Path) -> None:
    """An export may be uploaded; the cache of the hub links to the files beside it."""
    saved = write_checkpoint(tmp_path / "run", load_config([], TINY | {"pos_emb": "rotary"}))
    folder = export(saved, tmp_path / "hf").folder
    (tmp_path / "private").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=f"{name}: a link to .*private, which is outside the folder"):
        export(folder, tmp_path / "out")
    snapshot = tmp_path / "models--me--it" / "snapshots" / "abc"
    blobs = tmp_path / "models--me--it" / "blobs"
    shutil.copytree(folder, snapshot, symlinks=True)
    blobs.mkdir()
    (snapshot / name).unlink()
    (blobs / "0123").write_text("{}")
    (snapshot / name).symlink_to(Path("../../blobs/0123"))
    export(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / name).exists() and not (tmp_path / "out" / name).is_symlink()


@pytest.mark.parametrize("where", ["checkpoint", "--tokenizer"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_an_export_publishes_no_code_of_others(name: str, where: str, tmp_path: Path) -> None:
    """The model card tells readers to pass trust_remote_code=True for the modelling file of an export."""
    saved = write_checkpoint(tmp_path / "run", load_config([], TINY))
    folder = export(saved, tmp_path / "hf").folder
    config = json.loads((folder / name).read_text()) | {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    config |= {"tokenizer_class": "Evil"}
    (folder / name).write_text(json.dumps(config).replace("auto_map", "auto\\u005fmap"))
    (folder / "tokenization_evil.py").write_text("class Evil: pass\n")
    made = export(
        folder if where == "checkpoint" else saved,
        tmp_path / "out",
        tokenizer=None if where == "checkpoint" else folder,
    )
    assert f"{folder / name}: auto_map is left out" in str(made.tokenizer_note)
    content = json.loads((tmp_path / "out" / name).read_text())
    assert "auto_map" not in content and content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert [path.name for path in (tmp_path / "out").glob("*.py")] == ["modeling_coca.py"]


LINKED = (
    *("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "tokenizer.json", "merges.txt"),
    "special_tokens_map.json",
)


@pytest.mark.parametrize("name", LINKED)
def test_a_link_among_tokenizer_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its content would be published by an export of the imported or trained model."""
    folder = export(write_checkpoint(tmp_path / "run", load_config([], TINY)), tmp_path / "hf").folder
    private = tmp_path / "private"
    private.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    text = tmp_path / "a.txt"
    text.write_text("a text. " * 99)
    out = str(tmp_path / "out")
    commands = [
        ["import", str(folder), out],
        ["export", "huggingface", str(folder), out],
        ["export", "huggingface", str(tmp_path / "run"), out, "--tokenizer", str(folder)],
        ["train", str(folder), "train_iters=1", "optimizer.params.lr=0.1"],
        ["generate", "--checkpoint", str(folder), "--prompt", "a"],
        [
            "prepare",
            "--input",
            f"a={text}",
            "--tokenizer-type",
            "HFTokenizer",
            "--vocab-file",
            str(folder),
            "--output",
            out,
        ],
    ]
    for command in commands:
        assert cli.main(command) == 2, command
        assert f"{folder / name}: a link to {private}, which is outside the folder" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_the_cache_of_the_hub_has_links_to_blobs(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--it"
    folder = cache / "snapshots" / "abc" / "run" / "tokenizer"
    (cache / "blobs").mkdir(parents=True)
    tokenizer_of(tmp_path / "hf").save(folder)
    (folder / "tokenizer.json").rename(cache / "blobs" / "0123")
    (folder / "tokenizer.json").symlink_to(Path("../../../../blobs/0123"))
    assert load_saved_tokenizer(folder).vocab_size
    moved = cache.rename(tmp_path / "other")
    with pytest.raises(DataError, match="outside the folder"):
        load_saved_tokenizer(moved / folder.relative_to(cache))


def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(
        "HFTokenizer", export(write_checkpoint(folder / "run", load_config([], TINY)), folder / "hf").folder
    )


def test_a_saved_tokenizer_names_no_file_outside(tmp_path: Path) -> None:
    load_tokenizer("CharLevelTokenizer").save(tmp_path / "saved")
    description = tmp_path / "saved" / DESCRIPTION
    for name in ("../private.json", str(tmp_path / "private.json")):
        content = {"tokenizer_type": "HFTokenizer", "fingerprint": "0", "vocab_file": name}
        description.write_text(json.dumps(content))
        with pytest.raises(DataError, match="outside the folder"):
            load_saved_tokenizer(tmp_path / "saved")


@pytest.mark.parametrize("name", ["../private.arrow", "ABSOLUTE", "link.arrow", 3])
def test_a_saved_data_set_names_no_file_outside(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "link.arrow").symlink_to(tmp_path / "private.arrow")
    name = str(tmp_path / "private.arrow") if name == "ABSOLUTE" else name
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="is no file name|is outside the folder"):
        corpus_files([folder])


@pytest.mark.parametrize("named", ["ABSOLUTE", "../private.jsonl", "http://127.0.0.1:1/a.jsonl", "zip://a::private"])
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_the_description_of_a_data_set_names_no_file_outside(named: str, file: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "private.jsonl").write_text('{"text": "a secret"}\n' * 9)
    (tmp_path / "set" / "a.jsonl").write_text('{"text": "a text"}\n' * 9)
    reader = SourceSpec("a", [tmp_path / "set"], reader="huggingface")
    assert [document.text for document in _documents(reader)] == ["a text"] * 9
    named = str(tmp_path / "private.jsonl") if named == "ABSOLUTE" else named
    description = json.dumps(
        {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": named}]}]}
    )
    (tmp_path / "set" / file).write_text(f"---\n{description}\n---\n" if file == "README.md" else description)
    with pytest.raises(DataError, match="which is outside the data set"):
        assert all(document.text == "a text" for document in _documents(reader))
        raise DataError("not read, which is outside the data set")


def _documents(spec: SourceSpec) -> list[Any]:
    reader, problems = open_reader(spec), ReadingProblems()
    chunks = (chunk for unit in reader.units() for chunk in reader.chunks(unit))
    return [document for chunk in chunks for document in reader.documents(chunk, problems)]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("manifest.json", lambda folder: read_manifest(folder / "manifest.json")),
        ("tokenizer_type.json", load_saved_tokenizer),
        ("dataset_dict.json", saved_splits),
    ],
)
def test_very_many_levels_of_json_are_an_error(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    """Python's reader of JSON ends in a RecursionError."""
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(DataError, match=name):
        read(tmp_path)


def test_metrics_of_very_many_levels_are_dropped(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "metrics_run.json"):
        (tmp_path / name).write_text("[" * 100_000 + "\n")
    assert list(metrics(tmp_path)) == [] and not continues(tmp_path, "run")


BUILTIN = ("eval", "exec", "compile", "__import__")
OWN_CODE = "evaluation/report/notebook.py"
"""Runs the cells of a report's notebook, which this package has just written."""
RUNNING: dict[str, tuple[str, ...]] = {
    "exec_module": (
        "methods/user_methods.py",
        "checkpoints/huggingface/transformers_check.py",
    ),  # the latter for the file that it has just written
    "spec_from_file_location": ("methods/user_methods.py", "checkpoints/huggingface/transformers_check.py"),
    "from_pretrained": (
        "checkpoints/huggingface/transformers_check.py",
        "evaluation/tasks/lm_eval/data.py",
        "evaluation/tasks/lm_eval/ruler_lengths.py",
    ),
    "run_path": ("neox_plugin/__main__.py",),
    "import_module": (
        "__init__.py",
        "attention/build.py",  # the backends that config/backends.py declares
        "checkpoints/__init__.py",
        "cli.py",
        "commands/evaluate.py",
        "evaluation/__init__.py",
        "evaluation/report/sections.py",
        "evaluation/tasks/__init__.py",  # the tasks' own declarations
        "evaluation/tasks/lm_eval/model.py",
        "evaluation/tasks/lm_eval/ruler_lengths.py",  # modules of the harness
        "neox_plugin/upstream.py",
    ),
    "extractall": (),
    "unpack_archive": (),
    "system": (),
    "unsafe_load": (),
    "full_load": (),
    "load_checkpoint": ("checkpoints/load.py",),
}
"""Functions that can run code of a file, and the only files of the package that may call them."""


def test_code_beside_a_tokenizer_of_a_task(tmp_path: Path) -> None:
    """Tasks of lm-evaluation-harness open the tokenizer that the metadata name, and ask for its code."""
    from transformers import AutoTokenizer

    from megatron_coca.evaluation.tasks.lm_eval.data import TaskData

    folder, ran = tmp_path / "tokenizer", tmp_path / "ran"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}})
    )
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Mine: pass\n")
    with TaskData().provided(seed=1), suppress(Exception):
        AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)
    assert not ran.exists()
    with suppress(Exception):
        AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)
    assert ran.exists(), "transformers itself runs it"


def test_no_other_way_from_a_file_to_code() -> None:
    """What is called anywhere in the package; a new entry needs a row in tests/untrusted_files.md and a test here."""
    found: list[str] = []
    for path in sorted((ROOT / "megatron_coca").rglob("*.py")):
        name = str(path.relative_to(ROOT / "megatron_coca"))
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            function = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            owner = call.func.value.id if _is_attribute_of_name(call.func) else ""
            given = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
            wrong = [
                function in BUILTIN and isinstance(call.func, ast.Name) and name != OWN_CODE,
                name not in RUNNING.get(function, (name,)),
                owner == "torch" and function == "load" and given.get("weights_only") is not True,
                owner in ("np", "numpy") and function == "load" and given.get("allow_pickle") is not False,
                owner in ("pickle", "marshal", "dill", "shelve", "joblib", "cloudpickle"),
                owner == "yaml" and function in ("load", "load_all"),
                given.get("shell") is True or given.get("trust_remote_code") is True,
            ]
            found += [f"{name}:{call.lineno}: {owner}.{function}"] if any(wrong) else []
    assert not found


def _is_attribute_of_name(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
