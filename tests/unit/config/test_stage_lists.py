"""Stages of a configuration: their borders, their keys, and the learning rate over all of them."""

from typing import Any

import pytest

from megatron_coca.config import Config, ConfigError, load_config, stage_at
from megatron_coca.config.schedule import learning_rate

MODEL = "configs/350M/roformer.yml"
KEYS = {
    "seq_length": 1024,
    "train_iters": 1000,
    "optimizer.params.lr": 1e-3,
    "warmup": 0.01,
    "lr_decay_style": "cosine",
}


def staged(*stages: dict[str, Any], **keys: Any) -> Config:
    return load_config(MODEL, KEYS | {"stages": list(stages)} | keys)


def problems(*stages: dict[str, Any], **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        staged(*stages, **keys)
    return [line.removeprefix("overrides: ") for line in error.value.problems]


def test_without_stages_the_run_is_one() -> None:
    config = load_config(MODEL, KEYS)
    (stage,) = config.run_stages()
    assert (stage.first, stage.last) == (0, 1000) and stage.config is config
    assert [stage.learning_rate(step) for step in (0, 500)] == [
        learning_rate(step, 1e-3, config.schedule) for step in (0, 500)
    ]


def test_borders_are_shares_of_train_iters_or_steps() -> None:
    stages = staged({"until": "12.5%"}, {"until": 200}, {"until": "80%"}, {}).run_stages()
    assert [(stage.first, stage.last) for stage in stages] == [(0, 125), (125, 200), (200, 800), (800, 1000)]
    assert [stage_at(stages, step) for step in (0, 124, 125, 199, 200, 799, 800, 999, 1000)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 3)
    ]
    assert staged({"until": "100%"}).run_stages()[0].last == 1000


def test_a_stage_is_a_difference_from_the_configuration_not_from_the_stage_before() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = staged(
        {"until": "50%", "seq-length": 256, "optimizer.params.lr": 2e-3},
        {"until": "80%"},
        {"seq_length": 4096, "rope_scaling": yarn},
        max_position_embeddings=None,
    )
    first, second, third = config.run_stages()
    assert [stage.config.model.seq_length for stage in (first, second, third)] == [256, 1024, 4096]
    assert [stage.config.model.max_position_embeddings for stage in (first, second, third)] == [256, 1024, 4096]
    assert (first.config.optimizer.lr, second.config.optimizer.lr) == (2e-3, 1e-3)
    assert third.config.position.rope_scaling is not None and second.config.position.rope_scaling is None
    assert all(stage.config.schedule.stages is None for stage in (first, second, third))


def test_the_rate_is_a_function_of_the_step_of_the_run_unless_the_schedule_restarts() -> None:
    last = {"restart_schedule": True, "warmup": 0.1}
    stages = staged({"until": 400}, {"until": 600, "optimizer.params.lr": 5e-4}, last).run_stages()
    whole = load_config(MODEL, KEYS).schedule
    assert stages[0].learning_rate(399) == learning_rate(399, 1e-3, whole)
    assert stages[1].learning_rate(400) == learning_rate(400, 5e-4, whole)
    own = load_config(MODEL, KEYS | {"train_iters": 400, "warmup": 0.1}).schedule
    assert [stages[2].learning_rate(600 + step) for step in range(400)] == [
        learning_rate(step, 1e-3, own) for step in range(400)
    ]
    assert stages[2].learning_rate(639) == 1e-3 and stages[2].learning_rate(999) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([{"seq_length": 512}, {}], "stages[0].until: missing"),
        ([{"until": "80"}, {}], "stages[0].until: expected a number of steps ... 80%"),
        ([{"until": True}, {}], "stages[0].until: expected a number of steps or a share"),
        ([{"until": 0.8}, {}], "stages[0].until: expected a number of steps or a share"),
        ([{"until": "1/0%"}, {}], "stages[0].until: expected a number of steps or a share"),
        ([{"until": 500}, {"until": "40%"}, {}], "stages[1].until: step 400 is not after step 500"),
        ([{"until": 0}, {}], "stages[0].until: step 0 is not after step 0"),
        ([{"until": 1001}, {"until": 1002}], "stages[0].until: step 1001 leaves no steps"),
        ([{"until": 500}, {"until": "90%"}], "stages[1].until: step 900 is not train_iters 1000"),
        ([{"until": 5}, {"seq_lenght": 8}], "stages[1]: seq_lenght: unknown key ... `seq_length`"),
        ([{"until": 5}, {"seq_length": "8"}], "stages[1]: seq_length: expected an integer, got '8'"),
        ([{"until": 5}, {"reset_optimizer": 1}], "stages[1].reset_optimizer: expected true or false"),
        ([{"until": 5}, {"num_layers": 8}], "stages[1].num_layers: cannot differ between stages"),
        ([{"until": 5}, {"num_kv_heads": 8}], "stages[1].num_kv_heads: cannot differ between stages"),
        (
            [{"until": 5}, {"attention_config": [[["gau"], 24]]}],
            "stages[1].attention_config: cannot differ between stages",
        ),
        *(
            (
                [{"until": 5}, {"pos_emb": name}],
                f"stages[1].pos_emb: ... rotary becomes {name}, but {name} has weights of its own",
            )
            for name in ("rpe", "kerple_log", "kerple_power", "fire", "learned")
        ),
        ([{"until": 5}, {"pos_emb": "pope"}], "stages[1].pos_emb: ... pope with offset zero has"),
        (
            [{"until": 5}, {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}}],
            "stages[1].pos_emb: ... coca_strict with initial_angle random has",
        ),
        (
            [{"until": 5, "pos_emb": "pope"}, {"pos_emb": "pope", "pos_emb_options": {"offset": "none"}}],
            "stages[1].pos_emb_options: ... the options of pope",
        ),
        ([{"until": 5, "pos_emb": "rpe"}, {}], "stages[1].pos_emb: ... rpe becomes rotary"),
        ([{"until": 5, "qk_norm": "head"}, {}], "stages[1].qk_norm: ... norms of queries"),
        (
            [{"until": 5, "qk_norm": "head"}, {"qk_norm": "projection"}],
            "stages[1].qk_norm: ... qk_norm head becomes qk_norm projection",
        ),
        ([{"until": 5, "use_qk_layernorm": True}, {}], "stages[1].use_qk_layernorm: the stages share"),
        ([{"until": 5}, {"logit_scaling": "ssmax"}], "stages[1].logit_scaling: the stages share their weights"),
        (
            [{"until": 5}, {"layer_types": {"a": {"sink_logits": True}}}],
            "stages[1].layer_types.a.sink_logits: the stages share",
        ),
        (
            [{"until": 5}, {"layer_types": {"a": {"forgetting_gate": "fox"}}}],
            "stages[1].layer_types.a.forgetting_gate: the stages share",
        ),
        (
            [{"until": 5}, {"layer_types": {"a": {"pos_emb": "kerple_log"}}}],
            "stages[1].layer_types.a.pos_emb: ... rotary becomes kerple_log",
        ),
        (
            [{"until": 5}, {"pos_emb": "none", "rope_scaling": {"rope_type": "linear", "factor": 2}}],
            "stages[1]: rope_scaling: ... with pos_emb none",
        ),
        ([{"until": 5}, {"stages": [{"lr": 1}]}], "stages[1].stages: not supported inside a stage"),
        ([{"until": 5}, {"stages.a": 1}], "stages[1].stages.a: not supported inside a stage"),
        ([{"until": 5}, {"imports": ["a.py"]}], "stages[1].imports: cannot differ between stages"),
        ([{"until": 5}, {"train_iters": 8}], "stages[1].train_iters: cannot differ between stages"),
        ([{"until": 5}, {"zero_optimization": {"stage": 2}}], "stages[1].zero_optimization: cannot differ"),
        ([{"until": 5}, {"save": "other"}], "stages[1].save: cannot differ between stages"),
        ([{"until": 5}, {"vocab_file": "other"}], "stages[1].vocab_file: cannot differ between stages"),
        (
            [{"until": 5}, {"seq_length": 2048, "rope_scaling": {"rope_type": "linear", "factor": 2}}],
            "stages[1].rope_scaling: ... differ in seq_length",
        ),
        (
            [{"until": 5}, {"rope_scaling": {"rope_type": "clex"}}],
            "stages[1].rope_scaling: ... clex learns frequencies",
        ),
        (
            [{"until": 5, "trainable": ["key"]}, {}],
            "stages[1].trainable: ... query, value, attention_output, mlp, router",
        ),
    ],
)
def test_errors_name_wrong_stages(stages: list[dict[str, Any]], expected: str) -> None:
    """In an expectation, " ... " stands for any words."""
    types = {"attention_config": [[["global", "a"], 12]], "layer_types": {"a": {"sliding_window_width": 8}}}
    found = problems(*stages, **types if "layer_types" in stages[-1] else {})
    start, _, rest = expected.partition(" ... ")
    assert found[0].startswith(start) and rest in found[0][len(start) :]
    assert len(found) == (2 if "leaves no steps" in expected else 1)


def test_a_stage_is_validated_once_and_their_number_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    override = Config.override
    monkeypatch.setattr(Config, "override", lambda self, *given: (made.append(given), override(self, *given))[1])
    staged(*({"until": step} for step in range(1, 20)), {})
    assert len(made) == 20
    (found,) = problems(*({"until": step} for step in range(1, 3000)), {}, train_iters=3000)
    assert found.startswith("stages: 3,000 stages, but at most 500")
    assert len(made) == 20


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = problems({"until": "x"}, {"until": "50%", "seq_lenght": 1, "warmup": 2.0}, {"until": 10})
    assert [line.partition(":")[0] for line in found] == [
        *("stages[0].until", "stages[2].until", "stages[1]", "stages[1]")
    ]


def test_a_file_is_named_with_its_line(tmp_path: Any) -> None:
    file = tmp_path / "stages.yml"
    file.write_text("train_iters: 10\nstages:\n  - {until: 11}\n  - {}\n")
    with pytest.raises(ConfigError, match=r"stages.yml:2: stages\[0\].until: step 11 leaves no step"):
        load_config([MODEL, file])


def test_stages_need_a_number_of_steps() -> None:
    (found,) = problems({"until": "50%"}, {}, train_iters=None)
    assert found.startswith("stages: needs train_iters")


def test_methods_with_the_same_weights_may_follow_each_other() -> None:
    forms = ["rotary", "xpos", "coca", "coca_strict", "alibi", "sandwich", "sinusoidal", "none", "rotary"]
    stages = staged(
        *({"until": 10 * (n + 1), "pos_emb": form} for n, form in enumerate(forms[:-1])), {"pos_emb": "none"}
    )
    assert [stage.config.position.pos_emb for stage in stages.run_stages()] == [*forms[:-1], "none"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    dropped = {"pos_emb": "none", "rope_scaling": None, "qk_norm": "head"}
    last = staged({"until": "95%"}, {"until": "97%"} | dropped, dropped, rope_scaling=yarn).run_stages()[-1].config
    assert (last.position.pos_emb, last.position.rope_scaling, last.model.qk_norm) == ("none", None, "head")
    rotated = {"qk_norm": "head", "qk_norm_after_rotation": True}
    last = staged({"until": 5}, {"pos_emb": "coca", "qk_norm_after_rotation": False}, **rotated).run_stages()[-1].config
    assert (last.position.pos_emb, last.model.qk_norm, last.model.qk_norm_after_rotation) == ("coca", "head", False)
    types = {"attention_config": [[["global", "a"], 12]], "layer_types": {"a": {"sliding_window_width": 8}}}
    layers = staged({"until": 5}, {"layer_types": {"a": {"pos_emb": "none"}}}, **types).run_stages()[-1].config
    assert layers.position.of_type("a").pos_emb == "none" and layers.position.pos_emb == "rotary"


def test_frequencies_of_training_go_with_the_rotation() -> None:
    keys = {"rotary_frequencies": {"type": "rope_id"}}
    assert "set rotary_frequencies to null" in problems({"until": 5}, {"pos_emb": "none"}, **keys)[0]
    dropped = {"pos_emb": "none", "rotary_frequencies": None}
    assert staged({"until": 5}, dropped, **keys).run_stages()[1].config.position.rotary_frequencies is None


def test_options_that_a_stage_repeats_are_no_change() -> None:
    same = {"pos_emb": "pope", "pos_emb_options": {"offset": "zero"}}
    assert len(staged({"until": 5, "pos_emb": "pope"}, same).run_stages()) == 2


def test_the_stages_of_drope() -> None:
    rotary = {
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "relative_positions": {"type": "rerope", "window": 64},
        "training_positions": {"type": "shifted", "max": 2048},
    }
    first, last = load_config([MODEL, "configs/train/drope.yml"], rotary).run_stages()
    assert (first.config.position.pos_emb, last.config.position.pos_emb) == ("rotary", "none")
    assert not last.reset_optimizer and (last.last - first.last) / last.last == pytest.approx(0.05, abs=1e-6)
    rates = [last.learning_rate(step) for step in range(last.first, last.last, 10)]
    assert (
        rates[0] < 1e-6 and max(rates) == pytest.approx(1e-4, rel=1e-3) and rates[-1] == pytest.approx(1e-5, rel=1e-3)
    )


def test_learned_positions_need_rows_for_all_stages() -> None:
    grown = [{"until": 5, "seq_length": 512}, {}]
    assert "max_position_embeddings" in problems(*grown, pos_emb="learned", max_position_embeddings=None)[0]
    assert len(staged(*grown, pos_emb="learned", max_position_embeddings=1024).run_stages()) == 2


def test_frequencies_of_training_follow_from_one_length() -> None:
    keys = {"rotary_frequencies": {"type": "rope_id"}}
    found = problems({"until": 5}, {"seq_length": 2048}, **keys)
    assert [line.partition(": ")[0] for line in found] == [f"stages[{n}].rotary_frequencies" for n in range(2)]
    length = {"rope_type": "default", "original_max_position_embeddings": 512}
    assert len(staged({"until": 5}, {"seq_length": 2048}, rope_scaling=length, **keys).run_stages()) == 2


def test_parts_are_added_with_a_new_optimizer_state() -> None:
    stages = staged({"until": 5, "trainable": ["key"]}, {"reset_optimizer": True}).run_stages()
    assert [stage.reset_optimizer for stage in stages] == [False, True]


def test_the_resolved_configuration_reads_back(tmp_path: Any) -> None:
    config = staged({"until": "50%", "rope_scaling": {"rope_type": "linear", "factor": 2}}, {})
    file = tmp_path / "config.yml"
    file.write_text(config.to_yaml())
    assert load_config(file) == config and load_config(file).run_stages() == config.run_stages()


def test_the_stages_of_coca_for_llama() -> None:
    first, second, third = load_config("configs/finetune/llama7b_coca.yml").run_stages()
    assert (first.last, second.last, third.last) == (15000, 30000, 45000)
    parts = [stage.config.optimizer.trainable for stage in (first, second, third)]
    assert parts == [["key"], ["query", "key", "value"], None]
    assert [stage.reset_optimizer for stage in (first, second, third)] == [False, True, True]
    rates = [(stage.learning_rate(stage.first + 149), stage.learning_rate(stage.last - 1)) for stage in (first, second)]
    assert rates[0] == rates[1] == (pytest.approx(1e-4), pytest.approx(1e-5))
    assert {third.learning_rate(step) for step in (30000, 44999)} == {2e-5}
