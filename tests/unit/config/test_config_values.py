"""What resolved configurations say: derived shapes, batches, horizons, GPT-NeoX's keys, the shipped files."""

from pathlib import Path

import pytest

from megatron_coca import methods
from megatron_coca.commands.train import parser
from megatron_coca.config import Config, ConfigError, FaultConfig, load_config
from megatron_coca.config.load import literal_values
from megatron_coca.config.neox_keys import (
    ALIASES,
    DIFFERENT,
    INERT,
    SAME,
    UNSUPPORTED,
    UNSUPPORTED_CHOICES,
    is_inert,
)
from megatron_coca.config.schema import GROUPS, KEYS
from megatron_coca.config.source import yaml_value
from megatron_coca.evaluation.options import label_and_path

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
ROFORMER = CONFIGS / "350M" / "roformer.yml"
OF_OTHER_COMMANDS = {"recipes", "evaluation", "ablations"}
OF_TEXT = {Path("recall/text.yml"), Path("recall/books.yml")}
"""Files that load only after those of a corpus."""
SHIPPED = sorted(
    path
    for path in CONFIGS.rglob("*.yml")
    if path.parent.name not in OF_OTHER_COMMANDS and path.relative_to(CONFIGS) not in OF_TEXT
)
OVERLAYS = {"coca", "latent", "lora", "ordered", "large"}
"""Of finetune: the network is that of a folder. Of recall: the model is in model.yml."""
COMPLETE = {"100M", "350M", "quickstart", "finetune", "small", "bases", "recall"}
METHODS = {
    "roformer": "rotary",
    "roformer_coca": "coca",
    "roformer_coca_strict": "coca_strict",
    "nope": "none",
    **{name: name for name in ("alibi", "xpos", "kerple_log", "kerple_power", "rpe", "learned", "sinusoidal")},
}
OURS = {
    "vocab_size",
    "layer_types",
    *("engine", "cuda_graphs", "reduction_wait"),
    *("gau_width", "gau_key_width"),
    *("alibi_slope_scale", "attn_logit_softcapping", "embedding_scale", "final_logit_scale", "final_logit_softcapping"),
    *("kv_channels", "norm_position", "qk_norm", "softmax_scale", "use_bias_in_qkv", "use_embedding_norm"),
    *("attention_output_gate", "zero_centered_norms", "head_shapes", "values_from_keys", "value_norm", "layer_scale"),
    *("unweighted_qk_norm", "moe_weights_on_input"),
    *("qk_norm_after_rotation", "clip_qkv", "residual_scale", "use_bias_in_output_head", "embedding_dropout"),
    *("embedding_width", "use_output_transform", "skip_first_norm"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_epsilon"),
    *("mlp_config", "swiglu_limit", "swiglu_alpha", "moe_intermediate_size", "moe_shared_intermediate_size"),
    *("moe_shared_gate", "moe_router_scores", "moe_router_bias", "moe_norm_topk_prob", "moe_routed_scaling_factor"),
    *("moe_correction_bias", "moe_num_groups", "moe_top_k_groups", "moe_group_scores"),
    *("moe_loss_coeff", "moe_z_loss_coeff", "moe_bias_update_rate"),
    "mup_base_hidden_size",
    "sinusoidal_base",
    "imports",
    "metric_sinks",
    "pos_emb_options",
    *("rotary_frequencies", "rope_scaling"),
    "relative_positions",
    "synthetic",
    "training_positions",
    "lora",
    "logit_scaling",
    *("sink_logits", "attention_chunk_size", "forgetting_gate"),
    "attention_backend",
    "operand_kernel",
    "checkpoint_policy",
    "loss_chunk_size",
    "loss_kernel",
    "torch_compile",
    "deterministic",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "stages",
    "trainable",
    "data_root",
    "eval_per_source",
    "eval_windows",
    "profile_ranks",
    "sequence_parallel_size",
    "context_parallel_size",
    "keep_every_n_steps",
    "async_save",
    "checkpoint_cache",
    "object_store_timeout",
    "auto_resume",
    "ignore_keys",
    "base_model",
    "join_timeout",
    "reset_attention_mask",
    "reset_position_ids",
    *FaultConfig.model_fields,
    "optimizer.type",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.momentum",
    "optimizer.params.eps",
}
SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64}


def make(**values: object) -> Config:
    return load_config([], SHAPE | values)


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ({}, 512),
        ({"intermediate_size": 300}, 300),
        ({"expansion_factor": 3.5}, 448),
        ({"intermediate_size": 300, "mlp_multiple_of": 64}, 320),
        ({"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256}, 11008),
        ({"activation": "swiglu", "intermediate_size": 41472, "mlp_multiple_of": 256}, 13824),
        ({"activation": "swiglu", "intermediate_size": 86016, "mlp_multiple_of": 256}, 28672),
        ({"activation": "geglu"}, 171),
    ],
)
def test_inner_width(values: dict[str, object], width: int) -> None:
    assert make(**values).model.ffn_hidden_size == width


@pytest.mark.parametrize(("rows", "multiple", "padded"), [(50257, 128, 50304), (1024, 64, 1024), (1, 128, 128)])
def test_padded_vocabulary(rows: int, multiple: int, padded: int) -> None:
    assert make(vocab_size=rows, make_vocab_size_divisible_by=multiple).model.padded_vocab_size == padded


def test_unknown_vocabulary_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="vocab_size: not set.*set it"):
        _ = make().model.padded_vocab_size


@pytest.mark.parametrize(
    ("micro", "total", "steps", "ranks", "expected"),
    [
        (4, None, None, 2, (4, 1, 8)),
        (4, None, 3, 2, (4, 3, 24)),
        (4, 16, None, 2, (4, 2, 16)),
        (None, 16, None, 2, (8, 1, 16)),
        (None, 16, 4, 2, (2, 4, 16)),
        (16, 256, None, 8, (16, 2, 256)),
    ],
)
def test_batch_sizes(
    micro: int | None, total: int | None, steps: int | None, ranks: int, expected: tuple[int, int, int]
) -> None:
    batch = make(train_micro_batch_size_per_gpu=micro, train_batch_size=total, gradient_accumulation_steps=steps).batch
    assert batch.resolve(ranks) == expected


def test_batch_sizes_that_do_not_multiply_out() -> None:
    batch = make(train_micro_batch_size_per_gpu=4, train_batch_size=16, gradient_accumulation_steps=2).batch
    with pytest.raises(ConfigError, match="train_batch_size: 16 is not micro 4 x accumulation 2 x 1 ranks"):
        batch.resolve(1)
    with pytest.raises(ConfigError, match="train_batch_size: 10 is not micro 3 x accumulation 1 x 3 ranks"):
        make(train_batch_size=10).batch.resolve(3)
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu: not set"):
        make().batch.resolve(1)


@pytest.mark.parametrize(
    ("values", "horizon"),
    [
        ({"train_iters": 10}, 10),
        ({"train_iters": 10, "lr_decay_fraction": 0.55}, 5),
        ({"train_iters": 10, "lr_decay_fraction": 0.5, "lr_decay_iters": 7}, 7),
        ({"lr_decay_iters": 7}, 7),
    ],
)
def test_horizon(values: dict[str, object], horizon: int) -> None:
    assert make(**values).schedule.decay_iters == horizon


def test_horizon_without_a_length_is_an_error() -> None:
    with pytest.raises(ConfigError, match="train_iters: not set"):
        _ = make().schedule.decay_iters


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({}, "fp32"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"fp16": {"fp16": True, "enabled": True, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1}}, "fp16"),
        ({"fp16": {"fp16": True, "enabled": False}}, "fp32"),
        ({"fp16": {"enabled": True, "type": "bfloat16", "loss_scale": 0}}, "bf16"),
        ({"bf16": {"enabled": True}, "precision": "bfloat16"}, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"bf16": True, "enabled": True, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1}}, "bf16"),
    ],
)
def test_precision(values: dict[str, object], dtype: str) -> None:
    assert make(**values).precision.dtype == dtype


@pytest.mark.parametrize("name", ["adam", "ADAM", "Adam"])
def test_optimizer_names_are_normalised(name: str) -> None:
    assert make(optimizer={"type": name}).optimizer.type == "Adam"


def choices() -> list[tuple[str, str]]:
    """Every key of choices with each of them."""
    return [
        (key, choice)
        for key, place in KEYS.items()
        for choice in literal_values(GROUPS[place.group].model_fields[place.field].annotation)
        if isinstance(choice, str)
    ]


def test_no_choice_needs_quotes() -> None:
    """YAML 1.1 reads `off`, `on`, `yes` and `no` as booleans, and others as numbers or dates."""
    read_otherwise = [(key, choice) for key, choice in choices() if yaml_value(choice) != choice]
    assert ("loss_spike_policy", "off") in read_otherwise
    for key, choice in read_otherwise:
        assert load_config([SHAPE], [f"{key}={choice}"]).flat()[key] == choice
    options = [option for table in methods.TABLES.values() for each in table.values() for option in each.options]
    assert all(yaml_value(choice) == choice for option in options for choice in option.choices)


@pytest.mark.parametrize("key", ["save", "load", "log_dir", "vocab_file", "data_path", "checkpoint_cache", "data_root"])
def test_a_tilde_is_the_home_folder(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert make(**{key: "~/x/y"}).flat()[key] == "/home/me/x/y"
    assert make(**{key: "x~/y"}).flat()[key] == "x~/y"


def test_a_tilde_in_lists_and_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yml").write_text("train_data_paths: [~/a]\nvalid_data_paths: [~/b]\ntest_data_paths: []\n")
    data = load_config(["~/run.yml"], SHAPE).data
    options = parser().parse_args(["~/run.yml", "save=x", "--hostfile", "~/hosts"])
    assert (options.inputs, options.hostfile) == ([f"{tmp_path}/run.yml", "save=x"], f"{tmp_path}/hosts")
    assert label_and_path("~/runs/coca") == ("coca", f"{tmp_path}/runs/coca"), "as in other commands"
    assert label_and_path("CoCA=~/runs/coca") == ("CoCA", f"{tmp_path}/runs/coca")
    assert (data.train_data_paths, data.valid_data_paths) == ([f"{tmp_path}/a"], [f"{tmp_path}/b"])


def test_every_key_of_gpt_neox_has_one_meaning() -> None:
    """GPT-NeoX has 318 keys, of which `optimizer` holds five of ours."""
    tables = [set(KEYS) - OURS, set(INERT), set(ALIASES), set(UNSUPPORTED), {"optimizer"}]
    assert len(set().union(*tables)) == sum(len(table) for table in tables) == 318
    assert set(KEYS) >= OURS
    assert set(UNSUPPORTED_CHOICES) <= set(KEYS)
    compared = (set(KEYS) - OURS) | set(ALIASES) | {"optimizer"}
    assert not SAME & set(DIFFERENT) and compared == SAME | set(DIFFERENT), compared ^ (SAME | set(DIFFERENT))
    assert all(isinstance(words, str) and len(words) > 10 for words in DIFFERENT.values())
    masks = {"eod_mask_loss", "pack_impl", "train_label_data_paths", "valid_label_data_paths"}
    assert masks < set(DIFFERENT), "tests/integration/runs/test_label_means.py: no means of micro-batch means"


def test_gpt_neox_defaults_of_absent_features_are_accepted() -> None:
    defaults = {key: default for key, (default, _) in UNSUPPORTED.items()}
    assert make(**defaults) == make()
    assert all(is_inert(default, default) for default in defaults.values())


@pytest.mark.parametrize(
    ("value", "default", "inert"),
    [(None, 1, True), ({}, None, True), (False, None, True), (False, True, False), (1, True, False), (0.5, 1.0, False)],
)
def test_inert_values(value: object, default: object, inert: bool) -> None:
    assert is_inert(value, default) is inert


def test_keys_without_effect_do_not_change_the_configuration() -> None:
    assert make(rope_fusion=True, partition_activations=True, steps_per_print=2, log_grad_norm=True) == make()


def test_deepspeed_sections_at_the_top_level_reach_deepspeed() -> None:
    sections = {"flops_profiler": {"enabled": True}, "prescale_gradients": True, "communication_data_type": "fp32"}
    assert make(**sections) == make(deepspeed_extra_args=sections)


def test_configs_are_shipped() -> None:
    assert {path.stem for path in SHIPPED if path.parent.name == "350M"} >= set(METHODS)
    assert len(SHIPPED) >= 13


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_config_loads(path: Path, tmp_path: Path) -> None:
    alone = path.parent.name in COMPLETE and path.stem not in OVERLAYS
    config = load_config([path] if alone else [ROFORMER, path])
    dump = tmp_path / "dump.yml"
    dump.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(dump) == config
    if config.data.synthetic is None:  # its task sets the vocabulary
        assert config.model.padded_vocab_size % config.model.make_vocab_size_divisible_by == 0


@pytest.mark.parametrize("name", METHODS)
def test_350m_selects_its_model_alone(name: str) -> None:
    config = load_config(CONFIGS / "350M" / f"{name}.yml")
    assert config.position.pos_emb == METHODS[name]
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (24, 1024, 16)
    assert config.model.seq_length == 512
    assert config.batch.resolve(8) == (16, 2, 256)
    same = config.override({"pos_emb": "rotary", "save": None})
    assert same == load_config(ROFORMER, {"save": None})


def test_the_authors_model_differs_from_ours_in_its_shape_alone() -> None:
    """As in config.json of the authors' release: parallel residual, 100,864 rows, one standard deviation for all."""
    released = {
        "gpt_j_residual": True,
        "vocab_size": 100864,
        "init_method": "normal",
        "output_layer_init_method": "normal",
    }
    authors, ours = (CONFIGS / "350M" / f"{name}.yml" for name in ("roformer_coca_authors", "roformer_coca"))
    assert load_config(authors, {"save": None}) == load_config(ours, {"save": None, **released})


@pytest.mark.parametrize("path", sorted((CONFIGS / "350M").glob("*.yml")), ids=lambda path: path.stem)
def test_350m_trains_for_two_epochs_of_50b_tokens(path: Path) -> None:
    config = load_config(path)
    step = config.batch.resolve(8).total * config.model.seq_length
    assert config.schedule.train_iters is not None
    assert 0 <= config.schedule.train_iters * step - 2 * 50e9 < step


@pytest.mark.parametrize("name", METHODS)
def test_cpu_overlay_makes_a_run_of_one_process(name: str) -> None:
    config = load_config([CONFIGS / "350M" / f"{name}.yml", CONFIGS / "cluster" / "cpu.yml"])
    assert config.precision.dtype == "fp32"
    assert config.batch.resolve(1) == (4, 1, 4)


@pytest.mark.parametrize(("name", "ranks"), [("gpu1", 1), ("a100x8", 8), ("a100x32", 32), ("slurm", 32)])
def test_cluster_overlays_keep_the_global_batch(name: str, ranks: int) -> None:
    config = load_config([ROFORMER, CONFIGS / "cluster" / f"{name}.yml"])
    assert config.batch.resolve(ranks).total == 256


def test_quickstart_files_differ_in_position_only() -> None:
    first, second = (load_config(CONFIGS / "quickstart" / f"{name}.yml") for name in ("roformer", "roformer_coca"))
    assert first != second
    assert first.override({"pos_emb": "coca", "save": second.checkpoint.save}) == second


@pytest.mark.parametrize("name", ["pi", "ntk", "dynamic_ntk"])
def test_extension_of_a_model_without_frequencies_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="no frequencies to scale"):
        load_config([CONFIGS / "350M" / "alibi.yml", CONFIGS / "extend" / f"{name}.yml"])
