"""Records for the eye: a table of one run, and two runs side by side.
A change within the noise (the interquartile ranges of both runs) is called so, not better or worse.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedjax.bench.records import Record
from pagedjax.bench.timing import interquartile_range

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Comparison:
    """One figure of two runs. Several records of a run that measured the same are one: the median of their values.

    Attributes:
      record: the first record of the later run, or of the earlier one where the later one has none.
      before, after: values; None where that run lacks the figure.
      noise: the larger spread of the two runs, in the record's unit; for several records also that of their values.
    """

    record: Record
    before: float | None
    after: float | None
    noise: float

    @property
    def ratio(self) -> float | None:
        """After over before; None where one of them is missing or before is zero."""
        if self.before is None or self.after is None or self.before == 0:
            return None
        return self.after / self.before

    @property
    def differs(self) -> bool:
        """Whether both runs have the figure and it moved by more than the noise."""
        return self.before is not None and self.after is not None and abs(self.after - self.before) > self.noise


def compare(before: Iterable[Record], after: Iterable[Record]) -> list[Comparison]:
    """Pair the records of two runs by what they measured, in the order of the first run."""
    groups: dict[tuple[Any, ...], tuple[list[Record], list[Record]]] = {}
    for side, records in enumerate((before, after)):
        for record in records:
            groups.setdefault(record.key, ([], []))[side].append(record)
    compared = []
    for old, new in groups.values():
        values = [[record.value for record in side] for side in (old, new)]
        noise = max(record.spread for record in (*old, *new))
        noise = max(noise, *(interquartile_range(side) for side in values))
        medians = [statistics.median(side) if side else None for side in values]
        compared.append(Comparison(record=(new or old)[0], before=medians[0], after=medians[1], noise=noise))
    return compared


def print_table(records: Sequence[Record], console: "Console | None" = None) -> None:
    """Print a table for each benchmark: a row a record, with its parameters."""
    from rich.console import Console

    console = console or Console()
    for bench in dict.fromkeys(record.bench for record in records):
        rows = [record for record in records if record.bench == bench]
        table, names = _table(bench, rows)
        for column in ("value", "spread"):
            table.add_column(column, justify="right")
        table.add_column("unit")
        for record in rows:
            cells = (_number(record.value), _number(record.spread), record.unit)
            table.add_row(record.case, *(_parameter(record, name) for name in names), *cells)
        console.print(table)


def print_comparison(comparisons: Sequence[Comparison], console: "Console | None" = None) -> None:
    """Print a table for each benchmark: before, after and their ratio, marked where it is within the noise."""
    from rich.console import Console

    console = console or Console()
    for bench in dict.fromkeys(pair.record.bench for pair in comparisons):
        rows = [pair for pair in comparisons if pair.record.bench == bench]
        table, names = _table(bench, [pair.record for pair in rows])
        for column in ("before", "after"):
            table.add_column(column, justify="right")
        table.add_column("unit")
        table.add_column("ratio", justify="right")
        table.add_column("")
        for pair in rows:
            before, after = (_number(value) if value is not None else "-" for value in (pair.before, pair.after))
            ratio = f"{pair.ratio:.3f}" if pair.ratio is not None else "-"
            record = pair.record
            shared = (record.case, *(_parameter(record, name) for name in names), before, after, record.unit, ratio)
            table.add_row(*shared, _verdict(pair))
        console.print(table)


def _verdict(pair: Comparison) -> str:
    if pair.before is None or pair.after is None:
        return "only after" if pair.before is None else "only before"
    if not pair.differs:
        return "within noise"
    larger_is_better = pair.record.unit.endswith("/s")
    return "better" if (pair.after > pair.before) == larger_is_better else "worse"


def _table(title: str, records: Sequence[Record]) -> "tuple[Table, list[str]]":
    """An empty table with columns for the case and the parameters that the records have, and their names."""
    from rich.table import Table

    table = Table("case", title=title, title_justify="left")
    names = list(dict.fromkeys(name for record in records for name in record.parameters))
    for name in names:
        table.add_column(name, justify="right")
    return table, names


def _parameter(record: Record, name: str) -> str:
    value = record.parameters.get(name)
    return "" if value is None else str(value)


def _number(value: float) -> str:
    """Four significant digits, with separators from a thousand on.

    >>> _number(1234567.8), _number(39.2345), _number(0.00012)
    ('1,234,568', '39.23', '0.00012')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
