"""Faulty configurations: every problem at once, with place, key and remedy."""

from pathlib import Path

import pytest

from megatron_coca.config import ConfigError, load_config
from megatron_coca.methods import names

REQUIRED = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64}


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    path = folder / "run.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    assert str(error.value) == "\n".join(error.value.problems)
    return [line.replace(f"{folder}/", "") for line in error.value.problems]


def complete(text: str) -> str:
    return "".join(f"{key}: {value}\n" for key, value in REQUIRED.items()) + text


def test_all_problems_are_gathered(tmp_path: Path) -> None:
    text = """num_layers: '2'
hidden_size: 100
num_attention_heads: 16
seq_lenght: 64
pos_emb: Rotary
hidden_dropout: true
train_iters: 1e3
optimizer: {type: adan, params: {lr: 1e-4, beta: 3}}
"""
    expected = {
        "run.yml:1: num_layers: ": "got '2'; remove the quotes",
        "run.yml:3: num_attention_heads: 16 heads": "set kv_channels",
        "run.yml:4: seq_lenght: unknown key": "`seq_length`",
        "run.yml: seq_length: required": "",
        "run.yml:5: pos_emb: `Rotary` ": f"{' | '.join(names('pos_emb'))}; did you mean `rotary`",
        "run.yml:6: hidden_dropout: ": "got True",
        "run.yml:7: train_iters: ": "got 1000.0; write 1000",
        "run.yml:8: optimizer.type: `adan` ": "Adam | AdamW | cpu_adam | sgd | lion | Muon; did you mean `Adam`",
        "run.yml:8: optimizer.params.beta: unknown key": "`optimizer.params.betas`",
        "command line: seeed: unknown key": "`seed`",
    }
    found = problems(tmp_path, text, "seeed=3")
    assert len(found) == len(expected)
    for start, rest in expected.items():
        assert any(each.startswith(start) and rest in each for each in found), (start, rest)


def test_an_overlay_alone_is_put_after_a_model(tmp_path: Path) -> None:
    for text in ("rope_scaling: {rope_type: dynamic, factor: 4}\nrelative_positions: {type: rerope}", "seq_length: 64"):
        (found,) = problems(tmp_path, text)
        assert found.startswith("run.yml: describes no model (num_layers, ")
        assert found.endswith("model's file, for example `configs/350M/roformer_coca.yml`")
    found, missing = sorted(problems(tmp_path, "rotary_ptc: 0.5", "pos_emb=coca"))
    assert "did you mean `rotary_pct`" in missing and "describes no model" in found


def test_a_key_given_twice_names_both_lines(tmp_path: Path) -> None:
    found = problems(tmp_path, complete("hidden-size: 100\nrope_scaling: {factor: 1, factor: 2}\nseed: true\n"))
    assert "run.yml:5: hidden_size: given twice" in found[0]
    assert "lines 2 and 5, as `hidden_size` and `hidden-size`" in found[0]
    assert "rope_scaling.factor: given twice, on lines 6 and 6" in found[1]
    assert any("seed: expected an integer" in line for line in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train_iters: [1\nb: 2", "run.yml:2: not valid YAML"),
        ("[1, 2]", "run.yml: the file is a list; expected a mapping"),
        ("", "run.yml: the file is empty"),
        ("a: *b", "run.yml:1: not valid YAML: found undefined alias"),
        ("&a {b: *a}", "run.yml:1: not valid YAML: a value that contains"),
        ("a: !!python/name:os.system x", "run.yml:1: not valid YAML: could not determine"),
    ],
)
def test_unreadable_text(tmp_path: Path, text: str, expected: str) -> None:
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "roformer.yml").write_text("num_layerz: 2\n")
    with pytest.raises(ConfigError) as error:
        load_config([tmp_path / "rofomer.yml", tmp_path, tmp_path / "roformer.yml"])
    missing, folder, unknown = error.value.problems
    assert missing == f"{tmp_path}/rofomer.yml: no such file; did you mean `{tmp_path}/roformer.yml`?"
    assert folder == f"{tmp_path}: is a folder; name a YAML file in it"
    assert "num_layerz: unknown key" in unknown


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_bytes(b"save: \xff\n")
    with pytest.raises(ConfigError, match="run.yml: not UTF-8 text"):
        load_config(tmp_path / "run.yml")


@pytest.mark.parametrize("override", ["seed", "=3", "seed=[1"])
def test_malformed_override(tmp_path: Path, override: str) -> None:
    assert problems(tmp_path, complete(""), override)[0].startswith("command line: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_kv_heads: 3", "num_kv_heads: 3 ... num_attention_heads 4"),
        ("intermediate_size: 8\nexpansion_factor: 2", "expansion_factor: contradicts intermediate_size"),
        ("max_position_embeddings: 32", "seq_length: 64 exceeds max_position_embeddings 32"),
        ("train_iters: ten", "train_iters: expected an integer, got 'ten'"),
        ("train_iters: '10'", "train_iters: expected an integer ... '10'; remove the quotes"),
        ("gradient_clipping: auto", "gradient_clipping: expected ... 'auto'; leave the key out"),
        ("gradient_accumulation_steps: auto", "gradient_accumulation_steps: expected ... 'auto'; leave the key out"),
        ("warmup: 100", "warmup: expected ... 1, got 100; the value is a fraction"),
        ("weight_decay: '0.1'", "weight_decay: expected a number, got '0.1'; remove the quotes"),
        ("finetune: 'maybe'", "finetune: expected true or false, got 'maybe'"),
        ("learning_rate: 1e-4", "learning_rate: unknown key ... `optimizer.params.lr`"),
        ("warmup_steps: 10", "warmup_steps: unknown key ... `warmup` to the share"),
        ("epochs: 3", "epochs: unknown key ... `train_epochs`"),
        ("tensor_parallel_size: 2", "tensor_parallel_size: unknown key ... `model_parallel_size`"),
        ("sliding_window: 128", "sliding_window: unknown key ... `sliding_window_width`"),
        ("batch_size: 4", "batch_size: setting ... (set train_micro_batch_size_per_gpu or"),
        ("num_experts: 4", "num_experts: unknown key ... `moe_num_experts`"),
        ("bf16: true", "bf16: expected a mapping, got True ... precision=bf16"),
        ("max_steps: 10", "max_steps: unknown key ... `train_iters`"),
        (
            "per_device_train_batch_size: 4",
            "per_device_train_batch_size: unknown key ... `train_micro_batch_size_per_gpu`",
        ),
        (
            "pos_emb: pope\npos_emb_options: {offset: zer}",
            "pos_emb_options.offset: `zer` ... none | zero | uniform | free; did you mean `zero`",
        ),
        (
            "pos_emb: pope\npos_emb_options: {off-set: zero}",
            "pos_emb_options.off_set: unknown key ... `pos_emb_options.offset`",
        ),
        (
            "pos_emb: polar\npos_emb_options: {delta: 1}",
            "pos_emb_options.delta: unknown key ... initial_angle | offset | power | ",
        ),
        (
            "pos_emb: polar\npos_emb_options: {initial_angle: -0.7}",
            "pos_emb_options: initial_angle and offset zero ... offset: none",
        ),
        ("pos_emb: pope\npos_emb_options: {power: 2}", "pos_emb_options: power has no effect ... pope"),
        (
            "pos_emb: polar\nlayer_types: {a: {pos_emb_options: {power: 2}}}",
            "layer_types.a.pos_emb_options: needs pos_emb ... same layer type",
        ),
        (
            "layer_types: {a: {rope_scaling: {rope_type: yarn, facto: 2}}}",
            "layer_types.a.rope_scaling.facto: unknown key ... `layer_types.a.rope_scaling.factor`",
        ),
        ("distributed_backend: mpi", "distributed_backend: `mpi` ... nccl | gloo"),
        ("train_epochs: 2\ntrain_iters: 4", "train_epochs: contradicts train_iters"),
        ("train_epochs: 2", "train_epochs: needs data_path or train_data_paths"),
        ("train_epochs: 2\ndata_path: a\nweight_by_num_documents: true", "train_epochs: reads every shard equally"),
        ("sliding_window_width: -1", "sliding_window_width: expected ... 0, got -1"),
        (
            "pipe_parallel_size: 2\nbf16: {enabled: true}\ndata_types: {grad_accum_dtype: fp32}",
            "deepspeed_extra_args: data_types.grad_accum_dtype fp32 ... pipe_parallel_size",
        ),
        ("pos_emb: coca\nrotary_pct: 0.1", "rotary_pct: 0.1 of 32 features per head"),
        ("norm: te_rmsnorm", "norm: `te_rmsnorm`: "),
        ("pos_emb: alibi\nrope_scaling: {rope_type: ntk}", "rope_scaling: rope_type ntk ... with pos_emb alibi"),
        ("pos_emb: rotary\nrope_scaling: {factor: 2}", "rope_scaling: factor has no effect ... default"),
        (
            "pos_emb: rotary\nrope_scaling: {type: yarn, factor: 2}",
            "rope_scaling.type: unknown key ... `rope_scaling.rope_type`",
        ),
        (
            "pos_emb: rotary\nrope_scaling: {rope_type: ntk, factor: 0.5}",
            "rope_scaling.factor: expected a value greater",
        ),
        ("pos_emb: coca\nrope_scaling: {rope_type: yarn}", "rope_scaling: rope_type yarn needs factor"),
        ("pos_emb: coca\nrotary_emb_base: 1", "rotary_emb_base: expected a value greater than 1"),
        (
            "pos_emb: rotary\nrope_scaling: {rope_type: linear, factor: 2, beta_fast: 3}",
            "rope_scaling: beta_fast has no effect ... yarn | dynamic_yarn",
        ),
        (
            "pos_emb: coca\nrope_scaling: {rope_type: dynamic_max}",
            "rope_scaling: rope_type dynamic_max needs target_length",
        ),
        (
            "pos_emb: coca\nrope_scaling: {rope_type: dynamic_max, target_length: 8}",
            "rope_scaling: target_length 8 is below ... L = 64",
        ),
        (
            "pos_emb: coca\nrope_scaling: {rope_type: longrope, factor: 2, short_factor: [1], long_factor: [1]}",
            "rope_scaling: short_factor has 1 ... 16 frequencies",
        ),
        (
            "pos_emb: coca\nrope_scaling: {rope_type: proportional, proportion: 0.06}",
            "rope_scaling: proportion 0.06 of 16 pairs",
        ),
        ("pos_emb: alibi\nrotary_frequencies: rope_id", "rotary_frequencies: rope_id ... with pos_emb alibi"),
        *(
            (
                f"pos_emb: coca\nrotary_frequencies: rope_id\nrope_scaling: {{rope_type: {name}}}",
                f"rotary_frequencies: rope_id ... with rope_type {name.partition(',')[0]}",
            )
            for name in ("clex", "proportional, proportion: 0.5")
        ),
        (
            "pos_emb: coca\nrotary_frequencies: rope_id\nrotary_emb_base: 500",
            "rotary_emb_base: 500 has no effect ... rope_id",
        ),
        (
            "pos_emb: coca\nrotary_frequencies: {type: rope_id, turns: 20}",
            "rotary_frequencies: the slowest pair ... L / turns = 3.2",
        ),
        (
            "pos_emb: coca\nrotary_frequencies: {type: rope_id, turns: 0.5}",
            "rotary_frequencies.turns: expected a value greater ... 1",
        ),
        (
            "pos_emb: coca\nrope_scaling: {rope_type: yarn, factor: 2, beta_fast: 1}",
            "rope_scaling: beta_fast 1.0 must exceed beta_slow 1.0",
        ),
        (
            "pos_emb: coca\nrope_scaling: {rope_type: llama3, factor: 2, low_freq_factor: 4}",
            "rope_scaling: high_freq_factor 4.0 must exceed low_freq_factor 4.0",
        ),
        (
            "pos_emb: alibi\nrelative_positions: {type: rerope}",
            "relative_positions: rerope needs rotary positions ... alibi",
        ),
        ("pos_emb: coca\nrelative_positions: {type: streaming}", "relative_positions: streaming shifts positions"),
        (
            "pos_emb: rotary\nrelative_positions: {type: rerope, sinks: 4}",
            "relative_positions: sinks has no effect ... lm_infinite | streaming",
        ),
        (
            "pos_emb: rotary\nrelative_positions: {type: inv_leaky_rerope}",
            "relative_positions: type inv_leaky_rerope needs target_length",
        ),
        (
            "pos_emb: rotary\nrelative_positions: {type: inv_leaky_rerope, target_length: 4}",
            "relative_positions: target_length 4 must exceed 32",
        ),
        (
            "pos_emb: rotary\nrelative_positions: {type: dual_chunk, chunk_size: 64}",
            "relative_positions: chunk_size 64 exceeds max_position 63",
        ),
        (
            "pos_emb: rotary\nrelative_positions: {type: streaming, sinks: 4000}",
            "relative_positions: 4000 sinks leave no window",
        ),
        *(
            (
                f"pos_emb: rotary\nrelative_positions: {{type: {kind}}}\ntraining_positions: {{type: pose, max: 16L}}",
                f"training_positions: ... with relative_positions {kind}",
            )
            for kind in ("dual_chunk", "streaming")
        ),
        (
            "pos_emb: rotary\nrope_scaling: {rope_type: clex}\nrelative_positions: {type: rerope}",
            "relative_positions: not supported with rope_type clex",
        ),
        ("pos_emb: rpe\nrpe_max_distance: 16", "rpe_max_distance: 16 must exceed 16"),
        ("rope_scaling: {type: ntk}", "rope_scaling.type: unknown key ... `rope_scaling.rope_type`"),
        ('attention_config: [[["gmlp"], "all"]]', "attention_config: unknown attention type gmlp; use global"),
        ('attention_config: [[["flash"], 3]]', "attention_config: covers 3 layers, but num_layers is 2"),
        ("lr: 1e-3\noptimizer: {params: {lr: 1e-4}}", "lr: 0.001 contradicts optimizer.params.lr 0.0001"),
        ("optimizer: {params: {weight_decay: 0.1}}", "optimizer.params.weight_decay: belongs at the top"),
        ("metric_sinks: {wandb: {project: a}}", "metric_sinks.wandb: belongs ... `use_wandb`"),
        ("use_comet: true", "use_comet: Comet ... (use metric_sinks.comet)"),
        ("optimizer: {type: SM3}", "optimizer.type: `SM3`: this optimizer is not supported"),
        ("lr: 1e-4\nmin_lr: 1e-3", "min_lr: 0.001 exceeds the learning rate 0.0001"),
        ("precision: fp32\nbf16: {enabled: true}", "precision: bf16 and fp32 are both enabled"),
        ("fp16: {enabled: true}\nbf16: {enabled: true}", "precision: bf16 and fp16 are both enabled"),
        ("fp16: {enabled: 1}", "fp16.enabled: expected true or false, got 1"),
        ("precision: bf16", "precision: `bf16` ... fp16 | fp32 | bfloat16; did you mean `bfloat16`"),
        ("zero_optimization: {stage: 4}", "zero_optimization: stage 4 is not one of 0 | 1 | 2 | 3"),
        ("engine: fast", "engine: `fast` ... auto | deepspeed | native"),
        ("cuda_graphs: true", "cuda_graphs: only the native engine ... set engine=native"),
        *(
            (f"engine: native\ncuda_graphs: true\n{keys}", f"cuda_graphs: not supported with {reason}")
            for keys, reason in [
                ("reset_attention_mask: true", "reset_attention_mask: the host reads the documents"),
                ("pos_emb: learned\nreset_position_ids: true", "reset_position_ids: the host reads the documents"),
                (
                    "pos_emb: rotary\ntraining_positions: {type: shifted, max: 4L}",
                    "training_positions: the host reads ... cuda_graphs=false",
                ),
                (
                    "pos_emb: rotary\nrope_scaling: {rope_type: clex, max_factor: 4}",
                    "rope_scaling: it is trained with stretched positions",
                ),
                ("checkpoint_activations: true\nhidden_dropout: 0.1", "checkpoint_activations and dropout: recomput"),
                ("checkpoint_activations: true\nlora: {dropout: 0.1}", "checkpoint_activations and dropout: recomput"),
                ("attn_logit_softcapping: 20\nattention_dropout: 0.1", "attn_logit_softcapping and attention_dropou"),
                ("pos_emb: fire\nattention_dropout: 0.1", "attention_dropout: with forgetting gates and FIRE, recom"),
                ("forgetting_gate: fox\nattention_dropout: 0.1", "attention_dropout: with forgetting gates and FIRE"),
            ]
        ),
        ("engine: native\nprecision: fp16", "engine: native has no loss scaling ... precision=bfloat16"),
        ("engine: native\nzero_optimization: {stage: 2}", "engine: native has no ZeRO 2 ... zero_optimization.stage"),
        ("engine: native\nmodel_parallel_size: 2", "engine: native only divides the samples ... model_parallel_size 2"),
        (
            "engine: native\nsequence_parallel_size: 2",
            "engine: native only divides the samples ... sequence_parallel_size 2",
        ),
        (
            "engine: native\ncontext_parallel_size: 2",
            "engine: native only divides the samples ... context_parallel_size 2",
        ),
        ("engine: native\npipe_parallel_size: 2", "engine: native only divides the samples ... pipe_parallel_size 2"),
        (
            "engine: native\nzero_optimization: {stage: 1, offload_optimizer: {device: cpu}, overlap_comm: true}",
            "engine: native does not support zero_optimization: offload_optimizer;",
        ),
        ("engine: native\nprescale_gradients: true", "engine: native passes no keys ... (prescale_gradients)"),
        ("engine: native\ndata_types: {grad_accum_dtype: bf16}", "engine: native passes no keys ... (data_types)"),
        ("pipe_parallel_size: 2\nzero_optimization: {stage: 2}", "pipe_parallel_size: ... only ZeRO stages 0 and 1"),
        (
            "pipe_parallel_size: 2\nmodel_parallel_size: 2",
            "pipe_parallel_size: not supported with model_parallel_size",
        ),
        (
            "pipe_parallel_size: 2\nsequence_parallel_size: 2",
            "pipe_parallel_size: DeepSpeed's pipelines ... set sequence_parallel_size",
        ),
        (
            "pipe_parallel_size: 2\ncontext_parallel_size: 2",
            "pipe_parallel_size: DeepSpeed's pipelines ... set context_parallel_size",
        ),
        ("pipe_parallel_size: 3", "pipe_parallel_size: 3 stages ... num_layers is 2"),
        ("model_parallel_size: 3", "model_parallel_size: 3 ... num_attention_heads 4 and num_kv_heads 4 and "),
        (
            "model_parallel_size: 2\nintermediate_size: 63",
            "model_parallel_size: 2 does not divide intermediate_size 63",
        ),
        ("sequence_parallel_size: 2\nnum_kv_heads: 1", "sequence_parallel_size: 2 does not divide num_kv_heads 1;"),
        ("sequence_parallel_size: 8", "sequence_parallel_size: 8 does not divide num_attention_heads 4 and "),
        (
            "model_parallel_size: 2\ncheckpoint_activations: true\ncheckpoint_policy: selective",
            "checkpoint_policy: selective ... tensor-parallel layers",
        ),
        ("model_parallel_size: 2\ntorch_compile: true", "torch_compile: not supported with model_parallel_size"),
        ("sequence_parallel_size: 2\ntorch_compile: true", "torch_compile: not supported with sequence_parallel_size"),
        (
            "sequence_parallel_size: 2\nmodel_parallel_size: 2",
            "model_parallel_size: not supported with sequence_parallel_size",
        ),
        (
            "sequence_parallel_size: 2\nzero_optimization: {stage: 3, reduce_scatter: false}",
            "zero_optimization: with sequence_parallel_size ... reduce_scatter",
        ),
        (
            "context_parallel_size: 2\nmodel_parallel_size: 2",
            "model_parallel_size: not supported with context_parallel_size",
        ),
        (
            "context_parallel_size: 2\nzero_optimization: {stage: 3, reduce_scatter: false}",
            "zero_optimization: with context_parallel_size ... reduce_scatter",
        ),
        ("context_parallel_size: 2\nattention_dropout: 0.1", "context_parallel_size: ... do not share dropout masks"),
        ("context_parallel_size: 33", "context_parallel_size: 33 ranks ... need 66 tokens, not 64"),
        (
            "context_parallel_size: 3\nsequence_parallel_size: 2",
            "context_parallel_size: 3 ranks ... with sequence_parallel_size 2, 64 tokens",
        ),
        ("context_parallel_size: 2\ntorch_compile: true", "torch_compile: not supported with context_parallel_size"),
        (
            "context_parallel_size: 20\neval_windows: [32]",
            "eval_windows: context_parallel_size 20 ... need 40 tokens, not 32;",
        ),
        (
            "pos_emb: learned\nopt_pos_emb_offset: 2\nmax_position_embeddings: 65",
            "seq_length: 64 + opt_pos_emb_offset 2 exceeds max_position_embeddings 65",
        ),
        ("moe_jitter_eps: 0.1", "moe_jitter_eps: noise on the router's input"),
        ("norm: te_rmsnorm", "norm: `te_rmsnorm`: Transformer Engine is not supported"),
        ("hidden_dropout: 1.0", "hidden_dropout: expected a value less than 1, got 1.0"),
        ("num_workers: -1", "num_workers: expected ... 0, got -1"),
        ("min_lr: .nan", "min_lr: expected a finite number, got nan"),
        ("checkpoint_factor: 1\ncheckpoint_scale: log", "checkpoint_factor: ... above 1 with `checkpoint_scale: log`"),
        ("checkpoint_factor: 1.5", "checkpoint_factor: ... whole number of steps with `checkpoint_scale: linear`"),
        ('save: ""', "save: expected a path, got ''"),
        ('load: ""', "load: expected a path, got ''"),
        ("loss_spike_policy: rollback", "loss_spike_policy: `rollback` ... off | warn | skip"),
        ("nonfinite_policy: rollback", "nonfinite_policy: `rollback` ... stop | skip"),
        ("torch_compile: tune", "torch_compile: expected ... `auto`, got 'tune'"),
        ("launcher: ssh", "launcher: `ssh` ... pdsh | slurm"),
        ("max_rollbacks: 10", "max_rollbacks: was removed"),
        (
            "pos_emb: rotary\nrope_scaling: {rope_type: linear, factor: 2, beta_fast: 32.0}",
            "rope_scaling: beta_fast has no effect ... linear",
        ),
        ("finetune: true", "finetune: has no effect without load"),
        ("iteration: 4", "iteration: has no effect without load"),
        ("iteration: 0\nsave: a\nauto_resume: true", "iteration: has no effect without load"),
        ("iteration: 4\nsave: a\nload: a\nauto_resume: true", "iteration: contradicts auto_resume"),
        ("data_path: a\ntrain_data_paths: [b]\nvalid_data_paths: [b]\ntest_data_paths: [b]", "data_path: contradicts"),
        ("train_data_paths: [b]\nvalid_data_paths: [b]", "test_data_paths: missing ... train_data_paths"),
        ("train_data_weights: [1]", "train_data_weights: 1 weights for 0 train_data_paths"),
        ("split: '9, x'", "split: '9, x' is not a list"),
        ("train_batch_size: 10\ntrain_micro_batch_size_per_gpu: 4", "train_batch_size: 10 is not a multiple of micro"),
    ],
)
def test_each_fault_is_named(tmp_path: Path, text: str, expected: str) -> None:
    """In an expectation, " ... " stands for any words."""
    found = problems(tmp_path, complete(text))
    assert len(found) == 1
    place, _, message = found[0].partition(": ")
    assert place.startswith("run.yml")
    start, _, rest = expected.partition(" ... ")
    assert message.startswith(start) and rest in message[len(start) :]


def test_every_fault_of_rope_scaling_is_named(tmp_path: Path) -> None:
    lists = "short_factor: [1], long_factor: [1], original_max_position_embeddings: 1"
    text = f"rope_scaling: {{rope_type: longrope, factor: 2, {lists}%s}}"
    own = ("short_factor has 1 numbers", "longrope divides by")
    foreign = ("beta_fast has no effect", "low_freq_factor has no effect")
    for options, expected in (("", own), (", beta_fast: 1, low_freq_factor: 4", foreign)):
        found = "\n".join(problems(tmp_path, complete(f"pos_emb: coca\n{text % options}")))
        assert all(part in found for part in expected), found


def test_logits_are_not_scaled_against_a_training_length_of_one(tmp_path: Path) -> None:
    text = "pos_emb: coca\nlogit_scaling: log_n\n"
    (found,) = problems(tmp_path, complete(text), "seq_length=1")
    assert "logit_scaling: divides by ln L" in found
    original = complete(f"{text}rope_scaling: {{original_max_position_embeddings: 1}}")
    (tmp_path / "fine.yml").write_text(original)
    assert load_config(tmp_path / "fine.yml").model.seq_length == 64, "that is of the frequencies alone"


def test_weights_must_be_positive(tmp_path: Path) -> None:
    text = "train_data_paths: [a]\nvalid_data_paths: [a]\ntest_data_paths: [a]\ntrain_data_weights: [0]\n"
    assert "train_data_weights[0]: expected a value greater than 0, got 0" in problems(tmp_path, complete(text))[0]


def test_a_fault_in_an_override_is_placed_on_the_command_line(tmp_path: Path) -> None:
    choice, rate = problems(
        tmp_path, complete("pos_emb: rotary\n"), "rope_scaling.rope_type=dynamc", "optimizer={params: {lr: x}}"
    )
    assert choice.startswith("command line: rope_scaling.rope_type: `dynamc` ")
    assert choice.endswith(f"{' | '.join(names('rope_scaling'))}; did you mean `dynamic`?")
    assert rate.startswith("command line: optimizer.params.lr: ") and rate.endswith("got 'x'")


def test_none_is_not_null(tmp_path: Path) -> None:
    """Python's word would otherwise name a folder."""
    path = tmp_path / "a.yml"
    path.write_text("num_layers: 1\nhidden_size: 8\nnum_attention_heads: 1\nseq_length: 4\nsave: None\n")
    with pytest.raises(ConfigError, match=r"a\.yml:5: save: `None` .*write null"):
        load_config(path)
