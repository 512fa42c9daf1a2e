"""The backend that uses `megatron_coca.kernels`: flash attention with a bias formula and up to two segments."""

from torch import Tensor

from megatron_coca.attention.backends.gated import attend_gated
from megatron_coca.attention.inputs import AttentionInputs, Band, Needs
from megatron_coca.kernels import missing_triton

FORMULAS = ("linear", "log", "power")
"""Formulas of a distance bias that the kernels compute."""
WIDEST_HEAD = 256


class TritonBackend:
    """Flash attention kernels of `megatron_coca.kernels`, compiled on CUDA.

    On the CPU, the kernels run only in Triton's interpreter, which is slow and meant for tests.
    """

    expands = True

    def supports(self, needs: Needs) -> str | None:
        """Return None, or the reason why the model is not supported."""
        if needs.dropout > 0:
            return "its kernels have no attention dropout"
        if needs.bias not in (None, *FORMULAS):
            return f"its kernels support the bias formulas linear, log and power, not {needs.bias}"
        if needs.head_dim > WIDEST_HEAD:
            return f"its kernels support head_dim up to {WIDEST_HEAD}, not {needs.head_dim}"
        return _unsupported_bands(needs.bands) or missing_triton(needs.device_type)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention, [batch, heads, query_length, width of V], in the query's dtype.

        Raises:
            ValueError: the bands are not supported, or the inputs have dropout.
        """
        # Imported here because triton exists only on some platforms, and the other backends work without it.
        from megatron_coca.kernels.attention import flash_attention

        reason = _unsupported_bands(tuple(segment.band for segment in inputs.segments))
        if reason is not None or inputs.dropout > 0:
            problem = reason or "its kernels have no attention dropout"
            raise ValueError(f"attention_backend: triton cannot compute this model ({problem}); set another backend")
        if inputs.gates is not None:
            return attend_gated(self.attend, inputs)
        near, *far = inputs.segments
        turns = near.turns
        return flash_attention(
            near.query,
            near.key,
            inputs.value,
            inputs.scale,
            far_query=far[0].query if far else None,
            far_key=far[0].key if far else None,
            window=near.band.high,
            first_keys=far[0].band.first_keys if far else None,
            formula=None if inputs.bias is None else inputs.bias.formula,
            coefficients=None if inputs.bias is None else inputs.bias.coefficients,
            starts=None if inputs.documents is None else inputs.documents.starts,
            tables=() if turns is None else (*turns.query, *turns.key),
            offset=None if turns is None else turns.offset,
        )


def _unsupported_bands(bands: tuple[Band, ...]) -> str | None:
    """Return None, or the reason why the bands are not supported. The kernels support the band [0, high), optionally
    followed by [high, infinity).
    """
    near, *far = bands
    if any(band.chunk is not None for band in bands):
        return "its kernels measure distances in tokens, not in chunks"
    if near.low != 0 or near.first_keys is not None or (near.high is None and far):
        return f"its first band must contain all distances from 0 up to a limit, not {near}"
    if len(far) > 1:
        return f"its kernels support at most two segments, not {len(bands)}"
    if far and (far[0].low != near.high or far[0].high is not None):
        return f"its second band must contain all distances from {near.high} on, not {far[0]}"
    return None
