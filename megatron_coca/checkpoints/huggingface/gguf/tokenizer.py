"""Read the settings of the tokenizer in a GGUF file that transformers does not read.

transformers converts the vocabulary. It ignores the key for a space before each text, and some tokens that end an
answer. If it does not know the name in `tokenizer.ggml.pre`, it also ignores how a text is divided before merges.
"""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]
PREFIX = "tokenizer."
READ = frozenset(
    (
        *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.scores", "ggml.token_type", "ggml.merges"),
        *("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix", "chat_template"),
        *("ggml.bos_token_id", "ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id"),
        *("ggml.unknown_token_id", "ggml.padding_token_id"),
    )
)
"""Keys that transformers or this module reads. They are listed without `PREFIX`."""
NO_EFFECT = frozenset(
    (
        *("ggml.token_type_count", "ggml.seperator_token_id", "ggml.separator_token_id", "ggml.mask_token_id"),
        *("ggml.cls_token_id", "ggml.remove_extra_whitespaces", "huggingface.json", "chat_templates"),
        *(f"ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
        *(f"ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")),
    )
)
"""Keys that do not change how supported tokenizers encode a text."""
ENDS = ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")
"""Keys with ids that end a generated text."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"), (_GPT2,)),
    **dict.fromkeys(("a.x-4.0", "mellum", "modern-bert", "exaone4", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    "granite-docling": (_GPT2,),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    "minerva-7b": (r"\p{N}", _GPT2),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), (rf"{_WORDS}|\p{{N}}|{_REST}",)),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS),
}
"""The value of `tokenizer.ggml.pre` -> the patterns by which llama.cpp divides a text, one after the other. Names that
transformers knows are not in this table.
"""


def problem(fields: Json) -> str | None:
    """Return the reason why the conversion of a tokenizer could change tokens, or None.

    `fields` are the values in the header of the file.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    given = {name.removeprefix(PREFIX): value for name, value in fields.items() if name.startswith(PREFIX)}
    unread = [name for name in given if name not in READ | NO_EFFECT and not name.startswith("chat_template.")]
    if unread:
        return f"{PREFIX}{unread[0]}: not supported and may change the tokens"
    if given.get("ggml.model") == "gpt2":
        split = given.get("ggml.pre")
        if split is None:
            return f"{PREFIX}ggml.pre: missing, so it is unknown how texts are divided"
        if split not in SPLITS and split not in GGUF_PRE_TOKENIZER_SPLITS:
            return f"{PREFIX}ggml.pre: {split!r} is unknown, so it is unknown how texts are divided"
    return None


def adapt(model: Any, fields: Json) -> None:
    """Set the parts of a `tokenizers.Tokenizer` that transformers does not read from the file."""
    from tokenizers import Regex, decoders, pre_tokenizers

    split = fields.get(f"{PREFIX}ggml.pre")
    if fields.get(f"{PREFIX}ggml.model") == "gpt2" and split in SPLITS:
        patterns = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[split]]
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = pre_tokenizers.Sequence([*patterns, bytes_])
    # Gemma's tokenizer never begins a text with a space.
    plain = fields.get(f"{PREFIX}ggml.model") == "llama" and not str(fields["general.architecture"]).startswith("gemma")
    if plain and fields.get(f"{PREFIX}ggml.add_space_prefix") is False:
        model.normalizer = None
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        spaces = decoders.Replace("\u2581", " ")
        model.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])


def ends_of(fields: Json) -> list[int]:
    """Return the ids that end a generated text."""
    return list(dict.fromkeys(int(fields[PREFIX + name]) for name in ENDS if PREFIX + name in fields))
