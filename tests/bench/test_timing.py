"""Timing: what is counted, what is not, and what the figures say."""

import statistics
import time

import jax
import numpy as np
import pytest

from pagedjax.bench import Measurement, measure
from pagedjax.bench.timing import interquartile_range


def test_warmup_calls_are_made_but_not_counted():
    calls = []

    def function() -> None:
        calls.append(None)
        time.sleep(0.05 if len(calls) <= 2 else 0)

    timing = measure(function, repeats=5, warmup=2)
    assert len(calls) == 7
    assert timing.repeats == 5
    assert timing.median_s < 0.05


def test_what_jax_still_computes_is_waited_for():
    class Computing:
        def block_until_ready(self) -> "Computing":
            time.sleep(0.02)
            return self

    timing = measure(lambda: {"tokens": Computing(), "other": jax.numpy.zeros(3)}, repeats=3)
    assert timing.best_s >= 0.02


def test_median_and_quartiles_ignore_a_disturbed_repeat():
    calm = Measurement((1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6))
    disturbed = Measurement((1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 90.0))
    assert (disturbed.median_s, disturbed.spread_s) == (calm.median_s, calm.spread_s)
    assert disturbed.best_s == 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
def test_interquartile_range_is_numpys(size: int):
    values = np.random.default_rng(size).lognormal(size=size)
    expected = np.subtract(*np.percentile(values, [75, 25]))
    assert interquartile_range(list(values)) == pytest.approx(expected)
    assert Measurement(tuple(values)).median_s == statistics.median(values)


def test_no_repeats_are_refused():
    with pytest.raises(ValueError, match="repeats is 0"):
        measure(lambda: None, repeats=0)
    with pytest.raises(ValueError, match="warmup -1"):
        measure(lambda: None, warmup=-1)
    with pytest.raises(ValueError, match="samples_s is empty"):
        Measurement(())
