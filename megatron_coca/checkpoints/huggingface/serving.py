"""Find the commands with which programs serve a Hugging Face folder, or why a program would compute wrong numbers.

docs/serving.md lists the programs that were run. In a folder with our modelling file, that file itself raises an error
if a program keeps rotated keys although rotations change with the length.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.adapters import has_adapters
from megatron_coca.checkpoints.files import CheckpointError, read_json, read_json_if_present
from megatron_coca.checkpoints.huggingface.adapted import SETTINGS
from megatron_coca.checkpoints.huggingface.config_json import CONFIG, LEARNED_ROWS, OURS, POSITION
from megatron_coca.checkpoints.huggingface.read import open_folder
from megatron_coca.config import Config

TRANSFORMERS, VLLM, SGLANG = "transformers", "vLLM", "SGLang"
NAME = re.compile(r"[\w./~][\w./~-]*")
"""Pattern of a model name or folder that is safe in a command. Untrusted files may contain an option instead."""
NEEDS_CODE = "--trust-remote-code runs modeling_coca.py of {}: read the file, unless you exported it."
RUN = ("llama", "gpt_neox")
"""The `model_type` of each class of transformers with exports that were run in vLLM."""
LENGTHENED = ("linear", "yarn")
"""Extensions with a factor by which vLLM's own models lengthen their table of rotations."""


@dataclass(frozen=True)
class Serving:
    """How a program serves a folder.

    Attributes:
        program: name of the program.
        commands: shell commands; empty if the program cannot serve the folder.
        notes: sentences about the commands, or the reason why there are no commands.
    """

    program: str
    commands: tuple[str, ...]
    notes: tuple[str, ...] = ()


def servings(folder: Path, length: int | None = None) -> list[Serving]:
    """Return how each program serves `folder` with inputs of up to `length` tokens.

    The default of `length` is the length in config.json. `folder` is a Hugging Face folder or a folder with only PEFT
    adapters. Its weights are not read. Raises CheckpointError for other folders, and for models that this package
    cannot read.
    """
    if has_adapters(folder) and not (folder / CONFIG).is_file():
        return _of_adapters(folder)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: is not a Hugging Face folder; export a checkpoint with `megatron-coca export huggingface "
            f"{shlex.quote(str(folder))} FOLDER`, and name that folder"
        )
    opened = open_folder(folder)
    settings = opened.settings or {}
    remote = settings["model_type"] == OURS
    transformers = ["transformers", "serve", *["--trust-remote-code"] * remote, "--force-model", str(folder)]
    found = [Serving(TRANSFORMERS, (shlex.join(transformers),), _for_transformers(opened.trained, remote))]
    for program, served in PROGRAMS.items():
        if reason := _reason(program, opened.trained, settings) or _too_long(opened.trained, settings, length):
            found.append(Serving(program, (), (reason,)))
        else:
            untried = "" if remote or settings["model_type"] in RUN else "this architecture"
            if remote and opened.trained.model.mixtures:
                untried = "mixtures of experts in the modelling file"
            notes = (f"{program} was not tried with {untried}.",) if untried else ()
            found.append(Serving(program, (served.command(folder, settings, length),), notes))
    return found


def text_of(found: list[Serving]) -> str:
    """Return `found` as text for the terminal: for each program its commands, or why there are none."""
    blocks = []
    for each in found:
        head = each.program if each.commands else f"{each.program} cannot serve the folder"
        blocks.append("\n".join([f"{head}:", *(f"  {line}" for line in (*each.commands, *each.notes))]))
    return "\n\n".join(blocks)


# Commands -------------------------------------------------------------------------------------------------------------

THROUGH = ("--model-impl", "transformers")
"""Options with which vLLM and SGLang use a class of transformers or of the folder."""


class Program(NamedTuple):
    """A program that keeps the keys of earlier tokens itself.

    Attributes:
        words: the program's command, to which the folder is added.
        lacks: values of `model_type` for which the program has no model of its own. With `THROUGH`, it uses the model
            of transformers.
        length: the option for the longest input.
        longer: an environment variable that allows inputs beyond max_position_embeddings.
    """

    words: tuple[str, ...]
    lacks: tuple[str, ...]
    length: str
    longer: str

    def command(self, folder: Path, settings: Mapping[str, Any], length: int | None) -> str:
        """Return the shell command that serves inputs of up to `length` tokens."""
        kind, words = settings["model_type"], [*self.words, str(folder)]
        words += ["--trust-remote-code"] if kind == OURS else []
        words += THROUGH if kind in (OURS, *self.lacks) else []
        if length is None:
            return shlex.join(words)
        longer = f"{self.longer}=1 " if length > settings["max_position_embeddings"] else ""
        return longer + shlex.join([*words, self.length, str(length)])


PROGRAMS = {
    VLLM: Program(("vllm", "serve"), (), "--max-model-len", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    SGLANG: Program(
        ("python", "-m", "sglang.launch_server", "--model-path"),
        ("gpt_neox",),
        "--context-length",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    ),
}


# Reasons --------------------------------------------------------------------------------------------------------------


def _for_transformers(config: Config, remote: bool) -> tuple[str, ...]:
    if remote:
        return (NEEDS_CODE.format("the folder"),)
    if not any(own.extension.stock.by_longest for own in (config.position, *config.layer_types.values())):
        return ()
    return ("Send one text at a time: transformers chooses the rotations of a batch by its longest text.",)


def _reason(program: str, config: Config, settings: Mapping[str, Any]) -> str | None:
    """Return why a program that keeps rotated keys would compute wrong numbers for a model."""
    if settings["model_type"] == OURS:
        from megatron_coca.checkpoints.huggingface.modeling_coca import (
            CocaDenseConfig,
            Positions,
            attention_error,
            layer_names,
        )

        theirs = CocaDenseConfig(**{name: value for name, value in settings.items() if name != "auto_map"})
        for layer_type in dict.fromkeys(layer_names(theirs)):
            if reason := attention_error(Positions(theirs, layer_type), program, kept_elsewhere=True):
                return reason.removeprefix("attn_implementation: ")
        return None
    for own in (config.position, *config.layer_types.values()):
        if own.extension.name == "dynamic":
            return (
                f"{program} keeps rotated keys, but rotations change with the length (rope_scaling dynamic), so it "
                "would compute wrong numbers without an error; export with rope_scaling yarn or linear"
            )
    return None


def _too_long(config: Config, settings: Mapping[str, Any], length: int | None) -> str | None:
    """Return why inputs of `length` tokens have no positions in the model."""
    if length is None:
        return None
    if config.position.embedding.weights == "table":
        rows = (settings.get(POSITION) or {}).get(LEARNED_ROWS, config.model.max_position_embeddings)
        return (
            None if length <= rows else f"--length {length}: the model has {rows:,} learned positions; use fewer tokens"
        )
    if settings["model_type"] == OURS:
        return None
    rows, scaling = settings["max_position_embeddings"], config.position.rope_scaling
    if scaling is not None and config.position.extension.name in LENGTHENED:
        rows = max(rows, int(config.position.original_length(config.model.seq_length) * scaling.factor))
    if length <= rows or not config.position.embedding.rotary:
        return None
    return (
        f"--length {length}: the table of rotations has {rows:,} rows, and positions beyond it give NaN; export with "
        "rope_scaling yarn or linear and a larger factor"
    )


# Adapters -------------------------------------------------------------------------------------------------------------


def _of_adapters(folder: Path) -> list[Serving]:
    """Return how programs apply PEFT adapters without merging them. vLLM does not support some kinds."""
    settings, name = read_json(folder / SETTINGS), folder.resolve().name
    given = str(settings.get("base_model_name_or_path"))
    base = given if NAME.fullmatch(given) else "BASE"
    named = f"{base} is the model that the adapters were trained on; if it is elsewhere, use its folder instead."
    own = read_json_if_present(Path(base) / CONFIG).get("model_type") == OURS
    code, remote = ((NEEDS_CODE.format(base),), ["--trust-remote-code"]) if own else ((), [])
    served = ["transformers", "serve", *remote, "--force-model", str(folder)]
    rank = max(int(each) for each in (settings.get("r", 8), *(settings.get("rank_pattern") or {}).values()))
    words = ["vllm", "serve", base, "--enable-lora", "--lora-modules", f"{name}={folder}", "--max-lora-rank", str(rank)]
    words += [*remote, "--model-impl", "transformers"] if own else []
    unserved = [key for key in ("use_dora", "lora_bias", "modules_to_save", "layer_replication") if settings.get(key)]
    merge = f"{VLLM} does not apply adapters with {', '.join(unserved)}; merge them and serve the merged folder"
    return [
        Serving(
            TRANSFORMERS,
            (shlex.join(served),),
            (f"transformers needs peft for adapters. {named}", *code),
        ),
        Serving(VLLM, () if unserved else (shlex.join(words),), (merge,) if unserved else (named,)),
    ]
