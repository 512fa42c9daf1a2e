"""Margins of hidden facts, and the loss of the same tokens at every length."""
