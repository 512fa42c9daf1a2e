"""Train tokenizers of kinds that the package reads but does not train."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron_coca.data.tokenizers.huggingface_kind import HFTokenizer
from megatron_coca.data.tokenizers.sentencepiece_kind import SentencePieceTokenizer

SPACES = [" " * count for count in range(24, 1, -1)]


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> HFTokenizer:
    """A byte-level BPE in the shape of GPT-NeoX-20B's, without a normalizer, in ``path``: ``<|endoftext|>`` is 0,
    ``<|padding|>`` 1, then come bytes and merges, at the end runs of 24 down to 2 spaces.
    """
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = processors.ByteLevel(trim_offsets=True)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPACES),
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator((part for text in texts for part in re.split(" {2,}", text) if part), trainer)
    model.add_tokens([AddedToken(run, normalized=True) for run in SPACES])
    assert model.get_vocab_size() == vocab_size
    content = json.loads(model.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return HFTokenizer({"vocab_file": ("tokenizer.json", path.read_bytes())})


def train_unigram(texts: Iterable[str], vocab_size: int, path: Path) -> SentencePieceTokenizer:
    """A SentencePiece unigram model in ``path``, with byte fallback and without normalization."""
    with path.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split("\n") if line.strip()),
            model_writer=writer,
            model_type="unigram",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            control_symbols=["<eod>"],
            num_threads=1,
            minloglevel=2,
        )
    return SentencePieceTokenizer({"vocab_file": ("tokenizer.model", path.read_bytes())})
