"""Inspect prepared data, the samples that a run will read, checkpoints and position methods.

    megatron-coca inspect sample configs/350M/roformer_coca.yml --number 1000 train_batch_size=64
    megatron-coca inspect lengths data/mine
    megatron-coca inspect chat chats.jsonl --vocab-file models/Qwen3-0.6B --chat-template qwen3
    megatron-coca inspect mixture configs/350M/roformer_coca.yml
    megatron-coca inspect verify data/mine
    megatron-coca inspect checkpoint runs/350M_roformer_coca                  # all steps of a run
    megatron-coca inspect checkpoint runs/350M_roformer_coca/global_step5000 --no-verify
    megatron-coca inspect method configs/350M/roformer.yml configs/350M/roformer_coca.yml --output page.html
    megatron-coca inspect mup configs/350M/roformer_coca.yml num_layers=2 --widths 64,128,256 --output changes.svg
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
from typing import Any, NamedTuple, get_args

import numpy as np

from megatron_coca.commands import command_parser, count
from megatron_coca.config import Config, ConfigError, load_config, split_inputs
from megatron_coca.data import inspection
from megatron_coca.data.blend import Blend
from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers import TOKENIZERS, load_tokenizer
from megatron_coca.data.tokenizers.chat import shipped_templates, template_path, with_source, with_variables
from megatron_coca.data.tokenizers.chat_labels import Counted, encode_chat, roles_of
from megatron_coca.data.verify import verify_shards
from megatron_coca.evaluation.options import int_list, token_count, whole_number
from megatron_coca.support.arguments import (
    add_chat_variables,
    add_configurations,
    add_source_options,
    expanded,
    local_path,
    source_keys,
)
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.markdown_tables import format_table, percent
from megatron_coca.support.plain_text import plain
from megatron_coca.training.corpus import SPLITS, Corpus, open_corpus, open_split
from megatron_coca.training.opened_stages import OpenedStage, open_stages
from megatron_coca.training.topology import Topology

GREEN = ("\x1b[32m", "\x1b[0m")
"""Terminal codes that are printed before and after the text of an answer."""


class Inspection(NamedTuple):
    """The text to print, the values for --json, and whether the data are faulty. If `coloured` is set, the text has
    colours and is already safe for a terminal.
    """

    text: str
    facts: Any
    faulty: bool = False
    coloured: bool = False


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


def _sample(options: argparse.Namespace) -> Inspection:
    config = load_config(*split_inputs(options.inputs, options.conf_dir))
    begun = [opened for opened in _stages(config, options) if opened.corpus.start[1] <= max(0, options.number)]
    corpus, blend = _open_blend(config, options, begun)
    view = inspection.view_sample(blend, options.number)
    text = inspection.sample_text(view, corpus.tokenizer, options.tokens)
    stage = {"stage": len(begun) - 1} if begun else {}
    return Inspection(f"stages[{stage['stage']}], {text}" if stage else text, view.facts() | stage)


def _chat(options: argparse.Namespace) -> Inspection:
    tokenizer = load_tokenizer(options.tokenizer_type, options.vocab_file, options.merge_file)
    if options.chat_template is not None:
        tokenizer.chat = with_source(tokenizer.chat, template_path(options.chat_template))
    if tokenizer.chat is not None:
        tokenizer.chat = with_variables(tokenizer.chat, options.chat_template_kwargs)
    place, record = inspection.read_chat(options.file, max(0, options.number))
    chat = encode_chat(tokenizer, record, options.messages)
    coloured = sys.stdout.isatty()
    marks = GREEN if coloured else inspection.ANSWER

    def text_of(run: np.ndarray) -> str:
        pieces = " ".join(f"{token}:{tokenizer.piece(token)}" for token in run.tolist())
        return plain(pieces if options.tokens else tokenizer.spell(run.tolist()))

    marked = inspection.with_answers(chat.tokens, chat.counts, text_of, options.tokens, marks)
    counted = int(chat.counts.sum())
    sign = f"{GREEN[0]}green{GREEN[1]} text has" if coloured else f"{''.join(inspection.ANSWER)} mark"
    of_loss = f"{sign} the {counted:,} tokens that count in the loss" if counted else "no token counts in the loss"
    roles = "" if counted else f" (its roles are {roles_of(record)})"
    heading = f"{plain(place)}, chat {options.number:,}: {len(chat.tokens):,} tokens; {of_loss}{plain(roles)}"
    facts = {"tokens": chat.tokens.tolist(), "counts": chat.counts.tolist(), "text": chat.text}
    return Inspection(f"{heading}\n\n{marked}", facts, coloured=coloured)


def _mixture(options: argparse.Namespace) -> Inspection:
    config, sources = load_config(*split_inputs(options.inputs, options.conf_dir)), list[dict[str, Any]]()
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
        return Inspection("\n\n".join(tables), {"stages": facts})
    corpus, blend = _open_blend(config, options)
    samples = options.samples
    if samples is None:
        steps = corpus.config.schedule.train_iters
        if steps is None:
            raise DataError("train_iters: not set; set it, or give --samples")
        samples = steps * corpus.config.batch.resolve(options.ranks).total
    sources = inspection.mixture(blend, samples)
    return Inspection(_mixture_table(sources), {"samples": samples, "sources": sources})


def _mixture_table(sources: Sequence[dict[str, Any]]) -> str:
    header = ("source", "tokens on disk", "weight", "achieved", "samples", "tokens read", "epochs")
    names = ("tokens_on_disk", "weight", "fraction", "samples", "tokens", "epochs")
    shares = ("weight", "fraction")
    rows = [[s["source"], *(percent(s[name]) if name in shares else s[name] for name in names)] for s in sources]
    return format_table(header, rows)


def _lengths(options: argparse.Namespace) -> Inspection:
    facts = inspection.lengths_by_source(inspection.find_shards(options.shards))
    columns = ["documents", "tokens", "min", *inspection.QUANTILES, "max", "mean"]
    quantiles = [[source, *(values[name] for name in columns)] for source, values in facts.items()]
    longer = [[source, *map(percent, f["share_of_tokens_in_longer"].values())] for source, f in facts.items()]
    tables = [
        format_table(["source", *columns], quantiles),
        format_table(["tokens in documents longer than", *map(str, inspection.THRESHOLDS)], longer),
    ]
    return Inspection("\n\n".join(tables), facts)


def _verify(options: argparse.Namespace) -> Inspection:
    results = verify_shards(inspection.find_shards(options.shards), show=True)
    rows = [[str(r.place), r.tokens, "yes" if r.content else "no", len(r.faults)] for r in results]
    faults = [f"FAULT {fault}" for result in results for fault in result.faults]
    table = format_table(["shard", "tokens", "content compared", "faults"], rows)
    facts = [asdict(result) | {"place": str(result.place)} for result in results]
    return Inspection("\n".join([table, "", *(faults or ["no fault was found"])]), facts, bool(faults))


def _checkpoint(options: argparse.Namespace) -> Inspection:
    from megatron_coca.checkpoints.inspection import checkpoints_in, describe, describe_other, describe_text
    from megatron_coca.checkpoints.load import find_other_layout

    other = find_other_layout(options.path)
    if other is not None:
        found = [describe_other(*other, source_keys(options))]
    else:
        found = [describe(folder, not options.no_verify) for folder in checkpoints_in(options.path)]
    text = "\n\n".join(describe_text(each) for each in found)
    return Inspection(text, [each.facts() for each in found], any(each.damage for each in found))


def _method(options: argparse.Namespace) -> Inspection:
    if options.output.suffix != ".html":
        raise ConfigError(f"--output: {options.output}: must be an HTML file; name it {options.output.stem}.html")
    from megatron_coca.attention.inputs import BackendError
    from megatron_coca.evaluation.options import read_variants
    from megatron_coca.evaluation.report import method_page
    from megatron_coca.evaluation.report.document import console_text

    files, overrides = split_inputs(options.inputs, options.conf_dir)
    models = _models(files, overrides)
    given = {
        "variant": options.variant or [["plain"]],
        "overrides": [],
        "ignored_keys": [],
        "base": None,
        "label": None,
    }
    variants = read_variants(argparse.Namespace(**given, conf_dir=options.conf_dir))
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
    return Inspection("\n".join([console_text(page), "", *left_out, *map(str, written)]), facts)


def _mup(options: argparse.Namespace) -> Inspection:
    from megatron_coca.commands import coordinates

    if options.output is not None and options.output.suffix not in coordinates.PICTURES:
        kinds = " or ".join(coordinates.PICTURES)
        raise ConfigError(f"--output: {options.output}: must end with {kinds}; rename it")
    config = load_config(*split_inputs(options.inputs, options.conf_dir))
    found = coordinates.measure(config, options.widths, options.steps)
    text = coordinates.table(found)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_file(options.output, coordinates.picture(found, options.output.suffix))
        text += f"\n\n{options.output}"
    return Inspection(text, [each._asdict() for each in found])


def _models(files: Sequence[str], overrides: Sequence[str]) -> list[list[str]]:
    """Return the files of each model. A file that describes a complete model begins a new model; others are overlays.

    Only the first file is tested together with the overrides. Otherwise, if the overrides set a complete shape, every
    overlay would count as a model.
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


def _add_chat_options(add: Callable[..., Any]) -> None:
    add("file", type=expanded, metavar="FILE", help="a file of chats, as for `megatron-coca prepare`")
    add("--number", type=whole_number, default=0, help="number of the chat in the file, from 0; default: %(default)s")
    add("--tokenizer-type", choices=list(TOKENIZERS), default="HFTokenizer", help="default: %(default)s")
    add("--vocab-file", type=expanded, metavar="PATH", help="the tokenizer's file, or a model's folder")
    add("--merge-file", type=expanded, metavar="PATH", help="merges file of the tokenizer, if it has one")
    names = ", ".join(shipped_templates())
    template = f"chat template that replaces the tokenizer's: a file, or one of {names}"
    add("--chat-template", type=expanded, metavar="FILE", help=template)
    add_chat_variables(add)
    counted = "tokens that count in the loss, as for `megatron-coca prepare`; default: %(default)s"
    add("--messages", choices=get_args(Counted), default="answers", help=counted)
    add("--tokens", action="store_true", help="show each token as id:piece")


def parser() -> argparse.ArgumentParser:
    options = command_parser("inspect", __doc__)
    commands = options.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], Inspection], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", type=local_path, metavar="FILE", help="also write the values to this file")
        added.set_defaults(run=run)
        return added

    sample = command("sample", _sample, "decode one sample of a run")
    chat = command("chat", _chat, "show a chat as the model reads it, and which of its tokens count in the loss")
    mixture = command("mixture", _mixture, "show how many tokens a run reads from each source")
    lengths = command("lengths", _lengths, "show document lengths by source; reads only the index files")
    verify = command("verify", _verify, "compare shards with their manifest and index; reads all tokens")
    checkpoint = command("checkpoint", _checkpoint, "describe checkpoints, and compare files with their checksums")
    method = command("method", _method, "draw the position methods of configurations side by side")
    mup = command("mup", _mup, "compare the first steps of models of several widths, with and without use_mup")
    for added in (sample, mixture, method, mup):
        add_configurations(added, "config files and key=value pairs, as for `megatron-coca train`")
    for added in (sample, mixture):
        added.add_argument("--split", choices=SPLITS, default="train")
        added.add_argument("--ranks", type=count, default=1, help="number of processes, if train_batch_size is not set")
    method.add_argument("--length", type=token_count, help="length in tokens of the input to draw; default: 4 times L")
    changed = "a variant of each configuration: a label, then YAML overlays and KEY=VALUE pairs; may be repeated"
    method.add_argument("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=changed)
    method.add_argument(
        "--output",
        type=local_path,
        required=True,
        metavar="FILE.html",
        help="page to write; figures are written beside it",
    )
    widths = "values of hidden_size; all other widths change in proportion; default: 64,128,256"
    mup.add_argument("--widths", type=int_list, default=[64, 128, 256], metavar="W,W,...", help=widths)
    mup.add_argument("--steps", type=count, default=4, help="optimizer steps of each model; default: %(default)s")
    mup.add_argument("--output", type=local_path, metavar="FILE.svg", help="picture to write; or FILE.png")
    sample.add_argument("--number", type=int, required=True, help="sample number in the run's order, from 0")
    mixture.add_argument("--samples", type=count, help="number of samples; default: train_iters times the batch")
    _add_chat_options(chat.add_argument)
    sample.add_argument("--tokens", action="store_true", help="show each token as id:piece")
    for added in (lengths, verify):
        added.add_argument(
            "shards", type=expanded, nargs="+", metavar="PREFIX | FOLDER", help="shards, or folders of shards"
        )
    checkpoint.add_argument(
        "path",
        type=expanded,
        help="a run's save folder or one of its step folders, or the URL of one on an object store; or a Hugging Face "
        "folder, hf://NAME, GGUF file, PEFT adapters or GPT-NeoX checkpoint",
    )
    checkpoint.add_argument("--no-verify", action="store_true", help="compare only names and sizes")
    add_source_options(checkpoint)
    return options


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Pairs key=value may also follow options, although argparse does not support this."""
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
        print(result.text if result.coloured else plain(result.text))
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_file(options.json, json.dumps(result.facts, indent=1) + "\n")
    except OSError as error:
        if error.filename is None:  # an error of the output
            raise
        print(f"megatron-coca inspect: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return int(result.faulty)
