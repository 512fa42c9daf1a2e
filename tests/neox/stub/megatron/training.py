"""Makes a scheduler and a model."""

from torch import nn

from megatron.learning_rates import AnnealingLR
from megatron.model import transformer


def get_model(neox_args, use_cache=False):
    rotary = neox_args.pos_emb == "rotary"
    layers = (
        transformer.ParallelSelfAttention(neox_args, None, None, None, number, rotary=rotary, use_cache=use_cache)
        for number in range(neox_args.num_layers)
    )
    return nn.ModuleDict({str(2 + number): nn.ModuleDict({"attention": layer}) for number, layer in enumerate(layers)})


def forward_step(data_iterator, model, neox_args, timers, return_logits=False):
    """The loss alone from a pipeline, as GPT-NeoX's."""
    loss = model(next(data_iterator))
    return loss if neox_args.is_pipe_parallel else (loss, {"accuracy": loss})


def get_learning_rate_scheduler(optimizer, neox_args):
    iterations = neox_args.lr_decay_iters or neox_args.train_iters
    return AnnealingLR(
        optimizer,
        start_lr=neox_args.lr,
        warmup_iter=neox_args.warmup * iterations,
        total_iters=iterations,
        decay_style=neox_args.lr_decay_style,
        last_iter=0,
        min_lr=neox_args.min_lr,
    )
