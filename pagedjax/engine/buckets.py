"""The shapes that steps are compiled for: one module decides them all, from the configuration alone.

A bucket is how many decode rows and how many prefill tokens a step has room for. Context lengths are data and
never part of it, so the list is short, and `Buckets.all()` is everything that will ever be compiled.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """Room of one compiled step.

    Attributes:
        num_decodes: sequences that decode one token each.
        num_prefill_tokens: tokens of prefill chunks.
        num_prefills: prefill chunks.
        num_samples: tokens drawn.
    """

    num_decodes: int
    num_prefill_tokens: int = 0
    num_prefills: int = 0
    num_samples: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_prefills

    def __str__(self) -> str:
        return f"{self.num_decodes} decodes + {self.num_prefill_tokens} prefill tokens"


class Buckets:
    """The buckets of an engine.

    Args:
        max_rows: sequences that run at the same time.
        max_prefill_tokens: prefill tokens in a step.
        min_decodes: least decode rows a step is compiled for; 2 where one row is slower than two.

    >>> buckets = Buckets(max_rows=8, max_prefill_tokens=64)
    >>> buckets.pick(decodes=3).num_decodes
    4
    >>> str(buckets.pick(decodes=3, prefill_tokens=40, prefills=1, samples=4))
    '8 decodes + 64 prefill tokens'
    """

    MAX_PREFILLS = 8  # chunks in a step; each costs one row of the head's product whether it is there or not

    def __init__(self, *, max_rows: int, max_prefill_tokens: int, min_decodes: int = 1):
        self.max_rows = max_rows
        self.decodes = _powers(min(min_decodes, max_rows), max_rows, 2)
        self.prefill_tokens = _powers(min(32, max_prefill_tokens), max_prefill_tokens, 4)
        self.max_prefills = min(self.MAX_PREFILLS, max_rows, max_prefill_tokens)
        self._mixed_decodes = (0, max_rows)

    def pick(self, *, decodes: int, prefill_tokens: int = 0, prefills: int = 0, samples: int = 0) -> Bucket:
        """The smallest bucket with enough room."""
        if not prefills:
            room = _least(self.decodes, decodes)
            return Bucket(room, 0, 0, room)
        room = _least(self._mixed_decodes, decodes)
        new = self.max_prefills if samples - decodes <= self.max_prefills else self.max_rows
        return Bucket(room, _least(self.prefill_tokens, prefill_tokens), self.max_prefills, room + new)

    def all(self) -> list[Bucket]:
        """Every bucket that `pick` can return."""
        found = {self.pick(decodes=rows) for rows in self.decodes}
        for rows in self._mixed_decodes:
            for tokens in self.prefill_tokens:
                for new in (1, self.max_rows):
                    found.add(self.pick(decodes=rows, prefill_tokens=tokens, prefills=1, samples=rows + new))
        return sorted(found)


def _powers(least: int, most: int, factor: int) -> tuple[int, ...]:
    """`most` and its quotients by powers of `factor` down to `least`, ascending."""
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(max(least, -(-sizes[-1] // factor)))
    return tuple(reversed(sizes))


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
