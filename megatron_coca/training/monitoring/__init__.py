"""What watches a run: losses, metrics and traces, and processes that hang."""
