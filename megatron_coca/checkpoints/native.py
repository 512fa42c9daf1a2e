"""The folder layout of a checkpoint, written so that it is complete or absent.

    <save>/.lock                        held by the run that trains into the folder
    <save>/latest                       the newest step's folder name
    <save>/aside/                       checkpoints that were found damaged, lie on a branch that was left, or were
                                        written again
    <save>/global_step100/manifest.json size and sha256 of every file below, written last
                          meta.json     step, code and library versions, parallel layout
                          config.yml    the resolved configuration
                          model.safetensors  all weights, in the training dtype
                          tokenizer/    the tokenizer's files
                          state/        float32 weights and optimizer states, a file per rank (state.py)
                          rng/          one random state per rank

One that was imported holds weights only, which its manifest says: it has no state/ and no rng/.

A checkpoint is filled in under a hidden name beside its final one, hashed, flushed to disk and only then renamed;
`latest` moves last.
"""

import json
import logging
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import count
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_coca.checkpoints.checksums import Comparison, describe
from megatron_coca.checkpoints.errors import CheckpointError, UnreadableError


def code_versions() -> dict[str, str]:
    """Versions of this package, its commit where the sources are a git checkout, and the libraries that decide
    numbers.
    """
    versions = {name: version(name) for name in ("torch", "deepspeed")}
    source = Path(__file__).resolve().parents[2]
    git = shutil.which("git")
    if git and (source / ".git").exists():
        answer = subprocess.run(
            [git, "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        if answer.returncode == 0:
            versions["commit"] = answer.stdout.strip()
    return versions


logger = logging.getLogger(__name__)

CONFIG, META, MANIFEST, WEIGHTS, TOKENIZER, STATE, RNG = (
    "config.yml",
    "meta.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer",
    "state",
    "rng",
)
LATEST = "latest"
LOCK = ".lock"
ASIDE = "aside"
FORMAT = 2
READABLE = (1, 2)
"""Format 1 had DeepSpeed's own files in place of `state/`: its weights can be read, a run cannot go on from it."""
EVERYTHING, WEIGHTS_ONLY = "run", "weights"
"""What a checkpoint may hold: all that a run needs to go on, or a model alone."""
REQUIRED = {
    EVERYTHING: (CONFIG, META, WEIGHTS, f"{STATE}/", f"{RNG}/rank_0.pt"),
    WEIGHTS_ONLY: (CONFIG, META, WEIGHTS),
}
"""What a manifest of the current format lists at least, by what the checkpoint holds; of a folder, one file in it."""
_STEP = re.compile(r"global_step(0|[1-9][0-9]{0,17})")
_LONGEST_NAME = 255
"""Bytes of a file's name, as file systems limit it."""


def step_folder(save: Path, step: int) -> Path:
    """Where the checkpoint of `step` (completed iterations) lies under the run's `save` folder."""
    return save / f"global_step{step}"


def parse_step(name: str) -> int | None:
    """The step that a folder's name says, None where it is not the name of a checkpoint.

    A name with leading zeros was not written by a run.
    """
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def steps(save: Path) -> list[int]:
    """The steps of all complete checkpoints under `save`, ascending; without those whose manifest cannot be looked at."""
    complete = []
    for step in begun_steps(save):
        with suppress(UnreadableError):
            complete += [step] if _has_manifest(step_folder(save, step)) else []
    return complete


def begun_steps(save: Path) -> list[int]:
    """The steps of all checkpoints under `save`, ascending; those that have lost their manifest too.

    A name with leading zeros was not written by a run, and is left alone.

    Raises:
        UnreadableError: the folder cannot be listed.
    """
    try:
        with os.scandir(save) as entries:
            found = [step for each in entries if (step := parse_step(each.name)) is not None and _is_folder(each)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError.of(save, error) from error
    return sorted(found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # whoever opens it is told why
        return True


def _has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest. Raises UnreadableError where that cannot be seen."""
    try:
        return stat.S_ISREG((folder / MANIFEST).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadableError.of(folder / MANIFEST, error) from error


def partial_folder(save: Path, step: int) -> Path:
    """Where the checkpoint of `step` is filled in before it is complete."""
    return save / f".global_step{step}.partial"


def begin(save: Path, step: int) -> Path:
    """An empty folder to fill in; whatever an interrupted save left behind is removed."""
    sweep(save)
    partial = partial_folder(save, step)
    partial.mkdir(parents=True)
    return partial


def sweep(save: Path) -> None:
    """Remove what interrupted saves and removals have left behind."""
    for leftover in save.glob(".global_step*.partial"):
        remove(leftover)


def remove(path: Path) -> None:
    """Remove a folder with all in it, a file, or a symbolic link but not what it leads to; nothing where there is
    none.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def commit(
    save: Path,
    step: int,
    described: Mapping[str, Mapping[str, Any]] | None = None,
    holds: str = EVERYTHING,
    manifest_format: int = FORMAT,
) -> Path:
    """Hash, flush and rename the filled folder of `step`, then move `latest`. Returns the final folder.

    `described` says of some files, by name within the folder, what `describe` gives: these were flushed by those who
    wrote them and are not read again. `holds` is a key of `REQUIRED`, and `manifest_format` one of `READABLE`: that of the
    checkpoint that is copied. A folder of this step that is there already, for
    example because it could not be read when the run started, is kept in `aside/`. Once the new one is renamed the
    checkpoint is complete: what fails after that is told in a warning.
    """
    partial, final = partial_folder(save, step), step_folder(save, step)
    done = dict(described or {})
    others = [name for name in files(partial) if name not in done]
    listed = done | {name: describe(partial / name) for name in others}
    manifest = {"format": manifest_format, "holds": holds, "files": listed}
    write_json(partial / MANIFEST, manifest)
    for path in (*(partial / name for name in (*others, MANIFEST)), *_folders(partial)):
        flush(path)
    if os.path.lexists(final):
        logger.warning("%s is written again; the folder of this name is kept as %s", final, set_aside(final))
    partial.rename(final)
    flush(save)
    try:
        _write_atomically(save / LATEST, final.name)
    except OSError as error:
        logger.warning("%s is complete, but %s may not name it: %s", final, LATEST, error)
    return final


def abandon(save: Path, step: int) -> None:
    """Remove a folder that could not be filled in."""
    shutil.rmtree(partial_folder(save, step), ignore_errors=True)


def prune(save: Path, keep_last: int | None, keep_every: int | None = None) -> None:
    """Remove all but the `keep_last` checkpoints of the highest steps, those of steps that are multiples of
    `keep_every`, and the one that `latest` names (`keep_last` None keeps all).
    """
    for step in superseded(steps(save), keep_last, keep_every):
        folder = step_folder(save, step)
        if folder.name == read_latest(save):
            continue
        doomed = partial_folder(save, step)
        folder.rename(doomed)
        remove(doomed)


def superseded(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Those of ascending `steps` that are neither among the `keep_last` last ones nor multiples of `keep_every`; none
    where `keep_last` is None.
    """
    older = steps[:-keep_last] if keep_last else []
    return [step for step in older if not (keep_every and step % keep_every == 0)]


def set_aside(folder: Path) -> Path:
    """Move a checkpoint to where no reader looks, under a free name; returns its new place.

    Moving a folder into another one takes the permission to write it; where that is missing it is renamed in its place.
    """
    shelf = folder.parent / ASIDE
    shelf.mkdir(exist_ok=True)
    free = _free_name(shelf / folder.name)
    try:
        folder.rename(free)
    except PermissionError:
        free = _free_name(folder.with_name(f"{folder.name}.{ASIDE}"))
        folder.rename(free)
    flush(folder.parent)
    return free


def _free_name(path: Path) -> Path:
    names = (path.with_name(path.name + (f".{number}" if number else "")) for number in count())
    return next(place for place in names if not os.path.lexists(place))


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    step = parse_step(folder.name)
    assert step is not None, "checkpoints are named by their steps"
    return step


def copy(folder: Path, target: Path) -> Path:
    """Copy a complete checkpoint into the save folder `target`, complete or absent there as well; returns the copy."""
    step = step_of(folder)
    partial = begin(target, step)
    manifest = _read_manifest(folder)
    described = manifest["files"]
    for name in described:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, partial / name)
        flush(partial / name)
    return commit(target, step, described, manifest["holds"], manifest["format"])


def locate(path: str | Path, step: int | None = None) -> Path:
    """The checkpoint folder that `path` means: a run's `save` folder (its newest checkpoint, or that of `step`) or
    one step's folder.
    """
    path = Path(path)
    if _has_manifest(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    available = steps(path)
    if step is not None:
        if step not in available and not _has_manifest(step_folder(path, step)):
            raise CheckpointError(f"{path}: no checkpoint of step {step}; there are {available or 'none'}")
        return step_folder(path, step)
    if not available:
        raise CheckpointError(f"{path}: holds no complete checkpoint (no global_step<N>/{MANIFEST})")
    return _named_latest(path) or step_folder(path, available[-1])


def verify(folder: Path, contents: bool = True, links: bool = False) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest and return the manifest; without `contents`, that the
    files are there and have their sizes. `links` allows symbolic links in place of files, as caches of downloads have
    them.

    Raises:
        UnreadableError: the file system does not give a file; it may be as it was written.
        CheckpointError: a file is missing, truncated, altered or a symbolic link, meta.json is of another step than the
            folder's name, or the manifest is damaged, lists less than a checkpoint has, names a file outside the folder,
            or is of a newer format.
    """
    manifest = _read_manifest(folder)
    for name, expected in manifest["files"].items():
        _check_file(folder, name, expected, links)
    if contents:
        compared = expected_digests(folder, manifest)
        with Comparison(compared, len(os.sched_getaffinity(0))) as comparison:
            comparison.wait()
            if comparison.failure is not None:
                raise comparison.failure
    if manifest["format"] == FORMAT and manifest["holds"] == EVERYTHING:
        _require(_random_states(folder), manifest["files"], folder / MANIFEST)
    _check_step(folder)
    return manifest


def expected_digests(folder: Path, manifest: Mapping[str, Any]) -> dict[Path, str]:
    """The sha256 that each file of a checkpoint must have, the largest file first."""
    by_size = sorted(manifest["files"].items(), key=lambda item: (-item[1]["size"], item[0]))
    return {folder / name: str(entry.get("sha256")) for name, entry in by_size}


def _check_file(folder: Path, name: str, expected: Mapping[str, Any], links: bool) -> None:
    path = folder / name
    try:
        linked = [
            each for each in (path, *path.parents[: len(path.parts) - len(folder.parts) - 1]) if each.is_symlink()
        ]
        if linked and not links:
            raise CheckpointError(
                f"{linked[0]}: is a symbolic link, which no run writes; copy what it leads to into its place"
            )
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: is missing from the checkpoint") from None
    except OSError as error:
        raise UnreadableError.of(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(f"{path}: cannot be read, it is no regular file; it is left as it is")
    if status.st_size != expected.get("size"):
        raise CheckpointError(
            f"{path}: has {status.st_size} bytes, the checkpoint was written with {expected.get('size')}"
        )


def _check_step(folder: Path) -> None:
    """Raise a CheckpointError where the folder is named after another step than that of meta.json."""
    named, step = _STEP.fullmatch(folder.absolute().name), read_json(folder / META).get("step")
    if type(step) is not int or step < 0:
        raise CheckpointError(
            f"{folder / META}: its step is {step!r}, not a number of steps; the checkpoint is damaged"
        )
    if named is not None and int(named.group(1)) != step:
        raise CheckpointError(
            f"{folder}: is named after another step than it was taken at ({META} says {step}); rename it to "
            f"{step_folder(Path(), step)}"
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked."""
    return checked_manifest(read_json(folder / MANIFEST), folder / MANIFEST)


def checked_manifest(manifest: dict[str, Any], source: str | Path) -> dict[str, Any]:
    """`manifest` with what it holds, once it lists all that a checkpoint of its format has, and nothing outside the
    folder.

    Raises CheckpointError, naming `source`, where it does not.
    """
    if manifest.get("format") not in READABLE:
        raise CheckpointError(
            f"{source}: checkpoint format {manifest.get('format')!r}, this version reads formats {READABLE}"
        )
    listed = listed_files(manifest, source)
    holds = manifest.setdefault("holds", EVERYTHING)  # earlier manifests do not say it
    if holds not in tuple(REQUIRED):
        raise CheckpointError(f"{source}: holds {holds!r} is not known; known: {', '.join(REQUIRED)}")
    # A checkpoint of format 1 has no state: only its weights are read.
    _require(REQUIRED[holds if manifest["format"] == FORMAT else WEIGHTS_ONLY], listed, source)
    return manifest


def _is_inside(name: str) -> bool:
    """Whether a name in a manifest is a plain relative path: not absolute, without `..`, as a run writes it."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and ".." not in path.parts and str(path) == name != "." and "\0" not in name
    return plain and all(len(part.encode(errors="replace")) <= _LONGEST_NAME for part in path.parts)


def listed_files(manifest: Mapping[str, Any], source: str | Path) -> dict[str, dict[str, Any]]:
    """What a manifest says of each file of the checkpoint, by its name within the folder.

    Raises CheckpointError, naming `source`, where it lists none, or one outside the folder.
    """
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise CheckpointError(f"{source}: lists no files; it is damaged")
    outside = [name for name in listed if not _is_inside(name)]
    if outside:
        raise CheckpointError(
            f"{source}: names {outside[0][:_LONGEST_NAME]!r}, which is no file within the checkpoint; the manifest is damaged"
        )
    return listed


def _require(names: Iterable[str], listed: Iterable[str], source: str | Path) -> None:
    """Raise a CheckpointError where the manifest `source`, which lists `listed`, lacks one of `names`."""
    lacking = [name for name in names if not any(_is_it(each, name) for each in listed)]
    if lacking:
        raise CheckpointError(f"{source}: does not list {lacking[0]}; the checkpoint is damaged")


def _is_it(listed: str, required: str) -> bool:
    return listed == required or (required.endswith("/") and listed.startswith(required))


def _random_states(folder: Path) -> list[str]:
    """The files of random states, one for every rank of the division that meta.json names."""
    sizes = read_json(folder / META).get("topology") or {}
    try:
        return [f"{RNG}/rank_{rank}.pt" for rank in range(prod(sizes.values()))]
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / META}: topology {sizes!r} is not a mapping of numbers") from error


def refuse_weights_only(folder: Path) -> None:
    """Raise a CheckpointError where no run can be resumed from a checkpoint: it holds a model alone, or the state of an
    optimizer in an earlier format.
    """
    refuse_weights_manifest(read_json(folder / MANIFEST), folder)


def refuse_weights_manifest(manifest: Mapping[str, Any], folder: str | Path) -> None:
    """As `refuse_weights_only`, of the checkpoint in `folder` that has this manifest."""
    if manifest.get("holds") == WEIGHTS_ONLY:
        raise CheckpointError(
            f"{folder}: holds weights only, no state of an optimizer; set finetune=true to start a run from them"
        )
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: was written by an earlier version, whose optimizer state cannot be read; start a new run from "
            "its weights with finetune=true"
        )


def state_files(folder: Path) -> list[str]:
    """The names, within the folder of the state, of all files of state that the manifest lists."""
    beginning = f"{STATE}/"
    return [name.removeprefix(beginning) for name in _read_manifest(folder)["files"] if name.startswith(beginning)]


def unlisted(folder: Path) -> list[str]:
    """Files in a checkpoint's folder that its manifest does not know; nothing reads them."""
    listed = read_json(folder / MANIFEST).get("files") or {}
    return [name for name in files(folder) if name != MANIFEST and name not in listed]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping of a checkpoint, or a CheckpointError that names the file."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    except OSError as error:
        raise UnreadableError.of(path, error) from error
    return parse_json(content, path)


def parse_json(content: bytes, source: str | Path) -> dict[str, Any]:
    """The JSON mapping in `content`, or a CheckpointError that names `source`."""
    try:
        mapping = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: cannot be read as JSON: {error}") from error
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{source}: is not a mapping")
    return mapping


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a mapping as indented JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_latest(save: Path) -> str | None:
    """What `latest` says: the name of a folder in `save`, or None where it is missing or says anything else."""
    try:
        with (save / LATEST).open(errors="replace") as file:
            text = file.read(_LONGEST_NAME + 2).strip()
    except OSError:  # no file, or none that can be read
        return None
    plain = text not in ("", ".", "..") and "/" not in text and "\0" not in text
    return text if plain and len(text.encode()) <= _LONGEST_NAME else None


def _named_latest(save: Path) -> Path | None:
    """The folder that `latest` names, or None where it names no complete checkpoint."""
    name = read_latest(save)
    if name is None or _STEP.fullmatch(name) is None:
        return None
    return save / name if _has_manifest(save / name) else None


def is_step_folder(folder: Path) -> bool:
    """Whether a folder has the name and the manifest of one step's checkpoint, or only the name."""
    return folder.is_dir() and (_STEP.fullmatch(folder.resolve().name) is not None or _has_manifest(folder))


def files(folder: Path) -> list[str]:
    """The names of all files and symbolic links below a folder."""

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found += [str(Path(place, name).relative_to(folder)) for name in (*names, *links)]
    return sorted(found)


def _folders(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (path for path in folder.rglob("*") if path.is_dir())


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.partial")
    remove(aside)
    with aside.open("x") as file:  # a link that lies there is not followed
        file.write(text)
    flush(aside)
    try:
        aside.rename(path)
    except OSError:
        aside.unlink()
        raise
    flush(path.parent)
