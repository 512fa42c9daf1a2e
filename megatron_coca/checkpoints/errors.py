"""What goes wrong with checkpoints."""


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, foreign or of another architecture; the message names the place and the
    remedy.
    """
