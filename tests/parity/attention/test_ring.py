"""Ranks that divide a sequence compute the attention of one process, values and gradients, in float64.

The cases share one launch of four processes, which run this file as a program; rings of two and three ranks use some
of them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_coca.attention.context import assign_shard
from megatron_coca.attention.ring.exchange import Ring
from megatron_coca.attention.ring.shard import RingShard
from megatron_coca.config import load_config
from megatron_coca.model.build import Attention
from megatron_coca.model.gpt import resolve_positions
from tests.patience import patience

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-10
"""Of the norm of the difference, relative to the norm. Sums of float64 numbers in another order; 1e-14 was seen."""

KEYS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 24,
    "vocab_size": 96,
    "attention_dropout": 0.0,
    "init_method_std": 0.4,
}
GROUPED = {"num_kv_heads": 2}
COCA = {"pos_emb": "coca"}
UNEVEN = [[7, 20, 1, 9], [37]]
"""Lengths of the documents in two rows of 37 tokens."""
SHORT = [[3] * 12 + [1], [1] * 37]
COUNTED = "documents, positions through the row"
"""Maps then read the position of the first token of each document, which is not 0."""
LAYOUTS: Mapping[str, tuple[int, list[list[int]] | None]] = {
    "37 tokens": (37, None),
    "16 tokens": (16, None),
    "documents": (37, UNEVEN),
    "short documents": (37, SHORT),
    COUNTED: (37, UNEVEN),
}
"""Numbers of tokens, and lengths of documents by row. 37, and 16 with three ranks, do not divide into equal chunks."""
FLASH: Mapping[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary"},
    "coca": COCA | GROUPED,
    "coca_strict, a part rotated": {"pos_emb": "coca_strict", "rotary_pct": 0.5},
    "random angles": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}},
    "pope": {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}} | GROUPED,
    "xpos": {"pos_emb": "xpos"},
    "none": {"pos_emb": "none"},
    "dynamic": COCA | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"pos_emb": "rotary", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "clex": COCA | {"rope_scaling": {"rope_type": "clex", "max_factor": 4}},
    "log_n": COCA | {"logit_scaling": "log_n"},
    "sinks, a learned factor": COCA | {"sink_logits": True, "logit_scaling": "ssmax"},
    "a window": COCA | {"sliding_window_width": 3},
    "a wide window": {"pos_emb": "rotary", "sliding_window_width": 11},
    "rerope": COCA | {"relative_positions": {"type": "rerope", "window": 5}} | GROUPED,
    "leaky_rerope": COCA | {"relative_positions": {"type": "leaky_rerope", "window": 5, "leak": 4.0}},
    "self_extend": {"pos_emb": "rotary", "relative_positions": {"type": "self_extend", "window": 6, "group_size": 3}},
    "string": {"pos_emb": "rotary", "relative_positions": {"type": "string", "window": 6, "local": 2}},
    "lm_infinite": COCA | {"relative_positions": {"type": "lm_infinite", "window": 6, "sinks": 2}},
    "streaming": {"pos_emb": "rotary", "relative_positions": {"type": "streaming", "window": 4, "sinks": 3}},
    "dual_chunk": COCA | {"relative_positions": {"type": "dual_chunk", "chunk_size": 7, "max_position": 10}},
    "chunks": COCA | {"attention_chunk_size": 7},
    "adapters": COCA | {"lora": {"rank": 3}} | GROUPED,
    "adapters with DoRA": {"pos_emb": "rotary", "lora": {"rank": 3, "dora": True}},
    "norms of the operands": {"pos_emb": "rotary", "qk_norm": "head", "qk_norm_after_rotation": True},
}
DENSE: Mapping[str, dict[str, Any]] = {
    "alibi": {"pos_emb": "alibi"},
    "kerple_log": {"pos_emb": "kerple_log"} | GROUPED,
    "kerple_power": {"pos_emb": "kerple_power"},
    "rpe": {"pos_emb": "rpe"},
    "fire": {"pos_emb": "fire"},
    "alibi, a window": {"pos_emb": "alibi", "sliding_window_width": 5},
    "soft-capping": COCA | {"attn_logit_softcapping": 3.0} | GROUPED,
    "forgetting gates": COCA | {"forgetting_gate": "fox"} | GROUPED,
    "rerope, dense": COCA | {"relative_positions": {"type": "rerope", "window": 5}} | GROUPED,
    "dual_chunk, sinks, dense": COCA
    | {"sink_logits": True, "relative_positions": {"type": "dual_chunk", "chunk_size": 7, "max_position": 10}},
}
CASES = {name: keys | {"attention_backend": "merge"} for name, keys in FLASH.items()} | {
    name: keys | {"attention_backend": "reference"} for name, keys in DENSE.items()
}
RINGS = (
    (2, "37 tokens"),
    (2, "short documents"),
    (3, "16 tokens"),
    (3, "documents"),
    (4, "37 tokens"),
    (4, "documents"),
    (2, COUNTED),
)
"""The number of ranks and the layout of the runs."""
FEW = ("coca", "rerope", "alibi", "adapters")
"""Cases that the fast tests run on two ranks."""


def attention_of(keys: Mapping[str, Any], backend: str) -> Attention:
    torch.manual_seed(3)
    overrides = [
        f"{name}={json.dumps(value)}" for name, value in (KEYS | keys | {"attention_backend": backend}).items()
    ]
    config = load_config([], overrides)
    module = Attention(config).double()
    generator = torch.Generator().manual_seed(4)
    if config.optimizer.lora is not None:
        settings = peft.LoraConfig(target_modules=["query", "key", "value", "dense"], **config.optimizer.lora.settings)
        module.attention.split_projection()
        peft.inject_adapter_in_model(settings, module)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "position" in name or "encoding" in name or "lora_B" in name:  # initial values would hide terms
                weight.add_(0.2 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype))
    return module.train()


def documents_of(rows: list[list[int]] | None) -> Tensor | None:
    if rows is None:
        return None
    return torch.stack([torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for sizes in rows])


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / (expected.norm() + 1e-3))


def errors_of(keys: Mapping[str, Any], layout: str, ring: Ring) -> dict[str, float]:
    """The errors of this rank's output and input gradient, and of the sum of the ranks' weight gradients."""
    length, rows = LAYOUTS[layout]
    documents, shard = documents_of(rows), RingShard(ring=ring)
    generator = torch.Generator().manual_seed(length)
    hidden, cotangent = (torch.randn(2, length, 32, generator=generator, dtype=torch.float64) for _ in range(2))

    def held(x: Tensor) -> Tensor:
        return shard.held(x.transpose(1, 2)).transpose(1, 2)

    alone, ranked = attention_of(keys, "reference"), attention_of(keys, keys["attention_backend"])
    whole = hidden.clone().requires_grad_()
    through = torch.arange(length) if layout == COUNTED else None
    expected = alone(whole, through, documents)
    expected.backward(cotangent)
    assign_shard(ranked, shard)
    own = held(hidden).contiguous().requires_grad_()
    positions, reached, packed = resolve_positions(hidden[..., 0], through, documents)
    context = ranked.encoding(positions, reached, hidden.dtype, documents=packed, reached=reached, batch=2)
    got = ranked.attention(own, context)
    got.backward(held(cotangent))
    assert whole.grad is not None and own.grad is not None
    found = {"output": error(got, held(expected)), "input": error(own.grad, held(whole.grad))}
    for (name, weight), (_, other) in zip(ranked.named_parameters(), alone.named_parameters(), strict=True):
        if other.grad is not None:
            total = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            dist.all_reduce(total, group=ring.group)
            found[name] = error(total, other.grad)
    return found


def main(folder: Path, rank: int, processes: int, runs: list[tuple[int, str, str]]) -> None:
    """Run cases on one rank: each a number of ranks, a layout and a case. Write the errors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=processes)
    groups = {size: dist.new_group(list(range(size))) for size in sorted({size for size, _, _ in runs})}
    found = {
        f"{size}, {layout}, {case}": errors_of(CASES[case], layout, Ring(groups[size], rank, size))
        for size, layout, case in runs
        if rank < size
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launched(folder: Path, runs: list[tuple[int, str, str]]) -> list[dict[str, dict[str, float]]]:
    """Run cases in one launch, and return the errors of every rank by run."""
    environment, count = (
        os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        max(size for size, _, _ in runs),
    )
    arguments = (str(count), json.dumps(runs))
    processes = [
        subprocess.Popen([sys.executable, __file__, str(folder), str(rank), *arguments], env=environment)
        for rank in range(count)
    ]
    try:
        codes = [process.wait(patience(300)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * count
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def assert_equal_to_one_process(ranks: list[dict[str, dict[str, float]]], size: int, layout: str, case: str) -> None:
    for rank in range(size):
        found = ranks[rank][f"{size}, {layout}, {case}"]
        assert {"output", "input"} < found.keys()
        wrong = {part: value for part, value in found.items() if not value < TOLERANCE}
        assert not wrong, f"rank {rank} of {size}"


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    ranks = launched(tmp_path, [(2, "documents", case) for case in FEW])
    for case in FEW:
        assert_equal_to_one_process(ranks, 2, "documents", case)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """The errors of every rank by run."""
    return launched(tmp_path_factory.mktemp("ring"), [(*ring, case) for ring in RINGS for case in CASES])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "layout"), RINGS)
@pytest.mark.parametrize("case", CASES)
def test_rings_equal_one_process(case: str, size: int, layout: str, errors: list[dict[str, dict[str, float]]]) -> None:
    assert_equal_to_one_process(errors, size, layout, case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
