"""Run `megatron-coca evaluate lm-eval` with the arguments of GPT-NeoX's eval.py.

    python tools/eval.py -d configs my_model local_setup --eval_tasks piqa lambada_openai

The keys `load` and `iteration` name the checkpoint, as in GPT-NeoX. Options of `megatron-coca evaluate lm-eval`, such
as --limit 100 or --num-fewshot 5, may follow.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_coca.cli import main
from megatron_coca.config import ConfigError, split_inputs
from megatron_coca.config.source import named_checkpoint, readable_layer
from megatron_coca.support.arguments import add_configurations


def parser() -> ArgumentParser:
    described = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_configurations(described, "YAML files of the run, and key=value pairs")
    add = described.add_argument
    add("--eval_tasks", nargs="+", required=True, metavar="TASK", help="tasks of lm-eval")
    add("--iteration", type=int, metavar="N", help="step of the checkpoint; default: the latest")
    prefix = "the results are in PREFIX_eval_results.json; default: eval_results.json"
    add("--eval_results_prefix", metavar="PREFIX", help=prefix)
    return described


def lm_eval_line(arguments: list[str]) -> list[str]:
    """Return the command line of `megatron-coca evaluate lm-eval` for arguments of eval.py."""
    described = parser()
    args, more = described.parse_known_args(arguments)
    files, keys = split_inputs(args.inputs, args.conf_dir)
    keys += [] if args.iteration is None else [f"iteration={args.iteration}"]
    try:
        checkpoint = named_checkpoint(readable_layer(keys, files).values)
    except ConfigError as error:
        described.error(str(error))
    if checkpoint is None:
        described.error("load: not set; set it to the run's save folder, for example load=checkpoints")
    prefix = "" if args.eval_results_prefix is None else f"{args.eval_results_prefix}_"
    label = " + ".join([*(Path(file).stem for file in files), *keys])
    line = ["evaluate", "lm-eval", "--checkpoint", checkpoint, "--variant", label, *files, *keys]
    return [*line, "--tasks", ",".join(args.eval_tasks), "--output", f"{prefix}eval_results.json", *more]


if __name__ == "__main__":
    sys.exit(main(lm_eval_line(sys.argv[1:])))
