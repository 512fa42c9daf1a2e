"""Nothing in a downloaded file is run: every file here has a payload that would write a marker (docs/faults.md)."""

import ast
import io
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from megatron_coca.ablation.grid import read_ablation
from megatron_coca.checkpoints import CheckpointError, load_model
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.neox.optimizer import TYPES
from megatron_coca.checkpoints.weights import RANDOM_STATE, load_pickle
from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import CorpusSource, DataError, Execution, Rules, load_tokenizer, prepare
from megatron_coca.data.preparation.block_files import _decoded
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.recipe import read_recipe
from megatron_coca.data.readers.folders import saved_splits
from megatron_coca.data.readers.source import SourceSpec
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.evaluation.report.curves import metrics
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.suite import read_suite
from megatron_coca.support.processes import PROGRAM
from megatron_coca.training.randomness import load_rng_states
from megatron_coca.training.sinks import _continues
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
    assert list(metrics(tmp_path)) == [] and not _continues(tmp_path, "run")


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
        "evaluation/tasks/lm_eval_data.py",
        "evaluation/tasks/ruler_lengths.py",
    ),
    "run_path": ("neox_plugin/__main__.py",),
    "import_module": (
        "__init__.py",
        "checkpoints/__init__.py",
        "cli.py",
        "evaluation/__init__.py",
        "evaluation/cli.py",
        "evaluation/subcommands.py",
        "evaluation/tasks/lm_eval_model.py",
        "evaluation/tasks/ruler_lengths.py",  # modules of the harness
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

    from megatron_coca.evaluation.tasks.lm_eval_data import TaskData

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
    """What is called anywhere in the package; a new entry needs a row in docs/faults.md and a test here."""
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
