"""Tokenizers: GPT-NeoX's kinds behind one protocol, opened by name, saved with what they made, trained on a corpus."""
