"""Training stages of a run. Stages can differ in length, data, batch size, learning rate or position method.

A stage lists the keys that differ from the rest of the configuration. Learning rate and data order depend only on the
step and the list of stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar, get_args

from megatron_coca.config.base import ConfigError
from megatron_coca.config.optimization import OptimizerConfig, TrainablePart
from megatron_coca.config.schedule import ScheduleConfig, learning_rate
from megatron_coca.config.schema import COMPUTE_KEYS, KEYS, Settings
from megatron_coca.config.weight_changes import FORM_KEYS, weight_changes

STAGE_GROUPS = frozenset({"data", "batch", "schedule"})
STAGE_KEYS = (
    COMPUTE_KEYS
    | FORM_KEYS
    | {"seq_length", "max_position_embeddings", "training_positions", "hidden_dropout", "attention_dropout"}
    | {"embedding_dropout"}
    | {"rotary_frequencies", "rope_scaling", "rotary_emb_base", "relative_positions", "logit_scaling", "layer_types"}
    | {"sliding_window_width", "attention_chunk_size"}
    | {"optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "weight_decay", "gradient_clipping"}
    | {"trainable", "lora", "eval_interval", "eval_iters", "eval_per_source", "eval_windows"}
)
"""Key groups and single keys that a stage may change, because weights and optimizer states remain valid."""
FIXED = frozenset({"train_iters", "train_epochs", "stages", "tokenizer_type", "vocab_file", "merge_file"})
"""Keys in `STAGE_GROUPS` that a stage may not change."""
OWN_KEYS = ("until", "restart_schedule", "reset_optimizer")
"""Keys that only stages have."""
MOST_STAGES = 500
"""Maximum number of stages in a run. Each has its own configuration, which takes milliseconds to validate."""
NEVER = {
    "stages": "not supported inside a stage; list all stages one after the other",
    "metric_sinks": "cannot differ between stages; set it for the whole run",
    "imports": "cannot differ between stages; set it for the whole run",
}
"""Keys that a stage must not set, each with the error message. They are checked before the stage is validated."""


C = TypeVar("C", bound=Settings)
Override = Callable[[Mapping[str, Any]], C]
"""A function that returns a configuration with some keys changed."""


@dataclass(frozen=True)
class RunStage(Generic[C]):
    """Consecutive steps with one configuration.

    Attributes:
        first, last: number of completed steps at the start and at the end of the stage.
        config: the configuration of the stage, without `stages`.
        schedule: the learning-rate schedule. If it restarts, its `train_iters` is the number of steps of the stage.
        restart_schedule: whether the schedule counts from the start of the stage.
        reset_optimizer: whether the stage starts with a new optimizer state.
        changes: the keys that the stage sets, without `until`.
    """

    first: int
    last: int
    config: C
    schedule: ScheduleConfig
    restart_schedule: bool
    reset_optimizer: bool
    changes: Mapping[str, Any]

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the optimizer step after `step` completed steps of the run."""
        assert self.config.optimizer.lr is not None
        return learning_rate(step - self.first * self.restart_schedule, self.config.optimizer.lr, self.schedule)

    @property
    def text(self) -> str:
        """The changes of the stage on one line."""
        return ", ".join(f"{key}={value}" for key, value in self.changes.items()) or "the configuration unchanged"


def stage_at(stages: Sequence[RunStage[C]], step: int) -> int:
    """Return the index of the stage that trains step number `step`, counted from 0; for later steps, the last stage."""
    return next((index for index, stage in enumerate(stages) if step < stage.last), len(stages) - 1)


def resolve_stages(config: C, override: Override[C], known: Sequence[C] = ()) -> list[RunStage[C]]:
    """Return the stages of a valid configuration; without `stages`, one stage with the configuration itself.

    `known` contains the configurations of the stages if the caller has already built them. Each takes milliseconds.
    """
    train_iters, schedule = config.schedule.train_iters or 0, config.schedule
    if schedule.stages is None:
        return [RunStage(0, train_iters, config, schedule, False, False, {})]
    stages: list[RunStage[C]] = []
    for number, entry in enumerate(schedule.stages):
        first, last = stages[-1].last if stages else 0, _border(entry.get("until", "100%"), train_iters)
        changes, restart = _changes(entry), bool(entry.get("restart_schedule"))
        given = {key: value for key, value in entry.items() if key != "until"}
        own = known[number] if known else override(changes | {"stages": None})
        schedule = (
            override(changes | {"stages": None, "train_iters": last - first}).schedule if restart else own.schedule
        )
        stages.append(RunStage(first, last, own, schedule, restart, bool(entry.get("reset_optimizer")), given))
    return stages


def _changes(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in OWN_KEYS}


def _border(until: Any, train_iters: int) -> int:
    """Return the step at which a stage ends. `until` is a number of steps or a share of `train_iters` such as `80%`.

    Raises:
        ValueError: `until` is neither a number of steps nor a share.
    """
    if isinstance(until, str) and until.endswith("%"):
        return round(Fraction(until[:-1].strip()) / 100 * train_iters)
    if isinstance(until, bool) or not isinstance(until, int):
        raise ValueError
    return until


def stage_faults(config: Settings, override: Override[Settings]) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of every error in the stages of a configuration."""
    given, iters = config.schedule.stages, config.schedule.train_iters
    if given is None:
        return
    if iters is None:
        yield "stages", "needs train_iters, because `until` is relative to it; set train_iters"
        return
    if len(given) > MOST_STAGES:
        yield "stages", f"{len(given):,} stages, but at most {MOST_STAGES} are supported; merge similar ones"
        return
    faults, known = [*_border_faults(given, iters)], list[Settings]()
    for number, entry in enumerate(given):
        switches = [key for key in OWN_KEYS[1:] if not isinstance(entry.get(key, False), bool)]
        faults += [(f"stages[{number}].{key}", "expected true or false") for key in switches]
        if barred := [key for key in entry if key.partition(".")[0] in NEVER]:
            faults += [(f"stages[{number}].{key}", NEVER[key.partition(".")[0]]) for key in barred]
            continue
        try:
            known.append(override(_changes(entry) | {"stages": None}))
        except ConfigError as error:
            lines = [line.removeprefix("overrides: ").removeprefix("configuration: ") for line in error.problems]
            faults += [(f"stages[{number}]", line) for line in lines]
    if not faults:
        faults += _differences(config, resolve_stages(config, override, known))
    yield from faults


def _border_faults(given: Sequence[Mapping[str, Any]], train_iters: int) -> Iterator[tuple[str, str]]:
    before = 0
    for number, entry in enumerate(given):
        key, last = f"stages[{number}].until", number == len(given) - 1
        if "until" not in entry and not last:
            yield key, "missing; set it, because only the last stage may leave it out"
            continue
        try:
            border = _border(entry.get("until", "100%"), train_iters)
        except (ValueError, ZeroDivisionError):
            yield key, f"expected a number of steps or a share of train_iters such as 80%, got {entry['until']!r}"
            continue
        if border <= before:
            yield key, f"step {border} is not after step {before}, the start of the stage; raise it"
        elif last and border != train_iters:
            yield key, f"step {border} is not train_iters {train_iters}, the end of the last stage; leave it out"
        elif border >= train_iters and not last:
            yield (
                key,
                f"step {border} leaves no steps for the later stages, because train_iters is {train_iters}; lower it",
            )
        before = max(before, border)


def _differences(config: Settings, stages: Sequence[RunStage[Settings]]) -> Iterator[tuple[str, str]]:
    """Yield errors about changes that no stage can make, because weights or optimizer states would become invalid."""
    lengths = {stage.config.model.seq_length for stage in stages}
    for number, stage in enumerate(stages):
        fixed = [key for key in KEYS if _differs(key, config, stage.config)]
        for key in fixed:
            yield f"stages[{number}].{key}", f"cannot differ between stages{_why(key)}; set it for the whole run"
        for key, reason in () if fixed or not number else weight_changes(stages[number - 1].config, stage.config):
            yield (
                f"stages[{number}].{key}",
                f"the stages share their weights: {reason}; use the same value in both stages, or start a new run from "
                "the weights with finetune=true",
            )
        scaling = stage.config.position.rope_scaling
        if scaling is not None and scaling.original_max_position_embeddings is None and len(lengths) > 1:
            yield (
                f"stages[{number}].rope_scaling",
                "the stages differ in seq_length; set original_max_position_embeddings to the length that is extended",
            )
        kinds = stage.config.position.of_types(stage.config.model.layer_names).values()
        measured = any(kind.frequencies is not None for kind in kinds)
        if measured and scaling is None and len(lengths) > 1:
            yield (
                f"stages[{number}].rotary_frequencies",
                "the stages differ in seq_length, from which the frequencies follow; set rope_scaling to {rope_type: "
                "default, original_max_position_embeddings: L} with the same L in all stages",
            )
        before = stages[max(0, number - 1)].config.optimizer
        yield from _adapter_changes(number, before, stage)
        added = [part for part in get_args(TrainablePart) if stage.config.optimizer.trains(part) > before.trains(part)]
        if added and not stage.reset_optimizer and before.lora == stage.config.optimizer.lora:
            yield (
                f"stages[{number}].trainable",
                f"the previous stage does not train {', '.join(added)}, so there is no optimizer state; set "
                "reset_optimizer: true in this stage",
            )


def _adapter_changes(number: int, before: OptimizerConfig, stage: RunStage[Settings]) -> Iterator[tuple[str, str]]:
    """Yield the errors about adapters, which a stage can add but not change or remove."""
    own = stage.config.optimizer.lora
    if before.lora is not None and own != before.lora:
        yield (
            f"stages[{number}].lora",
            "the previous stage has adapters, which stay the same until the end of the run; use the same values, or "
            "start a new run from its weights with finetune=true",
        )
    elif own is not None and before.lora is None and not stage.reset_optimizer:
        yield (
            f"stages[{number}].lora",
            "the previous stage has no adapters, so they have no optimizer state; set reset_optimizer: true in this "
            "stage",
        )


def _differs(key: str, config: Settings, own: Settings) -> bool:
    """Return True if the values of a key differ and stages may not change it."""
    group, field = KEYS[key]
    if key == "stages" or key in STAGE_KEYS or (group in STAGE_GROUPS and key not in FIXED):
        return False
    return bool(getattr(getattr(config, group), field) != getattr(getattr(own, group), field))


def _why(key: str) -> str:
    """Return the reason why stages may not change a key, as part of a message; empty if it is obvious."""
    return ", because they share the network and its weights" if KEYS[key].group == "model" else ""
