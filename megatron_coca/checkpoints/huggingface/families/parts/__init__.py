"""What rows of families consist of: keys, weight tables, and the check of a row."""
