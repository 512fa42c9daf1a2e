"""The page of `megatron-coca stretch`, from results made by hand."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from megatron_coca.evaluation.contrasts import power_of
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.stretch.decision import decide
from megatron_coca.evaluation.stretch.page import basis_of, sentence, write_page
from megatron_coca.evaluation.stretch.plans import paired_differences, read_plan
from megatron_coca.evaluation.stretch.records import StretchResult
from tests.unit.evaluation.stretch_cases import (
    LENGTHS,
    PLAN,
    changed,
    config_of,
    entries_of,
    small_result,
    stretch_result,
    with_entries,
)


def test_both_forms_of_the_page_say_the_same(tmp_path: Path) -> None:
    result = stretch_result()
    configs = {name: config_of(name) for name in PLAN.methods}
    text = write_page(result, configs, tmp_path, PLAN)
    html = (tmp_path / "stretch.html").read_text()
    said = (
        "rerope+log_n extends this model to 32,768 tokens, 4 times its training length: it finds 0 of 8 facts there "
        "(plain: 0), and its perplexity at 8,192 tokens is 1.0% higher than that of plain"
    )
    assert text.startswith(f"# {said}\n") and f'<p class="claim">{said}</p>' in html
    assert html.count("<picture>") == 1 and html.count("<table>") == 4
    for shown in ("rope_type: clex has learned weights", "32768 tokens of ntk (about 1:23:45)"):
        assert shown in text.replace("\\_", "_") and shown in html
    assert re.search(r"\| rerope\+log_n +\| +32,768 \|", text) and "<h2>The chosen method</h2>" in html
    assert "transformers has no setting for this method" in text and "\\`" not in text and "`<" not in html


def test_an_undecided_page_says_so_everywhere(tmp_path: Path) -> None:
    """Three facts of four against two: which method is chosen, why, and how many facts would decide."""
    hidden = {
        "yarn": [(True, 19.0), (True, 22.0), (False, 10.0), (False, 20.0)],
        "rerope+log_n": [(True, 17.0), (True, 16.0), (True, 17.0), (False, 14.0)],
        "plain": [(False, -3.0), (False, -7.0), (False, -1.0), (False, -4.0)],
    }
    result = small_result({name: {16384: facts} for name, facts in hidden.items()})
    result = replace(result, too_short="The budget of 0:12:00 was too short.")
    text = write_page(result, {name: config_of(name) for name in hidden}, tmp_path)
    html = (tmp_path / "stretch.html").read_text()
    said = (
        "Undecided between rerope+log_n and yarn at 16,384 tokens, 2 times its training length: they find 3 and 2 of 4 "
        "facts there (plain: 0)"
    )
    assert text.startswith(f"# {said}\n") and f'<p class="claim">{said}</p>' in html
    overlay = (tmp_path / "best.yml").read_text()
    assert f"```yaml\n{overlay}```\n" in text and "```json\n{\n" in text
    assert "# yarn, " in overlay and "; undecided between it and rerope+log_n\n" in overlay
    for shown in (
        "The budget of 0:12:00 was too short. About ",
        "--export and --chat use yarn, the simplest",
        "Its perplexity at 8,192 tokens is 1.0% higher",
    ):
        assert shown in text and shown in html
    facts = re.search(r"About (\d+) facts .*power of 80%\); they would take", text)
    compared = decide(result).compared[0]
    assert facts is not None and compared.needed is not None and float(facts[1]) == compared.needed
    assert re.search(r"\| yarn +\| +16,384 \| .*2/4 \(\d+% to \d+%\) \|", text), "intervals of the facts found"
    assert re.search(r"\| yarn +\| +4 \| +-25% \(-\d+% to \+\d+%\) \| .* undecided \|", text)
    assert re.search(r"\| rerope\+log_n \| 16,384 \| +2/2 \| +1/2 \|", text), "passkeys and needles"
    assert "stretch.svg" in text and b"share of facts found" in (tmp_path / "stretch.svg").read_bytes()


@pytest.mark.parametrize(("count", "verb"), [(1, "1 was"), (2, "2 were")])
def test_few_facts_are_not_compared(count: int, verb: str) -> None:
    hidden = [(True, 16.0), (False, 9.0)][:count]
    result = small_result({"yarn": {16384: hidden}, "rerope": {16384: hidden}})
    (found, *_) = basis_of(result, decide(result))
    assert found.startswith(f"Methods are compared from 4 facts on, and {verb} measured; they would take about 0:00:")


def test_contrasts_in_sequence(tmp_path: Path) -> None:
    """The first contrast is decided, and the later ones up to one without a difference."""
    result = stretch_result()
    text = write_page(result, {name: config_of(name) for name in PLAN.methods}, tmp_path, PLAN)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "2x" in line]
    assert len(rows) == len(PLAN.contrasts) == 6
    found = paired_differences(result, PLAN, PLAN.contrasts[0])
    assert found is not None and len(found) == 24 and fmean(found) == pytest.approx(-4.0, abs=0.1)
    more = PLAN.model_copy(update={"cases": dict.fromkeys(PLAN.cases, 25)})
    assert paired_differences(result, more, PLAN.contrasts[0]) is None
    verdicts = [row.split("|")[-2].strip() for row in rows]
    assert verdicts == ["lower", "lower", "higher", "not decided", "not tested", "not tested"]
    assert power_of(PLAN.contrasts[0], 24) == pytest.approx(0.963, abs=1e-3) and " 0.96 |" in rows[0]


def test_nothing_beyond_the_training_length() -> None:
    result = stretch_result()
    short = {key: entry.model_copy(update={"cases": []}) for key, entry in entries_of(result).items() if key[1] == 8192}
    cut = with_entries(result, short)
    assert cut.lengths() == [8192] and sentence(cut, decide(cut)).startswith(
        "Nothing beyond the training length of 8,192 tokens"
    )
    whole = replace(cut, left_out=())
    assert sentence(whole, decide(whole)).endswith(" 8,192 tokens was measured"), "no reason is listed"


def without_facts(result: StretchResult, *absent: tuple[str, int]) -> StretchResult:
    for method, length in absent:
        result = changed(result, method, length, cases=[])
    return result


def with_losses_of(result: StretchResult, one: str, other: str) -> StretchResult:
    """The result in which `other` has the losses of `one`."""
    for (name, length), entry in entries_of(result).items():
        if name == one:
            result = changed(result, other, length, nlls=entry.nlls)
    return result


def test_a_method_without_facts_is_not_better_than_one_with_them() -> None:
    """With the losses of the best method, and no facts where the budget ended."""
    best, other = "rerope+log_n", "rerope"
    result = with_losses_of(stretch_result(), best, other)
    longest = without_facts(result, (other, 32768))
    assert longest.reach(other) == 16384 and longest.reach(best) == 32768 and longest.ranked()[0] == best
    assert without_facts(result, (other, 8192)).reach(other) == 32768, "the plain model finds facts at 1x"
    worse = [each.model_copy(update={"margin": -1.0}) for each in result.facts("plain", 8192)]
    lost = changed(result, "plain", 8192, cases=worse)
    assert without_facts(lost, (other, 8192)).reach(other) == 0
    neither = without_facts(result, *((name, 32768) for name in result.supported))
    assert neither.reach(best) == neither.reach(other) == 32768
    said = sentence(neither, decide(neither))
    assert said.startswith("Undecided between") and said.endswith("only their perplexity was measured there")


def test_among_equals_a_missing_margin_does_not_decide() -> None:
    """Neither method holds at the longest length; the better one has facts there, and its margin is below 0."""
    worse, better = "yarn:2", "yarn:4"
    result = with_losses_of(stretch_result(), worse, better)
    for length in LENGTHS:
        cases = [case.model_copy(update={"margin": case.margin + 1}) for case in result.facts(worse, length)]
        result = changed(result, better, length, cases=cases)
    ranked = without_facts(result, (worse, 32768)).ranked()
    assert ranked.index(better) < ranked.index(worse)


def test_found_facts_decide_before_margins() -> None:
    """`one` and `other` have equal losses; `one` has the greater margins at the longest length."""
    one, other = "rerope+log_n", "rerope"

    def ranked(least: int, others: int) -> list[str]:
        """The better first, if they find the facts from these numbers on."""
        result = with_losses_of(stretch_result(), one, other)
        for length in LENGTHS:
            cases = result.facts(one, length)
            for name, first, margin in ((one, least, 17.0), (other, others, 16.0)):
                found = [
                    case.model_copy(update={"found": place >= first, "margin": margin})
                    for place, case in enumerate(cases)
                ]
                result = changed(result, name, length, cases=found)
        return [name for name in result.ranked() if name in (one, other)]

    assert ranked(1, 0) == [other, one]
    assert ranked(0, 1) == ranked(0, 0) == ranked(99, 99) == [one, other]


def test_an_entry_without_numbers_is_not_measured() -> None:
    result = changed(without_facts(stretch_result(), ("plain", 8192)), "plain", 8192, nlls=[])
    assert result.perplexity("plain", 8192) is result.margin("plain", 8192) is result.share("plain", 8192) is None
    assert result.windows("plain", 8192) == result.reach("plain") == 0 and result.losses("plain", 8192) == []
    plain = with_entries(result, {("plain", 8192): entries_of(result)["plain", 8192]})
    assert plain.lengths() == []


def test_names_and_numbers_of_a_plan(tmp_path: Path) -> None:
    """A factor has several spellings, and `plain` is always measured."""
    path, text = tmp_path / "plan.yml", "{title: T, methods: ['yarn:2.0'], to: 2, contrasts: [{at: 2, method: 'yarn:2"
    path.write_text(f"{text}.0', other: plain}}]}}")
    plan = read_plan(path)
    assert plan.methods == ["yarn:2"] and (plan.contrasts[0].method, plan.contrasts[0].other) == ("yarn:2", "plain")
    path.write_text("{title: T, methods: [yarm], to: 2}")
    with pytest.raises(EvaluationError, match=r"plan\.yml: methods: yarm: unknown method"):
        read_plan(path)
    for to in (".inf", "1e9"):
        path.write_text(f"{{title: T, methods: [plain], to: {to}}}")
        with pytest.raises(EvaluationError, match="to: Input should be less than .*1024"):
            read_plan(path)
