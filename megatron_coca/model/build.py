"""Build a model from its configuration: create the layers, initialise the weights, compile the blocks."""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.build import LEARNED_MODULES, build_methods, find_backend, select_backend
from megatron_coca.attention.inputs import BackendError, Needs
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionEncoding, PositionMethod, check_kernel
from megatron_coca.config import Config, ConfigError, ModelConfig
from megatron_coca.model.compilation import compile_blocks, reason_not_compiled
from megatron_coca.model.gpt import GPT, resolve_positions
from megatron_coca.model.layers import ABSOLUTE, LearnedPositions, build_attention, qk_norms
from megatron_coca.model.width_scaling import initial_factor

logger = logging.getLogger(__name__)

Initializer = Callable[[Tensor], Tensor]


def _normal(std: float) -> Initializer:
    return lambda weight: nn.init.normal_(weight, mean=0.0, std=std)


INITIALIZERS: dict[str, Callable[[ModelConfig], Initializer]] = {
    "normal": lambda m: _normal(m.init_method_std),
    "scaled_normal": lambda m: _normal(m.init_method_std / math.sqrt(2.0 * m.num_layers)),
    "single_residual_scaled_normal": lambda m: _normal(m.init_method_std / math.sqrt(m.num_layers)),
    "small_init": lambda m: _normal(math.sqrt(2.0 / (5.0 * m.hidden_size))),
    "wang_init": lambda m: _normal(2.0 / (m.num_layers * math.sqrt(m.hidden_size))),
    "xavier_uniform": lambda m: nn.init.xavier_uniform_,
    "xavier_normal": lambda m: nn.init.xavier_normal_,
    "orthogonal": lambda m: nn.init.orthogonal_,
    "scaled_orthogonal": lambda m: lambda weight: nn.init.orthogonal_(weight, gain=1.0 / math.sqrt(2.0 * m.num_layers)),
}

OUTPUT_LAYERS = ("attention.dense.weight", "mlp.linear2.weight", "mlp.shared.linear2.weight")
"""The weights that write to the residual stream; `output_layer_init_method` initialises them."""
ZERO_BIASES = (
    *("linear1.bias", "linear2.bias", "dense.bias", "query_key_value.bias", "base.bias", "output_gate.bias"),
    *("final_linear.bias", "router.bias", "query_down.bias", "key_value_down.bias"),
)
"""Biases that are initially 0. PyTorch draws them from a uniform distribution."""


@torch.no_grad()
def initialize(module: nn.Module, model: ModelConfig, seed: int) -> None:
    """Initialise weight matrices with the configured methods and biases with 0. Norms keep weight 1 and bias 0.

    The values depend only on the seed and on the shapes and order of the parameters. The modules of the position method
    are initialised after all other layers, and the output gates after these modules. The other layers therefore receive
    the same initial weights with every position method, with or without output gates. The global random state is
    preserved.
    """
    base = _base_model(model)
    inner, output = INITIALIZERS[model.init_method](base), INITIALIZERS[model.output_layer_init_method](base)
    learned = [part for part in module.modules() if isinstance(part, LEARNED_MODULES)]
    apart = {id(parameter) for part in learned for parameter in part.parameters()}
    own = [(name, weight) for name, weight in module.named_parameters() if id(weight) not in apart]
    gates = [(name, weight) for name, weight in own if ".output_gate." in name]

    def draw(named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            if name.endswith(ZERO_BIASES):
                parameter.zero_()
            elif parameter.dim() >= 2 and "_layernorm." not in name:
                fill = output if name.endswith(OUTPUT_LAYERS) else inner
                for matrix in parameter if parameter.dim() == 3 else (parameter,):  # one per expert
                    fill(matrix)
                if model.use_mup:
                    parameter.mul_(initial_factor(name, model))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draw(each for each in own if ".output_gate." not in each[0])
        for part in learned:
            part.reset_parameters()
        draw(gates)


def _base_model(model: ModelConfig) -> ModelConfig:
    """Return the configuration with the width that determines the standard deviations of the initial values."""
    return model.model_copy(update={"hidden_size": model.mup_base_hidden_size}) if model.use_mup else model


@torch.no_grad()
def draw_learned_positions(module: nn.Module, model: ModelConfig, seed: int) -> list[str]:
    """Initialise the parameters of the position method from `seed`, and return their names. The global random state is
    preserved.
    """
    parts = {name: part for name, part in module.named_modules() if isinstance(part, LEARNED_MODULES)}
    tables = {name: part for name, part in module.named_modules() if isinstance(part, LearnedPositions)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, table in tables.items():
            INITIALIZERS[model.init_method](_base_model(model))(table.weight)
            table.weight.mul_(initial_factor(f"{name}.weight", model))
        for part in parts.values():
            part.reset_parameters()
    return [f"{name}.{weight}" for name, part in (tables | parts).items() for weight, _ in part.named_parameters()]


def initial_norms(model: ModelConfig) -> dict[str, Tensor]:
    """Return the initial weights of the norms of queries and keys, by their names in the model."""
    return {
        f"blocks.{number}.attention.{name}.{weight}": value
        for number, layer_type in enumerate(model.layer_names)
        for name, norm in qk_norms(model.with_heads(layer_type)).items()
        for weight, value in norm.state_dict().items()
    }


def backend_needs(config: Config, method: PositionMethod, device_type: str, training: bool = True) -> Needs:
    """Return the features that the attention backend of a model must support."""
    needs = method.needs(device_type, config.model.attention_dropout, training)
    if not training:
        return needs
    return replace(
        needs,
        packed=config.data.reset_attention_mask or needs.packed,
        length=config.model.seq_length,
        deterministic=config.general.deterministic,
        ring=config.parallel.context_parallel_size > 1,
    )


def gpu_backends(config: Config) -> dict[str, str]:
    """Return the name of the attention backend for each layer type of a model that trains on a GPU. This host needs no
    GPU, because a backend that the configuration names is returned without a check.

    Raises:
        BackendError: `auto` finds no backend for one of the layer types.
    """
    methods, found = build_methods(config), {}
    for name, position in config.layer_types.items():
        needs, given = backend_needs(config, methods[name], "cuda"), position.attention_backend
        found[name] = find_backend(given, needs)[0] if given == "auto" else given
    return found


def choose_backends(config: Config, device: str) -> dict[str, str]:
    """Return the name of the attention backend for each layer type of a model that trains on `device`.

    Raises:
        BackendError: one of the layer types is not supported by any backend.
    """
    device_type, types = device.partition(":")[0], config.layer_types
    return {
        name: find_backend(types[name].attention_backend, backend_needs(config, method, device_type))[0]
        for name, method in build_methods(config).items()
    }


def build_model(config: Config, device: str = "cpu", training: bool = True) -> GPT:
    """Build an initialised float32 model on `device`, with its position methods and attention backends.

    If `training` is False, the backend does not have to support dropout or relative-position maps that only training
    uses.

    Raises:
        ConfigError: `vocab_size` is not known.
        BackendError: the attention backend or a kernel does not support the model on that device, or `torch_compile` is
            set but the blocks cannot be compiled.
    """
    return assemble_model(config, device, training).to(device)


def assemble_model(config: Config, device: str, training: bool = True) -> GPT:
    """Build a model as `build_model` does for `device`, but keep its weights in host memory, so that they can be
    sharded later.
    """
    with torch.random.fork_rng(devices=[]):  # PyTorch also initialises the layers when it creates them
        model = _compose(config, device, training)
    initialize(model, config.model, config.seed)
    return _compiled(model, config, device, training)


def empty_model(
    config: Config, device: str, training: bool = True, dtype: torch.dtype = torch.float32, memory: str | None = None
) -> GPT:
    """Build a model as `build_model` does, but with uninitialised weights of `dtype`, for a caller that loads weights
    into it.

    `memory` is the device of the weights, by default `device`. Initialising 7 billion weights would take minutes, and
    float32 weights would take twice the memory of half precision.
    """
    with torch.device("meta"):
        model = _compose(config, device, training)
    return _compiled(model.to(dtype).to_empty(device=memory or device), config, device, training)


def use_ring_backends(model: GPT, config: Config, device: str) -> None:
    """Replace the attention backends of a model, for evaluation, by backends with which several ranks can divide a
    sequence.

    Raises:
        BackendError: one of the layer types is not supported by any of these backends.
    """
    device_type, encodings = device.partition(":")[0], model.encodings()
    for name, method in list(model.methods.items()):
        needs = replace(backend_needs(config, method, device_type, training=False), ring=True)
        _, backend = select_backend(config.layer_types[name].attention_backend, needs)
        model.methods[name] = encodings[name].method = method.with_backend(backend)
        for block in model.blocks:
            if block.layer_type == name:
                assert isinstance(block.attention, SelfAttention)
                block.attention.backend, block.attention.method = backend, model.methods[name]


class Attention(nn.Module):
    """Causal self-attention with the position method of a configuration, for use in your own network.

    Only the configuration keys that describe attention matter. The initial weights depend on these configuration keys
    and on PyTorch's random state.

    Raises:
        ConfigError: `pos_emb` adds positions to the embedding instead of the attention.
        BackendError: the attention backend or a kernel does not support this attention on `device`.
    """

    def __init__(self, config: Config, layer: int = 0, device: str = "cpu", training: bool = True) -> None:
        """`layer` is the index of the layer, from 0; it matters only if the layer types differ. `training` has the
        same meaning as in `build_model`.
        """
        super().__init__()
        name = config.model.layer_names[layer]
        method, position = build_methods(config)[name], config.layer_types[name]
        if method.name in ABSOLUTE:
            raise ConfigError(
                f"pos_emb: {method.name} positions are added to the embedding, not in attention; choose another method"
            )
        check_kernel("operand_kernel", position.operand_kernel, torch.device(device).type)
        needs = backend_needs(config, method, torch.device(device).type, training)
        _, backend = select_backend(position.attention_backend, needs)
        method = method.with_backend(backend)
        self.encoding, self.attention = PositionEncoding(method), build_attention(config.model, method, backend, name)
        initialize(self, config.model, int(torch.randint(2**62, ())))
        self.to(device)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Map hidden states [batch, length, hidden_size] to hidden states of the same shape. The other arguments are
        those of `GPT.hidden_states`.
        """
        positions, reached, packed = resolve_positions(hidden[..., 0], positions, documents)
        batch, length = len(hidden), length or reached
        context = self.encoding(positions, length, hidden.dtype, documents=packed, reached=reached, batch=batch)
        return self.attention(hidden, context)


def _compose(config: Config, device: str, training: bool) -> GPT:
    with torch.device("cpu"):
        methods = build_methods(config)
    device_type = device.partition(":")[0]
    check_kernel("operand_kernel", config.position.operand_kernel, device_type)
    check_kernel("loss_kernel", config.model.loss_kernel, device_type)
    backends = {}
    for name, position in config.layer_types.items():
        needs = backend_needs(config, methods[name], device_type, training)
        _, backends[name] = select_backend(position.attention_backend, needs)
        methods[name] = methods[name].with_backend(backends[name])
    return GPT(config.model, methods, backends)


def _compiled(model: GPT, config: Config, device: str, training: bool) -> GPT:
    wanted, device_type = config.model.torch_compile, device.partition(":")[0]
    if not training or not wanted or (wanted == "auto" and device_type != "cuda"):
        return model
    backends = dict.fromkeys(choose_backends(config, device).values())
    reasons = (reason_not_compiled(config, backend, device_type) for backend in backends)
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None:
        compile_blocks(model.blocks)
    elif wanted == "auto":
        logger.info("torch_compile: disabled: %s", reason)
    else:
        raise BackendError(f"torch_compile: {reason}; otherwise set torch_compile=false")
    return model
