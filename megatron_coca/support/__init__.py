"""Files, locks, YAML, console, remote files, host memory: nothing of the field."""
