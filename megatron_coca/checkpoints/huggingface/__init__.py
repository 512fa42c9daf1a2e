"""Hugging Face folders."""
