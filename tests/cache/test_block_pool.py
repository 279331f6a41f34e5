"""Free list and block pool: order of reuse, owners and holds, and refusals that change nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.cache import BlockPool, FreeList, OutOfBlocksError


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, np.intp)


@given(st.lists(st.tuples(st.sampled_from(["pop", "append", "prepend", "remove", "remove_n"]), st.integers(0, 999))))
def test_the_free_list_behaves_like_a_list(operations):
    free, model, out = FreeList(24), list(range(1, 24)), []
    for name, n in operations:
        if name == "pop":
            k = n % (len(model) + 1)
            assert free.pop_n(k) == model[:k]
            out += model[:k]
            model = model[k:]
        elif name in ("append", "prepend"):
            k = n % (len(out) + 1)
            back, out = out[:k], out[k:]
            getattr(free, f"{name}_n")(np.array(back, np.intp))
            model = model + back if name == "append" else back + model
        elif model:
            k = 1 if name == "remove" else n % len(model) + 1
            start = n % (len(model) - k + 1)
            gone = model[start : start + k][::-1] if n % 2 else model[start::2]
            if name == "remove":
                gone = gone[:1]
                free.remove(gone[0])
            else:
                free.remove_n(np.array(gone, np.intp))
            model = [block for block in model if block not in gone]
            out += gone
        assert list(free) == model
        assert len(free) == len(model)
        free.check()


def test_a_pool_never_takes_the_null_block():
    pool = BlockPool(4)
    assert pool.take(3).tolist() == [1, 2, 3]
    with pytest.raises(OutOfBlocksError, match="1 blocks were asked for but 0 of 3 are free"):
        pool.take(1)
    pool.check()


def test_a_pool_needs_more_than_the_null_block():
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.release(blocks(3)), "block 3 is released but nobody owns it"),
        (lambda pool: pool.release(blocks(1, 2, 1)), "block 1 is released twice in one call"),
        (lambda pool: pool.release(blocks(1, 0)), "block 0 is not one of the blocks"),
        (lambda pool: pool.release(blocks(1, 9)), "block 9 is not one of the blocks"),
        (lambda pool: pool.release(blocks(1, -1)), "block -1 is not one of the blocks"),
        (lambda pool: pool.share(blocks(1, 0)), "block 0 is not one of the blocks"),
        (lambda pool: pool.hold(0), "block 0 is not one of the blocks"),
        (lambda pool: pool.unhold(1), "block 1 is not held"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(call, message):
    pool = BlockPool(9)
    pool.take(2)
    before = list(pool.free_list), pool.owners.tolist(), pool.holds.tolist()
    with pytest.raises(ValueError, match=message):
        call(pool)
    assert (list(pool.free_list), pool.owners.tolist(), pool.holds.tolist()) == before
    pool.check()


@pytest.mark.parametrize("n", [3, 100])
def test_worthless_blocks_are_reused_first_and_cached_ones_last(n):
    dropped = []
    pool = BlockPool(2 * n + 1, lambda pool, blocks: dropped.extend(blocks))
    taken = pool.take(n).tolist()
    pool.cached[taken[0]] = 1
    pool.release(np.array(taken))
    order = list(pool.free_list)
    assert order[-1] == taken[0]
    assert order[: n - 1] == taken[1:]
    pool.take(2 * n)
    assert dropped == [taken[0]]
    assert pool.num_evictions == 1


def test_a_hold_forbids_eviction_and_is_no_owner():
    pool = BlockPool(4)
    (block, *_) = pool.take(1)
    pool.hold(block)
    pool.release(blocks(block))
    assert pool.owners[block] == 0
    assert pool.num_free == 2
    assert block not in pool.take(2)
    pool.unhold(block)
    assert pool.num_free == 1
    pool.check()


def test_a_free_block_can_be_held():
    pool = BlockPool(4)
    pool.hold(2)
    pool.hold(2)
    pool.unhold(2)
    assert list(pool.free_list) == [1, 3]
    pool.share(blocks(2))
    pool.unhold(2)
    pool.release(blocks(2))
    assert sorted(pool.free_list) == [1, 2, 3]
    pool.check()


def test_sharing_free_blocks_takes_them_off_the_list():
    pool = BlockPool(9)
    taken = pool.take(5).tolist()
    pool.release(np.array(taken[::-1]))
    assert pool.num_idle(np.array(taken)) == 5
    pool.share(np.array(taken))
    pool.share(np.array(taken[:2]))
    assert pool.num_shared == 2
    assert pool.num_free == 3
    pool.release(np.array(taken))
    assert pool.num_shared == 0
    assert pool.num_idle(np.array(taken)) == 3
    pool.check()


def test_nothing_is_a_valid_number_of_blocks():
    pool = BlockPool(4)
    assert pool.take(0).tolist() == []
    pool.share(blocks())
    pool.release(blocks())
    pool.check()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool.owners.__setitem__(2, -1),
        lambda pool: pool.owners.__setitem__(2, 1),
        lambda pool: pool.holds.__setitem__(2, 1),
        lambda pool: pool.cached.__setitem__(0, 1),
        lambda pool: pool.free_list.next.__setitem__(2, 2),
        lambda pool: pool.free_list.remove(3),
        lambda pool: setattr(pool, "num_shared", 3),
    ],
)
def test_check_notices(break_it):
    pool = BlockPool(6)
    break_it(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_a_million_blocks_are_quickly_made():
    import time

    times = []
    for _ in range(5):
        start = time.perf_counter()
        BlockPool(1_000_000)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
