"""``pagedjax bench cache``: what the host-side bookkeeping costs, at several sizes of the pool.

Block size 16, prefix caching on, events off, on one core. ``state`` says what lies in the free blocks: nothing
(``fresh``), or cached content that must be evicted first (``steady``: a server after a while). The peer is vLLM's own
KVCacheManager, timed by a script of its own on the same machine: the cases are cut alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pagedjax.bench.records import Record
from pagedjax.bench.timing import interquartile_range
from pagedjax.cache import KVCacheManager
from pagedjax.cache.hashing import block_bytes, hash_chain

BLOCK_SIZE = 16
NUM_ROWS = 256
PROMPT_TOKENS = 8192
NUM_SIBLINGS = 10_000
POOLS = (1_000, 10_000, 100_000, 1_000_000)


def run(
    pools: Sequence[int] = POOLS, *, repeats: int = 30, states: Sequence[str] = ("fresh", "steady")
) -> Iterator[Record]:
    """Every case at every size of the pool (blocks). Yields records in µs a call, ``hash_block`` in µs a block and
    ``build`` in ms.
    """
    yield _record("hash_block", _hash_times(repeats))
    for num_blocks in pools:
        yield _record("build", _build_times(num_blocks), "ms", num_blocks=num_blocks)
        for state in states:
            manager = _manager(num_blocks)
            if state == "steady":
                _fill(manager)
            gc.collect()
            gc.freeze()
            cases = _admission_times(manager, repeats)
            cases["decode_step_256"] = _decode_times(manager, repeats)
            gc.unfreeze()
            for case, times in cases.items():
                yield _record(case, times, num_blocks=num_blocks, state=state)
    for num_blocks in pools:
        if num_blocks > NUM_SIBLINGS + 100:
            yield _record(
                "partial_hit", _partial_times(num_blocks, repeats), num_blocks=num_blocks, siblings=NUM_SIBLINGS
            )


def _record(case: str, values: list[float], unit: str = "us", **parameters: Any) -> Record:
    return Record(
        bench="cache",
        case=case,
        parameters={"block_size": BLOCK_SIZE, **parameters},
        value=statistics.median(values),
        unit=unit,
        repeats=len(values),
        spread=interquartile_range(values),
    )


def _timed(times: list[float], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls the function and adds the µs that it took."""
    start = time.perf_counter_ns()
    result = function(*arguments, **options)
    times.append((time.perf_counter_ns() - start) / 1e3)
    return result


def _tokens(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 128_000, n, dtype=np.int32)


def _manager(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, max_rows=NUM_ROWS, max_len=PROMPT_TOKENS + 64)


def _step(manager: KVCacheManager) -> None:
    """Dispatches what is scheduled; nothing is sampled."""
    manager.take_copies()
    manager.take_table_updates()
    manager.settle(manager.commit(), [], [])


def _fill(manager: KVCacheManager) -> None:
    """Makes every free block one whose content can be hit."""
    rng = np.random.default_rng(1)
    rows = []
    while manager.num_free_blocks and manager.num_free_rows:
        n = min(PROMPT_TOKENS, manager.num_free_blocks * BLOCK_SIZE)
        row = manager.admit(_tokens(rng, n))
        assert row is not None
        _step(manager)
        rows.append(row)
        if not manager.num_free_rows:  # a big pool takes more sequences than there are rows; cached blocks stay behind
            for row in rows:
                manager.free(row)
            rows.clear()
            if manager.usage().num_cached >= manager.num_blocks - 1:
                break
    for row in rows:
        manager.free(row)


def _hash_times(repeats: int) -> list[float]:
    tokens = _tokens(np.random.default_rng(0), 32_768)
    times: list[float] = []
    for _ in range(repeats):
        _timed(times, lambda: hash_chain(bytes(32), block_bytes(tokens, BLOCK_SIZE)))
    return [each / (tokens.size // BLOCK_SIZE) for each in times]


def _build_times(num_blocks: int, repeats: int = 5) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        _timed(times, _manager, num_blocks)
    return [each / 1e3 for each in times]


def _admission_times(manager: KVCacheManager, repeats: int) -> dict[str, list[float]]:
    """An 8k-token prompt: at a miss, while another row has all its blocks, and when they are all free."""
    rng = np.random.default_rng(2)
    times: dict[str, list[float]] = {"admit_8k_miss": [], "admit_8k_hit": [], "admit_8k_hit_free": [], "free_8k": []}
    for _ in range(repeats):
        prompt = _tokens(rng, PROMPT_TOKENS)
        first = _timed(times["admit_8k_miss"], manager.admit, prompt)
        _step(manager)
        second = _timed(times["admit_8k_hit"], manager.admit, prompt)
        assert manager.num_scheduled[second] == PROMPT_TOKENS
        assert manager.take_copies().shape == (1, 2)
        _step(manager)
        manager.free(second)
        _timed(times["free_8k"], manager.free, first)
        third = _timed(times["admit_8k_hit_free"], manager.admit, prompt)
        assert manager.take_copies().shape == (1, 2)
        _step(manager)
        manager.free(third)
    return times


def _decode_times(manager: KVCacheManager, repeats: int) -> list[float]:
    """A step of 256 rows, staggered so that every step fills 16 blocks; the mean of 16 steps, as often as asked."""
    rng = np.random.default_rng(3)
    for each in range(NUM_ROWS):
        assert manager.admit(_tokens(rng, BLOCK_SIZE + 1 + each % BLOCK_SIZE)) is not None
    rows = np.arange(NUM_ROWS)
    manager.settle(_dispatch(manager), rows, _tokens(rng, NUM_ROWS))
    means = []
    for _ in range(max(1, min(repeats, manager.num_free_blocks // NUM_ROWS - 1))):
        steps: list[float] = []
        for _ in range(BLOCK_SIZE):
            _timed(steps, _decode, manager, rows, _tokens(rng, NUM_ROWS))
            manager.take_table_updates()
        means.append(statistics.fmean(steps))
    for row in rows:
        manager.free(int(row))
    return means


def _dispatch(manager: KVCacheManager) -> int:
    manager.take_copies()
    manager.take_table_updates()
    return manager.commit()


def _decode(manager: KVCacheManager, rows: np.ndarray, ids: np.ndarray) -> None:
    if not manager.grow(rows, 1):
        raise RuntimeError("the pool is too small for the benchmark")
    manager.settle(manager.commit(), rows, ids)


def _partial_times(num_blocks: int, repeats: int) -> list[float]:
    """Looking up a prompt of two blocks, the second of which shares some tokens with one of 10,000 siblings."""
    manager = _manager(num_blocks)
    rng = np.random.default_rng(4)
    first = _tokens(rng, BLOCK_SIZE)
    for _ in range(NUM_SIBLINGS):
        row = manager.admit(np.concatenate([first, _tokens(rng, BLOCK_SIZE)]))
        assert row is not None
        _step(manager)
        manager.free(row)
    times: list[float] = []
    for _ in range(repeats):
        wanted = np.concatenate([first, _tokens(rng, BLOCK_SIZE)])
        _timed(times, manager.match, wanted)
    return times
