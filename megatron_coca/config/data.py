"""Keys of the training data, the tokenizer, synthetic tasks and training positions."""

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_serializer

from megatron_coca.config.base import MAX_COUNT, ConfigGroup, Count, NotNegative, PathName, Positive, key

Paths = Annotated[list[PathName], Field(min_length=1)]
SourceWeights = Annotated[list[Positive], Field(min_length=1)]
Labels = list[PathName | None]
TokenizerType = Literal[
    "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
]


class SyntheticConfig(ConfigGroup):
    """A synthetic task as training data. docs/recall.md describes the tasks."""

    task: Literal["recall", "ordered_recall", "multi_query", "copy", "reverse", "ngram"] = key(
        "recall", "Name of the task."
    )
    facts: Count = key(
        8, "recall, ordered_recall: number of facts in a sample; multi_query: maximum number of facts in a sample."
    )
    keys: Count = key(16, "recall, ordered_recall, multi_query: number of different keys in the vocabulary.")
    values: Count = key(16, "recall, ordered_recall, multi_query: number of different values.")
    updates: Count | None = key(
        None, "ordered_recall: number of values that each key of a sample gets, one after the other; required."
    )
    back: Count | None = key(
        None, "ordered_recall: largest k in questions for the value of the k-th fact before them; default: `facts`."
    )
    ngram: int = Field(default=3, ge=2, description="ngram: length of the repeated n-gram in tokens.")
    filler_tokens: Count = key(
        32,
        "Number of ids for filler tokens, counted from id 0. Facts use the ids after them. With `text`, this must be at"
        " least the vocabulary size.",
    )
    text: bool = key(False, "Fill samples with text from the data paths instead of random tokens.")
    loss: Literal["answers", "all"] = key("answers", "Tokens that the loss includes: only the answers, or all tokens.")

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Leave out `updates` and `back` if not set, because archived studies record their data without them."""
        optional = ("updates", "back")
        return {name: value for name, value in handler(self).items() if name not in optional or value is not None}


class TrainingPositions(ConfigGroup):
    """Positions of training samples. Without this key, and always in evaluation, positions are 0, 1, ..."""

    type: Literal["randomized", "shifted", "pose", "stretched"] = Field(
        description="randomized: a sorted random subset of 0 .. max-1; shifted: 0, 1, ... plus a random offset; pose:"
        " two chunks, the second at a random offset (PoSE); stretched: a sorted random subset of 0 .. t * length - 1"
        " that includes both ends; t is a random integer, drawn in every step (CLEX)."
    )
    max: Count | str = Field(
        description="Upper limit of the positions (exclusive): a number, or a multiple of seq_length such as 16L."
    )


def _join(split: Any) -> Any:
    return ", ".join(str(share) for share in split) if isinstance(split, list | tuple) else split


class DataConfig(ConfigGroup):
    """Training data and tokenizer."""

    data_path: PathName | None = key(None, "Prefix of one shard, divided by `split`.")
    train_data_paths: Paths | None = key(None, "Prefixes of the training shards.")
    valid_data_paths: list[PathName] | None = key(None, "Prefixes of the validation shards; `[]` for none.")
    test_data_paths: list[PathName] | None = key(None, "Prefixes of the test shards; `[]` for none.")
    train_data_weights: SourceWeights | None = key(None, "Weights of the training shards; null: equal weights.")
    valid_data_weights: SourceWeights | None = key(None, "Weights of the validation shards; null: equal weights.")
    test_data_weights: SourceWeights | None = key(None, "Weights of the test shards; null: equal weights.")
    train_label_data_paths: Labels | None = key(
        None, "Prefixes of the labels, one for each training shard; null for a shard without labels."
    )
    valid_label_data_paths: Labels | None = key(None, "Like train_label_data_paths, but for the validation shards.")
    test_label_data_paths: Labels | None = key(None, "Like train_label_data_paths, but for the test shards.")
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked"] = key(
        "packed",
        "Contents of a sample. packed: a slice of the concatenated documents; pack_until_overflow: as many whole"
        " documents as fit; unpacked: one document.",
    )
    allow_chopped: bool = key(
        True, "Unless pack_impl is packed: cut documents that are longer than a sample; false leaves them out."
    )
    weight_by_num_documents: bool | None = key(
        None,
        "Compute the weights of the shards in each set from their numbers of documents with GPT-NeoX's formula,"
        " instead of using the configured weights.",
    )
    weighted_sampler_alpha: NotNegative | None = key(
        None,
        "weight_by_num_documents: exponent of a shard's share of the documents; a value below 1 favours small shards."
        " null: 1.",
    )
    split: Annotated[str, BeforeValidator(_join)] = key(
        "969, 30, 1", "Proportions of training, validation and test documents in data_path; a string or a list."
    )
    data_impl: Literal["infer", "mmap"] = key(
        "infer", "Format of the shards; `infer` and `mmap` both mean memory-mapped files."
    )
    num_workers: Annotated[int, Field(ge=0, le=1024)] = key(
        2, "Prefetch threads per process. Each prepares the samples of one step; 0 disables prefetching."
    )
    reset_attention_mask: bool = key(False, "In packed samples, restrict attention to the document of each token.")
    reset_position_ids: bool = key(False, "In packed samples, restart positions at 0 in every document.")
    eod_mask_loss: bool = key(False, "Exclude a position from the loss if its input token is an end-of-document token.")
    tokenizer_type: TokenizerType = key("GPT2BPETokenizer", "Tokenizer type.")
    vocab_file: PathName | None = key(None, "Vocabulary or model file of the tokenizer.")
    merge_file: PathName | None = key(None, "Merges file of the tokenizer, if it has one.")
    data_root: PathName = key("data", "Folder of the built-in corpus, which is used if no data path is set.")
    synthetic: SyntheticConfig | None = key(
        None,
        "Train on a synthetic task instead of the data paths. With `text`, the task is mixed into their text.",
    )


def window_tokens(window: int | str, seq_length: int) -> int | None:
    """Return the tokens of a window, given as a number above 1 or a multiple of seq_length such as `4L`; else None."""
    multiple = re.fullmatch("([0-9]{1,10})L", window) if isinstance(window, str) else None
    tokens = int(multiple[1]) * seq_length if multiple else window
    return tokens if isinstance(tokens, int) and 2 <= tokens <= MAX_COUNT else None


def split_shares(split: str) -> tuple[float, float, float] | None:
    """Return the training, validation and test shares in `split`; None if it is not a list of one to three numbers."""
    numbers = [text.strip() for text in split.replace("/", ",").split(",")]
    if len(numbers) > 3 or not all(text.replace(".", "", 1).isdecimal() for text in numbers):
        return None
    train, valid, test = ([float(text) for text in numbers] + [0.0, 0.0])[:3]
    return (train, valid, test) if 0 < train + valid + test < math.inf else None
