"""Recipes: YAML files that describe a corpus, from its files to the weights of its sources.

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
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.preparation_plan import MAX_RECORD_MIB, CorpusSource, Rules
from megatron_coca.data.readers.remote import matching, path_below
from megatron_coca.data.readers.source import Filters, SourceSpec
from megatron_coca.data.tokenizers import TOKENIZERS
from megatron_coca.data.tokenizers.chat import template_path
from megatron_coca.support.remote_files import is_url
from megatron_coca.support.safe_yaml import YamlFault, as_list, read_yaml

Share = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0)]
AsList = BeforeValidator(as_list)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_UNCHANGED = ("reader", "fields", "documents", "filters", "options", "max_record_mib", "messages")
"""Keys of a source in a recipe that are passed to `SourceSpec` unchanged."""


class _Source(_Strict):
    paths: Annotated[list[str], AsList] = Field(min_length=1)
    reader: str = "files"
    fields: dict[str, str] = {}
    documents: Literal["file", "line"] = "file"
    sets: Annotated[list[str] | dict[str, PositiveNumber], AsList] = []
    filters: Filters = Filters()
    metadata: str | None = None
    options: dict[str, str] = {}
    weight: PositiveNumber | None = None
    duplicates: Literal["exact", "keep"] = "exact"
    fraction: float = Field(default=1.0, gt=0, le=1)
    split: Literal["train", "valid", "test"] | None = None
    messages: Literal["answers", "last", "all"] | None = None
    max_faulty: Share = CorpusSource.max_faulty
    max_record_mib: int = Field(default=SourceSpec.max_record_mib, ge=1, le=MAX_RECORD_MIB)

    def resolve(self, name: str, root: Path | str) -> CorpusSource:
        """Return the source with its paths resolved below `root`, a folder or URL. Patterns are replaced by the paths
        that match them.
        """
        paths: list[Path | str] = []
        for text in self.paths:
            path = path_below(root, text)
            if self.reader == "huggingface":  # an existing folder, or the name of a data set on the Hub
                paths.append(path if Path(path).exists() else text)
                continue
            if not glob.has_magic(text) or (not is_url(path) and Path(path).exists()):
                paths.append(path)
                continue
            if is_url(path):
                found = matching(str(path))
            else:
                pattern = os.path.join(os.path.expanduser(root), os.path.expanduser(text))
                found = sorted(glob.glob(_escaped(Path(pattern)), recursive=True))
            if not found:
                raise DataError(f"{path}: no file matches this pattern; check paths and root in the recipe")
            paths += found if is_url(path) else map(Path, found)
        weights = self.sets if isinstance(self.sets, dict) else {}
        spec = SourceSpec(
            name=name,
            paths=paths,
            sets=tuple(self.sets),
            divide=isinstance(self.sets, dict),
            metadata=None if self.metadata is None else Path(path_below(root, self.metadata)),
            **{key: getattr(self, key) for key in _UNCHANGED},
        )
        return CorpusSource(spec, self.weight, weights, self.duplicates, self.fraction, self.split, self.max_faulty)


def _escaped(pattern: Path) -> str:
    """Escape the special characters in the part of a pattern that names existing folders."""
    folder = next((each for each in pattern.parents if each.is_dir()), Path())
    return os.path.join(glob.escape(str(folder)), pattern.relative_to(folder))


MAX_VOCAB_SIZE = 2**24


class TokenizerTraining(_Strict):
    """Settings for training a SentencePiece tokenizer on the corpus itself."""

    vocab_size: int = Field(gt=0, le=MAX_VOCAB_SIZE)
    characters: int = Field(default=50_000_000, gt=0, le=10**12)


class _Recipe(_Strict):
    root: str = "."
    output: str | None = None
    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    train_tokenizer: TokenizerTraining | None = None
    start_token: str | None = Field(default=None, min_length=1)
    end_token: str | None = Field(default=None, min_length=1)
    accept_tokenizer: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_time: datetime | None = None
    valid_fraction: Share = Rules.valid_fraction
    test_fraction: Share = Rules.test_fraction
    shard_gib: PositiveNumber | None = None
    sources: dict[str, _Source] = Field(min_length=1)


@dataclass(frozen=True)
class Recipe:
    """A recipe with resolved paths. The tokenizer files are local even if `root` is a URL.

    `tokenizer` contains the arguments of `load_tokenizer`. Exactly one of `tokenizer` and `training` is None.
    """

    sources: list[CorpusSource]
    rules: Rules
    output: str | None
    tokenizer: dict[str, Any] | None
    training: TokenizerTraining | None
    chat_template: Path | None = None
    chat_time: str | None = None
    chat_variables: Mapping[str, Any] = field(default_factory=dict)
    start_token: str | None = None


def read_recipe(path: Path, root: Path | str | None = None) -> Recipe:
    """Read a recipe. `root`, if given, replaces the root in the recipe. Raises `DataError` with a message for every
    invalid key.
    """
    try:
        values = read_yaml(Path(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except YamlFault as error:
        raise DataError(error.at(str(path))) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    return resolve_recipe(values, str(path), root)


def resolve_recipe(values: Any, place: str, root: Path | str | None = None) -> Recipe:
    """Validate the keys of a recipe and resolve its paths. Error messages contain `place` as the name of the file.
    Raises `DataError` as `read_recipe` does.
    """
    try:
        recipe = _Recipe.model_validate(values)
    except ValidationError as error:
        raise DataError("\n".join(f"{place}: {_message(fault)}" for fault in error.errors())) from error
    base = recipe.root if root is None else root
    beside = Path("." if is_url(base) else os.path.expanduser(base))
    if recipe.tokenizer_type is None and recipe.train_tokenizer is None:
        raise DataError(f"{place}: needs a tokenizer; set either tokenizer_type (with vocab_file) or train_tokenizer")
    if recipe.tokenizer_type is not None and recipe.train_tokenizer is not None:
        raise DataError(f"{place}: tokenizer_type and train_tokenizer are two tokenizers; remove one of them")
    kind, files = recipe.tokenizer_type, {name: getattr(recipe, name) for name in ("vocab_file", "merge_file")}
    if kind is None or kind in TOKENIZERS:  # load_tokenizer raises an error for an unknown type
        for name in sorted(files.keys() - (TOKENIZERS[kind][1] if kind else {})):
            if files[name] is not None:
                raise DataError(f"{place}: {name} has no effect with {kind or 'a trained tokenizer'}; remove {name}")
    if kind is None and recipe.end_token is not None:
        raise DataError(
            f"{place}: end_token has no effect with a trained tokenizer, which ends documents with <eod>; remove "
            "end_token"
        )
    if recipe.start_token is not None and all(source.messages for source in recipe.sources.values()):
        raise DataError(
            f"{place}: start_token has no effect on chats; remove start_token, and put the symbol into the chat "
            "template"
        )
    tokenizer: dict[str, Any] | None = None
    if kind is not None:
        tokenizer = {
            name: None if file is None else str(beside / os.path.expanduser(file)) for name, file in files.items()
        }
        tokenizer |= {"tokenizer_type": kind} | ({} if recipe.end_token is None else {"eod": recipe.end_token})
    return Recipe(
        sources=[source.resolve(name, base) for name, source in recipe.sources.items()],
        rules=Rules(
            recipe.valid_fraction,
            recipe.test_fraction,
            accept_tokenizer=recipe.accept_tokenizer,
            shard_gib=recipe.shard_gib,
        ),
        output=None if recipe.output is None else os.path.expanduser(recipe.output),
        tokenizer=tokenizer,
        training=recipe.train_tokenizer,
        start_token=recipe.start_token,
        chat_time=None if recipe.chat_time is None else recipe.chat_time.isoformat(),
        chat_template=None if recipe.chat_template is None else template_path(recipe.chat_template, beside),
        chat_variables=recipe.chat_template_kwargs,
    )


def _message(fault: Any) -> str:
    """Return the message for an error of pydantic."""
    keys = [str(key) for key in fault["loc"]]
    place = ".".join(keys)
    if fault["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"{place or 'the file'}: must be a mapping of keys to values, not {fault['input']!r:.80}"
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
    hint = f"did you mean `{near[0]}`?" if near else f"supported keys: {', '.join(known)}"
    return f"{place}: unknown key; {hint}"
