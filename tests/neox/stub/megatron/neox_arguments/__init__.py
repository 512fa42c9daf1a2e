"""Where NeoXArgs is imported from."""

from .arguments import NeoXArgs

__all__ = ["NeoXArgs"]
