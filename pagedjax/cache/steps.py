"""From scheduled to written to settled: the log of the steps that have been dispatched and may still fail.

Content enters the prefix index when it is both written and known, whichever comes last. Until a step has been read
back, the log remembers what it wrote and which entries rest on it, so that a failed step, and all after it, can be
undone: the entries are revoked and every row goes back to what was written before.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedjax.cache.group import Group
from pagedjax.cache.hashing import hash_block, span_bytes
from pagedjax.cache.kinds import NEVER, cdiv
from pagedjax.cache.rows import Rows


@dataclass(slots=True)
class StepRecord:
    """A step in flight. Tokens of each row, int32 ``[max_rows]``: ``before`` were written earlier, ``after`` then.

    Attributes:
        last_serial: serials above it belong to rows taken after the step.
        num_given_back: rows that had been freed when the step was dispatched.
        forked: ``(row, serial, tokens)``: rows forked since from one that the step wrote, and their older tokens.
        journals: a group, the blocks that entered its index since this step.
    """

    before: NDArray[np.int32]
    after: NDArray[np.int32]
    last_serial: int
    num_given_back: int
    journals: list[list[int]]
    forked: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def rows(self) -> NDArray[np.intp]:
        """The rows that the step wrote."""
        return (self.before != self.after).nonzero()[0]


class Steps:
    """The steps of the rows ``rows`` with block tables in ``groups``."""

    def __init__(self, rows: Rows, groups: Sequence[Group]) -> None:
        self.rows, self.groups = rows, groups
        self.last = 0
        self.settled = 0
        self.in_flight: dict[int, StepRecord] = {}
        self.forks: dict[int, int] = {}  # child -> row that writes some of its tokens in the step being scheduled
        self.growing = [group for group in groups if group.kind.cacheable]
        self.releasing = [group for group in self.growing if not group.keeps_all]
        self.states = [group for group in groups if group.kind.in_place]
        self._ready = np.empty(rows.max_rows, np.int32)
        self._due = np.empty(rows.max_rows, bool)

    def commit(self) -> int:
        """Everything scheduled counts as written from now on; returns the number of the step."""
        rows = self.rows
        self.last += 1
        record = StepRecord(
            rows.num_written.copy(), rows.num_scheduled.copy(), rows.last_serial, rows.num_given_back, []
        )
        for group in self.groups:
            group.index.journal = []
            record.journals.append(group.index.journal)
        self.in_flight[self.last] = record
        np.copyto(rows.num_written, record.after)
        self.forks.clear()
        for group in self.states:
            ends = record.rows
            ends = ends[record.after[ends] % rows.block_size == 0]
            group.exact[ends, record.after[ends] // rows.block_size - 1] = True
        self.index_ready()
        return self.last

    def index_ready(self) -> None:
        """Gives every block that is written, known and not yet indexed to the index."""
        rows = self.rows
        np.minimum(rows.num_written, rows.num_known, out=self._ready)
        np.greater_equal(self._ready, rows.index_at, out=self._due)
        due = self._due.nonzero()[0]
        if not len(due):
            return
        index_at = rows.index_at[due] + rows.block_size
        if self.states or rows.true_tokens or (self._ready[due] >= index_at).any():
            for row in due.tolist():
                first, last = int(rows.num_indexed[row]), int(self._ready[row]) // rows.block_size
                if rows.spans[row] or self.states:
                    self._index_row(row, first, last)
                else:
                    self._index_run(row, first, last)
                rows.num_indexed[row] = last
                rows.index_at[row] = (last + 1) * rows.block_size
        else:
            self._index_batch(due)
            rows.index_at[due] = index_at

    def _index_batch(self, due: NDArray[np.intp]) -> None:
        """One block of each of several rows without spans: what a decode step fills."""
        rows = self.rows
        place = rows.num_indexed[due]
        rows.num_indexed[due] = place + 1
        flat = due * rows.token_blocks + place  # tables are as wide as the tokens' blocks are many
        keys = rows.block_tokens[flat].tolist()
        row_list, sha256 = due.tolist(), hashlib.sha256
        open_parent, chains = rows.open_parent, rows.hashes
        parents = [open_parent[row] for row in row_list]
        hashes = [sha256(parent + key).digest() for parent, key in zip(parents, keys, strict=True)]
        for row, at, block_hash in zip(row_list, place.tolist(), hashes, strict=True):
            open_parent[row] = block_hash
            chain = chains[row]
            if len(chain) == at:
                chain.append(block_hash)
        for group in self.growing:
            group.index.insert_many(group.flat_table[flat], hashes, parents, keys)

    def _index_run(self, row: int, start: int, end: int) -> None:
        """Several blocks of a row without spans: a chunk of a prompt."""
        rows = self.rows
        first = row * rows.token_blocks
        keys = rows.block_tokens[first + start : first + end].tolist()
        chain = rows.hashes[row]
        for key in keys[len(chain) - start :]:
            chain.append(hash_block(chain[-1] if chain else rows.roots[row], key))
        hashes = chain[start:end]
        parents = [rows.parent(row, start), *hashes[:-1]]
        for group in self.growing:  # what is not indexed yet has not been given up, so the table has no gaps here
            group.index.insert_many(group.table[row, start:end], hashes, parents, keys)
        rows.open_parent[row] = hashes[-1]

    def _index_row(self, row: int, start: int, end: int) -> None:
        """The general case: tokens under a span, or states, of which only those at the end of a step are kept."""
        rows, size = self.rows, self.rows.block_size
        first = row * rows.token_blocks
        keys = rows.block_tokens[first + start : first + end].tolist()
        chain = rows.hashes[row]
        for at, key in enumerate(keys, start):
            parent = rows.parent(row, at)
            detail = rows.block_detail(row, at * size, (at + 1) * size) if rows.spans[row] else None
            if at == len(chain):
                extra = (detail[0], span_bytes(detail[1])) if detail else (key, b"")
                chain.append(hash_block(parent, *extra))
            for group in self.growing:
                block = int(group.table[row, at])
                if block and (not group.kind.in_place or group.exact[row, at]):
                    group.index.insert(block, chain[at], parent, key, detail)
        rows.open_parent[row] = chain[end - 1]

    def index_last_block(self, row: int) -> None:
        """The row ends: what its unfinished block holds can be found from now on."""
        rows = self.rows
        if rows.index_at[row] == NEVER:
            return
        place = int(rows.num_indexed[row])
        start = place * rows.block_size
        end = min(int(rows.num_written[row]), int(rows.num_known[row]), start + rows.block_size)
        if end <= start:
            return
        key = rows.tokens[row, start:end].tobytes()
        detail = rows.block_detail(row, start, end)
        for group in self.growing:
            block = int(group.table[row, place]) if place < group.num_blocks[row] else 0
            if block and not group.kind.in_place:
                group.index.insert_partial(block, rows.parent(row, place), key, detail)

    def settle(self, step: int) -> StepRecord:
        """The step has been read back: it and all before it cannot fail any more. Returns its record.

        Raises:
            ValueError: the step is not in flight.
        """
        if step not in self.in_flight:
            raise ValueError(
                f"step {step} is not in flight: it was never committed, has failed, or a later one is settled"
            )
        if self.releasing and step > self.settled:
            for number in range(self.settled + 1, step + 1):
                if number in self.in_flight:
                    self._settle_rows(self.in_flight[number])
            self._give_up_unneeded()
        for number in [number for number in self.in_flight if number < step]:
            del self.in_flight[number]
        self.settled = max(self.settled, step)
        return self.in_flight[step]

    def _settle_rows(self, record: StepRecord) -> None:
        rows = self.rows
        batch = record.rows
        batch = batch[rows.serial[batch] <= record.last_serial]
        rows.num_settled[batch] = np.minimum(record.after[batch], rows.num_written[batch])

    def _give_up_unneeded(self) -> None:
        settled = np.minimum(self.rows.num_settled, self.rows.num_known)
        for group in self.releasing:
            due = (settled >= group.give_up_at).nonzero()[0]
            for row in due[self.rows.limit[due] >= 0].tolist():
                group.give_up_unneeded(row, int(settled[row]))

    def note_fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Row ``child`` shares the first ``num_tokens`` tokens of ``parent``, of which steps in flight wrote some."""
        if self.rows.num_written[child] < num_tokens:
            self.forks[child] = parent
        serial = int(self.rows.serial[child])
        parent_serial = int(self.rows.serial[parent])
        for record in self.in_flight.values():
            older = [before for row, its, before in record.forked if row == parent and its == parent_serial]
            if parent_serial <= record.last_serial and record.before[parent] != record.after[parent]:
                older.append(int(record.before[parent]))
            record.forked += [(child, serial, min(before, num_tokens)) for before in older]

    def fail(self, step: int) -> None:
        """The step and all later ones never happened.

        Raises:
            ValueError: the step is not in flight, or has been settled.
        """
        if step not in self.in_flight or step <= self.settled:
            raise ValueError(f"step {step} cannot fail: it is not in flight, or it has been settled")
        failed = [self.in_flight.pop(number) for number in range(self.last, step - 1, -1) if number in self.in_flight]
        rows = self.rows
        targets = {
            row: int(rows.num_written[row]) for row in (rows.num_scheduled != rows.num_written).nonzero()[0].tolist()
        }
        for record in failed:
            for row in record.rows.tolist():
                before = int(record.before[row])
                if rows.serial[row] <= record.last_serial:
                    targets[row] = min(targets.get(row, before), before)
            for row, serial, before in record.forked:
                if rows.serial[row] == serial:
                    targets[row] = min(targets.get(row, before), before)
        for number, group in enumerate(self.groups):
            self._revoke(group, [block for record in failed for block in record.journals[number]], targets)
            group.index.journal = self.in_flight[step - 1].journals[number] if step - 1 in self.in_flight else []
        for row, target in targets.items():
            self.roll_back(row, target)

    def _revoke(self, group: Group, blocks: list[int], targets: dict[int, int]) -> None:
        for block in blocks:
            if block in group.index.entries:
                group.index.forget(block)
                group.pool.demote(block)
        if not blocks:
            return
        for row in self.rows.used:
            lost = np.isin(group.table[row, : group.num_blocks[row]], blocks).nonzero()[0]
            if len(lost):
                before = int(lost[0]) * self.rows.block_size
                targets[row] = min(targets.get(row, before), before)

    def roll_back(self, row: int, num_tokens: int) -> None:
        """The row has at most its first ``num_tokens`` tokens scheduled, as many as all groups can go on from."""
        rows = self.rows
        num_tokens = min(num_tokens, int(rows.num_scheduled[row]))
        num_tokens = self.resumable(row, num_tokens)
        self.unschedule(row, num_tokens)
        for group in self.growing:
            group.cut(row, cdiv(num_tokens, rows.block_size))
        rows.version += 1
        rows.num_scheduled[row] = num_tokens
        rows.num_written[row] = min(num_tokens, int(rows.num_written[row]))
        rows.num_settled[row] = min(num_tokens, int(rows.num_settled[row]))
        self.set_limit(row)
        whole = num_tokens // rows.block_size
        if rows.num_indexed[row] > whole:
            rows.num_indexed[row] = whole
            if rows.index_at[row] != NEVER:
                rows.start_indexing(row, rows.roots[row], rows.hashes[row], whole)

    def unschedule(self, row: int, num_tokens: int) -> None:
        """The row will not write what it has scheduled beyond ``num_tokens``: its new children must do without."""
        if num_tokens <= self.rows.num_written[row]:
            self.forks.pop(row, None)  # nothing is left that its own parent must write
            num_tokens = int(self.rows.num_written[row])
        for child in [child for child, parent in self.forks.items() if parent == row]:
            if self.rows.num_scheduled[child] > num_tokens:
                self.roll_back(child, num_tokens)

    def resumable(self, row: int, num_tokens: int) -> int:
        """The most tokens, at most ``num_tokens``, that the row can keep: these, or whole blocks of them, or 0."""
        for candidate in (num_tokens, num_tokens // self.rows.block_size * self.rows.block_size):
            if all(group.can_continue_from(row, candidate) for group in self.growing):
                return candidate
        return 0

    def set_limit(self, row: int) -> None:
        """The row may fill its last block, unless it ends in its middle: then others may own or index it."""
        rows = self.rows
        scheduled = int(rows.num_scheduled[row])
        rows.limit[row] = min(cdiv(scheduled, rows.block_size) * rows.block_size, rows.max_len)
        if scheduled % rows.block_size:
            rows.limit[row] = scheduled
