"""GPT-NeoX's checkpoint layout, read and written. Its facts are those of EleutherAI/gpt-neox at commit ea7aefd8."""
