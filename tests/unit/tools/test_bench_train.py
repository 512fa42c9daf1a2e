"""The training benchmark: complete records, equal shapes of ours and the peer, memory that grows with the work."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.config import ConfigError, load_config
from megatron_coca.model.cost import parameter_count, trained_count
from tools.bench_train import (
    LLAMA,
    PEERS,
    Contestant,
    draw,
    parse,
    peak_of,
    peer,
    peer_keys,
    race,
    transformers_step,
    with_peft,
)
from tools.records import append_records

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 90,
    "make_vocab_size_divisible_by": 16,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 4,
    "pos_emb": "rotary",
}
EVERY_RECORD = {
    "benchmark",
    "method",
    "backend",
    "seconds",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
    "peak_bytes",
}
EVERY_RECORD |= {"ratio", "ratio_to", "ratio_quartiles", "rounds", "compiled", "shape", "parameters"}
EVERY_RECORD |= {"tokens_per_step", "dtype", "device", "threads", "python", "versions", "lora"}
EVERY_RECORD |= {"cpu_seconds", "cpu_ratio", "cpu_ratio_quartiles"}


def test_records_are_complete(tmp_path: Path) -> None:
    """Two contestants that take turns on the same micro batches; the second does twice the first one's work."""
    config = load_config([], SHAPE)
    seen: list[tuple[str, list[torch.Tensor]]] = []

    def contestant(name: str, times: int) -> Contestant:
        def step(micro_batches: list[torch.Tensor]) -> float:
            seen.append((name, micro_batches))
            return sum(float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) for _ in range(times))

        return Contestant(name, config, step, peak_of(step))

    options = parse(["x=1", "--methods", "one", "other", "--rounds", "9"])
    append_records(tmp_path / "new/train.jsonl", race([contestant("one", 20), contestant("other", 60)], options))
    first, second = map(json.loads, (tmp_path / "new/train.jsonl").read_text().splitlines())
    assert first.keys() == second.keys() == EVERY_RECORD
    assert first["cpu_ratio"] == 1 and second["cpu_ratio"] > 1.3
    assert first["ratio"] == 1 and second["ratio"] > 1.3 and second["rounds"] == 9
    assert first["tokens_per_step"] == 64 and first["tokens_per_second"] == pytest.approx(64 / first["seconds"])
    assert [name for name, _ in seen[:4]] == ["one", "other"] * 2
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(seen[:20:2], seen[1:20:2], strict=True))


def test_micro_batches_have_the_configured_size() -> None:
    batches = draw(load_config([], SHAPE), torch.Generator().manual_seed(0))
    assert [tuple(batch.shape) for batch in batches] == [(2, 17), (2, 17)] and max(map(torch.max, batches)) < 96


@pytest.mark.parametrize("keys", [{}, {"no_weight_tying": True}, {"use_bias_in_attn_linear": False}])
def test_the_peer_has_our_shape(keys: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = load_config([], SHAPE | keys)
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**peer_keys(config)))
    own = parameter_count(config).total
    assert sum(parameter.numel() for parameter in model.parameters()) == own


def test_the_peer_trains() -> None:
    pytest.importorskip("transformers")
    config = load_config([], SHAPE)
    step, batches = transformers_step(config, "cpu"), draw(config, torch.Generator().manual_seed(0))
    losses = [step(batches) for _ in range(10)]
    assert losses[0] == pytest.approx(4.5, abs=0.3) and losses[-1] < losses[0]


ATTENTION = {"rank": 4, "also": ["norms", "embedding"]}


def test_the_peer_trains_as_many_numbers_with_peft() -> None:
    config = load_config([], SHAPE | LLAMA | {"lora": ATTENTION})
    assert config.optimizer.lora is not None
    model = with_peft(PEERS["llama"].build(config), config.optimizer.lora, "llama")
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == trained_count(config).total
    step, batches = transformers_step(config, "cpu", kind="llama"), draw(config, torch.Generator().manual_seed(0))
    losses = [step(batches) for _ in range(10)]
    assert losses[0] == pytest.approx(4.5, abs=0.3) and losses[-1] < losses[0]
    for kind, lora in (("transformers", {}), ("llama", {"targets": ["mlp"]}), ("llama", {"also": ["output_head"]})):
        shape = SHAPE | (LLAMA if kind == "llama" else {})
        other = load_config([], shape | {"lora": lora, "no_weight_tying": True})
        with pytest.raises(ConfigError, match="lora: .*only with --peer llama"):
            transformers_step(other, "cpu", kind=kind)


EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 24, "moe_norm_topk_prob": True}


@pytest.mark.parametrize("balance", [0.0, 0.01])
def test_mixtral_has_our_shape_and_trains(balance: float) -> None:
    config = load_config([], SHAPE | LLAMA | EXPERTS | {"moe_loss_coeff": balance})
    model = PEERS["mixtral"].build(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config).total
    step, batches = transformers_step(config, "cpu", kind="mixtral"), draw(config, torch.Generator().manual_seed(0))
    losses = [step(batches) for _ in range(10)]
    assert losses[0] == pytest.approx(4.5, abs=0.3) and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"moe_expert_interval": 2}, "Mixtral has a mixture of experts in every layer"),
        ({"mlp_config": ["dense", "experts"]}, "Mixtral has a mixture of experts in every layer"),
        ({"moe_weights_on_input": True}, "moe_weights_on_input=True: not supported .*Mixtral"),
        ({"moe_router_scores": "sigmoid"}, "moe_router_scores=sigmoid: not supported .*Mixtral"),
    ],
)
def test_a_mixture_that_mixtral_lacks_is_an_error(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PEERS["mixtral"].arguments(load_config([], SHAPE | LLAMA | EXPERTS | keys))


@pytest.mark.slow
def test_the_peer_has_a_process_of_its_own() -> None:
    pytest.importorskip("transformers")
    config = load_config([], SHAPE)
    batches = draw(config, torch.Generator().manual_seed(0))
    entrant = peer("transformers", config, compiled=False, keeps_memory=False)
    assert entrant.step(batches) == pytest.approx(4.5, abs=0.3) and entrant.peak(batches) > 2 * 17 * 32 * 4


@pytest.mark.parametrize("keys", [{"norm": "rmsnorm"}, {"num_kv_heads": 2}])
def test_a_shape_that_the_peer_lacks_is_an_error(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(keys))}=.*not supported .*GPT-NeoX; leave out --peer"):
        peer_keys(load_config([], SHAPE | keys))


@pytest.mark.slow
def test_the_command_measures_the_engine(tmp_path: Path) -> None:
    import subprocess
    import sys

    root, output = Path(__file__).parents[3], tmp_path / "train.jsonl"
    keys = [f"{name}={json.dumps(value)}" for name, value in SHAPE.items()] + ["optimizer.params.lr=1e-3"]
    command = [sys.executable, str(root / "tools/bench_train.py"), *keys, "--rounds", "3", "--output", str(output)]
    done = subprocess.run([*command, "--peer", "transformers"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["method"] for line in records] == ["transformers", "transformers, memory kept", "rotary", "coca"]
    assert all(line["ratio_to"] == "transformers" and line["peak_bytes"] > 0 for line in records)


@pytest.mark.slow
def test_the_command_compares_engines(tmp_path: Path) -> None:
    import subprocess
    import sys

    root, output = Path(__file__).parents[3], tmp_path / "train.jsonl"
    keys = [f"{name}={json.dumps(value)}" for name, value in SHAPE.items()] + ["optimizer.params.lr=1e-3"]
    command = [sys.executable, str(root / "tools/bench_train.py"), *keys, "--rounds", "3", "--output", str(output)]
    options = ["--methods", "coca", "--engines", "deepspeed", "native", "muon"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["method"] for line in records] == ["coca, deepspeed", "coca, native", "coca, muon"]
    assert records[1]["ratio_to"] == "coca, deepspeed"
