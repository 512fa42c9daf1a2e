"""`megatron-coca stretch`: which position methods extend a model beyond its training length, and their cost."""
