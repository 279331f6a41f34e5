"""Finding cached content: whole blocks by their hash, then the block that shares the longest run of further tokens.

One index serves one group. An entry says that a block holds the KV of exactly these tokens, written and known, after
exactly this prefix. Entries are keyed by the *hash* of the prefix, never by the id of the parent block, so a child
stays valid, and becomes reachable again, when its parent is evicted and computed anew.

The children of a prefix (whole blocks, and the unfinished last blocks of requests that have ended) are kept
sorted by the bytes of their tokens. In that order the child that shares the longest run with any query is one of the
two neighbours of the place where the query would stand, so one bisection finds it, however many siblings there are.
The unfinished blocks of running rows are not here: their rows are asked directly.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagedjax.cache.block_pool import DUPLICATE, BlockPool
from pagedjax.cache.events import BlockRemoved, BlockStored, Event
from pagedjax.cache.hashing import Span, common_span_run

Entry = tuple[bytes | None, bytes, bytes]  # hash (None: unfinished block), hash of the prefix, token bytes
Detail = tuple[bytes, tuple[Span, ...]]  # of a block under a span: the true tokens, the relative spans


@dataclass(slots=True)
class Siblings:
    """Several children of one prefix, sorted by their token bytes."""

    keys: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add(self, key: bytes, block: int) -> None:
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def discard(self, key: bytes, block: int) -> None:
        at = bisect_left(self.keys, key)
        while self.blocks[at] != block:  # equal look-up tokens under different spans
            at += 1
        del self.keys[at], self.blocks[at]


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading int32 tokens two byte strings share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // 4
    difference = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    return ((difference & -difference).bit_length() - 1) // 32


class PrefixIndex:
    """The prefix index of group ``group`` whose blocks come from ``pool``.

    Attributes:
        blocks: hash -> the block to use for it.
        journal: blocks that got an entry since the journal was last replaced, so that a failed step can be revoked.
        version: grows whenever an entry goes, so that a match knows whether it must look again.
    """

    def __init__(self, group: int, pool: BlockPool, events: list[Event] | None = None) -> None:
        self.group = group
        self.pool = pool
        self.events = events
        self.blocks: dict[bytes, int] = {}
        self.entries: dict[int, Entry] = {}
        self.children: dict[bytes, int | Siblings] = {}
        self.duplicates: dict[bytes, list[int]] = {}
        self.details: dict[int, Detail] = {}
        self.journal: list[int] = []
        self.version = 0
        self._cached = memoryview(pool.cached)

    @property
    def num_findable(self) -> int:
        """Blocks whose content a look-up can find: all with an entry but the duplicates."""
        return len(self.entries) - sum(map(len, self.duplicates.values()))

    def insert_many(
        self, block_ids: NDArray[np.int32], hashes: list[bytes], parents: list[bytes], keys: list[bytes]
    ) -> None:
        """`insert` for many blocks without spans. Nearly all are the first of their content and of their prefix."""
        blocks = block_ids.tolist()
        # A block or a hash that has an entry already has it among the children of its parent: one test finds them all.
        usual = self.events is None and self.children.keys().isdisjoint(parents) and len(set(parents)) == len(parents)
        if not usual:
            for block, block_hash, parent, key in zip(blocks, hashes, parents, keys, strict=True):
                self.insert(block, block_hash, parent, key)
            return
        self.blocks.update(zip(hashes, blocks, strict=True))
        self.children.update(zip(parents, blocks, strict=True))
        self.entries.update(zip(blocks, zip(hashes, parents, keys, strict=True), strict=True))
        self.pool.cached[block_ids] = self.group + 1
        self.journal += blocks

    def insert(self, block: int, block_hash: bytes, parent: bytes, key: bytes, detail: Detail | None = None) -> None:
        """Enters a whole block. If the content is indexed already, the block is remembered as its duplicate: it will be
        reused first when its owners go, unless the other one is lost before.
        """
        if block in self.entries:
            if self.entries[block][0] == block_hash:
                return
            self.forget(block)
        self.entries[block] = (block_hash, parent, key)
        self.journal.append(block)
        if detail:
            self.details[block] = detail
        if block_hash in self.blocks:
            self.duplicates.setdefault(block_hash, []).append(block)
            self._cached[block] = self.group + 1 + DUPLICATE
            return
        self._make_findable(block)
        if self.events is not None:
            self._store_event(block)

    def _make_findable(self, block: int) -> None:
        block_hash, parent, key = self.entries[block]
        self._cached[block] = self.group + 1
        if block_hash is not None:
            self.blocks[block_hash] = block
        sibling = self.children.get(parent)
        if sibling is None:
            self.children[parent] = block
            return
        if isinstance(sibling, int):
            other = sibling
            sibling = Siblings([self.entries[other][2]], [other])
            self.children[parent] = sibling
        sibling.add(key, block)
        self._drop_covered(sibling, key)

    def _drop_covered(self, siblings: Siblings, key: bytes) -> None:
        """Removes an unfinished sibling all of whose tokens ``key`` begins with: nobody needs it any more."""
        at = bisect_left(siblings.keys, key) - 1
        if at >= 0 and key.startswith(siblings.keys[at]):
            covered = siblings.blocks[at]
            if self.entries[covered][0] is None and covered not in self.details:
                self.forget(covered)
                self.pool.demote(covered)

    def insert_partial(self, block: int, parent: bytes, key: bytes, detail: Detail | None = None) -> bool:
        """Enters the unfinished last block of a request that ends. False if a sibling holds these tokens already."""
        if block in self.entries:  # by another owner that has ended, or before a truncation
            if len(self.entries[block][2]) >= len(key):
                return False
            self.forget(block)
        if detail is None and self._is_covered(parent, key):
            return False
        if detail is not None and self.find_partial(parent, key, detail)[0] * 4 == len(key):
            return False
        self.entries[block] = (None, parent, key)
        if detail:
            self.details[block] = detail
        self.journal.append(block)
        self._make_findable(block)
        return True

    def _is_covered(self, parent: bytes, key: bytes) -> bool:
        siblings = self.children.get(parent)
        if siblings is None:
            return False
        if isinstance(siblings, int):
            return self.entries[siblings][2].startswith(key) and siblings not in self.details
        at = bisect_left(siblings.keys, key)
        return at < len(siblings.keys) and siblings.keys[at].startswith(key) and siblings.blocks[at] not in self.details

    def find_partial(self, parent: bytes, key: bytes, detail: Detail | None = None) -> tuple[int, int]:
        """The child of ``parent`` that shares the longest run with ``key`` (the bytes of up to a block of tokens):
        ``(number of tokens, block)``, or ``(0, 0)``.
        """
        siblings = self.children.get(parent)
        if siblings is None:
            return 0, 0
        if isinstance(siblings, int):
            return self._run(siblings, key, detail)
        at = bisect_left(siblings.keys, key)
        return max(self._run(block, key, detail) for block in siblings.blocks[max(at - 1, 0) : at + 1])

    def _run(self, block: int, key: bytes, detail: Detail | None) -> tuple[int, int]:
        run = common_tokens(self.entries[block][2], key)
        theirs = self.details.get(block)
        if run and (detail or theirs):
            run = run_under_spans(run, detail or (key, ()), theirs or (self.entries[block][2], ()))
        return (run, block) if run else (0, 0)

    def forget_many(self, blocks: list[int]) -> None:
        """`forget` for many blocks."""
        if self.events is not None or self.duplicates or self.details:
            for block in blocks:
                self.forget(block)
            return
        entries, names, children = self.entries, self.blocks, self.children
        for block in blocks:
            block_hash, parent, key = entries.pop(block)
            if children[parent] == block:
                del children[parent]
            else:
                self._leave_siblings(block, parent, key)
            if block_hash is not None:
                del names[block_hash]
        self.pool.cached[blocks] = 0
        self.version += 1

    def _leave_siblings(self, block: int, parent: bytes, key: bytes) -> None:
        siblings = self.children[parent]
        assert isinstance(siblings, Siblings)
        siblings.discard(key, block)
        if len(siblings.keys) == 1:
            self.children[parent] = siblings.blocks[0]

    def forget(self, block: int) -> None:
        """Removes the entry of ``block``; a duplicate takes its place if there is one."""
        block_hash, parent, key = self.entries.pop(block)
        content = self._cached[block]
        self._cached[block] = 0
        self.details.pop(block, None) if self.details else None
        self.version += 1
        if content >= DUPLICATE:
            assert block_hash is not None
            self._forget_duplicate(block_hash, block)
            return
        if self.children[parent] == block:
            del self.children[parent]
        else:
            self._leave_siblings(block, parent, key)
        if block_hash is not None:
            del self.blocks[block_hash]
            if self.duplicates and block_hash in self.duplicates:
                heir = self.duplicates[block_hash][0]
                self._forget_duplicate(block_hash, heir)
                self._make_findable(heir)
            elif self.events is not None:
                self.events.append(BlockRemoved(block_hash, self.group))

    def _forget_duplicate(self, block_hash: bytes, block: int) -> None:
        others = self.duplicates[block_hash]
        others.remove(block)
        if not others:
            del self.duplicates[block_hash]

    def _store_event(self, block: int) -> None:
        block_hash, parent, key = self.entries[block]
        assert self.events is not None
        assert block_hash is not None
        true_bytes, spans = self.details.get(block, (key, ()))
        tokens = tuple(memoryview(true_bytes).cast("i").tolist())
        self.events.append(BlockStored(block_hash, parent, tokens, self.group, spans))

    def clear(self) -> None:
        """Forgets everything at once, except which blocks rest on steps in flight: rows may have hit them."""
        for block in self.entries:
            self._cached[block] = 0
        for each in (self.blocks, self.entries, self.children, self.duplicates, self.details):
            each.clear()
        self.version += 1

    def check(self) -> None:
        """Raises AssertionError unless the parts of the index agree with each other and with the pool."""
        for block_hash, block in self.blocks.items():
            assert self.entries[block][0] == block_hash, f"block {block} is indexed under another hash than its entry's"
        duplicates = {block for others in self.duplicates.values() for block in others}
        children = 0
        for parent, siblings in self.children.items():
            keys = [self.entries[siblings][2]] if isinstance(siblings, int) else siblings.keys
            blocks = [siblings] if isinstance(siblings, int) else siblings.blocks
            assert len(keys) == len(blocks) >= 1, "an empty list of siblings was kept"
            assert all(a <= b for a, b in pairwise(keys)), "siblings are not sorted"
            for key, block in zip(keys, blocks, strict=True):
                assert self.entries[block][1:] == (parent, key), f"block {block} is a child of another prefix"
            children += len(blocks)
        assert children == len(self.entries) - len(duplicates), "an entry is not among the children of its prefix"
        for block, (name, _, _) in self.entries.items():
            if block in duplicates:
                assert name in self.blocks, f"block {block} duplicates what is not indexed"
                assert self.pool.owners[block] or self.pool.holds[block], f"the duplicate {block} is free but indexed"
            expected = self.group + 1 + DUPLICATE * (block in duplicates)
            assert self._cached[block] == expected, f"block {block}: cached is {self._cached[block]}, not {expected}"
        mine = (self.pool.cached & (DUPLICATE - 1)) == self.group + 1
        assert mine.sum() == len(self.entries), "the pool marks blocks of this group that have no entry"


def run_under_spans(run: int, ours: Detail, theirs: Detail) -> int:
    """How much of a run of equal look-up tokens is really equal: true tokens and extra keys."""
    run = min(run, common_tokens(ours[0], theirs[0]))
    return common_span_run(ours[1], theirs[1], run)
