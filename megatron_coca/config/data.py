"""Keys of the training data, the tokenizer, synthetic tasks and training positions."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_coca.config.base import MAX_COUNT, ConfigGroup, Count, NotNegative, PathName, Positive, key

Paths = Annotated[list[PathName], Field(min_length=1)]
Weights = Annotated[list[Positive], Field(min_length=1)]
Labels = list[PathName | None]
TokenizerType = Literal[
    "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
]


class SyntheticConfig(ConfigGroup):
    """A synthetic task as training data; docs/recall.md describes the tasks."""

    task: Literal["recall", "multi_query", "copy", "reverse", "ngram"] = key("recall", "Task.")
    facts: Count = key(8, "recall: facts in a sample; multi_query: at most.")
    keys: Count = key(16, "recall, multi_query: different keys, at least `facts`.")
    values: Count = key(16, "recall, multi_query: different values.")
    ngram: int = Field(default=3, ge=2, description="ngram: tokens of the repeated n-gram.")
    filler_tokens: Count = key(
        32, "Ids of filler tokens, from 0; with `text` at least the vocabulary of the text. Facts have the next ids."
    )
    text: bool = key(False, "Fill with the text of the data paths instead of independent random tokens.")
    loss: Literal["answers", "all"] = key("answers", "Tokens that count in the loss.")


class TrainingPositions(ConfigGroup):
    """Positions of training samples other than 0, 1, ...; evaluation always has those."""

    type: Literal["randomized", "shifted", "pose", "stretched"] = Field(
        description="randomized: a sorted random subset of 0 .. max-1; shifted: one random offset; pose: two chunks,"
        " the second at a random offset (PoSE); stretched: a sorted random subset with both ends of t times the length,"
        " for a random integer t in every step (CLEX)."
    )
    max: Count | str = Field(description="Positions are below it: a number, or a multiple of seq_length such as 16L.")


def _join(split: Any) -> Any:
    return ", ".join(str(share) for share in split) if isinstance(split, list | tuple) else split


class DataConfig(ConfigGroup):
    """Training data and tokenizer."""

    data_path: PathName | None = key(None, "Prefix of one shard, divided by `split`.")
    train_data_paths: Paths | None = key(None, "Prefixes of the training shards.")
    valid_data_paths: list[PathName] | None = key(None, "Prefixes of the validation shards; `[]` for none.")
    test_data_paths: list[PathName] | None = key(None, "Prefixes of the test shards; `[]` for none.")
    train_data_weights: Weights | None = key(None, "Weights of the training shards; null means equal.")
    valid_data_weights: Weights | None = key(None, "Weights of the validation shards; null means equal.")
    test_data_weights: Weights | None = key(None, "Weights of the test shards; null means equal.")
    train_label_data_paths: Labels | None = key(None, "Prefix of the labels of each training shard; null for none.")
    valid_label_data_paths: Labels | None = key(None, "The same for the validation shards.")
    test_label_data_paths: Labels | None = key(None, "The same for the test shards.")
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked"] = key(
        "packed",
        "Samples: slices of the concatenated documents, as many whole documents as fit, or one document each.",
    )
    allow_chopped: bool = key(True, "Cut documents longer than a sample unless packed; false leaves them out.")
    weight_by_num_documents: bool | None = key(
        None, "Weight the shards of each set by GPT-NeoX's formula of their documents; replaces the weights."
    )
    weighted_sampler_alpha: NotNegative | None = key(
        None, "Exponent of a shard's share of the documents in that formula; below 1 favours small shards. null: 1."
    )
    split: Annotated[str, BeforeValidator(_join)] = key(
        "969, 30, 1", "Proportions of train, validation and test documents in data_path; a string or a list."
    )
    data_impl: Literal["infer", "mmap"] = key("infer", "Format of the shards; both mean memory-mapped.")
    num_workers: Annotated[int, Field(ge=0, le=1024)] = key(
        2, "Prefetch threads per process, one step each; 0 disables prefetching."
    )
    reset_attention_mask: bool = key(False, "Restrict attention to the document of each token in packed samples.")
    reset_position_ids: bool = key(False, "Restart positions at 0 in every document of a packed sample.")
    eod_mask_loss: bool = key(False, "Mask the loss where the input is the end-of-document token.")
    tokenizer_type: TokenizerType = key("GPT2BPETokenizer", "Tokenizer type.")
    vocab_file: PathName | None = key(None, "Vocabulary or model file of the tokenizer.")
    merge_file: PathName | None = key(None, "Merges file of the tokenizer, if it has one.")
    data_root: PathName = key("data", "Folder of the built-in corpus, used if no data path is set.")
    synthetic: SyntheticConfig | None = key(
        None, "Train on a synthetic task instead of the data paths; with `text`, on one mixed into their text."
    )


def window_tokens(window: int | str, seq_length: int) -> int | None:
    """Return the tokens of a number above 1 or of a multiple of seq_length such as `4L`; None for anything else."""
    multiple = re.fullmatch("([0-9]{1,10})L", window) if isinstance(window, str) else None
    tokens = int(multiple[1]) * seq_length if multiple else window
    return tokens if isinstance(tokens, int) and 2 <= tokens <= MAX_COUNT else None


def split_shares(split: str) -> tuple[float, float, float] | None:
    """Parse `split` into proportions of train, validation and test, or None unless it has one to three numbers."""
    numbers = [text.strip() for text in split.replace("/", ",").split(",")]
    if len(numbers) > 3 or not all(text.replace(".", "", 1).isdecimal() for text in numbers):
        return None
    train, valid, test = ([float(text) for text in numbers] + [0.0, 0.0])[:3]
    return (train, valid, test) if 0 < train + valid + test < math.inf else None
