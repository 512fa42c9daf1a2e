"""Files, locks, YAML, the console, remote files and processes: general tools without deep learning."""
