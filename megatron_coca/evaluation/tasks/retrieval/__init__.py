"""Passkeys, needles and RULER-style tasks: what is known of the task, and its measurement."""
