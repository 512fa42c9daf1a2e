"""Checks of configuration files that somebody else may have written: files in the folder of a checkpoint or of prepared
data.

Such a file may have been downloaded together with the checkpoint or the data. It describes a model, its training and
its data. It must not run code, connect to an address or write outside the working folder. The user can still name the
same code, address or folder in another file or in an override.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_coca import methods
from megatron_coca.config.neox_keys import ALIASES
from megatron_coca.config.schema import KEYS
from megatron_coca.support.regular_files import inside, read_regular
from megatron_coca.support.remote_files import is_url, not_read

DATA_FILES = ("data.yml", "data.yaml", "data.json")
STEP = re.compile("global_step[0-9]+")
DATA_PATHS = re.compile("(vocab|merge)_file|data_path|(train|valid|test)_(label_)?data_paths")
"""Keys that name files of data."""
PREPARED = ("manifest.json", "tokenizer_type.json", "*.idx", "*.remote")
"""Names of files next to the `data.yml` of prepared data, or next to the configuration of a checkpoint."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "*.gguf")
"""Names of files next to the configuration of another project's model."""
WRITTEN = ("save", "log_dir", "tensorboard_dir", "checkpoint_cache", "data_root")
"""Keys that name a folder to write to."""
CONNECTED = {
    "wandb_host": "names another computer",
    "hostfile": "names another computer",
    "master_addr": "names another computer",
    "wandb_team": "names the account that receives the metrics",
    "metric_sinks": "may name computers and accounts that receive the metrics",
}
"""Keys that name other computers or accounts to connect to, each with the reason for the message."""
EXTRA = "deepspeed_extra_args"
COMPUTED = frozenset(
    {
        "communication_data_type",
        "data_types",
        "prescale_gradients",
        "gradient_predivide_factor",
        "sparse_gradients",
        "comms_logger",
    }
)
"""The keys of DeepSpeed in `deepspeed_extra_args` that neither write files nor connect to other computers."""
DATA_KEYS = frozenset(
    {key for key, place in KEYS.items() if place.group == "data"} - set(WRITTEN)
    | {"vocab_size", "make_vocab_size_divisible_by"}
)
"""The keys that the `data.yml` of prepared data may set."""
OWN = "in an override or in your own configuration"


def may_be_downloaded(file: Path) -> bool:
    """Return True for a file in the folder of a checkpoint (of this project, GPT-NeoX or Hugging Face) or of prepared
    data. A file beside the step folders of a run is the user's own if the run saved in that folder and the folder is
    not a copy.
    """
    for path in _places(file):
        outer = path.parent.parent if path.parent.name == "configs" else path.parent
        if (
            path.name.lower() in DATA_FILES
            or any(STEP.fullmatch(folder.name) for folder in path.parents)
            or _has_any(path.parent, PREPARED)
            or _has_any(outer, ("*model_states.pt", *WEIGHTS))
            or _holds_run_from_elsewhere(outer)
        ):
            return True
    return False


def _holds_run_from_elsewhere(folder: Path) -> bool:
    """Return True if a folder has step folders, but no run saved a step into this folder."""
    steps = [path for path in folder.glob("global_step*") if STEP.fullmatch(path.name)]
    return bool(steps) and os.path.realpath(folder) not in map(_saved_in, steps)


def _saved_in(step: Path) -> str | None:
    """Return the folder in which the run saved a step, or None if the step does not record it."""
    try:
        saved = json.loads(read_regular(step / "meta.json"))["save"]
        return os.path.realpath(saved)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def belongs_to_data(file: Path, values: Mapping[str, Any]) -> bool:
    """Return True for a `data.yml` of prepared data: next to it are files that `prepare` writes, or its paths begin
    with `./`, which means its folder. Any other file of this name is the user's own.
    """
    if all(path.name.lower() not in DATA_FILES for path in _places(file)):
        return False
    beside = any(_has_any(path.parent, PREPARED) for path in _places(file))
    return beside or any(text.startswith("./") for text in _texts(list(values.values())))


def _has_any(folder: Path, patterns: Sequence[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _places(file: Path) -> tuple[Path, Path]:
    """Return the path of a file, and of its target if it is a link. A link in the Hub's cache and its target are in
    different folders.
    """
    return Path(os.path.abspath(file)), file.resolve()


def foreign_keys(file: Path, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for every key of the `data.yml` of prepared data that does not describe data, or that names
    a local path outside its folder. Paths are relative to the folder of the file, so `./NAME` is in this folder.
    """
    folder = Path(os.path.abspath(file)).parent
    for key, value in values.items():
        if ALIASES.get(key, key) not in DATA_KEYS:
            yield key, f"does not describe data, and prepared data may be untrusted; set the key {OWN}"
        paths = [text for text in _texts(value) if not is_url(text)] if DATA_PATHS.fullmatch(key) else []
        for path in paths:
            named = (
                os.path.normpath(folder / path) if path.startswith("./") else os.path.abspath(os.path.expanduser(path))
            )
            try:
                inside(folder, named, ValueError)
            except ValueError:
                yield key, f"{path:.80}: outside {folder}, and prepared data may be untrusted; set the key {OWN}"


def faults(values: Mapping[str, Any], where: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for every key that names an address, another computer or a folder outside the working
    folder, if the value comes from a file that may have been downloaded.

    Args:
        values: the values of all files and overrides together.
        where: the place of every key by dotted path, `file:line` for a key in a file.
    """
    known: dict[str, bool] = {}
    for key, value in _entries(values):
        inside = (place for path, place in where.items() if path.startswith(f"{key}."))
        place = where.get(key) or next(inside, None) or where.get(key.partition(".")[0], "")
        file = place if os.path.isfile(place) else place.rpartition(":")[0]
        if file not in known:
            known[file] = os.path.isfile(file) and may_be_downloaded(Path(file))
        if not known[file] or _is_own_save(key, value, Path(file)):
            continue
        if (problem := _problem(ALIASES.get(key, key), value)) is not None:
            yield key, problem


def _is_own_save(key: str, value: Any, file: Path) -> bool:
    """Return True for a save folder with the checkpoint of the configuration, because the run continues there."""
    folders = [os.path.realpath(folder) for folder in (file.parent, file.parent.parent)]
    return key == "save" and isinstance(value, str) and os.path.realpath(value) in folders


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key == EXTRA and isinstance(value, Mapping):
            yield from ((f"{EXTRA}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _problem(key: str, value: Any) -> str | None:
    """Return why a file that may have been downloaded must not set a key to a value, or None if it may."""
    addresses = [text for text in _texts(value) if is_url(text)]
    section, _, name = key.partition(".")
    if addresses:
        return not_read(addresses, f"name it {OWN}")
    if key in CONNECTED and value is not None:
        return _not_used(value, CONNECTED[key])
    if section == EXTRA and name and name not in COMPUTED and value is not None:
        return _not_used(value, "may write files or connect to other computers")
    if key == "zero_optimization" and any(os.sep in text or text == os.pardir for text in _texts(value)):
        return _not_used(value, "names a folder for offloaded states")
    if key in WRITTEN and isinstance(value, str) and not _is_below_here(value):
        return _not_used(value, "names a folder outside the working folder")
    return None


def _not_used(value: Any, what: str) -> str:
    return f"{value!s:.80}: not used, because this file may be untrusted and the value {what}; set the key {OWN}"


def _is_below_here(name: str) -> bool:
    """Return True for a path that is below the working folder, even after links are followed."""
    return not name.startswith("~") and Path(name).resolve().is_relative_to(Path.cwd().resolve())


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, including texts inside lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, Collection):
        for inner in value:
            yield from _texts(inner)


def not_run(names: Sequence[str]) -> str:
    """Return the message about Python files that a checkpoint names in `imports`."""
    files = ", ".join(name.partition(methods.MARK)[0] for name in names)
    return (
        f"{files}: not run, because checkpoints may be untrusted; read the file, then name it with imports=[FILE]"
        " in an override (--set imports=[FILE]) or in your own configuration"
    )
