"""The hit that all groups can serve: each of them may only shorten it, until none does."""

from collections.abc import Sequence

from pagedjax.cache.group import Group, GroupHit, Query


def find_hit(groups: Sequence[Group], query: Query, limit: int, min_partial: int) -> tuple[int, list[GroupHit]]:
    """The longest hit of at most ``limit`` tokens, and where each group gets its share from.

    A fixed point: a group that has served a length may not be able to serve a shorter one (a window further to the
    left, a state at that very place), so all are asked again until one length suits everybody.
    """
    length = limit if any(group.kind.cacheable for group in groups) else 0
    agreed = 0
    at = 0
    while agreed < len(groups) and length:
        found = groups[at % len(groups)].longest_hit(query, length, min_partial)
        agreed = agreed + 1 if found == length else 1
        length = found
        at += 1
    return length, [group.hit(query, length) for group in groups]
