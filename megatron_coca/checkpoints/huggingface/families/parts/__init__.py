"""Keys and weight tables for the rows of families, and the check of a row."""
