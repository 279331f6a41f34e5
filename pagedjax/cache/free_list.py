"""The free list: which blocks nobody needs, in the order in which they will be reused.

A doubly linked list over two integer arrays. Block 0, the null block, is never free, so its two links serve as
the sentinel: ``next[0]`` is the block to be reused first, ``prev[0]`` the one to be reused last. The arrays are
read and written in two ways that share their memory: one element at a time through a ``memoryview``, which is
several times faster than indexing NumPy with a Python int, and whole runs at a time through NumPy.
No operation allocates list nodes, and none depends on the size of the pool.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.intp]


class FreeList:
    """Blocks ``1 … num_blocks - 1``, all free at first, lowest id first.

    The list trusts its caller: membership is known to the pool (no owner and no hold), which checks before it calls.
    """

    def __init__(self, num_blocks: int) -> None:
        self.next = np.arange(1, num_blocks + 1, dtype=np.int32)
        self.prev = np.arange(-1, num_blocks - 1, dtype=np.int32)
        self.next[-1] = 0
        self.prev[0] = num_blocks - 1
        self._next = memoryview(self.next)
        self._prev = memoryview(self.prev)
        self.num_free = num_blocks - 1

    def pop_n(self, n: int) -> list[int]:
        """Takes the first ``n`` blocks (``n <= num_free``) off the list, in order."""
        following = self._next
        block = 0
        blocks = [block := following[block] for _ in range(n)]
        rest = following[block]
        following[0] = rest
        self._prev[rest] = 0
        self.num_free -= n
        return blocks

    def append_n(self, blocks: IntArray) -> None:
        """Puts distinct blocks at the end, ``blocks[0]`` to be reused before ``blocks[-1]``."""
        self._splice(self._prev[0], blocks, 0)

    def prepend_n(self, blocks: IntArray) -> None:
        """Puts distinct blocks at the beginning, ``blocks[0]`` to be reused first of all."""
        self._splice(0, blocks, self._next[0])

    def _splice(self, before: int, blocks: IntArray, after: int) -> None:
        n = len(blocks)
        if n == 0:
            return
        first, last = int(blocks[0]), int(blocks[-1])
        if n > 1:
            self.next[blocks[:-1]] = blocks[1:]
            self.prev[blocks[1:]] = blocks[:-1]
        self._next[before] = first
        self._prev[first] = before
        self._next[last] = after
        self._prev[after] = last
        self.num_free += n

    def remove(self, block: int) -> None:
        """Takes one block out of the middle."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def remove_n(self, blocks: IntArray) -> None:
        """Takes distinct blocks out of the middle. Neighbours that lie in the list in reverse order, as a sequence
        leaves them when it ends, are unlinked as one run.
        """
        n = len(blocks)
        if n <= 2:
            for block in blocks.tolist():
                self.remove(block)
            return
        breaks = (self.next[blocks[1:]] != blocks[:-1]).nonzero()[0] + 1
        last = blocks[np.concatenate(([0], breaks))].tolist()
        first = blocks[np.concatenate((breaks - 1, [n - 1]))].tolist()
        following, preceding = self._next, self._prev
        for head, tail in zip(first, last, strict=True):
            before, after = preceding[head], following[tail]
            following[before] = after
            preceding[after] = before
        self.num_free -= n

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[int]:
        """The blocks in the order in which they will be reused."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def check(self) -> None:
        """Raises AssertionError unless both directions agree with each other and with the count."""
        seen = 0
        block = 0
        while True:
            after = self._next[block]
            assert self._prev[after] == block, (
                f"free list: next of {block} is {after}, whose prev is {self._prev[after]}"
            )
            block = after
            if not block:
                break
            seen += 1
            assert seen <= self.num_free, f"free list: more than {self.num_free} blocks are linked"
        assert seen == self.num_free, f"free list: {seen} blocks are linked but {self.num_free} are counted"
