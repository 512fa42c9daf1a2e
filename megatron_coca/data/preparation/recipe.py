"""A recipe: one YAML file that describes a corpus, from its files to the weights of its sources.

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
from megatron_coca.data.preparation.preparation_plan import MAX_RECORD_MIB, NEAR_DUPLICATES, CorpusSource, Rules
from megatron_coca.data.readers.remote import joined, matching
from megatron_coca.data.readers.source import Filters, SourceSpec
from megatron_coca.data.tokenizers import TOKENIZERS
from megatron_coca.data.tokenizers.training import TRAINERS
from megatron_coca.remote_files import is_url
from megatron_coca.safe_yaml import YamlFault, read_yaml

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Source(_Strict):
    paths: list[str] = Field(min_length=1)
    reader: str = "files"
    fields: dict[str, str] = {}
    documents: Literal["file", "line", "paragraph"] = "file"
    sets: list[str] | dict[str, Positive] = []
    filters: Filters = Filters()
    metadata: str | None = None
    options: dict[str, str] = {}
    weight: Positive | None = None
    duplicates: Literal["exact", "keep"] = "exact"
    fraction: float = Field(default=1.0, gt=0, le=1)
    split: Literal["train", "valid", "test"] | None = None
    messages: Literal["answers", "last", "all"] | None = None
    max_record_mib: int = Field(default=SourceSpec.max_record_mib, ge=1, le=MAX_RECORD_MIB)

    def resolve(self, name: str, root: Path | str) -> CorpusSource:
        """The source with its paths below ``root``, a folder or a URL; patterns become what they match."""
        paths: list[Path | str] = []
        for text in self.paths:
            path = joined(root, text)
            if self.reader == "huggingface":  # a folder, else a name at the hub
                paths.append(path if Path(path).exists() else text)
                continue
            if not glob.has_magic(text):
                paths.append(path)
                continue
            found = matching(str(path)) if is_url(path) else sorted(glob.glob(str(path), recursive=True))
            if not found:
                raise DataError(f"{path}: matches no file. Check the paths and the root of the recipe.")
            paths += found if is_url(path) else map(Path, found)
        weights = self.sets if isinstance(self.sets, dict) else {}
        spec = SourceSpec(
            name=name,
            paths=paths,
            reader=self.reader,
            fields=self.fields,
            documents=self.documents,
            sets=tuple(self.sets),
            divide=isinstance(self.sets, dict),
            filters=self.filters,
            metadata=None if self.metadata is None else Path(joined(root, self.metadata)),
            options=self.options,
            max_record_mib=self.max_record_mib,
            messages=self.messages,
        )
        return CorpusSource(spec, self.weight, weights, self.duplicates, self.fraction, self.split)


MAX_VOCAB_SIZE = 2**24


class TokenizerTraining(_Strict):
    """Settings of a tokenizer to be trained on the corpus itself."""

    vocab_size: int = Field(gt=0, le=MAX_VOCAB_SIZE)
    tokenizer_type: Literal["SPMTokenizer", "HFTokenizer"] = "SPMTokenizer"
    model: Literal["bpe", "unigram"] = "bpe"
    characters: int = Field(default=50_000_000, gt=0, le=10**12)

    @model_validator(mode="after")
    def _known_model(self) -> Self:
        if self.model not in TRAINERS[self.tokenizer_type]:
            raise ValueError(f"{self.tokenizer_type} can only be trained as {', '.join(TRAINERS[self.tokenizer_type])}")
        return self


class _Recipe(_Strict):
    root: str = "."
    output: str | None = None
    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    train_tokenizer: TokenizerTraining | None = None
    chat_template: str | None = None
    valid_fraction: Share = Rules.valid_fraction
    test_fraction: Share = Rules.test_fraction
    sources: dict[str, _Source] = Field(min_length=1)


@dataclass(frozen=True)
class Recipe:
    """A recipe with its paths resolved; files of a tokenizer are local, where ``root`` is a URL too.

    ``tokenizer`` has the arguments of ``load_tokenizer``; it or ``training`` is None.
    """

    sources: list[CorpusSource]
    rules: Rules
    output: Path | str | None
    tokenizer: dict[str, Any] | None
    training: TokenizerTraining | None
    chat_template: Path | None = None


def read_recipe(path: Path, root: Path | str | None = None) -> Recipe:
    """Read a recipe; ``root`` replaces its own. Raises ``DataError`` that names every wrong key."""
    try:
        recipe = _Recipe.model_validate(read_yaml(Path(path)))
    except OSError as error:
        raise DataError(f"{path}: cannot read the recipe ({error.strerror}).") from error
    except YamlFault as error:
        raise DataError(error.at(str(path))) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except ValidationError as error:
        raise DataError("\n".join(f"{path}: {_message(fault)}" for fault in error.errors())) from error
    base = root or recipe.root
    beside = Path("." if is_url(base) else base)
    if (recipe.tokenizer_type is None) == (recipe.train_tokenizer is None):
        raise DataError(f"{path}: give either tokenizer_type, with vocab_file, or train_tokenizer.")
    check_tokenizer_files(str(path), recipe.tokenizer_type, recipe.vocab_file, recipe.merge_file)
    tokenizer: dict[str, Any] | None = None
    if recipe.tokenizer_type is not None:
        files = {"vocab_file": recipe.vocab_file, "merge_file": recipe.merge_file}
        tokenizer = {name: None if file is None else str(beside / file) for name, file in files.items()}
        tokenizer["tokenizer_type"] = recipe.tokenizer_type
    return Recipe(
        sources=[source.resolve(name, base) for name, source in recipe.sources.items()],
        rules=Rules(recipe.valid_fraction, recipe.test_fraction),
        output=None if recipe.output is None else joined(".", recipe.output),
        tokenizer=tokenizer,
        training=recipe.train_tokenizer,
        chat_template=None if recipe.chat_template is None else beside / recipe.chat_template,
    )


def _message(fault: Any) -> str:
    """The message for one of pydantic's errors."""
    keys = [str(key) for key in fault["loc"]]
    place = ".".join(keys)
    if keys[-1:] == ["duplicates"] and fault["input"] == "near":
        return f"{place}: {NEAR_DUPLICATES}"
    if fault["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"{place or 'the file'}: expected a mapping of keys to values, not {fault['input']!r:.80}"
    if fault["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place or 'the file'}: {fault['msg']}"
    by_depth: tuple[Mapping[str, Any], ...] = (
        _Recipe.model_fields,
        TokenizerTraining.model_fields,
        _Source.model_fields,
        Filters.__dataclass_fields__,
    )
    known = by_depth[len(keys) - 1]
    near = difflib.get_close_matches(keys[-1], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
    return f"{place}: unknown key; {hint}"


def check_tokenizer_files(
    place: str, tokenizer_type: str | None, vocab_file: str | None, merge_file: str | None
) -> None:
    """Raise ``DataError`` for a file without effect on this type of tokenizer, or on one to be trained (None)."""
    if tokenizer_type is not None and tokenizer_type not in TOKENIZERS:
        return  # load_tokenizer names the known types
    arguments = TOKENIZERS[tokenizer_type][1] if tokenizer_type else {}
    for name, value in (("vocab_file", vocab_file), ("merge_file", merge_file)):
        if value is not None and name not in arguments:
            raise DataError(f"{place}: {name} has no effect with {tokenizer_type or 'a tokenizer that is trained'}.")


def named_paths(items: Sequence[str]) -> dict[str, list[Path | str]]:
    """Paths by source from a command line's ``NAME=PATH``; a name may occur several times."""
    paths: dict[str, list[Path | str]] = {}
    for item in items:
        name, separator, path = item.partition("=")
        if not (name and separator and path):
            raise DataError(f"{item}: give each input as NAME=PATH, for example books=books.jsonl.zst")
        paths.setdefault(name, []).append(joined(".", path))
    return paths
