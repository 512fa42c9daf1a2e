"""Compare our implementation with transformers for each family: logits, import, and speed of perplexity windows.

    python tools/bench_families.py qwen3 gemma3
    python tools/bench_families.py
    python tools/bench_families.py --import-only glm4 opt    # without logits and speeds, which take most of the time

For every family, a random model with about 40 million parameters and a training length of 256 is written as a Hugging
Face folder. Our implementation and transformers' own class read the folder, and their results are compared:

- float32 logits at one and four times the training length: the largest difference, and the standard deviation;
- import: seconds and growth of resident memory of `import_checkpoint`, and of `from_pretrained` with `save_pretrained`,
  each in a separate process that has already loaded the libraries;
- scored tokens per second of sliding-window perplexity at 1, 4 and 16 times the training length, each implementation in
  a separate process, in alternating rounds. For transformers, the plain loop of its documentation is used. It scores
  one window at a time, ignores the labels of tokens that are not scored, and computes logits at every position. The
  negative log-likelihoods must agree to 1e-4 per token.

The script appends one JSON line per family to --output, and prints it as a row of the table in docs/models.md.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca import load_model
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.evaluation.results import measured
from megatron_coca.evaluation.tasks.perplexity.measure import plan_windows, score_document
from megatron_coca.evaluation.tasks.speed.measure import interleaved
from megatron_coca.support.host import keep_freed_memory
from tools.records import ChildProcess, append_records, benchmark_parser, compared

AGREEMENT = 1e-4
"""Largest allowed difference between the implementations, in nats per token."""
TRAINED = 256
BLOCK = {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
BLOCK |= {"intermediate_size": 1408, "num_key_value_heads": 4, "max_position_embeddings": 16 * TRAINED}
PLAIN = {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BASE = {"rope_type": "default", "rope_theta": 1e4}
WINDOW = {"sliding_window": TRAINED // 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 176}
SMALL_EXPERTS = {"num_local_experts": 4, "intermediate_size": 352}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 176}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 192, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
LATENT |= {"num_key_value_heads": 8}
HEADS, NO_PADDING = {"head_dim": 64}, {"pad_token_id": None}
GEMMA4 = {"global_head_dim": 128, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
GRANITE = {"attention_multiplier": 0.125, "residual_multiplier": 0.5, "embedding_multiplier": 12.0}
# One more position than the longest window, because the inputs of transformers' loop include the last label.
GPT = {"vocab_size": 16384, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 16 * TRAINED + 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", PLAIN | {"intermediate_size": 2048, "max_position_embeddings": 16 * TRAINED}),
    "llama": ("Llama", BLOCK | {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", BLOCK | WINDOW),
    "ministral3": ("Ministral3", BLOCK | {"head_dim": 64, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "qwen2": ("Qwen2", BLOCK),
    "qwen3": ("Qwen3", BLOCK | {"head_dim": 64}),
    "mixtral": ("Mixtral", BLOCK | SMALL_EXPERTS),
    "gpt_oss": ("GptOss", BLOCK | WINDOW | SMALL_EXPERTS | {"rope_parameters": YARN}),
    "olmoe": ("Olmoe", BLOCK | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 176}),
    "flex_olmo": (
        "FlexOlmo",
        BLOCK | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 176, "pad_token_id": 0},
    ),
    "granitemoe": ("GraniteMoe", BLOCK | GRANITE | SMALL_EXPERTS),
    "granitemoeshared": ("GraniteMoeShared", BLOCK | GRANITE | SMALL_EXPERTS | {"shared_intermediate_size": 176}),
    "granitemoe_swa": ("GraniteMoeSWA", BLOCK | WINDOW | GRANITE | SMALL_EXPERTS),
    "glm4_moe": ("Glm4Moe", BLOCK | ROUTED | {"head_dim": 64}),
    "llama4_text": ("Llama4Text", BLOCK | SMALL_EXPERTS | HEADS | {"intermediate_size_mlp": 1408}),
    "aria_text": ("AriaText", BLOCK | {"moe_num_experts": 4, "intermediate_size": 352}),
    "flint": ("Flint", BLOCK | EXPERTS | WINDOW | HEADS | {"shared_expert_intermediate_size": 352}),
    "afmoe": ("Afmoe", BLOCK | EXPERTS | WINDOW | HEADS),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        BLOCK | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 176, "moe_num_shared_experts": 1},
    ),
    "exaone_moe": ("ExaoneMoe", BLOCK | EXPERTS | WINDOW),
    "hunyuan_v1_moe": ("HunYuanMoEV1", BLOCK | HEADS | {"num_experts": 4, "moe_topk": 2, "intermediate_size": 352}),
    "hy_v3": ("HYV3", BLOCK | EXPERTS | HEADS),
    "mellum": ("Mellum", BLOCK | EXPERTS | HEADS),
    "minimax_m2": ("MiniMaxM2", BLOCK | SMALL_EXPERTS | HEADS | {"num_experts_per_tok": 2}),
    "solar_open": ("SolarOpen", BLOCK | ROUTED | HEADS),
    "dots1": ("Dots1", BLOCK | ROUTED | {"head_dim": 64, "n_shared_experts": 1}),
    "minicpm3": ("MiniCPM3", BLOCK | LATENT | {"rope_parameters": BASE}),
    "youtu": ("Youtu", BLOCK | LATENT),
    "deepseek_v2": ("DeepseekV2", BLOCK | LATENT | ROUTED),
    "deepseek_v3": ("DeepseekV3", BLOCK | LATENT | ROUTED | {"n_group": 4, "topk_group": 2}),
    "glm4_moe_lite": ("Glm4MoeLite", BLOCK | LATENT | ROUTED),
    "qwen2_moe": ("Qwen2Moe", BLOCK | EXPERTS | {"shared_expert_intermediate_size": 352}),
    "qwen3_moe": ("Qwen3Moe", BLOCK | EXPERTS | {"head_dim": 64}),
    "smollm3": ("SmolLM3", BLOCK | {"pad_token_id": None}),
    "olmo2": ("Olmo2", BLOCK),
    "olmo3": ("Olmo3", BLOCK | WINDOW | {"rope_parameters": {"full_attention": YARN, "sliding_attention": BASE}}),
    "phi3": ("Phi3", BLOCK | {"pad_token_id": None}),
    "gemma2": ("Gemma2", BLOCK | WINDOW | {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "gemma3": ("Gemma3Text", BLOCK | WINDOW | {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "cohere2": ("Cohere2", BLOCK | WINDOW | {"pad_token_id": None}),
    "gpt2": ("GPT2", GPT),
    "mpt": ("Mpt", {"vocab_size": 16384, "d_model": 512, "n_layers": 8, "n_heads": 8, "max_seq_len": 16 * TRAINED + 1}),
    "bloom": ("Bloom", {"vocab_size": 16384, "hidden_size": 512, "n_layer": 8, "n_head": 8}),
    "falcon": ("Falcon", PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "gemma": ("Gemma", BLOCK | HEADS),
    "gemma4_text": ("Gemma4Text", BLOCK | WINDOW | HEADS | GEMMA4 | {"hidden_size_per_layer_input": 0}),
    "gemma4_unified_text": ("Gemma4UnifiedText", BLOCK | WINDOW | HEADS | GEMMA4),
    "vaultgemma": ("VaultGemma", BLOCK | WINDOW | HEADS | {"query_pre_attn_scalar": 64}),
    "stablelm": ("StableLm", BLOCK | {"qk_layernorm": True}),
    "phi": ("Phi", BLOCK),
    "persimmon": ("Persimmon", PLAIN | {"intermediate_size": 2048, "max_position_embeddings": 16 * TRAINED}),
    "starcoder2": ("Starcoder2", BLOCK | WINDOW),
    "cohere": ("Cohere", BLOCK | NO_PADDING),
    "granite": ("Granite", BLOCK | GRANITE),
    "granite_swa": ("GraniteSWA", BLOCK | WINDOW | GRANITE),
    "glm": ("Glm", BLOCK | HEADS | NO_PADDING),
    "glm4": ("Glm4", BLOCK | HEADS | NO_PADDING),
    "exaone4": ("Exaone4", BLOCK | WINDOW),
    "ernie4_5": ("Ernie4_5", BLOCK | HEADS),
    "seed_oss": ("SeedOss", BLOCK | HEADS),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        BLOCK
        | GRANITE
        | {"shared_intermediate_size": 1408, "num_local_experts": 0, "layer_types": ["attention"] * 8}
        | {"position_embedding_type": "rope", "mamba_n_heads": 1},
    ),
    "cohere_compass_text": (
        "CohereCompassText",
        BLOCK
        | WINDOW
        | NO_PADDING
        | {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2}
        | {"rope_parameters": {"sliding_attention": BASE | {"mrope_section": [8, 8, 8]}, "full_attention": None}},
    ),
    "hunyuan": ("HunYuanDenseV1", BLOCK | HEADS),
    "nemotron": ("Nemotron", BLOCK),
    "arcee": ("Arcee", BLOCK),
    "apertus": ("Apertus", BLOCK | {"rope_parameters": LLAMA3}),
    "helium": ("Helium", BLOCK | HEADS),
    "olmo": ("Olmo", BLOCK | {"clip_qkv": 2.0}),
    "ministral": ("Ministral", BLOCK | WINDOW | HEADS),
    "nanochat": ("NanoChat", BLOCK),
    "hyperclovax": ("HyperCLOVAX", BLOCK),
    "jais2": ("Jais2", BLOCK),
    "cwm": ("Cwm", BLOCK | WINDOW | HEADS | {"rope_parameters": LLAMA3}),
    "internlm3": ("InternLM3", BLOCK | HEADS),
    "iquestcoder": ("IQuestCoder", BLOCK | HEADS),
    "gptj": ("GPTJ", GPT | {"rotary_dim": 32}),
    "codegen": ("CodeGen", GPT | {"rotary_dim": 32, "n_ctx": GPT["n_positions"]}),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gpt_neo": (
        "GPTNeo",
        {"vocab_size": 16384, "hidden_size": 512, "num_layers": 8, "num_heads": 8, "window_size": TRAINED // 2}
        | {"attention_types": [[["global", "local"], 4]], "max_position_embeddings": GPT["n_positions"]},
    ),
    "opt": ("OPT", PLAIN | {"ffn_dim": 2048, "max_position_embeddings": GPT["n_positions"]}),
    "openai-gpt": ("OpenAIGPT", GPT),
    "ctrl": ("CTRL", GPT | {"dff": 2048, "layer_norm_epsilon": 1e-6}),
    "modernbert-decoder": (
        "ModernBertDecoder",
        PLAIN
        | {"intermediate_size": 1408, "max_position_embeddings": 16 * TRAINED, "local_attention": TRAINED // 2}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "biogpt": ("BioGpt", PLAIN | {"intermediate_size": 2048, "max_position_embeddings": GPT["n_positions"]}),
    "xglm": (
        "XGLM",
        {"vocab_size": 16384, "d_model": 512, "num_layers": 8, "attention_heads": 8, "ffn_dim": 2048}
        | {"max_position_embeddings": 16 * TRAINED},
    ),
}
"""Family name -> the prefix of the transformers configuration class, and its arguments."""


def write_model(name: str, folder: Path) -> int:
    """Write a family's model with random weights, norms and biases; return its number of parameters."""
    import transformers  # a development requirement

    kind, values = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    model.save_pretrained(folder, max_shard_size="50MB")
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def logit_errors(folder: Path) -> dict[str, float]:
    """Return the largest logit difference at 1 and 4 times the training length, and the logits' standard deviation."""
    from transformers import AutoModelForCausalLM

    ours = load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    errors = {}
    for times in (1, 4):
        ids = torch.from_numpy(np.random.default_rng(times).integers(0, BLOCK["vocab_size"], (1, times * TRAINED)))
        expected = theirs(ids).logits
        errors[f"error_{times}L"] = float((ours(ids) - expected).abs().max())
        errors["logits_std"] = float(expected.std())
    return errors


def importer(way: str, folder: Path) -> Callable[[str], tuple[float, int]]:
    """Return a function that reads `folder`, writes a copy, and returns the seconds and the bytes of memory."""
    from transformers import AutoModelForCausalLM

    def run(target: str) -> tuple[float, int]:
        with measured(torch.device("cpu")) as meter:
            if way == "ours":
                import_checkpoint(folder, target)
            else:
                AutoModelForCausalLM.from_pretrained(folder).save_pretrained(target)
        return meter.seconds, meter.peak_memory_bytes or 0

    return run


def import_costs(folder: Path, scratch: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds and the largest memory peak of both implementations, one process per measurement."""
    units: dict[str, Callable[[list[float]], float]] = {"seconds": statistics.median, "bytes": max}
    costs: dict[str, list[tuple[float, int]]] = {"ours": [], "transformers": []}
    for number in range(rounds):
        for way, found in costs.items():
            found.append(ChildProcess(importer, way, folder)(str(scratch / f"{way}_{number}")))
    return {
        f"import_{unit}_{way}": choose([cost[place] for cost in found])
        for way, found in costs.items()
        for place, (unit, choose) in enumerate(units.items())
    }


def scorer(way: str, folder: Path, stride: int) -> Callable[[np.ndarray, int], float]:
    """Return a function that takes tokens and a window, and returns the sum of negative log-likelihoods."""
    from transformers import AutoModelForCausalLM

    if way == "ours":
        keep_freed_memory()
        model = load_model(folder)
        return lambda tokens, window: score_document(model, tokens, window, stride).nll
    theirs = AutoModelForCausalLM.from_pretrained(folder).float().eval()

    @torch.no_grad()
    def plain_loop(tokens: np.ndarray, window: int) -> float:
        total = 0.0
        for span in plan_windows(len(tokens), window, stride):
            # The model shifts the labels itself, so its inputs include the token that the last position predicts.
            inputs = torch.from_numpy(tokens[None, span.start : max(span.end, span.start + window)])
            labels = inputs.clone()
            labels[:, : span.first_scored - span.start] = -100
            scored = int((labels[:, 1:] != -100).sum())
            total += float(theirs(input_ids=inputs, labels=labels, use_cache=False).loss) * scored
        return total

    return plain_loop


def speeds(folder: Path, rounds: int) -> dict[str, Any]:
    """Return both implementations' scored tokens per second at every window, and the quartiles of their ratio.

    Raises:
        RuntimeError: the negative log-likelihoods of the implementations disagree.
    """
    scorers = {way: ChildProcess(scorer, way, folder, TRAINED) for way in ("ours", "transformers")}
    found: dict[str, Any] = {}
    for times in (1, 4, 16):
        tokens = np.random.default_rng(0).integers(0, BLOCK["vocab_size"], (times + 3) * TRAINED)
        calls = {way: partial(score, tokens, times * TRAINED) for way, score in scorers.items()}
        nlls = [call() / (len(tokens) - 1) for call in calls.values()]
        if abs(nlls[0] - nlls[1]) > AGREEMENT:
            raise RuntimeError(f"{folder}: window {times}L: ours and transformers disagree: {nlls}")
        seconds = interleaved(calls, rounds, torch.device("cpu"), uncounted=0)
        found |= {f"tokens_per_second_{times}L_{way}": len(tokens) / statistics.median(s) for way, s in seconds.items()}
        ratio = compared(seconds["transformers"], seconds["ours"])
        found |= {f"ratio_{times}L": ratio["ratio"], f"ratio_quartiles_{times}L": ratio["ratio_quartiles"]}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure every family, print and append its record; return the exit status."""
    parser = benchmark_parser(__doc__, "families.jsonl", rounds=3)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: all of {', '.join(FAMILIES)}")
    parser.add_argument("--import-only", action="store_true", help="measure only the import")
    options = parser.parse_args(arguments)
    if unknown := set(options.families) - FAMILIES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: unknown family; use one of {', '.join(FAMILIES)}")
    for name in options.families or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "model")
            found: dict[str, Any] = {"benchmark": "family", "family": name, "parameters": write_model(name, folder)}
            found |= import_costs(folder, Path(scratch), options.rounds)
            if not options.import_only:
                found |= logit_errors(folder) | speeds(folder, options.rounds)
        append_records(options.output, [found])
        print(row(found), flush=True)
    return 0


def row(found: dict[str, Any]) -> str:
    """Return a record as a row of the table in docs/models.md."""
    costs = (
        f"{found[f'import_seconds_{way}']:.1f} s, {found[f'import_bytes_{way}'] / 1e6:.0f} MB"
        for way in ("ours", "transformers")
    )
    whole = "ratio_1L" in found
    errors = (f"{found[f'error_{times}L']:.1e}" if whole else "" for times in (1, 4))
    ratios = (f"{found[f'ratio_{times}L']:.2f}x" if whole else "" for times in (1, 4, 16))
    return f"| {' | '.join([found['family'], *errors, *costs, *ratios])} |"


if __name__ == "__main__":
    sys.exit(main())
