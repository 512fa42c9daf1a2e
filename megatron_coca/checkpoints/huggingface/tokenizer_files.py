"""Convert our tokenizers to files for Hugging Face's AutoTokenizer, which encodes texts to the same ids."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.files import CheckpointError, read_json, read_json_if_present
from megatron_coca.checkpoints.huggingface.config_json import CONFIG
from megatron_coca.checkpoints.huggingface.read import GENERATION
from megatron_coca.checkpoints.tokenizer import largest_named_id, read_tokenizer
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.data.tokenizers.end_tokens import TOKENIZER_FILES, check_links, with_text_keys
from megatron_coca.data.tokenizers.huggingface_kind import GPT2BPETokenizer, HFTokenizer
from megatron_coca.data.tokenizers.kinds import PROBES, first_difference
from megatron_coca.data.tokenizers.sentencepiece_kind import ModelSettings
from megatron_coca.data.tokenizers.text_rules import token_ids

SETTINGS = (GENERATION, "tokenizer_config.json", "special_tokens_map.json")
CODE = "auto_map"
"""`SETTINGS` are files with settings. In these files, the key `CODE` names Python code in any folder or repository."""


class TokenIds(NamedTuple):
    """Special token ids for config.json, or None. `eos` may be a list."""

    bos: Any = None
    eos: Any = None
    pad: Any = None


class TokenizerFiles(NamedTuple):
    """Tokenizer and generation files by name, special token ids for config.json, and a note or None."""

    files: Mapping[str, bytes]
    ids: TokenIds
    note: str | None


def own_files(folder: Path) -> TokenizerFiles:
    """Return the tokenizer and generation files of a Hugging Face folder, for an export of this folder.

    Keys that name Python code are left out, because an export contains no code from elsewhere. Raises CheckpointError
    for a symbolic link that leads out of the folder, because uploading the export would publish a copy of a private
    file.
    """
    check_links(folder, CheckpointError)
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    named = [name for name in SETTINGS if name in files and CODE in read_json(folder / name)]
    files |= {name: _without_code(read_json(folder / name), files) for name in named}
    config = with_text_keys(read_json_if_present(folder / CONFIG))
    given = (config.get(f"{name}_token_id") for name in TokenIds._fields)
    ids = TokenIds(*(None if value == [] else value for value in given))
    notes = [f"{folder / name}: {CODE} is left out, because exports contain no code from elsewhere" for name in named]
    if not any("token" in name for name in files):
        notes.append(f"{folder}: no tokenizer, so the export has none")
    return TokenizerFiles(files, ids, "; ".join(notes) or None)


def _without_code(content: dict[str, Any], files: Mapping[str, bytes]) -> bytes:
    """Return a JSON file without the key that names code.

    If `files` has a tokenizer.json, the key `tokenizer_class` is set to a class that reads any tokenizer.json.
    """
    left = {key: value for key, value in content.items() if key != CODE}
    if "tokenizer_class" in left and "tokenizer.json" in files:
        left["tokenizer_class"] = "PreTrainedTokenizerFast"
    return (json.dumps(left, indent=1, ensure_ascii=False) + "\n").encode()


def original_files(folder: Path, tokenizer: Tokenizer | None, known: int) -> TokenizerFiles:
    """Return the tokenizer and generation files of the original model, after checking that they fit.

    Args:
        folder: Hugging Face folder with tokenizer files; its other files are optional.
        tokenizer: the checkpoint's tokenizer. The tokenizer in `folder` must produce the same ids. None skips this
            check.
        known: number of token ids of the model, without padding.

    Raises:
        CheckpointError: `folder` has no tokenizer, its tokenizer produces other ids, or it has ids that the model
            lacks. Special tokens around or within texts are not compared.
    """
    theirs, note = read_tokenizer(folder, known)
    if theirs is None:
        raise CheckpointError(f"{folder}: no tokenizer for the export ({note}); use the folder of the original model")
    own, largest = own_files(folder), largest_named_id(folder)
    if theirs.rows is not None and (tokenizer is None or tokenizer.vocab_size != theirs.vocab_size):
        largest = max(largest, theirs.vocab_size - 1)
    if largest >= known:
        raise CheckpointError(
            f"{folder}: has token id {largest}, but the model has only {known} tokens; use the folder with the "
            "model's own tokenizer"
        )
    if tokenizer is None:
        compared = f"{folder}: tokenizer was not compared, because the checkpoint has no tokenizer"
        return own._replace(note="; ".join(filter(None, (own.note, compared))))
    differing = first_difference(theirs, tokenizer)
    if differing is not None:
        raise CheckpointError(
            f"{folder}: tokenizer produces other ids than the checkpoint's {tokenizer.tokenizer_type} for "
            f"{differing!r}; use the folder of the model that training started from"
        )
    end = tokenizer.eod
    given = read_json_if_present(folder / GENERATION).get("eos_token_id")
    ends = {theirs.eod, *token_ids(own.ids.eos), *token_ids(given)}
    note = "; ".join(filter(None, (note, own.note))) or None
    if end not in ends:
        return _with_added_end(own, sorted(ends), end, note)
    eos = end if own.ids.eos is None else own.ids.eos
    return own._replace(ids=own.ids._replace(eos=eos), note=note)


def _with_added_end(own: TokenizerFiles, ends: list[int], end: int, note: str | None) -> TokenizerFiles:
    """Add the checkpoint's end-of-text token `end` to the tokens that end a text in the original's files."""
    files, merged = dict(own.files), [*ends, end]
    if GENERATION in files:
        content = json.loads(files[GENERATION]) | {"eos_token_id": merged}
        files[GENERATION] = (json.dumps(content, indent=1) + "\n").encode()
    added = f"eos_token_id: is {merged} in {GENERATION}, because the checkpoint ends texts with {end}"
    note = "; ".join(filter(None, (note, added)))
    return own._replace(files=files, ids=own.ids._replace(eos=merged), note=note)


def suppress_tokens(data: bytes, unused: list[int]) -> bytes:
    """Add the ids in `unused` to `suppress_tokens` in a generation_config.json; `data` is the file's content."""
    content = json.loads(data)
    listed = content.get("suppress_tokens") or []
    if set(unused) <= set(listed):
        return data
    return (json.dumps(content | {"suppress_tokens": sorted({*listed, *unused})}, indent=1) + "\n").encode()


# tokenizer.json -------------------------------------------------------------------------------------------------------

BYTES = 256
SPACE = "\u2581"  # SentencePiece's symbol for a space
ADDING_PROCESSORS = frozenset({"TemplateProcessing", "BertProcessing", "RobertaProcessing"})
"""Post-processors that add special tokens around a text. Training data has no such tokens."""


def tokenizer_files(tokenizer: Tokenizer, begun: bool = False) -> tuple[dict[str, bytes], str | None]:
    """Return the tokenizer files for an export, and a note or None.

    The note names a text that a tokenizer.json would encode differently. `begun` is whether the model was trained with
    a token that begins texts. Data that was prepared with this project has no such token.
    """
    own = dict(tokenizer.files.values())
    model = BUILDERS[tokenizer.tokenizer_type](tokenizer)
    # A special token that is spelled out in a text is encoded as ordinary characters (`split_special_tokens` below).
    model.encode_special_tokens = True
    differing = next((text for text in PROBES if model.encode(text).ids != tokenizer.encode(text)), None)
    if differing is not None:
        kept = f"the folder has {', '.join(own)} instead" if own else "the folder has no tokenizer"
        return own, f"{tokenizer.tokenizer_type} as a tokenizer.json produces other ids for {differing!r}; {kept}"
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
        named = isinstance(tokenizer, HFTokenizer)  # its chats contain special tokens
        settings |= {"chat_template": tokenizer.chat.source, "split_special_tokens": not named}
    return {
        "tokenizer.json": _readable_by_older(json.loads(model.to_str())),
        "tokenizer_config.json": (json.dumps(settings, indent=1) + "\n").encode(),
    }, None


def end_ids(tokenizer: Tokenizer) -> int | list[int]:
    """Return `eos_token_id` for a model with this tokenizer: one id, or a list if several ids end a text or a turn."""
    turns: list[int] = []
    if tokenizer.chat is not None:
        with suppress(DataError):  # the tokenizer cannot encode chats, or the template renders no turn
            turns = tokenizer.turn_ends()[0]
    ends = [*dict.fromkeys([*tokenizer.ends, *turns])]
    return ends if len(ends) > 1 else ends[0]


def _readable_by_older(content: dict[str, Any]) -> bytes:
    """Return a tokenizer.json with merges as strings, which tokenizers 0.15 needs. Newer versions read both forms."""
    merges = content["model"].get("merges", [])
    if not any(" " in part for pair in merges for part in pair):  # a space inside a part would be ambiguous
        content["model"] |= {"merges": [" ".join(pair) for pair in merges]} if merges else {}
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


def _vocabulary(tokenizer: Tokenizer) -> bytes:
    return tokenizer.files["vocab_file"][1]


def _from_json(tokenizer: Tokenizer) -> Any:
    """Load a tokenizer.json, but drop its truncation, padding and dropout, and any post-processor that adds tokens."""
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
    """Build a tokenizer with one token for each byte. The NUL byte has id 256, because id 0 ends documents.

    Byte-level tokenizers represent each printable Latin-1 byte as itself and the other bytes, in order, as characters
    from U+0100 on (Radford et al. 2019, GPT-2's encoder).
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
    """Build a tokenizer from SentencePiece pieces and scores. `tokenizer_files` checks that both give the same ids."""
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
    else:  # not Metaspace, because in tokenizers 0.15 it always splits runs of spaces
        model.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if settings.dummy_prefix else steps)
    return _with_end(model, tokenizer)


def _bpe(pieces: Any) -> Any:
    """Return a BPE model with a merge for each way to split a piece into two known pieces.

    SentencePiece merges the two neighbouring pieces that form the piece with the best score.
    """
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
    """Mark the token that ends documents as special, so that decoding skips it."""
    model.add_special_tokens([model.id_to_token(tokenizer.eod)])
    return model


BUILDERS: dict[str, Callable[[Tokenizer], Any]] = {
    "HFTokenizer": _from_json,
    "GPT2BPETokenizer": _from_gpt2,
    "HFGPT2Tokenizer": _from_gpt2,
    "CharLevelTokenizer": _from_bytes,
    "SPMTokenizer": _from_sentencepiece,
}
"""`tokenizer_type` -> a function that converts our tokenizer to a `tokenizers.Tokenizer`."""
