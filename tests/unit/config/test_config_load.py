"""Reading, merging and overriding configurations."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_coca.config import Config, ConfigError, keys_without_effect, load_config, split_inputs

ROOT = Path(__file__).parents[3]
REQUIRED = "num_layers: 2\nhidden_size: 128\nnum_attention_heads: 4\nseq_length: 64\n"


def write(folder: Path, text: str, name: str = "run.yml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(
        tmp_path, REQUIRED + "pos_emb: rotary\noptimizer: {type: adam, params: {lr: 1e-4, betas: [0.9, 0.95]}}\n"
    )


def test_defaults_follow_their_sources(base: Path) -> None:
    config = load_config(base)
    assert config.model.num_kv_heads == 4
    assert config.model.max_position_embeddings == 64
    assert config.model.head_dim == 32
    assert config.seed == 1234


def test_upstream_flow_style_loads(tmp_path: Path) -> None:
    text = """# a comment
{
   "num_layers": 2, "hidden-size": 128, # another
   "num_attention_heads": 4,
   "seq_length": 64,
   "no_weight_tying": True,
   "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95],}},
}
"""
    config = load_config(write(tmp_path, text))
    assert config.model.hidden_size == 128
    assert config.model.no_weight_tying is True
    assert config.optimizer.lr == 0.97e-4


def test_json_with_tabs_loads(tmp_path: Path) -> None:
    text = '{\n\t"num_layers": 2,\n\t"hidden_size": 128, "num_attention_heads": 4, "seq_length": 64, "warmup": 1e-2}'
    assert load_config(write(tmp_path, text, "run.json")).schedule.warmup == 0.01


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".0001", "+1e-4", "0.0001"])
def test_exponents_without_a_dot_are_numbers(base: Path, text: str) -> None:
    assert load_config(base, [f"min_lr={text}"]).schedule.min_lr == 1e-4


def test_later_files_win_and_mappings_merge(base: Path, tmp_path: Path) -> None:
    overlay = write(tmp_path, "num-layers: 3\noptimizer: {params: {lr: 2e-4}}\n", "overlay.yml")
    config = load_config([base, overlay], ["num_layers=4"])
    assert config.model.num_layers == 4
    assert config.optimizer.lr == 2e-4
    assert config.optimizer.betas == (0.9, 0.95)
    assert load_config([overlay, base]).model.num_layers == 2


def test_null_takes_a_value_back(base: Path) -> None:
    assert load_config(base, ["optimizer.params.betas=null"]).optimizer.betas == (0.9, 0.999)
    assert load_config(base, ["optimizer="]).optimizer.lr is None


def test_dots_reach_into_an_absent_mapping(base: Path) -> None:
    config = load_config(base, ["rope_scaling.rope-type=dynamic", "rope_scaling.factor=4"])
    assert config.position.rope_scaling is not None
    assert (config.position.rope_scaling.rope_type, config.position.rope_scaling.factor) == ("dynamic", 4.0)
    assert load_config(base, {"rope_scaling.rope_type": "dynamic", "rope_scaling.factor": 4}) == config


def test_names_in_passed_through_mappings_stay_as_written(base: Path) -> None:
    config = load_config(base, ["deepspeed_extra_args.a-b=1"])
    assert config.parallel.deepspeed_extra_args == {"a-b": 1}


def test_override_validates_and_leaves_the_original(base: Path) -> None:
    config = load_config(base)
    longer = config.override({"seq_length": 128, "optimizer.params.betas": (0.8, 0.9)})
    assert (longer.model.seq_length, longer.model.max_position_embeddings) == (128, 128)
    assert longer.optimizer.betas == (0.8, 0.9)
    assert config.model.seq_length == 64
    with pytest.raises(ConfigError, match="overrides: seq_length: expected a value greater"):
        config.override({"seq_length": 0})


def test_a_derived_value_that_was_set_does_not_follow(base: Path) -> None:
    config = load_config(base, ["max_position_embeddings=64", "pos_emb=learned"])
    with pytest.raises(ConfigError, match="128 exceeds max_position_embeddings 64"):
        config.override(["seq_length=128"])


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rope_scaling.rope_type=ntk", "rope_scaling.factor=2.5", "num_kv_heads=2"),
        ("wandb_run_name='1e5'", "comment=2024-01-01", "save='null'", "wandb_group='yes'"),
        ("split=[900, 50, 50]", "extra_save_iters=[0, 1]", "fp16={enabled: true, loss_scale: 0}"),
        ("deepspeed_extra_args={a-b: {c: null, d: [1, {e: '2'}]}}", "zero_optimization={stage: 3}"),
    ],
)
def test_dump_loads_to_an_equal_config(base: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = load_config(base, overrides)
    again = load_config(write(tmp_path, config.to_yaml(), "dump.yml"))
    assert again == config
    assert again.to_yaml() == config.to_yaml()


def test_only_learned_positions_bind_the_length(base: Path) -> None:
    keys = {"max_position_embeddings": 64, "seq_length": 128}
    assert load_config(base, keys | {"pos_emb": "coca"}).model.seq_length == 128
    with pytest.raises(ConfigError, match="seq_length: 128 exceeds max_position_embeddings 64"):
        load_config(base, keys | {"pos_emb": "learned"})


@pytest.mark.parametrize("length", [1024, 65536])
@pytest.mark.parametrize("name", ["roformer_coca", "alibi", "learned"])
def test_350m_takes_another_length(name: str, length: int) -> None:
    model = load_config([ROOT / f"configs/350M/{name}.yml"], {"seq_length": length}).model
    assert (model.seq_length, model.max_position_embeddings) == (length, length)


def test_data_types_reach_deepspeed(base: Path) -> None:
    config = load_config(base, ["data_types={grad_accum_dtype: fp32}", "fp32_allreduce=true"])
    assert config.parallel.deepspeed_extra_args == {
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    assert config.parallel.accumulates_in_fp32


@pytest.mark.parametrize(
    ("keys", "required"),
    [
        ({}, ()),
        ({"num_gpus": 2}, ("num_gpus",)),
        ({"distributed_backend": "nccl"}, ("distributed_backend",)),
        ({"num_gpus": 2, "distributed_backend": "gloo"}, ()),
        ({"num_gpus": 2, "fp16": {"enabled": True}}, ("num_gpus", "precision")),
        ({"engine": "native", "cuda_graphs": True}, ("cuda_graphs",)),
    ],
)
def test_keys_that_ask_for_gpus(base: Path, keys: dict[str, object], required: tuple[str, ...]) -> None:
    config = load_config(base, keys)
    assert config.gpu_keys == required
    resolved = load_config([], dict(config.flat()))
    assert resolved.gpu_keys == required, "also where every key is written out"


def test_names_of_files_as_in_gpt_neox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_inputs(["125M", "local_setup", "a=b.yml", "x.json"], "configs") == (
        ["configs/125M.yml", "configs/local_setup.yml", "configs/x.json"],
        ["a=b.yml"],
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    (tmp_path / "350M").mkdir()
    (tmp_path / "350M.yml").write_text("")
    assert split_inputs(["plain", "350M", "/abs/run.yaml"])[0] == ["plain", "350M.yml", "/abs/run.yaml"]


def test_keys_without_effect_are_listed(base: Path, tmp_path: Path) -> None:
    generation = write(tmp_path, "temperature: 1.0\nmaximum-tokens: 102\nsplit: 1\n", "text_generation.yml")
    assert keys_without_effect([base, generation], ["rope_fusion=true"]) == [
        "maximum_tokens",
        "rope_fusion",
        "temperature",
    ]


def test_inequality(base: Path) -> None:
    assert load_config(base) != load_config(base, ["seed=2"])


def test_config_is_frozen(base: Path) -> None:
    config = load_config(base)
    with pytest.raises(ValidationError, match="frozen"):
        config.model.num_layers = 3  # type: ignore[misc]
    assert isinstance(config, Config)


def test_second_names_set_the_first(tmp_path: Path) -> None:
    text = REQUIRED + "lr: 3e-4\nzero_stage: 2\nfp32_allreduce: true\nclip_grad: 0.5\noptimizer_type: SGD\n"
    config = load_config(write(tmp_path, text))
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.type == "sgd"
    assert config.optimizer.gradient_clipping == 0.5
    assert config.parallel.stage == 2
    assert config.parallel.deepspeed_extra_args == {"communication_data_type": "fp32"}


def test_dates_are_text(base: Path) -> None:
    assert load_config(base, ["comment=2024-01-01"]).launch.comment == "2024-01-01"


def test_another_choice_drops_the_options_of_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "yarn.yml", tmp_path / "dynamic.yml"
    first.write_text(
        "rope_scaling: {rope_type: yarn, factor: 4, beta_fast: 8, original_max_position_embeddings: 9}\n"
        "relative_positions: {type: leaky_rerope, leak: 8}\n"
    )
    second.write_text("rope_scaling: {rope_type: dynamic_yarn}\nrelative_positions: {type: rerope}\n")
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 16, "pos_emb": "rotary"}
    config = load_config([first, second], shape)
    scaling, relative = config.position.rope_scaling, config.position.relative_positions
    assert (scaling.rope_type, scaling.beta_fast) == ("dynamic_yarn", 32.0) and "factor" not in scaling.given
    assert scaling.original_max_position_embeddings is None, "another extension is of the training length"
    assert (relative.type, relative.given) == ("rerope", {"window": None})
    assert keys_without_effect([first, second], ["rope_scaling.factor=2", "rope_scaling.rope_type=linear"]) == [
        *(
            f"rope_scaling.{option} of {first}:1 (rope_scaling.rope_type is dynamic_yarn in {second}:1)"
            for option in ("factor", "beta_fast", "original_max_position_embeddings")
        ),
        f"relative_positions.leak of {first}:2 (relative_positions.type is rerope in {second}:2)",
        "rope_scaling.factor of command line (rope_scaling.rope_type is linear in command line)",
    ]
    assert not keys_without_effect([first], ["rope_scaling.factor=2"])
    kept = load_config([first], shape).override(["rope_scaling.rope_type=yarn", "rope_scaling.factor=8"])
    assert (kept.position.rope_scaling.factor, kept.position.rope_scaling.beta_fast) == (8.0, 8.0)


def test_a_mapping_is_as_good_as_a_file(base: Path) -> None:
    keys = {"num-layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64, "pos_emb": "rotary"}
    optimizer = {"type": "adam", "params": {"lr": 1e-4, "betas": (0.9, 0.95)}}
    assert load_config(keys | {"optimizer": optimizer}) == load_config(base)
    assert load_config([base, {"optimizer.params.lr": 3e-4}]).optimizer.lr == 3e-4
    assert load_config([{"seed": 5}, base], ["seed=9"]).seed == 9
    with pytest.raises(ConfigError) as caught:
        load_config(keys | {"hidden_sise": 3, "optimizer": {"params": {"lr": "fast"}}})
    first, second = sorted(str(caught.value).splitlines())
    assert first.startswith("mapping: hidden_sise: unknown key")
    assert second.startswith("mapping: optimizer.params.lr: expected a number")
    with pytest.raises(ConfigError, match="mapping: describes no model"):
        load_config({})


def test_data_paths_may_be_relative_to_their_file(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    text = "train-data-paths: [./a, b, ../c, /d]\nvalid_data_paths: [./a]\ntest_data_paths: []\nvocab_file: ./v.json\n"
    text += "train_label_data_paths: [./l, null, null, null]\nsave: ./runs\n"
    data = write(tmp_path / "corpus", text, "own.yml")
    monkeypatch.chdir(tmp_path)
    config = load_config([base, data.relative_to(tmp_path)], ["test_data_paths=[./e]"])
    assert list(config.data.train_data_paths or ()) == ["corpus/a", "b", "../c", "/d"]
    assert list(config.data.train_label_data_paths or ()) == ["corpus/l", None, None, None]
    assert config.data.vocab_file == "corpus/v.json" and config.checkpoint.save == "./runs"
    assert list(config.data.test_data_paths or ()) == ["./e"]
    monkeypatch.chdir(tmp_path / "corpus")
    assert list(load_config([base, "own.yml"]).data.valid_data_paths or ()) == ["a"]
    write(
        tmp_path / "corpus",
        "stages: [{until: 5, train_data_paths: [./s], valid_data_paths: [], test_data_paths: []}, {}]",
        "stages.yml",
    )
    stages = load_config([base, tmp_path / "corpus/stages.yml"], ["train_iters=9"]).run_stages()
    assert list(stages[0].config.data.train_data_paths or ()) == [str(tmp_path / "corpus/s")]
