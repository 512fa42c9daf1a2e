"""A recipe: one YAML file that describes a corpus, from where it lies to the weights of its parts.

root: /corpora                  # the paths below are relative to it
output: data/mine
tokenizer_type: HFTokenizer     # or train_tokenizer: {vocab_size: 32000}
vocab_file: 20B_tokenizer.json
test_fraction: 0.001
sources:
  books: {paths: [books/*.txt], weight: 0.75}
  code: {reader: repositories, paths: [github], weight: 0.25, filters: {min_stars: 1, generated: false}}
"""

import difflib
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.plan import MAX_RECORD_MIB, CorpusSource, Rules
from megatron_coca.data.readers.source import Filters, SourceSpec
from megatron_coca.data.tokenizers.load import TOKENIZERS
from megatron_coca.data.tokenizers.training import TRAINERS
from megatron_coca.safe_yaml import YamlFault, read_yaml

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Filters(_Strict):
    min_stars: int = Field(0, ge=0)
    licences: list[str] = []
    languages: list[str] = []
    min_bytes: int = Field(0, ge=0)
    max_bytes: int | None = Field(None, gt=0)
    generated: bool = True
    minified: bool = True


class _Source(_Strict):
    paths: list[str] = Field(min_length=1)
    reader: str = "files"
    fields: dict[str, str] = {}
    documents: Literal["file", "line", "paragraph"] = "file"
    sets: list[str] | dict[str, Positive] = []
    filters: _Filters = _Filters()
    metadata: str | None = None
    options: dict[str, str] = {}
    weight: Positive | None = None
    duplicates: Literal["exact", "near", "keep"] = "exact"
    fraction: float = Field(1.0, gt=0, le=1)
    split: Literal["train", "valid", "test"] | None = None
    max_record_mib: int = Field(SourceSpec.max_record_mib, ge=1, le=MAX_RECORD_MIB)


class TokenizerTraining(_Strict):
    """A tokenizer to be trained on the corpus itself."""

    vocab_size: int = Field(gt=0)
    tokenizer_type: Literal["SPMTokenizer", "HFTokenizer"] = "SPMTokenizer"
    model: Literal["bpe", "unigram"] = "bpe"
    characters: int = Field(50_000_000, gt=0)

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.model not in TRAINERS[self.tokenizer_type]:
            raise ValueError(f"{self.tokenizer_type} is trained as {', '.join(TRAINERS[self.tokenizer_type])}")
        return self


class _Recipe(_Strict):
    root: str = "."
    output: str | None = None
    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    train_tokenizer: TokenizerTraining | None = None
    valid_fraction: Share = Rules.valid_fraction
    test_fraction: Share = Rules.test_fraction
    sources: dict[str, _Source] = Field(min_length=1)


@dataclass(frozen=True)
class Recipe:
    """What a recipe says, with paths resolved.

    ``tokenizer`` has the arguments of ``load_tokenizer``; it or ``training`` is None.
    """

    sources: list[CorpusSource]
    rules: Rules
    output: Path | None
    tokenizer: dict[str, str | None] | None
    training: TokenizerTraining | None


def read_recipe(path: Path, root: Path | None = None) -> Recipe:
    """Read a recipe; ``root`` replaces its own. Raises ``DataError`` that names every key at fault."""
    try:
        recipe = _Recipe.model_validate(read_yaml(Path(path)))
    except OSError as error:
        raise DataError(f"{path}: cannot read the recipe ({error.strerror}).") from error
    except YamlFault as error:
        raise DataError(error.at(str(path))) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except ValidationError as error:
        raise DataError("\n".join(f"{path}: {_told(fault)}" for fault in error.errors())) from error
    base = Path(root or recipe.root)
    if (recipe.tokenizer_type is None) == (recipe.train_tokenizer is None):
        raise DataError(f"{path}: give either tokenizer_type, with vocab_file, or train_tokenizer.")
    check_tokenizer_files(str(path), recipe.tokenizer_type, recipe.vocab_file, recipe.merge_file)
    return Recipe(
        sources=[_source(name, source, base) for name, source in recipe.sources.items()],
        rules=Rules(recipe.valid_fraction, recipe.test_fraction),
        output=None if recipe.output is None else Path(recipe.output),
        tokenizer=_tokenizer(recipe, base),
        training=recipe.train_tokenizer,
    )


def check_tokenizer_files(
    place: str, tokenizer_type: str | None, vocab_file: str | None, merge_file: str | None
) -> None:
    """Raise ``DataError`` for a file that the kind of tokenizer, or one that is to be trained, does not take."""
    taken = TOKENIZERS[tokenizer_type][1] if tokenizer_type in TOKENIZERS else {}
    for name, value in (("vocab_file", vocab_file), ("merge_file", merge_file)):
        if value is not None and name not in taken and (tokenizer_type is None or tokenizer_type in TOKENIZERS):
            raise DataError(f"{place}: {name} has no effect with {tokenizer_type or 'a tokenizer that is trained'}.")


def named_paths(items: Sequence[str]) -> dict[str, list[Path]]:
    """Paths by source, as a command line gives them: ``NAME=PATH``, a name as often as it has paths."""
    paths: dict[str, list[Path]] = {}
    for item in items:
        name, separator, path = item.partition("=")
        if not (name and separator and path):
            raise DataError(f"{item}: give each input as NAME=PATH, for example books=books.jsonl.zst")
        paths.setdefault(name, []).append(Path(path))
    return paths


def _tokenizer(recipe: _Recipe, base: Path) -> dict[str, str | None] | None:
    if recipe.tokenizer_type is None:
        return None
    files = {"vocab_file": recipe.vocab_file, "merge_file": recipe.merge_file}
    return {"tokenizer_type": recipe.tokenizer_type} | {
        argument: None if name is None else str(base / name) for argument, name in files.items()
    }


def _source(name: str, source: _Source, base: Path) -> CorpusSource:
    spec = SourceSpec(
        name=name,
        paths=_datasets(source.paths, base) if source.reader == "huggingface" else _expanded(source.paths, base),
        reader=source.reader,
        fields=source.fields,
        documents=source.documents,
        sets=tuple(source.sets),
        divide=isinstance(source.sets, dict),
        filters=Filters(
            **source.filters.model_dump(exclude={"licences", "languages"}),
            licences=tuple(source.filters.licences),
            languages=tuple(source.filters.languages),
        ),
        metadata=None if source.metadata is None else base / source.metadata,
        options=source.options,
        max_record_mib=source.max_record_mib,
    )
    weights: Mapping[str, float] = source.sets if isinstance(source.sets, dict) else {}
    return CorpusSource(spec, source.weight, weights, source.duplicates, source.fraction, source.split)


def _datasets(paths: Sequence[str], base: Path) -> list[Path | str]:
    """Those below the root as paths, others as names at the hub."""
    return [base / path if (base / path).exists() else path for path in paths]


def _expanded(paths: Sequence[str], base: Path) -> list[Path]:
    """Paths below the root; those with ``*``, ``?`` or ``[`` as what they match, sorted."""
    found: list[Path] = []
    for path in paths:
        whole = str(base / path)
        matches = sorted(glob.glob(whole, recursive=True)) if glob.has_magic(path) else [whole]
        if not matches:
            raise DataError(f"{whole}: matches no file. Check the paths and the root of the recipe.")
        found += map(Path, matches)
    return found


_MODELS: dict[int, type[BaseModel]] = {1: _Recipe, 3: _Source}


def _told(fault: Any) -> str:
    place = [str(part) for part in fault["loc"]]
    if fault["type"] in ("model_type", "model_attributes_type"):
        return f"{'.'.join(place) or 'the file'}: expected a mapping of keys to values, not {fault['input']!r:.80}"
    if fault["type"] != "extra_forbidden":
        return f"{'.'.join(place) or 'the file'}: {fault['msg']}"
    known = (_Filters if "filters" in place[:-1] else _MODELS.get(len(place), TokenizerTraining)).model_fields
    near = difflib.get_close_matches(place[-1], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
    return f"{'.'.join(place)}: unknown key; {hint}"
