"""Read and write Hugging Face folders."""
