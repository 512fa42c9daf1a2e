"""The estimate of a run: time, and memory by part."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_coca import cli
from megatron_coca.commands.estimate import DEFAULT_MFU, GPUS, main
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model import build_model
from megatron_coca.model.cost import parameter_count, peak_flops
from megatron_coca.training.estimate import estimate, stage_parameters, states_bytes
from megatron_coca.training.topology import Topology

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "configs/350M/roformer_coca.yml"
HOST = ROOT / "configs/cluster/a100x8.yml"


def configured(**changes: Any) -> Config:
    return load_config([MODEL, HOST], changes)


def test_time_follows_from_operations() -> None:
    found = estimate(configured(), 8, 312e12, 0.5)
    assert (found.sizes.total, found.tokens_per_step) == (256, 256 * 512)
    assert found.total_tokens == 762940 * 256 * 512
    assert found.tokens_per_second == pytest.approx(8 * 312e12 * 0.5 / found.flops.model)
    assert found.seconds == pytest.approx(found.total_tokens / found.tokens_per_second)
    assert found.flops.model == pytest.approx(2.272e9, rel=1e-3)  # 6 x 353.7M + 12 x 24 x 1024 x 512


@pytest.mark.parametrize(
    ("keys", "backend", "wide"),
    [
        ({}, "sdpa", True),
        ({"attention_backend": "triton"}, "triton", False),
        ({"attention_backend": "triton", "relative_positions": {"type": "rerope", "window": 16}}, "triton", True),
    ],
    ids=["auto", "triton", "triton with a map"],
)
def test_operands_are_those_of_the_backend(
    keys: dict[str, Any], backend: str, wide: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Activations of PoPE are less than 5% more than those of RoFormer only if the backend gets magnitudes."""
    given = [f"{name}={json.dumps(value)}" for name, value in keys.items()]
    assert main([str(MODEL), str(HOST), "pos_emb=pope", *given]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("attention backend"))
    assert backend in line and ("wider than V" if wide else "computed from magnitudes") in line
    found, rope = (estimate(configured(**keys, pos_emb=name), 8, 312e12, 0.5) for name in ("pope", "rotary"))
    assert found.backends == {"global": backend}
    assert (found.memory.activations > 1.05 * rope.memory.activations) == wide


def test_a_model_folder_sets_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys: dict[str, Any] = {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    keys |= {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**keys))
    model.save_pretrained(tmp_path / "llama")
    assert main([str(tmp_path / "llama"), str(ROOT / "configs/finetune/lora.yml"), "--gpus", "1"]) == 0
    out = capsys.readouterr().out
    assert f"parameters         {sum(weight.numel() for weight in model.parameters()):>18,}" in out
    assert out.count(f"tokens per step    {512:>18,}   8 x 64") == 2 and "of them in adapters" in out


def test_every_kind_of_gpu_has_a_peak() -> None:
    assert all(peak_flops(gpu.device) for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(1, 2, 2, 12 / 8), (2, 2, 2 / 8, 12 / 8), (3, 2 / 8, 2 / 8, 12 / 8)],
)
def test_zero_divides_states(stage: int, weights: float, gradients: float, optimizer: float) -> None:
    config = configured(zero_optimization={"stage": stage, "stage3_max_live_parameters": 0})
    numbers = parameter_count(config).total
    states = states_bytes(config, Topology.of(config.parallel, 8), numbers)
    assert (states.weights, states.gradients, states.optimizer) == pytest.approx(
        (weights * numbers, gradients * numbers, optimizer * numbers)
    )


@pytest.mark.parametrize(("ranks", "stage", "size"), [(1, 1, 4), (8, 1, 4 / 8), (8, 3, 4 / 8)])
def test_gradients_that_are_summed_in_float32(ranks: int, stage: int, size: float) -> None:
    config = configured(zero_optimization={"stage": stage}, data_types={"grad_accum_dtype": "fp32"})
    assert states_bytes(config, Topology.of(config.parallel, ranks), 1000).gradients == pytest.approx(size * 1000)


@pytest.mark.parametrize(
    ("ranks", "keys", "gradients", "optimizer", "step"),
    [
        (1, {"precision": "fp32"}, 4, 8, 0),
        (8, {"precision": "fp32"}, 4, 8 / 8, 0),
        (1, {}, 2, 12, 4),
        (8, {}, 2, 12 / 8, 4 / 8),
        (8, {"data_types": {"grad_accum_dtype": "fp32"}}, 2 + 4 / 8, 12 / 8, 0),
    ],
)
def test_the_native_engine_divides_the_optimizer_states(
    ranks: int, keys: dict[str, Any], gradients: float, optimizer: float, step: float
) -> None:
    config = configured(**{"engine": "native", "zero_optimization": {"stage": 1, "reduce_bucket_size": 100}} | keys)
    found = states_bytes(config, Topology.of(config.parallel, ranks), 1000)
    assert (found.gradients, found.optimizer, found.step) == (1000 * gradients, 1000 * optimizer, 1000 * step)
    size = 4 if keys == {"precision": "fp32"} else 2
    assert found.weights == size * 1000 and found.buffers == (size * (100 + 1000 / 8) if ranks > 1 else 0)


@pytest.mark.parametrize(
    ("keys", "buffers"),
    [
        ({}, 4 * 1000 + 2 * 1000),
        ({"gradient_accumulation_steps": 1}, 4 * 1000),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 0),
        ({"precision": "fp32"}, 4 * 1000),
    ],
    ids=str,
)
def test_a_graph_keeps_its_memory(keys: dict[str, object], buffers: int) -> None:
    """Float32 gradients and the sums of micro-batches cannot reuse the memory of activations."""
    config = configured(**{"engine": "native", "cuda_graphs": True, "precision": "bfloat16"} | keys)
    states = states_bytes(config, Topology(1, 1, 1, 1), 1000)
    assert (states.buffers, states.step) == (buffers, 0)


def test_offloaded_states_lie_on_the_host() -> None:
    section = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = configured(zero_optimization=section | {"stage3_max_live_parameters": 1000})
    numbers = parameter_count(config).total
    states = states_bytes(config, Topology.of(config.parallel, 8), numbers)
    assert states.optimizer == 0 and states.weights == 2 * 1000
    assert states.host == pytest.approx((12 + 2) * numbers / 8)


@pytest.mark.parametrize(("name", "size"), [("sgd", 400), ("lion", 800)])
def test_sgd_keeps_no_moments_and_lion_one(name: str, size: int) -> None:
    config = configured(**{"optimizer.type": name})
    assert states_bytes(config, Topology(1, 1, 1, 1), 100).optimizer == size


def test_muon_keeps_one_moment_of_matrices_and_two_of_other_weights() -> None:
    config = configured(**{"optimizer.type": "Muon", "engine": "native"})
    count = parameter_count(config)
    states = states_bytes(config, Topology(1, 1, 1, 1), count.total)
    others = count.total - count.attention - count.mlp
    assert states.optimizer == pytest.approx((4 + 4) * count.total + 4 * others)


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_and_tensor_ranks_hold_parts(tied: bool) -> None:
    config = configured(no_weight_tying=not tied)
    count = parameter_count(config)
    ((whole, layers),) = stage_parameters(config, Topology(1, 1, 1, 1))
    assert (whole, layers) == (count.total, 24)
    stages = stage_parameters(config, Topology(5, 1, 1, 1))
    assert [blocks for _, blocks in stages] == [5, 5, 5, 5, 4]
    assert sum(numbers for numbers, _ in stages) == count.total + (count.embedding if tied else 0)
    ((half, _),) = stage_parameters(config, Topology(1, 1, 2, 1))
    whole_biases = 24 * 2 * 1024
    assert whole - half == (count.attention + count.mlp - whole_biases) // 2


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"qk_norm": "projection"},
        {"use_qk_layernorm": True, "use_embedding_norm": True},
        {"norm_position": "residual", "embedding_width": 32},
        {"use_output_transform": True, "skip_first_norm": True},
    ],
)
def test_stages_of_one_block_are_those_of_the_built_model(keys: dict[str, Any]) -> None:
    shape = {"num_layers": 3, "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4}
    config = load_config([MODEL], shape | keys)
    sizes = {name: parameter.numel() for name, parameter in build_model(config).named_parameters()}
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.1."))
    assert stage_parameters(config, Topology(3, 1, 1, 1))[1] == (block, 1)
    assert stage_parameters(config, Topology(1, 1, 1, 1)) == [(sum(sizes.values()), 3)]


def test_the_first_stage_of_a_pipeline_waits_longest() -> None:
    """Two stages hold half of the blocks each, for two micro batches on the first one."""
    keys = {"gradient_accumulation_steps": 4, "train_batch_size": None}
    flat = estimate(configured(**keys), 8, 1.0, 1.0).memory
    piped = estimate(configured(**keys, pipe_parallel_size=2), 8, 1.0, 1.0).memory
    assert piped.activations == pytest.approx(flat.activations, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"checkpoint_activations": True}, "activations"),
        ({"checkpoint_activations": True, "checkpoint_policy": "selective"}, "activations"),
        ({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}, "activations"),
        ({"loss_chunk_size": 256}, "loss"),
        ({"zero_optimization": {"stage": 2}}, "gradients"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}, "buffers"),
    ],
)
def test_what_a_key_is_for(changes: dict[str, Any], part: str) -> None:
    before, after = (estimate(config, 8, 1.0, 1.0).memory for config in (configured(), configured(**changes)))
    assert getattr(after, part) < getattr(before, part) and after.total < before.total


def test_gpus_that_cannot_be_divided_are_errors() -> None:
    with pytest.raises(ConfigError, match="does not divide 9 processes"):
        estimate(configured(model_parallel_size=2), 9, 1.0, 1.0)


def test_the_tool_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(MODEL), str(HOST)]) == 0
    shown = capsys.readouterr().out
    assert "405,334,016" in shown and "fits:" in shown and "26.4% MFU, the CoCA paper's run" in shown
    keys = ["seq_length=4096", "max_position_embeddings=4096"]
    assert main([str(MODEL), "--gpu", "A100-40", "--gpus", "2", *keys]) == 1
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown and "try a higher zero_optimization.stage" in shown
    assert main([str(MODEL), "train_micro_batch_size_per_gpu=2", "--gpus", "8"]) == 0
    assert "of 16 micro-batches are summed in bfloat16" in capsys.readouterr().out
    assert main([str(MODEL), str(HOST), "--mfu", "0.2"]) == 0
    speed = estimate(configured(), 8, 312e12, 0.2).tokens_per_second
    assert f"{speed:,.0f}   at 20.0% MFU" in capsys.readouterr().out


def test_the_default_is_the_time_of_the_papers_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate(configured(), 8, 312e12, DEFAULT_MFU)
    assert found.seconds == pytest.approx(96 * 3600, rel=0.01), "96 hours on 8 A100 (docs/training.md)"
    keys = [str(MODEL), "train_micro_batch_size_per_gpu=8", "precision=bfloat16"]
    ends = [("8", "A100-80", (), "3.99"), ("32", "H100", (), "without communication between hosts")]
    ends.append(("32", "H100", ("--mfu", "0.3"), "with the communication that --mfu contains"))
    for gpus, gpu, mfu, end in ends:
        assert main([*keys, "--gpus", gpus, "--gpu", gpu, *mfu]) == 0
        shown = capsys.readouterr().out
        (days,) = [line for line in shown.splitlines() if line.startswith("days")]
        assert days.endswith(end), shown
        assert ("not measured on H100" in shown) is (gpu == "H100" and not mfu)


def test_the_tool_estimates_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    longer = "{seq_length: 4096, train_batch_size: 16, train_micro_batch_size_per_gpu: 1}"
    keys = ["train_iters=1000", f"stages=[{{until: 90%}}, {longer}]"]
    inputs = [str(MODEL), str(HOST)]
    assert main([*inputs, "train_iters=900"]) == 0
    first = capsys.readouterr().out
    assert main([*inputs, *keys]) == 0
    shown = capsys.readouterr().out
    assert first in shown
    assert "steps 0 to 900: the configuration unchanged" in shown and "steps 900 to 1,000: seq_length=4096" in shown
    assert f"all stages: {900 * 256 * 512 + 100 * 16 * 4096:,} tokens, " in shown


def test_the_vocabulary_of_a_synthetic_task_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "configs/recall/model.yml"), str(ROOT / "configs/recall/ordered.yml")]) == 0
    rows = 384  # 32 + 16 x 16 + 3 x 16 + 1 token ids, in multiples of 64
    assert f"  embedding        {rows * 64:>18,}" in capsys.readouterr().out


def test_the_tool_needs_hosts_or_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", str(MODEL), str(ROOT / "configs/cluster/a100x32.yml")]) == 2
    error = capsys.readouterr().err
    assert "hostfile" in error and "--gpus" in error


@pytest.mark.parametrize(
    ("gpu", "keys", "advice"),
    [
        ("H100", [], "size_per_gpu=64 gradient_accumulation_steps=4 also fits: 40.41"),
        ("A100-40", [], "size_per_gpu=32 gradient_accumulation_steps=8 also fits: 25.09"),
        ("4090", [], None),
        ("H100", ["train_micro_batch_size_per_gpu=64"], None),
        ("H100", ["train_micro_batch_size_per_gpu=256"], None),
        ("H100", ["seq_length=2048", "max_position_embeddings=2048"], "size_per_gpu=16 gradient_accumulation_steps=16"),
    ],
)
def test_a_larger_micro_batch_that_fits_is_told(
    gpu: str, keys: list[str], advice: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to 32,768 tokens, with the same samples per step."""
    small = ["train_micro_batch_size_per_gpu=2"] if "seq_length=2048" in keys else []
    inputs = [str(MODEL), str(ROOT / "configs/cluster/gpu1.yml"), "--gpu", gpu, *keys, *small]
    assert main(inputs) == (keys == ["train_micro_batch_size_per_gpu=256"])
    shown = capsys.readouterr().out
    assert ("also fits" in shown) == (advice is not None) and (advice or "") in shown
