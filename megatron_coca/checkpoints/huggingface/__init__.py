"""Folders of Hugging Face transformers: what they say of a model, their weights, and writing them."""
