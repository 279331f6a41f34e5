"""The simulation catches real mistakes: each test breaks the code in one place and expects to be told.

A mutant replaces one piece of a function's source (`mutation`).
"""

import numpy as np
import pytest
from cache_simulation import Simulation
from mutation import mutate
from test_state_machine import KINDS

from pagedjax.cache import admission, block_pool, copies, group, growth, hashing, prefix_index, rows, steps
from pagedjax.cache.manager import KVCacheManager

MUTANTS = {
    "a share adds no owner": (block_pool.BlockPool, "share", "owners + 1", "np.maximum(owners, 1)"),
    "a release forgets the free list": (
        block_pool.BlockPool,
        "_put_back",
        "free_list.prepend_n",
        "free_list.check or len",
    ),
    "an evicted block stays in the index": (
        block_pool.BlockPool,
        "_evict",
        "self.on_drop(self, blocks)",
        "None",
    ),
    "a block is indexed before its tokens are known": (
        steps.Steps,
        "index_ready",
        "np.minimum(rows.num_written, rows.num_known, out=self._ready)",
        "np.copyto(self._ready, rows.num_written)",
    ),
    "a block is indexed before it is written": (
        steps.Steps,
        "index_ready",
        "np.minimum(rows.num_written, rows.num_known, out=self._ready)",
        "np.copyto(self._ready, rows.num_known)",
    ),
    "the source of a copy can be evicted": (
        copies.CopyQueue,
        "add",
        "self.pool.hold(source)",
        "self.pool.num_holds += 0",
    ),
    "a copy of a copy is not redirected": (
        copies.CopyQueue,
        "add",
        "self.pending.get(source, (source, 0))[0]",
        "source",
    ),
    "a cancelled copy is forgotten": (copies.CopyQueue, "cancel_abandoned", "self.pool.owners[block] == 0", "False"),
    "a hold counts as an owner": (
        growth,
        "_plan_tail",
        "int(group.pool.owners[block])",
        "int(group.pool.owners[block] + group.pool.holds[block])",
    ),
    "a shared block is written": (growth, "_plan_tail", "if owners == 1:", "if owners:"),
    "an overwritten block stays in the index": (growth, "_write_on", "entry is not None and", "False and"),
    "a parent may write on after a fork": (KVCacheManager, "fork", "self._steps.set_limit(row)", "pass"),
    "a failed step keeps its entries": (steps.Steps, "_revoke", "group.index.forget(block)", "block"),
    "a failed step's hits are kept": (steps.Steps, "_revoke", "if len(lost):", "if False:"),
    "a failed step's forks are kept": (steps.Steps, "fail", "in record.forked", "in []"),
    "a freed parent's children count on it": (steps.Steps, "unschedule", "self.roll_back(child, num_tokens)", "pass"),
    "truncated tokens keep their hashes": (rows.Rows, "forget_tokens", "del self.hashes[row]", "self.hashes[row]"),
    "the whole prompt may be a hit": (
        admission.Admission,
        "look_up",
        "tokens.size - 1, self.min",
        "tokens.size, self.min",
    ),
    "a prompt's second block is compared with the first": (
        group.Query,
        "parent",
        "self.hashes[block - 1]",
        "self.root",
    ),
    "the epoch is not part of the root": (hashing, "root_hash", '_field(b"E", epoch)', 'b""'),
    "the salt is not part of the root": (hashing, "root_hash", '_field(b"S", keys.salt)', 'b""'),
    "a stale match is believed": (admission.Admission, "revalidate", "match.versions == self._versions()", "True"),
    "a late sample reaches the next sequence": (KVCacheManager, "settle", "self._rows.serial[batch] <= ", "0 <= "),
    "a free duplicate is still a duplicate": (
        block_pool.BlockPool,
        "_put_back",
        "idle[content >= DUPLICATE]",
        "idle[:0]",
    ),
    "a match stops at the wrong sibling": (
        prefix_index.PrefixIndex,
        "find_partial",
        "siblings.blocks[max(at - 1, 0) : at + 1]",
        "siblings.blocks[:1]",
    ),
    "many blocks are indexed over their siblings": (
        prefix_index.PrefixIndex,
        "insert_many",
        "self.children.keys().isdisjoint(parents)",
        "True",
    ),
    "two equal blocks of one step are both the first": (
        prefix_index.PrefixIndex,
        "insert_many",
        "len(set(parents)) == len(parents)",
        "True",
    ),
    "many evicted blocks take their siblings along": (
        prefix_index.PrefixIndex,
        "forget_many",
        "if children[parent] == block:",
        "if True:",
    ),
    "an unfinished block is not found": (steps.Steps, "index_last_block", "if end <= start:", "if True:"),
}
WINDOW_MUTANTS = {
    "a window gives up what a step in flight may still need": (
        steps.Steps,
        "_settle_rows",
        "np.minimum(record.after[batch], rows.num_written[batch])",
        "rows.num_scheduled[batch]",
    ),
    "a window gives up one block too many": (
        group.Group,
        "give_up_unneeded",
        "self.kind.first_needed(num_tokens) // self.block_size",
        "self.kind.first_needed(num_tokens) // self.block_size + 1",
    ),
    "a window's hit ignores a missing block": (group.Group, "longest_hit", "if missing is None:", "if True:"),
    "one group takes what another has found": (admission.Admission, "take_in", "group.pool.share(", "len("),
}
STATE_MUTANTS = {
    "any state counts as a checkpoint": (steps.Steps, "_index_row", "group.exact[row, at]", "True"),
    "a state is overwritten while another sequence starts from it": (
        growth,
        "_plan_state",
        "place == before",
        "start > 0",
    ),
    "a fork takes a state that is ahead of it": (
        group.Group,
        "can_continue_from",
        "num_tokens == self.rows.num_scheduled[row]",
        "True",
    ),
}
ALL = [("full", *each) for each in MUTANTS.items()]
ALL += [("full_and_window", *each) for each in WINDOW_MUTANTS.items()]
ALL += [("recurrent", *each) for each in STATE_MUTANTS.items()]


FIRST_SEED = {"a stale match is believed": 205}  # programs that show it are rare: start shortly before one


def caught(kinds: str, first_seed: int, most_programs: int = 400) -> bool:
    for seed in range(first_seed, first_seed + most_programs):
        rng = np.random.default_rng(seed)
        try:
            num_blocks, block_size = int(rng.integers(3, 41)), int(rng.choice([1, 2, 3, 4, 8]))
            simulation = Simulation(num_blocks, block_size, kinds=KINDS[kinds], events=seed % 2 == 0)
            for code in rng.integers(0, 2**40, 100).tolist():
                simulation.do(code)
        except Exception:
            return True
    return False


@pytest.mark.parametrize(("kinds", "mistake", "mutant"), ALL, ids=[each[1].replace(" ", "_") for each in ALL])
def test_the_simulation_catches(monkeypatch, kinds, mistake, mutant):
    mutate(monkeypatch, *mutant)
    assert caught(kinds, FIRST_SEED.get(mistake, 0)), f"nothing noticed that {mistake}"
