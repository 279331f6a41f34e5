"""The one record schema of all benchmarks: a JSON object a line, one line a figure.

    {"bench": "engine", "case": "decode", "batch": 8, "dtype": "float32", "value": 39.2, "unit": "ms",
     "repeats": 20, "spread": 0.4, "machine": {...}, "versions": {...}}

What a benchmark varies (its parameters) lies flat between "case" and "value". Two records with equal bench, case,
parameters and unit measured the same thing, perhaps on another day or machine; such pairs are put side by side by

    python -m pagedjax.bench before.jsonl after.jsonl

A value is the median of its repeats, and spread is their interquartile range in the same unit: both shrug off the few
repeats that another program on the machine disturbed. Importing this module imports no jax.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pagedjax.bench import environment
from pagedjax.bench.timing import Measurement

Scalar = str | int | float | bool | None
_RESERVED = ("bench", "case", "value", "unit", "repeats", "spread", "machine", "versions")


class RecordError(ValueError):
    """A record, or a line that should be one, breaks the schema."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One figure of one benchmark; see the module for the schema.

    Attributes:
      bench: the benchmark, such as ``engine``.
      case: what of it, such as ``decode``.
      parameters: what the benchmark varies: names to strings, numbers, booleans or None.
      value: the median of the repeats, in `unit`; a finite number.
      unit: such as ``ms``, ``tokens/s``, ``bytes/s``, ``ratio``. A unit that ends in ``/s`` is better when larger.
      repeats: number of measurements behind the value, at least 1.
      spread: interquartile range of the repeats, in `unit`.
      machine: where: `environment.machine()`.
      versions: with what: `environment.versions()`.

    Raises:
      RecordError: a field breaks these rules.

    >>> record = Record(bench="engine", case="decode", parameters={"batch": 8}, value=39.2, unit="ms", repeats=20,
    ...                 spread=0.4, machine={}, versions={})
    >>> record.to_json()
    '{"bench": "engine", "case": "decode", "batch": 8, "value": 39.2, "unit": "ms", "repeats": 20, "spread": 0.4, ...}'
    >>> Record.from_json(record.to_json()) == record
    True
    """

    bench: str
    case: str
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    value: float
    unit: str
    repeats: int = 1
    spread: float = 0.0
    machine: Mapping[str, Scalar] = field(default_factory=environment.machine)
    versions: Mapping[str, Scalar] = field(default_factory=environment.versions)

    def __post_init__(self) -> None:
        for name in ("bench", "case", "unit"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise RecordError(f"{name} is {getattr(self, name)!r}; it must be a string that is not empty")
        for name in ("value", "spread"):
            if not _is_finite_number(getattr(self, name)):
                raise RecordError(f"{name} is {getattr(self, name)!r}; it must be a finite number")
        if self.spread < 0:
            raise RecordError(f"spread is {self.spread!r}; it is a distance and cannot be negative")
        if not isinstance(self.repeats, int) or isinstance(self.repeats, bool) or self.repeats < 1:
            raise RecordError(f"repeats is {self.repeats!r}; it must be an integer of at least 1")
        for name in ("parameters", "machine", "versions"):
            _check_scalars(name, getattr(self, name))
        if taken := sorted(set(self.parameters) & set(_RESERVED)):
            raise RecordError(f"parameters has the names {taken}, which the schema itself uses; rename them")

    @property
    def key(self) -> tuple[Any, ...]:
        """What was measured: equal for two records that may be compared."""
        return (self.bench, self.case, self.unit, *sorted(self.parameters.items()))

    def to_json(self) -> str:
        """Return the record as one line of JSON, without a newline."""
        row: dict[str, Any] = {"bench": self.bench, "case": self.case, **self.parameters}
        row |= {"value": self.value, "unit": self.unit, "repeats": self.repeats, "spread": self.spread}
        row |= {"machine": dict(self.machine), "versions": dict(self.versions)}
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Return the record of one line of JSON.

        Raises:
          RecordError: the line is no JSON object, a field is missing, or a field breaks the schema.
        """
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RecordError(f"a record is a JSON object, not {type(row).__name__}")
        if missing := [name for name in _RESERVED if name not in row]:
            raise RecordError(f"the record has no {', '.join(missing)}")
        fields = {name: row.pop(name) for name in _RESERVED}
        return cls(parameters=row, **fields)

    @classmethod
    def of_measurement(
        cls, measurement: Measurement, *, bench: str, case: str, unit: str = "ms", **parameters: Scalar
    ) -> "Record":
        """Return the record of a time, in s, ms or us.

        Raises:
          RecordError: the unit is no unit of time.
        """
        per_second = {"s": 1.0, "ms": 1e3, "us": 1e6}
        if unit not in per_second:
            raise RecordError(f"unit is {unit!r}; a time is given in {', '.join(per_second)}")
        scale = per_second[unit]
        return cls(
            bench=bench,
            case=case,
            parameters=parameters,
            value=measurement.median_s * scale,
            unit=unit,
            repeats=measurement.repeats,
            spread=measurement.spread_s * scale,
        )


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_scalars(name: str, mapping: object) -> None:
    if not isinstance(mapping, Mapping):
        raise RecordError(f"{name} is {mapping!r}; it must map names to strings, numbers, booleans or None")
    for key, value in mapping.items():
        if not isinstance(key, str) or not isinstance(value, Scalar):
            raise RecordError(f"{name}[{key!r}] is {value!r}; only strings, numbers, booleans and None can be recorded")
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordError(f"{name}[{key!r}] is {value!r}; it must be finite")


def load_records(path: str | Path) -> list[Record]:
    """Return the records of a file of JSON lines; empty lines are skipped.

    Raises:
      OSError: the file cannot be read.
      RecordError: a line is no record; the message names the file and the line.
    """
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                records.append(Record.from_json(line))
            except RecordError as error:
                raise RecordError(f"{path}, line {number}: {error}") from error
    return records


def print_json(records: Iterable[Record], file: IO[str] | None = None) -> None:
    """Write each record as a line of JSON, to standard output unless a file is given, flushed after each."""
    for record in records:
        print(record.to_json(), file=file or sys.stdout, flush=True)
