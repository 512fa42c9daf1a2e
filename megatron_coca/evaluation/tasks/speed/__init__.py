"""Time and memory of position methods: what is known of the task, and its measurement."""
