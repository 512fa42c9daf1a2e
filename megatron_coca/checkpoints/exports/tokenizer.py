"""Our tokenizers as files that Hugging Face's AutoTokenizer reads: the same text gives the same ids, nothing is added."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.native import read_json
from megatron_coca.checkpoints.tokenizer import largest_named_id, read_tokenizer
from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, PROBES, first_difference
from megatron_coca.data.tokenizers.sentencepiece_kind import ModelSettings

CONFIG, GENERATION = "config.json", "generation_config.json"
THEIRS = (
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files that are written again as they are: the tokenizer, and how to generate."""


class Symbols(NamedTuple):
    """Token ids as config.json has them, None where it has none; `eos` may be several, in a list."""

    bos: Any = None
    eos: Any = None
    pad: Any = None


class Companions(NamedTuple):
    """What lies beside the weights: files by name, the ids that config.json names, what there is to say, or None."""

    files: Mapping[str, bytes]
    symbols: Symbols
    note: str | None


def own_companions(folder: Path) -> Companions:
    """What a Hugging Face folder has, for an export of this folder itself."""
    files = {name: (folder / name).read_bytes() for name in THEIRS if (folder / name).is_file()}
    note = f"{folder}: has no tokenizer, so the folder has none"
    return Companions(files, _symbols(folder), None if any("token" in name for name in files) else note)


def original_companions(folder: Path, tokenizer: Tokenizer | None, known: int) -> Companions:
    """What the model's original, a Hugging Face folder, has, once it is seen to fit.

    Args:
        folder: with tokenizer files under transformers' names; its other files are optional.
        tokenizer: the checkpoint's, whose ids `folder`'s has to give; None where there is none to compare with.
        known: token ids of the model, padding not counted.

    Raises:
        CheckpointError: there is no tokenizer in `folder`, it gives other ids, ends texts otherwise, or has ids that
            the model has not. Symbols around texts are not compared, nor symbols within them.
    """
    theirs, note = read_tokenizer(folder, known)
    if theirs is None:
        raise CheckpointError(f"{folder}: cannot be the tokenizer of the export: {note}")
    found = own_companions(folder)
    largest = largest_named_id(folder)
    if largest >= known:
        raise CheckpointError(
            f"{folder}: names token {largest}, the model has {known}; name the folder of the model's own tokenizer"
        )
    if tokenizer is None:
        return found._replace(note=f"the checkpoint carries no tokenizer to compare that of {folder} with")
    _refuse_another(folder, theirs, tokenizer, found.symbols)
    eos = tokenizer.eod if found.symbols.eos is None else found.symbols.eos
    return found._replace(symbols=found.symbols._replace(eos=eos), note=note)


def suppressing(data: bytes, unused: list[int]) -> bytes:
    """A generation_config.json that never chooses `unused`: the same bytes where it says so already."""
    content = json.loads(data)
    listed = content.get("suppress_tokens") or []
    if set(unused) <= set(listed):
        return data
    return (json.dumps(content | {"suppress_tokens": sorted({*listed, *unused})}, indent=1) + "\n").encode()


def _refuse_another(folder: Path, theirs: Tokenizer, ours: Tokenizer, symbols: Symbols) -> None:
    differing = first_difference(theirs, ours)
    if differing is not None:
        raise CheckpointError(
            f"{folder}: its tokenizer gives other ids than the checkpoint's ({ours.tokenizer_type}) for {differing!r}; "
            "name the folder of the model that training began with"
        )
    ends = {theirs.eod, *_listed(symbols.eos), *_listed(_json(folder / GENERATION).get("eos_token_id"))}
    if ours.eod not in ends:
        raise CheckpointError(
            f"{folder}: texts end with {sorted(ends)} there, and with {ours.eod} ({ours.piece(ours.eod)!r}) in the "
            f"checkpoint; add {ours.eod} to eos_token_id in a copy of its {GENERATION}"
        )


def _symbols(folder: Path) -> Symbols:
    content = _json(folder / CONFIG)
    return Symbols(*(content.get(f"{name}_token_id") for name in Symbols._fields))


def _listed(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int)]


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


Files = dict[str, bytes]
BYTES = 256
SPACE_MARK = "\u2581"
"""SentencePiece's spelling of a space."""

ADDING_PROCESSORS = frozenset({"TemplateProcessing", "BertProcessing", "RobertaProcessing"})
"""Steps of a tokenizer.json that put start or end symbols around a text; the model has seen none there in training."""


def tokenizer_files(tokenizer: Tokenizer) -> tuple[Files, str | None]:
    """The files to put beside a model by their names, and what of the tokenizer they do not express, or None."""
    with TemporaryDirectory() as saved:
        tokenizer.save(Path(saved))
        return _files(Path(saved), tokenizer)


def _files(folder: Path, tokenizer: Tokenizer) -> tuple[Files, str | None]:
    """As above, from what `Tokenizer.save` wrote into `folder`."""
    own = {name: (folder / name).read_bytes() for name in _names(folder)}
    model = BUILDERS[tokenizer.tokenizer_type](folder, own, tokenizer)
    differing = next((text for text in PROBES if model.encode(text).ids != tokenizer.encode(text)), None)
    if differing is not None:
        kept = f"the folder has {', '.join(own)} instead" if own else "the folder has no tokenizer"
        return own, f"{tokenizer.tokenizer_type} gives other ids for {differing!r} as a tokenizer.json; {kept}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": model.id_to_token(tokenizer.eod),
        "pad_token": model.id_to_token(tokenizer.eod),
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "padding_side": "left",
    }
    return {
        "tokenizer.json": model.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=1) + "\n").encode(),
    }, None


def _names(folder: Path) -> list[str]:
    description = json.loads((folder / DESCRIPTION).read_text())
    return [description[argument] for argument in ("vocab_file", "merge_file") if description.get(argument)]


def _from_json(folder: Path, own: Files, tokenizer: Tokenizer) -> Any:
    """The file itself, without what it does beside encoding."""
    import tokenizers

    content = json.loads(next(iter(own.values())))
    content |= {"truncation": None, "padding": None, "post_processor": _not_adding(content.get("post_processor"))}
    if content["model"].get("dropout"):
        content["model"]["dropout"] = None
    return _ordinary(tokenizers.Tokenizer.from_str(json.dumps(content)))


def _not_adding(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    if processor is None or processor["type"] in ADDING_PROCESSORS:
        return None
    if processor["type"] != "Sequence":
        return processor
    return processor | {"processors": [each for each in map(_not_adding, processor["processors"]) if each is not None]}


def _from_gpt2(folder: Path, own: Files, tokenizer: Tokenizer) -> Any:
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    model = Model(models.BPE.from_file(*(str(folder / name) for name in own)))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if tokenizer.tokenizer_type == "HFGPT2Tokenizer":
        model.add_special_tokens(["<|padding|>"])
    return _special(model, tokenizer)


def _from_bytes(folder: Path, own: Files, tokenizer: Tokenizer) -> Any:
    """One token for each byte, which the library spells as one printable character; NUL is 256, as 0 ends documents."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    printable = {character: None for character in map(_spelled, range(BYTES))}
    vocabulary = {character: byte or BYTES for byte, character in enumerate(printable)}
    model = Model(models.BPE(vocab={"<eod>": tokenizer.eod} | vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return _special(model, tokenizer)


def _spelled(byte: int) -> str:
    """The character for which byte-level tokenizers write a byte: itself where it is printable Latin-1, else one of
    those from U+0100 on, in order (Radford et al. 2019, GPT-2's encoder).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(BYTES) if each not in printable]
    return chr(byte) if byte in printable else chr(BYTES + others.index(byte))


def _from_sentencepiece(folder: Path, own: Files, tokenizer: Tokenizer) -> Any:
    """Pieces and scores as a model of Hugging Face's library; whether it agrees is for the probes to say."""
    import sentencepiece
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, pre_tokenizers

    data = next(iter(own.values()))
    pieces, settings = sentencepiece.SentencePieceProcessor(model_proto=data), ModelSettings.read(data)
    model = Model((_merging if settings.is_bpe else _unigram)(pieces))
    scheme = "first" if settings.dummy_prefix else "never"
    model.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if settings.dummy_prefix else steps)
    return _special(model, tokenizer)


def _merging(pieces: Any) -> Any:
    """SentencePiece joins the neighbours whose whole has the best score: each way to cut a piece in two is a merge."""
    from tokenizers import models

    names = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
    whole = [i for i in range(len(names)) if not (pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i))]
    known = {names[i] for i in whole}
    merges = []
    for i in sorted(whole, key=lambda i: (-pieces.get_score(i), i)):
        cuts = ((names[i][:at], names[i][at:]) for at in range(1, len(names[i])))
        merges += [cut for cut in cuts if known.issuperset(cut)]
    vocabulary = {name: i for i, name in enumerate(names)}
    unknown = names[pieces.unk_id()]
    return models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _unigram(pieces: Any) -> Any:
    from tokenizers import models

    scored = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]
    return models.Unigram(scored, unk_id=pieces.unk_id(), byte_fallback=True)


def _special(model: Any, tokenizer: Tokenizer) -> Any:
    """Mark the symbol that ends documents as one that decoding leaves out."""
    model.add_special_tokens([model.id_to_token(tokenizer.eod)])
    return _ordinary(model)


def _ordinary(model: Any) -> Any:
    """The characters of a special token in a text are ordinary characters; `split_special_tokens` says it in files."""
    model.encode_special_tokens = True
    return model


BUILDERS: dict[str, Callable[[Path, Files, Tokenizer], Any]] = {
    "HFTokenizer": _from_json,
    "GPT2BPETokenizer": _from_gpt2,
    "HFGPT2Tokenizer": _from_gpt2,
    "CharLevelTokenizer": _from_bytes,
    "SPMTokenizer": _from_sentencepiece,
}
"""A `tokenizers.Tokenizer` for each of ours."""
