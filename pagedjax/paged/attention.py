"""Write the new K and V into the pages, then attend: what one attention layer does in a step.

The work runs under `jax.shard_map` on each chip's own heads, with one chip too: under plain `jit` the flat
write would gather the pages of all chips.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from pagedjax.kernels.xla.attention import paged_attention as xla_paged_attention
from pagedjax.kernels.xla.copy import copy_blocks as xla_copy_blocks
from pagedjax.kernels.xla.write import write_kv as xla_write_kv
from pagedjax.paged.block_tables import Batch
from pagedjax.paged.pages import HEADS_AXIS, pages_partition, physical_head_map


@dataclass(frozen=True)
class AttentionSpec:
    """How one layer attends; static.

    Attributes:
        scale: factor of the scores; `None` is ``k_dim ** -0.5``.
        v_dim: lanes of a value.
        v_offset: lane where the value begins in the pages; `None`: after the key.
        window: tokens each query sees, itself included; `None` sees all.
        sink_tokens: leading tokens that stay visible under a window.
        soft_cap: scores are ``soft_cap * tanh(scores / soft_cap)``.
    """

    v_dim: int
    scale: float | None = None
    v_offset: int | None = None
    window: int | None = None
    sink_tokens: int = 0
    soft_cap: float | None = None


@dataclass(frozen=True)
class Placement:
    """The devices that pages live on; static. The mesh has an axis ``"tensor"`` over which heads are sharded."""

    mesh: Mesh

    @property
    def num_shards(self) -> int:
        return int(self.mesh.shape[HEADS_AXIS])


def default_placement() -> Placement:
    """One device, the first."""
    return Placement(Mesh(jax.devices()[:1], (HEADS_AXIS,)))


@functools.partial(jax.jit, static_argnames=("spec", "placement", "group"))
def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    batch: Batch,
    sink_logits: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    placement: Placement,
    group: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """One attention layer of a step.

    Args:
        q: ``[tokens, num_heads, k_dim]``.
        k: ``[tokens, num_kv_heads, k_dim]``, positions already applied.
        v: ``[tokens, num_kv_heads, v_dim]``.
        pages: ``[num_blocks, physical_heads, block_size, width]``, updated in place where it is donated.
        batch: the batch of the step.
        sink_logits: ``[num_heads]``, a learnt logit a head that takes part in the softmax's sum only.
        group: group of the layer: which block table serves it.

    Returns:
        ``[tokens, num_heads, v_dim]`` in q's dtype, and the pages.

    Raises:
        ValueError: query heads that the shards or the KV heads do not divide.
    """
    num_heads, num_kv_heads, shards = q.shape[1], k.shape[1], placement.num_shards
    if num_heads % num_kv_heads or num_heads % shards:
        raise ValueError(
            f"{num_heads} query heads with {num_kv_heads} KV heads on {shards} shards: both must divide the query heads"
        )
    if pages.shape[1] != num_kv_heads:  # more shards than heads: each keeps a copy of its logical head
        copies = physical_head_map(num_kv_heads, pages.shape[1])
        k, v = k[:, copies], v[:, copies]

    heads = PartitionSpec(None, HEADS_AXIS, None)
    sinks = PartitionSpec(HEADS_AXIS)

    def local(q, k, v, pages, batch, sink_logits):  # type: ignore[no-untyped-def]
        pages = xla_write_kv(pages, k, v, batch.slots[group], v_offset=spec.v_offset)
        out = xla_paged_attention(
            q,
            pages,
            batch.block_tables[group],
            batch.row_ids,
            batch.kv_lens,
            batch.query_start,
            num_decodes=batch.num_decodes,
            v_dim=spec.v_dim,
            v_offset=spec.v_offset,
            scale=spec.scale,
            window=spec.window,
            sink_tokens=spec.sink_tokens,
            soft_cap=spec.soft_cap,
            sink_logits=sink_logits,
        )
        return out.astype(q.dtype), pages

    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(heads, heads, heads, pages_partition(), PartitionSpec(), None if sink_logits is None else sinks),
        out_specs=(heads, pages_partition()),
        check_vma=False,
    )(q, k, v, pages, batch, sink_logits)


def copy_blocks(
    pages: tuple[jax.Array, ...], copies: jax.Array, num_copies: jax.Array, *, placement: Placement
) -> tuple[jax.Array, ...]:
    """Copies whole blocks in all arrays: the device's half of copy-on-write.

    Args:
        pages: arrays ``[num_blocks, physical_heads, block_size, width]``.
        copies: int32 ``[max_copies, 2]`` of (source, destination); destinations are distinct and none is a source.
        num_copies: int32 scalar, how many of them count. None cost nothing.
    """

    def local(pages, copies, num_copies):  # type: ignore[no-untyped-def]
        return xla_copy_blocks(pages, copies, num_copies)

    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(pages_partition(), PartitionSpec(), PartitionSpec()),
        out_specs=pages_partition(),
        check_vma=False,
    )(pages, copies, num_copies)


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, spec: AttentionSpec, sink_logits: jax.Array | None = None
) -> jax.Array:
    """Plain causal attention without a cache, for training and scoring.

    Args:
        q: ``[batch, tokens, num_heads, k_dim]``.
        k: ``[batch, tokens, num_kv_heads, k_dim]``.
        v: ``[batch, tokens, num_kv_heads, v_dim]``.

    Returns:
        ``[batch, tokens, num_heads, v_dim]`` in q's dtype; the softmax runs in float32 or wider.
    """
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    precision = None if q.dtype.itemsize < 4 else jax.lax.Precision.HIGHEST
    grouped = q.reshape(*q.shape[:2], num_kv_heads, num_heads // num_kv_heads, q.shape[-1])
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores = jnp.einsum("bthgd,bshd->bhgts", grouped, k, preferred_element_type=wide, precision=precision) * scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    query, key = jnp.arange(q.shape[1])[:, None], jnp.arange(q.shape[1])[None, :]
    visible = key <= query
    if spec.window is not None:
        visible &= (key > query - spec.window) | (key < spec.sink_tokens)
    scores = jnp.where(visible, scores, -jnp.inf)
    if sink_logits is not None:
        sinks = sink_logits.astype(wide).reshape(1, num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : q.shape[1]]
    out = jnp.einsum("bhgts,bshd->bthgd", weights.astype(v.dtype), v, preferred_element_type=wide, precision=precision)
    return out.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype)
