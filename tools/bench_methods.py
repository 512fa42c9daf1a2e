"""Compare position methods and attention variants with rotary: errors, memory, step time and kernel launches.

    python tools/bench_methods.py --measure errors memory
    python tools/bench_methods.py --measure time --only rotary rerope dual_chunk

For every row of METHODS, on the CPU in float32:

- errors: the output of one attention layer at four times the training length of 128 is compared with the float64
  oracle. The error is the norm of the difference, divided by the norm of the output. If transformers implements the
  method, a second error is the largest difference from transformers, divided by the standard deviation. It compares
  logits for imported families, and one layer's output for gpt-oss, Qwen3-Next and Llama 4;
- memory: growth of resident memory in the forward and backward pass of one layer with 4 heads of 64 features, at 16,384
  tokens;
- time: forward and backward pass of a model with 4 such layers on 4 samples of 512 tokens, alternating with rotary;
- launches: kernel launches of one layer, forward and backward, on the simulated CUDA device (tests/pretend). Run the
  script with the PyTorch build of that device.

The script appends one JSON line per method to --output, and prints it as a row of the table in studies/log.md.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca import build_model, load_config, methods
from megatron_coca.evaluation.results import measured
from megatron_coca.evaluation.tasks.speed.measure import interleaved
from megatron_coca.model import LanguageModelLoss
from tests.parity import stock_layers
from tests.parity.layer_oracle import SHAPE, layer_of, oracle_error
from tools import bench_families
from tools.records import ChildProcess, append_records, benchmark_parser, compared

ERROR_LENGTH, MEMORY_LENGTH = 512, 16384
OPTIONS: dict[str, Any] = {"factor": 4.0, "target_length": 4096, "proportion": 0.5}
OPTIONS |= {"short_factor": [1.0] * 32, "long_factor": [1.0 + j / 8 for j in range(32)]}
"""Values of required options, for heads of 64 features."""


def _declared(key: str, left_out: str = "") -> dict[str, dict[str, Any]]:
    choices = {name: choice for name, choice in methods.TABLES[key].items() if name != left_out}
    return {
        name: {key: {choice.selector: name} | {option: OPTIONS[option] for option in choice.lacking({})}}
        for name, choice in choices.items()
    }


METHODS: dict[str, dict[str, Any]] = {
    "rotary": {},
    **{name: {"pos_emb": name} for name in ("coca", "coca_strict", "pope", "xpos")},
    "polar: power 2": {"pos_emb": "polar", "pos_emb_options": {"power": 2}},
    "polar: pairs": {"pos_emb": "polar", "pos_emb_options": {"frequencies": "pair"}},
    "polar: relu_mean": {"pos_emb": "polar", "pos_emb_options": {"magnitude": "relu_mean"}},
    "initial_angle": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": -0.7}},
    "initial_angle: random": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}},
    **_declared("relative_positions"),
    **_declared("rope_scaling", "default"),
    "rope_id": {"rotary_pct": 0.5, "rotary_frequencies": {"type": "rope_id"}},
    "resonance": {"rope_scaling": {"rope_type": "default", "resonance": True}},
    **_declared("logit_scaling", "none"),
    **{name: {"forgetting_gate": name} for name in methods.names("forgetting_gate", compute=None)},
    **{name: {"pos_emb": name} for name in methods.names("pos_emb", biased=True, compute=None)},
    "qk_norm: head": {"qk_norm": "head"},
    "qk_norm: projection": {"qk_norm": "projection"},
    "use_qk_layernorm": {"use_qk_layernorm": True},
    "sliding_window_width": {"sliding_window_width": 255},
    "attention_chunk_size": {"attention_chunk_size": 256},
    "sink_logits": {"sink_logits": True},
    **{f"attention_output_gate: {kind}": {"attention_output_gate": kind} for kind in ("head", "feature")},
    "gau": {"attention_config": [[["gau"], "all"]]},
}
"""Name -> keys that differ from those of a rotary model."""
FAMILIES = {"rotary": "gpt_neox", "llama3": "llama", "qk_norm: head": "qwen3", "qk_norm: projection": "olmo2"}
FAMILIES |= {"sliding_window_width": "mistral", "temperature": "ministral3"}
FAMILIES |= {f"layers of {name}": name for name in ("gemma3", "olmo3", "smollm3", "cohere2")}
"""Method or layer pattern -> the transformers family that implements it."""
LAYERS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "sink_logits": partial(stock_layers.gpt_oss, 64, None, torch.float32),
    "attention_output_gate: feature": partial(stock_layers.qwen3_next, 64, torch.float32),
    "attention_chunk_size": partial(stock_layers.llama4, 64, True, torch.float32),
    "layers of llama4, without positions": partial(stock_layers.llama4, 64, False, torch.float32),
}
"""Method or layer pattern -> a function that returns our output and transformers' output of one layer."""


def stock_error(name: str) -> float | None:
    """Return the error against transformers, or None if transformers does not implement the method."""
    if name in LAYERS:
        ours, theirs = LAYERS[name]()
        return float((ours - theirs).abs().max() / theirs.std())
    if name not in FAMILIES:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        bench_families.write_model(FAMILIES[name], Path(scratch, "model"))
        found = bench_families.logit_errors(Path(scratch, "model"))
    return found["error_4L"] / found["logits_std"]


def memory_of(name: str) -> Callable[[int], int]:
    """Return a function that takes a number of tokens and returns the memory growth of its process in bytes."""

    def grown(length: int) -> int:
        layer, config = layer_of(METHODS[name])
        for tokens in (64, length):  # the first pass loads libraries
            hidden = torch.randn(1, tokens, config.model.hidden_size, requires_grad=True)
            with measured(torch.device("cpu")) as meter:
                layer(hidden).sum().backward()
        return meter.peak_memory_bytes or 0

    return grown


def stepper(name: str) -> Callable[[], None]:
    """Return a function that runs the forward and backward pass of a model with the method."""
    config = load_config([], SHAPE | {"num_layers": 4} | METHODS[name])
    loss, tokens = LanguageModelLoss(build_model(config)).train(), torch.randint(512, (4, 513))
    return lambda: loss(tokens).backward()


def time_ratio(name: str, rounds: int) -> dict[str, Any]:
    """Return the median and the quartiles, over the rounds, of the time ratio to rotary."""
    calls = {number: stepper(each) for number, each in enumerate(("rotary", name))}
    base, own = interleaved(calls, rounds, torch.device("cpu")).values()
    return compared(own, base)


def launches(name: str) -> float:
    """Return the number of kernel launches per layer on the simulated CUDA device."""
    inputs = [f"{key}={json.dumps(value)}" for key, value in (SHAPE | METHODS[name]).items()]
    command = [sys.executable, "-m", "tests.pretend", "layer", *inputs]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(said.partition("launches per layer: ")[2].split()[0])


def errors(name: str, rounds: int) -> dict[str, Any]:
    """Return a method's errors against the oracle and transformers. A layer pattern is compared only with
    transformers.
    """
    own = oracle_error(METHODS[name], ERROR_LENGTH) if name in METHODS else None
    return {"oracle_error": own, "stock": FAMILIES.get(name), "stock_error": stock_error(name)}


MEASURES: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "errors": errors,
    "memory": lambda name, rounds: {"memory_bytes": ChildProcess(memory_of, name)(MEMORY_LENGTH)},
    "time": time_ratio,
    "launches": lambda name, rounds: {"launches": launches(name)},
}


def row(found: dict[str, Any]) -> str:
    """Return a record as a row of the table in studies/log.md."""
    shown = [("oracle_error", "{:.1e}", 1.0), ("stock_error", "{:.1e}", 1.0), ("memory_bytes", "{:.0f}", 2**-20)]
    shown += [("ratio", "{:.2f}", 1.0), ("launches", "{:.0f}", 1.0)]
    cells = (text.format(found[key] * unit) if found.get(key) is not None else "" for key, text, unit in shown)
    return f"| {' | '.join([found['method'], *cells])} |"


def main(arguments: list[str] | None = None) -> int:
    """Measure every method, print and append its record; return the exit status."""
    every = list(dict.fromkeys((*METHODS, *FAMILIES, *LAYERS)))
    parser = benchmark_parser(__doc__, "methods.jsonl", rounds=15)
    parser.add_argument("--only", nargs="+", choices=every, metavar="METHOD", help="default: all")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=["errors", "memory", "time"])
    options = parser.parse_args(arguments)
    for name in options.only or every:
        found: dict[str, Any] = {"benchmark": "position method", "method": name}
        measures = [each for each in options.measure if name in METHODS or each == "errors"]
        for measure in measures:
            found |= MEASURES[measure](name, options.rounds)
        if measures:
            append_records(options.output, [found])
            print(row(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
