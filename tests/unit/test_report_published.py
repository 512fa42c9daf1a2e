"""The papers' numbers, and which of our measurements stand for the same method."""

from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from report_cases import NTK, REROPE, harness, lacking, perplexity, sections_of, write

from megatron_coca.config import Config, load_config
from megatron_coca.evaluation import EvaluationError, PerplexityResult
from megatron_coca.evaluation.report import published
from megatron_coca.evaluation.report.document import Table, TableRow
from megatron_coca.evaluation.report.published import TABLES, MethodKey, PublishedTable, method_key
from megatron_coca.evaluation.subject import changed_keys, trained_with
from megatron_coca.evaluation.suite import read_suite

NOT_NUMBERS = {"OOM", "–"}
ROOT = Path(__file__).parents[2]

PI_16 = {"rope_type": "linear", "factor": 16.0}
MIXED = {"rope_scaling": {"rope_type": "ntk_mixed", "factor": 8.0}}
LEAKY = {"relative_positions": {"type": "leaky_rerope"}}
INV_LEAKY = {"type": "inv_leaky_rerope", "target_length": 4096}
USE_OF_PI_16 = MethodKey("rotary", "linear", 16.0)
USE_OF_INV_LEAKY = MethodKey("rotary", positions="inv_leaky_rerope", window=0.25, leak=1 / 16)
COCA_NTK = MethodKey("coca", "dynamic", 4.0)
ACCURACY = TABLES["Next-token accuracy in percent"]
LOG_N = {"checkpoint__trained_with": {"logit_scaling": "log_n_trained"}}


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_tables_are_whole(table: PublishedTable) -> None:
    assert table.source and table.setting and table.rows
    for row in table.rows:
        assert len(row.values) == len(table.columns), row.name
        if table.measured:
            assert all(value in NOT_NUMBERS or float(value) is not None for value in row.values)


@pytest.mark.parametrize(
    ("single", "table"),
    [
        (TABLES["Table 1"], TABLES["Table 3 (perplexity)"]),
        (TABLES["Table 2"], TABLES["Table 3 (passkey)"]),
    ],
)
def test_factor_4_of_table_3_is_the_dynamic_ntk_of_tables_1_and_2(
    single: PublishedTable, table: PublishedTable
) -> None:
    (row,) = [row for row in single.rows if row.method == COCA_NTK]
    (same,) = [row for row in table.rows if row.method == COCA_NTK]
    assert list(map(float, row.values)) == list(map(float, same.values))


def test_the_two_pages_on_rerope_agree_with_the_text() -> None:
    best = max(ACCURACY.rows, key=lambda row: float(row.values[1]))
    assert best.name == "ReRoPE-w128, log n" and best.values == ("49.40", "85.47", "48.87")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, MethodKey("rotary")),
        ({"checkpoint__pos_emb": "coca", "overrides": NTK}, MethodKey("coca", "dynamic", 4.0)),
        ({"overrides": REROPE}, MethodKey("rotary", positions="rerope", window=0.5)),
        (
            {
                "overrides": {
                    "relative_positions": {"type": "leaky_rerope", "window": 128, "leak": 16.0},
                    "logit_scaling": "log_n",
                }
            },
            MethodKey("rotary", positions="leaky_rerope", window=0.25, leak=16.0, logits="log_n"),
        ),
        ({"overrides": {"rope_scaling": None, "rotary_emb_base": 5e5}}, MethodKey("rotary", base=5e5)),
        (
            {"checkpoint__trained_with": {"rotary_emb_base": 5e5}},
            MethodKey("rotary", base=5e5, trained=MethodKey("rotary", base=5e5)),
        ),
        ({"overrides": {"rope_scaling": PI_16}}, MethodKey("rotary", "linear", 16.0)),
        (
            {"checkpoint__trained_with": {"rope_scaling": PI_16}},
            MethodKey("rotary", "linear", 16.0, trained=USE_OF_PI_16),
        ),
        (
            {"checkpoint__trained_with": {"rope_scaling": PI_16}, "overrides": NTK},
            MethodKey("rotary", "dynamic", 4.0, trained=USE_OF_PI_16),
        ),
        ({"overrides": MIXED}, MethodKey("rotary", "ntk_mixed", 8.0, exponent=0.625)),
        ({"overrides": LEAKY}, MethodKey("rotary", positions="leaky_rerope", window=0.5, leak=16.0)),
        (
            {"checkpoint__trained_with": {"relative_positions": INV_LEAKY}},
            MethodKey("rotary", positions="inv_leaky_rerope", window=0.25, leak=1 / 16, trained=USE_OF_INV_LEAKY),
        ),
    ],
)
def test_use_of_a_result(changes: dict[str, Any], expected: MethodKey) -> None:
    assert method_key(perplexity("one", {512: 2.0}, **changes)) == expected


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ({"relative_positions": {"type": "rerpe"}}, "relative_positions.type"),
        ({"rope_scaling": {"rope_type": "linear", "fctor": 2.0}}, "rope_scaling.fctor"),
    ],
)
def test_a_use_that_nothing_has_is_named(overrides: dict[str, Any], place: str) -> None:
    with pytest.raises(EvaluationError, match=f"label `one` of perplexity: {place}: .*measure it again"):
        method_key(perplexity("one", {512: 2.0}, overrides=overrides))


def rows_of(table: PublishedTable, **changes: Any) -> list[str]:
    result = perplexity("one", {512: 2.0}, **changes)
    return [row.name for row in table.rows if row.is_method_of(result)]


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        (TABLES["Table 4 (perplexity)"], {"overrides": {"rope_scaling": PI_16}}, []),
        (TABLES["Table 4 (perplexity)"], {"checkpoint__trained_with": {"rope_scaling": PI_16}}, ["LLaMA-7B + PI"]),
        (TABLES["Table 4 (perplexity)"], {"checkpoint__trained_with": {"rope_scaling": {**PI_16, "factor": 4.0}}}, []),
        (
            TABLES["Table 4 (perplexity)"],
            {
                "checkpoint__trained_with": {"rope_scaling": {**PI_16, "factor": 4.0}},
                "overrides": {"rope_scaling": PI_16},
            },
            [],
        ),
        (published.SHORT_CONTEXT, {"overrides": {"rope_scaling": PI_16}}, []),
        (ACCURACY, {"overrides": {"rotary_emb_base": 8e4}}, ["NTK-RoPE-old"]),
        (ACCURACY, {"checkpoint__trained_with": {"rotary_emb_base": 8e4}}, []),
        (ACCURACY, {"checkpoint__trained_with": REROPE}, []),
        (ACCURACY, {"overrides": {"rope_scaling": {**PI_16, "factor": 8.0}}}, ["PI-RoPE"]),
        (ACCURACY, {"checkpoint__trained_with": {"rope_scaling": {**PI_16, "factor": 8.0}}}, []),
        (ACCURACY, {"overrides": REROPE}, ["ReRoPE-w256"]),
        (ACCURACY, {"overrides": {"relative_positions": {"type": "rerope", "window": 100}}}, []),
        (ACCURACY, {"overrides": LEAKY, **LOG_N}, ["Leaky ReRoPE-w256-k16, log n"]),
        (
            ACCURACY,
            {"overrides": {"relative_positions": {"type": "leaky_rerope", "window": 128, "leak": 32.0}}, **LOG_N},
            ["Leaky ReRoPE-w128-k32, log n"],
        ),
        (
            ACCURACY,
            {"overrides": {"relative_positions": {"type": "leaky_rerope", "window": 128, "leak": 4.0}}, **LOG_N},
            [],
        ),
        (
            ACCURACY,
            {"checkpoint__trained_with": {"logit_scaling": "log_n_trained", "relative_positions": INV_LEAKY}},
            ["InvLeaky ReRoPE-w128, log n"],
        ),
        (
            ACCURACY,
            {
                "checkpoint__trained_with": {
                    "logit_scaling": "log_n_trained",
                    "relative_positions": {**INV_LEAKY, "target_length": 8192},
                }
            },
            [],
        ),
        (
            ACCURACY,
            {
                "checkpoint__trained_with": {"logit_scaling": "log_n_trained", "relative_positions": INV_LEAKY},
                "overrides": {"rotary_emb_base": 8e4},
            },
            [],
        ),
        (TABLES["Loss of LLaMA-2-13B"], {"overrides": REROPE}, []),
        (TABLES["Loss of LLaMA-2-13B"], {"overrides": {**REROPE, "logit_scaling": "log_n"}}, []),
    ],
)
def test_the_method_of_a_row_has_its_fine_tuning_window_and_leak(
    table: PublishedTable, changes: dict[str, Any], expected: list[str]
) -> None:
    assert rows_of(table, **changes) == expected


def test_the_pages_on_rerope_are_whole() -> None:
    """37 methods and HFWA, each once; the figures of a row are those of its method."""
    names = [row.name for row in ACCURACY.rows]
    assert len(names) == len(set(names)) == 38
    uses = [row.method for row in ACCURACY.rows if row.method is not None]
    assert len(uses) == len(set(uses)) == 37
    for row in ACCURACY.rows[:-3]:
        assert row.values[0] == ("49.40" if row.name.endswith("log n") else "49.41"), "one model for each logit scaling"


TRAINED: dict[str, list[str]] = {
    "RoPE": [],
    "RoPE, log n": ["train/log_n_trained.yml"],
    "InvLeaky-w128, log n": ["train/log_n_trained.yml", "train/inv_leaky_rerope.yml"],
    "InvLeaky-w128-b8, log n": ["train/log_n_trained.yml", "train/inv_leaky_rerope.yml", "rotary_emb_base=80000"],
}
"""What the checkpoints of configs/evaluation/rerope.yml are trained with beside configs/350M/roformer.yml."""


def use_of_a_variant(trained: Config, changes: list[str]) -> MethodKey | None:
    """What a result file of a suite's variant says of the use."""
    files, keys = ([each for each in changes if ("=" in each) is is_key] for is_key in (False, True))
    base = trained.to_yaml()
    with TemporaryDirectory() as folder:
        (Path(folder) / "trained.yml").write_text(base)
        used = load_config([Path(folder) / "trained.yml", *(ROOT / file for file in files)], keys)
    said = {"overrides": changed_keys(trained, used), "checkpoint__trained_with": trained_with(trained)}
    return method_key(perplexity("one", {512: 2.0}, length=trained.model.seq_length, **said))


def test_the_suite_on_rerope_runs_every_row() -> None:
    suite = read_suite(ROOT / "configs/evaluation/rerope.yml")
    assert suite.checkpoints.keys() == TRAINED.keys()
    uses = []
    for name, entry in suite.checkpoints.items():
        files = [ROOT / "configs" / each for each in TRAINED[name] if "=" not in each]
        trained = load_config(
            [ROOT / "configs/350M/roformer.yml", *files], [each for each in TRAINED[name] if "=" in each]
        )
        uses += [use_of_a_variant(trained, changes or []) for changes in entry.variants.values()]
    assert len(uses) == 37 and set(uses) == {row.method for row in ACCURACY.rows} - {None}
    plain, repeated = suite.tasks.values()
    assert repeated == {**(plain or {}), "repeat": 512}


def test_the_suite_on_llama_2_runs_every_row() -> None:
    suite = read_suite(ROOT / "configs/evaluation/rerope_llama2.yml")
    trained = load_config(ROOT / "configs/350M/roformer.yml", {"seq_length": 4096, "max_position_embeddings": 4096})
    ((_, entry),) = suite.checkpoints.items()
    uses = [use_of_a_variant(trained, changes or []) for changes in entry.variants.values()]
    assert uses == [row.method for row in TABLES["Loss of LLaMA-2-13B"].rows]


def test_table_5_averages_its_four_groups() -> None:
    for row in published.SHORT_CONTEXT.rows:
        *groups, average = map(float, row.values)
        assert fmean(groups) == pytest.approx(average, abs=0.0051), row.name
    assert published.AVERAGED_GROUPS == ("Reasoning", "Understanding", "Language", "Examination")


def short_context_tables(folder: Path, *tasks: str) -> list[Table]:
    results = {"one": harness("RoFormer", 0.5, tasks), "two": harness("CoCA", 0.4, tasks)}
    sections = sections_of(write(folder, results), papers=True)
    (block,) = next(section for section in sections if section.name == "short").blocks
    return list(block.tables)


def test_means_of_groups_beside_table_5(tmp_path: Path) -> None:
    tasks = [task for group in published.TASKS_BY_GROUP.values() for task in group]
    scores, by_task, means = short_context_tables(tmp_path, *tasks)
    assert len(scores.header) == 1 + 17 + 1, "all tasks and wikitext"
    assert by_task.header == ("group and task", "RoFormer", "CoCA") and len(by_task.rows) == 17
    assert by_task.rows[0].name == "Reasoning: copa" and by_task.rows[-1].name == "Knowledge: boolq"
    assert [entry.text for entry in by_task.rows[-1].cells] == ["66.00", "56.00"]
    assert means.header[1:] == ("Reasoning", "Understanding", "Language", "Examination", "Average", "Knowledge")
    ours = [entry.text for entry in means.rows[0].cells]
    expected = [52.5, 57.0, 60.5, 64.0]
    assert ours == [*(f"{value:.2f}" for value in (*expected, fmean(expected))), "66.00"]
    assert not any(entry.best for entry in means.rows[0].cells), "means of one seed have no interval"
    theirs = named(means.rows, "LLaMA-7B")
    assert [entry.text for entry in theirs.cells] == ["48.25", "47.57", "46.41", "29.63", "42.97", ""]
    assert theirs.detail == "the method of: RoFormer"


def test_a_mean_needs_all_tasks_of_its_group(tmp_path: Path) -> None:
    _, by_task, means = short_context_tables(tmp_path, "copa", "boolq")
    assert [entry.text for entry in means.rows[0].cells] == ["–"] * 5 + ["51.00"]
    first, *_, average, knowledge = means.rows[0].cells
    assert first.note == "without an accuracy of sglue_rte, ax_b, ax_g, ocnli, cmnli" and first.note in average.note
    assert not knowledge.note and by_task.rows[1].cells[0].text == "not run"
    (_, table_5) = short_context_tables(tmp_path / "none")
    assert table_5.caption.endswith("Table 5")


def perplexity_tables(folder: Path, **changes: Any) -> list[Table]:
    files = write(folder, {"one": perplexity("ours", {512: 2.0}, **changes)})
    (section, *_) = sections_of(files, papers=True)
    return list(section.blocks[0].tables)


def named(lines: tuple[TableRow, ...], name: str) -> TableRow:
    return next(line for line in lines if line.name == name)


def test_the_same_training_length_stands_in_one_table(tmp_path: Path) -> None:
    table, _ = perplexity_tables(tmp_path, checkpoint__pos_emb="coca", overrides=NTK)
    assert table.header[1:] == ("512*", "1024", "2048", "4096", "8192", "16384", "32768")
    assert [entry.text for entry in table.rows[0].cells] == ["7.39", *["not run"] * 6]
    row = named(table.rows, "RoFormer + dynamic NTK & CoCA")
    assert [entry.text for entry in row.cells] == ["20.11", "20.81", "25.88", "34.16", "55.75", "89.31", "101.13"]
    assert row.published == "CoCA paper, arXiv:2309.08646v3, Table 1" and row.detail == "the method of: ours"
    assert not named(table.rows, "ALiBi").detail


@pytest.mark.parametrize(
    ("length", "overrides", "joined", "apart"),
    [
        (64, {}, [], ["Table 1"]),
        (2048, {}, ["Table 1 (LLaMA-7B)"], ["Table 1"]),
        (64, {"rope_scaling": PI_16}, [], ["Table 1"]),
    ],
)
def test_other_training_lengths_stand_alone(
    tmp_path: Path, length: int, overrides: dict[str, Any], joined: list[str], apart: list[str]
) -> None:
    main, *others = perplexity_tables(tmp_path, length=length, overrides=overrides)
    assert list(dict.fromkeys(line.published.rpartition(", ")[2] for line in main.rows if line.published)) == joined
    assert [table.caption.rpartition(": ")[2] for table in others] == apart


REFUSED: dict[str, Any] = {
    "environment__backend": None,
    "overrides": {"variant": "rope_scaling.rope_type=dynamic"},
    "missing": [lacking("all", "refused", "it means nothing")],
}


def refused(label: str, pos_emb: str = "rotary") -> PerplexityResult:
    return perplexity(label, {}, checkpoint__pos_emb=pos_emb, **REFUSED)


def test_a_refused_use_is_of_no_method(tmp_path: Path) -> None:
    results = {"one": perplexity("RoFormer", {512: 2.0}), "two": refused("RoFormer, refused")}
    assert method_key(results["two"]) is None
    sections = sections_of(write(tmp_path, results), papers=True)
    lines = sections[0].blocks[0].tables[0].rows
    assert [line.name for line in lines if not line.published] == ["RoFormer", "RoFormer, refused"]
    assert {line.detail for line in lines if line.published} == {"", "the method of: RoFormer"}


def test_a_refused_use_asks_for_no_table_of_its_own(tmp_path: Path) -> None:
    trained = {"rope_scaling": PI_16}
    tables = perplexity_tables(tmp_path, results=[], checkpoint__trained_with=trained, **REFUSED)
    assert not [table for table in tables if "Table 4" in table.caption]
    measured = perplexity_tables(tmp_path / "measured", checkpoint__trained_with=trained)
    assert [table for table in measured if "Table 4" in table.caption]


def test_table_3_stands_alone_beside_the_method_of_a_row(tmp_path: Path) -> None:
    for overrides, shown in ((NTK, True), ({}, False)):
        coca = {"coca": perplexity("CoCA", {512: 3.0}, overrides=overrides, checkpoint__pos_emb="coca")}
        sections = sections_of(write(tmp_path / str(shown), coca), papers=True)
        main, *others = next(section for section in sections if section.name == "perplexity").blocks[0].tables
        assert ["Table 3" in table.caption for table in others] == [True] * shown
        assert not [row for row in main.rows if "Table 3" in row.published]
