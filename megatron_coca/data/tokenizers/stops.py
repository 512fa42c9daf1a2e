"""Find the stop strings in generated tokens. A stop string may contain the names of special tokens."""

from collections.abc import Sequence

from megatron_coca.data.tokenizers.kinds import Tokenizer


def text_before_stop(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], context: Sequence[int] = ()
) -> tuple[str, bool]:
    """Return (text of `ids`, whether it contained a stop string). The text ends before the first stop string in it.

    Special tokens have no text, but a stop string can be the name of a special token, or contain such a name together
    with ordinary text. The tokens `context` precede `ids` and are not part of the text; they are decoded with `ids`
    because some tokenizers drop the space at the start of a text.
    """
    before = len(tokenizer.decode(context))
    text = tokenizer.decode([*context, *ids])[before:]
    if not stops:
        return text, False
    skipped = len(tokenizer.spell(context))
    spelled = tokenizer.spell([*context, *ids])[skipped:]
    begin = min((place for stop in stops if (place := spelled.find(stop)) >= 0), default=None)
    if begin is None:
        return text, False
    count, start = len(ids), spelled
    while count and (len(start) > begin or not spelled.startswith(start)):
        count -= 1
        start = tokenizer.spell([*context, *ids[:count]])[skipped:]
    return tokenizer.decode([*context, *ids[:count]])[before:] + spelled[len(start) : begin], True
