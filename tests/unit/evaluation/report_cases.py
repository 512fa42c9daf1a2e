"""Results as tasks write them, with invented numbers: one of every kind, and of every way in which a cell may lack."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_coca.evaluation import PerplexityResult
from megatron_coca.evaluation.report.curves import Curve, CurvePoint
from megatron_coca.evaluation.report.document import Section
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.sections import report_document
from megatron_coca.evaluation.results import Cost, Costs, Result, cost_path, write_record
from megatron_coca.evaluation.statistics import wilson_interval
from megatron_coca.evaluation.tasks.analysis.task import AnalysisResult
from megatron_coca.evaluation.tasks.lm_eval.task import HarnessResult
from megatron_coca.evaluation.tasks.longppl.task import LongPerplexityResult
from megatron_coca.evaluation.tasks.margin.task import MarginResult
from megatron_coca.evaluation.tasks.recall.task import RecallResult
from megatron_coca.evaluation.tasks.retrieval.task import NeedleResult, PasskeyResult, RulerResult
from megatron_coca.evaluation.tasks.speed.measure import KINDS_OF_WORK
from megatron_coca.evaluation.tasks.speed.task import SpeedResult

NTK = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "target_length": None}}
REROPE = {"relative_positions": {"type": "rerope", "window": None}}
USES: dict[str, tuple[str, dict[str, Any], float]] = {
    "ALiBi": ("alibi", {}, 0.3),
    "RoFormer": ("rotary", {}, 2.0),
    "RoFormer + dynamic NTK": ("rotary", NTK, 0.8),
    "RoFormer + ReRoPE": ("rotary", REROPE, 0.1),
    "CoCA": ("coca", {}, 0.9),
    "CoCA + dynamic NTK": ("coca", NTK, 0.35),
    "CoCA-Strict + dynamic NTK": ("coca_strict", NTK, 0.4),
}
"""By label: the form, the overrides, and the growth of the loss with each doubling of the length."""

REFUSED = "rope_scaling: a bias has no frequencies that could be extended"
FULL = "cpu ran out of memory; lower --tokens-per-batch (it is 16384, one window at least)"


def header(label: str, pos_emb: str = "rotary", overrides: Any = None, length: int = 512) -> dict[str, Any]:
    return {
        "label": label,
        "checkpoint": {
            "path": f"runs/350M_{pos_emb}",
            "identity": f"{pos_emb}5ad1c0ffee7715",
            "step": 120000,
            "seq_length": length,
            "pos_emb": pos_emb,
        },
        "overrides": overrides or {},
        "tokenizer": "f00dfeedf00dfeed",
        "environment": {"dtype": "bfloat16", "backend": "sdpa", "device": "NVIDIA H200", "torch": "2.13.0"},
        "missing": [],
    }


DOCUMENTS = {
    "sha256": "aa11bb22cc33dd44ee",
    "count": 4,
    "tokens": 131072,
    "max_length": 32768,
    "repeated": None,
    "sources": ["pg19/test"],
}


def window(size: int, nll: float, documents: int = 4) -> dict[str, Any]:
    return {
        "window": size,
        "perplexity": math.exp(nll) if nll < 709 else math.inf,
        "nll": nll,
        "nll_stderr": 0.01,
        "tokens_scored": 4092,
        "documents": documents,
        "nll_by_document": [nll * 1023] * documents,
        "accuracy": 0.25,
        "correct_by_document": [256] * documents,
    }


def perplexity(label: str, nlls: dict[int, float], /, **changes: Any) -> PerplexityResult:
    """`group__name=value` changes one field of a group of the file, `name=value` a field of the file."""
    content = header(label, length=changes.pop("length", 512)) | {
        "protocol": {
            "text": "the model reads W tokens and scores the last S",
            "stride": 512,
            "tokens_per_batch": 16384,
        },
        "documents": DOCUMENTS,
        "results": [window(size, nll) for size, nll in nlls.items()],
    }
    content["checkpoint"]["identity"] = label
    for path, value in changes.items():
        group, _, name = path.partition("__")
        content[group] = {**content[group], name: value} if name else value
    return PerplexityResult.model_validate(content)


def lacking(at: str, kind: str, reason: str) -> dict[str, str]:
    return {"at": at, "kind": kind, "reason": reason}


def tally(correct: int, count: int) -> dict[str, Any]:
    share = correct / count
    low, high = wilson_interval(share, count)
    return {"accuracy": share, "correct": correct, "count": count, "low": low, "high": high}


RETRIEVAL = {
    "text": "greedy; the first run of five digits in the answer is the key",
    "cases": 100,
    "max_new_tokens": 64,
    "seed": 1234,
    "tokens_per_batch": 16384,
    "answer_stub": False,
    "haystack": {"name": "the paper's filler", "sentences": 5, "sha256": "99aa88bb77cc66dd"},
}


def passkey(label: str, accuracies: dict[int, float], **more: Any) -> PasskeyResult:
    pos_emb, overrides, _ = USES.get(label, ("rotary", {}, 0.0))
    cells = []
    for length, accuracy in accuracies.items():
        inside, near = min(100, round(100 * 512 / length)), min(1.0, 2 * accuracy)
        beyond = 100 - inside
        cells.append(
            {
                **tally(round(100 * accuracy), 100),
                "length": length,
                "cases": [],
                "inside": tally(round(near * inside), inside),
                "beyond": tally(round(accuracy * beyond), beyond) if beyond else None,
            }
        )
    return PasskeyResult.model_validate(
        {**header(label, pos_emb, overrides), "protocol": RETRIEVAL, "results": cells, **more}
    )


def recall(label: str, accuracies: dict[int, float]) -> RecallResult:
    """At the training length also with a shift; the score of the fact falls and the rest grows."""
    pos_emb, overrides, _ = USES.get(label, ("rotary", {}, 0.0))
    cells = []
    for number, (length, accuracy) in enumerate(accuracies.items()):
        scores = {"layer": 0, "fact": 5.0 - number, "rest": 5.0 + number}
        heads = [scores | {"head": head, "weight": 0.5 - 0.1 * head} for head in (0, 1)]
        for shift in (0, 16) if length == 512 else (0,):
            sides = {"inside": tally(50, 50), "beyond": tally(20, 50) if length > 512 else None}
            own = {"length": length, "shift": shift, "nll": 1.0, "heads": heads if shift == 0 else []}
            cells.append({**tally(round(100 * accuracy), 100), **sides, **own})
    protocol = {"text": "recall", "cases": 100, "diagnosed": 10, "seed": 0, "prompts": "synthetic", "chance": 0.0625}
    content = {**header(label, pos_emb, overrides), "protocol": protocol, "results": cells, "missing": []}
    return RecallResult.model_validate(content)


def needle(label: str, lengths: Sequence[int], depths: Sequence[int] = range(0, 101, 10)) -> NeedleResult:
    pos_emb, overrides, slope = USES[label]
    cells = [
        {
            **tally(round(20 * max(0.0, min(1.0, 1.05 - slope * 0.25 * at - 0.003 * (100 - depth) * at))), 20),
            "length": length,
            "depth": depth,
            "cases": [],
        }
        for at, length in enumerate(lengths)
        for depth in depths
    ]
    missing = [lacking("length 32768", "out of memory", FULL)]
    content = {**header(label, pos_emb, overrides), "missing": missing, "results": cells}
    return NeedleResult.model_validate({**content, "protocol": {**RETRIEVAL, "depths": list(depths)}})


def ruler(label: str, lengths: Sequence[int]) -> RulerResult:
    pos_emb, overrides, slope = USES[label]
    cells = [
        {**tally(round(50 * max(0.0, 0.98 - slope * 0.1 * at * hard)), 50), "length": length, "cases": [], "task": task}
        for hard, task in enumerate(("multi_key", "multi_value", "variable_tracking", "common_words"), 1)
        for at, length in enumerate(lengths)
    ]
    missing = [lacking("common_words, length 16384", "failed", "the cache is smaller than the prompt")]
    content = {**header(label, pos_emb, overrides), "missing": missing, "results": cells}
    return RulerResult.model_validate({**content, "protocol": RETRIEVAL})


def harness(label: str, base: float, accuracies: Sequence[str] = ("copa", "boolq")) -> HarnessResult:
    """Tasks with an accuracy, the first of `base`, each a hundredth better than the one before, and a perplexity."""
    pos_emb, overrides, _ = USES[label]
    tasks = {**dict.fromkeys(accuracies, ("acc", True)), "wikitext": ("word_perplexity", False)}
    cells = [
        {
            "task": task,
            "version": "1.0",
            "num_fewshot": 0,
            "samples": 100,
            "config_sha256": "11",
            "inputs_sha256": "12",
            "documents_sha256": "22",
            "prompts_sha256": "33",
            "scores": [
                {
                    "metric": metric,
                    "filter": "none",
                    "value": base + 0.01 * at,
                    "stderr": 0.02,
                    "higher_is_better": high,
                }
            ],
        }
        for at, (task, (metric, high)) in enumerate(tasks.items())
    ]
    protocol = {"text": "loglikelihood of the continuations", "lm_eval": "0.4.13", "max_length": 512, "seed": 1234}
    protocol |= {"num_fewshot": None, "limit": None, "tokens_per_batch": 4096}
    missing = [lacking("task afqmc", "failed", "its documents cannot be read")]
    content = {**header(label, pos_emb, overrides), "missing": missing, "protocol": protocol, "results": cells}
    return HarnessResult.model_validate(content)


def benchmark(
    label: str,
    tasks: Mapping[str, float],
    length: int | str | None = None,
    metric: str = "score",
    cut: int = 0,
    **protocol: Any,
) -> HarnessResult:
    """Tasks of a benchmark with their scores; `length` is that of their documents, in tokens or words."""
    pos_emb, overrides, _ = USES[label]
    cells = [
        {
            "task": task,
            "version": "1.0",
            "num_fewshot": 0,
            "samples": 100,
            "config_sha256": "11",
            "inputs_sha256": "12",
            "documents_sha256": "22",
            "prompts_sha256": "33",
            "cut": cut,
            "scores": [{"metric": metric, "filter": "none", "value": value, "stderr": None, "higher_is_better": True}],
            "by_length": [] if length is None else [{"length": str(length), "samples": 100, "value": value}],
        }
        for task, value in tasks.items()
    ]
    given = {"text": "generation", "lm_eval": "0.4.13", "max_length": 3500, "seed": 1234, "num_fewshot": None}
    given |= {"limit": None, "tokens_per_batch": 4096} | protocol
    content = {**header(label, pos_emb, overrides), "protocol": given, "results": cells}
    return HarnessResult.model_validate(content)


def longppl(label: str, nlls: Mapping[int, float], documents: int = 4, keys: str = "44") -> LongPerplexityResult:
    """A mean nll of key tokens for each length; the evaluator is another model."""
    pos_emb, overrides, _ = USES[label]
    cells = [
        {
            "length": length,
            "longppl": math.exp(nll),
            "nll": nll,
            "nll_all": 2.0,
            "perplexity": math.exp(2.0),
            "key_tokens": 40,
            "tokens_scored": 4 * (length - 1),
            "keys_sha256": keys,
            "nll_by_document": [10 * nll] * documents,
        }
        for length, nll in nlls.items()
    ]
    evaluator = {"path": "models/evaluator", "identity": "55", "network": "66", "tokenizer": None}
    protocol = {"text": "perplexity of key tokens", "short": 4096, "stride": 1024, "alpha": 2.0, "beta": -2.0}
    protocol |= {"tokens_per_batch": 8192, "evaluator": evaluator}
    content = {**header(label, pos_emb, overrides), "protocol": protocol, "documents": DOCUMENTS, "results": cells}
    return LongPerplexityResult.model_validate(content)


def margin(label: str, margins: Mapping[int, float], facts: int = 8, documents: int = 4) -> MarginResult:
    """Facts of each length, of which the ones with a positive margin are found, and the losses of all documents."""
    pos_emb, overrides, _ = USES.get(label, ("rotary", {}, 0.0))
    cells = []
    for length, mean in margins.items():
        own = [mean + 0.5 * (number % 4) - 0.75 for number in range(facts)]
        cases = [
            {"task": "passkey", "number": number, "tokens": length, "depth": 0.5, "margin": nats, "found": nats > 0}
            for number, nats in enumerate(own)
        ]
        nlls = [3072.0 - 100 * mean + number for number in range(documents)]
        cells.append({"length": length, "documents": 4, "scored": 1024, "cases": cases, "nlls": nlls})
    protocol = {"text": "margins", "scored": 1024, "seed": 0}
    content = {**header(label, pos_emb, overrides), "protocol": protocol, "documents": DOCUMENTS, "results": cells}
    return MarginResult.model_validate(content)


def speed() -> SpeedResult:
    times = {"rotary": 1.0, "coca": 1.06, "alibi": 1.3, "dense": 4.0}
    cells = [
        {
            "what": what,
            "length": length,
            "method": method,
            "backend": "sdpa",
            "seconds": factor * length**1.3 * 1e-6,
            "quartiles": (factor * length**1.3 * 0.9e-6, factor * length**1.3 * 1.1e-6),
            "rounds": 5,
            "tokens_per_second": length / (factor * length**1.3 * 1e-6),
            "to_rope": {"against": "rotary", "median": factor, "low": factor * 0.97, "high": factor * 1.03},
            "peak_memory_bytes": length * 65536,
            "cache_bytes_per_token": 98304 if what == "decode" else None,
        }
        for what in (KINDS_OF_WORK[0], "decode")
        for length in (512, 2048, 8192)
        for method, factor in times.items()
        if (method, what, length) != ("dense", KINDS_OF_WORK[0], 8192)
    ]
    shape = {"layers": 24, "hidden_size": 1024, "heads": 16, "kv_heads": 16, "parameters": 354_000_000}
    at = "layer forward, length 8192, dense"
    content = {
        **header("350M"),
        "missing": [lacking(at, "out of memory", "cpu ran out of memory")],
        "protocol": {"text": "interleaved rounds, median", "rounds": 5, "batch": 1, "shape": shape},
        "machine": {"processor": "a processor", "threads": 2, "versions": {"torch": "2.13.0"}},
        "results": cells,
    }
    return SpeedResult.model_validate(content)


def analysis(label: str) -> AnalysisResult:
    pos_emb, overrides, _ = USES[label]
    angles = {"undefined": 0.0, "collinear": 0.01, "anomalous": 0.48, "anomalous_by_head": [[0.48, 0.48]]}
    cells = [
        {
            "length": length,
            "documents": 4,
            "angles": angles | {"largest": 3.1},
            "borders": {"k": {"beyond_training": 0.21}},
            "decay": {"distances": [0, 1, 4, 16, 64, 256], "falling": [0.6] * 5, "falling_mean": 0.6}
            | {"change": [0.0, -0.1, -0.3, -0.5, -0.8, -0.9], "low": [0.0, -0.2, -0.5, -0.8, -1.1, -1.3]}
            | {"high": [0.0, 0.1, 0.0, -0.1, -0.3, -0.4]},
            "entropy": {
                "positions": [0, 3, 15, 63, 255],
                "by_position": [0.0, 1.2, 2.3, 3.1, 3.8],
                "by_head": [[2.0, 2.1]],
                "mean": 2.05,
            },
        }
        for length in (512, 2048)
    ]
    protocol = {"text": "angles before rotation", "pairs": 10000, "queries": 64, "seed": 1}
    content = {**header(label, pos_emb, overrides), "protocol": protocol, "documents": DOCUMENTS, "results": cells}
    return AnalysisResult.model_validate(content)


def every_result() -> dict[str, Result]:
    """Files of all tasks by their names."""
    lengths = [512 * 2**at for at in range(7)]
    files: dict[str, Result] = {"speed": speed()}
    for place, (label, (pos_emb, overrides, slope)) in enumerate(USES.items()):
        nlls = {size: 2.95 + 0.02 * place + slope * at for at, size in enumerate(lengths)}
        missing: list[dict[str, str]] = []
        if label == "ALiBi":
            nlls = {size: nll for size, nll in nlls.items() if size < 16384}
            missing = [lacking(f"window {size}", "out of memory", FULL) for size in (16384, 32768)]
        if label == "RoFormer":
            nlls[32768] = 800.0
        common = {"overrides": overrides, "checkpoint__pos_emb": pos_emb, "checkpoint__path": f"runs/350M_{pos_emb}"}
        files[f"perplexity_{place}"] = perplexity(label, nlls, missing=missing, **common)
        accuracies = {size: max(0.02, 1 - 0.2 * slope * at * (0.5 + 0.2 * at)) for at, size in enumerate(lengths[:6])}
        files[f"passkey_{place}"] = passkey(label, accuracies)
    files["recall"] = recall("RoFormer", {512: 1.0, 1024: 0.5, 2048: 0.1})
    refused = [lacking("all", "refused", REFUSED)]
    extended = {
        "overrides": NTK,
        "checkpoint__pos_emb": "alibi",
        "results": [],
        "missing": refused,
        "environment__backend": None,
    }
    files["perplexity_refused"] = perplexity("ALiBi + dynamic NTK", {}, **extended)
    files["perplexity_other"] = perplexity(
        "RoFormer", {512: 3.4, 1024: 5.0}, documents__sha256="bb22", documents__sources=["code/test"]
    )
    for place, label in enumerate(("RoFormer", "CoCA + dynamic NTK")):
        files[f"ruler_{place}"], files[f"harness_{place}"] = (
            ruler(label, lengths[:5]),
            harness(label, 0.5 + 0.1 * place),
        )
    files["longbench"] = benchmark("RoFormer", {"longbench_qasper": 0.2, "longbench_lcc": 0.5}, cut=3)
    files["longppl"] = longppl("RoFormer", {8192: 2.5, 16384: 4.0})
    files["margin_0"] = margin("RoFormer", {512: 9.0, 1024: 0.5, 2048: -3.0})
    files["margin_1"] = margin("CoCA + dynamic NTK", {512: 8.0, 1024: 7.0}, facts=6, documents=3)
    files["needle"], files["analysis"] = needle("CoCA + dynamic NTK", lengths[:6]), analysis("RoFormer")
    return files


def sections_of(paths: Sequence[str | Path], **options: Any) -> tuple[Section, ...]:
    """The sections of the report of these files."""
    return report_document(read_results(paths), "", ReportOptions(**options)).sections


def write(folder: Path, results: dict[str, Result]) -> list[Path]:
    """Each as FOLDER/NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in results.items():
        write_record(folder / f"{name}.json", content)
    return [folder / f"{name}.json" for name in results]


def write_costs(file: Path, label: str) -> None:
    """A file of costs beside a result of perplexity."""
    costs = [
        Cost(
            at=f"window {size}",
            seconds=size / 100,
            tokens=4092,
            tokens_per_second=409200 / size,
            peak_memory_bytes=size * 3**9,
        )
        for size in (512, 1024, 2048)
    ]
    write_record(cost_path(file), Costs(label=label, task="perplexity", device="NVIDIA H200", costs=costs))


LONG_LABEL = "CoCA-Slack with a label that is longer than those of the others"


def ablation(models: int = 12, seeds: int = 3, lengths: int = 5) -> tuple[dict[str, Result], dict[str, list[Curve]]]:
    """Perplexities, passkeys and learning curves of models that differ little up to the training length; the last model
    has one seed less than the others.
    """
    generator = random.Random(5)
    results: dict[str, Result] = {}
    curves: dict[str, list[Curve]] = {}
    for model in range(models):
        label = LONG_LABEL if model == 1 else f"Method {chr(65 + model)}"
        for seed in range(seeds - (model == models - 1 and seeds > 1)):
            level = 3.0 + 0.005 * model + generator.gauss(0, 0.01)
            cells = []
            for at in range(lengths):
                nll = level + (0.02 + 0.06 * model) * at
                by_document = [1023 * (nll + 0.1 * document + generator.gauss(0, 0.02)) for document in range(8)]
                mean = sum(by_document) / len(by_document) / 1023
                cells.append({**window(512 * 2**at, mean, documents=8), "nll_by_document": by_document})
            used = {"path": f"runs/{model}-s{seed}", "identity": f"{model}-{seed}-5ad1c0ffee7715", "seed": seed}
            changes = {f"checkpoint__{name}": value for name, value in used.items()}
            documents = DOCUMENTS | {"count": 8}
            results[f"perplexity_{model}_{seed}"] = perplexity(label, {}, results=cells, documents=documents, **changes)
            shares = {512 * 2**at: max(0.0, 1 - 0.05 * at * generator.random() * model) for at in range(lengths)}
            found = passkey(label, shares)
            checkpoint = found.checkpoint.model_copy(update=used)
            results[f"passkey_{model}_{seed}"] = found.model_copy(update={"checkpoint": checkpoint})
            points = [
                CurvePoint(
                    step=10 * at,
                    tokens=640_000 * at,
                    train_loss=level + 4 / at + generator.gauss(0, 0.02),
                    validation_loss=level + 4 / at if at % 50 == 0 else None,
                )
                for at in range(1, 201)
            ]
            curves.setdefault(label, []).append(Curve(seed=seed, points=points))
    return results, curves
