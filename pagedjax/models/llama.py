"""The Llama decoder in Flax NNX, attending through `pagedjax.nnx.PagedAttention`.

Products that read the same input are one product. The columns of the fused query-key-value product are grouped by KV
head (its query heads, its key, its value), those of gate and up by `gate_up_width` columns of each: a
contiguous split of the columns over devices then leaves whole heads, and matching gates and ups, on each device.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.models.config import ModelConfig
from pagedjax.models.layers import (
    RMSNorm,
    apply_rope,
    dot,
    make_param,
    project_to_vocab,
    rope_frequencies,
    rope_tables,
)
from pagedjax.nnx import PagedAttention

__all__ = ["Llama", "gate_up_width"]


def gate_up_width(intermediate_size: int) -> int:
    """Columns of a group of gates, followed by as many of ups: the largest power of two up to 128 that divides.

    >>> gate_up_width(1536), gate_up_width(96)
    (128, 32)
    """
    return math.gcd(intermediate_size, 128)


class Attention(nnx.Module):
    """Grouped-query self-attention with RoPE.

    Parameters: ``qkv [hidden, num_kv_heads * (queries per KV head + 2) * head_dim]`` and
    ``out [num_heads * head_dim, hidden]``.
    """

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs | None, param_dtype: jnp.dtype):
        self.num_kv_heads = config.num_kv_heads
        self.group_size = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        columns = config.num_kv_heads * (self.group_size + 2) * config.head_dim
        self.qkv = make_param(rngs, (hidden, columns), param_dtype, scale=hidden**-0.5)
        self.out = make_param(rngs, (width, hidden), param_dtype, scale=width**-0.5)
        self.attend = PagedAttention(
            layer=layer, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        lead, dim = x.shape[:-1], self.head_dim
        fused = dot(x, self.qkv[...]).reshape(*lead, self.num_kv_heads, self.group_size + 2, dim)
        turned = apply_rope(fused[..., :-1, :].reshape(*lead, -1, dim), rope)
        turned = turned.reshape(*lead, self.num_kv_heads, self.group_size + 1, dim)
        q = turned[..., :-1, :].reshape(*lead, -1, dim)
        attended = self.attend(q, turned[..., -1, :], fused[..., -1, :])
        return dot(attended.reshape(*lead, -1), self.out[...])


class FeedForward(nnx.Module):
    """SwiGLU: ``(silu(x @ gate) * (x @ up)) @ down``. Parameters: ``gate_up [hidden, 2 * ff]``, ``down [ff, hidden]``.

    Follows Shazeer, GLU Variants Improve Transformer (2020).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, param_dtype: jnp.dtype):
        hidden, width = config.hidden_size, config.intermediate_size
        self.group_width = gate_up_width(width)
        self.gate_up = make_param(rngs, (hidden, 2 * width), param_dtype, scale=hidden**-0.5)
        self.down = make_param(rngs, (width, hidden), param_dtype, scale=width**-0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        lead = x.shape[:-1]
        fused = dot(x, self.gate_up[...]).reshape(*lead, -1, 2, self.group_width)
        gated = jax.nn.silu(fused[..., 0, :]) * fused[..., 1, :]
        return dot(gated.reshape(*lead, -1), self.down[...])


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs | None, param_dtype: jnp.dtype):
        norm: dict[str, Any] = {"eps": config.rms_norm_eps, "rngs": rngs, "param_dtype": param_dtype}
        self.attention_norm = RMSNorm(config.hidden_size, **norm)
        self.attention = Attention(config, layer, rngs=rngs, param_dtype=param_dtype)
        self.feed_forward_norm = RMSNorm(config.hidden_size, **norm)
        self.feed_forward = FeedForward(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nnx.Module):
    """A decoder of the Llama family: tokens and positions to hidden rows, hidden rows to logits.

    Args:
        config: the sizes.
        rngs: draws random weights; None leaves every parameter a shape, for a loader to fill.
        dtype: in which it computes. RMSNorm, RoPE and logits are float32 at least.
        param_dtype: in which the weights are kept; `dtype` by default.

    >>> config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
    ...                      num_kv_heads=2, head_dim=8)
    >>> model = Llama(config, rngs=nnx.Rngs(0))
    >>> tokens = jnp.arange(5)[None]
    >>> hidden = model(tokens, tokens)
    >>> model.head(hidden).shape
    (1, 5, 64)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype: Any = jnp.float32,
        param_dtype: Any = None,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        weights = jnp.dtype(param_dtype or dtype)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = make_param(rngs, (vocab, hidden), weights, scale=hidden**-0.5)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, rngs=rngs, param_dtype=weights) for layer in range(config.num_layers)]
        )
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps, rngs=rngs, param_dtype=weights)
        self.lm_head: nnx.Param | None = nnx.data(None)
        if not config.tie_embeddings:
            self.lm_head = make_param(rngs, (vocab, hidden), weights, scale=hidden**-0.5)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Hidden rows after the last norm.

        Args:
            tokens: int32 ``[batch, tokens]``; batch is 1 under an engine.
            positions: int32 ``[batch, tokens]``, counted from 0 in each sequence.

        Returns:
            ``[batch, tokens, hidden]`` in the model's dtype.
        """
        x = self.embedding[...].at[tokens].get(mode="clip").astype(self.dtype)
        frequencies = rope_frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_factors)
        rope = rope_tables(positions, frequencies, self.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits of hidden rows: ``[..., hidden]`` to float32 ``[..., vocab]`` (float64 in a float64 model)."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        table = self.embedding[...] if self.lm_head is None else self.lm_head[...]
        logits = project_to_vocab(hidden.reshape(-1, hidden.shape[-1]), table, wide)
        return logits.reshape(*hidden.shape[:-1], -1)
