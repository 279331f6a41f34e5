"""The copies that the device must make before the next step writes anything.

Copying is lazy: the host moves a table's pointer to a private block at once and queues ``(source, destination)``; all
queued copies are drained into the next step, which makes them in parallel before any write. Therefore destinations are
distinct, and none is a source: a copy from a block that is itself still waiting for its content is redirected to
where that content comes from. A queued source is held, so that nothing can take it; a destination that is given back
before the drain takes its copy and its hold with it.
"""

from pagedjax.cache.block_pool import BlockPool


class CopyQueue:
    """Queued copies between blocks of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.pending: dict[int, tuple[int, int]] = {}  # destination -> (source, tokens that matter)
        self.num_copies = 0

    def add(self, source: int, destination: int, num_tokens: int) -> None:
        """Queues the copy of the first ``num_tokens`` tokens (in fact of the whole block)."""
        source = self.pending.get(source, (source, 0))[0]
        self.pool.hold(source)
        self.pending[destination] = (source, num_tokens)

    def covered(self, block: int) -> int:
        """How many tokens a queued copy will bring into ``block``."""
        return self.pending.get(block, (0, 0))[1]

    def cancel_abandoned(self) -> None:
        """Cancels the copies whose destination nobody owns any more."""
        for destination in [block for block in self.pending if self.pool.owners[block] == 0]:
            source, _ = self.pending.pop(destination)
            self.pool.unhold(source)

    def take(self) -> list[tuple[int, int]]:
        """``(source, destination)`` of every queued copy; the sources are no longer held."""
        copies = [(source, destination) for destination, (source, _) in self.pending.items()]
        self.pending.clear()
        for source, _ in copies:
            self.pool.unhold(source)
        self.num_copies += len(copies)
        return copies

    def check(self) -> None:
        """Raises AssertionError unless the copies may run in parallel and every source is held."""
        for destination, (source, _) in self.pending.items():
            assert source not in self.pending, f"block {source} is both source and destination"
            assert self.pool.holds[source] > 0, f"source {source} is not held"
            assert self.pool.owners[destination] > 0, f"destination {destination} has no owner"
        assert self.pool.num_holds >= len(self.pending), "a hold of a queued copy was lost"
