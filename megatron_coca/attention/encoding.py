"""The positions of one forward pass, with what is learned about them once for all layers."""

import torch
from torch import Tensor

from megatron_coca.attention.frame import Frame, Places, Spectrum, column, segment_tables
from megatron_coca.attention.heads import Shared
from megatron_coca.attention.inputs import DistanceBias, Documents
from megatron_coca.attention.method import PositionMethod


class PositionEncoding(Shared):
    """Turns positions into the frame that all layers share.

    Learned parts, where the method has them: `bias` (T5 buckets), `clex` (the network behind CLEX's frequencies).
    """

    def __init__(self, method: PositionMethod) -> None:
        super().__init__()
        self.method = method
        self.bias = method.bias.shared() if method.bias.shared is not None else None
        self.clex = method.clex() if method.clex is not None else None

    def forward(
        self,
        positions: Tensor,
        length: int,
        dtype: torch.dtype,
        key_positions: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Frame:
        """The frame of tokens at `positions` ([length] or [batch, length], integer) for operands of `dtype`.

        Args:
            length: that of the whole sequence being scored; extensions that depend on a length look at it.
            key_positions: those of all cached tokens and the present ones, where the present ones are only the last.
            documents: boundaries of packed documents.
        """
        method, drawing = self.method, self.clex is not None and self.training
        spectrum, positions = self._drawn(positions) if drawing else (self._spectrum(length), positions)
        keys = _places(positions if key_positions is None or drawing else key_positions, documents)
        queries = keys if key_positions is None else _places(positions, documents, keys.first)
        factor = method.logit_scaling(queries.positions, method.training_length) if method.logit_scaling else None
        parts = method.trained_parts if self.training else method.parts
        return Frame(
            tuple(segment_tables(part, queries, keys, spectrum, factor, dtype) for part in parts),
            None if factor is None else column(factor, dtype),
            self.share.bias(self._shared_bias(positions.device)),
            documents,
        )

    def _shared_bias(self, device: torch.device) -> DistanceBias | None:
        if self.bias is not None:
            return self.bias.distance_bias()
        return self.method.bias.fixed.to(device) if self.method.bias.fixed is not None else None

    def _spectrum(self, length: int) -> Spectrum | None:
        rotary = self.method.rotary
        if rotary is None:
            return None
        if self.clex is not None:
            return Spectrum(self.clex.inverse_frequencies(self.clex.factor_for(length)), 1.0, self.method.decay)
        return Spectrum(rotary.inverse_frequencies(length), rotary.multiplier(length), self.method.decay)

    def _drawn(self, positions: Tensor) -> tuple[Spectrum, Tensor]:
        """CLEX in training: a random extension, and random places within the extended length for all rows alike."""
        assert self.clex is not None
        factor, places = self.share.agreed(self.clex.training_draw(positions.shape[-1]), positions.device)
        return Spectrum(self.clex.inverse_frequencies(factor), 1.0, self.method.decay), places.to(positions.device)


def _places(positions: Tensor, documents: Documents | None, first: Tensor | None = None) -> Places:
    """Places of tokens; `first` is that of all tokens where these are only the last of them."""
    positions = positions.to(torch.float64)
    if first is not None:
        return Places(positions, first if first.shape[-1] == 1 else first[..., -positions.shape[-1] :])
    if documents is None:
        return Places(positions, positions[..., :1])
    return Places(positions, positions.expand(documents.starts.shape).gather(-1, documents.starts))
