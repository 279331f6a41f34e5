"""The operations of the property tests: each takes an integer, from which it draws its arguments.

So a program is a list of integers, and hypothesis can shrink it.
"""

import numpy as np
from cache_truth import ALPHABET, Dispatched, Row, Sample, Truth

from pagedjax.cache import RequestTooLargeError, StepOrderError


class Simulation(Truth):
    """A manager, a device and the truth about both, and what can be done with them."""

    def do(self, code: int) -> None:
        name, code = self.OPS[code % len(self.OPS)], code // len(self.OPS)
        getattr(self, name)(code)
        self.num_ops += 1
        self.verify()

    def pick(self, code: int) -> int | None:
        return sorted(self.rows)[code % len(self.rows)] if self.rows else None

    def draw_tokens(self, code: int, most: int) -> list[int]:
        n = code % most + 1
        rng = np.random.default_rng(code)
        return rng.integers(0, ALPHABET, n).tolist()

    def draw_prompt(self, code: int) -> list[int]:
        prompt: list[int] = []
        if self.history and code % 4:
            source = self.history[code // 4 % len(self.history)]
            prompt = source[: code // 64 % (len(source) + 1)]
        most = self.max_len - 4 - len(prompt)
        return prompt + self.draw_tokens(code // 8, max(1, min(most, 12)))

    def admit(self, code: int) -> None:
        m, prompt, salt = self.m, self.draw_prompt(code), int(code % 7 == 0)
        before = self.state()
        match = m.match(prompt, self.keys(salt))
        assert self.state() == before, "match changed something"
        if self.full_only:
            assert match.num_tokens == self.longest_hit(prompt, salt), "the hit is not the longest one"
        assert 0 <= match.num_tokens <= len(prompt) - 1
        for group in m._growing if m.enable_prefix_caching else ():
            most = group.longest_hit(match.query, match.num_tokens, m._admission.min_partial_hit)
            assert most == match.num_tokens, "a group cannot serve the hit"
        if match.leader is not None:
            assert match.leader in self.rows
            if code % 3:
                return
        if code % 11 == 0:  # keep it for later, and use an old one
            (prompt, salt, match), self.old_match = self.old_match or (prompt, salt, match), (prompt, salt, match)
            if match.epoch != self.epoch:
                match = m.match(prompt, self.keys(salt))
        rest = len(prompt) - match.num_tokens
        count = rest if code % 2 else code // 16 % rest + 1
        whole, hit = match.num_tokens // self.block_size * self.block_size, match.num_tokens
        free = [pool.num_free for pool in m._pools.values()]
        try:
            row = m.admit(prompt, self.keys(salt), match=match, num_new_tokens=count)
        except RequestTooLargeError:
            assert self.state() == before, "a refused admission changed something"
            return
        if row is None:
            assert self.state() == before, "a failed admission changed something"
            return
        assert row not in self.rows
        start = int(m.num_scheduled[row]) - count
        assert start == match.num_tokens <= hit
        assert start >= whole or code % 11 == 0 or not self.full_only, "more than a partial hit was given up"
        assert len(free) > 1 or m.num_free_blocks <= free[0]
        self.serial += 1
        self.rows[row] = Row(list(prompt), salt, self.epoch, self.serial, m.enable_prefix_caching, start)
        self.learn(self.rows[row], len(prompt))
        self.history.append(prompt)
        del self.history[:-12]

    def grow(self, code: int) -> None:
        """Some rows, each by as many tokens as can be computed for it."""
        m = self.m
        batch, counts = [], []
        for at, row in enumerate(sorted(self.rows)):
            left = len(self.rows[row].tokens) - int(m.num_scheduled[row])
            if left > 0 and code >> at & 1:
                batch.append(row)
                counts.append(1 + (code >> 8) % left if code >> 7 & 1 else left)
        self.grow_batch(batch, counts)

    def grow_batch(self, batch: list[int], counts: list[int]) -> bool:
        if not batch:
            return False
        m = self.m
        before, free = self.state(), {name: pool.num_free for name, pool in m._pools.items()}
        tails = self.tails(batch)
        try:
            predicted = m.blocks_to_grow(np.array(batch), np.array(counts))
            assert self.state() == before, "a prediction changed something"
            grown = m.grow(np.array(batch), np.array(counts))
        except StepOrderError:
            assert self.state() == before, "a refused growth changed something"
            return False
        if not grown:
            assert self.state() == before, "a failed growth changed something"
            assert predicted > min(free.values())
            return False
        taken = sum(free.values()) - sum(pool.num_free for pool in m._pools.values())
        assert taken == predicted, f"{predicted} blocks were predicted but {taken} taken"
        for (group, block), (owners, growing) in tails.items():
            left = sum(m.block_table(row, group)[place] != block for row, place in growing)
            assert left == min(len(growing), owners - 1), f"block {block} of {owners} owners was copied {left} times"
        for row, count in zip(batch, counts, strict=True):
            end = int(m.num_scheduled[row])
            for group in m._growing:
                table = m.block_table(row, group.number)
                first = end - 1 if group.kind.in_place else end - count
                for place in range(first // self.block_size, (end - 1) // self.block_size + 1):
                    assert group.pool.owners[table[place]] == 1, "a block with several owners would be written"
        return True

    def tails(self, batch: list[int]) -> dict:
        """(group, block) -> owners, and (row, place) of those that are about to write on in the block."""
        tails: dict = {}
        for group in self.m._growing:
            for row in batch:
                place, rest = divmod(int(self.m.num_scheduled[row]), self.block_size)
                if rest and not group.kind.in_place:
                    block = int(self.m.block_table(row, group.number)[place])
                    tails.setdefault((group.number, block), (int(group.pool.owners[block]), []))[1].append((row, place))
        return tails

    def draft(self, code: int) -> None:
        """Speculative decoding: schedules guesses, and later takes some of them back."""
        row = self.pick(code)
        if row is None or self.flights:
            return
        mine, m = self.rows[row], self.m
        n = len(mine.tokens)
        if int(m.num_scheduled[row]) != n - 1 or int(m.num_known[row]) != n or n + 4 > self.max_len:
            return
        guesses = self.draw_tokens(code // 8, 3)
        mine.tokens += guesses
        if not self.grow_batch([row], [1 + len(guesses)]):
            del mine.tokens[n:]
            return
        flight = self.dispatch()
        flight.samples = [sample for sample in flight.samples if sample.row != row]
        accepted = code // 32 % (len(guesses) + 1)
        del mine.tokens[n + accepted :]
        m.truncate(row, n + accepted)
        self.shrink()
        mine.tokens.append(code % ALPHABET)
        ids = np.array([mine.tokens[n:] + [9] * (len(guesses) - accepted)], np.int32)
        m.settle(flight.number, [row], ids, counts=[accepted + 1])
        self.settled(flight)
        self.learn(mine, int(m.num_known[row]))
        for sample in flight.samples:
            self.deliver_late(sample)

    def deliver_late(self, sample: Sample) -> None:
        """The step was settled without this sample: the host never learns the token, so the sequence ends before it."""
        if sample.row in self.rows and self.rows[sample.row].serial == sample.serial:
            known = int(self.m.num_known[sample.row])
            del self.rows[sample.row].tokens[known:]

    def commit(self, code: int) -> None:
        if len(self.flights) < 3:
            self.dispatch()

    def settle(self, code: int) -> None:
        if not self.flights:
            return
        flight = self.flights[0]
        rows, ids = [], []
        for sample in flight.samples:
            mine = self.rows.get(sample.row)
            alive = mine is not None and mine.serial == sample.serial
            if alive and len(mine.tokens) <= sample.position:
                continue  # truncated since
            if alive or sample.row not in rows:
                rows.append(sample.row)
                ids.append(sample.token)
        late = [row for row in rows if row in self.rows]
        known = {row: int(self.m.num_known[row]) for row in late}
        self.m.settle(flight.number, np.array(rows, np.int64), np.array(ids, np.int32))
        self.settled(flight)
        by_row = {sample.row: sample for sample in flight.samples}
        for row in late:
            mine, sample = self.rows[row], by_row[row]
            expected = known[row] + (mine.serial == sample.serial)
            assert int(self.m.num_known[row]) == expected, "a freed row's sample went to another sequence"
            assert self.m.tokens(row).tolist() == mine.tokens[:expected]
            self.learn(mine, expected)

    def settled(self, flight: Dispatched) -> None:
        while self.flights[0] is not flight:
            del self.flights[0]
        del self.flights[0]

    def fail(self, code: int) -> None:
        if not self.flights:
            return
        at = code % len(self.flights)
        failed = self.flights[at:]
        del self.flights[at:]
        self.m.fail(failed[0].number)
        self.memory = failed[0].memory
        for flight in failed:
            for sample in flight.samples:
                mine = self.rows.get(sample.row)
                if mine is not None and mine.serial == sample.serial:
                    del mine.tokens[sample.position :]
        for row, (serial, written) in failed[0].written.items():
            if row in self.rows and self.rows[row].serial == serial:
                assert int(self.m.num_scheduled[row]) <= max(written, 0), "a failed step's tokens count as written"
        self.shrink()
        for row in self.rows:
            known = int(self.m.num_known[row])
            assert known <= len(self.rows[row].tokens), "the host knows a token that was never sampled"

    def shrink(self) -> None:
        """What the manager has taken back is not computed any more."""
        for row, mine in self.rows.items():
            scheduled = int(self.m.num_scheduled[row])
            if scheduled < mine.computed:
                mine.computed, mine.is_new_fork = scheduled, False

    def fork(self, code: int) -> None:
        row = self.pick(code)
        if row is None:
            return
        m = self.m
        most = min(int(m.num_known[row]), int(m.num_scheduled[row]))
        if most < 1:
            return
        self.fork_row(row, most if code % 3 else code // 8 % most + 1)

    def fork_row(self, row: int, n: int | None) -> None:
        m = self.m
        most = min(int(m.num_known[row]), int(m.num_scheduled[row]))
        if most < 1:
            return
        n = most if n is None else n
        child = m.fork(row, None if n == most else n)
        if child is None:
            assert len(self.rows) == self.max_rows
            return
        parent = self.rows[row]
        self.serial += 1
        self.rows[child] = Row(parent.tokens[:n], parent.salt, parent.epoch, self.serial, parent.may_hit)
        self.rows[child].computed = int(m.num_scheduled[child])  # what is missing, its parent computes in this step
        self.rows[child].is_new_fork = parent.computed < n
        assert int(m.num_known[child]) == n
        if self.full_only:
            assert int(m.num_scheduled[child]) == n

    def branch(self, code: int) -> None:
        """Forks, and forks of forks, each of which goes another way in the same step."""
        row = self.pick(code)
        for level in range(1 + code // 8 % 3):
            if row is None:
                return
            before = set(self.rows)
            self.fork_row(row, None)
            new = set(self.rows) - before
            if not new:
                return
            (row,) = new
            self.append_to(row, self.draw_tokens(code // 32 + level, 2))
            left = len(self.rows[row].tokens) - int(self.m.num_scheduled[row])
            if left > 0:
                self.grow_batch([row], [left])

    def revise(self, code: int) -> None:
        """Cuts a sequence short and takes it elsewhere."""
        row = self.pick(code)
        if row is None:
            return
        self.cut(row, 1 + code // 8 % len(self.rows[row].tokens))
        self.append_to(row, self.draw_tokens(code // 64, 4))
        left = len(self.rows[row].tokens) - int(self.m.num_scheduled[row])
        if left > 0:
            self.grow_batch([row], [left])

    def append(self, code: int) -> None:
        row = self.pick(code)
        if row is None:
            return
        self.append_to(row, self.draw_tokens(code // 4, 6))

    def append_to(self, row: int, more: list[int]) -> None:
        mine = self.rows[row]
        known = int(self.m.num_known[row])
        if known != len(mine.tokens) or int(self.m.num_scheduled[row]) > known:
            return
        more = more[: max(0, self.max_len - 2 - known)]
        if more:
            self.m.append(row, more)
            mine.tokens += more
            self.learn(mine, len(mine.tokens))

    def truncate(self, code: int) -> None:
        row = self.pick(code)
        if row is None:
            return
        self.cut(row, 1 + code // 8 % len(self.rows[row].tokens))

    def cut(self, row: int, n: int) -> None:
        mine, m = self.rows[row], self.m
        if n > max(int(m.num_known[row]), int(m.num_scheduled[row])):
            return
        m.truncate(row, n)
        self.shrink()
        del mine.tokens[n:]
        for flight in self.flights:
            flight.samples = [
                sample
                for sample in flight.samples
                if not (sample.row == row and sample.serial == mine.serial and sample.position >= n)
            ]
        if self.full_only:
            assert int(m.num_scheduled[row]) <= n

    def free(self, code: int) -> None:
        row = self.pick(code)
        if row is None:
            return
        mine, m = self.rows.pop(row), self.m
        has = min(int(m._rows.num_written[row]), int(m.num_known[row]))
        known = mine.tokens[: int(m.num_known[row])]
        m.free(row)
        self.shrink()
        if self.full_only and mine.may_hit and has and mine.epoch == self.epoch:
            found = m.match([*known[:has], ALPHABET], self.keys(mine.salt)).num_tokens
            assert found >= (
                has
                if has % self.block_size >= self.m._admission.min_partial_hit
                else has // self.block_size * self.block_size
            ), "what a row has computed is lost when it ends"

    def preempt(self, code: int) -> None:
        """Frees a row and admits it again at once with all that the host knows of it."""
        row = self.pick(code)
        if row is None:
            return
        mine, m = self.rows[row], self.m
        known = mine.tokens[: int(m.num_known[row])]
        self.free(sorted(self.rows).index(row))
        match = m.match(known, self.keys(mine.salt)) if len(known) <= self.max_len else None
        try:
            again = m.admit(known, self.keys(mine.salt), match=match)
        except RequestTooLargeError:  # its blocks were shared with forks
            return
        if again is not None:
            self.serial += 1
            self.rows[again] = Row(known, mine.salt, self.epoch, self.serial, m.enable_prefix_caching)
            self.rows[again].computed = match.num_tokens
            self.learn(self.rows[again], len(known))

    def reset(self, code: int) -> None:
        queued = any(copies.pending for copies in self.m._copies.values())
        assert self.m.reset() is (not self.rows and not queued)

    def advance_epoch(self, code: int) -> None:
        if code % 4:
            return
        self.m.advance_epoch()
        self.epoch += 1
        for mine in self.rows.values():
            mine.may_hit = False

    OPS = (
        *("admit",) * 4,
        *("grow",) * 6,
        *("commit",) * 6,
        *("settle",) * 6,
        *("fork",) * 2,
        *("free",) * 2,
        "preempt",
        "truncate",
        "revise",
        "branch",
        "append",
        "draft",
        "fail",
        "reset",
        "advance_epoch",
    )
