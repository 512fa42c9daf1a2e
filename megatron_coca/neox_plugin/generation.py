"""Upstream's generation, several prompts after one another."""

from typing import Any

from megatron_coca.neox_plugin.keys import is_asked_for
from megatron_coca.neox_plugin.wrapping import Function


def forgetting(original: Function) -> Function:
    """Upstream's `stream_tokens`, which begins with an empty cache: else a prompt from a file follows the one before it,
    and where upstream's rotary positions stop at that, other positions do not.
    """

    def stream_tokens(neox_args: Any, model: Any, *given: Any, **named: Any) -> Any:
        if is_asked_for(neox_args):
            model.module.clear_cache()
        return original(neox_args, model, *given, **named)

    return stream_tokens
