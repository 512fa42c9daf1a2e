"""Schema and validation of a checkpoint's meta.json."""

import re
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megatron_coca.checkpoints.files import CheckpointError, read_json
from megatron_coca.config.base import Size, shown

META = "meta.json"
MAX_RANKS = 2**20
Index = Annotated[int, Field(ge=0, lt=10**18)]
"""A count of steps, samples or tokens."""
Counter = Annotated[float, Field(ge=0.0, le=1.0e18)]


def _ranks(sizes: dict[str, int]) -> dict[str, int]:
    if prod(sizes.values()) > MAX_RANKS:
        raise ValueError(f"more than {MAX_RANKS:,} ranks")
    return sizes


def _has_step(counters: dict[str, float]) -> dict[str, float]:
    if "step" not in counters:
        raise ValueError("step is missing")
    return counters


def _whole_steps(counters: dict[str, float]) -> dict[str, float]:
    for name in ("step", "added_at"):
        if counters.get(name, 0.0) % 1:
            raise ValueError(f"{name} is not a whole number")
    if counters.get("added_at", 0.0) > counters.get("step", 0.0):
        raise ValueError("added_at is above step")
    return counters


Counters = Annotated[dict[str, Counter], AfterValidator(_whole_steps)]


class _Part(BaseModel):
    """A mapping in meta.json. Undeclared entries are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class GuardState(_Part):
    """The state of `LossGuard`. It contains the logarithms of losses and norms."""

    losses: list[Annotated[float, Field(gt=0.0)]] = []
    norms: list[Annotated[float, Field(gt=0.0)]] = []
    consecutive: Index = 0


class TrainerProgress(_Part):
    """The state of the training loop. `losses` is the state of `IntervalMean`."""

    guard: GuardState = GuardState()
    losses: list[Annotated[float, Field(ge=-1e300, le=1e300)]] = []
    skipped: Index = 0
    unvalidated: bool = False


class AdaptedModel(_Part):
    """The model that the adapters in a checkpoint change. Its frozen weights are not in the checkpoint.

    Attributes:
        identity: identity of the model (`OpenedCheckpoint.identity`).
        place: folder of the model, or the name of a step folder beside the checkpoint.
        base_model: if `place` contains PEFT adapters, the folder of the model that those adapters change.
        ignore_keys: the value that the configuration key `ignore_keys` had when the model was opened.
    """

    identity: str
    place: str
    base_model: str | None = None
    ignore_keys: list[str] | None = None

    @property
    def is_beside(self) -> bool:
        """Whether the model is a step folder beside the checkpoint."""
        return re.fullmatch(r"global_step\d+", self.place) is not None


class Meta(_Part):
    """Entries of meta.json that a resumed run uses. Checkpoints with weights only have no run state."""

    step: Index
    run: str | None = None
    origin: str | None = None
    adapts: AdaptedModel | None = None
    versions: dict[str, str] | None = None
    topology: Annotated[dict[str, Size], AfterValidator(_ranks)] | None = None
    counters: Counters | None = None
    progress: TrainerProgress | None = None


class RunMeta(Meta):
    """Entries of meta.json in a checkpoint that a run can resume from."""

    topology: Annotated[dict[str, Size], AfterValidator(_ranks)]
    counters: Annotated[Counters, AfterValidator(_has_step)]
    progress: TrainerProgress


def read_meta(folder: Path, resumable: bool = False) -> dict[str, Any]:
    """Read and validate the meta.json of a checkpoint. If `resumable`, it must contain the state of a run.

    Raises CheckpointError, which names the invalid entry, or UnreadableError if the file system fails.
    """
    return checked_meta(read_json(folder / META), folder / META, resumable)


def checked_meta(content: dict[str, Any], source: str | Path, resumable: bool = False) -> dict[str, Any]:
    """Validate the `content` of a meta.json. Return it with defaults for the entries that are missing in `progress`.

    Raises CheckpointError, which names `source` and the invalid entry.
    """
    try:
        meta = (RunMeta if resumable else Meta).model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        given = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
        raise CheckpointError(
            f"{source}: {name}: {problem}{given}; the checkpoint is damaged, use another step"
        ) from error
    filled = {"progress": meta.progress.model_dump() | content["progress"]} if meta.progress is not None else {}
    return content | filled


def adapted_model(meta: dict[str, Any]) -> AdaptedModel | None:
    """Return the model that a checkpoint's adapters change, or None if it has none. `meta` is its valid meta.json."""
    entry = meta.get("adapts")
    return None if entry is None else AdaptedModel.model_validate(entry)
