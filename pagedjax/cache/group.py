"""One group of layers: its kind, its block tables, and where its share of a hit comes from."""

from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pagedjax.cache.block_pool import BlockPool
from pagedjax.cache.copies import CopyQueue
from pagedjax.cache.events import Event
from pagedjax.cache.free_list import IntArray
from pagedjax.cache.hashing import Span, Tokens, spans_in
from pagedjax.cache.kinds import NEVER, Kind, cdiv
from pagedjax.cache.prefix_index import Detail, PrefixIndex
from pagedjax.cache.rows import Rows


@dataclass(slots=True)
class Query:
    """A prompt as a look-up sees it.

    Attributes:
        tokens: int32 ``[num_tokens]``, those under a span replaced by codes.
        true_tokens: int32 ``[num_tokens]``.
        spans: the spans of the extra keys.
        root: start of its hash chain.
        hashes: of its whole blocks.
        best_rows: answers of `Rows.visible_run` by block.
        whole: answers of `Group.whole_blocks` by group.
        runs: answers of `Group.partial` by group and block.
    """

    tokens: Tokens
    true_tokens: Tokens
    spans: tuple[Span, ...]
    root: bytes
    hashes: list[bytes]
    best_rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    whole: dict[int, list[int]] = field(default_factory=dict)
    runs: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def forget_answers(self) -> None:
        self.best_rows.clear()
        self.runs.clear()
        self.whole.clear()

    def parent(self, block: int) -> bytes:
        return self.hashes[block - 1] if block else self.root

    def detail(self, start: int, end: int) -> Detail | None:
        spans = spans_in(self.spans, start, end) if self.spans else ()
        return (self.true_tokens[start:end].tobytes(), spans) if spans else None


@dataclass(slots=True)
class GroupHit:
    """A group's share of a hit.

    Attributes:
        blocks: int ``[whole blocks of the hit]``, the block that holds each of them; 0: not needed.
        source: the block that holds the tokens after them; 0 if there are none.
        has_gaps: some of ``blocks`` are 0.
    """

    blocks: IntArray
    source: int = 0
    has_gaps: bool = False

    @property
    def held(self) -> IntArray:
        """The blocks without the zeros."""
        return self.blocks[self.blocks != 0] if self.has_gaps else self.blocks


NO_BLOCKS = np.empty(0, np.intp)


class Group:
    """Group ``number``: tables int32 ``[max_rows, max_blocks]`` and how much of them counts.

    Attributes:
        keeps_all: every token is needed for ever, so no table has holes.
        num_blocks: table entries in use, a row.
        num_synced: leading entries that the device has.
        kept_from: leading entries, after the sinks, that have been given back because no further token needs them.
        give_up_at: settled tokens at which the row can give back its next block.
        exact: of an in-place kind, bool ``[max_rows, max_blocks]``: the block holds the state at its very end.
    """

    def __init__(
        self, number: int, kind: Kind, pool: BlockPool, rows: Rows, copies: CopyQueue, events: list[Event] | None
    ) -> None:
        self.number, self.kind, self.pool, self.rows, self.copies = number, kind, pool, rows, copies
        self.index = PrefixIndex(number, pool, events)
        self.block_size = rows.block_size
        max_blocks = rows.token_blocks if kind.cacheable else kind.max_blocks(0, 0, rows.block_size)
        self.table = np.zeros((rows.max_rows, max_blocks), np.int32)
        self.flat_table = self.table.reshape(-1)
        self.num_blocks = np.zeros(rows.max_rows, np.int32)
        self.num_synced = np.zeros(rows.max_rows, np.int32)
        self.kept_from = np.zeros(rows.max_rows, np.int32)
        self.give_up_at = np.full(rows.max_rows, NEVER, np.int32)
        self.exact = np.zeros(self.table.shape if kind.in_place else (0, 0), bool)
        self.num_sinks = cdiv(kind.sink_tokens, rows.block_size)
        self.keeps_all = not kind.in_place and (not kind.cacheable or kind.first_needed(rows.max_len) == 0)

    # ---- hits

    def needed(self, num_tokens: int) -> list[int]:
        """The whole blocks (their places in a table) that a hit of ``num_tokens`` tokens must find, last one first."""
        whole = num_tokens // self.block_size
        first = min(self.kind.first_needed(num_tokens) // self.block_size, whole)
        return [*range(whole - 1, first - 1, -1), *range(min(self.num_sinks, first) - 1, -1, -1)]

    def longest_hit(self, query: Query, limit: int, min_partial: int) -> int:
        """The longest hit of at most ``limit`` tokens that this group can serve."""
        if not self.kind.cacheable:
            return limit
        if self.keeps_all:
            return self._longest_prefix(query, limit, min_partial)
        length = limit
        while length > 0:
            whole, rest = divmod(length, self.block_size)
            if 0 < rest < min_partial:
                length -= rest
                continue
            if rest:
                run = min(self.partial(query, whole, rest)[0], rest)
                if run < rest:
                    length = whole * self.block_size + (run if run >= min_partial else 0)
                    continue
            missing = next((at for at in self.needed(length) if query.hashes[at] not in self.index.blocks), None)
            if missing is None:
                return length
            length = self._shorten(query, missing, min_partial)
        return 0

    def _shorten(self, query: Query, missing: int, min_partial: int) -> int:
        run = self.partial(query, missing, self.block_size)[0]
        return missing * self.block_size + (run if run >= min_partial else 0)

    def _longest_prefix(self, query: Query, limit: int, min_partial: int) -> int:
        whole = len(self.whole_blocks(query, limit))
        run = min(self.partial(query, whole, limit - whole * self.block_size)[0], limit - whole * self.block_size)
        return whole * self.block_size + (run if run >= min_partial else 0)

    def whole_blocks(self, query: Query, limit: int) -> list[int]:
        """The blocks of the whole blocks at the front that are indexed, up to ``limit`` tokens."""
        most = limit // self.block_size
        found = query.whole.get(self.number)
        if found is None:
            hashes, blocks = query.hashes, self.index.blocks
            found = []
            if hashes and hashes[0] in blocks:
                # `get` says None where there is nothing, but what comes after is of no use
                answers: list[int | None] = list(map(blocks.get, hashes))
                found = cast(list[int], answers[: answers.index(None)] if None in answers else answers)
            query.whole[self.number] = found
        return found[:most] if most < len(found) else found

    def partial(self, query: Query, block: int, most: int) -> tuple[int, int]:
        """The longest run of tokens at the beginning of block ``block`` that another block holds: ``(number, block)``.
        At least ``most`` is as good as any more.
        """
        if self.kind.in_place or most <= 0:
            return 0, 0
        size = self.block_size
        if block < len(query.hashes) and query.hashes[block] in self.index.blocks:
            return size, self.index.blocks[query.hashes[block]]
        if (self.number, block) in query.runs and query.runs[self.number, block][0] >= most:
            return query.runs[self.number, block]
        start = block * size
        tokens = query.tokens[start : start + size]
        detail = query.detail(start, start + tokens.size)
        found = self.index.find_partial(query.parent(block), tokens.tobytes(), detail)
        if found[0] < most:
            if block not in query.best_rows:
                query.best_rows[block] = self.rows.visible_run(
                    query.parent(block),
                    block,
                    tokens,
                    query.true_tokens[start : start + size],
                    detail[1] if detail else (),
                )
            run, row = query.best_rows[block]
            if run > found[0] and block < self.num_blocks[row] and self.table[row, block]:
                found = run, int(self.table[row, block])
        query.runs[self.number, block] = found
        return found

    def hit(self, query: Query, length: int) -> GroupHit:
        """Where the first ``length`` tokens come from; `longest_hit` has said that they can be had."""
        if not self.kind.cacheable:
            return GroupHit(NO_BLOCKS)
        whole, rest = divmod(length, self.block_size)
        source = self.partial(query, whole, rest)[1] if rest else 0
        if self.keeps_all:
            return GroupHit(np.array(self.whole_blocks(query, length), np.intp), source)
        blocks = np.zeros(whole, np.intp)
        for at in self.needed(length):
            blocks[at] = self.index.blocks[query.hashes[at]]
        return GroupHit(blocks, source, has_gaps=True)

    # ---- tables

    def num_new_blocks(self, hit_blocks: int, hit: int, total: int) -> int:
        """How many blocks a new sequence takes beyond the whole ones (``hit_blocks``) of its hit."""
        if not self.kind.cacheable:
            return self.table.shape[1]
        if self.kind.in_place:
            return 1
        return cdiv(total, self.block_size) - hit_blocks

    def attach(self, row: int, hit: GroupHit, length: int, total: int, blocks: IntArray) -> None:
        """Fills the table of a new row: the blocks of its hit (shared already), then ``blocks``; queues the copy."""
        whole = len(hit.blocks)
        table = self.table[row]
        if whole:
            table[:whole] = hit.blocks
        if self.kind.in_place:
            last = cdiv(total, self.block_size)
            table[whole : last - 1] = 0
            table[last - 1] = blocks[0]
            self.exact[row] = False
            if length:
                self.exact[row, whole - 1] = True
                self.copies.add(int(table[whole - 1]), int(blocks[0]), self.block_size)
        else:
            last = whole + len(blocks)
            table[whole:last] = blocks
            if hit.source:
                self.copies.add(hit.source, int(blocks[0]), length % self.block_size)
        self.num_blocks[row] = last
        self.num_synced[row] = 0
        if not self.keeps_all:
            self._set_kept_from(row, min(self.kind.first_needed(length) // self.block_size, whole))

    def share(self, parent: int, child: int, num_tokens: int) -> None:
        """Gives row ``child`` the blocks of the first ``num_tokens`` tokens of row ``parent``."""
        n = cdiv(num_tokens, self.block_size) if self.kind.cacheable else int(self.num_blocks[parent])
        self.table[child, :n] = self.table[parent, :n]
        self.num_blocks[child] = n
        self.num_synced[child] = 0
        if self.kind.in_place:
            self.exact[child, :n] = self.exact[parent, :n]
            self.exact[child, n:] = False
        if not self.keeps_all:
            self._set_kept_from(child, min(int(self.kept_from[parent]), n))
        blocks = self.held(child)
        self.pool.share(blocks)

    def _set_kept_from(self, row: int, place: int) -> None:
        self.kept_from[row] = place
        self.give_up_at[row] = self.kind.passed_at((max(place, self.num_sinks) + 1) * self.block_size)

    def held(self, row: int, start: int = 0) -> NDArray[np.intp]:
        """The row's blocks from table entry ``start`` on, the last one first, without the null block."""
        blocks = self.table[row, start : self.num_blocks[row]][::-1].astype(np.intp)
        return blocks if self.keeps_all else blocks[blocks != 0]

    def cut(self, row: int, num_blocks: int) -> None:
        """Gives back all blocks of the row beyond the first ``num_blocks``."""
        if num_blocks >= self.num_blocks[row]:
            return
        self.pool.release(self.held(row, num_blocks))
        self.num_blocks[row] = num_blocks
        self.num_synced[row] = min(self.num_synced[row], num_blocks)
        if not self.keeps_all:
            self._set_kept_from(row, min(int(self.kept_from[row]), num_blocks))
        if self.copies.pending:
            self.copies.cancel_abandoned()

    def detach(self, row: int) -> None:
        """Gives back all blocks of a row that ends."""
        self.pool.release(self.held(row))
        self.num_blocks[row] = self.num_synced[row] = self.kept_from[row] = 0
        self.give_up_at[row] = NEVER
        if self.copies.pending:
            self.copies.cancel_abandoned()

    def take_updates(self) -> NDArray[np.int32]:
        """Entries that the device lacks, int32 ``[n, 4]``: (group, row, index, block)."""
        rows = (self.num_synced < self.num_blocks).nonzero()[0]
        start, end = self.num_synced[rows], self.num_blocks[rows]
        counts = end - start
        updates = np.empty((int(counts.sum()), 4), np.int32)
        updates[:, 0] = self.number
        updates[:, 1] = np.repeat(rows, counts)
        updates[:, 2] = np.arange(len(updates)) - np.repeat(np.cumsum(counts) - counts - start, counts)
        updates[:, 3] = self.table[updates[:, 1], updates[:, 2]]
        self.num_synced[rows] = end
        return updates

    def give_up_unneeded(self, row: int, num_tokens: int) -> None:
        """Gives back the blocks that no token after ``num_tokens`` settled ones can need."""
        first = self.kind.first_needed(num_tokens) // self.block_size
        start = max(int(self.kept_from[row]), self.num_sinks)
        self._set_kept_from(row, first)
        blocks = self.table[row, start:first][::-1].astype(np.intp)
        self.table[row, start:first] = 0
        self.pool.release(blocks[blocks != 0])

    def can_continue_from(self, row: int, num_tokens: int) -> bool:
        """Whether the row still has every block that the token after ``num_tokens`` others needs."""
        if self.keeps_all or num_tokens == 0:
            return True
        if self.kind.in_place:
            return num_tokens == self.rows.num_scheduled[row] or (
                num_tokens % self.block_size == 0 and self.is_checkpoint(row, num_tokens // self.block_size - 1)
            )
        table = self.table[row]
        places = self.needed(num_tokens)
        if num_tokens % self.block_size:
            places.append(num_tokens // self.block_size)
        return all(at < self.num_blocks[row] and table[at] for at in places)

    def is_checkpoint(self, row: int, block: int) -> bool:
        """Whether entry ``block`` of the row's table holds the state at the end of that block."""
        return bool(block < self.num_blocks[row] and self.table[row, block] and self.exact[row, block])

    def replace(self, row: int, place: int, block: int) -> None:
        """Puts another block into the row's table."""
        self.table[row, place] = block
        self.num_synced[row] = min(self.num_synced[row], place)
