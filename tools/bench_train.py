"""Measure the speed and memory of whole training steps, for position methods, engines and transformers' models.

    python tools/bench_train.py CONFIG.yml [MORE.yml] [key=value ...] --methods rotary coca --peer transformers
    python tools/bench_train.py CONFIG.yml [MORE.yml] [key=value ...] --methods coca --engines deepspeed native graphs

Our implementation runs the step of `megatron-coca train`, including the engine. The peer is a transformers model that
runs in plain PyTorch, in a separate process. On a CPU, the peer is measured a second time with our setting of the C
library, which keeps freed memory. All implementations take turns, step by step, on the same random tokens, so that a
slow phase of the machine affects all of them. A ratio is the median over the rounds. The CPU time of each process is
recorded too, because other processes on the same cores change it less than the elapsed time. With `lora=...` and
`--peer llama`, the peer trains adapters with peft. The script appends one JSON line per implementation to --output. On
a GPU, with 350M parameters and bfloat16:

    python tools/bench_train.py configs/350M/roformer.yml precision=bfloat16 train_micro_batch_size_per_gpu=32 \\
        --methods rotary coca --peer transformers --compile --rounds 50
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import Config, ConfigError, load_config, split_inputs
from megatron_coca.config.optimization import LoraConfig
from megatron_coca.data import Batch
from megatron_coca.evaluation.results import out_of_memory
from megatron_coca.evaluation.subject import backend_record
from megatron_coca.evaluation.tasks.speed.measure import interleaved, measured_peak
from megatron_coca.model import build_model
from megatron_coca.model.cost import flops_per_token, parameter_count, peak_flops
from megatron_coca.support.errors import InputError
from megatron_coca.support.host import keep_freed_memory
from megatron_coca.training import launch
from megatron_coca.training.adapters import add_adapters
from megatron_coca.training.checkpointing.saving import DTYPES
from megatron_coca.training.engine import build_engine, group
from tools.records import ChildProcess, append_records, benchmark_parser, compared

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "no_weight_tying")
ENGINES = {
    "deepspeed": ("engine=deepspeed",),
    "native": ("engine=native",),
    "graphs": ("engine=native", "cuda_graphs=true"),
    "muon": ("engine=native", "optimizer.type=Muon"),
}
"""Value of --engines -> its configuration keys."""
RATE = 1e-4
WARMUP = 5
"""Number of warm-up steps of each implementation, which are not measured."""


@dataclass
class Contestant:
    """A training implementation.

    Attributes:
        name: the position method, with the engine if there are several, or the peer's name.
        step: a function that runs a step on micro-batches and returns the loss.
        peak: a function that returns the peak memory of a step in bytes, without weights and optimizer states.
        cpu: a function that returns the CPU time that the contestant's process has used, in seconds.
        backend: our attention backend and, on a GPU, its kernel; None for the peer.
    """

    name: str
    config: Config
    step: Callable[[list[Tensor]], float]
    peak: Callable[[list[Tensor]], int]
    cpu: Callable[[], float] = time.process_time
    backend: str | None = None


def main(arguments: list[str] | None = None) -> int:
    """Measure all contestants, print and append the results; return the exit status."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        keep_freed_memory()
    launch.complete_environment(os.environ)
    group.init_distributed()
    try:
        append_records(options.output, race(contestants(options), options))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        group.shut_down()
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = benchmark_parser(__doc__, "train.jsonl", rounds=20)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    methods = "values of pos_emb; with no value, only the peer is measured"
    parser.add_argument("--methods", nargs="*", default=["rotary", "coca"], help=methods)
    engines = "engines for every method (default: that of the configuration); graphs: native with cuda_graphs; muon: "
    engines += "native with Muon"
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[None], help=engines)
    parser.add_argument("--peer", choices=PEERS, help="also measure this implementation, and report ratios to it")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no round after this time (at least 3 rounds)")
    parser.add_argument(
        "--compile", action="store_true", help="torch_compile=true for our models; torch.compile on each peer layer"
    )
    return parser.parse_intermixed_args(arguments)


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """Return the implementations to measure: the peer, if requested, and the position methods."""
    files, given = split_inputs(options.inputs)
    given = [*given, f"torch_compile={str(options.compile).lower()}"]
    methods = []
    for name, engine in product(options.methods, options.engines):
        keys = [f"pos_emb={name}", *(() if engine is None else ENGINES[engine])]
        config = load_config(files, [*given, *keys])
        step, backend = own_step(config)
        called = name if engine is None else f"{name}, {engine}"
        methods.append(Contestant(called, config, step, peak_of(step), backend=backend))
    if options.peer is None:
        return methods
    config = load_config(files, [*given, "pos_emb=rotary"]).override(PEERS[options.peer].keys)
    peers = [peer(options.peer, config, options.compile, keeps_memory=False)]
    if not torch.cuda.is_available():
        peers.append(peer(f"{options.peer}, memory kept", config, options.compile, keeps_memory=True))
    return peers + methods


def own_step(config: Config) -> tuple[Callable[[list[Tensor]], float], str]:
    """Return a function that runs a step as `megatron-coca train` does, and the name of the attention backend."""
    model = build_model(config, group.local_device())
    if config.optimizer.lora is not None:
        add_adapters(model, config.optimizer.lora, config.seed)
    model.train()
    own_engine = build_engine(model, config, config.batch.resolve(1))
    step, backend = own_engine.train_step, backend_record(model, config, group.local_device(), trains=True)
    return lambda micro_batches: step([Batch(batch.numpy()) for batch in micro_batches], RATE).loss, backend


def peer(name: str, config: Config, compiled: bool, keeps_memory: bool) -> Contestant:
    """Return transformers' model, which runs in a separate process without this project's settings.

    With `keeps_memory`, the process uses our setting of the C library's allocator.
    """
    kind = name.partition(",")[0]
    PEERS[kind].arguments(config)  # raises here rather than in the child
    child = ChildProcess(_peer_call, kind, config, group.local_device(), compiled, keeps_memory)

    def call(micro_batches: list[Tensor], wanted: str) -> Any:
        return child([batch.numpy() for batch in micro_batches], wanted)

    step, peak = (partial(call, wanted=wanted) for wanted in ("loss", "peak"))
    return Contestant(name, config, step, peak, partial(child, [], "cpu"))


def _peer_call(
    kind: str, config: Config, device: str, compiled: bool, keeps_memory: bool
) -> Callable[[list[Any], str], float]:
    if keeps_memory:
        keep_freed_memory()
    step = transformers_step(config, device, compiled, kind)

    functions: dict[str, Callable[[list[Tensor]], float]] = {"loss": step, "peak": peak_of(step)}
    functions["cpu"] = lambda batches: time.process_time()

    def call(arrays: list[Any], wanted: str) -> float:
        return functions[wanted]([torch.from_numpy(array) for array in arrays])

    return call


def peak_of(step: Callable[[list[Tensor]], float]) -> Callable[[list[Tensor]], int]:
    """Return a function that runs `step` and returns its peak memory in bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return lambda micro_batches: measured_peak(lambda: step(micro_batches), device)


def transformers_step(
    config: Config, device: str, compiled: bool = False, kind: str = "transformers"
) -> Callable[[list[Tensor]], float]:
    """Return a training step of transformers' model: micro-batches int64 [batch, length + 1] -> mean loss.

    It uses SDPA, fused AdamW with our hyperparameters, and clipping, but not DeepSpeed. In half precision, its weights
    and moments are in half precision too. We keep float32 copies, which is more work, so the comparison favours the
    peer.

    Raises:
        ConfigError: the class in transformers does not support the model.
    """
    model = PEERS[kind].build(config).to(device, DTYPES[config.precision.dtype])
    keys = config.optimizer
    model = (model if keys.lora is None else with_peft(model, keys.lora, kind)).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=1e-4, betas=keys.betas, eps=keys.eps, weight_decay=keys.weight_decay, fused=True
    )
    if compiled:  # layer by layer, like our model, so that all layers share one compilation
        for layer in next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList)):
            layer.compile()

    def step(micro_batches: list[Tensor]) -> float:
        total = torch.zeros((), device=device)
        for samples in micro_batches:
            samples = samples.to(device, non_blocking=True)
            inputs, targets = samples[:, :-1], samples[:, 1:].contiguous()
            loss = model(inputs, labels=inputs, shift_labels=targets, use_cache=False).loss
            (loss / len(micro_batches)).backward()
            total += loss.detach() / len(micro_batches)
        if keys.gradient_clipping > 0:
            torch.nn.utils.clip_grad_norm_(trained, keys.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


ADAPTED = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "dense": "o_proj"}
WHOLE = {"norms": ["input_layernorm", "post_attention_layernorm", "norm"], "embedding": ["embed_tokens"]}
"""The modules of transformers' LLaMA for the names in `lora.targets` and `lora.also`."""


def with_peft(model: torch.nn.Module, lora: LoraConfig, kind: str) -> torch.nn.Module:
    """Return the peer with the adapters of `lora`, as peft adds them.

    Raises:
        ConfigError: the peer's class has no modules for the parts that `lora` names.
    """
    if kind != "llama" or not (set(lora.targets) <= ADAPTED.keys() and set(lora.also) <= WHOLE.keys()):
        raise ConfigError(
            f"lora: peft's adapters are supported only with --peer llama, for targets {', '.join(ADAPTED)}, and for "
            f"{', '.join(WHOLE)} in also; change lora, or leave out --peer"
        )
    from peft import LoraConfig as Settings
    from peft import get_peft_model

    targets, whole = [ADAPTED[name] for name in lora.targets], [name for part in lora.also for name in WHOLE[part]]
    settings = Settings(target_modules=targets, modules_to_save=whole, lora_dropout=lora.dropout, **lora.settings)
    adapted: torch.nn.Module = get_peft_model(model, settings)
    return adapted


def _unsupported(config: Config, plain: dict[str, Any], name: str) -> None:
    """Raise a ConfigError that names all keys whose values differ from `plain`."""
    flat = config.flat()
    other = [f"{key}={flat[key]}" for key, value in plain.items() if flat[key] != value]
    if other:
        raise ConfigError(f"{', '.join(other)}: not supported by transformers' {name}; leave out --peer")


def _common_keys(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "vocab_size": model.padded_vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "attention_dropout": model.attention_dropout,
        "max_position_embeddings": model.seq_length,
        "tie_word_embeddings": not model.no_weight_tying,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(config.position.rotary_emb_base),
            "partial_rotary_factor": float(config.position.rotary_pct),
        },
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def peer_keys(config: Config) -> dict[str, Any]:
    """Return the arguments of GPTNeoXConfig for a model of this shape, with rotary positions.

    Raises:
        ConfigError: transformers' GPT-NeoX does not support the model.
    """
    model = config.model
    plain = {"norm": "layernorm", "num_kv_heads": model.num_attention_heads, "gpt_j_tied": False, "rope_scaling": None}
    _unsupported(config, plain, "GPT-NeoX")
    return _common_keys(config) | {
        "hidden_act": "gelu_fast" if model.bias_gelu_fusion else model.activation,
        "hidden_dropout": model.hidden_dropout,
        "layer_norm_eps": model.layernorm_epsilon,
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
    }


def llama_keys(config: Config) -> dict[str, Any]:
    """Return the arguments of LlamaConfig for a model of this shape.

    Raises:
        ConfigError: transformers' LLaMA does not support the model.
    """
    plain = {"norm": "rmsnorm", "activation": "swiglu", "use_bias_in_mlp": False, "use_bias_in_attn_linear": False}
    _unsupported(config, plain | {"gpt_j_residual": False, "rotary_pct": 1.0, "rope_scaling": None}, "LLaMA")
    return _common_keys(config) | {
        "num_key_value_heads": config.model.num_kv_heads,
        "rms_norm_eps": config.model.rms_norm_epsilon,
    }


def mixtral_keys(config: Config) -> dict[str, Any]:
    """Return the arguments of MixtralConfig for a model of this shape.

    Raises:
        ConfigError: transformers' Mixtral does not support the model.
    """
    model, optimizer = config.model, config.optimizer
    if model.mixtures < model.num_layers:
        raise ConfigError(
            "mlp_config: Mixtral has a mixture of experts in every layer; remove mlp_config and moe_expert_interval"
        )
    plain = {"moe_router_scores": "softmax", "moe_router_bias": False, "moe_correction_bias": False}
    plain |= {"moe_num_groups": 1, "moe_shared_intermediate_size": None, "moe_routed_scaling_factor": 1.0}
    plain |= {"moe_norm_topk_prob": True, "moe_weights_on_input": False, "moe_z_loss_coeff": 0.0}
    _unsupported(config, plain, "Mixtral")
    return llama_keys(config) | {
        "intermediate_size": model.expert_width,
        "num_local_experts": model.moe_num_experts,
        "num_experts_per_tok": model.moe_top_k,
        "output_router_logits": optimizer.moe_loss_coeff > 0,
        "router_aux_loss_coef": optimizer.moe_loss_coeff,
    }


class Peer(NamedTuple):
    """A model class of transformers.

    Attributes:
        name: the class name without `Config` or `ForCausalLM`.
        arguments: a function that returns the arguments of the configuration class.
        keys: keys of our configuration that describe such a model.
    """

    name: str
    arguments: Callable[[Config], dict[str, Any]]
    keys: dict[str, Any]

    def build(self, config: Config) -> torch.nn.Module:
        """Return the model with random weights. Raises ConfigError if the class does not support it."""
        import transformers  # a development requirement

        settings = getattr(transformers, f"{self.name}Config")(**self.arguments(config))
        model: torch.nn.Module = getattr(transformers, f"{self.name}ForCausalLM")(settings)
        return model


LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "use_bias_in_norms": False, "use_bias_in_attn_linear": False}
LLAMA |= {"use_bias_in_mlp": False, "expansion_factor": 8}  # as many parameters as a plain MLP of width 4 h
LLAMA |= {"mlp_multiple_of": 8}  # otherwise the rows of its matrices would not be aligned
PEERS = {
    "transformers": Peer("GPTNeoX", peer_keys, {}),
    "llama": Peer("Llama", llama_keys, LLAMA),
    "mixtral": Peer("Mixtral", mixtral_keys, LLAMA | {"moe_norm_topk_prob": True}),
}
"""Values of --peer. The LLaMA has about as many parameters as the GPT-NeoX; Mixtral is a LLaMA with mixtures of
experts."""


def race(entrants: list[Contestant], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all contestants alternately on the same tokens, and yield their records.

    If a contestant runs out of memory, its record contains the error, and the other contestants continue.
    """
    micro_batches = draw(entrants[0].config, torch.Generator().manual_seed(0))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fitting: list[Contestant] = []
    for entrant in entrants:
        try:
            entrant.step(micro_batches)  # compiles, and allocates the optimizer's states
            fitting.append(entrant)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            print(f"{entrant.name:14} out of memory")
            yield {"benchmark": "training step", "method": entrant.name, "error": "out of memory"}
    used: list[list[float]] = [[] for _ in fitting]

    def counted(entrant: Contestant, seconds: list[float]) -> None:
        before = entrant.cpu()
        entrant.step(micro_batches)
        seconds.append(entrant.cpu() - before)

    calls = {number: partial(counted, entrant, used[number]) for number, entrant in enumerate(fitting)}
    times = interleaved(calls, options.rounds, device, uncounted=WARMUP, seconds=options.seconds)
    for number, entrant in enumerate(fitting):
        ratio = compared(times[number], times[0]) | {"ratio_to": fitting[0].name, "compiled": options.compile}
        own, base = (seconds[-len(times[0]) :] for seconds in (used[number], used[0]))
        of_cpu = compared(own, base)
        ratio |= {"cpu_seconds": statistics.median(own), "cpu_ratio": of_cpu["ratio"]}
        ratio |= {"cpu_ratio_quartiles": of_cpu["ratio_quartiles"]}
        yield record(entrant, times[number], entrant.peak(micro_batches), ratio)


def draw(config: Config, generator: torch.Generator) -> list[Tensor]:
    """Return random micro-batches of the configured sizes, int64 [micro-batch, length + 1]."""
    sizes, shape = config.batch.resolve(1), (config.batch.resolve(1).micro, config.model.seq_length + 1)
    vocabulary = config.model.padded_vocab_size
    return [torch.randint(vocabulary, shape, generator=generator) for _ in range(sizes.accumulation)]


def record(own: Contestant, times: list[float], peak_bytes: int, ratio: dict[str, Any]) -> dict[str, Any]:
    """Return the record of one contestant, and print it as a line."""
    seconds, config = statistics.median(times), own.config
    tokens = config.batch.resolve(1).total * config.model.seq_length
    achieved = flops_per_token(config).model * tokens / seconds
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = peak_flops(device)
    utilisation = achieved / peak if peak and config.precision.dtype != "fp32" else None
    unknown = f"  MFU unknown (no peak is known for {device})" if peak is None and torch.cuda.is_available() else ""
    print(
        f"{own.name:14} {seconds:.4f} s a step  {tokens / seconds:10,.0f} tokens/s  {achieved / 1e9:10,.1f} GFLOP/s"
        + (f"  MFU {utilisation:.1%}" if utilisation else unknown)
        + f"  {peak_bytes / 2**20:8,.0f} MiB  {ratio['ratio']:.3f} x the first"
        + f"  CPU {ratio['cpu_seconds']:.4f} s, {ratio['cpu_ratio']:.3f} x"
    )
    return {
        "benchmark": "training step",
        "method": own.name,
        "backend": own.backend,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": achieved,
        "mfu": utilisation,
        "peak_bytes": peak_bytes,
        "shape": {key: config.flat()[key] for key in SHAPE},
        "parameters": parameter_count(config).total,
        "lora": None if config.optimizer.lora is None else config.optimizer.lora.model_dump(),
        "tokens_per_step": tokens,
        "dtype": config.precision.dtype,
    } | ratio


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
