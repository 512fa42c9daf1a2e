"""Passkeys, needles and RULER-style tasks: the declarations of the tasks, and their measurement."""
