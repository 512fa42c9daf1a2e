"""Run `megatron-coca export huggingface` under the name, and with the arguments, of GPT-NeoX's converter.

    python tools/ckpts/convert_neox_to_hf.py --input_dir checkpoints/global_step1000 --config_file configs/125M.yml \\
        --output_dir exported/hf --precision bf16

The checkpoint was saved by GPT-NeoX or by `megatron-coca train`, and contains its configuration. The position and
network keys of --config_file must agree with the weights; keys such as rope_scaling change the exported model.
`megatron-coca export huggingface` has more options.
"""

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_coca.cli import main
from megatron_coca.config import ConfigError
from megatron_coca.config.source import readable_layer

DTYPES = {"auto": None, "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""--precision -> --dtype; `auto` keeps the dtype of the checkpoint."""
MODEL_TYPES = {"neox": "gpt_neox", "llama": "llama", "mistral": "mistral"}
"""--architecture -> model_type in config.json."""
OF_FILES = {"vocab_size", "make_vocab_size_divisible_by", "use_bias_in_norms", "model_parallel_size"}
"""Keys whose values follow from the files of a GPT-NeoX checkpoint."""


def parser() -> ArgumentParser:
    described = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add = described.add_argument
    add("--input_dir", required=True, metavar="DIR", help="a step folder, or a save folder (its latest step)")
    add("--config_file", metavar="FILE", help="YAML file of the model; default: the checkpoint's own")
    add("--output_dir", required=True, metavar="DIR", help="new folder to write")
    add("--precision", choices=DTYPES, default="auto", help="dtype of the weights; default: auto, as saved")
    add("--architecture", choices=MODEL_TYPES, help="expected architecture; default: the one that fits")
    add("--no_save_tokenizer", action="store_true", help="not supported: remove the tokenizer's files afterwards")
    add("--vocab-is-hf-tokenizer", action="store_true", help="not supported: use export huggingface --tokenizer FOLDER")
    add("--pad-token-id", type=int, metavar="ID", help="not supported: set it in the exported config.json")
    return described


def network_keys(file: str) -> list[str]:
    """Return the network and position keys of a YAML file as KEY=VALUE. Raises ConfigError if it cannot be read."""
    from megatron_coca.checkpoints.neox.layout import RUN_KEYS

    return [
        f"{key}={json.dumps(value)}"
        for key, value in readable_layer((), [file]).values.items()
        if key not in RUN_KEYS and key not in OF_FILES
    ]


def run() -> int:
    described = parser()
    args: Namespace = described.parse_args()
    for name in ("no_save_tokenizer", "vocab_is_hf_tokenizer", "pad_token_id"):
        if (value := getattr(args, name)) is not None and value is not False:
            action = next(each for each in described._actions if each.dest == name)
            described.error(f"{action.option_strings[0]}: {action.help}")
    line = ["export", "huggingface", args.input_dir, args.output_dir]
    if args.config_file is not None:
        try:
            line += ["--set", *keys] if (keys := network_keys(args.config_file)) else []
        except ConfigError as error:
            described.error(str(error))
    dtype = DTYPES[args.precision]
    status = main([*line, "--dtype", dtype] if dtype else line)
    if status == 0 and args.architecture is not None:
        written = json.loads((Path(args.output_dir) / "config.json").read_text(encoding="utf-8"))["model_type"]
        if written != MODEL_TYPES[args.architecture]:
            note = f"--architecture {args.architecture}: the model is of type {written}, and was written as such"
            print(f"convert_neox_to_hf.py: {note}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(run())
