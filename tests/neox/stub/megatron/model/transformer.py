"""The self-attention that the plugin subclasses: heads [tokens, batch, heads, width] reach one of two methods."""

import torch
from torch import nn


class ParallelSelfAttention(nn.Module):
    def __init__(
        self,
        neox_args,
        attention_mask_func,
        init_method,
        output_layer_init_method,
        layer_number,
        rpe=None,
        rotary=False,
        use_cache=False,
        parallel_output=False,
    ):
        super().__init__()
        width, heads = neox_args.hidden_size, neox_args.num_attention_heads
        self.head_width, self.heads, self.key_heads = width // heads, heads, neox_args.num_kv_heads or heads
        self.num_attention_heads_per_partition = heads
        self.query_key_value = nn.Linear(width, (heads + 2 * self.key_heads) * self.head_width)
        self.dense = nn.Linear(width, width)
        self.rotated, self.use_cache = rotary, use_cache
        self.use_flash_attention = neox_args.attention_config[layer_number] == "flash"

    def attention(self, query_layer, key_layer, value_layer, layer_past, attention_mask):
        raise NotImplementedError("GPT-NeoX's own attention")

    def flash_attention(self, query_layer, key_layer, value_layer):
        raise NotImplementedError("GPT-NeoX's own flash attention")

    def forward(self, hidden_states, attention_mask, layer_past=None):
        q, k, v = self._heads(self.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = torch.cat([layer_past[0], k]), torch.cat([layer_past[1], v])
        present = torch.stack([k, v])
        if not self.use_flash_attention and self.key_heads != self.heads:
            k, v = (x.repeat_interleave(self.heads // self.key_heads, dim=2) for x in (k, v))
        attended = (
            self.flash_attention(q, k, v)
            if self.use_flash_attention
            else self.attention(q, k, v, layer_past, attention_mask)
        )
        out = self.dense(attended.permute(2, 0, 1, 3).flatten(2))
        return ([out, present] if self.use_cache else out), None

    def _heads(self, packed):
        if self.key_heads == self.heads:
            return packed.unflatten(-1, (self.heads, 3 * self.head_width)).chunk(3, dim=-1)
        counts = (self.heads, self.key_heads, self.key_heads)
        return packed.unflatten(-1, (sum(counts), self.head_width)).split(counts, dim=2)
