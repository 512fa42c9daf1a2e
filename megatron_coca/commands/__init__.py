"""The commands of the program, a module for each with `parser` and `main`."""
