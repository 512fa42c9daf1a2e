"""Why a task could not be loaded or run, in one text."""

import re

from megatron_coca.evaluation.results import EvaluationError

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Of an object in memory: it differs from run to run, and a result file must not."""


SAYS_NOTHING = {"StopIteration": "nothing to read, as in an empty file of documents"}
"""What errors mean that come without a text."""


def reason(error: BaseException) -> str:
    """The error's type and text, and those of what it was raised from, down to the first cause; one line."""
    told = [_told(error)]
    cause = error.__cause__
    while cause is not None and not isinstance(error, EvaluationError):
        told.append(_told(cause))
        cause = cause.__cause__
    return ADDRESS.sub("", "; caused by ".join(told))


def _told(error: BaseException) -> str:
    kind, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, EvaluationError):
        return text
    text = text or SAYS_NOTHING.get(kind, "")
    return f"{kind}: {text}" if text else kind
