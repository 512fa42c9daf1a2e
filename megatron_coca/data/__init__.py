"""Data: corpora, tokenizers, shards on disk, and the order in which training reads the shards."""

from megatron_coca.data.blend import Blend, Samples, SourceShare
from megatron_coca.data.builtin import ensure_builtin, prepare_builtin
from megatron_coca.data.errors import DataError
from megatron_coca.data.loader import Batch, Loader, Packing
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.readers import corpus_files, read_documents
from megatron_coca.data.readers.source import Document, ReadingProblems, SourceSpec
from megatron_coca.data.shards import Shard
from megatron_coca.data.synthetic import SyntheticSamples, TaskSettings
from megatron_coca.data.tokenizers import load_saved_tokenizer, load_tokenizer, train_sentencepiece
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.training_positions import DrawnPositions
