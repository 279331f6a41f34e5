"""The pool of blocks: who owns each of them, who merely holds it, and which one is reused next.

An *owner* is a sequence that has the block in its table; a *hold* is a queued copy or a pin that only forbids
eviction. They are counted apart, so a hold never looks like a second owner and never causes a copy. A block is on
the free list exactly when it has neither. Eviction is lazy: a free block keeps its content and its place in the
prefix index until it is taken for something else. A block whose content nobody can look up is worthless and goes to
the front of the list; one with an index entry goes to the back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagedjax.cache.free_list import FreeList, IntArray
from pagedjax.cache.metrics import BlockSampler

NULL_BLOCK = 0
DUPLICATE = 128  # flag in `cached`: the content is indexed, but by another block


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Blocks ``0 … num_blocks - 1``; block 0 is the null block, which is never taken.

    Attributes:
        owners: int32 ``[num_blocks]``, sequences that have the block in their table.
        holds: int32 ``[num_blocks]``, queued copies and pins.
        cached: uint8 ``[num_blocks]``, 0, or 1 + the group whose prefix index has an entry for the block;
            plus 128 if that entry names another block with the same content.
        on_drop: called with this pool and the blocks whose indexed content is lost.
    """

    def __init__(self, num_blocks: int, on_drop: Callable[[BlockPool, list[int]], None] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks} but must be at least 2: block 0 is the null block")
        self.num_blocks = num_blocks
        self.free_list = FreeList(num_blocks)
        self.owners = np.zeros(num_blocks, np.int32)
        self.holds = np.zeros(num_blocks, np.int32)
        self.cached = np.zeros(num_blocks, np.uint8)
        self.on_drop = on_drop
        self.sampler: BlockSampler | None = None
        self.num_evictions = 0
        self.num_holds = 0
        self.num_shared = 0  # blocks with several owners
        self._place = np.empty(num_blocks, np.int32)  # scratch of `_require_owned`
        self._places = np.arange(64, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return self.free_list.num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.free_list.num_free

    def take(self, n: int) -> IntArray:
        """Gives ``n`` blocks one owner each; the content they had is evicted. Returns int ``[n]``.

        Raises:
            OutOfBlocksError: fewer than ``n`` are free. Nothing changes.
        """
        free = self.free_list
        if n > free.num_free:
            raise OutOfBlocksError(f"{n} blocks were asked for but {free.num_free} of {self.num_blocks - 1} are free")
        blocks = np.array(free.pop_n(n), np.intp)
        self.owners[blocks] = 1
        content = self.cached[blocks]
        if self.sampler is not None:
            self.sampler.replace(blocks.tolist(), content.tolist())
        if content.any():
            self._evict(blocks[content > 0].tolist())
        return blocks

    def _evict(self, blocks: list[int]) -> None:
        assert self.on_drop is not None
        self.num_evictions += len(blocks)
        self.on_drop(self, blocks)

    def share(self, blocks: IntArray) -> None:
        """Adds an owner to each of several distinct blocks, which may be free.

        Raises:
            ValueError: one of them is the null block or no block of this pool. Nothing changes.
        """
        if len(blocks) == 0:
            return
        self._require_ids(blocks)
        if self.sampler is not None:
            self.sampler.use(blocks.tolist())
        owners = self.owners[blocks]
        idle = blocks[owners == 0]
        if len(idle):
            if self.num_holds:
                idle = idle[self.holds[idle] == 0]
            self.free_list.remove_n(idle)
        self.owners[blocks] = owners + 1
        self.num_shared += int(np.count_nonzero(owners == 1))

    def release(self, blocks: IntArray) -> None:
        """Takes one owner from each of several distinct blocks; give the one to be reused first first.

        Raises:
            ValueError: one of them has no owner, comes twice, is the null block or no block of this pool. Nothing
                changes.
        """
        if len(blocks) == 0:
            return
        owners = self._require_owned(blocks)
        if self.sampler is not None:
            self.sampler.use(blocks.tolist())
        owners -= 1
        self.owners[blocks] = owners
        if owners.any():
            idle = blocks[owners == 0]
            self.num_shared -= int(np.count_nonzero(owners == 1))
        else:
            idle = blocks
        if self.num_holds:
            idle = idle[self.holds[idle] == 0]
        self._put_back(idle)

    def _put_back(self, idle: IntArray) -> None:
        content = self.cached[idle]
        if (content - 1).max(initial=0) < DUPLICATE - 1:  # unsigned: 0 becomes the largest number
            self.free_list.append_n(idle)
            return
        duplicates = idle[content >= DUPLICATE]
        if len(duplicates):
            assert self.on_drop is not None
            self.on_drop(self, duplicates.tolist())
        valuable = (content > 0) & (content < DUPLICATE)
        self.free_list.append_n(idle[valuable])
        self.free_list.prepend_n(idle[~valuable])

    def hold(self, block: int) -> None:
        """Forbids the eviction of a block, which may be free, until `unhold`."""
        self._require_ids(np.array([block]))
        if self.owners[block] == 0 and self.holds[block] == 0:
            self.free_list.remove(block)
        self.holds[block] += 1
        self.num_holds += 1

    def unhold(self, block: int) -> None:
        """Takes back one `hold`.

        Raises:
            ValueError: the block is not held. Nothing changes.
        """
        self._require_ids(np.array([block]))
        if self.holds[block] == 0:
            raise ValueError(f"block {block} is not held; every unhold must follow a hold of its own")
        self.holds[block] -= 1
        self.num_holds -= 1
        if self.owners[block] == 0 and self.holds[block] == 0:
            self._put_back(np.array([block]))

    def demote(self, block: int) -> None:
        """Moves a free block that has lost its index entry to the front of the free list."""
        if self.owners[block] == 0 and self.holds[block] == 0:
            self.free_list.remove(block)
            self.free_list.prepend_n(np.array([block]))

    def num_idle(self, blocks: IntArray) -> int:
        """How many of several distinct blocks are free: sharing them takes that many off the free list."""
        idle = self.owners[blocks] == 0
        if self.num_holds:
            idle &= self.holds[blocks] == 0
        return int(np.count_nonzero(idle))

    def _require_ids(self, blocks: IntArray) -> None:
        # as unsigned numbers, 0 - 1 and everything negative are larger than any id
        if (np.asarray(blocks, np.intp).view(np.uintp) - np.uintp(1)).max() >= self.num_blocks - 1:
            wrong = blocks[(blocks <= NULL_BLOCK) | (blocks >= self.num_blocks)][0]
            raise ValueError(f"block {wrong} is not one of the blocks 1 … {self.num_blocks - 1} of this pool")

    def _require_owned(self, blocks: IntArray) -> NDArray[np.int32]:
        """How many owners each block has; every one has at least one, and comes once."""
        self._require_ids(blocks)
        owners = self.owners[blocks]
        if owners.min() <= 0:
            raise ValueError(f"block {blocks[owners <= 0][0]} is released but nobody owns it")
        n = len(blocks)
        if n > 1:  # a block given twice keeps only the last of its two places
            if n > len(self._places):
                self._places = np.arange(2 * n, dtype=np.int32)
            places = self._places[:n]
            self._place[blocks] = places
            twice = self._place[blocks] != places
            if twice.any():
                raise ValueError(f"block {blocks[twice][0]} is released twice in one call")
        return owners

    def check(self, expected_owners: Sequence[int] | None = None) -> None:
        """Raises AssertionError unless every invariant of the pool holds; ``expected_owners`` [num_blocks] counts the
        tables that each block stands in.
        """
        self.free_list.check()
        free = np.zeros(self.num_blocks, bool)
        free[list(self.free_list)] = True
        assert (self.owners >= 0).all(), "a block has a negative number of owners"
        assert (self.holds >= 0).all(), "a block has a negative number of holds"
        assert self.holds.sum() == self.num_holds, f"{self.holds.sum()} holds, but {self.num_holds} are counted"
        assert (self.owners > 1).sum() == self.num_shared, f"{self.num_shared} shared blocks are counted"
        assert not free[NULL_BLOCK], "the null block is on the free list"
        assert self.owners[NULL_BLOCK] == 0, "the null block has an owner"
        assert self.cached[NULL_BLOCK] == 0, "the null block is in the prefix index"
        idle = (self.owners == 0) & (self.holds == 0)
        idle[NULL_BLOCK] = False
        wrong = (free != idle).nonzero()[0]
        assert not len(wrong), f"blocks {wrong} are on the free list and needed, or neither"
        if expected_owners is not None:
            wrong = (self.owners != np.asarray(expected_owners)).nonzero()[0]
            assert not len(wrong), (
                f"blocks {wrong}: {self.owners[wrong]} owners are counted but tables say "
                f"{np.asarray(expected_owners)[wrong]}"
            )
