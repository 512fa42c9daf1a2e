"""A scheduler of learning rates."""


class AnnealingLR:
    def __init__(
        self, optimizer, start_lr, warmup_iter, total_iters, decay_style, last_iter, min_lr=0.0, use_mup=False
    ):
        self.optimizer, self.start_lr, self.min_lr = optimizer, start_lr, min_lr
        self.warmup_iter, self.end_iter, self.decay_style, self.num_iters = (
            warmup_iter,
            total_iters,
            decay_style,
            last_iter,
        )
        self.step(last_iter)

    def get_lr(self):
        return self.start_lr

    def step(self, step_num=None):
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()
