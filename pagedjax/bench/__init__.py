"""What `pagedjax bench` runs, and the one record schema that all of it writes.

`records` is the schema, `environment` says where something was measured, `timing` measures, `tables` shows and
compares; `limits` measures what the machine could do at best. Importing this package imports no jax.
"""

from pagedjax.bench.environment import machine, versions
from pagedjax.bench.records import Record, RecordError, load_records, print_json
from pagedjax.bench.tables import Comparison, compare, print_comparison, print_table
from pagedjax.bench.timing import Measurement, measure

__all__ = [
    "Comparison",
    "Measurement",
    "Record",
    "RecordError",
    "compare",
    "load_records",
    "machine",
    "measure",
    "print_comparison",
    "print_json",
    "print_table",
    "versions",
]
