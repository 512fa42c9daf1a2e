"""Attention over a sequence that several ranks divide: keys and values pass between the ranks."""
