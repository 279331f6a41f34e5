"""Faults that vLLM's block manager has had. Each one that can apply here is a scenario that passes, and that fails as
soon as what guards against it is taken away.

Not here: reuse of a finished request's blocks while a step in flight still writes them (steps run in order, and a copy
or write of a later step comes after), what concerns EAGLE's dropped block, external connectors, and counts of blocks
that could become negative (a table always has exactly the blocks of its scheduled tokens).
"""

import numpy as np
import pytest
from mutation import mutate

from pagedjax.cache import (
    BlockPool,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
    FullAttention,
    KVCacheManager,
    Recurrent,
    RequestTooLargeError,
    SlidingWindow,
    admission,
    block_pool,
    coordinator,
    hashing,
    prefix_index,
    rows,
    steps,
)


def step(m: KVCacheManager, row_ids=(), ids=()) -> None:
    for name in m._pools:
        m.take_copies(name)
    m.settle(m.commit(), np.array(row_ids, np.int64), np.array(ids, np.int32))
    m.check()


def run(m: KVCacheManager, prompt, keys=None) -> int:
    row = m.admit(prompt, keys)
    assert row is not None
    step(m)
    return row


def one_group_takes_what_another_has_found():
    """#33775: everything is shared before anything is allocated."""
    m = KVCacheManager(9, 2, kinds=(FullAttention(), FullAttention()))
    m.free(run(m, [1, 2, 3, 4]))
    m.free(run(m, [9, 9, 9, 9]))  # now all eight blocks are cached, those of the first request to be reused first
    row = m.admit([1, 2, 3, 4, 5, 6])
    assert row is not None
    assert m.num_scheduled[row] == 6
    m.check()


def a_block_is_released_twice():
    """#42571: the second time raises at once."""
    pool = BlockPool(4)
    (block, _) = pool.take(2)
    pool.release(np.array([block]))
    with pytest.raises(ValueError, match="nobody owns it"):
        pool.release(np.array([block]))
    with pytest.raises(ValueError, match="twice"):
        pool.release(np.array([2, 2]))


def a_request_preempted_before_dispatch_leaves_its_hashes():
    """PR #43569: content enters the index at commit, not when it is scheduled."""
    m = KVCacheManager(20, 4)
    m.free(m.admit(np.arange(10)))
    assert m.match(np.arange(10)).num_tokens == 0


def a_request_hits_what_the_same_step_will_write():
    """PR #42359."""
    m = KVCacheManager(20, 4)
    m.admit(np.arange(10))
    assert m.match(np.arange(10)).num_tokens == 0


def an_unfinished_block_is_found_after_it_was_replaced():
    """#49125: one entry names the content, and events never contradict each other."""
    m = KVCacheManager(20, 4, events=True)
    m.free(run(m, [0, 1, 2, 3, 4, 5]))
    m.free(run(m, [0, 1, 2, 3, 4, 5, 6, 7, 8]))
    index = m._groups[0].index
    assert sorted(len(key) // 4 for _, _, key in index.entries.values()) == [1, 4, 4]
    stored = [event.block_hash for event in m.take_events() if isinstance(event, BlockStored)]
    assert len(set(stored)) == len(stored)
    assert m.match([0, 1, 2, 3, 4, 5, 6, 0]).num_tokens == 7


def truncation_leaves_stale_hashes():
    """#49377: H(old tokens) must not name KV of new ones."""
    m = KVCacheManager(20, 4)
    row = run(m, np.arange(12))
    m.truncate(row, 5)
    m.append(row, [70, 71, 72, 73])
    assert m.grow([row], 4)
    step(m)
    m.free(row)
    assert m.match(np.arange(12)).num_tokens == 5
    assert m.match([0, 1, 2, 3, 4, 70, 71, 72, 73]).num_tokens == 8


def a_window_gives_up_blocks_on_an_optimistic_count():
    """#47728: only settled tokens move the window; rejected drafts can be taken back."""
    m = KVCacheManager(20, 2, kinds=(SlidingWindow(4),))
    row = run(m, np.arange(6))
    number = m.commit()
    m.settle(number, [row], [6])
    assert m.grow([row], 7)  # a token and six drafts
    drafts = m.commit()
    m.settle(drafts, [], [])
    m.truncate(row, 7)  # all drafts are rejected
    assert m.num_scheduled[row] == 7, "what the window needs is gone"
    m.settle(m.commit(), [row], [7])
    m.check()


def admission_counts_the_full_length_of_a_recycling_group():
    """#39734: a window never needs more than its own blocks."""
    m = KVCacheManager(8, 4, kinds=(SlidingWindow(8),), max_len=400)
    row = m.admit(np.arange(8), max_total_tokens=300)
    assert row is not None
    step(m, [row], [1])
    for token in range(250):
        assert m.grow([row], 1)
        step(m, [row], [token])


def one_kind_of_key_passes_for_another():
    """#44701: keys are tagged, with their lengths."""
    m = KVCacheManager(40, 4)
    run(m, np.arange(9), ExtraKeys(adapter="x"))
    assert m.match(np.arange(9), ExtraKeys(salt="x")).num_tokens == 0
    run(m, np.arange(9), ExtraKeys(adapter=("ab", "c")))
    assert m.match(np.arange(9), ExtraKeys(adapter=("a", "bc"))).num_tokens == 0


def a_state_off_the_grid_counts_as_a_checkpoint():
    """#34361: a chunk that ends inside a block leaves no checkpoint at the boundary that it has passed."""
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    row = m.admit(np.arange(10), num_new_tokens=3)
    step(m)
    assert m.grow([row], 3)  # passes token 4
    step(m)
    assert m.match(np.arange(10)).num_tokens == 0
    assert m.grow([row], 2)  # ends at token 8
    step(m)
    assert m.match(np.arange(10)).num_tokens == 8


def groups_disagree_about_the_hit():
    """#46453: the hit is what all groups can serve."""
    m = KVCacheManager({"kv": 20, "state": 20}, 4, kinds=(FullAttention(), Recurrent()))
    row = m.admit(np.arange(12), num_new_tokens=8)
    step(m)
    assert m.grow([row], 4)
    step(m)
    state = m._groups[1]
    state.index.forget(int(state.table[row, 2]))  # as if evicted: only the checkpoint at 8 is left
    match = m.match(np.arange(20))
    assert match.num_tokens == 8
    other = m.admit(np.arange(20), match=match)
    assert other is not None
    m.check()


def the_null_block_counts_as_memory():
    """A request that needs every block, the null one too, would wait for ever."""
    m = KVCacheManager(5, 4)
    with pytest.raises(RequestTooLargeError):
        m.admit(np.arange(17))


def a_hash_is_kept_when_its_block_is_overwritten():
    """#44237: an evicted block has no hash, whatever the map says."""
    m = KVCacheManager(4, 4, events=True)
    m.free(run(m, np.arange(12)))
    assert m.admit(np.arange(100, 112)) is not None
    assert m.match(np.arange(12)).num_tokens == 0
    m.check()
    assert sum(isinstance(event, BlockRemoved) for event in m.take_events()) == 3


PUBLISHED_AT_ADMISSION = (
    admission.Admission,
    "take_in",
    "rows.num_written[row] = whole * self.block_size",
    "rows.num_written[row] = length + new",
)
FAULTS = {
    one_group_takes_what_another_has_found: (
        admission.Admission,
        "take_in",
        "group.pool.share(",
        "len(",
        "count = ",
        "group.pool.share(hit.held); count = ",
    ),
    a_block_is_released_twice: (block_pool.BlockPool, "_require_owned", "raise ValueError", "str"),
    a_request_preempted_before_dispatch_leaves_its_hashes: PUBLISHED_AT_ADMISSION,
    a_request_hits_what_the_same_step_will_write: PUBLISHED_AT_ADMISSION,
    an_unfinished_block_is_found_after_it_was_replaced: (
        prefix_index.PrefixIndex,
        "_drop_covered",
        "key.startswith(siblings.keys[at])",
        "False",
    ),
    truncation_leaves_stale_hashes: (rows.Rows, "forget_tokens", "del self.hashes[row]", "self.hashes[row]"),
    a_window_gives_up_blocks_on_an_optimistic_count: (
        steps.Steps,
        "_give_up_unneeded",
        "np.minimum(self.rows.num_settled, self.rows.num_known)",
        "self.rows.num_scheduled",
    ),
    admission_counts_the_full_length_of_a_recycling_group: (
        SlidingWindow,
        "max_blocks",
        "return min(",
        "return max(",
    ),
    one_kind_of_key_passes_for_another: (
        hashing,
        "_field",
        "return tag + kind + len",
        "return value or tag + kind + len",
    ),
    a_state_off_the_grid_counts_as_a_checkpoint: (steps.Steps, "_index_row", "group.exact[row, at]", "True"),
    groups_disagree_about_the_hit: (coordinator, "find_hit", "while agreed < len(groups)", "while agreed < 1"),
    the_null_block_counts_as_memory: (
        admission.Admission,
        "require_possible",
        "needed > pool.num_blocks - 1",
        "needed > pool.num_blocks",
    ),
    a_hash_is_kept_when_its_block_is_overwritten: (
        block_pool.BlockPool,
        "_evict",
        "self.on_drop(self, blocks)",
        "None",
    ),
}


@pytest.mark.parametrize("scenario", FAULTS, ids=lambda scenario: scenario.__name__)
def test_it_does_not_happen_that(scenario):
    scenario()


@pytest.mark.parametrize("scenario", FAULTS, ids=lambda scenario: scenario.__name__)
def test_without_its_guard_it_happens_that(monkeypatch, scenario):
    mutate(monkeypatch, *FAULTS[scenario])
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError, pytest.fail.Exception)):
        scenario()
