"""Monitoring of a run: bad losses, metrics, traces, and processes that hang."""
