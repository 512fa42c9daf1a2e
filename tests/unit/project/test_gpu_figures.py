"""The figures of a GPU in README.md and benchmarks/h100.md are those of benchmarks/gpu.jsonl."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LENGTHS = (512, 2048, 8192, 32768)
OTHERS = {"coca": "CoCA", "rerope": "rotary + ReRoPE", "coca_rerope": "CoCA + ReRoPE", "pope": "PoPE", "alibi": "ALiBi"}
"""Methods beside rotary, as they are called in the table of benchmarks/h100.md."""


def records(*parts: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks/gpu.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["part"] in parts]


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def attention() -> dict[tuple[str, int], dict[str, Any]]:
    return {(one["method"], one["length"]): one for one in records("attention.methods", "attention.long")}


def test_the_table_of_attention_has_medians_and_quartiles() -> None:
    page, measured = (ROOT / "benchmarks/h100.md").read_text(), attention()
    for method, name in OTHERS.items():
        cells = []
        for length in LENGTHS:
            low, median, high = measured[method, length]["ratio_quartiles"]
            cells.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} | ") and " to " in line)
        assert row.split(" | ", 2)[2] == f"{' | '.join(cells)} |"
    alone = " | ".join(f"{measured['rotary', length]['milliseconds']:.2f}" for length in LENGTHS)
    assert f"| rotary, milliseconds | cuDNN | {alone} |" in page


def test_the_time_of_rotary_beside_other_methods() -> None:
    """The first number of the run, of rotary at 512 tokens, is greater than all later ones."""
    measured = attention()
    times = {
        length: [measured[method, length]["milliseconds"] / measured[method, length]["ratio"] for method in OTHERS]
        for length in (512, 2048)
    }
    growth = [long / short for short, long in zip(times[512], times[2048], strict=True)]
    (fast, slow), (faster, slower) = ((min(times[length]), max(times[length])) for length in (512, 2048))
    assert slow < measured["rotary", 512]["milliseconds"]
    page = text_of("benchmarks/h100.md")
    assert f"took {fast:.2f} to {slow:.2f} ms at 512 tokens and {faster:.2f} to {slower:.2f} ms at 2,048" in page
    assert f"four times the tokens take {min(growth):.1f} to {max(growth):.1f} times as long" in page


def test_the_readme_says_what_failed_on_the_gpu() -> None:
    readme, coca = text_of("README.md"), [attention()["coca", length] for length in LENGTHS]
    medians = [one["ratio"] for one in coca]
    low, high = (choose(one["ratio_quartiles"][end] for one in coca) for choose, end in ((min, 0), (max, 2)))
    assert f"took {min(medians):.2f} to {max(medians):.2f} times as long with CoCA as with RoPE" in readme
    assert f"quartiles from {low:.2f} to {high:.2f}" in readme
    (ours, llama), (tests,) = records("step.coca_16", "step.llama_16"), records("tests.pytest")
    assert f"a training step took {ours['seconds'] / llama['seconds']:.1f} times as long as with" in readme
    assert f"{tests['failed']} of {tests['failed'] + tests['passed']} GPU tests failed" in readme
