"""Training: launching, the DeepSpeed engine, the loop, and what is saved when."""
