"""`megatron-coca evaluate recall`: options and result files."""

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Literal

from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.options import (
    add_batch_option,
    add_subject_options,
    length_list,
    positive_int,
    shift_list,
    whole_number,
)
from megatron_coca.evaluation.results import Entry, Record, Result
from megatron_coca.evaluation.tasks.retrieval.task import Tally, accuracy

TRAINED = "trained"
"""The value of recall's `--seed` that selects the seed of the model's training."""


class HeadScores(Record):
    """Scores of one attention head with the question as the query. Each number is a mean over cases."""

    layer: int
    head: int
    fact: float | None  # score of the fact; None if a distance map hides the fact in at least one case
    rest: float  # log-sum-exp of the scores of all other keys
    weight: float  # softmax weight of the fact


class RecallEntry(Tally, Entry):
    """The tally of the cases of one length, with all positions shifted by `shift`. `heads` may be empty."""

    length: int
    shift: int
    nll: float  # mean nll of the answers in nats
    inside: Tally | None
    beyond: Tally | None
    heads: list[HeadScores]  # empty if no heads were scored
    questions: dict[str, Tally] | None = None  # tallies by the kind of question; only for ordered recall

    @property
    def key(self) -> tuple[int, int]:
        return (self.length, self.shift)


class RecallProtocol(Record):
    text: str
    cases: int
    diagnosed: int  # number of cases for which heads are scored
    seed: int | Literal["trained"]  # "trained": the seed of the model's training
    prompts: str  # "synthetic recall" or "synthetic ordered_recall" with its sizes, or "passkey"
    chance: float | None  # accuracy of guessing a value at random; None for passkeys
    prompts_sha256: str | None = None  # hash of sample passkey prompts
    text_sha256: str | None = None  # hash of samples of the filler shards; earlier files have neither of the two hashes


MULTIPLES = (1, 2, 4, 8, 16)
"""The default lengths, as multiples of the training length L."""
SHIFTS = (0, 16, 64, 192, 960)
"""The default offsets of `--shifts`."""


class RecallResult(Result):
    task: Literal["recall"] = "recall"
    protocol: RecallProtocol
    results: list[RecallEntry]


def seed_or_trained(text: str) -> int | str:
    return text if text == TRAINED else whole_number(text)


def add_recall_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add = parser.add_argument
    multiples = ",".join(f"{multiple}L" for multiple in MULTIPLES)
    add("--lengths", type=length_list, metavar="N,N,...", help=f"input lengths in tokens; default: {multiples}")
    shifts = "offsets added to all positions of an input of the training length; default: "
    shifts += ",".join(map(str, SHIFTS))
    add("--shifts", type=shift_list, default=[*SHIFTS], metavar="N,N,...", help=shifts)
    add(
        "--cases",
        type=positive_int,
        default=512,
        metavar="N",
        help="number of questions per length; default: %(default)s",
    )
    text = "number of questions for which attention heads are scored; default: %(default)s"
    add("--diagnosed", type=whole_number, default=128, metavar="N", help=text)
    text = "seed of the questions; the word trained selects the seed of the model's training; default: %(default)s"
    add("--seed", type=seed_or_trained, default=0, metavar="N", help=text)
    add_batch_option(parser, 32768)


def part_of(entry: RecallEntry, part: str) -> Tally | None:
    """Return the tally of a part of the questions, or None if the part has no question.

    `part` is "inside", "beyond", a kind of question of ordered recall, or empty for all questions.
    """
    parts: dict[str, Tally | None] = {"": entry, "inside": entry.inside, "beyond": entry.beyond}
    return (parts | (entry.questions or {})).get(part)


def accuracy_of(entry: RecallEntry, part: str) -> float | None:
    """Return the accuracy of a part of the questions, or None if there is none.

    `part` has the values of `part_of`, or is "kinds", which selects the mean accuracy over the kinds of questions.
    """
    if part == "kinds":
        kinds = entry.questions or {}
        return sum(tally.accuracy for tally in kinds.values()) / len(kinds) if kinds else None
    tally = part_of(entry, part)
    return None if tally is None else tally.accuracy


def unshifted(part: str) -> Callable[[RecallEntry], Tally | None]:
    return lambda entry: None if entry.shift else part_of(entry, part)


def shifted(part: str) -> Callable[[RecallEntry], Tally | None]:
    return lambda entry: part_of(entry, part) if entry.shift else None


PARTS = {"": "", ", inside": "inside", ", beyond": "beyond"}
"""The parts of the questions. The keys are the ends of the names of the numbers."""
RECALL = Task(
    "recall",
    "key-value recall by length and shift, and attention scores by head",
    add_recall_options,
    "--checkpoint runs/recall --output results",
    "recall.measure.run",
    RecallResult,
    numbers=(
        *(accuracy(f"accuracy{end}", unshifted(part), "" if end else "recall") for end, part in PARTS.items()),
        *(accuracy(f"accuracy, shift {{entry.shift}}{end}", shifted(part)) for end, part in PARTS.items()),
    ),
    comparable={
        "cases": "protocol.cases",
        "seed": "protocol.seed",
        "prompts": "protocol.prompts",
        "protocol": "protocol.text",
    },
    sections=(TaskSection("recall", "Key-value recall", "recall.section.recall_blocks", place=20, sentence=10),),
    place=40,
)
