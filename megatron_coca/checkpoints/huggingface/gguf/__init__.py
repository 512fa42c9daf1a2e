"""GGUF files: the header, the weights and the tokenizer."""
