"""Data: corpora to documents, tokenizers, shards on disk, and the order in which they are read."""

from megatron_coca.data.blend import Blend, SourceShare
from megatron_coca.data.builtin import ensure_builtin, prepare_builtin
from megatron_coca.data.corpora import Document, Problems, corpus_files, read_documents
from megatron_coca.data.errors import DataError
from megatron_coca.data.loader import Loader
from megatron_coca.data.prepare import SourceSpec, prepare, read_manifest
from megatron_coca.data.shards import Shard
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.load import load_saved_tokenizer, load_tokenizer, train_sentencepiece

__all__ = [
    "Blend",
    "DataError",
    "Document",
    "Loader",
    "Problems",
    "Shard",
    "SourceShare",
    "SourceSpec",
    "Tokenizer",
    "corpus_files",
    "ensure_builtin",
    "load_saved_tokenizer",
    "load_tokenizer",
    "prepare",
    "prepare_builtin",
    "read_documents",
    "read_manifest",
    "train_sentencepiece",
]
