"""The record of a preparation: what was read, what was written, with what."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.inputs import Inputs
from megatron_coca.data.preparation.journal import ShardState, State
from megatron_coca.data.preparation.plan import SPLITS, Source, shard_name
from megatron_coca.data.shards.shard import Shard
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, Tokenizer

FORMAT = 2  # of the manifest and the split; raise it when either changes meaning
MANIFEST = "manifest.json"
DAMAGED = "damaged file"  # the one kind of problem that is not a record
_TOKENIZER_FACTS = ("tokenizer_type", "vocab_size", "eod", "fingerprint")
_LIBRARIES = ("sentencepiece", "tokenizers", "numpy")
_EMPTY = {"prefix": None, "documents": 0, "tokens": 0, "bytes": 0, "sha256": None}


def build(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    inputs: Inputs,
    state: State,
    folder: Path,
) -> dict[str, Any]:
    """The manifest of finished shards in ``folder``; reads all of them."""
    return {
        "format": FORMAT,
        "settings": dict(settings),
        "tokenizer": {name: getattr(tokenizer, name) for name in _TOKENIZER_FACTS} | {"description": DESCRIPTION},
        "sources": _written(sources, state.shards, folder),
        "inputs": [_read(number, source, inputs, state) for number, source in enumerate(sources)],
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES},
    }


def _written(sources: Sequence[Source], shards: Sequence[ShardState], folder: Path) -> list[dict[str, Any]]:
    """One entry per source and part, with what each split holds."""
    entries: dict[tuple[int, str], dict[str, Any]] = {}
    for shard in shards:
        spec = sources[shard.source].spec
        new = {"name": shard_name(spec.name, shard.part, ""), "source": spec.name, "part": shard.part}
        entry = entries.setdefault((shard.source, shard.part), new | {split: dict(_EMPTY) for split in SPLITS})
        entry[shard.split] = _shard_facts(folder, shard_name(spec.name, shard.part, shard.split), shard)
    return list(entries.values())


def _shard_facts(folder: Path, name: str, state: ShardState) -> dict[str, Any]:
    written = Shard(folder / name)  # checks what is on the disk
    if (written.documents, written.len_tokens) != (state.documents, state.tokens):
        raise DataError(f"{folder / name}: holds {written}, where {state} was written. Remove {folder}; begin anew.")
    with (folder / f"{name}.bin").open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {
        "prefix": name,
        "documents": state.documents,
        "tokens": state.tokens,
        "bytes": state.bytes,
        "sha256": digest,
    }


def _read(number: int, source: Source, inputs: Inputs, state: State) -> dict[str, Any]:
    own = inputs.of(number)
    written = sum(shard.documents for shard in state.shards if shard.source == number)
    findings = state.findings.get(source.spec.name, {})
    problems, left_out = findings.get("problems", {}), findings.get("left_out", {})
    rejected = sum(count for kind, count in problems.items() if kind != DAMAGED)
    return {
        "name": source.spec.name,
        "paths": [str(path) for path in source.spec.paths],
        "units": len(own),
        "bytes": sum(unit.size for unit in own),
        "records": written + rejected + sum(left_out.values()),
        "written": written,
        "problems": problems,
        "problems_named": findings.get("named", []),
        "left_out": left_out,
        "unread": dict(inputs.unread[number]),
        "sets_missing": sorted(set(source.spec.sets) - set(findings.get("sets", ()))),
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest that ``prepare`` wrote. ``DataError`` where it is missing, damaged or of another format."""
    try:
        manifest = json.loads(Path(path).read_text())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot read the manifest ({error}). Prepare the corpus again.") from error
    if found != FORMAT:
        raise DataError(f"{path}: format {found}, this version reads {FORMAT}. Prepare the corpus again.")
    return manifest
