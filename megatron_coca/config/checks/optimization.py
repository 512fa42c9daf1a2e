"""Checks of the optimizer, the schedule, the batch and the precision."""

from collections.abc import Sequence
from functools import partial
from typing import get_args

from megatron_coca.config.checks.layers import types_of
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.model import GAU
from megatron_coca.config.optimization import TARGET_PARTS, OptimizerConfig, TrainablePart
from megatron_coca.config.schema import Settings


def _learning_rate(key: str, settings: Settings) -> str | None:
    peak, rate = settings.optimizer.lr, getattr(settings.schedule, key)
    return f"{rate} exceeds the learning rate {peak}; lower it" if peak is not None and rate > peak else None


def _wsd_decay(settings: Settings) -> str | None:
    schedule = settings.schedule
    if schedule.lr_wsd_decay_iters is None or (schedule.train_iters is None and schedule.lr_decay_iters is None):
        return None
    steps, stable = schedule.lr_wsd_decay_iters, int(schedule.decay_iters * (1 - schedule.warmup))
    return f"{steps} exceeds the {stable} steps between warm-up and horizon; lower it" if steps > stable else None


def _decay_fraction(settings: Settings) -> str | None:
    schedule = settings.schedule
    fraction, steps = schedule.lr_decay_fraction, schedule.train_iters
    if fraction is None or steps is None or schedule.lr_decay_iters is not None or schedule.decay_iters:
        return None
    return f"{fraction} of {steps} steps is less than one step; increase it to at least {1 / steps:.3g}"


def _train_epochs(settings: Settings) -> str | None:
    schedule, data = settings.schedule, settings.data
    if schedule.train_epochs is None:
        return None
    if schedule.train_iters is not None or schedule.stages is not None:
        return f"contradicts {'stages' if schedule.stages else 'train_iters'}; set only one of the two"
    if data.synthetic is not None or (data.data_path is None and data.train_data_paths is None):
        return "needs data_path or train_data_paths, because it counts their samples; set train_iters instead"
    if data.weight_by_num_documents or len(set(data.train_data_weights or ())) > 1:
        return "reads every shard equally often, which contradicts data weights; remove them or set train_iters instead"
    if data.pack_impl != "packed":
        return f"not supported with pack_impl {data.pack_impl}, as in GPT-NeoX; set train_iters instead"
    return None


def _trainable_weights(settings: Settings) -> str | None:
    return _absent_weights(settings, settings.optimizer.trainable or [])


def parts_with_weights(settings: Settings) -> list[TrainablePart]:
    """Return the values of `trainable` for which this model has weights."""
    return [part for part in get_args(TrainablePart) if _absent_weights(settings, [part]) is None]


def _absent_weights(settings: Settings, parts: Sequence[TrainablePart]) -> str | None:
    """Return the error about a part that has no weights of its own in this model, or None."""
    model = settings.model
    learned = any(
        kind.embedding.weights or kind.extension.learned or kind.scaling.learned or kind.sink_logits or kind.gate
        for kind in types_of(settings).values()
    )
    own = (model.no_weight_tying, model.embedding_width, model.use_output_transform, model.use_bias_in_output_head)
    if "output_head" in parts and not any(own):
        return "output_head is tied to the embedding (no_weight_tying is false); use embedding"
    if "norms" in parts and model.norm.startswith("non_parametric") and model.kv_lora_rank is None:
        return f"norm {model.norm} has no weights; leave norms out"
    if "router" in parts and not model.mixtures:
        return "no layer has experts (moe_num_experts is 1), so there is no router; leave router out"
    if "positions" in parts and not learned:
        return "this position method has no weights; leave positions out"
    return None


def _muon(settings: Settings) -> str | None:
    """Return what Muon does not support, and what to change."""
    if settings.optimizer.type != "Muon":
        return None
    if settings.optimizer.lora is not None:
        return "Muon is not supported with lora, whose matrices have few singular values; use AdamW"
    if settings.parallel.engine != "native":
        return "Muon needs whole matrices, which DeepSpeed divides; set engine=native, or use AdamW"
    if GAU in settings.model.layer_names:
        return "Muon is not supported with layers of type gau, which compute queries, keys and values in one product"
    return None


def _momentum(settings: Settings) -> str | None:
    own = settings.optimizer
    unused = own.type != "Muon" and own.momentum != OptimizerConfig.model_fields["momentum"].default
    return f"has no effect with {own.type}; remove it, or set optimizer.type=Muon" if unused else None


def _lora(settings: Settings) -> str | None:
    """Return what adapters do not support, and what to change."""
    optimizer, model, parallel = settings.optimizer, settings.model, settings.parallel
    keys = optimizer.lora
    if keys is None:
        return None
    if optimizer.trainable is not None:
        return "contradicts trainable; list parts that are trained as a whole in lora.also, and set trainable=null"
    if both := [target for target in keys.targets if TARGET_PARTS[target] in keys.also]:
        return f"{both[0]} is in targets and in also ({TARGET_PARTS[both[0]]}); remove it from one of them"
    if (absent := _absent_weights(settings, keys.also)) is not None:
        return f"also: {absent}"
    if GAU in model.layer_names:
        return (
            "not supported with layers of type gau, which compute queries, keys and values in one product; set other"
            " layer types in attention_config"
        )
    if "value" in keys.targets and all(model.with_heads(name).values_from_keys for name in model.layer_names):
        return "the values of this model are its keys (values_from_keys); remove value from targets"
    if "mlp" in keys.targets and model.mixtures:
        return (
            "peft has no adapters for stacked experts; remove mlp from targets, or list it in also, which trains the"
            " experts as a whole"
        )
    if optimizer.moe_bias_update_rate > 0:
        return (
            "not supported with moe_bias_update_rate: checkpoints with adapters contain what gradients train, and not"
            " moe_correction_bias; set moe_bias_update_rate=0"
        )
    divided = {name: getattr(parallel, name) for name in ("pipe_parallel_size", "model_parallel_size")}
    if sizes := [f"{name} {size}" for name, size in divided.items() if size > 1]:
        return f"not supported with {sizes[0]}; set it to 1, and divide long sequences with sequence_parallel_size"
    if parallel.stage == 3:
        return (
            "not supported with ZeRO 3, which divides the frozen weights too; set zero_optimization.stage to 0, 1 or 2"
        )
    return None


def _batch(settings: Settings) -> str | None:
    sizes = settings.batch
    micro, steps = sizes.train_micro_batch_size_per_gpu or 1, sizes.gradient_accumulation_steps or 1
    if sizes.train_batch_size is None or sizes.train_batch_size % (micro * steps) == 0:
        return None
    return (
        f"{sizes.train_batch_size} is not a multiple of micro-batch {micro} x accumulation {steps}; change one of them"
    )


def _precision(settings: Settings) -> str | None:
    dtypes = sorted(settings.precision.requested)
    if len(dtypes) <= 1:
        return None
    return f"{' and '.join(dtypes)} are both enabled by precision, fp16 and bf16; keep one and set the others to null"


CHECKS = (
    Check("lr_decay_fraction", _decay_fraction),
    Check("lr_wsd_decay_iters", _wsd_decay),
    *(Check(key, partial(_learning_rate, key)) for key in ("min_lr", "lr_warmup_init")),
    Check("trainable", _trainable_weights),
    Check("optimizer.type", _muon),
    Check("optimizer.params.momentum", _momentum),
    Check("lora", _lora),
    Check("train_batch_size", _batch),
    Check("precision", _precision),
    Check("train_epochs", _train_epochs),
)
