"""Command-line arguments that several commands share: paths, configurations, variables of chat templates, and options
for the model to read.
"""

import json
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from megatron_coca.support.remote_files import HUB

GGUF = ".gguf"
"""End of the name of a file that contains a model in the format of llama.cpp."""


SUCCESSORS = {
    "evaluate --budget-seconds": "name the lengths to measure with --lengths",
    "generate --config": "name configuration files and KEY=VALUE pairs without an option",
    "generate --dynamic-length": "set the argument `dynamic_length` in Python (docs/generation.md)",
    "estimate --links": "set --mfu",
    "ablate --peak-flops": "set the key peak_theoretical_tflops",
    "prepare --skip-damaged": "remove damaged files from the input; --max-faulty accepts faulty records",
    "ablate --slurm": "use --engine slurm",
    "export --without-padding": "leave it out; exported models keep the padding rows, but never generate their tokens",
}
"""The replacement of each removed option. The key is the command and the option."""


class HintingParser(ArgumentParser):
    """A parser that names the closest option, or the replacement of a removed option, in errors about an option."""

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch("unrecognized arguments: (.*)", message, re.DOTALL)
        names = [word.partition("=")[0] for word in unknown[1].split()] if unknown else []
        known = [option for option in self._options() if option.startswith("--")]
        command = " ".join(self.prog.split()[1:2])
        for name in (name for name in names if name.startswith("-")):
            near = get_close_matches(name, known, n=1, cutoff=0.7)
            if successor := SUCCESSORS.get(f"{command} {name}"):
                message += f"; {name} was removed: {successor}"
            elif near and near[0] != name:  # another subcommand may have the option
                message += f"; did you mean `{near[0]}`?"
        super().error(message)

    def _options(self) -> Iterator[str]:
        """Yield the options of this parser and its subcommands. argparse has no public API for this."""
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, _SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._option_string_actions


def expanded(text: str) -> str:
    """Return a path or URL with its leading `~` replaced by the home folder.

    A shell expands `~` only at the start of a word, and never in a YAML file.
    """
    return os.path.expanduser(text)


def local_path(text: str) -> Path:
    """Return a path with its leading `~` replaced by the home folder, as a Path."""
    return Path(expanded(text))


def add_configurations(parser: ArgumentParser, text: str, dest: str = "inputs", nargs: str = "+") -> None:
    """Declare configurations as positional arguments, and the option of `add_conf_dir`.

    `config.split_inputs(options.inputs, options.conf_dir)` reads the arguments and the option.
    """
    parser.add_argument(dest, type=expanded, nargs=nargs, metavar="CONFIG.yml | key=value", help=text)
    add_conf_dir(parser)


def model_of(inputs: list[str], conf_dir: str | None) -> tuple[str | None, list[str]]:
    """Return the model that the first input names (a folder, a GGUF file or a name on the hub) and the other inputs.
    The model is None if all inputs are configurations.
    """
    model, *rest = inputs
    named = os.path.isdir(model) or model.startswith(HUB) or model.endswith(GGUF)
    if conf_dir is not None or os.path.exists(f"{model}.yml") or not named:
        return None, inputs
    return model, rest


def add_conf_dir(parser: ArgumentParser) -> None:
    """Declare GPT-NeoX's option for the folder that contains the configurations named on the command line."""
    text = "folder of the YAML files, which can then be named without .yml"
    parser.add_argument("-d", "--conf_dir", type=expanded, metavar="DIR", help=text)


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"enable_thinking": false}}')
    return found


def add_chat_variables(add: Callable[..., Any], when: str = "") -> None:
    """Declare `--chat-template-kwargs` with `add_argument`. It is None by default. The help text begins with `when`."""
    text = f"{when}variables that the chat template reads, such as '{{\"enable_thinking\": false}}'"
    add("--chat-template-kwargs", "--chat_template_kwargs", type=json_object, metavar="JSON", help=text)


def add_source_options(parser: ArgumentParser) -> None:
    """Declare the options that `source_keys` reads."""
    ignored = "key to ignore in the config.json of a Hugging Face folder; repeat the option for each key"
    parser.add_argument("--ignore-key", action="append", default=[], metavar="NAME", dest="ignored_keys", help=ignored)
    base = "the model that PEFT adapters change, a folder or hf://NAME; default: the model in their own folder"
    parser.add_argument("--base", metavar="FOLDER", help=base)


def source_keys(options: Namespace) -> list[str]:
    """Return the config overrides for the options of `add_source_options`."""
    keys = [f"ignore_keys={json.dumps(options.ignored_keys)}"] if options.ignored_keys else []
    return keys + ([f"base_model={json.dumps(options.base)}"] if options.base is not None else [])
