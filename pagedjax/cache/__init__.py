"""The host side of a paged KV cache: block pool, prefix index, copy-on-write, kinds of cache, and their manager.

Imports NumPy and the standard library, never jax. Start with `KVCacheManager`.
"""

from pagedjax.cache.admission import Match, RequestTooLargeError
from pagedjax.cache.block_pool import BlockPool, OutOfBlocksError
from pagedjax.cache.events import BlockRemoved, BlockStored, CacheCleared, Event
from pagedjax.cache.free_list import FreeList
from pagedjax.cache.growth import StepOrderError
from pagedjax.cache.hashing import ExtraKeys
from pagedjax.cache.kinds import ChunkedLocal, CrossAttention, FullAttention, Kind, Recurrent, SlidingWindow
from pagedjax.cache.manager import KVCacheManager
from pagedjax.cache.metrics import CacheMetrics, Usage

__all__ = [
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "CacheMetrics",
    "ChunkedLocal",
    "CrossAttention",
    "Event",
    "ExtraKeys",
    "FreeList",
    "FullAttention",
    "KVCacheManager",
    "Kind",
    "Match",
    "OutOfBlocksError",
    "Recurrent",
    "RequestTooLargeError",
    "SlidingWindow",
    "StepOrderError",
    "Usage",
]
