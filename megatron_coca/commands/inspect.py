"""Inspect prepared data, the samples that a run will read, checkpoints and position methods.

    megatron-coca inspect sample configs/350M/roformer_coca.yml --number 1000 train_batch_size=64
    megatron-coca inspect lengths data/mine
    megatron-coca inspect mixture configs/350M/roformer_coca.yml
    megatron-coca inspect verify data/mine
    megatron-coca inspect checkpoint runs/350M_roformer_coca                  # all steps of a run
    megatron-coca inspect checkpoint runs/350M_roformer_coca/global_step5000 --no-verify
    megatron-coca inspect method configs/350M/roformer.yml configs/350M/roformer_coca.yml --output page.html
    megatron-coca inspect method configs/350M/roformer.yml --variant YaRN configs/extend/yarn.yml --output yarn.html

The exit status is 1 if verify finds a fault or a checkpoint is damaged, and 2 for invalid input.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.commands import command_parser, count
from megatron_coca.config import Config, ConfigError, load_config, split_inputs
from megatron_coca.data import inspection
from megatron_coca.data.blend import Blend
from megatron_coca.data.errors import DataError
from megatron_coca.data.verify import verify_shards
from megatron_coca.evaluation.options import token_count
from megatron_coca.support.arguments import expanded, local_path
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.markdown_tables import format_table, percent
from megatron_coca.support.plain_text import plain
from megatron_coca.training.corpus import SPLITS, Corpus, open_corpus, open_split
from megatron_coca.training.opened_stages import OpenedStage, open_stages
from megatron_coca.training.topology import Topology


class Result(NamedTuple):
    """The text to print, the values for --json, and whether the data are faulty."""

    text: str
    facts: Any
    faulty: bool = False


def _stages(config: Config, options: argparse.Namespace) -> list[OpenedStage]:
    """Return the stages of a run with their data; an empty list without stages and for held-out data."""
    if options.split != "train" or not config.schedule.stages:
        return []
    return open_stages(config, Topology(pipe=1, data=options.ranks, tensor=1, sequence=1))


def _open_blend(
    config: Config, options: argparse.Namespace, stages: Sequence[OpenedStage] = ()
) -> tuple[Corpus, Blend]:
    """Return the corpus of the configuration, or of the last of `stages`, and its blend for the selected split."""
    corpus = stages[-1].corpus if stages else open_corpus(config)
    opened = {"train": corpus.train, "valid": corpus.valid}
    blend = opened[options.split] if options.split in opened else open_split(corpus.config, options.split)
    if not isinstance(blend, Blend | None):
        raise DataError("synthetic: a synthetic task has no shards; see docs/recall.md for its samples")
    if blend is None:
        raise DataError(f"--split {options.split}: the configuration has no such data; set {options.split}_data_paths")
    return corpus, blend


def _sample(options: argparse.Namespace) -> Result:
    config = load_config(*split_inputs(options.inputs))
    begun = [opened for opened in _stages(config, options) if opened.corpus.start[1] <= max(0, options.number)]
    corpus, blend = _open_blend(config, options, begun)
    view = inspection.view_sample(blend, options.number)
    text = inspection.sample_text(view, corpus.tokenizer, options.tokens)
    stage = {"stage": len(begun) - 1} if begun else {}
    return Result(f"stages[{stage['stage']}], {text}" if stage else text, view.facts() | stage)


def _mixture(options: argparse.Namespace) -> Result:
    config, sources = load_config(*split_inputs(options.inputs)), list[dict[str, Any]]()
    if stages := _stages(config, options):
        if options.samples is not None:
            raise DataError(
                "--samples: not supported for a run with stages, which set the number of samples; leave it out"
            )
        tables, facts = [], []
        for number, (stage, corpus, sizes, _) in enumerate(stages):
            on_disk = {shard.name: shard.len_tokens for opened in stages for shard in opened.corpus.train.shards}
            shares = corpus.mixture(stage.last, sizes.total)
            sources = [{"tokens_on_disk": on_disk[share.source], **asdict(share)} for share in shares]
            tables.append(f"up to the end of stages[{number}], step {stage.last:,}:\n\n{_mixture_table(sources)}")
            facts.append({"last": stage.last, "sources": sources})
        return Result("\n\n".join(tables), {"stages": facts})
    corpus, blend = _open_blend(config, options)
    samples = options.samples
    if samples is None:
        steps = corpus.config.schedule.train_iters
        if steps is None:
            raise DataError("train_iters: not set; set it, or give --samples")
        samples = steps * corpus.config.batch.resolve(options.ranks).total
    sources = inspection.mixture(blend, samples)
    return Result(_mixture_table(sources), {"samples": samples, "sources": sources})


def _mixture_table(sources: Sequence[dict[str, Any]]) -> str:
    header = ("source", "tokens on disk", "weight", "achieved", "samples", "tokens read", "epochs")
    names = ("tokens_on_disk", "weight", "fraction", "samples", "tokens", "epochs")
    shares = ("weight", "fraction")
    rows = [[s["source"], *(percent(s[name]) if name in shares else s[name] for name in names)] for s in sources]
    return format_table(header, rows)


def _lengths(options: argparse.Namespace) -> Result:
    facts = inspection.lengths_by_source(inspection.find_shards(options.shards))
    columns = ["documents", "tokens", "min", *inspection.QUANTILES, "max", "mean"]
    quantiles = [[source, *(values[name] for name in columns)] for source, values in facts.items()]
    longer = [[source, *map(percent, f["share_of_tokens_in_longer"].values())] for source, f in facts.items()]
    tables = [
        format_table(["source", *columns], quantiles),
        format_table(["tokens in documents longer than", *map(str, inspection.THRESHOLDS)], longer),
    ]
    return Result("\n\n".join(tables), facts)


def _verify(options: argparse.Namespace) -> Result:
    results = verify_shards(inspection.find_shards(options.shards), show=True)
    rows = [[str(r.place), r.tokens, "yes" if r.content else "no", len(r.faults)] for r in results]
    faults = [f"FAULT {fault}" for result in results for fault in result.faults]
    table = format_table(["shard", "tokens", "content compared", "faults"], rows)
    facts = [asdict(result) | {"place": str(result.place)} for result in results]
    return Result("\n".join([table, "", *(faults or ["no fault was found"])]), facts, bool(faults))


def _checkpoint(options: argparse.Namespace) -> Result:
    from megatron_coca.checkpoints.inspection import checkpoints_in, describe, describe_text

    found = [describe(folder, not options.no_verify) for folder in checkpoints_in(options.path)]
    text = "\n\n".join(describe_text(each) for each in found)
    return Result(text, [each.facts() for each in found], any(each.damage for each in found))


def _method(options: argparse.Namespace) -> Result:
    if options.output.suffix != ".html":
        raise ConfigError(f"--output: {options.output}: must be an HTML file; name it {options.output.stem}.html")
    from megatron_coca.attention.inputs import BackendError
    from megatron_coca.evaluation.options import read_variants
    from megatron_coca.evaluation.report import method_page
    from megatron_coca.evaluation.report.document import console_text

    files, overrides = split_inputs(options.inputs)
    models = _models(files, overrides)
    given = argparse.Namespace(variant=options.variant or [["plain"]], overrides=[], ignored_keys=[], label=None)
    variants = read_variants(given)
    trained = [load_config(model, overrides) for model in models]
    length = options.length or 4 * max(config.model.seq_length for config in trained)
    shown, left_out = [], []
    for (model, config), variant in product(zip(models, trained, strict=True), variants):
        name = " + ".join(Path(file).stem for file in model)
        try:
            changed = config
            if variant.files or variant.overrides:
                changed = load_config([*model, *variant.files], [*overrides, *variant.overrides])
            shown += method_page.shown_methods(name, variant.label, config, changed, length)
        except (BackendError, ConfigError) as error:
            left_out.append(f"left out: {name} with {variant.label}: {error}")
    if not shown:
        raise ConfigError("\n".join(left_out))
    page, drawn = method_page.method_page(shown)
    written = method_page.write_page(page, options.output)
    facts = {name: [asdict(panel) for panel in panels] for name, panels in drawn.items()}
    return Result("\n".join([console_text(page), "", *left_out, *map(str, written)]), facts)


def _models(files: Sequence[str], overrides: Sequence[str]) -> list[list[str]]:
    """Return the files of each model. A file that describes a complete model begins a new model; others are overlays.

    Only the first file is tested with the overrides: if they set a complete shape, every overlay would be a model.
    """
    models: list[list[str]] = []
    for file in files:
        try:
            load_config([file], () if models else overrides)
        except ConfigError:
            if not models:
                raise
            models[-1].append(file)
        else:
            models.append([file])
    if not models:
        raise ConfigError("configuration: no file given; name at least one, such as configs/350M/roformer.yml")
    return models


def parser() -> argparse.ArgumentParser:
    options = command_parser("inspect", __doc__)
    commands = options.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], Result], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", type=local_path, metavar="FILE", help="also write the values to this file")
        added.set_defaults(run=run)
        return added

    sample = command("sample", _sample, "decode one sample of a run")
    mixture = command("mixture", _mixture, "show how many tokens a run reads from each source")
    lengths = command("lengths", _lengths, "show document lengths by source; reads only the index files")
    verify = command("verify", _verify, "compare shards with their manifest and index; reads all tokens")
    checkpoint = command("checkpoint", _checkpoint, "describe checkpoints, and compare files with their checksums")
    method = command("method", _method, "draw the position methods of configurations side by side")
    for added in (sample, mixture, method):
        added.add_argument(
            "inputs",
            nargs="+",
            metavar="CONFIG.yml | key=value",
            help="config files and key=value pairs, as for `megatron-coca train`",
        )
    for added in (sample, mixture):
        added.add_argument("--split", choices=SPLITS, default="train")
        added.add_argument("--ranks", type=count, default=1, help="number of processes, if train_batch_size is not set")
    method.add_argument("--length", type=token_count, help="length in tokens of the input to draw; default: 4 times L")
    changed = "a label, then YAML overlays and KEY=VALUE pairs for evaluating every configuration; may be repeated"
    method.add_argument("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=changed)
    method.add_argument(
        "--output",
        type=local_path,
        required=True,
        metavar="FILE.html",
        help="page to write; figures are written beside it",
    )
    sample.add_argument("--number", type=int, required=True, help="sample number in the run's order, from 0")
    mixture.add_argument("--samples", type=count, help="number of samples; default: train_iters times the batch")
    sample.add_argument("--tokens", action="store_true", help="show each token as id:piece")
    for added in (lengths, verify):
        added.add_argument(
            "shards", type=expanded, nargs="+", metavar="PREFIX | FOLDER", help="shards, or folders of shards"
        )
    checkpoint.add_argument(
        "path",
        type=expanded,
        help="a run's save folder or one of its step folders, or the URL of one on an object store",
    )
    checkpoint.add_argument("--no-verify", action="store_true", help="compare only names and sizes")
    return options


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. key=value may also follow options, which argparse does not support."""
    options, rest = parser().parse_known_args(arguments)
    if rest and not (hasattr(options, "inputs") and all("=" in text and not text.startswith("-") for text in rest)):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.inputs += rest
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Return status 0, 1 for faulty data, or 2 for an OSError. Raises DataError, ConfigError, CheckpointError."""
    options = read_arguments(arguments)
    try:
        result = options.run(options)
        print(plain(result.text))
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_file(options.json, json.dumps(result.facts, indent=1) + "\n")
    except OSError as error:
        if error.filename is None:  # of the output
            raise
        print(f"megatron-coca inspect: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return int(result.faulty)
