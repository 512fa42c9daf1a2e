"""`megatron-coca evaluate longppl`: the perplexity of the tokens that need a long context, by length."""

import hashlib
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.identity import network_digest
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.kinds import agree
from megatron_coca.evaluation.documents import Documents, read_subject_documents
from megatron_coca.evaluation.options import resolve_device, subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, Missing, Show, measured, read_record
from megatron_coca.evaluation.statistics import exponential
from megatron_coca.evaluation.subject import Evaluation, noting_missing
from megatron_coca.evaluation.tasks.longppl.key_tokens import (
    ContextContrast,
    TokenSpan,
    key_tokens,
    losses_of,
    tokens_within,
    window_lengths,
)
from megatron_coca.evaluation.tasks.longppl.task import (
    Evaluator,
    LongPerplexity,
    LongPerplexityProtocol,
    LongPerplexityResult,
)
from megatron_coca.evaluation.tasks.perplexity.measure import LanguageModel
from megatron_coca.evaluation.window_progress import WindowProgress
from megatron_coca.model import GPT
from megatron_coca.support.plain_text import masked

PROTOCOL = (
    "LongPPL (arXiv 2410.23771): perplexity over the key tokens of the first N tokens of each document, given all "
    "tokens before them; a key token has log P(given all) - log P(given the short context) > alpha and log P(given "
    "all) > beta for the evaluator; stride tokens share the beginning of a short context; longppl = exp(sum of nll / "
    "number of key tokens) over all documents; nll in nats from the float32 log-softmax over the padded vocabulary"
)
"""Part of the identity of a result file: if this string changes, earlier files are not resumed."""


@dataclass(frozen=True)
class Prepared:
    """A document at one length: its tokens for the evaluated model (int64), and the places of its key tokens."""

    tokens: np.ndarray
    keys: np.ndarray


def run(args: Namespace, show: Show) -> int:
    contrast = ContextContrast(args.short, args.stride, args.alpha, args.beta)
    if min(args.lengths) <= contrast.short:
        raise EvaluationError(
            f"--lengths {min(args.lengths)}: must be longer than the short context of {contrast.short} tokens; raise "
            "it, or lower --short"
        )
    options = subject_options(args)
    evaluation = Evaluation(options, "longppl", show)
    documents = read_subject_documents(args, evaluation, max(args.lengths))
    opened = None if args.evaluator is None else open_checkpoint(args.evaluator)
    evaluator = None
    if opened is not None:
        found = opened.tokenizer().tokenizer
        evaluator = Evaluator(
            path=masked(str(args.evaluator)),
            identity=opened.identity,
            network=network_digest(opened.trained),
            tokenizer=None if found is None else found.fingerprint,
        )
    protocol = LongPerplexityProtocol(
        text=PROTOCOL, **vars(contrast), tokens_per_batch=args.tokens_per_batch, evaluator=evaluator
    )
    outputs = [options.output_of("longppl", variant.label) for variant in options.variants]
    shared = None
    if opened is not None and not all(output is not None and _has_all(output, args.lengths) for output in outputs):
        model = opened.load((), (), resolve_device(args.device), DTYPES[args.dtype], show=True).model
        shared = _prepare(model, opened.tokenizer().tokenizer, evaluation.tokenizer, documents, args, contrast)
        del model
    remedy = "lower --tokens-per-batch or the length, or use --dtype bfloat16"
    for subject, store in evaluation.variants(LongPerplexityResult, protocol=protocol, documents=documents.record()):
        for length in sorted(args.lengths):
            at = f"length {length}"
            if store.get((length,)) is not None:
                continue
            with noting_missing(store, at, remedy):
                arrays = [tokens[:length] for tokens in documents.arrays]
                progress = _progress(f"{subject.label}, {at}", arrays, contrast, shared is None, scores=True)
                with measured(subject.device) as meter, progress:
                    if shared is not None:
                        prepared = shared[length]
                    else:
                        prepared = _own(subject.model, arrays, contrast, args.tokens_per_batch, progress)
                    entry = long_perplexity(subject.model, prepared, length, progress.read)
                if entry is None:
                    reason = "no token needs the long context; lower --alpha or --beta, or use longer documents"
                    store.miss(Missing(at=at, kind="failed", reason=reason))
                else:
                    store.put(entry, Cost.of(at, meter, entry.tokens_scored))
    return evaluation.status


def _has_all(path: Path, lengths: Sequence[int]) -> bool:
    """Return True if a result file already has all lengths. `Store` checks later that it is of the same measurement."""
    try:
        found = read_record(path, LongPerplexityResult, "a result")
    except EvaluationError:
        return False
    return {(length,) for length in lengths} <= {entry.key for entry in found.results}


def _own(
    model: GPT, arrays: Sequence[np.ndarray], contrast: ContextContrast, batch: int, progress: WindowProgress
) -> list[Prepared]:
    """Let the evaluated model find its own key tokens."""
    return [Prepared(tokens, key_tokens(model, tokens, contrast, batch, progress.read)) for tokens in arrays]


def _progress(
    title: str, arrays: Sequence[np.ndarray], contrast: ContextContrast, finds: bool, scores: bool
) -> WindowProgress:
    """Return the progress of finding key tokens in documents, of scoring the documents, or of both."""
    lengths = [length for tokens in arrays for length in window_lengths(len(tokens), contrast) if finds]
    lengths += [len(tokens) for tokens in arrays if scores]
    return WindowProgress(title, len(lengths), sum(lengths))


def _prepare(
    model: GPT,
    evaluators: Tokenizer | None,
    own: Tokenizer | None,
    documents: Documents,
    args: Namespace,
    contrast: ContextContrast,
) -> dict[int, list[Prepared]]:
    """Find the key tokens of all documents at all lengths with the evaluator. Raises EvaluationError, DataError."""
    same = evaluators is None or own is None or agree(evaluators, own)
    found = {}
    for length in sorted(args.lengths):
        arrays = [tokens[:length] for tokens in documents.arrays]
        with _progress(f"key tokens, length {length}", arrays, contrast, finds=True, scores=False) as progress:
            batch, read = args.tokens_per_batch, progress.read
            keys = partial(key_tokens, model, contrast=contrast, tokens_per_batch=batch, read=read)
            if same:
                found[length] = [Prepared(tokens, keys(tokens)) for tokens in arrays]
                continue
            assert evaluators is not None and own is not None, "different tokenizers exist"
            texts = (own.decode(tokens.tolist()) for tokens in arrays)
            found[length] = [through_text(text, own, evaluators, keys, documents.start) for text in texts]
    return found


def through_text(
    text: str,
    own: Tokenizer,
    evaluators: Tokenizer,
    keys: Callable[[np.ndarray], np.ndarray],
    start: int | None = None,
) -> Prepared:
    """Return a text as the evaluated model's tokens, with the places of the key tokens that the evaluator finds.

    The evaluator has another tokenizer, and `keys` finds the places of key tokens in its tokens. `start` is put before
    the evaluated model's tokens.
    """
    ids, spans = evaluators.encode_rendered(text)
    prefix = evaluators.start
    first = [] if prefix is None else [prefix]
    places = keys(np.array([*first, *ids], dtype=np.int64)) - len(first)
    chosen: list[TokenSpan] = [spans[place] for place in places]
    tokens, offsets = own.encode_rendered(text)
    before = [] if start is None else [start]
    within = tokens_within([*[(0, 0)] * len(before), *offsets], chosen)
    return Prepared(np.array([*before, *tokens], dtype=np.int64), within)


def long_perplexity(
    model: LanguageModel,
    prepared: Sequence[Prepared],
    length: int,
    read: Callable[[int, int], None] = lambda windows, tokens: None,
) -> LongPerplexity | None:
    """Return the entry of one length, or None if no document has a key token.

    After each document, `read` is called with 1 and the document's number of tokens.
    """
    digest, sums, count, total, scored = hashlib.sha256(), [], 0, [], 0
    for document in prepared:
        losses = losses_of(model, document.tokens[None], len(document.tokens) - 1)[0]
        read(1, len(document.tokens))
        digest.update(len(document.keys).to_bytes(8, "little") + document.keys.astype("<i8").tobytes())
        sums.append(math.fsum(losses[document.keys - 1]))
        count += len(document.keys)
        total.append(math.fsum(losses))
        scored += len(losses)
    if not count:
        return None
    nll, nll_all = math.fsum(sums) / count, math.fsum(total) / scored
    return LongPerplexity(
        length=length,
        longppl=exponential(nll),
        nll=nll,
        perplexity=exponential(nll_all),
        nll_all=nll_all,
        key_tokens=count,
        tokens_scored=scored,
        keys_sha256=digest.hexdigest(),
        nll_by_document=sums,
    )
