"""Results of several seeds in a report: one row with intervals, markers against a baseline, curves, exported tables."""

import csv
import io
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from scipy import stats

from megatron_coca.evaluation import EvaluationError, PerplexityResult, build_report
from megatron_coca.evaluation.report.curves import Curve, CurvePoint, TrainedStage, run_curve, trained_stages
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow, csv_table
from megatron_coca.evaluation.report.overview_sections import span
from megatron_coca.evaluation.report.plots.figures import PAGE, drawn
from megatron_coca.evaluation.results import Result
from tests.unit.evaluation.report_cases import (
    DOCUMENTS,
    FULL,
    NTK,
    analysis,
    every_result,
    harness,
    lacking,
    needle,
    passkey,
    perplexity,
    ruler,
    sections_of,
    window,
    write,
)

SEEDS = (1234, 1235, 1236)


def of_seed(result: Result, seed: int | None, **changes: Any) -> Any:
    """The result of the same label, of weights trained with another seed."""
    update = {"seed": seed, "identity": f"{result.label}-{seed}", "path": f"runs/{seed}", **changes}
    return result.model_copy(update={"checkpoint": result.checkpoint.model_copy(update=update)})


def seeds(label: str, losses: dict[int, list[float]], **changes: Any) -> dict[str, Result]:
    """Perplexities of one label by window, a loss for each seed."""
    made = {
        seed: of_seed(perplexity(label, {size: nlls[at] for size, nlls in losses.items()}, **changes), seed)
        for at, seed in enumerate(SEEDS)
    }
    return {f"{label}-{seed}": result for seed, result in made.items()}


def blocks(folder: Path, name: str, results: dict[str, Result], **options: Any) -> tuple[ReportBlock, ...]:
    sections = sections_of(write(folder, results), papers=False, **options)
    return next(section.blocks for section in sections if section.name == name)


def test_seeds_are_one_row_with_the_t_interval_of_the_loss(tmp_path: Path) -> None:
    losses = [3.0, 3.02, 3.1]
    nlls = {512: losses, 1024: losses}
    results = seeds("CoCA", nlls) | {"one": perplexity("RoFormer", {512: 3.0, 1024: 3.0})}
    ((block,), (table,)) = (found := blocks(tmp_path, "perplexity", results)), found[0].tables
    rows = {row.name: row.cells[0] for row in table.rows}
    low, high = (math.exp(end) for end in stats.t.interval(0.95, 2, loc=fmean(losses), scale=stats.sem(losses)))
    cell = rows["CoCA"]
    assert (cell.value, cell.low, cell.high) == pytest.approx((math.exp(3.04), low, high), rel=1e-12)
    assert cell.text == f"{math.exp(3.04):.2f}" and cell.detail == f"{low:.2f}–{high:.2f}" and cell.seeds == 3
    assert rows["RoFormer"].in_full == "20.09 (n = 1)" and not rows["RoFormer"].best
    assert any("95% t interval" in note for note in table.notes)
    assert [line.split(" (")[0] for line in found[0].provenance[:3]] == [
        f"runs/{seed}, step 120000, seed {seed}" for seed in SEEDS
    ]
    canvas = drawn(block.figures[0], PAGE)
    (band,) = canvas.axes[0].collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (min(ends), max(ends)) == pytest.approx((low, high))


def test_a_cell_that_one_seed_lacks_says_so(tmp_path: Path) -> None:
    results = seeds("CoCA", {512: [3.0, 3.1, 3.2], 1024: [4.0, 4.1, 4.2]})
    refused = {"results": [window(512, 3.2)], "missing": [lacking("window 1024", "out of memory", FULL)]}
    results["CoCA-1236"] = of_seed(perplexity("CoCA", {}, **refused), 1236)
    cell = blocks(tmp_path, "perplexity", results)[0].tables[0].rows[0].cells[1]
    assert cell.value == pytest.approx(math.exp(4.05)) and cell.seeds == 2
    assert cell.detail.endswith(", n = 2") and cell.note == f"2 of 3 seeds; seed 1236: out of memory: {FULL}"


def test_an_interrupted_seed_is_left_out_of_the_mean(tmp_path: Path) -> None:
    results = seeds("CoCA", {512: [3.0, 3.1, 9.9]})
    results["CoCA-1236"] = of_seed(perplexity("CoCA", {}, results=[window(512, 9.9, documents=3)]), 1236)
    cell = blocks(tmp_path, "perplexity", results)[0].tables[0].rows[0].cells[0]
    assert cell.value == pytest.approx(math.exp(3.05))
    assert cell.note.startswith("2 of 3 seeds; seed 1236: not run") and cell.note.endswith(" 3 of 4 documents")


def test_an_infinite_perplexity_has_no_finite_mean(tmp_path: Path) -> None:
    cell = blocks(tmp_path, "perplexity", seeds("A", {512: [3.0, 3.0, 4000.0]}))[0].tables[0].rows[0].cells[0]
    assert cell.text == "inf" and cell.value == math.inf


@pytest.mark.parametrize(
    ("seed", "changes", "overrides", "how"),
    [
        (None, {}, {}, "are different models"),
        (1234, {}, {}, "are different models"),
        (9, {"step": 5}, {}, "differ in checkpoint.step"),
        (9, {"seq_length": 64}, {}, "differ in checkpoint.seq_length"),
        (9, {}, NTK, "differ in overrides.rope_scaling"),
        (9, {"network": "wide"}, {}, "differ in checkpoint.network"),
        (9, {"recipe": {"optimizer.params.lr": 1e-3, "train_iters": 8}}, {}, "checkpoint.recipe.optimizer.params.lr"),
    ],
)
def test_only_the_seed_may_differ(tmp_path: Path, seed: int | None, changes: Any, overrides: Any, how: str) -> None:
    one, two = perplexity("A", {512: 2.0}), perplexity("A", {512: 2.0}, overrides=overrides)
    first = of_seed(one, 1234, network="narrow", recipe={"optimizer.params.lr": 2e-3, "train_iters": 8})
    changed = {"network": "narrow", "recipe": first.checkpoint.recipe} | changes
    results: dict[str, Result] = {"one": first, "two": of_seed(two, seed, identity="other", **changed)}
    with pytest.raises(
        EvaluationError, match=rf"label `A`: .*one.json and .*two.json .*{how}, not only in their seeds"
    ):
        blocks(tmp_path, "perplexity", results)


def test_files_of_earlier_versions_are_compared_in_what_they_record(tmp_path: Path) -> None:
    one, two = of_seed(perplexity("A", {512: 2.0}), 1), of_seed(perplexity("A", {512: 3.0}), 2, network="a", recipe={})
    cell = blocks(tmp_path / "both", "perplexity", {"one": one, "two": two})[0].tables[0].rows[0].cells[0]
    assert cell.seeds == 2
    three = of_seed(perplexity("A", {512: 3.0}), 3, network="a", recipe={"train_iters": 8})
    with pytest.raises(EvaluationError, match=r"two.json and .*three.json differ in checkpoint.recipe.train_iters"):
        blocks(tmp_path / "all", "perplexity", {"one": one, "two": two, "zzz_three": three})


def test_every_table_has_one_row_for_the_seeds(tmp_path: Path) -> None:
    label = "RoFormer"
    made = {
        "passkey": [passkey(label, {512: share}) for share in (0.9, 0.8, 1.0)],
        "needle": [needle(label, [512, 1024], [0, 100])] * 3,
        "ruler": [ruler(label, [512, 1024])] * 3,
        "harness": [harness(label, base) for base in (0.5, 0.6, 0.7)],
        "analysis": [analysis(label)] * 3,
    }
    files = {
        f"{name}-{seed}": of_seed(result, seed)
        for name, results in made.items()
        for seed, result in zip(SEEDS, results, strict=True)
    }
    write(tmp_path, files)
    sections = {section.name: section for section in sections_of([tmp_path], papers=False)}
    for name in ("passkey", "needle", "ruler", "short", "analysis"):
        for table in (table for block in sections[name].blocks for table in block.tables):
            names = [row.name for row in table.rows]
            assert len(names) == len(set(names)), table.name
            assert any(cell.seeds == 3 for row in table.rows for cell in row.cells), table.name
    reach = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    accuracy = sections["passkey"].blocks[0].tables[0].rows[0].cells[0]
    assert (accuracy.text, accuracy.detail) == ("0.90", f"± {reach:.2f}")
    assert accuracy.high == pytest.approx(0.9 + reach)
    score = sections["short"].blocks[0].tables[0].rows[0].cells[0]
    assert score.in_full == f"0.610 ± {reach:.3f}", "the second task is a hundredth better"


def by_document(label: str, losses: list[list[float]]) -> dict[str, Result]:
    """Losses of each document by seed."""
    files: dict[str, Result] = {}
    for seed, nlls in zip(SEEDS, losses, strict=False):
        mean = fmean(nlls) / 1023
        cell = {**window(512, mean, documents=len(nlls)), "nll_by_document": nlls, "perplexity": math.exp(mean)}
        documents = DOCUMENTS | {"count": len(nlls)}
        files[f"{label}-{seed}"] = of_seed(perplexity(label, {}, results=[cell], documents=documents), seed)
    return files


def test_markers_against_the_baseline(tmp_path: Path) -> None:
    base = [2000.0 + 100 * at for at in range(12)]
    results = by_document("base", [base, base])
    results |= by_document("better", [[nll - 1 for nll in base]])
    results |= by_document("mixed", [[nll + (-1) ** at for at, nll in enumerate(base)]])
    # Of each seed half of the documents differ by 3 and the others by -1, of their mean all by 1.
    swaying = [[nll + (3 if at % 2 == seed else -1) for at, nll in enumerate(base)] for seed in (0, 1)]
    results |= by_document("averaged", swaying)
    (table,) = blocks(tmp_path, "perplexity", results, baseline="base")[0].tables
    marked = {row.name: "†" in row.cells[0].text for row in table.rows}
    assert marked == {"base": False, "better": True, "mixed": False, "averaged": True}
    assert any("differs from base" in note and "first averaged over seeds" in note for note in table.notes)
    unmarked = blocks(tmp_path, "perplexity", results)[0].tables[0]
    assert not any("†" in row.cells[0].text for row in unmarked.rows) and not any(
        "†" in note for note in unmarked.notes
    )


def test_an_unknown_baseline_is_an_error(tmp_path: Path) -> None:
    files = write(tmp_path, {"one": perplexity("A", {512: 2.0})})
    with pytest.raises(EvaluationError, match="baseline `B`: not a label; name one of A"):
        build_report(files, tmp_path / "out", baseline="B")


def test_summary_has_ratios_and_spans(tmp_path: Path) -> None:
    results = seeds("A", {512: [2.0, 2.2, 2.4], 1024: [3.0, 3.1, 3.5], 8192: [6.0, 6.2, 6.4]})
    results["passkey"] = of_seed(passkey("A", {512: 1.0, 1024: 0.9, 2048: 0.5, 4096: 1.0}), 1234)
    (block,) = blocks(tmp_path, "summary", results)
    (table,) = block.tables
    assert table.header == ("label", "perplexity at L", "ratio at 2L", "ratio at 16L", "passkey span")
    at_length, twice, sixteen, solved = table.rows[0].cells
    assert at_length.value == pytest.approx(math.exp(2.2)) and twice.value == pytest.approx(math.exp(1.0))
    low, high = stats.t.interval(0.95, 2, loc=1.0, scale=stats.sem([1.0, 0.9, 1.1]))
    assert (twice.low, twice.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert sixteen.value == pytest.approx(math.exp(4.0)) and solved.text == "2"
    assert span({512: 0.8}, 512) == 0 and span({256: 1.0, 512: 0.95}, 512) == 1


def curve(seed: int, shift: float) -> Curve:
    points = [
        CurvePoint(step=at, tokens=1000 * at, train_loss=3 + shift, validation_loss=2 + shift if at == 4 else None)
        for at in range(1, 5 + seed)
    ]
    return Curve(seed=seed, points=points)


def test_learning_curves(tmp_path: Path) -> None:
    results: dict[str, Result] = {"one": perplexity("A", {512: 2.0})}
    (block,) = blocks(tmp_path, "training", results, curves={"A": [curve(0, 0.0), curve(1, 0.2)]})
    (table,) = block.tables
    assert [cell.text for cell in table.rows[0].cells] == ["5,000", "3.1000", "2.1000"]
    assert table.rows[0].cells[2].detail == f"± {stats.t.ppf(0.975, 1) * 0.1:.4f}"
    training, validation = block.figures
    canvas = drawn(training, PAGE)
    (line,) = canvas.axes[0].lines
    assert list(line.get_xdata()) == pytest.approx([0.001, 0.002, 0.003, 0.004]), "tokens that all seeds have"
    assert "Validation" in validation.caption
    assert not [section for section in sections_of([tmp_path]) if section.name == "training"]


def test_learning_curves_mark_where_stages_begin(tmp_path: Path) -> None:
    stages = trained_stages({"stages": [{"last": 2, "tokens_per_step": 500}, {"last": 9, "tokens_per_step": 4000}]}, 1)
    assert trained_stages({"batch": 4}, 16) == [TrainedStage(0, 64)]
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 2.0}}\n' for step in range(1, 6)))
    staged = run_curve(tmp_path, 0, stages)
    assert [point.tokens for point in staged.points] == [500, 1000, 5000, 9000, 13000] and staged.borders == [1000]
    results: dict[str, Result] = {"one": perplexity("A", {512: 2.0})}
    (block,) = blocks(tmp_path / "results", "training", results, curves={"A": [staged]})
    canvas = drawn(block.figures[0], PAGE)
    _, border = canvas.axes[0].lines
    assert list(border.get_xdata()) == [0.001, 0.001] and border.get_label() == "stage begins"


def test_the_seed_does_not_identify_a_measurement() -> None:
    result = perplexity("A", {512: 2.0})
    again = of_seed(result, 7, identity=result.checkpoint.identity)
    assert result.measurement() == again.measurement()
    earlier = json.loads(result.model_dump_json())
    del earlier["checkpoint"]["seed"]
    assert PerplexityResult.model_validate(earlier).checkpoint.seed is None


def test_exported_tables_have_the_columns_of_the_report(tmp_path: Path) -> None:
    files = write(tmp_path, every_result() | seeds("seeds_&_more", {512: [3.0, 3.1, 3.2]}))
    sections = sections_of(files, baseline="CoCA")
    tables = [table for section in sections for block in section.blocks for table in block.tables]
    assert len({table.name for table in tables}) == len(tables) > 10
    for table in tables:
        header, *rows = csv.reader(io.StringIO(csv_table(table)))
        assert {len(row) for row in rows} == {len(header)} and len(rows) == len(table.rows)
        assert [head for head in header if head in table.header] == list(table.header)


def test_the_files_of_a_report(tmp_path: Path) -> None:
    build_report(
        write(tmp_path / "results", seeds("A", {512: [3.0, 3.1, 3.2], 1024: [3.0, 3.1, 3.2]})), tmp_path, papers=False
    )
    assert (tmp_path / "figures" / "perplexity-1.svg").read_text().startswith("<?xml")
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        f"{name}.{kind}" for name in ("headline", "summary", "perplexity-1") for kind in ("csv", "tex")
    }


def test_csv_holds_the_ends_of_intervals() -> None:
    cells = (TableCell("1.23†", 1.23456, "1.00–1.50", 1.0, 1.5, 3), TableCell("OOM", note="x"))
    text = csv_table(Table("t", "c", ("label", "a", "b"), (TableRow("x, y", cells),)))
    assert text == '"label","source","a","a low","a high","a seeds","b"\n"x, y",,1.23456,1,1.5,3,"OOM"\n'
