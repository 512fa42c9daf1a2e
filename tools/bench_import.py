"""Time and memory of importing a synthetic LLaMA of 1 billion parameters, compared with a conversion by transformers.

    python tools/bench_import.py                                  # 16 layers, float16, shards of 500 MB, 3 rounds
    python tools/bench_import.py --layers 22 --dtype bfloat16 --rounds 5

Each way runs in its own process, in turns. Timed is the call alone, without Python's imports. The peak is that of
resident memory (VmHWM) above that just before the call; mapped pages of files count. The target is 1.3 times the
largest shard plus one layer. `transformers` loads the model with AutoModelForCausalLM, packs its weights and writes
them with safetensors' own writer. Appends one JSON line for each way to --output.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.checkpoints import weight_map
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.checkpoints.weights import DTYPES, WeightEntry, Weights, write_safetensors
from megatron_coca.config import Config, load_config
from megatron_coca.model import empty_model
from tools.records import append_records, benchmark_parser, last_json

HIDDEN, HEADS, INTERMEDIATE, VOCABULARY, LENGTH = 2048, 16, 5504, 32000, 2048
TARGET = 1.3
"""Peak memory in units of the largest shard, to which one layer is added."""
STATUS = Path("/proc/self/status")
TICK = 0.01


def main() -> None:
    """Measure all ways, or with --one that of a measuring process."""
    parser = benchmark_parser(__doc__, "import.jsonl", rounds=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--shard-mb", type=float, default=500.0)
    parser.add_argument("--folder", type=Path, help="folder for the synthetic model; removed at the end")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "SOURCE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, source, folder = options.one
        print(json.dumps(measured(WAYS[way], Path(source), Path(folder))))
        return
    with tempfile.TemporaryDirectory(prefix="import", dir=options.folder) as folder:
        facts, sources = synthesise(Path(folder), options.layers, DTYPES[options.dtype], int(options.shard_mb * 1e6))
        rounds = [dict(run_all(sources, Path(folder))) for _ in range(options.rounds)]
    records = [record(name, [costs[name] for costs in rounds], facts) for name in rounds[0]]
    append_records(options.output, records)


def run_all(sources: Mapping[str, Path], folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure every way once with every file format."""
    for kind, source in sources.items():
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="result", dir=folder) as result:
                command = [sys.executable, __file__, "--one", way, str(source), f"{result}/imported"]
                answer = subprocess.run(command, capture_output=True, text=True, check=True)
            yield f"{way}, {kind}", last_json(answer.stdout)


def record(name: str, rounds: list[dict[str, float]], facts: dict[str, Any]) -> dict[str, Any]:
    """Print and return one line of the result."""
    costs = {key: statistics.median(measurement[key] for measurement in rounds) for key in rounds[0]}
    target = TARGET * facts["largest_shard_bytes"] + facts["layer_bytes"]
    costs |= {"peak_of_target": costs["peak_bytes"] / target, "target_bytes": target}
    print(
        f"{name:26} {costs['seconds']:6.1f} s, peak {costs['peak_bytes'] / 1e6:6,.0f} MB over the imports: "
        f"{costs['peak_of_target']:.2f} of the target ({target / 1e6:,.0f} MB)"
    )
    seconds = [measurement["seconds"] for measurement in rounds]
    return {"benchmark": "import", "way": name, **facts, **costs, "seconds_rounds": seconds}


def synthesise(
    folder: Path, layers: int, dtype: torch.dtype, shard_bytes: int
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Write one random model in shards of safetensors and of pickles; return its sizes and each format's folder."""
    weights = random_weights(model_config(layers), dtype)
    sources = {"safetensors": folder / "safetensors", "pickled": folder / "pickled"}
    for source in sources.values():
        source.mkdir()
        (source / "config.json").write_text(json.dumps(foreign_config(layers)))
    shards = list(weights.shards(shard_bytes))
    for number, shard in enumerate(shards, 1):
        suffix = f"{number:05}-of-{len(shards):05}"
        write_safetensors(sources["safetensors"] / f"model-{suffix}.safetensors", shard, {"format": "pt"})
        torch.save(dict(shard), sources["pickled"] / f"pytorch_model-{suffix}.bin")
    for source, index in zip(sources.values(), ("model.safetensors", "pytorch_model.bin"), strict=True):
        files = sorted(path for path in source.iterdir() if path.name != "config.json")
        weight_files = {name: file.name for shard, file in zip(shards, files, strict=True) for name in shard.entries}
        (source / f"{index}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_files}))
    sizes = {name: entry.nbytes for name, entry in weights.entries.items()}
    return {
        "parameters": sum(sizes.values()) // dtype.itemsize,
        "dtype": str(dtype).removeprefix("torch."),
        "shards": len(shards),
        "largest_shard_bytes": max(sum(entry.nbytes for entry in shard.entries.values()) for shard in shards),
        "layer_bytes": sum(size for name, size in sizes.items() if ".layers.0." in name),
    }, sources


def model_config(layers: int) -> Config:
    """Return the config of the synthetic model."""
    shape = {"num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "seq_length": LENGTH}
    shape |= {"vocab_size": VOCABULARY, "make_vocab_size_divisible_by": 1, "no_weight_tying": True}
    kind = {"pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 3 * INTERMEDIATE}
    biases = dict.fromkeys(("use_bias_in_attn_linear", "use_bias_in_mlp", "use_bias_in_norms"), False)
    return load_config([], shape | kind | biases)


def foreign_config(layers: int) -> dict[str, Any]:
    """Return its config.json for transformers."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": LENGTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }


def random_weights(config: Config, dtype: torch.dtype) -> Weights:
    """Return random weights by their transformers names, ordered by block, drawn when they are read."""
    own = empty_model(config, "cpu", training=False, memory="meta").state_dict()

    def draw(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(own[name].shape, generator=generator).mul_(0.02).to(dtype)

    drawn = Weights(
        {name: WeightEntry(dtype, tuple(tensor.shape)) for name, tensor in own.items()}, draw, Path("synthetic")
    )
    heads = weight_map.Heads(config.model.num_attention_heads, config.model.num_kv_heads)
    mapping = weight_map.expand(weight_map.llama("k_proj"), config.model.num_layers)
    theirs = weight_map.to_foreign_weights(drawn, mapping, heads)
    return theirs.only(sorted(theirs.entries, key=block))


def block(name: str) -> int:
    """Return the number of a weight's block, -1 for weights outside the blocks."""
    return next((int(word) for word in name.split(".") if word.isdigit()), -1)


def measured(way: Callable[[Path, Path], None], source: Path, folder: Path) -> dict[str, float]:
    """Return the seconds of a call, and the bytes of this process above those before it."""
    if way is through_transformers:
        import transformers.models.llama.modeling_llama  # noqa: F401  # imported before, so that it does not count
    before, peaks, done = status(), {"RssAnon": 0, "RssFile": 0}, threading.Event()

    def watch() -> None:
        while not done.wait(TICK):
            now = status()
            peaks.update({name: max(peak, now[name] - before[name]) for name, peak in peaks.items()})

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    way(source, folder)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {
        "seconds": seconds,
        "peak_bytes": status()["VmHWM"] - before["VmRSS"],
        "peak_anonymous_bytes": peaks["RssAnon"],
        "peak_mapped_bytes": peaks["RssFile"],
    }


def status() -> dict[str, int]:
    """Return this process's memory by /proc, in bytes."""
    fields = (line.split() for line in STATUS.read_text().splitlines() if line.startswith(("Vm", "Rss")))
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}


def by_us(source: Path, folder: Path) -> None:
    """Import with `import_checkpoint`."""
    import_checkpoint(source, folder)


def through_transformers(source: Path, folder: Path) -> None:
    """Load the whole model, pack its weights, and write them at once."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    layers = 1 + max(block(name) for name in state)
    heads = weight_map.Heads(HEADS, HEADS)
    rows = [row for row in weight_map.expand(weight_map.llama("k_proj"), layers) if row.theirs[0] in state]
    packed = {row.ours: row.packing.join([state[name] for name in row.theirs], heads).contiguous() for row in rows}
    folder.mkdir()
    save_file(packed, folder / "model.safetensors")


WAYS: dict[str, Callable[[Path, Path], None]] = {"import": by_us, "transformers": through_transformers}


if __name__ == "__main__":
    main()
