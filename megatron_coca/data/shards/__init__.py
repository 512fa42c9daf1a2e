"""Tokenized documents on disk: ``.bin``/``.idx`` pairs, how they are laid out, checked, read and written."""
