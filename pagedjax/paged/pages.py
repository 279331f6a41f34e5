"""The pages: device arrays that hold the blocks of the cache, and the specification that sizes them.

One array serves one layer of every group: ``[num_blocks, physical_heads, block_size, width]`` with K in the
first lanes and V after it, so that a block of a layer is one contiguous piece of memory. Groups are sets of
layers with the same kind of cache; they draw block ids from one pool, which is why array ``j`` can serve the
``j``-th layer of each group: a block id belongs to one group at a time. `PagesSpec` is static (hashable), the
arrays are plain `jax.Array` values that a compiled step takes donated and gives back.

Bytes are *physical*: what the device really holds, the padding of TPU tiles included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

HEADS_AXIS = "tensor"  # mesh axis that shards the physical KV heads
TPU_LANES = 128


@dataclass(frozen=True)
class CacheLayer:
    """What one attention layer needs of the cache, per token: the model's side of the specification.

    Attributes:
        num_kv_heads: logical KV heads.
        k_dim: lanes of a key.
        v_dim: lanes of a value.
        v_offset: lane where the value begins; `None` puts it after the key. Smaller than ``k_dim`` where V
            is a part of K and nothing is stored twice (multi-head latent attention).
        window: tokens of a sliding window, or `None` for full attention. Layers that differ in it are in
            different groups.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    v_offset: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "k_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be at least 1")
        if self.v_offset is not None and not 0 <= self.v_offset <= self.k_dim:
            raise ValueError(f"v_offset is {self.v_offset} but must lie between 0 and k_dim {self.k_dim}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window} tokens but must be at least 1")

    @property
    def width(self) -> int:
        """Lanes of one token of one head."""
        start = self.k_dim if self.v_offset is None else self.v_offset
        return max(self.k_dim, start + self.v_dim)


@dataclass(frozen=True)
class PagesSpec:
    """Sizes, groups and dtype of all pages of a model. Build it with `PagesSpec.for_layers`.

    Attributes:
        num_blocks: blocks, the null block 0 included.
        block_size: tokens in a block.
        layers: the attention layers of the model, in order.
        dtype: dtype of the pages.
        num_shards: chips that share the KV heads.
        layer_groups: group of each layer.
        layer_arrays: array of each layer.

    >>> spec = PagesSpec.for_layers([CacheLayer(3, 64, 64)] * 30, num_blocks=100, block_size=32, dtype="float32")
    >>> spec.shape, spec.num_arrays, spec.num_groups
    ((100, 3, 32, 128), 30, 1)
    >>> spec.block_bytes, spec.token_bytes
    (1474560, 46080)
    """

    num_blocks: int
    block_size: int
    layers: tuple[CacheLayer, ...]
    dtype: np.dtype
    num_shards: int = 1
    layer_groups: tuple[int, ...] = field(default=())
    layer_arrays: tuple[int, ...] = field(default=())

    @classmethod
    def for_layers(
        cls,
        layers: Sequence[CacheLayer],
        *,
        num_blocks: int,
        block_size: int,
        dtype: Any = jnp.float32,
        num_shards: int = 1,
    ) -> PagesSpec:
        """Group the layers by kind and lay their pages out.

        Raises:
            ValueError: a size below its least value, layers whose blocks are not alike, or heads that the
                shards do not divide.
        """
        layers = tuple(layers)
        if not layers:
            raise ValueError("layers is empty: a model without attention layers needs no pages")
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks} but must be at least 2: block 0 is the null block")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size} tokens but must be at least 1")
        if len({(layer.num_kv_heads, layer.k_dim, layer.v_dim, layer.v_offset) for layer in layers}) > 1:
            raise ValueError("layers differ in heads or widths; layers that share a pool need blocks that are alike")
        heads = layers[0].num_kv_heads
        if heads % num_shards and num_shards % heads:
            raise ValueError(
                f"{heads} KV heads and {num_shards} shards: one must divide the other; choose a number of shards that "
                f"divides {heads} or is a multiple of it"
            )
        groups, arrays = _group(layers)
        return cls(num_blocks, block_size, layers, np.dtype(dtype), num_shards, groups, arrays)

    def with_blocks(self, num_blocks: int) -> PagesSpec:
        """The same layout with another number of blocks."""
        return replace(self, num_blocks=num_blocks)

    @property
    def num_groups(self) -> int:
        return max(self.layer_groups) + 1

    @property
    def num_arrays(self) -> int:
        return max(self.layer_arrays) + 1

    @property
    def physical_heads(self) -> int:
        """Heads that the pages hold: each of more shards than heads keeps a copy of its logical head."""
        return max(self.layers[0].num_kv_heads, self.num_shards)

    @property
    def width(self) -> int:
        return self.layers[0].width

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of each array: ``[num_blocks, physical_heads, block_size, width]``."""
        return self.num_blocks, self.physical_heads, self.block_size, self.width

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all arrays, as CPUs and GPUs hold it: nothing is padded there."""
        return self.num_arrays * math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all arrays, without padding."""
        return self.block_bytes // self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, as CPUs and GPUs hold them."""
        return self.num_blocks * self.block_bytes

    def physical_block_bytes(self, platform: str) -> int:
        """Bytes of one block over all arrays as `platform` holds it: TPUs pad the last two axes to tiles.

        The last axis is padded to 128 lanes; the one before it to a power of two from the values that share a
        32-bit word up to 8 words, and to whole tiles of 8 words above.
        """
        if platform != "tpu":
            return self.block_bytes
        packing = max(1, 4 // self.dtype.itemsize)
        tile = 8 * packing
        if self.block_size >= tile:
            tokens = -(-self.block_size // tile) * tile
        else:
            tokens = max(packing, 1 << (self.block_size - 1).bit_length())
        lanes = -(-self.width // TPU_LANES) * TPU_LANES
        return self.num_arrays * self.physical_heads * tokens * lanes * self.dtype.itemsize

    def blocks_in(self, num_bytes: int, platform: str = "cpu") -> int:
        """Blocks (the null block included) that fit into `num_bytes` on `platform`, all shards together."""
        return num_bytes // self.physical_block_bytes(platform)

    def shape_dtypes(self, mesh: jax.sharding.Mesh | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What `allocate` returns, as shapes only: to compile a step without any memory."""
        sharding = None if mesh is None else NamedSharding(mesh, pages_partition())
        return tuple(jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding) for _ in range(self.num_arrays))

    def allocate(self, mesh: jax.sharding.Mesh | None = None) -> tuple[jax.Array, ...]:
        """The arrays, zeroed; on `mesh` the physical heads are sharded over its axis ``"tensor"``."""
        sharding = None if mesh is None else NamedSharding(mesh, pages_partition())
        return tuple(jnp.zeros(self.shape, self.dtype, device=sharding) for _ in range(self.num_arrays))


def _group(layers: tuple[CacheLayer, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Group and array of each layer: every group has layers of one kind, and as many as the rarest kind has.

    Groups of equal size make equal blocks, so that memory flows between them; a last group with fewer layers
    leaves some of its arrays unused.
    """
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.window, []).append(index)
    size = min(len(members) for members in kinds.values())
    groups, arrays, num_groups = [0] * len(layers), [0] * len(layers), 0
    for members in kinds.values():
        for place, index in enumerate(members):
            groups[index], arrays[index] = num_groups + place // size, place % size
        num_groups += -(-len(members) // size)
    return tuple(groups), tuple(arrays)


def pages_partition() -> PartitionSpec:
    """How the pages lie on a mesh: physical heads over the axis ``"tensor"``."""
    return PartitionSpec(None, HEADS_AXIS, None, None)


def physical_head_map(num_kv_heads: int, num_shards: int) -> np.ndarray:
    """Logical head of each physical head, ``int32 [physical_heads]``: ``p * num_kv_heads // physical_heads``."""
    physical = max(num_kv_heads, num_shards)
    return (np.arange(physical, dtype=np.int32) * num_kv_heads) // physical
