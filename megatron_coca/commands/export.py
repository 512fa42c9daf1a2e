"""Export a checkpoint to the layout of another project; see docs/checkpoints.md, "Export" and "GPT-NeoX checkpoints".

megatron-coca export huggingface runs/350M_roformer_coca exported/coca
megatron-coca export peft runs/lora exported/adapters --with-base exported/base
megatron-coca export neox runs/350M_roformer_coca exported/coca_neox --model-parallel-size 2
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from megatron_coca.commands import command_parser
from megatron_coca.evaluation.options import DTYPES
from megatron_coca.support.arguments import add_source_options, expanded, local_path, source_keys
from megatron_coca.support.plain_text import plain


def parser() -> ArgumentParser:
    parser = command_parser("export", __doc__)
    layouts = parser.add_subparsers(metavar="LAYOUT", required=True)

    def layout(name: str, help: str, example: str) -> ArgumentParser:
        epilog = f"for example:\n    megatron-coca export {name} runs/350M_roformer_coca exported/coca {example}"
        added = layouts.add_parser(
            name, help=help, description=help, epilog=epilog, formatter_class=RawDescriptionHelpFormatter
        )
        folder = "a run's save folder, one of its step folders, or a Hugging Face folder"
        added.add_argument("checkpoint", type=expanded, metavar="CHECKPOINT", help=folder)
        added.add_argument("folder", metavar="FOLDER", help="new folder to write")
        changes = "overrides for the exported configuration, e.g. rope_scaling.rope_type=dynamic, or rope_scaling=null"
        added.add_argument(
            "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=changes
        )
        add_source_options(added)
        return added

    def dtype_option(added: ArgumentParser) -> None:
        added.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; default: as saved")

    huggingface = layout("huggingface", "a folder that Hugging Face transformers can load", "--dtype bfloat16")
    dtype_option(huggingface)
    _huggingface_options(huggingface)

    adapters = layout(
        "peft", "the adapters of a checkpoint, as a folder that peft can load", "--with-base exported/base"
    )
    adapters.set_defaults(write=write_adapters)
    base = (
        "new Hugging Face folder for the model that the adapters change; not needed if that model already is a Hugging "
        "Face folder with the network and position method of the run"
    )
    adapters.add_argument("--with-base", type=expanded, metavar="FOLDER", help=base)

    neox = layout("neox", "a save folder that GPT-NeoX can load", "--model-parallel-size 2")
    dtype_option(neox)
    neox.set_defaults(write=write_neox)
    ranks = "number of tensor-parallel ranks; default: %(default)s"
    neox.add_argument("--model-parallel-size", type=int, default=1, metavar="N", help=ranks)
    stages = (
        "1: GPT-NeoX can load it with any number of pipeline stages; 0: only without a pipeline; default: %(default)s"
    )
    neox.add_argument("--pipe-parallel-size", type=int, choices=(0, 1), default=1, help=stages)
    return parser


def _huggingface_options(huggingface: ArgumentParser) -> None:
    huggingface.set_defaults(write=write_huggingface)
    original = "copy the tokenizer and generation files from a Hugging Face folder, such as the original model's"
    huggingface.add_argument("--tokenizer", type=expanded, metavar="FOLDER", help=original)

    card = huggingface.add_argument_group("the model card")
    card.add_argument("--licence", metavar="NAME", help="the licence's name on the hub, e.g. apache-2.0")
    card.add_argument(
        "--base-model", metavar="NAME", help="name on the hub of the model that this model was trained from"
    )
    results = "Markdown file of results to include, such as report.md"
    card.add_argument("--results", type=local_path, metavar="FILE", help=results)
    upload = "upload the folder to this repository on the Hugging Face hub; a missing repository is created as private"
    huggingface.add_argument("--push", metavar="OWNER/NAME", help=upload)


def main(arguments: Sequence[str] | None = None) -> int:
    """Export the checkpoint and return 0. Raises CheckpointError, ConfigError, DataError."""
    args = parser().parse_args(arguments)
    for note in args.write(args):
        print(plain(f"megatron-coca export: {note}"), file=sys.stderr)
    return 0


def write_huggingface(args: Namespace) -> list[str]:
    """Write a Hugging Face folder and return notes about it."""
    from megatron_coca.checkpoints.exporting import export
    from megatron_coca.checkpoints.files import CheckpointError
    from megatron_coca.checkpoints.huggingface.model_card import CardNotes
    from megatron_coca.checkpoints.huggingface.write import push

    try:
        results = args.results.read_text(encoding="utf-8") if args.results is not None else None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"--results {args.results}: cannot be read ({reason}); name a file of UTF-8 text"
        ) from error
    done = export(
        args.checkpoint,
        args.folder,
        [*args.overrides, *source_keys(args)],
        args.dtype,
        tokenizer=args.tokenizer,
        notes=CardNotes(args.licence, args.base_model, results),
    )
    trust = ", loaded with trust_remote_code=True" if done.remote else ""
    print(f"{done.folder}: a {done.model_type} model for transformers{trust}")
    print(f"its logits equal those of the checkpoint, compared with {done.compared}")
    if args.push is not None:
        print(f"uploaded to {push(done.folder, args.push)}")
    return [done.tokenizer_note] if done.tokenizer_note is not None else []


def write_adapters(args: Namespace) -> list[str]:
    """Write a PEFT folder and return notes about it."""
    from megatron_coca.checkpoints.exporting import export_adapters

    done = export_adapters(args.checkpoint, args.folder, [*args.overrides, *source_keys(args)], args.with_base)
    print(f"{done.folder}: adapters for the model in {done.base}")
    print("checked: merged into this model and imported, they give the weights of the checkpoint")
    return []


def write_neox(args: Namespace) -> list[str]:
    """Write a GPT-NeoX save folder and return notes about it."""
    from megatron_coca.checkpoints.exporting import export_neox

    division = args.model_parallel_size, args.pipe_parallel_size
    done = export_neox(args.checkpoint, args.folder, [*args.overrides, *source_keys(args)], args.dtype, *division)
    print(f"{done.folder}: load it with `load: {done.folder}` and `finetune: true`")
    foreign = [f"stock GPT-NeoX does not support its keys {', '.join(done.foreign)}"] if done.foreign else []
    return [*foreign, done.note] if done.note is not None else foreign
