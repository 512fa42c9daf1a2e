"""What of a checkpoint must be as configured."""


def check_checkpoint_args(neox_args, checkpoint_args):
    for name, value in checkpoint_args.items():
        assert getattr(neox_args, name) == value, f"{name}: saved {value}"
