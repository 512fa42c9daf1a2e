"""What an engine does differently where several ranks hold or run one model: nothing, by default."""

from typing import Any

from megatron_coca.attention.heads import WHOLE, HeadShare
from megatron_coca.checkpoints.state import Shard


class Division:
    """Every rank holds all weights, and sees all tokens of its samples."""

    def section(self) -> dict[str, Any]:
        """What DeepSpeed's configuration has for it."""
        return {}

    def grid(self) -> Any:
        """The process groups that DeepSpeed is to use (its `mpu`), or None for its own. Every rank must call it, once."""
        return None

    def share(self) -> HeadShare:
        """This rank's share, once DeepSpeed is initialized."""
        return WHOLE

    def shard(self, name: str) -> Shard | None:
        """Which part of the named parameter this rank holds, once DeepSpeed is initialized; None for all of it."""
        return None
