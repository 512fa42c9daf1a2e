"""Write the pages, and the tables in pages, that are generated from the code: `python docs/generate.py`.

With `--check` it writes nothing, prints the names of outdated pages, and exits with status 1 if there are any.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import megatron_coca
from megatron_coca import methods
from megatron_coca.ablation.cells import packed_records
from megatron_coca.ablation.file import AblationFile, read_ablation
from megatron_coca.attention.build import AUTOMATIC, BACKENDS, automatic, build_method
from megatron_coca.attention.inputs import Band, Needs
from megatron_coca.commands.estimate import DEFAULT_MFU, GPUS, Gpu
from megatron_coca.config import Config, backends, load_config
from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.load import literal_values
from megatron_coca.config.metric_sinks import selectable
from megatron_coca.config.neox_keys import ALIASES, DIFFERENT, INERT, SAME, UNSUPPORTED, UNSUPPORTED_CHOICES
from megatron_coca.config.position import DEFAULTS, ORIGINAL
from megatron_coca.config.schema import GROUPS, MAPPINGS, SELECTORS
from megatron_coca.evaluation.stretch.choices import FINETUNED
from megatron_coca.methods import Option
from megatron_coca.model.cost import peak_flops
from megatron_coca.support.safe_yaml import read_yaml
from megatron_coca.training.estimate import estimate, fits

# Keys -----------------------------------------------------------------------------------------------------------------

CONFIG_INTRODUCTION = """\
# Configuration

<!-- Written by `python docs/generate.py`; edit the schema instead. -->

A run is configured by one or more YAML or JSON files, merged left to right, and then by `key=value` overrides:

    megatron-coca train configs/350M/roformer_coca.yml configs/cluster/cpu.yml train_iters=1000 \\
        rope_scaling.rope_type=dynamic rope_scaling.factor=4.0

```python
from megatron_coca import load_config

config = load_config(["configs/350M/roformer.yml", "configs/extend/dynamic_ntk.yml"], ["optimizer.params.lr=3e-4"])
config.model.head_dim                          # 64
config.override({"rope_scaling": None})        # a new, validated Config
config.to_yaml()                               # every resolved key, flat
```

- Later values win. Mappings are merged key by key: `optimizer: {params: {lr: 1e-3}}` keeps the betas. If a later file
  makes another choice in `rope_scaling`, `relative_positions` or `logit_scaling`, the options of the earlier choice are
  dropped. The run's log names the dropped options.
- Paths are relative to the working folder. In a file, a data path that begins with `./` is relative to the file's
  folder. A leading `~` is the home folder.
- `null` means "not set": the default applies, even if an earlier file set the key. `None` is a text in YAML
  and an error as a value.
- Hyphens and underscores in keys are equivalent. Dots reach into mappings. `1e-4` is a number. An integer
  that begins with 0, such as `0123`, is an error, because YAML 1.1 reads it as octal.
- Duplicate keys in a file, unknown keys, wrong types, invalid choices and invalid combinations are errors. All errors
  are reported at once, with a line `file:line: key: message` for each. If a key of the command line contradicts a file,
  the line begins with `command line, with file:line`.
- Types are strict: an integer is accepted for a number, but a string or boolean is not. Numbers have upper limits, for
  example 2^31 - 1 steps or tokens, and 2^20 features, samples or ranks.
- Choices are case-sensitive, except optimizer types.
- As in GPT-NeoX, files need no `.yml` on a command line, and `-d FOLDER` (`--conf_dir`) is the folder of all of them:
  `megatron-coca estimate -d configs 350M/alibi cluster/cpu`. This works for `train`, `estimate`, `generate`, `evaluate`
  (files after `--variant` and `--config`) and `inspect`.

GPT-NeoX's keys have the same meaning here, with the exceptions that the end of this page lists. It also lists the keys
without effect and the keys of unsupported features, which accept only GPT-NeoX's default. Of GPT-NeoX's 59
configuration files, 36 models and 8 overlays load unchanged. The other 15 are errors, because they use Mamba, RWKV,
Transformer Engine, bitsandbytes, sparse attention, gMLP, Comet, misspelled keys, or (in 20B)
tensor ranks within pipeline stages, which DeepSpeed's AutoTP does not support. `tests/neox/upstream_files.yaml` lists
the keys.

## Keys
"""


OPTION_TYPES = {
    "count": "int",
    "whole": "int",
    "positive": "number",
    "share": "number",
    "factor": "number",
    "flag": "true \\| false",
    "positives": "list",
    "angle": "number \\| random",
}
"""Names of option types in the tables, by the kind of a declared option."""
CHOSEN = ("pos_emb", "logit_scaling", "forgetting_gate")
"""Keys with the name of a declared choice as their value."""


def config_page() -> str:
    """Return the text of docs/config.md, which describes every key."""
    return "\n".join([CONFIG_INTRODUCTION, *_groups(), *_other_keys()]) + "\n"


def _groups() -> Iterator[str]:
    for name, kind in GROUPS.items():
        yield f"### {name}\n\n{(kind.__doc__ or '').strip()}\n"
        yield _table(("key", "type", "default", "meaning"), _rows(kind, ""))
    for key, selector in SELECTORS.items():
        choices = methods.TABLES[key]
        if any(choice.options for choice in choices.values()):
            yield f"### {key}\n\nThe choice `{key}.{selector}` and its options. The formulas are in attention.md.\n"
            named = " \\| ".join(choices)
            first = (f"`{key}.{selector}`", "", named, f"`{DEFAULTS[key]}`" if key in DEFAULTS else "required", "")
            yield _table(("key", "of", "type", "default", "meaning"), [first, *_options(key)])
    yield "### pos_emb_options\n\nThe options of `pos_emb`, as a mapping. The formulas are in attention.md.\n"
    yield _table(("key", "of", "type", "default", "meaning"), _options("pos_emb", "pos_emb_options"))
    yield "### metric_sinks\n\nThe sinks in the mapping `metric_sinks` and their options; see docs/observability.md.\n"
    yield _table(("key", "type", "default", "meaning"), _sink_options())
    for key, kind in MAPPINGS.items():
        yield f"### {key}\n\n{(kind.__doc__ or '').strip()} Inside the key `{key}`:\n"
        yield _table(("key", "type", "default", "meaning"), _rows(kind, f"{key}."))


def _options(key: str, shown: str | None = None) -> Iterator[tuple[str, ...]]:
    """Yield a row for every option of a key's choices, with the choices that read it. Choices with equal options share
    a row. `shown` is the key of the options, if it is another one.
    """
    if key == "rope_scaling":
        meaning = (
            "L in the formula; null: seq_length. If the model is fine-tuned at seq_length, set its earlier length."
        )
        yield f"`{key}.{ORIGINAL}`", "all", "int", "`null`", meaning
    readers: dict[Option, list[str]] = {}
    for choice in methods.TABLES[key].values():
        for option in choice.options:
            readers.setdefault(option, []).append(choice.name)
    for option, names in readers.items():
        kind = " \\| ".join(option.choices) or OPTION_TYPES[option.kind]
        default = "required" if option.required else option.shown or _value(option.default)
        yield f"`{shown or key}.{option.name}`", ", ".join(names), kind, default, option.meaning


def _sink_options() -> Iterator[tuple[str, ...]]:
    for name, sink in selectable().items():
        for option in sink.options:
            kind = {"text": "string", "folder": "string", "flag": OPTION_TYPES["flag"]}[option.kind]
            default = "required" if option.required else _value(option.default)
            yield f"`metric_sinks.{name}.{option.name}`", kind, default, option.meaning


def _rows(kind: type[ConfigGroup], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        yield (
            f"`{prefix}{field.alias or name}`",
            _type(name, field.annotation),
            _default(field),
            field.description or "",
        )


def _type(name: str, annotation: Any) -> str:
    """Return the YAML type (`int`, `number`, `string`, ...), or the choices."""
    if name in CHOSEN:
        return " \\| ".join(methods.TABLES[name])
    names = {int: "int", float: "number", str: "string", bool: "true \\| false", list: "list", tuple: "list"}
    kind = get_origin(annotation) or annotation
    if kind is Annotated:
        return _type("", get_args(annotation)[0])
    if kind in (Union, UnionType):
        members = (_type("", member) for member in get_args(annotation) if member is not type(None))
        return " \\| ".join(dict.fromkeys(members))
    choices = literal_values(annotation)
    return " \\| ".join(_escaped(choice) for choice in choices) or names.get(kind, "mapping")


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "follows" in extra:
        return f"`{extra['follows']}`"
    if isinstance(extra, dict):
        return _value(extra["default"])
    if field.is_required():
        return "required"
    return _value(list(field.default) if isinstance(field.default, tuple) else field.default)


def _value(value: Any) -> str:
    return f"`{_escaped(_plain(value))}`"


def _plain(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).replace("\n...", "").strip()


def _escaped(value: Any) -> str:
    """Escape a value for a table cell."""
    return str(value).replace("|", "\\|")


def _other_keys() -> Iterator[str]:
    yield "## Aliases\n"
    yield _table(("alias", "key"), ((f"`{alias}`", f"`{key}`") for alias, key in ALIASES.items()))
    yield "## GPT-NeoX keys with a different meaning\n"
    yield "The comparison is with the code of GPT-NeoX commit ea7aefd8.\n"
    yield _table(("key", "difference"), ((f"`{key}`", _escaped(words)) for key, words in sorted(DIFFERENT.items())))
    yield f"The other {len(SAME)} keys that both projects have, such as `hidden_size`, have the same meaning.\n"
    yield "## GPT-NeoX keys without effect\n"
    yield _grouped("reason", "keys", ((reason, f"`{key}`") for key, reason in INERT.items()))
    yield "## Unsupported values of GPT-NeoX keys\n"
    choices = (
        (f"`{key}: {choice}`", why)
        for key, unsupported in UNSUPPORTED_CHOICES.items()
        for choice, why in unsupported.items()
    )
    yield _table(("value", "feature"), choices)
    yield "## Unsupported GPT-NeoX keys\n"
    accepted = ((feature, f"`{key}: {_plain(default)}`") for key, (default, feature) in UNSUPPORTED.items())
    yield _grouped("feature", "keys with their accepted values", accepted)


def _grouped(head: str, members: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a table with one row per distinct first column, in which all its second columns are joined."""
    groups: dict[str, list[str]] = {}
    for first, second in rows:
        groups.setdefault(first, []).append(second)
    return _table((head, members), ((first, ", ".join(found)) for first, found in groups.items()))


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# Attention backends ---------------------------------------------------------------------------------------------------

_WINDOW = 256
_NEAR = Band(0, _WINDOW)

FURTHER: dict[str, Needs] = {
    "`sliding_window_width`, or `relative_positions: streaming` with `sinks: 0`": Needs("cuda", bands=(_NEAR,)),
    "`attention_dropout` above 0, with `rotary` and similar methods": Needs("cuda", dropout=0.1),
    "`attention_dropout` above 0, with `alibi`": Needs("cuda", bias="linear", dropout=0.1),
    "`attention_dropout` above 0, with `rerope` and similar maps": Needs(
        "cuda", bands=(_NEAR, Band(_WINDOW)), dropout=0.1
    ),
    "`sliding_window_width` with `alibi`": Needs("cuda", bias="linear", bands=(_NEAR,)),
    "`reset_attention_mask`, with `rotary` and similar methods": Needs("cuda", packed=True),
    "`forgetting_gate`, with `rotary` and similar methods": Needs("cuda", head_dim=72, gates=True),
    "`forgetting_gate`, with `alibi`": Needs("cuda", head_dim=72, bias="linear", gates=True),
    "heads of 60 features, with `rotary` and similar methods": Needs("cuda", head_dim=60),
}
"""Rows of the backend tables in addition to those of the declared choices."""


def needs() -> dict[str, Needs]:
    """Return the rows of the tables: labels and needed features. Choices that need the same features share a row."""
    named: dict[Needs, list[str]] = {}
    labels: dict[Needs, str] = {}
    for key in ("pos_emb", "relative_positions"):
        for name, choice in methods.TABLES[key].items():
            if choice.compute is None:
                found = _needs_of(choice)
                labels.setdefault(found, f"{key}: {name}")
                named.setdefault(found, []).append(name)
    rows = {}
    for found, (_, *others) in named.items():
        rows[", ".join([f"`{labels[found]}`", *(f"`{name}`" for name in others)])] = found
    return rows | FURTHER


def _needs_of(choice: methods.Choice) -> Needs:
    """Return the features that a model with this choice and otherwise default keys needs, for fixed windows."""
    shape = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 2 * _WINDOW}
    if choice.key == "pos_emb":
        config = load_config([], shape | {"pos_emb": choice.name})
    else:
        wanted = {"window": _WINDOW, "sinks": 4, "target_length": 8 * _WINDOW}
        options = {option.name: wanted[option.name] for option in choice.options if option.name in wanted}
        config = load_config([], shape | {"pos_emb": "rotary", choice.key: {"type": choice.name} | options})
    return build_method(config.position, config.model).needs("cuda", 0.0)


CPU_COLUMNS = tuple(name for name in BACKENDS if name not in ("flex", "triton"))

BACKENDS_INTRODUCTION = """\
# Attention backends

<!-- Written by `python docs/generate.py`; change the code, not this page. -->

`attention_backend` names one of these backends, or `auto`. `auto` selects the first backend that supports the model, in
this order: {automatic}.

There are exceptions (`PREFERRED` in `attention/build.py`) until all backends have been timed on a GPU:

- For packed documents that must not attend to each other, and for biases without a formula in our kernels (such as
  `rpe`), `auto` tries `flex` first.
- For other biases of the distance, it tries `triton` first.
- For maps with two bands of pairs, such as ReRoPE, it selects `triton` on a GPU.

If a named backend does not support the model, the run stops and shows the reason; it does not fall back to another
backend. A number in a table refers to a reason below the table.

| backend | description |
| --- | --- |
{summaries}

All backends support grouped queries, packed documents, and queries that are the last tokens of a longer key sequence.
`rope_scaling`, `logit_scaling` and the frequencies change only the operands, so the tables have no row for them.
Install `triton` with `pip install triton`. [speed.md](speed.md#on-an-h100) has times on a GPU.
"""


def backends_page() -> str:
    """Return the text of docs/backends.md, which describes the features that each attention backend supports."""
    candidates = "; ".join(
        f"on {device_type} {', '.join(f'`{name}`' for name in names)}" for device_type, names in AUTOMATIC.items()
    )
    summaries = "\n".join(f"| `{name}` | {declared.summary} |" for name, declared in backends.BACKENDS.items())
    parts = [
        BACKENDS_INTRODUCTION.format(automatic=candidates, summaries=summaries),
        "## On CUDA\n",
        _support("cuda", tuple(BACKENDS)),
        "## On the CPU\n\n`flex` and `triton` train only on CUDA.\n",
        _support("cpu", CPU_COLUMNS),
    ]
    return "\n".join(parts)


def _support(device_type: str, columns: tuple[str, ...]) -> str:
    """Return a table of the entries of `needs`, and numbered reasons below it. Entries with equal cells share a row."""
    numbers: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for label, wanted in needs().items():
        asked = replace(wanted, device_type=device_type)
        said = {name: BACKENDS[name].supports(asked) for name in columns}
        cells = [_cell(name, reason, numbers) for name, reason in said.items()]
        chosen = next((f"`{name}`" for name in automatic(asked) if said[name] is None), "an error")
        rows.setdefault((chosen, *cells), []).append(label)
    table = _table(
        ("needed feature", "auto", *columns), (("; ".join(labels), *cells) for cells, labels in rows.items())
    )
    return "\n".join([table, *_notes(numbers)]) + "\n"


def _cell(name: str, reason: str | None, numbers: dict[str, int]) -> str:
    """Return "yes", or the number of the reason, which is added to `numbers` if it is new."""
    return "yes" if reason is None else str(numbers.setdefault(f"`{name}`: {reason}", len(numbers) + 1))


def _notes(numbers: dict[str, int]) -> Iterable[str]:
    return (f"{number}. {reason}" for reason, number in numbers.items())


# Tables of methods ----------------------------------------------------------------------------------------------------


def forms_table() -> str:
    rows = [
        (f"`{name}`", choice.query, choice.key_operand, choice.bias, choice.source)
        for name, choice in methods.TABLES["pos_emb"].items()
    ]
    return _table(("`pos_emb`", "`Q'`", "`K'`", "bias", "source"), rows)


def choices_table(key: str, head: tuple[str, ...]) -> str:
    """Return a table with a row for every choice of a key: name, rule, options with defaults, and source."""
    rows = []
    for name, choice in methods.TABLES[key].items():
        given = (f"`{option.name}`{f' {shown}' if (shown := _shown(option)) else ''}" for option in choice.options)
        rows.append((f"`{name}`", choice.rule, ", ".join(given), choice.source))
    return _table(head, [row for row in rows if row[1]])


def _shown(option: Option) -> str:
    return option.shown or ("" if option.required or option.default is None else str(option.default))


def readme_table() -> str:
    def listed(key: str) -> str:
        names = []
        for name, choice in methods.TABLES[key].items():
            if name not in ("default", "none") or key == "pos_emb":
                names.append(f"`{name}`{' (trained)' if choice.trained else ''}")
        return ", ".join(names)

    rows = [
        ("score form or bias", "`pos_emb`", listed("pos_emb")),
        ("frequencies of training", "`rotary_frequencies`", listed("rotary_frequencies")),
        ("frequency extension", "`rope_scaling`", listed("rope_scaling")),
        ("relative-position map", "`relative_positions`", listed("relative_positions")),
        ("logit scaling", "`logit_scaling`", listed("logit_scaling")),
        ("forgetting gate", "`forgetting_gate`", listed("forgetting_gate")),
        ("layers that differ", "`layer_types`", "any of these keys per layer type, and `sliding_window_width`"),
    ]
    return _table(("choice", "key", "values"), rows)


def public_table() -> str:
    """Return a table of the package's top-level names, each with the first sentence of its docstring."""
    rows = []
    for name in sorted(megatron_coca.__all__, key=str.lower):
        first = " ".join(str(getattr(megatron_coca, name).__doc__).partition("\n\n")[0].split())
        rows.append((f"`{name}`", first.partition(". ")[0].removesuffix(".")))
    return _table(("name", "meaning"), rows)


# Estimates ------------------------------------------------------------------------------------------------------------

LLAMA = ROOT / "configs/finetune/llama7b_coca.yml"
ADAPTED_TOKENS = 50_000_000
ADAPTED_GPUS = {"24 GB": "4090", "48 GB": "L40S", "80 GB": "A100-80"}
ADAPTED_LENGTHS = (8192, 32_768)
LEARNED = ("pope",)
"""Methods with weights of their own, which `lora.also` must name."""


def _adapted(method: str, length: int) -> Config:
    """Return the configuration of a run that trains LLaMA-7B with adapters on one GPU at a length."""
    keys: dict[str, Any] = {"stages": None, "pos_emb": "rotary", "engine": "native", "zero_optimization": None}
    keys |= {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "seq_length": length}
    also = ["norms", "embedding", *(["positions"] if method in LEARNED else [])]
    changes = FINETUNED[method](length / 2048, 2048)
    return load_config(LLAMA, keys).override([*changes, f"lora.also=[{', '.join(also)}]"])


def _hours(config: Config, gpu: Gpu) -> str:
    found = estimate(config, 1, peak_flops(gpu.device) or 0.0, DEFAULT_MFU)
    hours = ADAPTED_TOKENS / found.tokens_per_second / 3600
    return f"{hours:.1f} h" if fits(found.memory, gpu.memory) else "does not fit"


def adapters_table() -> str:
    """Return the memory and time of LLaMA-7B with adapters on one GPU, by length and position method. Methods with
    equal numbers share a row.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for length, method in product(ADAPTED_LENGTHS, (name for name in FINETUNED if name != "coca_stages")):
        config = _adapted(method, length)
        memory = estimate(config, 1, 1.0, 1.0).memory.total / 2**30
        times = (_hours(config, GPUS[name]) for name in ADAPTED_GPUS.values())
        rows.setdefault((f"{length:,}", f"{memory:.1f} GiB", *times), []).append(f"`{method}`")
    head = ("length", "methods", "memory", *(f"{size}: {name}" for size, name in ADAPTED_GPUS.items()))
    return _table(head, [(length, ", ".join(names), *cells) for (length, *cells), names in rows.items()])


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
RECIPE: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "1, optimizer in host memory": (1, OFFLOAD),
    "8": (8, {}),
}
"""The number of GPUs and further keys of each row of the table of the recipe."""


def recipe_table() -> str:
    """Return the memory of one GPU and the days of each stage of the recipe for LLaMA-7B."""
    rows, gpu = [], GPUS["A100-80"]
    for label, (count, keys) in RECIPE.items():
        cells, days = [], 0.0
        for stage in load_config(LLAMA, keys).run_stages():
            steps = stage.last - stage.first
            found = estimate(stage.config, count, peak_flops(gpu.device) or 0.0, DEFAULT_MFU)
            own = steps * found.tokens_per_step / found.tokens_per_second / 86400
            days += own
            room = "" if fits(found.memory, gpu.memory) else ": does not fit"
            cells.append(f"{found.memory.total / 2**30:.1f} GiB{room}, {own:.1f} days")
        rows.append((label, *cells, f"{days:.0f} days"))
    return _table(("A100-80", "stage 1", "stage 2", "stage 3", "all stages"), rows)


# Studies --------------------------------------------------------------------------------------------------------------


def costs_table() -> str:
    """Return how many of the models that each study names have results, and how many hours they took."""
    rows = []
    for study, paths in groupby(sorted((ROOT / "studies").glob("*/*.yml")), lambda path: path.parent.name):
        plans = [read_ablation(path, scale) for path in paths for scale in read_yaml(path).get("scales") or ()]
        done, seconds = 0, 0.0
        for plan in plans:
            records = [each for each in packed_records(ROOT / plan.results) if each["status"] == "done"]
            done += len(_models(plan).intersection((each["model"], each["seed"]) for each in records))
            seconds += sum(each["training_seconds"] + each["evaluation_seconds"] for each in records)
        if plans:
            planned = sum(len(_models(plan)) for plan in plans)
            rows.append((study, f"{done} of {planned}", f"{seconds / 3600:.1f}"))
    return _table(("study", "models", "hours"), rows)


def _models(plan: AblationFile) -> set[tuple[str, int]]:
    return {(model, seed) for model in plan.models for seed in plan.seeds}


def seeds_table() -> str:
    """Return the seeds that plans of studies train, in order, with the plans."""
    plans: dict[int, list[str]] = {}
    for path in sorted((ROOT / "studies").glob("*/*.yml")):
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
        given = [plan.get("seeds"), *(scale.get("seeds") for scale in (plan.get("scales") or {}).values())]
        for seed in {seed for seeds in given for seed in seeds or ()}:
            plans.setdefault(seed, []).append(f"`{path.parent.name}/{path.name}`")
    rows: list[tuple[str, str]] = []
    # Successive seeds have the same difference from their place in the order.
    for (named, _), run in groupby(enumerate(sorted(plans)), lambda each: (plans[each[1]], each[1] - each[0])):
        seeds = [seed for _, seed in run]
        rows.append((f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}", ", ".join(named)))
    return _table(("seeds", "plans"), rows)


PAGES: dict[str, Callable[[], str]] = {"docs/config.md": config_page, "docs/backends.md": backends_page}
"""Pages that are generated completely."""
TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "methods"): readme_table,
    ("studies/README.md", "costs"): costs_table,
    ("studies/README.md", "seeds"): seeds_table,
    ("docs/python.md", "names"): public_table,
    ("docs/finetuning.md", "adapters"): adapters_table,
    ("docs/finetuning.md", "recipe"): recipe_table,
    ("docs/attention.md", "forms"): forms_table,
    ("docs/attention.md", "frequencies"): lambda: choices_table(
        "rotary_frequencies", ("`type`", "frequencies", "options", "source")
    ),
    ("docs/attention.md", "extensions"): lambda: choices_table(
        "rope_scaling", ("`rope_type`", "frequencies", "options", "source")
    ),
    ("docs/attention.md", "maps"): lambda: choices_table(
        "relative_positions", ("`type`", "far pairs", "options and defaults", "source")
    ),
    ("docs/attention.md", "scalings"): lambda: choices_table(
        "logit_scaling", ("`logit_scaling`", "factor on the logits of position `m`", "options", "source")
    ),
    ("docs/attention.md", "gates"): lambda: choices_table(
        "forgetting_gate", ("`forgetting_gate`", "log gate of a token x", "options", "source")
    ),
}
"""Generated tables in other pages, between `<!-- NAME -->` and `<!-- end -->`."""


def generated() -> Iterator[tuple[Path, str]]:
    """Yield every file with generated text, and its current text."""
    for name, write in PAGES.items():
        yield ROOT / name, write()
    for name in dict.fromkeys(name for name, _ in TABLES):
        text = (ROOT / name).read_text(encoding="utf-8")
        for (page, mark), table in TABLES.items():
            if page == name:
                begin, end = f"<!-- {mark} -->\n\n", "\n<!-- end -->"
                before, found, rest = text.partition(begin)
                assert found and end in rest, f"{name}: has no {begin.strip()} with {end.strip()} after it"
                text = before + begin + table() + end + rest.partition(end)[2]
        yield ROOT / name, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and name pages that are not current")
    check = parser.parse_args().check
    stale = [(path, text) for path, text in generated() if path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
