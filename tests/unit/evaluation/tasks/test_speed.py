"""`megatron-coca evaluate speed`: all methods do the same work side by side, and memory is that of a call."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.commands.evaluate import main
from megatron_coca.config import Config, load_config
from megatron_coca.evaluation import subject
from megatron_coca.evaluation.options import Variant
from megatron_coca.evaluation.results import EvaluationError, Missing, Store, read_record
from megatron_coca.evaluation.tasks.speed import measure as speed
from megatron_coca.evaluation.tasks.speed.measure import (
    WORKLOADS,
    TimedMethod,
    Workload,
    build_methods,
    empty_result,
    interleaved,
    measure,
    quartiles,
    ratio,
    try_once,
)
from megatron_coca.evaluation.tasks.speed.task import KINDS_OF_WORK, KindOfWork, SpeedResult, add_speed_options
from megatron_coca.model import build_model

ROOT = Path(__file__).parents[4]
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 50}
CPU = torch.device("cpu")


def config(**keys: Any) -> Config:
    return load_config([], MODEL | {"pos_emb": "rotary"} | keys)


def build(
    base: Config, methods: list[str], *variants: Variant, dtype: torch.dtype = torch.float32
) -> tuple[list[TimedMethod], list[Missing]]:
    return build_methods(base, methods, variants, "cpu", dtype)


def tried(method: TimedMethod, what: KindOfWork, *lengths: int) -> list[int | Missing]:
    """The peak memory at each length, or why there is none."""
    found = [try_once(method, what, length, 1) for length in lengths]
    return [each if isinstance(each, Missing) else each[1] for each in found]


REROPE = Variant("rerope", (), ("relative_positions.type=rerope", "relative_positions.window=4"))


def test_all_models_have_one_set_of_weights() -> None:
    built, refused = build(config(), ["rotary", "coca", "rpe"])
    first, *others = (dict(each.model.named_parameters()) for each in built)
    assert not refused and [each.label for each in built] == ["rotary", "coca", "rpe"]
    for other in others:
        assert all(other[name] is parameter for name, parameter in first.items())
    assert len(others[1]) == len(first) + 1, "T5's table is its own"
    ids, alone = torch.zeros(1, 8, dtype=torch.long), build_model(built[1].config)
    torch.testing.assert_close(built[1].model(ids), alone(ids))


def test_plain_rope_is_added_where_it_is_missing() -> None:
    built, _ = build(config(), ["coca"], REROPE)
    kernels = [(each.label, speed.backend_of(each.model, each.config, "cpu", "decode")) for each in built]
    assert kernels == [("coca", "sdpa"), ("rerope", "merge"), ("rotary", "sdpa")]
    assert [each.label for each in build(config(), ["rotary", "coca"])[0]] == ["rotary", "coca"]


def test_options_of_a_method_are_not_passed_to_others() -> None:
    base = config(pos_emb="pope", pos_emb_options={"offset": "uniform"})
    built, left_out = build(base, ["pope", "coca"])
    assert not left_out and [each.label for each in built] == ["pope", "coca", "rotary"]
    assert built[0].config.position.pos_emb_options.given == {"offset": "uniform"}


def test_methods_that_cannot_be_built_are_noted_and_the_others_stay() -> None:
    base = config(rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    wrong = Variant("wrong", (), ("no_such_key=1",))
    masked = Variant("masked", (), ("pos_emb=alibi", "rope_scaling=null", "attention_backend=merge"))
    built, refused = build(base, ["rotary", "alibi"], wrong, masked)
    assert [(each.at, each.kind) for each in refused] == [(name, "refused") for name in ("alibi", "wrong", "masked")]
    assert all(each.reason for each in refused)
    assert [each.label for each in built] == ["rotary", "plain rotary"]
    with pytest.raises(EvaluationError, match="--methods rotary: duplicate"):
        build(base, ["rotary"], Variant("rotary"))


def test_methods_take_turns() -> None:
    order: list[str] = []
    times = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 3, CPU)
    assert order == ["a", "b"] * 4 and {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3}


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that becomes ten times slower changes none of them."""
    found = ratio([2.0, 20.0, 30.0], [1.0, 10.0, 10.0], "rotary")
    assert (found.median, found.low, found.high, found.against) == (2.0, 2.0, 2.5, "rotary")
    assert quartiles([1.0]) == (1.0, 1.0, 1.0) and quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize("pos_emb", ["rotary", "coca", "alibi", "rpe"])
@pytest.mark.parametrize("what", KINDS_OF_WORK)
def test_a_call_can_be_repeated(what: str, pos_emb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(config(pos_emb=pos_emb, num_kv_heads=2))
    caches = []
    original = type(model).new_cache
    monkeypatch.setattr(
        type(model), "new_cache", lambda *args, **rest: caches.append(original(*args, **rest)) or caches[0]
    )
    work = WORKLOADS[what](model, 8, 2)
    for _ in range(2):
        work.call()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(layer.length == 8 for cache in caches for layer in cache.layers)
    assert (work.tokens, work.passes) == ((2, speed.DECODED) if what == "decode" else (16, 1))
    assert len(caches) == (what == "decode")


def test_a_length_that_a_method_does_not_have_is_noted() -> None:
    (method, *_), _ = build(config(), ["learned"])
    reached, beyond = tried(method, "model forward", 16, 17)
    assert isinstance(reached, int) and isinstance(beyond, Missing)
    assert beyond.kind == "refused" and "16 learned positions" in beyond.reason


def test_memory_that_runs_out_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to")

    monkeypatch.setitem(WORKLOADS, "layer forward", full)
    (method,), _ = build(config(), ["rotary"])
    (found,) = tried(method, "layer forward", 8)
    assert isinstance(found, Missing) and found.kind == "out of memory" and "ran out of memory" in found.reason


def test_the_peak_counts_tensors_held_at_once() -> None:
    def grow(count: int) -> Any:
        return lambda: [torch.empty(1000, 256) for _ in range(count)]

    one, three = (speed.measured_peak(grow(count), CPU) for count in (1, 3))
    assert one == 1024_000 and three == 3 * one
    assert speed.measured_peak(lambda: [torch.empty(1000, 256).sum() for _ in range(3)], CPU) < 2 * one


def test_memory_counts_tensors_that_a_call_holds_at_once() -> None:
    """The reference holds the scores of four heads, in float32 in half precision too."""
    peaks = []
    for dtype in (torch.float32, torch.bfloat16):
        (method, *_), _ = build(config(attention_backend="reference"), ["rotary"], dtype=dtype)
        short, long = tried(method, "layer forward", 512, 1024)
        assert isinstance(short, int) and isinstance(long, int)
        assert long > 4 * 4 * 1024**2 and 3 < long / short < 5
        peaks.append(long)
    assert 0.8 < peaks[1] / peaks[0] < 1.2


def parsed() -> Namespace:
    parser = ArgumentParser()
    add_speed_options(parser)
    return parser.parse_args(["--config", "shape.yml", "--lengths", "8"])


def arguments(tmp_path: Path, *more: str) -> list[str]:
    path = tmp_path / "shape.yml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in (MODEL | {"pos_emb": "rotary"}).items()))
    given = ["speed", "--config", str(path), "--lengths", "8", "--rounds", "2", "--device", "cpu"]
    return [*given, *more]


def test_the_command_measures_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "speed.json"
    more = ("--methods", "coca", "--variant", "rerope", str(ROOT / "configs/extend/rerope.yml"))
    assert main(arguments(tmp_path, *more, "--output", str(output))) == 0
    result = read_record(output, SpeedResult, "a speed result")
    expected = {(what, 8, method) for what in KINDS_OF_WORK for method in ("coca", "rerope", "rotary")}
    found = {(cell.what, cell.length, cell.method): cell for cell in result.results}
    assert found.keys() == expected and not result.missing
    assert [cell.key for cell in result.results] == sorted(cell.key for cell in result.results)
    for (_, _, method), cell in found.items():
        assert cell.to_rope.against == "rotary" and (cell.to_rope.median == 1.0 or method != "rotary")
        assert cell.peak_memory_bytes is not None and cell.peak_memory_bytes > 0
        assert 0 < cell.quartiles[0] <= cell.seconds <= cell.quartiles[1]
    decoded = {method: found["decode", 8, method].cache_bytes_per_token for method in ("rotary", "coca")}
    assert decoded == {"rotary": 2 * 32 * 4 * 2, "coca": 2 * 32 * 4 * 2}
    assert result.machine.threads == torch.get_num_threads() and "torch" in result.machine.versions
    shown = capsys.readouterr().out
    assert "shape: batch 1, cpu, float32" in shown and "time against rotary" in shown
    assert all(f"{what.capitalize()}: milliseconds by length" in shown for what in KINDS_OF_WORK)
    assert main(arguments(tmp_path, "--methods", "rotary", "--output", str(output))) == 2
    assert "times from two runs cannot be combined" in capsys.readouterr().err


def test_a_wrong_value_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments(tmp_path, "--methods", "roatry"))
    assert "--methods: 'roatry' is" in capsys.readouterr().err


def test_without_a_time_of_rope_there_is_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    built, _ = build(config(), ["coca", "rotary"])
    store = Store(None, empty_result(parsed(), config(), built[0], "cpu"))
    slow = Missing(at="layer forward, length 8, rotary", kind="refused", reason="it is slow")

    def first(method: TimedMethod, *rest: Any) -> tuple[Workload, int] | Missing:
        return slow if method.label == "rotary" else try_once(method, *rest)

    monkeypatch.setattr(speed, "try_once", first)
    measure(built, "layer forward", 8, 1, 2, store)
    assert [(cell.method, cell.to_rope) for cell in store.result.results] == [("coca", None)]
    assert store.result.missing == [slow]


@pytest.mark.parametrize(
    ("kind", "trains", "decodes"),
    [("model forward", False, False), ("layer forward+backward", True, False), ("decode", False, True)],
)
def test_the_recorded_kernel_is_that_of_the_work(
    kind: KindOfWork, trains: bool, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN computes whole windows, but does not decode."""
    monkeypatch.setattr(subject, "cuda_kernel", lambda *given: f"trains {given[-2]}, decodes {given[-1]}")
    (method, *_), _ = build(config(), ["rotary"])
    shown = speed.backend_of(method.model, method.config, "cuda", kind)
    assert shown == f"sdpa (trains {trains}, decodes {decodes})"
