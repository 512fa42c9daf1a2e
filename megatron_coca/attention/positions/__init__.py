"""Position mathematics: pure functions and literal tables, without configuration and without backends."""
