"""`evaluate.py analyse`: initial angles, rotary borders, decay and entropy of a checkpoint's attention."""

from argparse import ArgumentParser, Namespace

HELP = "angles, borders, decay and entropy of a checkpoint's attention"


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the options of the subcommand."""
    from megatron_coca.evaluation.options import (
        add_document_options,
        add_subject_options,
        int_list,
        positive_int,
        whole_number,
    )

    add_subject_options(parser)
    add_document_options(parser)
    parser.set_defaults(num_documents=4)
    add = parser.add_argument
    lengths = "tokens that the model reads at a time; may be beyond the training length"
    add("--lengths", required=True, type=int_list, metavar="N,N,...", help=lengths)
    pairs = "pairs of tokens whose angles are taken, over all documents; default 1024"
    add("--pairs", type=positive_int, default=1024, metavar="N", help=pairs)
    queries = "positions in a document whose entropy and scores are taken; default 128"
    add("--queries", type=positive_int, default=128, metavar="N", help=queries)
    add("--seed", type=whole_number, default=1234, help="of the drawn pairs")


def run(args: Namespace) -> int:
    """Analyses every variant; returns the exit status. Raises EvaluationError for invalid lengths."""
    # Not at the top: the options are declared without PyTorch.
    from megatron_coca.evaluation.analysis.measuring import analyse_variants

    return analyse_variants(args)
