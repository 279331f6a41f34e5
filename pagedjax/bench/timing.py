"""How long a function takes: every repeat is kept, the median and the interquartile range are reported.

Both shrug off the few repeats that another program on the machine disturbed. Importing this module imports no jax.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """The seconds that each repeat of a function took, in order.

    >>> timing = Measurement((0.010, 0.012, 0.011, 0.030))
    >>> timing.median_s, timing.best_s, timing.repeats
    (0.0115, 0.01, 4)
    """

    samples_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples_s:
            raise ValueError("samples_s is empty; a measurement has at least one repeat")

    @property
    def repeats(self) -> int:
        """Number of samples."""
        return len(self.samples_s)

    @property
    def median_s(self) -> float:
        """Median, seconds."""
        return statistics.median(self.samples_s)

    @property
    def best_s(self) -> float:
        """Shortest, seconds: what the machine does when nothing else runs on it."""
        return min(self.samples_s)

    @property
    def spread_s(self) -> float:
        """Interquartile range, seconds; 0 with one sample."""
        return interquartile_range(self.samples_s)


def interquartile_range(values: Sequence[float]) -> float:
    """Return the distance between the quartiles of `values`, interpolated linearly; 0 for one value.

    >>> interquartile_range([1.0, 2.0, 3.0, 4.0, 100.0])
    2.0
    """
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def measure(function: Callable[[], Any], *, repeats: int = 10, warmup: int = 1) -> Measurement:
    """Time `function` and return the seconds of each repeat.

    What the function returns is waited for if jax is loaded (`jax.block_until_ready`), inside the measured time.

    Args:
      function: takes nothing; a compiled jax function belongs behind a `functools.partial`.
      repeats: number of timed calls, at least 1.
      warmup: number of calls before that, untimed: they compile and fill caches.

    Raises:
      ValueError: repeats is below 1 or warmup below 0.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}; they must be at least 1 and 0")
    wait = sys.modules["jax"].block_until_ready if "jax" in sys.modules else lambda result: result
    samples = []
    for index in range(warmup + repeats):
        start = time.perf_counter()
        wait(function())
        if index >= warmup:
            samples.append(time.perf_counter() - start)
    return Measurement(tuple(samples))
