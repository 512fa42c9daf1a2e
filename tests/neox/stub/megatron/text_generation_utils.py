"""Generation."""


def stream_tokens(neox_args, model, context_tokens, maximum_tokens=None):
    yield model, context_tokens
