"""Compare two files of records: `python -m pagedjax.bench before.jsonl after.jsonl`."""

import sys
from collections.abc import Sequence

from pagedjax.bench.records import RecordError, load_records
from pagedjax.bench.tables import compare, print_comparison


def main(arguments: Sequence[str]) -> int:
    """Compare two files of records; return the exit code."""
    if len(arguments) != 2:
        print("usage: python -m pagedjax.bench before.jsonl after.jsonl", file=sys.stderr)
        return 2
    try:
        before, after = (load_records(path) for path in arguments)
    except (OSError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_comparison(compare(before, after))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
