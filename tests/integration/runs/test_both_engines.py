"""The native engine trains the same bits as DeepSpeed with ZeRO 1, also after a resume, with the other engine, and on
another number of ranks, and if its passes are captured in CUDA graphs. The graphs are imitated.

Many small runs share the processes of one launch. These processes run this file as a program.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_coca.checkpoints.native.state import file_name, write_pieces
from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import assemble_model
from megatron_coca.training.engine import Engine, build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.engine.passes import WARMUP
from megatron_coca.training.optimizer import train_only_parts
from tests.checkpoint_files import open_state
from tests.imitated_graphs import Replays
from tests.patience import patience

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LONG, SHORT, RATE, VOCABULARY, LENGTH = 200, 40, 2e-2, 61, 16
ENGINES = ("deepspeed", "native")
GRAPHS = "native, graphs"
ENGINE_KEYS: dict[str, dict[str, Any]] = {name: {"engine": name} for name in ENGINES}
ENGINE_KEYS[GRAPHS] = {"engine": "native", "cuda_graphs": True}
KEYS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": LENGTH,
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 1,
    "pos_emb": "coca",
    "optimizer.params.lr": RATE,
    "gradient_clipping": 0.2,
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, one micro-batch": {
        "precision": "bfloat16",
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": None,
    },
    "bfloat16, sums in fp32": {"precision": "bfloat16", "data_types": {"grad_accum_dtype": "fp32"}},
    "bfloat16, small buckets, no clipping": {
        "precision": "bfloat16",
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 3000},
    },
    "fp32, small buckets, a bias, no clipping": {
        "pos_emb": "rpe",
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 3000},
    },
    "bfloat16, lion, frozen weights": {
        "precision": "bfloat16",
        "optimizer.type": "lion",
        "trainable": ["key", "mlp", "norms"],
    },
    "bfloat16, experts": {
        "precision": "bfloat16",
        "moe_num_experts": 5,
        "moe_top_k": 2,
        "moe_correction_bias": True,
        "moe_bias_update_rate": 1e-3,
        "moe_z_loss_coeff": 1e-2,
    },
    "bfloat16, latents": {"precision": "bfloat16", "kv_lora_rank": 12, "q_lora_rank": 10, "v_head_dim": 6},
    "bfloat16, muP": {"precision": "bfloat16", "use_mup": True, "mup_base_hidden_size": 8, "no_weight_tying": True},
    "fp32, sgd, frozen weights": {"optimizer.type": "sgd", "trainable": ["query", "key", "value", "norms"]},
}


MUON = "fp32, Muon"
ONLY_NATIVE: dict[str, dict[str, Any]] = {
    # The middle of the weights lies within a matrix.
    MUON: {"optimizer.type": "Muon", "num_layers": 3, "moe_num_experts": 3, "moe_top_k": 2}
}
STEPS = {case: LONG if case in ("fp32", "bfloat16", "bfloat16, sums in fp32") else SHORT for case in CASES} | {
    MUON: SHORT
}
CAPTURED = [case for case in CASES if "experts" not in case]
"""Cases whose passes a graph can contain."""


OTHER_WEIGHTS = "other weights"
"""Target of a part in which each rank draws other weights."""


class Part(NamedTuple):
    """Steps [first, last) of a case with an engine, from the state in the folder `source` unless that is None. The last
    state is written to `target`, and that after half of the case's steps to `target`/half.
    """

    case: str
    engine: str
    first: int
    last: int
    source: str | None
    target: str


def samples(step: int, sizes: Any) -> list[Batch]:
    """The micro-batches of this rank, of samples that do not depend on the number of ranks."""
    tokens = np.random.default_rng(step).integers(VOCABULARY // 8, size=(sizes.total, LENGTH + 1))
    return list(Batch(tokens).split(sizes.micro))[dist.rank() :: dist.world_size()]


def save(engine: Engine, folder: Path) -> None:
    own = engine.pieces()
    folder.mkdir(parents=True, exist_ok=True)
    if own and (engine.partitioned or dist.is_main()):
        write_pieces(folder / file_name(dist.rank()), own, engine.parameter_slices())
    (folder / "counters.json").write_text(json.dumps(engine.counters()))
    dist.barrier()


def train(part: Part, root: Path) -> dict[str, Any]:
    """Run a part; return the losses, norms and step count, and a digest of the weights that the model computes with."""
    keys = {name: value for name, value in (KEYS | (CASES | ONLY_NATIVE)[part.case]).items() if value is not None}
    seed = 1 if part.source is not None else dist.rank() if part.target == OTHER_WEIGHTS else 0
    config = load_config([], keys | ENGINE_KEYS[part.engine] | {"seed": seed})
    model = assemble_model(config, "cpu").train()
    train_only_parts(model, config.optimizer)
    sizes = config.batch.resolve(dist.world_size())
    replays = Replays() if config.parallel.cuda_graphs else None
    engine = build_engine(model, config, sizes)
    if part.source is not None:
        slices = engine.parameter_slices()
        with open_state(root / part.source) as reader:
            for piece in engine.pieces():
                reader.fill(piece, slices[piece.name])
        engine.restored(json.loads((root / part.source / "counters.json").read_text()))
    half, steps = STEPS[part.case] // 2, []
    for step in range(part.first, part.last):
        if step == half > part.first:
            save(engine, root / part.target / "half")
        steps.append(engine.train_step(samples(step, sizes), RATE))
    held_out = engine.mean_loss(samples(LONG, sizes)).mean
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().float().numpy().tobytes())
    save(engine, root / part.target)
    figures = [[step.loss, step.grad_norm, step.skipped, step.labels] for step in steps]
    found = {"figures": figures, "held out": held_out, "step": engine.counters()["step"], "weights": digest.hexdigest()}
    engine.close()
    if replays is not None:
        replays.restore()
        assert replays.count == len(steps) * sizes.accumulation - WARMUP
    return found


def main(root: str, parts: list[list[Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_distributed()
    found = [train(Part(*part), Path(root)) for part in parts]
    if dist.is_main():
        Path(root, "found.json").write_text(json.dumps(found))
    dist.shut_down()


def launch(root: Path, world: int, parts: list[Part]) -> dict[str, Any]:
    """Run the parts in one launch of `world` processes; return what rank 0 found, by the name of the target."""
    launcher = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, __file__, str(root), json.dumps(parts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience(900))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((root / "found.json").read_text())
    return {part.target: each for part, each in zip(parts, found, strict=True)}


def assert_equal_state(one: Path, other: Path) -> None:
    with open_state(one) as first, open_state(other) as second:
        assert first.shapes == second.shapes
        for name in first.shapes:
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                assert torch.equal(first.whole(name, kind), second.whole(name, kind)), f"{name}: {kind}"


CHANGES = ((GRAPHS, "deepspeed"), ("deepspeed", GRAPHS), (GRAPHS, GRAPHS))
"""Pairs of an engine and the engine before it."""


def whole(case: str, engine: str) -> Part:
    return Part(case, engine, 0, STEPS[case], None, f"{case}/{engine}")


def resumed(case: str, engine: str, other: str) -> Part:
    """The second half of a run, after the first half with the `other` engine."""
    half = STEPS[case] // 2
    return Part(case, engine, half, STEPS[case], f"{case}/{other}/half", f"{case}/{engine} after {other}")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the figures of `all_parts` on two ranks."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, launch(folder, 2, all_parts())


def all_parts() -> list[Part]:
    """Each engine trains all steps at once, and goes on from the state of either engine after half of them. So do
    captured passes.
    """
    wholes = [whole(case, engine) for case in CASES for engine in ENGINES] + [whole(case, GRAPHS) for case in CAPTURED]
    halves = [resumed(case, one, other) for case in CASES for one in ENGINES for other in ENGINES]
    return wholes + halves + [resumed("bfloat16", *pair) for pair in CHANGES]


def test_one_process_trains_the_same_bits(tmp_path: Path) -> None:
    assert_equal_runs(tmp_path, launch(tmp_path, 1, all_parts()), 1)


def test_two_ranks_train_the_same_bits(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    assert_equal_runs(*two_ranks, 2)


def assert_equal_runs(folder: Path, found: dict[str, Any], world: int) -> None:
    for case in CASES:
        expected_run = found[f"{case}/deepspeed"]
        assert expected_run["figures"][-1][0] < expected_run["figures"][0][0] - 0.02, f"{case}: does not learn"
        clips = (KEYS | CASES[case])["gradient_clipping"] > 0
        exact_norm = "small buckets" not in case or world == 1
        assert not clips or any(norm > 0.2 for _, norm, *_ in expected_run["figures"]), f"{case}: never clips"
        for target in [part.target for part in all_parts() if part.case == case]:
            each = found[target]
            assert each["weights"] == expected_run["weights"], target
            assert each["held out"] == expected_run["held out"] and each["step"] == expected_run["step"], target
            expected = expected_run["figures"][-len(each["figures"]) :]
            if exact_norm:
                assert each["figures"] == expected, target
            else:  # buckets divide a group among the ranks in other places, and the norm is summed in that order
                assert [row[0] for row in each["figures"]] == [row[0] for row in expected], target
                norms = [[row[1] for row in rows] for rows in (each["figures"], expected)]
                assert norms[0] == pytest.approx(norms[1], rel=1e-6), target
            assert_equal_state(folder / target, folder / f"{case}/deepspeed")


def test_all_ranks_begin_with_the_weights_of_the_first(tmp_path: Path) -> None:
    """Even if they drew others."""
    first, again = (Part("bfloat16", "native", 0, 2, None, name) for name in ("equal weights", OTHER_WEIGHTS))
    found = launch(tmp_path, 2, [first, again])
    assert found[first.target] == found[again.target]


def test_muon_divides_matrices_between_ranks(tmp_path: Path) -> None:
    """Two ranks take the steps of one, and go on from its state. Products in bfloat16 amplify the differences of
    rounding, at each step.
    """
    begun, end = Part(MUON, "native", 0, 2, None, "begun"), Part(MUON, "native", 2, 4, "begun", "end")
    alone, both = launch(tmp_path / "1", 1, [begun, end]), launch(tmp_path / "2", 2, [begun, end])
    for target in ("begun", "end"):
        assert alone[target]["figures"] == [pytest.approx(each, rel=2e-3) for each in both[target]["figures"]]
    mixed = launch(tmp_path / "2", 2, [end._replace(source=str(tmp_path / "1/begun"))])
    assert mixed["end"]["figures"] == [pytest.approx(each, rel=2e-3) for each in alone["end"]["figures"]]
    names = set()
    with open_state(tmp_path / "1/begun") as first, open_state(tmp_path / "2/begun") as second:
        assert first.shapes == second.shapes
        for name in first.shapes:
            one, other = first.whole(name, "weight"), second.whole(name, "weight")
            assert (one - other).abs().mean() < 0.02 * RATE, name
            if "mlp.linear" in name and "weight" in name:
                names.add(name)
                moments = (each.whole(name, "exp_avg") for each in (first, second))
                torch.testing.assert_close(*moments, rtol=0.1, atol=1e-3)
    assert len(names) == 6


def test_the_number_of_ranks_may_change_with_the_engine(two_ranks: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """From the state that two ranks saved, one process goes on the same with both engines, and back. So do captured
    passes.
    """
    pairs = {case: [(one, other) for one in ENGINES for other in ENGINES] for case in CASES}
    pairs["bfloat16"] += CHANGES
    parts = [resumed(case, *pair) for case in CASES for pair in pairs[case]]
    alone = launch(tmp_path, 1, [part._replace(source=str(two_ranks[0] / str(part.source))) for part in parts])
    for case in CASES:
        targets = [resumed(case, *pair).target for pair in pairs[case]]
        assert len({alone[target]["weights"] for target in targets}) == 1, case
        for target in targets[1:]:
            assert_equal_state(tmp_path / target, tmp_path / targets[0])
    back = [
        Part(case, engine, STEPS[case], STEPS[case] + 10, resumed(case, other, engine).target, f"{case}/{engine} back")
        for case in CASES
        for engine, other in (ENGINES, ENGINES[::-1])
    ]
    source = resumed("bfloat16", "deepspeed", GRAPHS).target
    back.append(Part("bfloat16", GRAPHS, LONG, LONG + 10, source, f"bfloat16/{GRAPHS} back"))
    found = launch(tmp_path, 2, back)
    for case in CASES:
        one, *others = (found[f"{case}/{engine} back"] for engine in ENGINE_KEYS if f"{case}/{engine} back" in found)
        for other in others:
            assert one["weights"] == other["weights"] and one["held out"] == other["held out"], case


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
