"""Time and memory of position methods: the declaration of the task, and its measurement."""
