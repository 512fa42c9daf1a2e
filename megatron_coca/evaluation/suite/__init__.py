"""Many tasks over many checkpoints, from one YAML file, and their report."""
