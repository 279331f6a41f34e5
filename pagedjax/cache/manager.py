"""KVCacheManager: what a scheduler talks to.

It decides which block holds what; it never touches the device. Whatever the device must know leaves as small int32
arrays: copies to make (`take_copies`) and entries of block tables that have changed (`take_table_updates`). A step is
put together by `match`, `admit`, `grow`, `fork`, `truncate` and `free` in any order, becomes *written* by `commit`,
and its sampled tokens become *known* by `settle`, which may come one or more steps later; `fail` undoes it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedjax.cache.admission import Admission, Match
from pagedjax.cache.block_pool import DUPLICATE, BlockPool
from pagedjax.cache.copies import CopyQueue
from pagedjax.cache.events import CacheCleared, Event
from pagedjax.cache.group import Group
from pagedjax.cache.growth import StepOrderError, append_blocks, carry_out, fits, plan_growth
from pagedjax.cache.hashing import NO_KEYS, ExtraKeys, as_tokens
from pagedjax.cache.kinds import NEVER, FullAttention, Kind
from pagedjax.cache.metrics import BlockSampler
from pagedjax.cache.observation import Observable
from pagedjax.cache.rows import Rows
from pagedjax.cache.steps import Steps


class KVCacheManager(Observable):
    """Host-side bookkeeping of a paged KV cache.

    Args:
        num_blocks: blocks of each pool, the null block 0 included; or a mapping from pool name to that.
        block_size: tokens in a block.
        max_rows: sequences that may run at once.
        max_len: tokens that a sequence may have.
        kinds: one kind of cache for each group of layers.
        enable_prefix_caching: whether requests may share what they have in common.
        min_partial_hit: the fewest tokens of a last, partial block that are worth a copy.
        min_leader_gain: the fewest tokens that are worth waiting a step for another row to compute; default
            ``block_size``.
        sample_every: watch the life of every so many-th block, for `metrics`; 0: none.
        events: whether to collect what `take_events` returns.

    Attributes:
        num_scheduled: int32 ``[max_rows]``: tokens of each row that are computed or scheduled, its hit included.
        num_known: int32 ``[max_rows]``: tokens of each row whose ids the host knows.
    """

    def __init__(
        self,
        num_blocks: int | Mapping[str, int],
        block_size: int,
        *,
        max_rows: int = 256,
        max_len: int = 8192,
        kinds: Sequence[Kind] = (FullAttention(),),
        enable_prefix_caching: bool = True,
        min_partial_hit: int = 1,
        min_leader_gain: int | None = None,
        sample_every: int = 0,
        events: bool = False,
    ) -> None:
        for name, value in (("block_size", block_size), ("max_rows", max_rows), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"{name} is {value} but must be at least 1")
        if not any(kind.cacheable for kind in kinds):
            raise ValueError(
                "kinds has no group whose cache grows with the sequence; add FullAttention() or another one"
            )
        self.block_size = block_size
        self.max_len = max_len
        self.enable_prefix_caching = enable_prefix_caching
        self._events: list[Event] | None = [] if events else None
        self._rows = Rows(max_rows, max_len, block_size)
        self._pools: dict[str, BlockPool] = {}
        for kind in kinds:
            if kind.pool not in self._pools:
                size = num_blocks if isinstance(num_blocks, int) else num_blocks[kind.pool]
                self._pools[kind.pool] = BlockPool(size, self._drop)
                self._pools[kind.pool].sampler = BlockSampler(sample_every) if sample_every else None
        self._copies = {name: CopyQueue(pool) for name, pool in self._pools.items()}
        self._groups = [
            Group(number, kind, self._pools[kind.pool], self._rows, self._copies[kind.pool], self._events)
            for number, kind in enumerate(kinds)
        ]
        self._growing = [group for group in self._groups if group.kind.cacheable]
        self._appends_only = len(self._growing) == 1 and not self._growing[0].kind.in_place
        self._steps = Steps(self._rows, self._groups)
        self._admission = Admission(
            self._rows,
            self._groups,
            self._pools,
            caching=enable_prefix_caching,
            min_partial_hit=max(1, min_partial_hit),
            min_leader_gain=block_size if min_leader_gain is None else max(1, min_leader_gain),
        )
        self.num_scheduled = self._rows.num_scheduled
        self.num_known = self._rows.num_known

    def _drop(self, pool: BlockPool, blocks: list[int]) -> None:
        if len(self._groups) == 1:
            self._groups[0].index.forget_many(blocks)
            return
        groups = (pool.cached[blocks] & (DUPLICATE - 1)).tolist()
        for block, group in zip(blocks, groups, strict=True):
            self._groups[group - 1].index.forget(block)

    # ---- admission

    def match(self, tokens: ArrayLike, keys: ExtraKeys | None = None) -> Match:
        """What of a prompt is in the cache. Changes nothing.

        Args:
            tokens: the prompt, int ``[num_tokens]``; fastest as an int32 array.
            keys: what must agree besides the tokens.

        Raises:
            ValueError: the prompt is empty, or has a negative token.
            RequestTooLargeError: it has more than ``max_len`` tokens.
        """
        return self._admission.look_up(as_tokens(tokens), keys or NO_KEYS)

    def admit(
        self,
        tokens: ArrayLike,
        keys: ExtraKeys | None = None,
        *,
        match: Match | None = None,
        num_new_tokens: int | None = None,
        max_total_tokens: int | None = None,
    ) -> int | None:
        """Takes a request in: shares its hit, and allocates for ``num_new_tokens`` more.

        Args:
            tokens: the prompt, int ``[num_tokens]``.
            keys: what must agree besides the tokens.
            match: what `match` said of this prompt in this step; looked up if None. If entries have been evicted
                since, the hit is shorter: ``num_scheduled[row]`` tells.
            num_new_tokens: tokens to compute in this step; all that remain if None.
            max_total_tokens: the most tokens that the request may ever have, by default those of the prompt.

        Returns:
            The row, or None if there is no row or too few blocks now; then nothing has changed.

        Raises:
            RequestTooLargeError: ``max_total_tokens`` can never fit.
        """
        if match is None or match.epoch != self._admission.epoch:
            match = self.match(tokens, keys)
        return self._admission.admit(match, num_new_tokens, max_total_tokens or 0)

    # ---- growth

    def grow(self, rows: ArrayLike, counts: ArrayLike = 1) -> bool:
        """Makes room for ``counts`` more tokens in each of several distinct rows; the whole batch or nothing.

        Args:
            rows: int ``[batch]``.
            counts: int, or int ``[batch]``.

        Returns:
            False if there are too few blocks; then nothing has changed.

        Raises:
            ValueError: a row is free, or would exceed ``max_len``.
            StepOrderError: a row would need a copy of what only this step writes.
        """
        batch = np.asarray(rows, np.intp)
        totals = self._rows.num_scheduled[batch] + (counts if isinstance(counts, int) else np.asarray(counts))
        at_limit = (totals > self._rows.limit[batch]).nonzero()[0]
        if len(at_limit):
            few = batch[at_limit]
            if self._appends_only and isinstance(counts, int) and counts == 1:
                grown = append_blocks(self._growing[0], self._rows, few)
                if grown is not None:
                    if grown:
                        self._rows.num_scheduled[batch] = totals
                    return grown
            plans = plan_growth(self._growing, self._rows, few, totals[at_limit])
            if not fits(self._growing, plans):
                return False
            carry_out(self._growing, self._rows, few, plans)
        self._rows.num_scheduled[batch] = totals
        return True

    def blocks_to_grow(self, rows: ArrayLike, counts: ArrayLike = 1) -> int:
        """How many blocks `grow` would take, over all groups. Changes nothing."""
        batch = np.asarray(rows, np.intp)
        totals = self._rows.num_scheduled[batch] + np.asarray(counts, np.intp)
        at_limit = (totals > self._rows.limit[batch]).nonzero()[0]
        if not len(at_limit):
            return 0
        plans = plan_growth(self._growing, self._rows, batch[at_limit], totals[at_limit])
        return sum(plan.num_blocks for plan in plans)

    def fork(self, row: int, num_tokens: int | None = None) -> int | None:
        """A second sequence that shares all blocks of the first.

        Args:
            row: the parent.
            num_tokens: how many of its tokens; by default all that are known and scheduled. A group whose state
                cannot go back there makes the child compute some of them again: ``num_scheduled[child]`` tells.

        Returns:
            The child's row, or None if no row is free.
        """
        self._require_used(row)
        rows = self._rows
        most = min(int(rows.num_known[row]), int(rows.num_scheduled[row]))
        n = most if num_tokens is None else num_tokens
        if not 1 <= n <= most:
            raise ValueError(f"num_tokens is {n} but row {row} has {most} tokens that are known and scheduled")
        if not rows.free:
            return None
        kept = self._steps.resumable(row, n)
        child = rows.take()
        rows.tokens[child, :n] = rows.tokens[row, :n]
        rows.spans[child] = tuple((a, min(b, n), digest) for a, b, digest in rows.spans[row] if a < n)
        if row in rows.true_tokens:
            rows.true_tokens[child] = rows.true_tokens[row].copy()
        for group in self._groups:
            group.share(row, child, kept)
        rows.num_known[child] = n
        rows.num_scheduled[child] = kept
        rows.num_written[child] = min(kept, int(rows.num_written[row]))
        rows.num_settled[child] = min(kept, int(rows.num_settled[row]))
        self._steps.set_limit(child)
        if kept % self.block_size and kept // self.block_size == int(rows.num_scheduled[row]) // self.block_size:
            self._steps.set_limit(row)
        if rows.index_at[row] != NEVER:
            indexed = min(int(rows.num_indexed[row]), kept // self.block_size)
            rows.start_indexing(child, rows.roots[row], rows.hashes[row][: n // self.block_size], indexed)
        self._steps.note_fork(row, child, kept)
        return child

    # ---- the course of a step

    def take_copies(self, pool: str | None = None) -> NDArray[np.int32]:
        """The copies to make before any write of the step about to be dispatched: int32 ``[n, 2]``, (source,
        destination). They may be made in parallel. Once a step, for each pool (by default the first one).
        """
        copies = self._copies[next(iter(self._copies)) if pool is None else pool].take()
        return np.array(copies, np.int32).reshape(-1, 2)

    def take_table_updates(self) -> NDArray[np.int32]:
        """Block table entries that have changed since the last call: int32 ``[n, 4]``, (group, row, index, block)."""
        updates = [group.take_updates() for group in self._groups]
        return updates[0] if len(updates) == 1 else np.concatenate(updates)

    def _copies_pending(self) -> bool:
        for copies in self._copies.values():  # a loop: this is called in every step  # noqa: SIM110
            if copies.pending:
                return True
        return False

    def commit(self) -> int:
        """Everything scheduled has been dispatched. Returns the number of the step, for `settle` or `fail`.

        Raises:
            StepOrderError: there are copies that `take_copies` has not taken.
        """
        if self._copies_pending():
            raise StepOrderError("copies are queued; take_copies() comes before commit(), once a step")
        return self._steps.commit()

    def settle(self, step: int, rows: ArrayLike, ids: ArrayLike, counts: ArrayLike | None = None) -> None:
        """The step has been read back: appends the tokens that it sampled. Every step is settled, in order, also
        one that sampled nothing. Rows freed since the step are ignored.

        Args:
            step: what `commit` returned.
            rows: distinct rows, int ``[batch]``.
            ids: the next token of each, int32 ``[batch]``; or ``[batch, k]`` from a step that decodes ``k`` tokens.
            counts: how many of the ``k`` count, int ``[batch]``; by default all.
        """
        record = self._steps.settle(step)
        batch, tokens = np.asarray(rows, np.intp), np.asarray(ids, np.int32)
        if not len(batch):
            return
        if record.num_given_back != self._rows.num_given_back:
            alive = self._rows.serial[batch] <= record.last_serial
            batch, tokens = batch[alive], tokens[alive]
            counts = None if counts is None else np.asarray(counts)[alive]
        if tokens.ndim == 2:
            self._rows.extend(
                batch, tokens, np.full(len(batch), tokens.shape[1]) if counts is None else np.asarray(counts)
            )
        else:
            self._rows.push(batch, tokens)
        self._steps.index_ready()

    def fail(self, step: int) -> None:
        """The step and all later ones, and what is scheduled since, never happened: what they entered into the index
        is revoked and each row has scheduled what had been written before (or less, down to a block boundary or to
        the last state). Known tokens stay.

        Raises:
            ValueError: the step is not in flight, or has been settled.
        """
        self._steps.fail(step)

    # ---- sequences

    def append(self, row: int, tokens: ArrayLike) -> None:
        """Adds known tokens to a row, the next turn of a conversation for example. `grow` schedules them.

        Raises:
            ValueError: the row is free, has scheduled a token that is not known yet, or would exceed ``max_len``.
        """
        self._require_used(row)
        more, known = as_tokens(tokens), int(self.num_known[row])
        if self.num_scheduled[row] > known:
            raise ValueError(
                f"row {row} has scheduled {self.num_scheduled[row]} tokens but knows {known}; settle it first"
            )
        if known + more.size > self.max_len:
            raise ValueError(
                f"row {row} would have {known + more.size} tokens but max_len is {self.max_len}; raise max_len"
            )
        self._rows.put_tokens(row, known, more)
        self.num_known[row] = known + more.size

    def truncate(self, row: int, num_tokens: int) -> None:
        """Cuts a row down to its first ``num_tokens`` tokens, known and scheduled ones: rejected draft tokens go, or
        the end of a conversation. If a group cannot go back there, less is left scheduled, and is computed again.

        Raises:
            ValueError: the row is free or has fewer tokens.
        """
        self._require_used(row)
        most = max(int(self.num_known[row]), int(self.num_scheduled[row]))
        if not 1 <= num_tokens <= most:
            raise ValueError(f"num_tokens is {num_tokens} but row {row} has {most}; between 1 and that can be kept")
        if num_tokens < self.num_scheduled[row]:
            self._steps.roll_back(row, num_tokens)
        if num_tokens < self.num_known[row]:
            self._rows.forget_tokens(row, num_tokens)

    def free(self, row: int) -> None:
        """The sequence ends, or is preempted. Its written and known tokens stay in the cache until their blocks are
        needed, its end going first.

        Raises:
            ValueError: the row is free already.
        """
        self._require_used(row)
        self._steps.unschedule(row, 0)
        self._steps.index_last_block(row)
        for group in self._groups:
            group.detach(row)
        self._rows.give_back(row)

    # ---- the whole cache

    def advance_epoch(self) -> None:
        """The weights have changed: nothing that was cached before can be hit, and what runs on is not indexed."""
        self._admission.new_epoch()
        for row in self._rows.used:
            self._rows.stop_indexing(row)
        self._clear()

    def reset(self) -> bool:
        """Forgets all cached content. False, and nothing happens, while a row is in use or a copy is queued."""
        if self._rows.used or self._copies_pending():
            return False
        self._clear()
        return True

    def _clear(self) -> None:
        for group in self._groups:
            group.index.clear()
        if self._events is not None:
            self._events.append(CacheCleared())

    def take_events(self) -> list[Event]:
        """What has been stored and removed since the last call; always empty unless ``events`` was set."""
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events
