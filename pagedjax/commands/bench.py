"""``pagedjax bench``: one front end for all benchmarks; records as JSON lines or as a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedjax.bench import Record


def run(options: argparse.Namespace) -> int:
    """Runs a benchmark and prints its records as they come, or as a table at the end."""
    from rich.console import Console

    from pagedjax.bench import print_json, print_table

    console = Console(stderr=True)
    records = []
    with console.status(f"bench {options.bench}") as status:
        for record in _records(options):
            status.update(f"bench {options.bench}: {record.case} {record.value:,.4g} {record.unit}")
            records.append(record)
            if options.json:
                print_json([record])
    if not options.json:
        print_table(records)
    return 0


def _records(options: argparse.Namespace) -> Iterator[Record]:
    if options.bench == "engine":
        from pagedjax.bench import engine

        dtypes = tuple(options.dtype or ("float32", "bfloat16"))
        if options.workload:
            for dtype in dtypes if options.dtype else ("float32",):
                yield from engine.run_workload(
                    options.model, options.workload, dtype=dtype, block_size=options.block_size
                )
        else:
            yield from engine.run(options.model, dtypes=dtypes, block_size=options.block_size, quick=options.quick)
    elif options.bench == "cache":
        from pagedjax.bench import cache

        yield from cache.run((1_000, 10_000), repeats=5) if options.quick else cache.run()
    else:
        from pagedjax.bench import reuse

        yield from reuse.run(quick=options.quick)
