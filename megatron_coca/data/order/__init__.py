"""The order of training data: which sample is which, what a batch holds, and how one rank reads it."""
