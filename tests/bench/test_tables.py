"""Tables of one run, and of two runs side by side."""

import io

import pytest
from rich.console import Console

from pagedjax.bench import Record, compare, print_comparison, print_json, print_table
from pagedjax.bench.__main__ import main


def record(case: str, value: float, unit: str = "ms", spread: float = 0.0, **parameters: int) -> Record:
    fields = {"repeats": 3, "machine": {}, "versions": {}}
    return Record(bench="engine", case=case, parameters=parameters, value=value, unit=unit, spread=spread, **fields)


def printed(function, *arguments) -> list[str]:
    file = io.StringIO()
    function(*arguments, Console(file=file, width=200))
    return file.getvalue().splitlines()


def test_records_pair_up_by_bench_case_parameters_and_unit():
    before = [record("decode", 40.0, batch=1), record("decode", 80.0, batch=8), record("decode", 3.0, "s", batch=8)]
    after = [record("decode", 60.0, batch=8), record("prefill", 1.0)]
    pairs = compare(before, after)
    assert [(pair.before, pair.after) for pair in pairs] == [(40.0, None), (80.0, 60.0), (3.0, None), (None, 1.0)]
    assert [pair.ratio for pair in pairs] == [None, 0.75, None, None]


def test_several_runs_of_one_figure_count_as_their_median_and_widen_the_noise():
    before = [record("decode", value, spread=0.5) for value in (10.0, 11.0, 12.0, 13.0, 90.0)]
    (pair,) = compare(before, [record("decode", 13.5, spread=0.1)])
    assert (pair.before, pair.after, pair.noise) == (12.0, 13.5, 2.0)
    assert not pair.differs


def test_a_change_is_called_better_or_worse_by_the_unit_and_only_beyond_the_noise():
    before = [record("t", 10.0, "ms", 1.0), record("r", 10.0, "tokens/s", 1.0), record("n", 10.0, "ms", 1.0)]
    after = [record("t", 20.0, "ms"), record("r", 20.0, "tokens/s"), record("n", 10.5, "ms"), record("x", 1.0, "ms")]
    lines = printed(print_comparison, compare(before, after))

    def row(case: str) -> str:
        return next(line for line in lines if f"│ {case} " in line)

    assert "worse" in row("t")
    assert "2.000" in row("t")
    assert "better" in row("r")
    assert "within noise" in row("n")
    assert "only after" in row("x")


def test_a_ratio_to_zero_is_left_out():
    (pair,) = compare([record("copies", 0.0, "blocks")], [record("copies", 3.0, "blocks")])
    assert pair.ratio is None
    assert any("-" in line and "worse" in line for line in printed(print_comparison, [pair]))


def test_a_table_shows_parameters_values_and_units():
    rows = [record("decode", 39.2345, batch=8, spread=0.4), record("bandwidth", 1.234567e10, "bytes/s")]
    lines = printed(print_table, rows)
    header = next(line for line in lines if "case" in line)
    assert [name for name in ("case", "batch", "value", "spread", "unit") if name in header] == header.split()[1::2][:5]
    decode = next(line for line in lines if "decode" in line)
    assert decode.replace("│", " ").split() == ["decode", "8", "39.23", "0.4", "ms"]
    assert any("12,345,670,000" in line for line in lines)


def test_each_bench_gets_a_table_of_its_own():
    other = Record(bench="cache", case="admit", value=1.0, unit="us", machine={}, versions={})
    lines = printed(print_table, [record("decode", 1.0), other])
    assert [line.strip() for line in lines if line.strip() in ("engine", "cache")] == ["engine", "cache"]


def test_two_files_are_compared_on_the_command_line(tmp_path, capsys):
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    with before.open("w") as file:
        print_json([record("decode", 40.0)], file)
    with after.open("w") as file:
        print_json([record("decode", 30.0)], file)
    assert main([str(before), str(after)]) == 0
    assert "0.750" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["missing.jsonl", "missing.jsonl"]])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
