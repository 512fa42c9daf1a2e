"""The files that describe prepared shards: `manifest.json` (inputs and outputs) and `data.yml` (configuration keys for
a run).
"""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.preparation_plan import SPLITS, CorpusSource, Inputs, shard_name
from megatron_coca.data.readers.source import ReadingProblems
from megatron_coca.data.shards import LABELS_SUFFIX, Shard, shard_paths
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, Tokenizer
from megatron_coca.data.tokenizers.losses import Sample
from megatron_coca.support.plain_text import masked, plain
from megatron_coca.support.regular_files import read_regular

FORMAT = 2  # version of the manifest and of the choice of splits; increase it if either changes
MANIFEST = "manifest.json"
RUN_CONFIG = "data.yml"
_LIBRARIES = ("sentencepiece", "tokenizers", "numpy")
ADD_DOCUMENTS = "add documents (with --documents line, every line of a text file is one)"
_EMPTY = {"prefix": None, "documents": 0, "tokens": 0, "bytes": 0, "sha256": None}


@dataclass(frozen=True)
class WrittenShard:
    """A written shard.

    Attributes:
        source: number of the source.
        part: the set of the shard's documents.
        split: the split of the shard's documents.
        number: number of the `SourcePiece` that the shard belongs to; None if the source has only one piece.
        facts: the facts about the shard for the manifest.
    """

    source: int
    part: str
    split: str
    number: int | None
    facts: Mapping[str, Any]


@dataclass
class Findings:
    """Findings about a source: records that did not become documents, sets that occur in the source, and how well the
    tokenizer reproduces a sample of passages.
    """

    problems: ReadingProblems = field(default_factory=ReadingProblems)
    sets: set[str] = field(default_factory=set)
    sample: Sample = field(default_factory=Sample)


def build_manifest(
    sources: Sequence[CorpusSource],
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    inputs: Inputs,
    shards: Sequence[WrittenShard],
    findings: Sequence[Findings],
) -> dict[str, Any]:
    """Return the content of the manifest for shards that are finished."""
    entries: dict[tuple[int, str, int | None], dict[str, Any]] = {}
    for shard in shards:
        owner = sources[shard.source].spec.name
        new = {"name": shard_name(owner, shard.part, "", shard.number), "source": owner, "part": shard.part}
        key = (shard.source, shard.part, shard.number)
        entries.setdefault(key, new | {split: dict(_EMPTY) for split in SPLITS})[shard.split] = dict(shard.facts)
    read = []
    for number, source in enumerate(sources):
        own = inputs.of(number)
        written = sum(shard.facts["documents"] for shard in shards if shard.source == number)
        problems = findings[number].problems
        read.append(
            {
                "name": source.spec.name,
                "paths": [masked(str(path)) for path in source.spec.paths],
                "units": len(own),
                "bytes": sum(unit.size for unit in own),
                "records": written + problems.total + problems.filtered.total(),
                "written": written,
                "problems": dict(problems.counts),
                "problems_named": problems.named,
                "problems_bytes": dict(problems.sizes),
                "files_lost": problems.lost_files,
                "left_out": dict(problems.filtered),
                "unread": dict(inputs.unread[number]),
                "sample": asdict(findings[number].sample),
                "sets_missing": sorted(set(source.spec.sets) - findings[number].sets),
            }
        )
    tokenizer_facts = {
        name: getattr(tokenizer, name) for name in ("tokenizer_type", "vocab_size", "eod", "fingerprint")
    }
    if tokenizer.trained_start is not None:
        tokenizer_facts["start"] = tokenizer.trained_start
    return {
        "format": FORMAT,
        "settings": dict(settings),
        "tokenizer": tokenizer_facts | {"description": DESCRIPTION},
        "sources": list(entries.values()),
        "inputs": read,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES},
    }


def shard_facts(folder: Path, name: str, documents: int, tokens: int, text_bytes: int) -> dict[str, Any]:
    """Check that a shard contains these numbers of documents and tokens, and hash it. Return its facts for the
    manifest.
    """
    labelled = shard_paths(labels := folder / f"{name}{LABELS_SUFFIX}")[1].exists()
    shard = Shard(folder / name, labels if labelled else None)  # opening the shard checks its files
    if (shard.documents, shard.len_tokens) != (documents, tokens):
        raise DataError(
            f"{folder / name}: contains {shard}, but {documents} documents and {tokens} tokens were written; run the "
            "same command again"
        )
    facts = {"prefix": name, "documents": documents, "tokens": tokens, "bytes": text_bytes}
    facts |= {"largest_id": shard.largest_id(), "sha256": _sha256(shard_paths(folder / name)[0])}
    return facts | ({"labels": labels.name, "labels_sha256": _sha256(shard_paths(labels)[0])} if labelled else {})


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest that `prepare` wrote. Raises `DataError` if the manifest is missing, damaged or of another
    version.
    """
    try:
        manifest = json.loads(read_regular(path))
        version_read = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the corpus again") from error
    if version_read != FORMAT:
        raise DataError(
            f"{path}: has format {version_read}, but this version of megatron-coca reads format {FORMAT}; prepare "
            "the corpus again"
        )
    return manifest


def write_run_config(
    folder: Path,
    final: Path,
    sources: Sequence[CorpusSource],
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> None:
    """Write `data.yml` into `folder`, which is later renamed to `final`. The paths in `data.yml` are relative to this
    folder.

    If the validation or test split has no documents, its list of shards is empty, so that a run does not use the shards
    of another split instead.
    """
    keys: dict[str, Any] = {}
    entries = record["sources"]
    weights = training_weights(sources, entries)
    for split in SPLITS:
        chosen = [entry for entry in entries if entry[split]["documents"]]
        # Without training data the key is omitted, so that a run stops with an error about the missing key.
        if chosen or split != "train":
            keys[f"{split}_data_paths"] = [f"./{entry[split]['prefix']}" for entry in chosen]
        if chosen:
            keys[f"{split}_data_weights"] = [weights[entry["name"]] for entry in chosen]
        labels = [entry[split].get("labels") for entry in chosen]
        if any(labels):
            keys[f"{split}_label_data_paths"] = [name and f"./{name}" for name in labels]
    saved = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    files = {name: f"./{saved[name]}" for name in ("vocab_file", "merge_file") if saved.get(name)}
    keys |= {"tokenizer_type": tokenizer.tokenizer_type, **files, "vocab_size": tokenizer.vocab_size}
    header = f"# Written with {final}/{MANIFEST}. Use: megatron-coca train MODEL.yml {final}/{RUN_CONFIG}\n"
    header += "".join(f"# {line}\n" for line in empty_splits(record, sources))
    (folder / RUN_CONFIG).write_text(plain(header) + yaml.safe_dump(keys, sort_keys=False, width=120), encoding="utf-8")


def empty_splits(record: Mapping[str, Any], sources: Sequence[CorpusSource] = ()) -> list[str]:
    """Return a message for each held-out split that has no documents according to the manifest `record`.

    All files of a repository are in one split, so the files of a single repository cannot fill several splits. The same
    is true for documents with the same key. If the fraction of a split is 0, the user wanted this split to be empty, so
    its message contains no remedy.
    """
    more = ADD_DOCUMENTS
    if any("key" in source.spec.fields for source in sources):
        more = "choose a key with more different values"
    if any(source.spec.reader == "repositories" for source in sources):
        more = "add repositories, or a source with `split: {split}` in a recipe"
    lines = []
    for split, effect in (("valid", "training reports no validation loss"), ("test", "evaluation requires --data")):
        if any(entry[split]["documents"] for entry in record["sources"]):
            continue
        fraction = f"{split}_fraction"
        if record["settings"][fraction]:
            remedy = f"increase {fraction}, or {more.format(split=split)}"
            lines.append(f"{fraction}: the {split} split has no documents, so {effect}; {remedy}")
        else:
            lines.append(f"{fraction} is 0, so {effect}")
    return lines


def training_weights(sources: Sequence[CorpusSource], entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the weight of each entry of the manifest, by name. A weight is the entry's share of the training tokens.
    The weights sum to 1.

    A source without a weight is weighted by its token count. A set without a weight is weighted by its token count
    within its source. If a set is divided into several shards, its weight is divided in proportion to the shards' token
    counts.
    """
    tokens = {entry["name"]: sum(entry[split]["tokens"] for split in SPLITS) for entry in entries}
    shares: dict[str, float] = {}
    for source in sources:
        own = [entry for entry in entries if entry["source"] == source.spec.name]
        of_set = Counter[str]()
        for entry in own:
            of_set[entry["part"]] += tokens[entry["name"]]
        shares_of_set = [tokens[entry["name"]] / of_set[entry["part"]] for entry in own]
        within = [
            source.set_weights.get(entry["part"], of_set[entry["part"]]) * share
            for entry, share in zip(own, shares_of_set, strict=True)
        ]
        weight = sum(tokens[entry["name"]] for entry in own) if source.weight is None else source.weight
        shares |= {entry["name"]: weight * share / sum(within) for entry, share in zip(own, within, strict=True)}
    total = sum(shares.values())
    return {name: float(f"{share / total:.6g}") for name, share in shares.items()}
