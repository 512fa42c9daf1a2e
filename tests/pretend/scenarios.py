"""The scenarios that are measured on the stand-in device, as a literal table. This module does not import torch."""

from typing import NamedTuple

MODEL = ("configs/350M/roformer_coca.yml", "configs/cluster/gpu1.yml", "data_types=null")
"""One or two micro-batches a step, whose gradients are summed in bfloat16."""
SMALL = (
    *MODEL,
    "num_layers=2",
    "hidden_size=256",
    "num_attention_heads=4",
    "vocab_size=null",
    "data_root=build/pretend/data",
    "train_batch_size=8",
    "train_micro_batch_size_per_gpu=4",
)
"""A small model on the built-in corpus."""
SHORT = (*SMALL, "train_iters=2", "eval_interval=100", "eval_iters=1", "log_interval=1", "checkpoint_factor=100")

METHODS = {
    "none": ("pos_emb=none",),
    "rotary": ("pos_emb=rotary",),
    "coca": (),
    "coca + rerope": ("relative_positions={type: rerope, window: 256}",),
    "alibi": ("pos_emb=alibi", "attention_backend=triton"),
}

TRAINED = {
    "native": ("engine=native", "reset_attention_mask=true"),
    "native, fp32, compile": ("engine=native", "precision=fp32", "torch_compile=true"),
    "native, graphs": ("engine=native", "cuda_graphs=true", "train_iters=4"),
    "native, graphs, loss masks": ("engine=native", "cuda_graphs=true", "train_iters=4", "eod_mask_loss=true"),
    "zero 2": ("zero_optimization={stage: 2}",),
    "zero 3": ("zero_optimization={stage: 3}",),
    "fp16": ("precision=fp16",),
    "fp32": ("precision=fp32",),
    "compile": ("torch_compile=true",),
    "triton": ("attention_backend=triton", "operand_kernel=triton"),
    "rerope": ("relative_positions={type: rerope, window: 128}",),
    "lm_infinite": ("relative_positions={type: lm_infinite, window: 128}",),
    "alibi": ("pos_emb=alibi",),
    "rpe": ("pos_emb=rpe",),
    "kerple": ("pos_emb=kerple_power",),
    "dropout": ("attention_dropout=0.1", "hidden_dropout=0.1", "pos_emb=rotary"),
    "selective": ("checkpoint_activations=true", "checkpoint_policy=selective"),
    "full, compiled": ("checkpoint_activations=true", "torch_compile=true"),
    "offload": ("zero_optimization={stage: 2, offload_optimizer: {device: cpu}}",),
    "overlap": ("zero_optimization={stage: 2, overlap_comm: true}",),
    "packed": ("reset_attention_mask=true", "reset_position_ids=true"),
    "deterministic": ("deterministic=true",),
    "deterministic, fp32": ("deterministic=true", "precision=fp32", "pos_emb=kerple_log"),
    "deterministic, dropout": ("deterministic=true", "attention_dropout=0.1", "hidden_dropout=0.1", "pos_emb=rotary"),
    "grouped queries": ("num_kv_heads=2",),
    "clex": ("pos_emb=rotary", "rope_scaling={rope_type: clex, max_factor: 4}"),
}
"""Training configurations that must run to the end and save."""

POSITIONS = {
    "none": ("pos_emb=none",),
    "rotary": ("pos_emb=rotary",),
    "coca": ("pos_emb=coca",),
    "coca_strict": ("pos_emb=coca_strict",),
    "pope": ("pos_emb=pope",),
    "xpos": ("pos_emb=xpos",),
    "learned": ("pos_emb=learned",),
    "sinusoidal": ("pos_emb=sinusoidal",),
    "alibi": ("pos_emb=alibi",),
    "kerple_log": ("pos_emb=kerple_log",),
    "kerple_power": ("pos_emb=kerple_power",),
    "rpe": ("pos_emb=rpe",),
    "rerope": ("pos_emb=rotary", "relative_positions={type: rerope, window: 64}"),
    "lm_infinite": ("pos_emb=rotary", "relative_positions={type: lm_infinite, window: 64}"),
}
CAPTURED = {
    **POSITIONS,
    "fire": ("pos_emb=fire",),
    "forgetting gates": ("pos_emb=none", "forgetting_gate=fox"),
    "soft caps": ("attn_logit_softcapping=20.0",),
    "flex": ("attention_backend=flex",),
    "reference": ("attention_backend=reference",),
    "dropout": TRAINED["dropout"],
    "dropout, compiled": (*TRAINED["dropout"], "torch_compile=true"),
    "recomputed": TRAINED["full, compiled"],
    "selective": TRAINED["selective"],
    "fp32, compiled": ("precision=fp32", "torch_compile=true"),
    "sums in fp32": ("data_types={grad_accum_dtype: fp32}",),
    "deterministic": TRAINED["deterministic"],
}
"""Models whose passes must be captured in a CUDA graph."""
COMPILED_BACKENDS = ("sdpa", "merge", "flex", "triton")


class Scenario(NamedTuple):
    """A function of measure.py, and the configuration it measures."""

    function: str
    inputs: tuple[str, ...]
    seconds: int = 900


SCENARIOS: dict[str, Scenario] = {
    **{f"step: {name}": Scenario("step", (*MODEL, *keys)) for name, keys in METHODS.items() if name != "none"},
    "step: coca, native engine": Scenario("step", (*MODEL, "engine=native")),
    "step graph: coca": Scenario("step_graph", MODEL),
    **{f"layer: {name}": Scenario("layers", (*MODEL, *keys)) for name, keys in METHODS.items()},
    "layer: pope": Scenario("layers", (*MODEL, "pos_emb=pope")),
    "layer: pope + rerope": Scenario("layers", (*MODEL, "pos_emb=pope", *METHODS["coca + rerope"])),
    "layer: coca + rerope, merge": Scenario("layers", (*MODEL, *METHODS["coca + rerope"], "attention_backend=merge")),
    "layer: packed": Scenario("layers", (*MODEL, "reset_attention_mask=true", "attention_backend=triton")),
    "loss head": Scenario("loss_head", MODEL),
    **{
        f"graph: {name}": Scenario("step_graph", (*SMALL, "torch_compile=false", "vocab_size=512", *keys))
        for name, keys in CAPTURED.items()
    },
    **{f"decode: {name}": Scenario("decode", (*MODEL, *keys)) for name, keys in METHODS.items()},
    **{f"decode graph: {name}": Scenario("decode_graph", (*MODEL, *keys)) for name, keys in METHODS.items()},
    "decode graph: coca + dynamic": Scenario("decode_graph", (*MODEL, "rope_scaling={rope_type: dynamic, factor: 4}")),
    **{
        f"second GPU: {name}": Scenario("second_gpu", (*SMALL, "torch_compile=false", "vocab_size=512", *keys))
        for name, keys in (METHODS | {"kerple": ("pos_emb=kerple_log",), "rpe": ("pos_emb=rpe",)}).items()
    },
    "training loop": Scenario("loop", SMALL),
    "training loop, native engine": Scenario("loop", (*SMALL, "engine=native")),
    "overlap: 8 ranks": Scenario("overlap", MODEL),
    "overlap: 8 ranks, native engine": Scenario("overlap", (*MODEL, "engine=native")),
    **{f"train: {name}": Scenario("train", (*SHORT, *keys)) for name, keys in TRAINED.items()},
    **{
        f"compile: {name}": Scenario("compiled", (*SMALL, "vocab_size=512", "torch_compile=true", *keys))
        for name, keys in POSITIONS.items()
    },
}
