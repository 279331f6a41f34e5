"""The parts of a decoder that work token by token: products, RMSNorm, RoPE.

Weights lie as ``[in, out]`` and are used as ``x @ w``: XLA's CPU backend is up to ten times slower on the transposed
form. "float32" means precision HIGHEST, on every backend.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["RMSNorm", "apply_rope", "dot", "make_param", "project_to_vocab", "rope_frequencies", "rope_tables"]


def make_param(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: jnp.dtype, *, scale: float | None) -> nnx.Param:
    """A parameter: normal numbers of deviation `scale`, ones where it is None, or (without `rngs`) only a shape.

    A parameter that is only a ``jax.ShapeDtypeStruct`` costs no memory; a loader puts the array in.
    """
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    if scale is None:
        return nnx.Param(jnp.ones(shape, dtype))
    return nnx.Param(
        (scale * jax.random.normal(rngs.params(), shape, jnp.promote_types(dtype, jnp.float32))).astype(dtype)
    )


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w`` for x ``[..., in]`` and w ``[in, out]``, at precision HIGHEST.

    Args:
        x: the rows; one row of bfloat16 is computed as two, because XLA's CPU backend is seven times slower with one.
        w: the weights, cast to the dtype of x.

    Returns:
        ``[..., out]`` in the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1])
    alone = rows.shape[0] == 1 and x.dtype == jnp.bfloat16
    if alone:
        rows = jnp.concatenate([rows, rows])
    out = _highest(rows, w.astype(x.dtype), x.dtype)
    return out[: 1 if alone else None].reshape(*x.shape[:-1], w.shape[-1])


def project_to_vocab(x: jax.Array, table: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """``x @ table.T``, at precision HIGHEST, for a table with a row for each token of the vocabulary.

    A table of rows serves the look-up and the head alike, so that tied embeddings are held once. XLA's CPU backend is
    slow with a matrix this wide, but not with pieces of it that the caches hold.

    Args:
        x: ``[rows, hidden]``.
        table: ``[vocab, hidden]``, cast to the dtype of x.
        out_dtype: dtype of the result.

    Returns:
        ``[rows, vocab]``.
    """
    return jax.lax.platform_dependent(
        x,
        table.astype(x.dtype),
        cpu=lambda x, table: _project_in_pieces(x, table, out_dtype),
        default=lambda x, table: _highest(x, table.T, out_dtype),
    )


_PIECE_ROWS = 4096  # of a table 576 wide; 1,024 to 4,096 measured alike


def num_pieces(vocab: int) -> int:
    """Equal pieces that a table is cut into, of about 4,096 rows; 1 where no number of pieces near that divides it.

    >>> num_pieces(49152), num_pieces(128256), num_pieces(50257), num_pieces(32003)
    (12, 32, 29, 1)
    """
    wanted = vocab / _PIECE_ROWS
    near = [n for n in range(max(1, round(wanted / 2)), round(wanted * 4) + 1) if vocab % n == 0]
    return min(near, key=lambda n: abs(n - wanted), default=1)


def _project_in_pieces(x: jax.Array, table: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """The pieces as the batch of one product, each times the same rows: nothing of the table is copied."""
    num_rows, (vocab, hidden) = x.shape[0], table.shape
    if num_rows == 1 and x.dtype != jnp.bfloat16:  # a matrix times a vector is read by all cores as it is
        return _highest(table, x.T, out_dtype).T
    rows = jnp.concatenate([x, x]) if num_rows == 1 else x
    pieces = num_pieces(vocab)
    # Behind the barrier it is a batch; otherwise the compiler sees one wide product again.
    repeated = jax.lax.optimization_barrier(jnp.broadcast_to(rows, (pieces, *rows.shape)))
    out = jnp.einsum(
        "pvh,prh->pvr",
        table.reshape(pieces, -1, hidden),
        repeated,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=out_dtype,
    )
    return out.reshape(vocab, -1).T[:num_rows]


def _highest(x: jax.Array, w: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    return jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out_dtype)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32 (float64 for float64).

    Follows Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """

    def __init__(self, size: int, *, eps: float, rngs: nnx.Rngs | None, param_dtype: jnp.dtype):
        self.eps = eps
        self.weight = make_param(rngs, (size,), param_dtype, scale=None)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight[...].astype(wide.dtype)).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, factors: tuple[float, ...] | None) -> np.ndarray:
    """Radians per token of each rotated pair, float64 ``[head_dim / 2]``: ``theta^(-2i / head_dim) / factors[i]``."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return frequencies if factors is None else frequencies / np.asarray(factors, np.float64)


def rope_tables(positions: jax.Array, frequencies: np.ndarray, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position, ``[..., head_dim / 2]`` each, in float32 (float64 for float64)."""
    wide = jnp.promote_types(dtype, jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(frequencies, wide)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + dim / 2) of the last axis.

    Follows Su et al., RoFormer (2021), with the halves of Hugging Face's Llama.

    Args:
        x: ``[tokens, heads, dim]``.
        tables: cosine and sine, ``[tokens, dim / 2]`` each.

    Returns:
        ``[tokens, heads, dim]`` in the dtype of x.
    """
    cos, sin = (table[..., None, :] for table in tables)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
