"""Makes a scheduler."""

from megatron.learning_rates import AnnealingLR


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
