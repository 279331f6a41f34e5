"""A picture of the pool at one moment: who owns what, what is shared, what is cached, and what will be reused next.

A snapshot is plain data, taken without changing anything. `Snapshot.text` draws it for a terminal, `Snapshot.plot` for
a page (PNG, SVG or whatever else matplotlib can write; it is imported only then).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.cache.block_pool import DUPLICATE, BlockPool
from pagedjax.cache.group import Group
from pagedjax.cache.rows import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = {"null": "#444444", "free": "#f2f2f2", "cached": "#9fd3a8", "held": "#e0a030", "shared": "#4a6fb5"}


@dataclass(frozen=True)
class PoolSnapshot:
    """One pool.

    Attributes:
        name: of the pool.
        states: for each block ``null``, ``free``, ``cached`` (free, but its content can be hit), ``held`` (by a
            queued copy only), ``shared`` (several owners) or ``owned``.
        owner_rows: for each block the rows that own it.
        eviction_order: the free blocks, the one to be reused first first.
        copies: queued copies, (source, destination).
    """

    name: str
    states: tuple[str, ...]
    owner_rows: tuple[tuple[int, ...], ...]
    eviction_order: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]

    def letters(self) -> str:
        """One character a block: a letter for its row, ``#`` shared, ``c`` cached, ``.`` free, ``h`` held, ``0``."""
        marks = {"null": "0", "free": ".", "cached": "c", "held": "h", "shared": "#"}
        return "".join(
            ROW_LETTERS[rows[0] % len(ROW_LETTERS)] if state == "owned" else marks[state]
            for state, rows in zip(self.states, self.owner_rows, strict=True)
        )


@dataclass(frozen=True)
class Snapshot:
    """All pools, and the rows in use.

    Attributes:
        pools: one for each pool.
        rows: row -> (known tokens, scheduled tokens).
        block_size: tokens in a block.
    """

    pools: tuple[PoolSnapshot, ...]
    rows: Mapping[int, tuple[int, int]]
    block_size: int

    def text(self, width: int = 64, most_blocks: int = 4096) -> str:
        """The pools as rows of ``width`` characters, the first ``most_blocks`` blocks of each, and a line for each."""
        lines = []
        for pool in self.pools:
            letters = pool.letters()
            used = sum(state in ("owned", "shared", "held") for state in pool.states)
            lines.append(
                f"pool {pool.name}: {len(letters) - 1} blocks of {self.block_size} tokens, {used} in use, "
                f"{pool.states.count('shared')} shared, {pool.states.count('cached')} cached"
            )
            for start in range(0, min(len(letters), most_blocks), width):
                lines.append(f"{start:8d} {letters[start : start + width]}")
            if len(letters) > most_blocks:
                lines.append(f"         … and {len(letters) - most_blocks} more")
            order = " ".join(str(block) for block in pool.eviction_order[:16])
            lines.append(f"   reused next: {order}{' …' if len(pool.eviction_order) > 16 else ''}")
            if pool.copies:
                lines.append("   copies: " + ", ".join(f"{source}→{target}" for source, target in pool.copies))
        for row, (known, scheduled) in self.rows.items():
            lines.append(f"   row {row} ({ROW_LETTERS[row % 26]}): {known} tokens known, {scheduled} scheduled")
        lines.append("   letter: one owner, # shared, c cached, . free, h held by a copy, 0 the null block")
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None, width: int = 32) -> Figure:
        """Draws the pools, ``width`` blocks a line, and their free blocks in eviction order; saves to ``path``.

        Raises:
            ImportError: matplotlib is not installed (``pip install pagedjax[plot]``).
        """
        from matplotlib.figure import Figure

        lines = [-(-len(pool.states) // width) for pool in self.pools]
        figure = Figure(figsize=(0.28 * width + 1.5, 0.28 * sum(lines) + 1.6 * len(lines) + 0.6), layout="constrained")
        axes = figure.subplots(2 * len(lines), 1, squeeze=False, height_ratios=[h for n in lines for h in (n + 1, 1.5)])
        for pool, grid, strip in zip(self.pools, axes[::2, 0], axes[1::2, 0], strict=True):
            _draw_grid(grid, pool, width)
            _draw_order(strip, pool, 2 * width)
        axes[0, 0].legend(handles=_legend(self.rows), ncols=6, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.08))
        if path is not None:
            figure.savefig(path)
        return figure


def _colour(state: str, rows: Sequence[int]) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](rows[0] % 20) if state == "owned" else COLOURS[state]


def _draw_grid(axes: Any, pool: PoolSnapshot, width: int) -> None:
    from matplotlib.patches import Rectangle

    for block, (state, rows) in enumerate(zip(pool.states, pool.owner_rows, strict=True)):
        x, y = block % width, block // width
        patch = Rectangle((x, y), 0.92, 0.92, facecolor=_colour(state, rows), edgecolor="#999999", linewidth=0.3)
        axes.add_patch(patch)
        if len(rows) > 1:
            axes.text(x + 0.46, y + 0.5, str(len(rows)), ha="center", va="center", fontsize=5, color="white")
    lines = -(-len(pool.states) // width)
    axes.set(xlim=(0, width), ylim=(lines, 0), yticks=np.arange(lines) + 0.5, xticks=[])
    axes.set_yticklabels([str(line * width) for line in range(lines)], fontsize=6)
    axes.set_title(f"pool {pool.name}: blocks by id", fontsize=8, loc="right")


def _draw_order(axes: Any, pool: PoolSnapshot, width: int) -> None:
    from matplotlib.patches import Rectangle

    for at, block in enumerate(pool.eviction_order[:width]):
        axes.add_patch(Rectangle((at, 0), 0.92, 0.92, facecolor=COLOURS[pool.states[block]], edgecolor="#999999"))
        axes.text(at + 0.46, 0.5, str(block), ha="center", va="center", fontsize=4)
    axes.set(xlim=(0, width), ylim=(0, 1), yticks=[], xticks=[])
    axes.set_title("free blocks, reused from the left", fontsize=7, loc="left")


def _legend(rows: Mapping[int, tuple[int, int]]) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor="#999999", label=state) for state, colour in COLOURS.items()]
    shown = list(rows.items())[:12]
    return handles + [Patch(facecolor=_colour("owned", [row]), label=f"row {row}: {n[0]} tokens") for row, n in shown]


def take_snapshot(rows: Rows, groups: Sequence[Group], pools: Mapping[str, BlockPool]) -> Snapshot:
    """The pools as they are. Takes time in proportion to their size."""
    return Snapshot(
        tuple(
            _pool(name, pool, rows, [group for group in groups if group.pool is pool]) for name, pool in pools.items()
        ),
        {row: (int(rows.num_known[row]), int(rows.num_scheduled[row])) for row in rows.used},
        rows.block_size,
    )


def _pool(name: str, pool: BlockPool, rows: Rows, groups: Sequence[Group]) -> PoolSnapshot:
    owners: list[list[int]] = [[] for _ in range(pool.num_blocks)]
    for group in groups:
        for row in rows.used:
            for block in group.table[row, : group.num_blocks[row]].tolist():
                if block:
                    owners[block].append(row)
    cached = ((pool.cached > 0) & (pool.cached < DUPLICATE)).tolist()
    states = ["null"]
    for block in range(1, pool.num_blocks):
        if owners[block]:
            states.append("shared" if len(owners[block]) > 1 else "owned")
        elif pool.holds[block]:
            states.append("held")
        else:
            states.append("cached" if cached[block] else "free")
    copies = tuple((source, target) for target, (source, _) in groups[0].copies.pending.items())
    return PoolSnapshot(name, tuple(states), tuple(map(tuple, owners)), tuple(pool.free_list), copies)
