"""Documents packed into one row."""

import torch
from torch import Tensor

from megatron_coca.attention.inputs import Documents


def documents_from_ids(ids: Tensor) -> Documents:
    """The documents of `ids` [batch, length] integer: neighbouring tokens with one id are one document.

    Takes one copy to the host, so it is made once for a forward pass.
    """
    length = ids.shape[1]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    index = torch.arange(length, device=ids.device)
    starts = torch.where(begins, index, torch.zeros_like(index)).cummax(dim=1).values
    return Documents(starts, tuple(_spans(row, length) for row in begins.cpu()))


def positions_within(documents: Documents) -> Tensor:
    """Positions [batch, length] that begin at 0 in every document."""
    length = documents.starts.shape[1]
    return torch.arange(length, device=documents.starts.device) - documents.starts


def _spans(begins: Tensor, length: int) -> tuple[tuple[int, int], ...]:
    edges = [*begins.nonzero().flatten().tolist(), length]
    return tuple(zip(edges[:-1], edges[1:], strict=True))
