"""The record schema: what is accepted, what is refused, and that a line survives the way there and back."""

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.bench import Record, RecordError, load_records, print_json
from pagedjax.bench.timing import Measurement

RESERVED = ("bench", "case", "value", "unit", "repeats", "spread", "machine", "versions")


def record(**changes: Any) -> Record:
    fields: dict[str, Any] = {"bench": "engine", "case": "decode", "parameters": {"batch": 8, "dtype": "float32"}}
    fields |= {"value": 39.2, "unit": "ms", "repeats": 20, "spread": 0.4, "machine": {"cores": 2}, "versions": {}}
    return Record(**(fields | changes))


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False, allow_infinity=False)
)
names = st.text(min_size=1).filter(lambda name: name not in RESERVED)
records = st.builds(
    Record,
    bench=st.text(min_size=1),
    case=st.text(min_size=1),
    parameters=st.dictionaries(names, scalars),
    value=st.floats(allow_nan=False, allow_infinity=False),
    unit=st.text(min_size=1),
    repeats=st.integers(min_value=1),
    spread=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    machine=st.dictionaries(st.text(), scalars),
    versions=st.dictionaries(st.text(), scalars),
)


@given(records)
def test_a_record_survives_json(original: Record):
    line = original.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == original


def test_a_line_has_the_fields_of_the_schema_in_order_and_parameters_flat():
    row = json.loads(record().to_json())
    assert list(row) == ["bench", "case", "batch", "dtype", "value", "unit", "repeats", "spread", "machine", "versions"]
    assert row["batch"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bench": ""}, "bench is ''"),
        ({"case": None}, "case is None"),
        ({"unit": ""}, "unit is ''"),
        ({"value": math.nan}, "value is nan"),
        ({"value": math.inf}, "value is inf"),
        ({"value": "39"}, "value is '39'"),
        ({"value": True}, "value is True"),
        ({"spread": -1.0}, "spread is -1.0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"repeats": 2.5}, "repeats is 2.5"),
        ({"parameters": {"shape": [1, 2]}}, r"parameters\['shape'\] is \[1, 2\]"),
        ({"parameters": {"unit": "s"}}, r"the names \['unit'\]"),
        ({"parameters": {"x": math.nan}}, r"parameters\['x'\] is nan"),
        ({"machine": {"devices": {}}}, r"machine\['devices'\] is {}"),
        ({"versions": None}, "versions is None"),
    ],
)
def test_a_record_that_breaks_the_schema_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(RecordError, match=message):
        record(**changes)


@pytest.mark.parametrize("field", RESERVED)
def test_a_line_without_a_field_is_refused_by_name(field: str):
    row = json.loads(record().to_json())
    del row[field]
    with pytest.raises(RecordError, match=f"the record has no {field}"):
        Record.from_json(json.dumps(row))


@pytest.mark.parametrize(("line", "message"), [("{", "not JSON"), ("[1]", "a JSON object, not list")])
def test_a_line_that_is_no_object_is_refused(line: str, message: str):
    with pytest.raises(RecordError, match=message):
        Record.from_json(line)


def test_a_file_is_read_back_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    with path.open("w") as file:
        print_json([record(), record(value=1.0)], file)
        file.write("\n")
    assert load_records(path) == [record(), record(value=1.0)]
    path.write_text(record().to_json() + "\n\nnonsense\n")
    with pytest.raises(RecordError, match=r"records.jsonl, line 3: not JSON"):
        load_records(path)


def test_printing_json_writes_one_line_a_record_to_standard_output(capsys):
    print_json([record(), record(case="prefill")])
    assert [json.loads(line)["case"] for line in capsys.readouterr().out.splitlines()] == ["decode", "prefill"]


def test_a_file_object_gets_what_standard_output_would():
    file = io.StringIO()
    print_json([record()], file)
    assert file.getvalue() == record().to_json() + "\n"


def test_a_measurement_becomes_a_record_in_the_unit_that_was_asked_for():
    timing = Measurement((0.001, 0.002, 0.003, 0.004, 0.1))
    made = Record.of_measurement(timing, bench="cache", case="admit", unit="us", tokens=8192)
    assert (made.value, made.spread) == (pytest.approx(3000), pytest.approx(2000))
    assert (made.unit, made.repeats, made.parameters) == ("us", 5, {"tokens": 8192})
    assert made.machine["cores"]
    assert made.versions["numpy"]


def test_a_measurement_in_a_unit_that_is_no_time_is_refused():
    with pytest.raises(RecordError, match="unit is 'tokens/s'"):
        Record.of_measurement(Measurement((1.0,)), bench="cache", case="admit", unit="tokens/s")
