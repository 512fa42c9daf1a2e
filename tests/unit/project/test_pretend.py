"""The stand-in CUDA device: budgets, the order of its log, and generated entry points. It runs by `make test-cuda`."""

import pytest
from pydantic import ValidationError

from tests.pretend import budgets, build, order
from tests.pretend.device import Event
from tests.pretend.scenarios import SCENARIOS

COMPUTE, COMMUNICATION = 0, 64


def test_every_scenario_has_a_budget_and_every_budget_a_scenario() -> None:
    known = budgets.read()
    assert set(known.scenarios) == set(SCENARIOS)
    assert known.command == budgets.COMMAND
    assert set(known.versions) == set(budgets.PACKAGES)


def test_what_is_allowed_was_measured() -> None:
    for name, budget in budgets.read().scenarios.items():
        assert not budget.measured or budget.allowed.keys() <= budget.measured.keys(), name


def test_a_counter_of_the_wrong_form_is_an_error() -> None:
    known = budgets.read().model_dump()
    known["scenarios"]["step: coca"] = {"allowed": {"launches": "few"}, "measured": {}}
    with pytest.raises(ValidationError, match=r"step: coca.*allowed.*launches"):
        budgets.Budgets.model_validate(known)


KNOWN = budgets.Budgets(
    command="",
    commit="",
    capability=90,
    versions={},
    scenarios={"step": budgets.Budget(allowed={"launches": 10, "share reduced": 0.9}, measured={"launches": 9})},
)


def test_violations_name_scenario_counter_measured_and_allowed() -> None:
    assert not budgets.violations(KNOWN, {"step": {"launches": 10, "share reduced": 0.9}})
    assert budgets.violations(KNOWN, {"step": {"launches": 11, "share reduced": 0.8}}) == [
        "step: launches: 11, at most 10 allowed",
        "step: share reduced: 0.8, at least 0.9 allowed",
    ]
    assert budgets.violations(KNOWN, {"step": {"launches": 1}}) == [
        "step: share reduced: not measured, at least 0.9 allowed"
    ]
    assert "no budget" in budgets.violations(KNOWN, {"other": {"launches": 1}})[0]
    assert "ended with an error" in budgets.violations(KNOWN, {"step": {budgets.FAILED: 1}})[0]


def test_an_update_keeps_limits_and_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "versions", lambda: {"torch": "2"})
    after = budgets.updated(KNOWN, {"step": {"launches": 7}, "new": {"launches": 1}, "other": {budgets.FAILED: 1}}, 80)
    assert after.scenarios["step"].allowed == KNOWN.scenarios["step"].allowed
    assert after.scenarios["step"].measured == {"launches": 7}
    assert after.scenarios["new"].allowed == {}
    assert "other" not in after.scenarios
    assert (after.capability, after.versions) == (80, {"torch": "2"})
    assert "| step | launches | 7 | 9 | 10 |" in budgets.report(KNOWN, {"step": {"launches": 7}}, 80)


def _product() -> Event:
    return Event("launch", order.PRODUCTS[0], COMPUTE, 0)


def _reduction() -> Event:
    return Event("collective", "ncclAllReduce", COMMUNICATION, order.LARGE)


def _record(stream: int, handle: int) -> Event:
    return Event("order", "event recorded", stream, handle)


def _wait(stream: int, handle: int) -> Event:
    return Event("order", "stream waits for event", stream, handle)


def test_a_collective_overlaps_with_products_that_do_not_wait_for_it() -> None:
    started = [_product(), _record(COMPUTE, 1), _wait(COMMUNICATION, 1), _reduction()]
    finished = [_record(COMMUNICATION, 2), _wait(COMPUTE, 2)]
    (found,) = order.collectives([*started, _product(), *finished, _product()])
    assert found.beside == 1
    (found,) = order.collectives([*started, *finished, _product()])
    assert found.beside == 0
    assert order.overlapped([found], order.REDUCTIONS) == 0


def test_a_wait_of_the_host_ends_what_was_running() -> None:
    (found,) = order.collectives([_reduction(), Event("wait", "cudaStreamSynchronize", COMMUNICATION, 0), _product()])
    assert found.beside == 0
    (found,) = order.collectives([_reduction(), Event("wait", "cudaStreamSynchronize", COMPUTE, 0), _product()])
    assert found.beside == 1
    (found,) = order.collectives([_reduction(), Event("wait", "cudaDeviceSynchronize", 0, 0), _product()])
    assert found.beside == 0
    recorded, awaited = _record(COMMUNICATION, 1), Event("order", "host waits for event", 0, 1)
    (found,) = order.collectives([_reduction(), recorded, awaited, _product()])
    assert found.beside == 0


def test_small_collectives_do_not_count_and_none_counts_as_overlapped() -> None:
    assert order.collectives([Event("collective", "ncclAllReduce", COMMUNICATION, 8)]) == []
    assert order.overlapped([], order.REDUCTIONS) == 1


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("cublasDgemm_v2", "LAUNCHED"),
        ("cublasSetWorkspace_v2", "OTHER_CALL"),
        ("cublasLtMatmulDescCreate", "calloc"),
        ("cusolverDnCreate", "calloc"),
        ("cudaIpcGetMemHandle", "refuse"),
        ("ncclCommAbort", "OTHER_CALL"),
    ],
)
def test_generated_entry_points_answer_by_their_names(name: str, part: str) -> None:
    assert build.STOOD_IN.match(name)
    assert part in build._entry_point(name)


def test_other_libraries_keep_their_entry_points() -> None:
    for name in ("nvrtcCompileProgram", "cufftCreate", "cuptiFinalize", "cusparseLtInit", "malloc"):
        assert not build.STOOD_IN.match(name)
