"""Read a Hugging Face folder with the changes of adapters that peft trained: low-rank adapters, and weights that were
trained as a whole.

peft itself merges the adapters, one module at a time. So every variant of LoRA (rsLoRA, DoRA, patterns of ranks,
transposed weights) has the same effect as in peft, and only one weight is in memory. Sums are in float32, or in float64
for weights in float64. The files may come from strangers, so only the settings listed in `READ` are passed to peft, and
only the user can name the model that the adapters change.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, read_json
from megatron_coca.checkpoints.huggingface import weight_map
from megatron_coca.checkpoints.huggingface.read import EMBEDDING, GENERATION, HEAD, Folder, opened_folder, rows_of
from megatron_coca.checkpoints.huggingface.tokenizer_files import own_files
from megatron_coca.checkpoints.huggingface.wrappers import Network
from megatron_coca.checkpoints.identity import pickled_digests, stored_digests
from megatron_coca.checkpoints.opened import OpenedCheckpoint
from megatron_coca.checkpoints.weights import WeightEntry, Weights, load_pickle, open_safetensors_file
from megatron_coca.data.tokenizers import end_tokens

logger = logging.getLogger(__name__)
SETTINGS = "adapter_config.json"
STORED = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the file with the adapters, in peft's order of preference."""
BESIDE = ("trainable_params.bin", "non_lora_trainables.bin")
"""Files of LongLoRA and LLaVA with weights that were trained as a whole. peft does not read them."""
WRAPPED = "base_model.model."
"""The prefix that peft adds to the name of a weight of the base model."""
TOKENIZER_FILES = frozenset(end_tokens.TOKENIZER_FILES) - {GENERATION}
MODELS = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})
"""Files that contain a tokenizer's vocabulary."""
READ: dict[str, Any] = {
    **{"r": 8, "lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}},
    **{"use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "lora_bias": False},
}
"""Settings of adapter_config.json that change what adapters compute, with peft's defaults."""
TOKENS = "trainable_token_indices"
WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_type", "bias"),
        *("peft_version", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "layers_pattern"),
        *("layers_to_transform", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
        *("eva_config", TOKENS),
    }
)
"""Settings that matter in training only, follow from the names of the weights, or are read elsewhere."""
CHOICES = 4
"""Maximum number of repetitions and groups in a pattern of ranks or alphas. Patterns of peft have at most 3."""
INITIAL = "init_lora_weights"
DRAWN = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of the setting `INITIAL` that do not change the weights of the base model."""
PARAMETER = re.compile(r"\.(lora_\w+?(?:\.weight|\.bias)?|token_adapter\.trainable_tokens_delta)$")
"""Pattern of the end of an adapter parameter's name."""
ROWS = "token_adapter.trainable_tokens_delta"
"""Name of the parameter with the trained rows of an embedding, if only some rows were trained. The setting `TOKENS`
lists the tokens of these rows.
"""


class UnsupportedAdapters(CheckpointError):
    """Adapters that only peft can apply. The message is the reason."""


def adapter_files(folder: Path) -> list[Path]:
    """Return the files with the adapters in a folder, and with weights that were trained beside them."""
    stored = [folder / name for name in STORED if os.path.isfile(folder / name)][:1]
    return stored + [folder / name for name in BESIDE if os.path.isfile(folder / name)]


@dataclass(frozen=True)
class Adapters:
    """The adapters in a folder.

    Attributes:
        folder: the folder.
        settings: the content of adapter_config.json.
        tensors: all tensors, by their names in the files.
        modules: name of a module of the base model -> (parameter of its adapter -> name in the files).
        replaced: name of a weight of the base model -> the name in the files of the weight that replaces it.
        trained_names: name of a module -> its name in the model that was trained, if the two differ. Patterns of ranks
            and alphas match the name in the trained model.
    """

    folder: Path
    settings: Mapping[str, Any]
    tensors: Weights
    modules: Mapping[str, Mapping[str, str]]
    replaced: Mapping[str, str]
    trained_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> set[str]:
        """Names of all weights of the base model that change."""
        biases = (f"{module}.bias" for module, parts in self.modules.items() if "lora_B.bias" in parts)
        return {*(f"{module}.weight" for module in self.modules), *biases, *self.replaced}

    def _adapts(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        return module in self.modules and (kind == "weight" or "lora_B.bias" in self.modules[module])

    def entry(self, name: str, base: Weights) -> WeightEntry:
        """Return dtype and shape of a weight of the base model after the change."""
        own = self.replaced.get(name)
        found = self.tensors.entries[own] if own is not None else base.entries[name]
        return found._replace(dtype=torch.promote_types(found.dtype, torch.float32)) if self._adapts(name) else found

    def change(self, name: str, base: Weights, turned: bool) -> Tensor:
        """Return a weight of the base model after the change.

        `turned` means that the class stores the weight transposed (Conv1D).
        """
        own = self.replaced.get(name)
        value = self.tensors.read(own) if own is not None else base.read(name)
        if not self._adapts(name):
            return value
        module, _, kind = name.rpartition(".")
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        parts = {part: self.tensors.read(full) for part, full in self.modules[module].items()}
        if ROWS in parts:
            return self._with_rows(value, parts[ROWS], module)
        try:
            trained = self.trained_names.get(module, module)
            return merged(trained, kind, value, parts, self.settings, turned)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, OverflowError, re.error) as error:
            raise CheckpointError(
                f"{self.folder}: peft cannot merge the adapter of {module} ({str(error).splitlines()[0]:.200}); use "
                "the model that the adapters were trained on as --base"
            ) from error

    def _with_rows(self, weight: Tensor, rows: Tensor, module: str) -> Tensor:
        listed = self.settings.get(TOKENS)
        if isinstance(listed, Mapping):
            trained = self.trained_names.get(module, module)
            listed = next((listed[name] for name in listed if trained.endswith(name)), None)
        if (
            not isinstance(listed, list)
            or len(listed) != len(rows)
            or not all(isinstance(token, int) and 0 <= token < len(weight) for token in listed)
        ):
            raise CheckpointError(
                f"{self.folder / SETTINGS}: {TOKENS}: must list {len(rows)} of the {len(weight)} tokens of {module}; "
                "use the model that the adapters were trained on as --base"
            )
        weight = weight.clone()
        weight[listed] = rows.to(weight.dtype)
        return weight

    def identity(self) -> str:
        """Return a digest of the adapters and of the settings that are read."""
        digests = [
            (stored_digests if path.suffix == ".safetensors" else pickled_digests)(path)
            for path in adapter_files(self.folder)
        ]
        kept = {name: self.settings[name] for name in (*READ, TOKENS) if self.settings.get(name)}
        if self.settings.get("lora_alpha") == 0:  # 0 is not the default and makes the adapters have no effect
            kept["lora_alpha"] = 0
        return hashlib.sha256(json.dumps([digests, kept], sort_keys=True).encode()).hexdigest()


def merged(
    module: str,
    kind: str,
    value: Tensor,
    parts: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    turned: bool = False,
) -> Tensor:
    """Return the weight or bias (`kind`) of a module after peft has merged its adapter into the module.

    `parts` are the parameters of the adapter by their names in peft's files, and `settings` those of
    adapter_config.json in `READ`. `turned` means that the class stores the weight transposed (Conv1D). Raises
    CheckpointError if peft is not installed, and several errors of peft if the parts do not fit.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise CheckpointError(
            "peft: not installed, but only peft can apply adapters; run `pip install peft`"
        ) from error
    own, weight = _own_settings(module, parts, settings), value
    if kind == "bias":
        shape = parts["lora_B.weight"].shape[0], parts["lora_A.weight"].shape[1]
        weight = torch.zeros(shape[::-1] if turned else shape, dtype=value.dtype)
    leaf: nn.Module
    if "lora_embedding_A" in parts:
        leaf = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    else:
        leaf = Conv1D(*weight.shape[::-1]) if turned else nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        if "lora_B.bias" in parts:
            leaf.bias = nn.Parameter(value if kind == "bias" else weight.new_zeros(len(parts["lora_B.bias"])))
        else:
            leaf.bias = None
    leaf.weight = nn.Parameter(weight.clone(), requires_grad=False)
    tree = inner = nn.Module()
    *outer, last = module.split(".")
    for name in outer:
        inner.add_module(name, nn.Module())
        inner = inner.get_submodule(name)
    inner.add_module(last, leaf)
    inject_adapter_in_model(LoraConfig(target_modules=[module], **own), tree, low_cpu_mem_usage=True)
    exact = {f"{module}.{part}": tensor.to(value.dtype) for part, tensor in parts.items()}
    read = set_peft_model_state_dict(tree, exact, low_cpu_mem_usage=True)
    if read.unexpected_keys:
        raise ValueError(f"its settings have no {read.unexpected_keys[0]}")
    if missing := [name for name in read.missing_keys if ".lora_" in name]:
        raise ValueError(f"its file has no {missing[0]}")
    adapted: Any = tree.get_submodule(module)
    adapted.merge()
    changed: Tensor = getattr(adapted.get_base_layer(), kind)
    return changed.detach()


def _check_patterns(settings: Mapping[str, Any], source: Path) -> None:
    """Raise CheckpointError for a regular expression in the settings that could take years to match a name."""
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in settings.get(name) or ():
            choices = len(re.findall(r"[*+?{(]", str(pattern).replace("(?", "(")))
            if re.search(r"\)[*+{]", str(pattern)) or choices > CHOICES:
                raise CheckpointError(
                    f"{source}: {name}: {pattern!r:.80} repeats a group or has more than {CHOICES} repetitions and "
                    "groups, so matching it might not end; write the names of the modules"
                )


def _own_settings(module: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the adapter of one module, with its own rank and alpha in place of patterns.

    Raises ValueError if the weights have another rank, before peft allocates weights of that rank.
    """
    from peft.utils.other import get_pattern_key

    given = {name: default if settings.get(name) is None else settings[name] for name, default in READ.items()}
    for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        given[name] = given[patterns].get(get_pattern_key(given[patterns].keys(), module), given[name])
        given[patterns] = {}
    found = len(parts["lora_embedding_A" if "lora_embedding_A" in parts else "lora_A.weight"])
    if type(given["r"]) is not int or given["r"] != found:
        raise ValueError(f"its settings have rank {given['r']!r:.20}, its weights rank {found}")
    return given


def read_adapters(folder: Path) -> Adapters:
    """Read the names of the adapters in a folder.

    Raises CheckpointError. Raises UnsupportedAdapters if only peft can apply them.
    """
    settings = read_json(folder / SETTINGS)
    if settings.get("peft_type") != "LORA":
        raise UnsupportedAdapters(f"peft_type {settings.get('peft_type')!r} is not LoRA")
    if settings.get(INITIAL, True) not in DRAWN:
        raise UnsupportedAdapters(f"{INITIAL} {settings[INITIAL]!r} changes the base model, too")
    known = {*READ, *WITHOUT_EFFECT, INITIAL}
    if unknown := sorted(name for name, value in settings.items() if value and name not in known):
        raise UnsupportedAdapters(f"{', '.join(unknown)} is not supported")
    _check_patterns(settings, folder / SETTINGS)
    tensors = None
    for path in adapter_files(folder):
        if path.suffix == ".safetensors":
            found = open_safetensors_file(path, folder)
        else:
            values = {str(name): value for name, value in load_pickle(path).items() if isinstance(value, Tensor)}
            found = Weights({}, values.__getitem__, folder).adding(values)
        tensors = found if tensors is None else tensors.adding(dict(found))
    if tensors is None:
        raise CheckpointError(f"{folder}: has {SETTINGS} but no {STORED[0]}; download the folder again")
    modules: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for name in tensors.entries:
        plain = name.removeprefix(WRAPPED).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        if part := PARAMETER.search(plain):
            parts = modules.setdefault(plain[: part.start()], {})
            if (other := parts.setdefault(part[1], name)) != name:
                raise CheckpointError(f"{folder}: has {plain} twice, as {other} and {name}; download the folder again")
        else:
            replaced[plain] = name
    return Adapters(folder, settings, tensors, modules, replaced)


class AdaptedFolder(Folder):
    """The text network in a Hugging Face folder, with the changes of adapters.

    Attributes:
        base: the folder without the adapters.
        adapters: the adapters, under the names of the text network's weights.
    """

    def __init__(self, place: Path, ignored: Collection[str], adapters: Adapters) -> None:
        super().__init__(place, ignored)
        self.base = Folder(place, ignored)
        rows = rows_of(self.base)
        ends = {row.ours: row.theirs[0] for row in rows if row.ours in (HEAD, EMBEDDING)}
        self.embedding, self.head = ends[EMBEDDING], ends.get(HEAD, "")
        self._turned = {
            name for row in rows if row.packing in (weight_map.TURNED, weight_map.FUSED_TURNED) for name in row.theirs
        }
        modules, trained = dict[str, Mapping[str, str]](), dict[str, str]()
        for name, parts in adapters.modules.items():
            if (own := self._own_name(f"{name}.weight")) is not None:
                modules[module := own.removesuffix(".weight")] = parts
                trained[module] = name
        named = {self._own_name(name): stored for name, stored in adapters.replaced.items()}
        replaced = {name: stored for name, stored in named.items() if name is not None}
        self.adapters = replace(adapters, modules=modules, replaced=replaced, trained_names=trained)
        self._left_out = len(adapters.modules) + len(adapters.replaced) - len(modules) - len(replaced)
        if unknown := sorted(self.adapters.changed - self.base.files.keys() - {self.head}):
            raise CheckpointError(
                f"{adapters.folder}: has an adapter for {unknown[0]}, which {self.path} does not have; use the model "
                "that the adapters were trained on as --base"
            )
        if not self.adapters.changed:
            raise CheckpointError(
                f"{adapters.folder}: has no adapter for a weight of the text network in {self.path}; use the model "
                "that the adapters were trained on as --base"
            )

    def _own_name(self, name: str) -> str | None:
        """Return the base model's name for a weight in the adapters' files, or None if the text network lacks it.

        Classes of transformers name the head `lm_head`, even if their files use another name. A class without a head
        leaves out the first part of all names.
        """
        plain = self.base.network.rename(name)
        if plain is None:
            return None
        known = self.base.files.keys() | {self.head}
        others = [self.head] if plain == "lm_head.weight" else []
        others += [plain.partition(".")[2], f"{self.embedding.partition('.')[0]}.{plain}"]
        return plain if plain in known else next((other for other in others if other in known), plain)

    @cached_property
    def network(self) -> Network:
        """The description of the changed text network. The change may resize the embedding or untie the head."""
        network, settings = self.base.network, dict(self.base.network.settings)
        own = [self.adapters.replaced[name] for name in (self.embedding, self.head) if name in self.adapters.replaced]
        rows = {size for name in own for size in self.adapters.tensors.entries[name].shape[:1]}
        rows.discard(settings.get("vocab_size"))
        if network.rows is not None:
            rows -= {self.base.open_whole([self.embedding]).entries[self.embedding].shape[0]}
        if rows:
            settings["vocab_size"] = max(rows)
        if self.separated:
            settings["tie_word_embeddings"] = False
        return replace(network, settings=settings, rows=None if rows else network.rows)

    def _parts(self, weight: str) -> Mapping[str, str]:
        """Return the parameters of a weight's adapter. The result is empty if the weight has no adapter."""
        return self.adapters.modules.get(weight.removesuffix(".weight"), {})

    @cached_property
    def separated(self) -> bool:
        """Whether the base model ties its head to the embedding, but only one of the two changes, or both change
        differently.
        """
        ends, replaced = {self.embedding, self.head}, self.adapters.replaced
        if self.base.config.model.no_weight_tying or not ends & self.adapters.changed:
            return False
        if ROWS in self._parts(self.embedding):
            if (parts := self._parts(self.head)) and ROWS not in parts:
                raise CheckpointError(
                    f"{self.adapters.folder}: has rows of the embedding and an adapter of the head, which are one "
                    "weight in the model; merge the adapters with peft, and use the merged folder"
                )
            return self.head in self.adapters.changed  # otherwise peft changes these rows of the head, too
        both = ends <= replaced.keys() and not ends & {f"{name}.weight" for name in self.adapters.modules}
        return not (both and torch.equal(*(self.adapters.tensors.read(replaced[name]) for name in ends)))

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each weight of the text network."""
        files = dict(self.base.files)
        if self.separated:
            files.setdefault(self.head, files[self.embedding])
        return files

    def open_whole(self, names: Iterable[str]) -> Weights:
        """Open weights after the change, with all rows."""
        wanted = [name for name in names if name in self.files]
        held = {name: name if name in self.base.files else self.embedding for name in wanted}
        opened = self.base.open_whole(dict.fromkeys(held.values()))
        base = replace(
            opened,
            entries={name: opened.entries[held[name]] for name in wanted},
            read=lambda name: opened.read(held[name]),
        )
        changed = self.adapters.changed
        return replace(
            base,
            entries={
                name: self.adapters.entry(name, base) if name in changed else base.entries[name] for name in wanted
            },
            read=lambda name: (
                self.adapters.change(name, base, name in self._turned) if name in changed else base.read(name)
            ),
        )

    def log(self) -> None:
        """Log what `Folder.log` logs, and the number of adapters that are left out."""
        super().log()
        if self._left_out:
            logger.warning(
                "%s: %d adapters of other parts than the text network are left out",
                self.adapters.folder,
                self._left_out,
            )

    def identity(self) -> str:
        """Return the identity of the text network."""
        both = [self.base.identity(), self.adapters.identity()]
        return hashlib.sha256(json.dumps(both).encode()).hexdigest()


def open_adapted(adapters: Adapters, base: Path, ignored: Collection[str] = ()) -> OpenedCheckpoint:
    """Open the model in the Hugging Face folder or GGUF file `base`, with the changes of `adapters`.

    Its tokenizer is that of the adapters' folder, or of `base` if that folder has none. Raises CheckpointError.
    """
    opened = opened_folder(AdaptedFolder(base, ignored, adapters))
    own = own_files(adapters.folder).files.keys() & TOKENIZER_FILES
    if own & MODELS:
        return replace(opened, folder=adapters.folder, packed_tokenizer=None)
    if own and adapters.folder != opened.folder:
        raise CheckpointError(
            f"{adapters.folder}: has {min(own)}, but no tokenizer; copy the tokenizer's other files from "
            f"{opened.folder}"
        )
    return opened
