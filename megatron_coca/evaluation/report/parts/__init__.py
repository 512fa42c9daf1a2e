"""One module for each section of a report."""
