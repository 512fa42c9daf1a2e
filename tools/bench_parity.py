"""Whether what is timed computes attention: two comparisons with float64, and no time without both.

At a short length every row and gradient is compared with the oracle, which follows the papers. At the length that is
timed, a sample of query rows is compared with float64 from the same operands; the gradients are those of a loss that
looks at these rows only, and therefore reach every key and value. Allowed is twice the error of plain PyTorch in the
same precision.
"""

import math
import traceback
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.inputs import AttentionInputs, Band
from tests.reference import dense
from tests.reference.frequencies import frequencies
from tools.bench_cases import METHODS, Shape, configuration
from tools.bench_steps import DECODE, MODES, Attend, Production, Results, Steps, Workload

SHORT, SHORT_TRAINING = 160, 128
"""Length and training length L of the comparison with the oracle: every map's window ends within."""
SPREAD = 16
"""Rows of the sample beside the first ones and those at the ends of windows."""
FLOOR = 32 * torch.finfo(torch.float32).eps
"""No error below this is refused. In the backward pass a flash kernel takes weights as exp(score - log-sum-exp), which
err by the size of the two in float32 eps: with CoCA's scores of 20 and more PyTorch's own kernel is off by 2.2e-6 in
the 16 rows of a sample at 8,192 tokens, where plain PyTorch is by 0.5e-6. A wrong formula is off by 1e-3."""

Errors = dict[str, tuple[float, float]]
"""By result: relative error (norms), and that of plain PyTorch."""


@dataclass(frozen=True)
class Yardstick:
    """Exact results, those of plain PyTorch, and the rows that they are of (None: all)."""

    exact: Results
    plain: Results
    rows: Tensor | None = None
    cotangent: Tensor | None = None

    def errors(self, work: Workload, mode: str, steps: Steps) -> Errors:
        """Of `steps` at `work`."""
        found = MODES[mode](work, steps, self.cotangent)()
        if self.rows is not None:
            found["out"] = found["out"][:, self.rows]
        return {
            name: (_error(found[name], exact), _error(self.plain[name], exact)) for name, exact in self.exact.items()
        }


def verdict(work: Workload, mode: str, steps: Steps, yardstick: Yardstick) -> tuple[Errors, str | None]:
    """The errors, and the reason why this is not attention, or None.

    A backend that raises is refused with what it raised, so that the other cases are still measured.
    """
    try:
        errors = yardstick.errors(work, mode, steps)
    except Exception as error:
        traceback.print_exc()
        return {}, f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    wrong = [
        f"{name} is off by {off:.1e}, plain PyTorch by {plain:.1e}"
        for name, (off, plain) in errors.items()
        if not off <= max(2 * plain, FLOOR)
    ]
    return errors, "; ".join(wrong) or None


def by_rows(work: Workload, mode: str) -> Yardstick:
    """Sampled rows of `work` in float64 and in its own precision."""
    exact_work, plain_work = work.in_float64(), work.in_torch()
    if mode == DECODE:
        plain = Production(ReferenceBackend().attend)
        return Yardstick(MODES[mode](exact_work, plain, None)(), MODES[mode](plain_work, plain, None)())
    batch, length, _ = work.packed.shape
    rows = sample(length, [segment.band for segment in work.frame.segments]).to(work.packed.device)
    steps = Production(attend_rows(rows.tolist()))
    given = torch.zeros(batch, length, work.shape.heads * work.shape.head_dim, device=work.packed.device)
    given[:, rows] = torch.randn_like(given[:, rows]).to(work.packed.dtype).float()
    own = given[:, rows]
    return Yardstick(MODES[mode](exact_work, steps, own)(), MODES[mode](plain_work, steps, own)(), rows, given)


def sample(length: int, bands: list[Band]) -> Tensor:
    """Query rows: spread evenly, the first and last, and around the ends of `bands` and of their first keys."""
    ends = {end for band in bands for end in (0, band.low, band.high, band.first_keys) if end is not None}
    near = {end + offset for end in ends for offset in (-1, 0, 1)}
    spread = {round(i * (length - 1) / (SPREAD - 1)) for i in range(SPREAD)}
    return torch.tensor(sorted(row for row in near | spread if 0 <= row < length))


def attend_rows(rows: list[int]) -> Attend:
    """Attention of some query rows alone, by dense scores: each as the last of the keys up to it."""

    def attend(inputs: AttentionInputs) -> Tensor:
        return torch.cat([ReferenceBackend().attend(_ending_at(inputs, row)) for row in rows], dim=2)

    return attend


def _ending_at(inputs: AttentionInputs, row: int) -> AttentionInputs:
    keys = slice(0, inputs.past + row + 1)
    segments = tuple(
        replace(each, query=each.query[:, :, row : row + 1], key=each.key[:, :, keys]) for each in inputs.segments
    )
    return inputs.replace(segments=segments, value=inputs.value[:, :, keys])


def by_oracle(name: str, operands: str, shape: Shape, mode: str) -> tuple[Workload, Yardstick]:
    """A short workload of the method, and the oracle's results for it."""
    shape = replace(shape, tokens=SHORT, training_length=SHORT_TRAINING)
    new_tokens = 1 if mode == DECODE else None
    work = Workload.build(name, operands, shape, shape.packed(SHORT), new_tokens)
    cotangent = torch.randn(*work.packed.shape[:2], shape.heads * shape.head_dim, device=shape.device)
    cotangent = cotangent.to(work.packed.dtype)
    plain = MODES[mode](work.in_torch(), Production(ReferenceBackend().attend), cotangent)()
    return work, Yardstick(_papers(name, work, mode, cotangent), plain, None, cotangent)


def _papers(name: str, work: Workload, mode: str, cotangent: Tensor) -> Results:
    work = replace(work, packed=work.packed.double())
    if mode == DECODE:
        return {"out": MODES["forward"](work, Oracle(name), None)()["out"][:, -1:]}
    return MODES[mode](work, Oracle(name), cotangent)()


class Oracle:
    """The papers' formulas, with frequencies and windows that follow from the configuration."""

    def __init__(self, name: str) -> None:
        self.name = name

    def full(self, work: Workload, packed: Tensor) -> Tensor:
        q, k, v = work.shape.unpack(packed)
        position = configuration(self.name, "torch", work.shape).position
        lengths = {"training_length": work.shape.training_length, "length": packed.shape[1]}
        theta = frequencies(work.method.rotary_dim, **lengths, **METHODS[self.name].get("rope_scaling", {}))
        given = position.relative_positions
        settings = None if given is None else given.settings(work.shape.training_length)
        relative = None if given is None else dense.RelativeMap(given.type, **settings)
        setting = dense.Setting(map=relative, bias=_learned(work))
        return dense.attention(position.pos_emb, q, k, v, theta.to(packed.device), setting=setting)


def _learned(work: Workload) -> dict[str, Tensor]:
    """Learned biases by the oracle's names, float64; its table is not yet multiplied by sqrt(head_dim)."""
    if work.layer_bias is not None:
        return {"p": work.layer_bias.bias_p.double(), "a": work.layer_bias.bias_a.double()}
    if work.encoding.bias is None or work.frame.bias is None:
        return {}
    return {"table": work.frame.bias.coefficients.T.double() / math.sqrt(work.shape.head_dim)}


def _error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.double(), exact.double()
    return float((found - exact).norm() / exact.norm().clamp(min=1e-3))
