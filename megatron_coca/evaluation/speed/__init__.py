"""What position methods cost: side by side, against RoPE and against the paper's contraction."""
