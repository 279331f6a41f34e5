"""Copies of whole blocks, for copy-on-write: one loop over the pairs of this step, for all layers' arrays at once."""

import jax
from jax import lax


def copy_blocks[Pages](pages: Pages, copies: jax.Array, num_copies: jax.Array | int, *, num_layers: int = 1) -> Pages:
    """Copies blocks within pages, in place when the pages are donated.

    The trip count of the loop is data, so a step without copies costs one comparison and compiles to the same program.

    Args:
      pages: one array [num_blocks, ...] or any pytree of them (all layers, scales too), which share block ids.
      copies: int32 [max_copies, 2]: (source, destination) pairs. Destinations are distinct and none is a source.
      num_copies: int32 scalar: how many of them count.
      num_layers: of stacked pages [num_layers * num_blocks, ...]: each layer's copy of the block is copied.

    Returns:
      pages, with the same structure.
    """

    def copy_one(i: jax.Array, pages: Pages) -> Pages:
        def copy_in(array: jax.Array) -> jax.Array:
            # Seen with the layers apart (no data moves), so that one slice takes a block of all of them.
            stacked = array.reshape(num_layers, array.shape[0] // num_layers, *array.shape[1:])
            block = lax.dynamic_index_in_dim(stacked, copies[i, 0], axis=1)
            return lax.dynamic_update_index_in_dim(stacked, block, copies[i, 1], axis=1).reshape(array.shape)

        return jax.tree.map(copy_in, pages)

    return lax.fori_loop(0, num_copies, copy_one, pages)
