"""Room for more tokens: new blocks at block boundaries, private copies of shared blocks, all or nothing.

Only the rows that have reached their limit come here, and only the groups whose tables grow. What a batch needs is
worked out first, without changing anything; the same plan answers a prediction and carries out a growth, so the two
cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedjax.cache.block_pool import BlockPool
from pagedjax.cache.free_list import IntArray
from pagedjax.cache.group import Group
from pagedjax.cache.rows import Rows


class StepOrderError(RuntimeError):
    """A call came at a point of the step at which it cannot be served."""


@dataclass(slots=True)
class GroupPlan:
    """What one group needs for a batch.

    Attributes:
        more: blocks to add at the end of each row's table, int ``[num_rows]``; None: none.
        private: ``(row, place)``: shared blocks that get a private copy.
        own: ``(row, place)``: blocks that a sole owner is about to write on from their middle.
        entered: ``(row, place before, place)``: states that move on to a new block; place before is -1 at the start.
    """

    more: IntArray | NDArray[np.int32] | None = None
    num_more: int = 0
    private: list[tuple[int, int]] = field(default_factory=list)
    own: list[tuple[int, int]] = field(default_factory=list)
    entered: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return self.num_more + len(self.private) + len(self.entered)


def plan_growth(
    groups: Sequence[Group], rows: Rows, batch: IntArray, totals: IntArray | NDArray[np.int32]
) -> list[GroupPlan]:
    """What the rows of ``batch``, all at their limit, need to hold ``totals`` tokens each.

    Raises:
        ValueError: a row is free, or shall have more than ``max_len`` tokens.
    """
    limit = rows.limit[batch]
    if limit.min() < 0:
        raise ValueError(f"row {batch[limit < 0][0]} is free; admit or fork a sequence into it first")
    if totals.max() > rows.max_len:
        row = batch[totals > rows.max_len][0]
        raise ValueError(f"row {row} would have {totals.max()} tokens but max_len is {rows.max_len}; raise max_len")
    scheduled = rows.num_scheduled[batch]
    marked = ((limit == scheduled) & (scheduled % rows.block_size != 0)).nonzero()[0]
    return [_plan_group(group, rows, batch, totals, scheduled, marked) for group in groups]


def _plan_group(
    group: Group,
    rows: Rows,
    batch: IntArray,
    totals: IntArray | NDArray[np.int32],
    scheduled: NDArray[np.int32],
    marked: IntArray,
) -> GroupPlan:
    if group.kind.in_place:
        return _plan_state(group, rows, batch, totals, scheduled)
    more = -(-totals // rows.block_size) - group.num_blocks[batch]
    plan = GroupPlan(more, int(more.sum()))
    if len(marked):
        leaving: dict[int, int] = {}
        for at in marked.tolist():
            _plan_tail(plan, group, rows, int(batch[at]), int(scheduled[at]) // rows.block_size, leaving)
    return plan


def _plan_tail(plan: GroupPlan, group: Group, rows: Rows, row: int, place: int, leaving: dict[int, int]) -> None:
    """Decides whether the row may write on in the block at ``place``; the last of several owners may."""
    block = int(group.table[row, place])
    owners = int(group.pool.owners[block]) - leaving.get(block, 0)
    if owners == 1:
        plan.own.append((row, place))
        return
    copied = group.copies.covered(block)
    in_block = int(rows.num_scheduled[row]) - place * rows.block_size
    if rows.num_written[row] < rows.num_scheduled[row] and copied < in_block and not group.kind.in_place:
        raise StepOrderError(
            f"row {row} shares a block that only the step being scheduled writes; grow it after commit()"
        )
    if group.kind.in_place and rows.num_written[row] < rows.num_scheduled[row]:
        raise StepOrderError(
            f"the state of row {row} is written only by the step being scheduled; grow it after commit()"
        )
    leaving[block] = leaving.get(block, 0) + 1
    plan.private.append((row, place))


def _plan_state(
    group: Group, rows: Rows, batch: IntArray, totals: IntArray | NDArray[np.int32], scheduled: NDArray[np.int32]
) -> GroupPlan:
    plan = GroupPlan()
    leaving: dict[int, int] = {}
    for row, total, start in zip(batch.tolist(), totals.tolist(), scheduled.tolist(), strict=True):
        before = (start - 1) // rows.block_size
        place = (total - 1) // rows.block_size
        if place == before:
            _plan_tail(plan, group, rows, row, place, leaving)
            continue
        if start and rows.num_written[row] < start:
            raise StepOrderError(
                f"the state of row {row} is written only by the step being scheduled; grow it after commit()"
            )
        plan.entered.append((row, before, place))
    return plan


def num_blocks_needed(groups: Sequence[Group], plans: Sequence[GroupPlan]) -> dict[int, int]:
    """Blocks that the plans take, by ``id(pool)``."""
    needed: dict[int, int] = {}
    for group, plan in zip(groups, plans, strict=True):
        needed[id(group.pool)] = needed.get(id(group.pool), 0) + plan.num_blocks
    return needed


def fits(groups: Sequence[Group], plans: Sequence[GroupPlan]) -> bool:
    if len(groups) == 1:
        return plans[0].num_blocks <= groups[0].pool.num_free
    needed = num_blocks_needed(groups, plans)
    pools: dict[int, BlockPool] = {id(group.pool): group.pool for group in groups}
    return all(needed[key] <= pool.num_free for key, pool in pools.items())


def carry_out(groups: Sequence[Group], rows: Rows, batch: IntArray, plans: Sequence[GroupPlan]) -> None:
    """Takes the blocks of plans that fit, and lifts the rows' limits."""
    for group, plan in zip(groups, plans, strict=True):
        for row, place in plan.private:
            _make_private(group, rows, row, place)
        for row, place in plan.own:
            _write_on(group, rows, row, place)
        for row, before, place in plan.entered:
            _enter(group, row, before, place)
        if plan.num_more:
            _extend(group, batch, plan)
    rows.limit[batch] = np.minimum(groups[0].num_blocks[batch] * rows.block_size, rows.max_len)


def append_blocks(group: Group, rows: Rows, batch: IntArray) -> bool | None:
    """The growth of a decode step, by one token each: rows that have filled their blocks take one more. False if there
    are too few; None, and nothing happens, if a row does not end at the end of its last block.
    """
    limit, place = rows.limit[batch], group.num_blocks[batch]
    if not (limit == place * rows.block_size).all() or limit.max() + rows.block_size > rows.max_len:
        return None
    if len(batch) > group.pool.num_free:
        return False
    group.flat_table[batch * group.table.shape[1] + place] = group.pool.take(len(batch))
    group.num_blocks[batch] = place + 1
    rows.limit[batch] = limit + rows.block_size
    return True


def _extend(group: Group, batch: IntArray, plan: GroupPlan) -> None:
    blocks = group.pool.take(plan.num_more)
    more = plan.more
    assert more is not None
    have = group.num_blocks[batch]
    width = group.table.shape[1]
    if plan.num_more == len(batch) and more.max() == 1:
        group.flat_table[batch * width + have] = blocks
    else:
        first = np.cumsum(more) - more
        place = np.arange(plan.num_more) - np.repeat(first - have, more)
        group.flat_table[np.repeat(batch, more) * width + place] = blocks
    group.num_blocks[batch] = have + more


def _make_private(group: Group, rows: Rows, row: int, place: int) -> None:
    """Copy-on-write: the row's table points to a new block now, the device copies before the next step's writes."""
    shared = int(group.table[row, place])
    block = int(group.pool.take(1)[0])
    start = place * rows.block_size
    num_tokens = rows.block_size if group.kind.in_place else int(rows.num_scheduled[row]) - start
    group.copies.add(shared, block, num_tokens)
    group.pool.release(np.array([shared]))
    group.replace(row, place, block)
    rows.version += 1
    # Until the copy is dispatched, what is in the block counts as not written.
    rows.num_written[row] = min(int(rows.num_written[row]), start)


def _write_on(group: Group, rows: Rows, row: int, place: int) -> None:
    """A sole owner writes past what is indexed of its block; an entry that reaches further goes first."""
    block = int(group.table[row, place])
    entry = group.index.entries.get(block)
    if entry is not None and len(entry[2]) > 4 * (int(rows.num_scheduled[row]) - place * rows.block_size):
        group.index.forget(block)


def _enter(group: Group, row: int, before: int, place: int) -> None:
    """The state moves on to a new block; the one that it leaves keeps the state as it was."""
    block = int(group.pool.take(1)[0])
    group.table[row, max(int(group.num_blocks[row]), before + 1) : place] = 0
    group.exact[row, before + 1 : place + 1] = False
    if before >= 0:
        group.copies.add(int(group.table[row, before]), block, group.block_size)
    group.table[row, place] = block
    group.num_blocks[row] = place + 1
