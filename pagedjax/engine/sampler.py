"""Sampling on the device: one row of logits a sample, each with parameters of its own.

A token is drawn by adding Gumbel noise to the logits and taking the largest, with a key made of (seed, sample
index, position): the draw depends on nothing else in the batch. Top-k and top-p need no sort: the threshold is
found by bisection over the bits of the logits, which is exact and costs 32 passes over a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters, one of each for every row of the engine (or every sample of a step).

    Attributes:
        temperature: float32, 0 is greedy.
        top_k: int32, 0 keeps all.
        top_p: float32, 1 keeps all.
        min_p: float32, 0 keeps all.
        seed: int32, the bits of an unsigned seed.
        sample_index: int32, which completion of its prompt the row is.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    sample_index: jax.Array

    def take(self, rows: jax.Array) -> RowSampling:
        """The parameters of the given rows."""
        return jax.tree.map(lambda array: array[rows], self)


def sample(logits: jax.Array, params: RowSampling, positions: jax.Array) -> jax.Array:
    """Draws one token a row.

    Args:
        logits: float32 ``[samples, vocabulary]``.
        params: arrays ``[samples]``.
        positions: int32 ``[samples]``, position of the token that is drawn.

    Returns:
        int32 ``[samples]``.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(_: None) -> jax.Array:
        hot = params.temperature > 0
        scaled = logits / jnp.where(hot, params.temperature, 1.0)[:, None]
        masked = jnp.where(kept(scaled, params), scaled, -jnp.inf)
        noise = jax.vmap(_gumbel, in_axes=(0, 0, 0, None))(
            params.seed, params.sample_index, positions, logits.shape[-1]
        )
        return jnp.where(hot, jnp.argmax(masked + noise, axis=-1).astype(jnp.int32), greedy)

    return lax.cond(jnp.any(params.temperature > 0), draw, lambda _: greedy, None)


def kept(scaled: jax.Array, params: RowSampling) -> jax.Array:
    """Which tokens top-k, top-p and min-p leave, bool ``[samples, vocabulary]``.

    Top-p counts within what top-k leaves, as if the probabilities were renormalised; min-p compares with the
    most likely token. Tokens with equal logits at a threshold are all kept.
    """
    vocabulary = scaled.shape[-1]
    order = _ordered_bits(scaled)
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocabulary), vocabulary)
    limited = jnp.any(k < vocabulary)

    def k_threshold(_: None) -> jax.Array:
        return _largest(order, lambda least: jnp.sum(order >= least[:, None], axis=-1) >= k)

    lowest = jnp.full(scaled.shape[0], jnp.iinfo(jnp.int32).min)
    threshold = lax.cond(limited, k_threshold, lambda _: lowest, None)
    keep = order >= threshold[:, None]

    top = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.where(keep, jnp.exp(scaled - top), 0.0)

    def p_threshold(_: None) -> jax.Array:
        wanted = params.top_p * jnp.sum(mass, axis=-1)
        return _largest(order, lambda least: jnp.sum(jnp.where(order >= least[:, None], mass, 0.0), axis=-1) >= wanted)

    limited = jnp.any(params.top_p < 1)
    nucleus = lax.cond(limited, p_threshold, lambda _: lowest, None)
    keep &= (order >= nucleus[:, None]) | (params.top_p >= 1)[:, None]
    keep &= scaled >= top + jnp.log(params.min_p)[:, None]  # log(0) is -inf: keeps all
    return keep


def _gumbel(seed: jax.Array, sample_index: jax.Array, position: jax.Array, size: int) -> jax.Array:
    key = jax.random.key(lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """int32 that compare as the float32 values do."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.int32)  # + 0.0: -0.0 equals 0.0
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest(order: jax.Array, enough) -> jax.Array:  # type: ignore[no-untyped-def]
    """Per row the largest int32 threshold for which ``enough(threshold)`` still holds, by bisection."""
    rows = order.shape[0]
    low = jnp.full(rows, jnp.iinfo(jnp.int32).min)  # holds for everything
    high = jnp.full(rows, jnp.iinfo(jnp.int32).max)  # holds for nothing finite

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean without overflow
        holds = enough(middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    return lax.fori_loop(0, 32, halve, (low, high))[0]
