"""Numbers that papers report, as printed, matched to our results with the same position method."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from megatron_coca.config.position import Selected, read_choice
from megatron_coca.evaluation.results import EvaluationError, Result

SOURCE = "CoCA paper, arXiv:2309.08646v3"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
DEFAULT_BASE = 10000.0


@dataclass(frozen=True)
class MethodKey:
    """A position method at evaluation; two results use the same method if their keys are equal.

    Options that a method does not have are None.
    """

    pos_emb: str  # the score form
    rope: str = "default"  # rope_type of the frequency extension
    factor: float | None = None  # of the extension
    exponent: float | None = None  # b of ntk_mixed
    base: float = DEFAULT_BASE
    positions: str = "none"  # the relative-position map
    window: float | None = None  # of the map, as a share of the training length
    leak: float | None = None  # k of Leaky ReRoPE, with the default or the value that a target length gives filled in
    logits: str = "none"
    trained: "MethodKey | None" = None  # what the weights were trained with; None for the score form alone


def method_key(result: Result) -> MethodKey | None:
    """The method that a result was measured with; None for a refused variant, for which nothing was computed, and for
    layers that differ.

    Raises EvaluationError where the file has an option that no position method has.
    """
    if result.environment.backend is None:
        return None
    before = result.checkpoint.trained_with
    settings = {**before, **result.overrides}
    if settings.keys() & {"layer_types", "sliding_window_width"}:
        return None  # no paper's table has such models
    trained, used = _key(before, result), _key(settings, result)
    return replace(used, trained=trained if trained != MethodKey(trained.pos_emb) else None)


def _key(settings: Mapping[str, Any], result: Result) -> MethodKey:
    """The method of the settings in a result file, without what the weights were trained with."""
    scaling = _selected("rope_scaling", settings, result)
    relative = _selected("relative_positions", settings, result)
    extended = scaling.given if scaling is not None else {}
    length = result.checkpoint.seq_length
    mapped = relative.settings(length) if relative is not None else {}
    if "target_length" in mapped:
        mapped["leak"] = length / (2 * mapped["target_length"])
    return MethodKey(
        pos_emb=result.checkpoint.pos_emb,
        rope=scaling.rope_type if scaling is not None else "default",
        factor=extended.get("factor"),
        exponent=extended.get("b"),
        base=float(settings.get("rotary_emb_base", DEFAULT_BASE)),
        positions=relative.type if relative is not None else "none",
        window=mapped["window"] / length if mapped else None,
        leak=mapped.get("leak"),
        logits=str(settings.get("logit_scaling", "none")),
    )


def _selected(key: str, settings: Mapping[str, Any], result: Result) -> Selected | None:
    if not isinstance(settings.get(key), Mapping):
        return None
    try:
        return read_choice(key, settings[key])
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (key, *first["loc"])))
        raise EvaluationError(
            f"label `{result.label}` of {result.task}: {name}: {first['msg']}; measure it again"
        ) from error


@dataclass(frozen=True)
class PublishedRow:
    """One row as printed, and its method; None where no result file can express it."""

    name: str
    values: tuple[str, ...]
    method: MethodKey | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values of a row of perplexities or accuracies, NaN where the model ran out of memory."""
        return tuple(math.nan if value == "OOM" else float(value) for value in self.values)

    def is_method_of(self, result: Result) -> bool:
        return self.method is not None and self.method == method_key(result)


@dataclass(frozen=True)
class PublishedTable:
    """A table, or a section of one, of a paper."""

    name: str  # as in the paper
    metric: str  # unit of the numbers, by which report sections select tables
    setting: str  # model, training and data behind the numbers
    training_length: int
    rows: tuple[PublishedRow, ...] = ()
    columns: tuple[int | str, ...] = LENGTHS  # lengths in tokens, or other column heads
    source: str = SOURCE
    # With measurements of all models, of those of the same training length, or of those of a method among the rows.
    shown: Literal["always", "same length", "same method"] = "always"
    measured: bool = True  # False for a table of formulas

    def with_rows(self, *rows: PublishedRow) -> "PublishedTable":
        return replace(self, rows=rows)

    def is_shown_with(self, training_lengths: Collection[int], methods: Iterable[MethodKey]) -> bool:
        if self.shown == "same method":
            return any(row.method == method for row in self.rows for method in methods)
        return self.shown == "always" or self.training_length in training_lengths


def row(name: str, values: str, method: MethodKey | None = None) -> PublishedRow:
    return PublishedRow(name, tuple(values.split()), method)


SCRATCH = "350M parameters (24 layers, hidden size 1024, 16 heads), trained at 512 for two epochs of about 50B tokens"
LLAMA = "LLaMA-7B, trained at 2048; with CoCA after three stages of 15k steps at 2048"
PG19 = "100 documents of PG-19's test split, cut at 32,768 tokens, stride 512"
PASSKEY = "100 cases a length, 64 new tokens"
PAIRS = "the second row of each pair is the difference to the first"

PLAIN, NTK = MethodKey("rotary"), MethodKey("rotary", "dynamic", 4.0)
COCA, COCA_NTK = MethodKey("coca"), MethodKey("coca", "dynamic", 4.0)
COCA_NTK_2, COCA_NTK_8 = MethodKey("coca", "dynamic", 2.0), MethodKey("coca", "dynamic", 8.0)

PERPLEXITY = PublishedTable("Table 1", "perplexity", f"{SCRATCH}; {PG19}", 512).with_rows(
    row("ALiBi", "18.69 21.27 28.20 35.66 37.03 OOM OOM", MethodKey("alibi")),
    row("RoFormer", "19.66 411.50 3276.00 3026.00 3028.00 inf inf", PLAIN),
    row("RoFormer + dynamic NTK", "19.66 22.30 38.00 75.75 138.13 370.75 380.75", NTK),
    row("RoFormer + CoCA", "20.11 33.47 69.06 113.19 157.38 141.00 171.63", COCA),
    row("RoFormer + dynamic NTK & CoCA", "20.11 20.81 25.88 34.16 55.75 89.31 101.13", COCA_NTK),
)

PERPLEXITY_LLAMA = PublishedTable(
    "Table 1 (LLaMA-7B)", "perplexity", f"{LLAMA}; {PG19}", 2048, shown="same length"
).with_rows(
    row("LLaMA-7B", "9.25 7.56 7.30 9673.14 inf inf inf", PLAIN),
    row("LLaMA-7B + dynamic NTK", "9.25 7.56 7.30 9.40 14.40 63.62 133.87", NTK),
    row("LLaMA-7B + CoCA", "9.91 8.49 8.27 24.23 42.00 23.83 29.95", COCA),
    row("LLaMA-7B + dynamic NTK & CoCA", "9.91 8.49 8.27 8.61 9.56 11.10 13.98", COCA_NTK),
)

RETRIEVAL = PublishedTable("Table 2", "passkey", f"{SCRATCH}; {PASSKEY}", 512).with_rows(
    row("ALiBi", "0.82 0.65 0.28 0.18 0.12 OOM OOM", MethodKey("alibi")),
    row("RoFormer", "0.99 0.53 0.30 0.18 0.04 0.02 0.04", PLAIN),
    row("RoFormer + dynamic NTK", "0.99 1.00 0.95 0.70 0.41 0.16 0.06", NTK),
    row("RoFormer + CoCA", "1.00 0.64 0.33 0.19 0.06 0.02 0.04", COCA),
    row("RoFormer + dynamic NTK & CoCA", "1.00 1.00 0.96 0.89 0.50 0.23 0.08", COCA_NTK),
)

RETRIEVAL_LLAMA = PublishedTable(
    "Table 2 (LLaMA-7B)", "passkey", f"{LLAMA}; {PASSKEY}", 2048, shown="same length"
).with_rows(
    row("LLaMA-7B", "1.00 1.00 1.00 0.61 0.21 0.07 0.09", PLAIN),
    row("LLaMA-7B + dynamic NTK", "1.00 1.00 1.00 0.81 0.26 0.06 0.03", NTK),
    row("LLaMA-7B + CoCA", "1.00 1.00 1.00 0.71 0.28 0.11 0.10", COCA),
    row("LLaMA-7B + dynamic NTK & CoCA", "1.00 1.00 1.00 1.00 0.85 0.51 0.30", COCA_NTK),
)

STRICT_PERPLEXITY = PublishedTable(
    "Table 3 (perplexity)", "strict perplexity", f"{SCRATCH}; {PG19}; {PAIRS}", 512
).with_rows(
    row("CoCA-Slack, dynamic NTK 2", "20.11 19.02 24.92 40.53 68.38 92.75 103.44", COCA_NTK_2),
    row("Strict less Slack", "+0.07 +0.61 -1.58 -4.03 +15.37 +12.38 +1.94"),
    row("CoCA-Slack, dynamic NTK 4", "20.11 20.81 25.88 34.16 55.75 89.31 101.13", COCA_NTK),
    row("Strict less Slack", "+0.07 -0.49 -0.66 -0.88 +3.16 -18.25 -2.57"),
    row("CoCA-Slack, dynamic NTK 8", "20.11 23.66 29.05 37.47 55.5 88.88 111.38", COCA_NTK_8),
    row("Strict less Slack", "+0.07 -1.74 -0.64 +1.16 +0.03 +0.5 +0.31"),
)

STRICT_RETRIEVAL = PublishedTable(
    "Table 3 (passkey)", "strict passkey", f"{SCRATCH}; {PASSKEY}; {PAIRS}", 512
).with_rows(
    row("CoCA-Slack, dynamic NTK 2", "1.0 0.99 0.94 0.77 0.47 0.27 0.15", COCA_NTK_2),
    row("Strict less Slack", "+0.0 -0.12 -0.3 -0.42 -0.34 -0.22 -0.07"),
    row("CoCA-Slack, dynamic NTK 4", "1.0 1.0 0.96 0.89 0.5 0.23 0.08", COCA_NTK),
    row("Strict less Slack", "+0.0 -0.11 -0.38 -0.46 -0.38 -0.19 -0.02"),
    row("CoCA-Slack, dynamic NTK 8", "1.0 0.98 0.99 0.85 0.5 0.11 0.02", COCA_NTK_8),
    row("Strict less Slack", "+0.0 -0.05 -0.34 -0.51 -0.4 -0.07 -0.01"),
)

PI_SETTING = "LLaMA-7B fine-tuned with position interpolation at 32,768 for 6,000 steps"
PI, COCA_PI = (MethodKey(form, "linear", 16.0, trained=MethodKey(form, "linear", 16.0)) for form in ("rotary", "coca"))
"""32,768 / 2,048 = 16; weights that were not fine-tuned with it are another method."""

PI_PERPLEXITY = PublishedTable(
    "Table 4 (perplexity)", "perplexity", f"{PI_SETTING}; {PG19}", 32768, shown="same method"
).with_rows(
    row("LLaMA-7B + PI", "9.06 7.55 7.74 7.16 7.04 6.93 7.11", PI),
    row("LLaMA-7B + CoCA & PI", "9.65 8.19 8.37 7.87 7.84 7.83 7.96", COCA_PI),
)

PI_RETRIEVAL = PublishedTable(
    "Table 4 (passkey)", "passkey", f"{PI_SETTING}; {PASSKEY}", 32768, shown="same method"
).with_rows(
    row("LLaMA-7B + PI", "1.0 1.0 1.0 1.0 1.0 1.0 0.99", PI),
    row("LLaMA-7B + CoCA & PI", "1.0 1.0 1.0 1.0 1.0 0.99 0.99", COCA_PI),
)

SHORT_CONTEXT_SETTING = "LLaMA-7B and its variants on OpenCompass, means of its groups of tasks"
SHORT_CONTEXT = PublishedTable(
    "Table 5",
    "short context",
    SHORT_CONTEXT_SETTING,
    2048,
    columns=("Reasoning", "Understanding", "Language", "Examination", "Average"),
).with_rows(
    row("LLaMA-7B", "48.25 47.57 46.41 29.63 42.97", PLAIN),
    row("LLaMA-7B + CoCA", "45.55 51.14 55.27 25.14 44.28", COCA),
    row("LLaMA-7B + PI", "44.98 51.54 54.79 27.03 44.59", PI),
    row("LLaMA-7B + CoCA & PI", "46.88 51.82 55.56 25.31 44.89", COCA_PI),
)

TASKS_BY_GROUP: dict[str, tuple[str, ...]] = {
    "Reasoning": ("copa", "sglue_rte", "ax_b", "ax_g", "ocnli", "cmnli"),
    "Understanding": ("c3", "csl", "eprstmt"),
    "Language": ("wic", "wsc", "chid", "afqmc"),
    "Examination": ("mmlu", "cmmlu", "ceval-valid"),
    "Knowledge": ("boolq",),
}
"""The 17 tasks behind Table 5 by their names in lm-evaluation-harness and this project, in the groups that the README
of OpenCompass has for them. arXiv version 3 prints neither the tasks nor their values, only means of groups, and no
Knowledge. It reports accuracies.
"""

AVERAGED_GROUPS = SHORT_CONTEXT.columns[:-1]
"""The groups whose means Table 5 averages, each counting the same: so its own four averages come out."""

COST = (
    "Published (CoCA paper, arXiv:2309.08646v3, Figure 6 and appendix C): CoCA is about 5% to 10% slower than vanilla "
    "self-attention at inference, and needs about 60 GB of GPU memory at a length of 32k with the opt_einsum "
    "contraction (350M parameters)."
)

COMPLEXITY_SETTING = "operations and memory of one attention block; N tokens, h heads of dimension d"
COMPLEXITY = PublishedTable(
    "Table 6",
    "complexity",
    COMPLEXITY_SETTING,
    512,
    columns=("vanilla: operations", "vanilla: memory", "CoCA: operations", "CoCA: memory"),
    measured=False,
).with_rows(
    row("W_QK(T)V", "3Nd²h Nd 3Nd²h Nd"),
    row("T half", "– – Ndh Nd"),
    row("T ReLU", "– – Ndh Nd"),
    row("QK(T) rotation", "2Ndh Nd 2Ndh Nd"),
    row("K_rot = Q ∘ T_rot", "– – N²dh N²d"),
    row("Q_rot K_rotᵀ", "N²dh N² N²dh N²"),
    row("Mask", "N² N² N² N²"),
    row("Softmax", "N² N² N² N²"),
)

REROPE_SOURCE = "Su's pages on extending RoPE, kexue.fm/archives/9675, 9706, 9708 and 9728"
LENGTH, EXTENSION = 512, 8.0
OLD = 10000.0 * EXTENSION


def _rows(name: str, method: MethodKey, plain: str, at_evaluation: str, in_training: str) -> list[PublishedRow]:
    """The rows of a method without and with log n scaling, at evaluation only (log n*) and in training; empty: none."""
    trained = MethodKey("rotary", logits="log_n_trained")
    variants = (
        ("", plain, method),
        (", log n*", at_evaluation, replace(method, logits="log_n")),
        (", log n", in_training, replace(method, logits="log_n_trained", trained=trained)),
    )
    return [row(name + suffix, values, key) for suffix, values, key in variants if values]


def _rerope(window: int, plain: str, at_evaluation: str, in_training: str) -> list[PublishedRow]:
    method = MethodKey("rotary", positions="rerope", window=window / LENGTH)
    return _rows(f"ReRoPE-w{window}", method, plain, at_evaluation, in_training)


def _leaky(window: int, leak: int, values: str) -> PublishedRow:
    method = MethodKey("rotary", positions="leaky_rerope", window=window / LENGTH, leak=float(leak))
    return _rows(f"Leaky ReRoPE-w{window}-k{leak}", method, "", "", values)[0]


def _inv_leaky(name: str, values: str, base: float) -> PublishedRow:
    method = MethodKey("rotary", base=base, positions="inv_leaky_rerope", window=128 / LENGTH, leak=1 / (2 * EXTENSION))
    trained = replace(method, logits="log_n_trained")
    return row(f"{name}, log n", values, replace(trained, trained=trained))


NTK_OLD = MethodKey("rotary", base=OLD)
NTK_FIXED = MethodKey("rotary", "ntk_fixed", EXTENSION)
NTK_MIXED = MethodKey("rotary", "ntk_mixed", EXTENSION, exponent=0.625)

ACCURACY_SETTING = "GAU language model of 100M parameters, trained at 512, not fine-tuned"
ACCURACY = PublishedTable(
    "Next-token accuracy in percent",
    "next-token accuracy",
    ACCURACY_SETTING,
    LENGTH,
    columns=("512 (trained)", "4096, repeated", "4096, not repeated"),
    source=REROPE_SOURCE,
).with_rows(
    *_rows("Baseline", PLAIN, "49.41 24.17 23.16", "", "49.40 24.60 24.02"),
    *_rows("PI-RoPE", MethodKey("rotary", "linear", EXTENSION), "49.41 15.04 13.54", "", "49.40 14.99 16.51"),
    *_rows("NTK-RoPE-old", NTK_OLD, "49.41 51.28 39.27", "", "49.40 61.71 43.75"),
    *_rows("NTK-RoPE-fixed", NTK_FIXED, "49.41 51.86 39.61", "49.41 55.94 41.11", "49.40 62.85 44.14"),
    *_rows("NTK-RoPE-mixed", NTK_MIXED, "49.41 53.09 40.12", "49.41 59.11 42.38", "49.40 68.91 45.41"),
    *_rerope(64, "49.41 69.39 45.19", "49.41 78.58 47.42", "49.40 84.38 48.14"),
    *_rerope(128, "49.41 76.11 47.82", "49.41 82.28 48.78", "49.40 85.47 48.87"),
    *_rerope(256, "49.41 77.90 48.48", "49.41 82.40 48.85", "49.40 85.12 49.07"),
    *_rerope(384, "49.41 70.72 48.15", "49.41 76.42 48.31", "49.40 83.24 48.62"),
    *_rerope(512, "49.41 7.09 8.25", "49.41 7.08 8.25", "49.40 15.84 10.83"),
    _leaky(128, 64, "49.40 85.29 48.96"),
    _leaky(128, 32, "49.40 85.31 49.03"),
    _leaky(128, 16, "49.40 85.15 49.10"),
    _leaky(128, 8, "49.40 80.00 48.11"),
    _leaky(256, 64, "49.40 84.60 49.03"),
    _leaky(256, 32, "49.40 84.30 48.97"),
    _leaky(256, 16, "49.40 83.59 48.87"),
    _leaky(256, 8, "49.40 69.80 45.72"),
    _inv_leaky("InvLeaky ReRoPE-w128", "49.38 82.25 48.32", 10000.0),
    _inv_leaky("InvLeaky ReRoPE-w128-b8", "49.62 81.15 48.85", OLD),
    row("HFWA", "48.70 80.84 48.15"),
)

LOSS_SETTING = (
    "LLaMA-2-13B, trained at 4096, nats per token; in the code behind it NTK-RoPE is the mixed form with k = 12 and "
    "b = 0.75, ReRoPE has a window of 1024, and both have log n*"
)
LOSS = PublishedTable(
    "Loss of LLaMA-2-13B",
    "loss",
    LOSS_SETTING,
    4096,
    columns=(4096, 8192, 16384),
    source="Su, kexue.fm/archives/9708 and github.com/bojone/rerope",
).with_rows(
    row("RoPE", "1.4967 8.8615 –", PLAIN),
    row("NTK-RoPE", "1.6081 1.5417 1.5163", MethodKey("rotary", "ntk_mixed", 12.0, exponent=0.75, logits="log_n")),
    row("ReRoPE", "1.4996 1.4267 1.4001", MethodKey("rotary", positions="rerope", window=0.25, logits="log_n")),
)

TABLES: tuple[PublishedTable, ...] = (
    *(PERPLEXITY, PERPLEXITY_LLAMA, RETRIEVAL, RETRIEVAL_LLAMA, STRICT_PERPLEXITY, STRICT_RETRIEVAL),
    *(PI_PERPLEXITY, PI_RETRIEVAL, SHORT_CONTEXT, COMPLEXITY, ACCURACY, LOSS),
)
"""Every published table, in the order of a report."""
