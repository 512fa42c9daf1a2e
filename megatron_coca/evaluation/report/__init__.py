"""Reports: tables, plots and a page from result files, with published numbers next to ours."""
