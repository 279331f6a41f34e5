"""Paged attention for Flax NNX models: the one module that a model of your own imports.

`PagedAttention` replaces the attention core of a layer. Outside an engine it is plain causal attention, for
training and scoring. Under an engine the pages and the batch of the step are state of the module (NNX
variables): `attach` puts them in at the top of the compiled step, `detach` takes the updated pages out again.
Nothing is global, and nothing of it is part of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from pagedjax.paged.attention import AttentionSpec, Placement, causal_attention, write_and_attend
from pagedjax.paged.block_tables import Batch
from pagedjax.paged.pages import CacheLayer, PagesSpec

__all__ = ["PagedAttention", "Pages", "StepBatch", "attach", "cache_layers", "detach"]


class Pages(nnx.Variable):
    """The pages of one array of the cache; shared by the layers of several groups."""


class StepBatch(nnx.Variable):
    """The `Batch` of the step, shared by all layers."""


class PagedAttention(nnx.Module):
    """Attention over q, k, v through the paged cache, or plainly causal where there is none.

    Args:
        layer: index of the layer among the attention layers of the model, from 0.
        num_heads: query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: KV heads.
        head_dim: lanes of a query and of a key.
        v_head_dim: lanes of a value; ``head_dim`` by default.
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
        window: tokens that a query sees, itself included; all by default.
        soft_cap: ``soft_cap * tanh(scores / soft_cap)`` where given.

    Raises:
        ValueError: ``num_heads`` is no multiple of ``num_kv_heads``, or a size is below 1.

    >>> import jax.numpy as jnp
    >>> attend = PagedAttention(layer=0, num_heads=4, num_kv_heads=2, head_dim=8)
    >>> q, k = jnp.ones([1, 5, 4, 8]), jnp.ones([1, 5, 2, 8])
    >>> attend(q, k, k).shape
    (1, 5, 4, 8)
    """

    def __init__(
        self,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ):
        if layer < 0:
            raise ValueError(f"layer is {layer} but counts from 0")
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads is {num_heads} but must be a multiple of num_kv_heads {num_kv_heads}")
        self.layer = layer
        self.num_heads = num_heads
        self.cache = CacheLayer(num_kv_heads, head_dim, v_head_dim or head_dim, window=window)
        self.spec = AttentionSpec(v_dim=v_head_dim or head_dim, scale=scale, window=window, soft_cap=soft_cap)
        self.placement: Placement | None = None
        self.group = 0
        self.pages: Pages | None = nnx.data(None)
        self.batch: StepBatch | None = nnx.data(None)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attends; under an engine it writes k and v into the pages first.

        Args:
            q: ``[batch, tokens, num_heads, head_dim]``; batch is 1 under an engine. Positions (RoPE) are applied
                to q and k before.
            k: ``[batch, tokens, num_kv_heads, head_dim]``.
            v: ``[batch, tokens, num_kv_heads, v_head_dim]``.

        Returns:
            ``[batch, tokens, num_heads, v_head_dim]``.
        """
        wanted = (self.num_heads, self.cache.num_kv_heads, self.cache.num_kv_heads)
        heads = (q.shape[2], k.shape[2], v.shape[2])
        if heads != wanted:
            raise ValueError(f"q, k, v have {heads} heads but layer {self.layer} was made for {wanted}")
        if self.pages is None or self.batch is None or self.placement is None:
            return causal_attention(q, k, v, spec=self.spec)
        out, pages = write_and_attend(
            q[0],
            k[0],
            v[0],
            self.pages[...],
            self.batch.get_value(),
            spec=self.spec,
            placement=self.placement,
            group=self.group,
        )
        self.pages[...] = pages
        return out[None]


def paged_layers(model: nnx.Module) -> list[PagedAttention]:
    """The `PagedAttention` modules of a model in the order of their layers.

    Raises:
        ValueError: there is none, or their layer numbers are not 0, 1, 2, ….
    """
    found = [module for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    found.sort(key=lambda module: module.layer)
    numbers = [module.layer for module in found]
    if not found or numbers != list(range(len(found))):
        raise ValueError(f"the model's PagedAttention layers are numbered {numbers}; number them 0, 1, 2, … in order")
    return found


def cache_layers(model: nnx.Module) -> list[CacheLayer]:
    """What each attention layer needs of the cache, in order: the input of `PagesSpec.for_layers`."""
    return [module.cache for module in paged_layers(model)]


def attach(
    model: nnx.Module, pages: Sequence[jax.Array], batch: Batch, *, spec: PagesSpec, placement: Placement
) -> None:
    """Gives pages and batch to every attention layer of `model`; to be called inside the compiled step.

    Args:
        pages: one array for each array of `spec`.
        batch: the batch of the step.
    """
    shared = [Pages(array) for array in pages]
    step: Any = StepBatch(batch)
    for module in paged_layers(model):
        module.pages = shared[spec.layer_arrays[module.layer]]
        module.batch = step
        module.group = spec.layer_groups[module.layer]
        module.placement = placement


def detach(model: nnx.Module, spec: PagesSpec) -> tuple[jax.Array, ...]:
    """Takes the updated pages out of `model` again, in the order of the arrays of `spec`."""
    arrays: dict[int, jax.Array] = {}
    for module in paged_layers(model):
        if module.pages is None:
            raise ValueError(f"layer {module.layer} has no pages: attach comes before detach")
        arrays[spec.layer_arrays[module.layer]] = module.pages[...]
        module.pages = module.batch = module.placement = None
    return tuple(arrays[index] for index in range(spec.num_arrays))
