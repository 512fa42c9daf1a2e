"""Tasks of lm-evaluation-harness on our checkpoints (Gao et al. 2024, github.com/EleutherAI/lm-evaluation-harness)."""
