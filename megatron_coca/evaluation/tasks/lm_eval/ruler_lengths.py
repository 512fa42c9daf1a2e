"""Checks of ruler's lengths.

If the shortest prompt exceeds a length, ruler's code never ends or makes empty prompts.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoTokenizer

from megatron_coca.evaluation.results import EvaluationError

DRAWS = 20
"""Number of random prompts that are measured."""
EXAMPLE_LENGTH = 500
"""Maximum tokens of the example in prompts of ruler_vt."""
CountTokens = Callable[[str], int]


def check_lengths(function: str, metadata: Mapping[str, Any]) -> None:
    """Raise EvaluationError if a length in the metadata is too short for a task with this `custom_dataset`.

    The keys of the metadata are `max_seq_lengths` and `tokenizer`. Only the functions in `SHORTEST` are checked.
    """
    if function not in SHORTEST:
        return
    lengths = metadata.get("max_seq_lengths", [4096])
    if not isinstance(lengths, list) or not all(isinstance(length, int) for length in lengths):
        raise EvaluationError(
            f"--metadata max_seq_lengths {lengths!r}: is not a list of lengths in tokens; write "
            '{"max_seq_lengths": [4096, 8192]}'
        )
    tokenizer = AutoTokenizer.from_pretrained(metadata["tokenizer"])
    for length in lengths:
        needed = SHORTEST[function](lambda text: len(tokenizer(text).input_ids), length)
        if needed > length:
            raise EvaluationError(
                f"--metadata max_seq_lengths {length}: is too short, because the task's shortest prompt and answer "
                f"have {needed} tokens with this tokenizer; name longer lengths"
            )


def _code(name: str) -> Any:
    return importlib.import_module(f"lm_eval.tasks.ruler.{name}")


def _variable_tracking(count: CountTokens, length: int) -> int:
    code = _code("vt_utils")
    example = min(count(code.generate_input_output(5, 1, 4, is_icl=True)[0]) for _ in range(DRAWS)) + 30
    if example > EXAMPLE_LENGTH:
        raise EvaluationError(
            f"ruler_vt: its example has at least {example} tokens with this tokenizer, but the task's code allows "
            f"{EXAMPLE_LENGTH}; leave the task out, or use a model with longer tokens"
        )
    return example + min(count(code.generate_input_output(10, 1, 4)[0]) for _ in range(DRAWS)) + 30


def _common_words(count: CountTokens, length: int) -> int:
    """Measure the task's first attempt. If that is too long, the task makes prompts without any words."""
    code = _code("cwe_utils")
    state = code.RNG.getstate()
    attempts = [code.generate_input_output(10, length) for _ in range(DRAWS)]
    code.RNG.setstate(state)
    numbered = (
        f"{example}\n{text} " + " ".join(f"{index}. {word}" for index, word in enumerate(answer, 1))
        for example, text, answer in attempts
    )
    return max(map(count, numbered)) + 120


def _frequent_words(count: CountTokens, length: int) -> int:
    code = _code("fwe_utils")
    # The task draws length // 50 different words, and needs at least four.
    return max(200, count(code.TEMPLATE.format(context="", query="")) + 50)


SHORTEST: Mapping[str, Callable[[CountTokens, int], int]] = {
    "vt_utils.get_vt_dataset": _variable_tracking,
    "cwe_utils.get_cw_dataset": _common_words,
    "fwe_utils.fwe_download": _frequent_words,
}
"""For each task's function, the function that computes the tokens of the shortest prompt and its answer."""
