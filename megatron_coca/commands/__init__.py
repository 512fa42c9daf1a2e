"""The subcommands of `megatron-coca`: each module has `parser()` and `main(arguments) -> exit status`."""
