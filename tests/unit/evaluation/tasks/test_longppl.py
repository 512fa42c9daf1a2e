"""`megatron-coca evaluate longppl`: key tokens and their perplexity, against the definition in arXiv 2410.23771."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_coca.checkpoints import load_model
from megatron_coca.commands.evaluate import main
from megatron_coca.evaluation.tasks.longppl.key_tokens import ContextContrast, key_tokens, tokens_within, window_lengths
from megatron_coca.evaluation.tasks.longppl.measure import Prepared, long_perplexity, through_text
from megatron_coca.evaluation.tasks.longppl.task import LongPerplexityResult
from megatron_coca.model import GPT
from tests.checkpoint_files import BYTES
from tests.parity.exported import NEOX, random_checkpoint
from tests.unit.evaluation.benchmark_cases import word_tokenizer

CONTRAST = ContextContrast(short=8, stride=3, alpha=0.02, beta=-6.4)
LENGTH = 45
"""Not a multiple of the stride after the short context: the last short window is shorter."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("longppl") / "run", **NEOX)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> GPT:
    return load_model(checkpoint)


def document(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, LENGTH)


@torch.inference_mode()
def log_probability(model: GPT, context: np.ndarray, token: int) -> float:
    """The log-probability of one token after a context, from a separate forward pass."""
    logits = model.logits(model.hidden_states(torch.from_numpy(context)[None]))[0, -1]
    return float(logits.double().log_softmax(-1)[token])


def by_definition(model: GPT, tokens: np.ndarray, contrast: ContextContrast) -> dict[int, float]:
    """The key tokens of a document, and their log-probabilities given all tokens before them."""
    found = {}
    for place in range(contrast.short, len(tokens)):
        begin = (place - contrast.short) // contrast.stride * contrast.stride
        long = log_probability(model, tokens[:place], tokens[place])
        short = log_probability(model, tokens[begin:place], tokens[place])
        if long - short > contrast.alpha and long > contrast.beta:
            found[place] = long
    return found


@pytest.mark.parametrize("tokens_per_batch", [1, 40])
def test_longppl_is_that_of_the_definition(model: GPT, tokens_per_batch: int) -> None:
    documents = [document(seed) for seed in (1, 2)]
    expected = [by_definition(model, tokens, CONTRAST) for tokens in documents]
    found = [key_tokens(model, tokens, CONTRAST, tokens_per_batch) for tokens in documents]
    assert [places.tolist() for places in found] == [list(keys) for keys in expected]
    assert all(0 < len(keys) < LENGTH - CONTRAST.short for keys in expected), "the thresholds choose"
    prepared = [Prepared(tokens, places) for tokens, places in zip(documents, found, strict=True)]
    entry = long_perplexity(model, prepared, LENGTH)
    known = [value for keys in expected for value in keys.values()]
    assert entry is not None and entry.key_tokens == len(known)
    assert entry.longppl == pytest.approx(math.exp(-sum(known) / len(known)), rel=1e-5)


@pytest.mark.parametrize("tokens_per_batch", [1, 40])
def test_windows_are_counted(model: GPT, tokens_per_batch: int) -> None:
    read: list[tuple[int, int]] = []
    key_tokens(model, document(1), CONTRAST, tokens_per_batch, lambda *passed: read.append(passed))
    lengths = window_lengths(LENGTH, CONTRAST)
    assert [sum(passed) for passed in zip(*read, strict=True)] == [len(lengths), sum(lengths)]


def test_without_key_tokens(model: GPT) -> None:
    assert key_tokens(model, document(1)[:8], CONTRAST).tolist() == []
    assert long_perplexity(model, [Prepared(document(1), np.array([], dtype=np.int64))], LENGTH) is None


def test_key_tokens_of_another_tokenizer(tmp_path: Path) -> None:
    """A token is a key token if its characters lie in adjoining key tokens of the evaluator."""
    words = word_tokenizer(tmp_path)
    text = "The sky is blue. The sun is yellow."
    ids, spans = words.encode_rendered(text)
    assert len(ids) < len(text) - 10, "some tokens have several characters"
    chosen = [1, 2, len(ids) - 1]
    prepared = through_text(text, BYTES, words, lambda tokens: np.array(chosen))
    expected = [place for place in range(1, len(text)) if any(spans[c][0] <= place < spans[c][1] for c in chosen)]
    assert prepared.keys.tolist() == expected and prepared.tokens.tolist() == BYTES.encode(text)
    back = tokens_within(spans, [(place, place + 1) for place in expected])
    assert back.tolist() == chosen, "tokens of several characters lie in joined spans"


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Key tokens come from the evaluator for all variants, and the evaluator is part of the measurement."""
    (tmp_path / "text.txt").write_text("The sea was calm, and a small boat lay near its shore until morning came. " * 2)
    given = ["longppl", "--checkpoint", str(checkpoint), "--data", str(tmp_path / "text.txt"), "--device", "cpu"]
    given += ["--variant", "plain", "--variant", "PI", "rope_scaling.rope_type=linear", "rope_scaling.factor=2"]
    given += ["--short", "8", "--stride", "4", "--alpha", "0.01", "--beta", "-8", "--output", str(tmp_path / "out")]
    assert main([*given, "--lengths", "24,48", "--evaluator", str(checkpoint)]) == 0
    shown = capsys.readouterr()
    assert "LongPPL by length" in shown.out
    assert "key tokens, length 48: 0/11 windows" in shown.err and "plain, length 48: 0/1 windows" in shown.err
    read = [
        LongPerplexityResult.model_validate_json((tmp_path / "out" / f"longppl_{name}.json").read_bytes())
        for name in ("plain", "pi")
    ]
    plain, scaled = (result.results for result in read)
    assert [entry.keys_sha256 for entry in plain] == [entry.keys_sha256 for entry in scaled]
    assert plain[1].longppl != scaled[1].longppl and 0 < plain[1].key_tokens < plain[1].tokens_scored == 47
    before = (tmp_path / "out/longppl_pi.json").read_bytes()
    assert main([*given, "--lengths", "24,48", "--evaluator", str(checkpoint)]) == 0
    assert (tmp_path / "out/longppl_pi.json").read_bytes() == before
    assert main([*given, "--lengths", "24,48"]) == 2
    assert "different protocol.evaluator" in capsys.readouterr().err
    assert main([*given, "--lengths", "8,48"]) == 2
    assert "--lengths 8: must be longer than the short context" in capsys.readouterr().err
    given[given.index("--alpha") + 1] = "9"
    assert main([*given, "--lengths", "24", "--overwrite"]) == 2
    assert "length 24: failed: no token needs the long context" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/longppl_pi.json").read_bytes())["results"] == []
