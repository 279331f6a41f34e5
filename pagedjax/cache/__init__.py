"""The host side of a paged KV cache: block pool, prefix index, copy-on-write, kinds of cache, and their manager.

Imports NumPy and the standard library, never jax. `KVCacheManager` is what a scheduler talks to. One request's life:

>>> import numpy as np
>>> from pagedjax.cache import KVCacheManager
>>> manager = KVCacheManager(num_blocks=32, block_size=4, max_rows=8, max_len=64)

A prompt of ten tokens comes in. Nothing of it is cached, so all of it is scheduled, into three blocks:

>>> prompt = np.arange(10, dtype=np.int32)
>>> match = manager.match(prompt)
>>> match.num_tokens, match.leader
(0, None)
>>> row = manager.admit(prompt, match=match)
>>> manager.block_table(row).tolist(), int(manager.num_scheduled[row])
([1, 2, 3], 10)

Before the step is dispatched, the device must hear of copies to make and of table entries that have changed:

>>> manager.take_copies().tolist()
[]
>>> manager.take_table_updates().tolist()      # group, row, index, block
[[0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 2, 3]]

``commit`` says that the step has been dispatched; ``settle`` brings the token that it sampled.

>>> step = manager.commit()
>>> manager.settle(step, [row], [100])
>>> int(manager.num_known[row]), int(manager.num_scheduled[row])
(11, 10)

A decode step grows every running row by one token. There is room in the third block, so no block is taken:

>>> manager.blocks_to_grow([row], 1), manager.grow([row], 1)
(0, True)
>>> manager.settle(manager.commit(), [row], [101])

A second request shares nine tokens: two blocks by reference, and one token by a copy of the third block.

>>> other = np.array([*range(9), 50, 51], dtype=np.int32)
>>> match = manager.match(other)
>>> match.num_tokens
9
>>> second = manager.admit(other, match=match)
>>> manager.block_table(second).tolist()
[1, 2, 4]
>>> manager.take_copies().tolist()             # source, destination
[[3, 4]]
>>> manager.settle(manager.commit(), [second], [60])

A fork shares everything. The first of the two to write into the shared last block gets a copy, the other keeps it:

>>> child = manager.fork(second)
>>> manager.append(child, [70])
>>> manager.grow([second, child], 1)
True
>>> manager.block_table(second).tolist(), manager.block_table(child).tolist()
([1, 2, 5], [1, 2, 4])
>>> manager.take_copies().tolist()
[[4, 5]]
>>> manager.settle(manager.commit(), [second, child], [61, 71])
>>> print(manager.snapshot().text())
pool kv: 31 blocks of 4 tokens, 5 in use, 2 shared, 0 cached
       0 0##ACB..........................
   reused next: 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 …
   row 0 (A): 12 tokens known, 11 scheduled
   row 1 (B): 13 tokens known, 12 scheduled
   row 2 (C): 13 tokens known, 12 scheduled
   letter: one owner, # shared, c cached, . free, h held by a copy, 0 the null block

What has been computed outlives its request, until its blocks are needed for something else:

>>> for each in (row, second, child):
...     manager.free(each)
>>> manager.num_free_blocks, manager.match([*range(10), 100, 7]).num_tokens
(31, 11)
>>> manager.metrics().hit_rate                 # 9 of the 21 prompt tokens admitted
0.42857142857142855
>>> manager.check()                            # every invariant holds
"""

from pagedjax.cache.admission import Match, RequestTooLargeError
from pagedjax.cache.block_pool import BlockPool, OutOfBlocksError
from pagedjax.cache.events import BlockRemoved, BlockStored, CacheCleared, Event
from pagedjax.cache.free_list import FreeList
from pagedjax.cache.growth import StepOrderError
from pagedjax.cache.hashing import ExtraKeys
from pagedjax.cache.kinds import ChunkedLocal, CrossAttention, FullAttention, Kind, Recurrent, SlidingWindow
from pagedjax.cache.manager import KVCacheManager
from pagedjax.cache.metrics import CacheMetrics, EvictedBlock, Usage
from pagedjax.cache.snapshot import Snapshot

__all__ = [
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "CacheMetrics",
    "ChunkedLocal",
    "CrossAttention",
    "Event",
    "EvictedBlock",
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
    "Snapshot",
    "StepOrderError",
    "Usage",
]
