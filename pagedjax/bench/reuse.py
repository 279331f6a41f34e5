"""``pagedjax bench reuse``: how much of what could be reused is reused, beside what whole blocks alone would give.

What could be reused of a prompt is its longest common prefix with any earlier one, or all of it but the last token. The
pool is unbounded and the least partial hit is one token, so every token that is missed is the index's fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedjax.bench.records import Record, Scalar
from pagedjax.cache import KVCacheManager
from pagedjax.cache.hashing import block_bytes

BLOCK_SIZES = (16, 64, 256)
NUM_SIBLINGS = 10_000
Prompt = np.ndarray


def run(
    block_sizes: Sequence[int] = BLOCK_SIZES, *, chats: int = 200, siblings: int = NUM_SIBLINGS, quick: bool = False
) -> Iterator[Record]:
    """Two workloads: chats with shared prefixes of random lengths, several turns each; and many prompts that differ in
    one block only. Yields percentages of the reusable tokens. ``quick`` takes far fewer prompts.
    """
    if quick:
        chats, siblings = min(chats, 40), min(siblings, 500)
    workloads = {"chats": chat_prompts(chats), "siblings": sibling_prompts(siblings)}
    for name, prompts in workloads.items():
        for block_size in block_sizes:
            reused, whole, reusable = measure(prompts, block_size)
            parameters: dict[str, Scalar] = {"workload": name, "block_size": block_size, "requests": len(prompts)}
            for case, tokens in (("reused", reused), ("whole_blocks_only", whole)):
                yield Record(
                    bench="reuse", case=case, parameters=parameters, value=100 * tokens / max(reusable, 1), unit="%"
                )


def chat_prompts(chats: int, seed: int = 0) -> list[Prompt]:
    """Chats that begin with one of eight system prompts, cut anywhere, and come back with each answer appended."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 50_000, 600, dtype=np.int32) for _ in range(8)]
    turns: list[list[Prompt]] = []
    for _ in range(chats):
        system = systems[rng.integers(len(systems))]
        text = np.concatenate([system[: rng.integers(1, len(system))], _text(rng)])
        turns.append([text])
        for _ in range(int(rng.integers(0, 4))):
            text = np.concatenate([text, _text(rng), _text(rng)])
            turns[-1].append(text)
    waiting = list(range(chats))
    prompts = []
    while waiting:  # turns of different chats come in any order
        chat = waiting[rng.integers(len(waiting))]
        prompts.append(turns[chat].pop(0))
        if not turns[chat]:
            waiting.remove(chat)
    return prompts


def _text(rng: np.random.Generator) -> Prompt:
    return rng.integers(0, 50_000, int(rng.integers(5, 200)), dtype=np.int32)


def sibling_prompts(siblings: int, seed: int = 1) -> list[Prompt]:
    """``siblings`` prompts with the same 256 tokens and then 16 of their own, which may begin like another's."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 50_000, 256, dtype=np.int32)
    tails: list[Prompt] = []
    for _ in range(siblings):
        tail = rng.integers(0, 50_000, 16, dtype=np.int32)
        if tails and rng.random() < 0.7:
            cut = int(rng.integers(1, 16))
            tail[:cut] = tails[rng.integers(len(tails))][:cut]
        tails.append(tail)
    return [np.concatenate([shared, tail]) for tail in tails]


@dataclass
class Trie:
    """Every prefix seen so far, to say how long the longest common one is, independently of any block."""

    next: dict[tuple[int, int], int] = field(default_factory=dict)

    def common(self, prompt: Prompt) -> int:
        node = 0
        for at, token in enumerate(prompt.tolist()):
            following = self.next.get((node, token))
            if following is None:
                return at
            node = following
        return len(prompt)

    def add(self, prompt: Prompt) -> None:
        node = 0
        for token in prompt.tolist():
            node = self.next.setdefault((node, token), len(self.next) + 1)


def measure(prompts: Sequence[Prompt], block_size: int) -> tuple[int, int, int]:
    """Serves the prompts one after another: tokens reused, tokens that whole blocks alone would have given, and
    tokens that could have been.
    """
    longest = max(map(len, prompts))
    num_blocks = sum(-(-len(prompt) // block_size) + 1 for prompt in prompts) + 2
    manager = KVCacheManager(num_blocks, block_size, max_rows=4, max_len=longest + 1)
    seen, whole_seen = Trie(), set[bytes]()
    reused = whole = reusable = 0
    for prompt in prompts:
        most = min(seen.common(prompt), len(prompt) - 1)
        reusable += most
        match = manager.match(prompt)
        if match.num_tokens > most:
            raise AssertionError(f"a hit of {match.num_tokens} tokens, but only {most} were seen before")
        reused += match.num_tokens
        whole += _whole_blocks(prompt, block_size, whole_seen)
        row = manager.admit(prompt, match=match)
        if row is None:
            raise AssertionError("the pool was meant to be unbounded")
        manager.take_copies()
        manager.take_table_updates()
        manager.settle(manager.commit(), [], [])
        manager.free(row)
        seen.add(prompt)
    return reused, whole, reusable


def _whole_blocks(prompt: Prompt, block_size: int, seen: set[bytes]) -> int:
    """The hit of a cache that knows whole blocks only; at least one token is always computed."""
    prefix, hit, missed = b"", 0, False
    for at, block in enumerate(block_bytes(prompt, block_size)):
        prefix += block
        missed = missed or prefix not in seen or (at + 1) * block_size > len(prompt) - 1
        hit = hit if missed else (at + 1) * block_size
        seen.add(prefix)
    return hit
