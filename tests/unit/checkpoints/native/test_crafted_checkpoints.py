"""Checkpoints with a valid manifest and crafted content: an error names the entry."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import save_file

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.inspection import describe, describe_text
from megatron_coca.checkpoints.native.meta import Meta, checked_meta
from megatron_coca.checkpoints.native.state import WEIGHT, ParameterSlice, StatePiece, StateReader
from megatron_coca.config import load_config
from megatron_coca.data.identity import differing_data
from megatron_coca.training.monitoring.loss_guard import LossGuard
from megatron_coca.training.monitoring.monitor import IntervalMean
from megatron_coca.training.opened_stages import differing_stages
from megatron_coca.training.randomness import load_rng_states, rng_states
from tests.checkpoint_files import NEEDED, TINY, write_checkpoint

SHARE = {"source": "a", "weight": 1.0, "samples": 8, "fraction": 1.0, "tokens": 128, "epochs": 0.5}
GUARD = {"losses": [1.0], "norms": [2.0], "consecutive": 0}
WHOLE: dict[str, Any] = {
    "step": 7,
    "run": "abc",
    "origin": None,
    "adapts": {"identity": "ab", "place": "global_step3", "base_model": "models/a", "ignore_keys": ["b"]},
    "data": {"tokens": [5], "document_counts": [1], "weights": [1.0], "sha256": ["f0"], "sampled": [None]}
    | {"tokenizer": "0a", "documents": ["eod_mask_loss"]},
    "batch": 4,
    "dtype": "fp32",
    "topology": {"pipe": 1, "data": 1, "tensor": 1, "sequence": 1},
    "zero_stage": 1,
    "counters": {"step": 7.0, "added_at": 3.0, "loss_scaler.cur_scale": 1024.0},
    "progress": {"guard": GUARD, "losses": [9.5, 3, 10], "skipped": 1, "unvalidated": False},
    "mixture": [SHARE],
    "stages": [{"last": 9, "tokens_per_step": 64, "changes": {"seq_length": 16}, "read": {"a": 128}}],
    "versions": {"torch": "2"},
    "imported": {"model_type": "llama"},
}
STRANGE: dict[str, Any] = {
    "null": None,
    "text": "abc",
    "negative": -1,
    "huge": 10**32,
    "float": 0.5,
    "nan": math.nan,
    "inf": -math.inf,
    "bool": True,
    "list": [None],
    "lists": [[1, 2, 3], ["a"], {}],
    "empty list": [],
    "mapping": {"a": {"b": 1}},
    "huge sizes": {"a": 2**31 - 1, "b": 2**31 - 1},
    "huge list": [[10**17, 10**17], [0, 10**32]],
}


def models(annotation: Any) -> list[type[BaseModel]]:
    """The models within an annotation, such as that of `list[Share] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models(inner)]


def entries(model: type[BaseModel], path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all entries of the schema."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        within = (0,) if "list[" in str(field.annotation) else ()
        for inner in models(field.annotation):
            yield from entries(inner, (*path, name, *within))


def changed(content: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of `content` with another value at `path`."""
    if not path:
        return value
    copied = dict(content) if isinstance(content, Mapping) else list(content)
    copied[path[0]] = changed(copied[path[0]], path[1:], value)
    return copied


def use(meta: Mapping[str, Any]) -> None:
    """What a run that resumes and `inspect` do with it."""
    guard = LossGuard(load_config([], TINY | {"loss_spike_policy": "skip"}).faults)
    guard.restore(meta["progress"]["guard"])
    guard.limits()
    guard.observe(1.0, 1.0)
    losses = IntervalMean(10)
    losses.restore(meta["progress"]["losses"])
    losses.add(8, 1.0, False)
    assert int(meta["progress"]["skipped"]) >= 0 and math.isfinite(sum(meta["counters"].values()))
    assert math.prod(meta["topology"].values()) <= 2**20
    differing_data(meta.get("data") or {}, WHOLE["data"], ["a"])
    differing_stages(meta.get("stages") or [], WHOLE["stages"])


def error_of(action: Callable[[], object]) -> str:
    """The message of a CheckpointError, empty without one."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def craft(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and its checksum."""
    (folder / name).write_bytes(content)
    manifest = native.read_json(folder / native.MANIFEST)
    manifest["files"][name] = native.describe(folder / name)
    native.write_json(folder / native.MANIFEST, manifest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = native.step_folder(write_checkpoint(tmp_path / "run", load_config([], TINY)), 7)
    craft(folder, native.META, json.dumps(WHOLE).encode())
    return folder


def test_files_of_a_run_are_valid(folder: Path) -> None:
    native.verify(folder)
    assert native.read_meta(folder, resumable=True) == WHOLE
    use(WHOLE)


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_every_entry_is_used_or_an_error_by_name(strange: Any, folder: Path) -> None:
    paths = list(entries(Meta))
    assert ("progress", "guard", "losses") in paths and ("counters",) in paths
    for path in paths:
        meta = changed(WHOLE, path, strange)
        name = ".".join(map(str, path))
        error = error_of(lambda meta=meta: use(checked_meta(meta, "meta.json", resumable=True)))
        assert not error or str(path[0]) in error or (path[-1] == "guard" and "loss guard's state" in error), name
        assert len(error) < 500
        if len(path) == 1:
            craft(folder, native.META, json.dumps(meta).encode())
            error = error_of(lambda: native.verify(folder))
            assert not error or name in error or "rng/rank_" in error, f"{name}: {error}"
            assert describe_text(describe(folder))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("topology",), {"data": 2**31 - 1}, "topology.data: expected less .*1048576, got 2147483647"),
        (("topology",), {"data": 2**20, "pipe": 2}, "topology: more than 1,048,576 ranks"),
        (("topology",), {"data": 2**20}, "does not list rng/rank_1.pt"),
        (("counters",), {}, None),
        (("counters", "step"), 1e300, r"counters.step: expected less .*10+, got 1e\+300"),
        (("counters", "step"), 2.5, "counters: step is not a whole number"),
        (("counters", "added_at"), 8.0, "counters: added_at is above step"),
        (("progress",), [], "progress: expected a valid dictionary or .*, got \\[\\]"),
        (("progress", "guard", "losses"), [0.0], r"progress.guard.losses.0: expected greater than 0, got 0.0"),
        (("progress", "skipped"), -1, "progress.skipped: expected greater .*0, got -1"),
        (("step",), "7", "step: expected a valid integer, got '7'"),
    ],
)
def test_messages(path: tuple[str, ...], value: Any, message: str | None, folder: Path) -> None:
    craft(folder, native.META, json.dumps(changed(WHOLE, path, value)).encode())
    if message is None:
        with pytest.raises(CheckpointError, match="counters: step is missing"):
            native.read_meta(folder, resumable=True)
    else:
        with pytest.raises(CheckpointError, match=message):
            native.verify(folder)


def test_a_key_given_twice_is_an_error(folder: Path) -> None:
    craft(folder, native.META, b'{"step": 7, "progress": {"skipped": 0, "skipped": 1}}')
    with pytest.raises(CheckpointError, match="meta.json: not valid JSON .*'skipped' appears twice"):
        native.verify(folder)


RANDOM: dict[str, dict[str, Any]] = {
    "nothing": {},
    "numbers": {"python": 1, "numpy": 2, "torch": 3, "cuda": 4},
    "no JSON": {"python": "x"},
    "short": {"python": "[3, [1, 2], null]"},
    "other lists": {"numpy": '["MT19937", [1, 2], 0, 0, 0.0]'},
    "another generator": {"numpy": '["PCG64", 5]'},
    "huge": {"numpy": json.dumps(["MT19937", [10**32] * 624, 0, 0, 0.0])},
    "outside": {"numpy": json.dumps(["MT19937", [1] * 624, 10**9, 0, 0.0])},
    "negative": {"numpy": json.dumps(["MT19937", [1] * 624, -5, 0, 0.0])},
    "floats": {"torch": torch.zeros(5056)},
    "too few": {"torch": torch.zeros(3, dtype=torch.uint8)},
    "text": {"torch": "state"},
}


@pytest.mark.parametrize("changes", RANDOM.values(), ids=RANDOM)
def test_random_states_of_no_rank(changes: dict[str, Any], tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    path = tmp_path / "rank_0.pt"
    torch.save(rng_states() | changes if changes else {}, path)
    try:
        with pytest.raises(CheckpointError, match="rank_0.pt: not the random state of a rank"):
            load_rng_states(path)
    finally:
        random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])
    for content in (b"", b"text", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"rank_0.pt: (damaged|a pickle|contains)"):
            load_rng_states(path)
    torch.save([1], path)
    with pytest.raises(CheckpointError, match="rank_0.pt: contains a list, not a mapping"):
        load_rng_states(path)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("weight:a:0", [[4]]),
        ("weight:a:0", "x"),
        ("weight:a:0", [["4"], None]),
        ("weight:a:0", [[-4], None]),
        ("weight:a:0", [[10**32], None]),
        ("weight:a:0", [[4], [3, 0, 2, [4]]]),
        ("weight:a:0", [[4], [0, 5, 2, [4]]]),
        ("weight:a:0", [[4], [0, 0, 10**9, [4]]]),
        ("weight:a:0", [[2], None]),
        ("weight:a:1", [[4], None]),
        ("weight:a:-1", [[4], None]),
        ("weight:a", [[4], None]),
        ("weight:b:0", [[4], None]),
    ],
)
def test_state_of_no_parameter(key: str, place: Any, tmp_path: Path) -> None:
    save_file({key: torch.ones(4)}, tmp_path / "rank_00000.safetensors", {"places": json.dumps({"a": place})})
    with pytest.raises(CheckpointError, match="rank_00000.safetensors: not a valid optimizer state file"):
        StateReader(tmp_path, ["rank_00000.safetensors"])


def test_a_parameter_of_another_shape_is_not_filled(tmp_path: Path) -> None:
    places = {"a": [[2**30, 2**9], None]}
    save_file({"weight:a:0": torch.ones(4)}, tmp_path / Path(NEEDED[0]).name, {"places": json.dumps(places)})
    piece = StatePiece("a", WEIGHT, 0, torch.zeros(4))
    with StateReader(tmp_path, [Path(NEEDED[0]).name]) as reader:
        with pytest.raises(CheckpointError, match=r"a has shape \[1073741824, 512\], but \[4\] in the model"):
            reader.fill(piece, ParameterSlice((4,)))
        with pytest.raises(CheckpointError, match="no parameter b"):
            reader.fill(piece._replace(name="b"), ParameterSlice((4,)))
