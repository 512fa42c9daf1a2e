"""Write our tokenizers as files that Hugging Face's AutoTokenizer reads: a text gives the same ids, none added."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.files import CheckpointError, read_json_if_present
from megatron_coca.checkpoints.huggingface.config_json import CONFIG
from megatron_coca.checkpoints.huggingface.read import GENERATION
from megatron_coca.checkpoints.tokenizer import largest_named_id, read_tokenizer
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.data.tokenizers.kinds import PROBES, GPT2BPETokenizer, HFTokenizer, first_difference
from megatron_coca.data.tokenizers.sentencepiece_kind import ModelSettings
from megatron_coca.data.tokenizers.text_rules import token_ids

THEIRS = (
    GENERATION,
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt"),
)
"""Files of a Hugging Face folder that are copied unchanged: the tokenizer, and generation defaults."""


class TokenIds(NamedTuple):
    """Token ids in config.json, None where it has none; `eos` may be several, in a list."""

    bos: Any = None
    eos: Any = None
    pad: Any = None


class TokenizerFiles(NamedTuple):
    """Files of an export by name, the ids that config.json names, and a remark or None."""

    files: Mapping[str, bytes]
    ids: TokenIds
    note: str | None


def own_files(folder: Path) -> TokenizerFiles:
    """Return the files of a Hugging Face folder, for an export of this folder itself.

    Raises CheckpointError for a link out of the folder: the export may be uploaded with a copy of a private file.
    """
    files = {name: _inside(folder, name).read_bytes() for name in THEIRS if (folder / name).is_file()}
    config = read_json_if_present(folder / CONFIG)
    given = (config.get(f"{name}_token_id") for name in TokenIds._fields)
    ids = TokenIds(*(None if value == [] else value for value in given))
    note = None if any("token" in name for name in files) else f"{folder}: has no tokenizer, so the export has none"
    return TokenizerFiles(files, ids, note)


def _inside(folder: Path, name: str) -> Path:
    path, own = (folder / name).resolve(), folder.resolve()
    blobs = own.parents[1] / "blobs" if own.parent.name == "snapshots" else own  # where the hub's cache has the files
    if not (path.is_relative_to(own) or path.is_relative_to(blobs)):
        raise CheckpointError(
            f"{folder / name}: is a link to {path}, outside of the folder; replace it with a copy if you may publish it"
        )
    return path


def original_files(folder: Path, tokenizer: Tokenizer | None, known: int) -> TokenizerFiles:
    """Return the files of the model's original, a Hugging Face folder, after checking that they fit.

    Args:
        folder: with tokenizer files under transformers' names; its other files are optional.
        tokenizer: the checkpoint's, whose ids `folder`'s must give; None skips the comparison.
        known: token ids of the model, padding not counted.

    Raises:
        CheckpointError: there is no tokenizer in `folder`, it gives other ids, ends texts with another token, or has
            ids that the model does not have. Special tokens around or within texts are not compared.
    """
    theirs, note = read_tokenizer(folder, known)
    if theirs is None:
        raise CheckpointError(f"{folder}: cannot be used as the exported tokenizer: {note}")
    own, largest = own_files(folder), largest_named_id(folder)
    if largest >= known:
        raise CheckpointError(
            f"{folder}: contains token id {largest}, but the model has {known} tokens; name the folder of the "
            "model's own tokenizer"
        )
    if tokenizer is None:
        return own._replace(note=f"the checkpoint carries no tokenizer to compare that of {folder} with")
    differing = first_difference(theirs, tokenizer)
    if differing is not None:
        raise CheckpointError(
            f"{folder}: its tokenizer gives other ids than the checkpoint's ({tokenizer.tokenizer_type}) for "
            f"{differing!r}; name the folder of the model that training started from"
        )
    end = tokenizer.eod
    given = read_json_if_present(folder / GENERATION).get("eos_token_id")
    ends = {theirs.eod, *token_ids(own.ids.eos), *token_ids(given)}
    if end not in ends:
        raise CheckpointError(
            f"{folder}: its end-of-text tokens are {sorted(ends)}, but {end} ({tokenizer.piece(end)!r}) in the "
            f"checkpoint; add {end} to eos_token_id in a copy of its {GENERATION}"
        )
    eos = end if own.ids.eos is None else own.ids.eos
    return own._replace(ids=own.ids._replace(eos=eos), note=note)


def suppress_tokens(data: bytes, unused: list[int]) -> bytes:
    """Add `unused` to `suppress_tokens` of a generation_config.json; the same bytes where they are listed already."""
    content = json.loads(data)
    listed = content.get("suppress_tokens") or []
    if set(unused) <= set(listed):
        return data
    return (json.dumps(content | {"suppress_tokens": sorted({*listed, *unused})}, indent=1) + "\n").encode()


# tokenizer.json -------------------------------------------------------------------------------------------------------

BYTES = 256
SPACE = "\u2581"  # SentencePiece's spelling
ADDING_PROCESSORS = frozenset({"TemplateProcessing", "BertProcessing", "RobertaProcessing"})
"""Post-processors that add special tokens around a text; the model has seen none there in training."""


def tokenizer_files(tokenizer: Tokenizer, begun: bool = False) -> tuple[dict[str, bytes], str | None]:
    """Return the files to save with a model, and a note on what they do not express, or None.

    A model that is `begun` knows the token that begins texts, which data prepared here do not have.
    """
    own = dict(tokenizer.files.values())
    model = BUILDERS[tokenizer.tokenizer_type](tokenizer)
    # The characters of a special token in a text are ordinary characters; `split_special_tokens` says it in files.
    model.encode_special_tokens = True
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
    if begun and tokenizer.bos is not None:
        settings |= {"bos_token": tokenizer.rules.bos}
    if tokenizer.chat is not None:
        symbols = tokenizer.chat.symbols.items()
        settings |= {name: symbol for name, symbol in symbols if model.token_to_id(symbol) is not None}
        named = isinstance(tokenizer, HFTokenizer)  # a rendered chat names special tokens
        settings |= {"chat_template": tokenizer.chat.source, "split_special_tokens": not named}
    return {
        "tokenizer.json": _readable_by_older(json.loads(model.to_str())),
        "tokenizer_config.json": (json.dumps(settings, indent=1) + "\n").encode(),
    }, None


def end_ids(tokenizer: Tokenizer) -> int | list[int]:
    """`eos_token_id` for a model with this tokenizer: the id that ends texts, or a list of all that do, also of those
    that end a turn of its chats.
    """
    turns: list[int] = []
    if tokenizer.chat is not None:
        with suppress(DataError):  # a type that does not encode chats, or a template that renders no turn
            turns = tokenizer.turn_ends()[0]
    ends = [*dict.fromkeys([*tokenizer.ends, *turns])]
    return ends if len(ends) > 1 else ends[0]


def _readable_by_older(content: dict[str, Any]) -> bytes:
    """Return a tokenizer.json whose merges are strings, as tokenizers 0.15 wants them; newer ones read both."""
    merges = content["model"].get("merges", [])
    if not any(" " in part for pair in merges for part in pair):  # a space inside a part would be ambiguous
        content["model"] |= {"merges": [" ".join(pair) for pair in merges]} if merges else {}
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


def _vocabulary(tokenizer: Tokenizer) -> bytes:
    return tokenizer.files["vocab_file"][1]


def _from_json(tokenizer: Tokenizer) -> Any:
    """Load the file itself, without any behaviour besides encoding."""
    import tokenizers

    content = json.loads(_vocabulary(tokenizer))
    content |= {"truncation": None, "padding": None, "post_processor": _not_adding(content.get("post_processor"))}
    if content["model"].get("dropout"):
        content["model"]["dropout"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _not_adding(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    if processor is None or processor["type"] in ADDING_PROCESSORS:
        return None
    if processor["type"] != "Sequence":
        return processor
    steps = [_not_adding(step) for step in processor["processors"]]
    return processor | {"processors": [step for step in steps if step is not None]}


def _from_gpt2(tokenizer: Tokenizer) -> Any:
    assert isinstance(tokenizer, GPT2BPETokenizer)
    model = tokenizer.build({argument: data for argument, (_, data) in tokenizer.files.items()})
    return _with_end(model, tokenizer)


def _from_bytes(tokenizer: Tokenizer) -> Any:
    """Build one token for each byte; NUL is 256, as 0 ends documents.

    Byte-level tokenizers write a byte as itself where it is printable Latin-1, else as a character from U+0100 on, in
    order (Radford et al. 2019, GPT-2's encoder).
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(BYTES) if byte not in printable]
    characters = {byte: chr(byte if byte in printable else BYTES + others.index(byte)) for byte in range(BYTES)}
    vocabulary = {character: byte or BYTES for byte, character in characters.items()}
    model = Model(models.BPE(vocab={"<eod>": tokenizer.eod} | vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return _with_end(model, tokenizer)


def _from_sentencepiece(tokenizer: Tokenizer) -> Any:
    """Build a model from pieces and scores; the probes tell whether it agrees."""
    import sentencepiece
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    data = _vocabulary(tokenizer)
    pieces, settings = sentencepiece.SentencePieceProcessor(model_proto=data), ModelSettings.read(data)
    if settings.is_bpe:
        model = Model(_bpe(pieces))
    else:
        scored = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]
        model = Model(models.Unigram(scored, unk_id=pieces.unk_id(), byte_fallback=True))
    if settings.dummy_prefix:
        model.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    else:  # the same as a normalizer, because Metaspace of tokenizers 0.15 always splits runs of spaces
        model.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if settings.dummy_prefix else steps)
    return _with_end(model, tokenizer)


def _bpe(pieces: Any) -> Any:
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


def _with_end(model: Any, tokenizer: Tokenizer) -> Any:
    """Mark the token that ends documents as a special one, which decoding leaves out."""
    model.add_special_tokens([model.id_to_token(tokenizer.eod)])
    return model


BUILDERS: dict[str, Callable[[Tokenizer], Any]] = {
    "HFTokenizer": _from_json,
    "GPT2BPETokenizer": _from_gpt2,
    "HFGPT2Tokenizer": _from_gpt2,
    "CharLevelTokenizer": _from_bytes,
    "SPMTokenizer": _from_sentencepiece,
}
"""By `tokenizer_type`: make a `tokenizers.Tokenizer`."""
