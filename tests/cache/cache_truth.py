"""A cache that stores every token, driven beside the real manager: the oracle of the property tests.

The simulated device has, for each pool, a memory of blocks. A place of an attention block holds the *identity* of what
was written there: a number that stands for the whole sequence of tokens up to that place (and its salt and epoch). A
state block holds one such number. Each dispatched step makes the copies, writes, and then reads what every layer would
read; reading anything else than the row's own tokens is a failure.
"""

from dataclasses import dataclass, field

import numpy as np

from pagedjax.cache import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    ExtraKeys,
    KVCacheManager,
)
from pagedjax.cache.hashing import hash_block, root_hash
from pagedjax.cache.kinds import NEVER

ALPHABET = 3


@dataclass
class Row:
    """What is true of a row, known to the host or not."""

    tokens: list[int]
    salt: int
    epoch: int
    serial: int
    may_hit: bool = True  # its tokens are indexed
    computed: int = 0  # tokens that the device has computed, or copied, or will by the parent's doing
    is_new_fork: bool = False  # it draws a sample from its parent's logits


@dataclass
class Sample:
    row: int
    serial: int
    position: int
    token: int


@dataclass
class Dispatched:
    number: int
    samples: list[Sample]
    memory: dict[str, list[list[int]]]
    written: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> serial, tokens written before


class Truth:
    """A manager, a device and the truth about both."""

    def __init__(self, num_blocks, block_size, *, max_rows=5, max_len=48, kinds, events=True, **options):
        self.options = dict(max_rows=max_rows, max_len=max_len, kinds=kinds, events=events, **options)
        self.m = KVCacheManager(num_blocks, block_size, **self.options)
        self.block_size, self.kinds, self.max_len, self.max_rows = block_size, kinds, max_len, max_rows
        self.rows: dict[int, Row] = {}
        self.names: dict[tuple, int] = {}  # (identity before, token) -> identity
        self.prefixes: dict[bytes, int] = {}  # hash of whole blocks, or root -> identity
        self.identity_tokens: dict[int, tuple] = {}
        self.memory = {
            name: [[-1] * block_size for _ in range(pool.num_blocks)] for name, pool in self.m._pools.items()
        }
        self.tables = np.zeros((len(kinds), max_rows, -(-max_len // block_size)), np.int64)
        self.flights: list[Dispatched] = []
        self.history: list[list[int]] = []
        self.stored: set[tuple[int, bytes]] = set()
        self.events = events
        self.serial = 0
        self.epoch = 0
        self.num_ops = 0
        self.old_match = None
        self.full_only = all(type(kind).__name__ == "FullAttention" for kind in kinds)

    # ---- identities

    def identity(self, before: int | tuple, token: int) -> int:
        return self.names.setdefault((before, token), len(self.names) + 1)

    def identities(self, row: Row) -> list[int]:
        at: int | tuple = self.root_identity(row.salt, row.epoch)
        return [at := self.identity(at, token) for token in row.tokens]

    def root_identity(self, salt: int, epoch: int) -> int:
        return self.identity(("root", salt, epoch), 0)

    def keys(self, salt: int) -> ExtraKeys | None:
        return ExtraKeys(salt=f"tenant {salt}") if salt else None

    def learn(self, row: Row, num_known: int) -> None:
        """Remembers which hash names which prefix, computed apart from the manager."""
        parent = root_hash(self.keys(row.salt) or ExtraKeys(), row.epoch, self.block_size)
        ids = self.identities(row)
        self.prefixes[parent] = self.root_identity(row.salt, row.epoch)
        for end in range(self.block_size, num_known + 1, self.block_size):
            block = np.array(row.tokens[end - self.block_size : end], np.int32).tobytes()
            parent = hash_block(parent, block)
            self.prefixes[parent] = ids[end - 1]

    def dispatch(self) -> Dispatched:
        m = self.m
        memories = {name: [block.copy() for block in memory] for name, memory in self.memory.items()}
        flight = Dispatched(0, [], memories)
        for name, memory in self.memory.items():
            copies = m.take_copies(name).tolist()
            sources, destinations = {a for a, _ in copies}, {b for _, b in copies}
            assert len(destinations) == len(copies), "two copies have one destination"
            assert not sources & destinations, "a destination is a source"
            for source, destination in copies:
                memory[destination] = memory[source].copy()
        for group, row, place, block in m.take_table_updates().tolist():
            self.tables[group, row, place] = block
        for row in self.rows:
            flight.written[row] = self.rows[row].serial, int(m._rows.num_written[row])
        ids = {row: self.identities(mine) for row, mine in self.rows.items()}
        changed = [row for row in self.rows if int(m.num_scheduled[row]) > self.rows[row].computed]
        for row in changed:
            self.write(row, ids[row])
        for row in changed:
            self.read(row, ids[row])
        for row, mine in self.rows.items():
            if row not in changed and not mine.is_new_fork:
                continue
            mine.is_new_fork = False
            if int(m.num_scheduled[row]) == len(mine.tokens) <= self.max_len - 1:
                token = (len(self.names) * 7 + row) % ALPHABET
                flight.samples.append(Sample(row, mine.serial, len(mine.tokens), token))
                mine.tokens.append(token)
            mine.computed = int(m.num_scheduled[row])
        flight.number = m.commit()
        self.flights.append(flight)
        return flight

    def write(self, row: int, ids: list[int]) -> None:
        m, size = self.m, self.block_size
        start, end = self.rows[row].computed, int(m.num_scheduled[row])
        for group in m._growing:
            memory, table = self.memory[group.kind.pool], self.tables[group.number, row]
            held = m.block_table(row, group.number)
            assert (table[: len(held)] == held)[held != 0].all(), "the device's table differs from the host's"
            if group.kind.in_place:
                block = table[(end - 1) // size]
                before = ids[start - 1] if start else None
                if before is not None:
                    assert memory[block][0] == before, "a state is not what the row left there"
                memory[block][0] = ids[end - 1]
            else:
                for at in range(start, end):
                    memory[table[at // size]][at % size] = ids[at]

    def read(self, row: int, ids: list[int]) -> None:
        m, size = self.m, self.block_size
        start, end = self.rows[row].computed, int(m.num_scheduled[row])
        for group in m._growing:
            if group.kind.in_place:
                continue
            memory, table = self.memory[group.kind.pool], self.tables[group.number, row]
            needed = set(range(group.kind.first_needed(start), end)) | set(range(min(group.kind.sink_tokens, end)))
            for at in needed:
                assert memory[table[at // size]][at % size] == ids[at], f"row {row} would read wrong KV at token {at}"

    # ---- what must always hold

    def state(self) -> tuple:
        """All that a call that reports failure must leave alone."""
        m = self.m
        r = m._rows
        return (
            [array.tobytes() for array in (r.num_scheduled, r.num_written, r.num_known, r.limit, r.num_indexed)],
            [
                (list(pool.free_list), pool.owners.tobytes(), pool.holds.tobytes(), pool.cached.tobytes())
                for pool in m._pools.values()
            ],
            [group.table[row, : group.num_blocks[row]].tolist() for group in m._groups for row in r.used],
            [len(group.index.entries) for group in m._groups],
            [dict(copies.pending) for copies in m._copies.values()],
            list(r.free),
        )

    def verify(self) -> None:
        m = self.m
        m.check()
        for event in m.take_events():
            if isinstance(event, BlockStored):
                assert (event.group, event.block_hash) not in self.stored, "stored twice"
                self.stored.add((event.group, event.block_hash))
                parent = event.parent_hash
                assert hash_block(parent, np.array(event.tokens, np.int32).tobytes()) == event.block_hash
            elif isinstance(event, BlockRemoved):
                self.stored.remove((event.group, event.block_hash))
            else:
                assert isinstance(event, CacheCleared)
                self.stored.clear()
        indexed = {(group.number, name) for group in m._groups for name in group.index.blocks}
        assert self.stored == indexed or not self.events, "the events do not tell what is stored"
        for group in m._growing:
            self.verify_index(group)
        for row, mine in self.rows.items():
            assert m.tokens(row).tolist() == mine.tokens[: int(m.num_known[row])]
            if self.full_only and mine.may_hit and m._rows.index_at[row] != NEVER:
                self.verify_own_hit(row, mine)

    def verify_index(self, group) -> None:
        memory = self.memory[group.kind.pool]
        pending = group.copies.pending
        for block, (name, parent, key) in group.index.entries.items():
            at = self.prefixes[parent]
            assert block not in pending, "an entry names a block that waits for its copy"
            held = memory[block]
            for place, token in enumerate(np.frombuffer(key, np.int32).tolist()):
                at = self.identity(at, token)
                if not group.kind.in_place:
                    assert held[place] == at, f"the index says that block {block} holds what it does not hold"
            if group.kind.in_place:
                assert held[0] == at, f"the index says that block {block} holds a state that it does not hold"
            if name is not None:
                assert self.prefixes[name] == at

    def verify_own_hit(self, row: int, mine: Row) -> None:
        m = self.m
        has = min(int(m._rows.num_written[row]), int(m.num_known[row]))
        if has % self.block_size < m._admission.min_partial_hit:
            has -= has % self.block_size
        if 0 < has < self.max_len:
            found = m.match([*mine.tokens[:has], ALPHABET], self.keys(mine.salt)).num_tokens
            assert found == has, f"row {row} has {has} tokens but {found} of them are found"

    def longest_hit(self, prompt: list[int], salt: int) -> int:
        """What `match` should find for full attention, by looking at everything there is."""
        m, size = self.m, self.block_size
        index = m._groups[0].index
        parent = root_hash(self.keys(salt) or ExtraKeys(), self.epoch, size)
        limit, whole = len(prompt) - 1, 0
        if not m.enable_prefix_caching:
            return 0
        while (whole + 1) * size <= limit:
            name = hash_block(parent, np.array(prompt[whole * size : (whole + 1) * size], np.int32).tobytes())
            if name not in index.blocks:
                break
            parent, whole = name, whole + 1
        rest = prompt[whole * size : limit]
        runs = [0]
        for _, its_parent, key in index.entries.values():
            if its_parent == parent:
                runs.append(common(np.frombuffer(key, np.int32).tolist(), rest))
        for row, mine in self.rows.items():
            visible = min(int(m._rows.num_written[row]), int(m.num_known[row]))
            same = (mine.salt, mine.epoch) == (salt, self.epoch) and mine.may_hit
            if same and mine.tokens[: whole * size] == prompt[: whole * size] and visible > whole * size:
                runs.append(common(mine.tokens[whole * size : visible], rest))
        run = max(runs)
        return whole * size + (run if run >= m._admission.min_partial_hit else 0)


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
