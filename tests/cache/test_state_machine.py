"""Every operation of the manager in any order, against a cache that stores every token (`cache_simulation`).

The default run is short; ``-m slow`` does 200,000 operations, and PAGEDJAX_CACHE_OPERATIONS sets any other number.
"""

import os

import numpy as np
import pytest
from cache_simulation import Simulation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from pagedjax.cache import ChunkedLocal, FullAttention, Recurrent, SlidingWindow

KINDS = {
    "full": (FullAttention(),),
    "sliding_window": (SlidingWindow(6),),
    "window_with_sinks": (SlidingWindow(5, sink_tokens=3),),
    "recurrent": (Recurrent(),),
    "full_and_window": (FullAttention(), SlidingWindow(7)),
    "full_and_recurrent": (FullAttention(), Recurrent()),
    "full_and_chunked": (FullAttention(), ChunkedLocal(8)),
}
ARGUMENT = st.integers(0, 2**36 - 1)
STEPS = 100


class ManagerMachine(RuleBasedStateMachine):
    """One rule for each operation; what must hold is checked after each."""

    kinds = KINDS["full"]
    num_operations = 0

    @initialize(
        num_blocks=st.integers(2, 40),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        min_partial_hit=st.sampled_from([1, 1, 2]),
        min_leader_gain=st.sampled_from([1, 4]),
        caching=st.sampled_from([True, True, True, False]),
        events=st.booleans(),  # without events the index takes shortcuts
    )
    def start(self, num_blocks, block_size, min_partial_hit, min_leader_gain, caching, events):
        self.simulation = Simulation(
            num_blocks,
            block_size,
            kinds=self.kinds,
            min_partial_hit=min_partial_hit,
            min_leader_gain=min_leader_gain,
            enable_prefix_caching=caching,
            events=events,
        )

    def do(self, name: str, argument: int) -> None:
        try:
            getattr(self.simulation, name)(argument)
            self.simulation.verify()
        except AssertionError as error:
            error.add_note(self.simulation.m.snapshot().text())
            raise
        type(self).num_operations += 1


def add_rule(name: str, weight: int) -> None:
    for copy in range(weight):

        def operate(self, argument, name=name):
            self.do(name, argument)

        operate.__name__ = f"{name}_{copy}" if copy else name
        setattr(ManagerMachine, operate.__name__, rule(argument=ARGUMENT)(operate))


for each in dict.fromkeys(Simulation.OPS):
    add_rule(each, Simulation.OPS.count(each))


def run(kinds: tuple, operations: int) -> int:
    """Runs about so many operations; returns how many there were."""
    machine = type("Machine", (ManagerMachine,), {"kinds": kinds, "num_operations": 0})
    while machine.num_operations < operations:
        examples = max(10, (operations - machine.num_operations) // STEPS + 1)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    return machine.num_operations


@pytest.mark.parametrize("name", KINDS)
def test_any_sequence_of_operations_keeps_every_promise(name):
    assert run(KINDS[name], 1_000) >= 1_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "sliding_window", "recurrent", "full_and_window"])
def test_two_hundred_thousand_operations(name):
    operations = int(os.environ.get("PAGEDJAX_CACHE_OPERATIONS", "200000")) // 4
    assert run(KINDS[name], operations) >= operations


@pytest.mark.parametrize("name", KINDS)
def test_random_programs(name):
    """The same operations drawn without hypothesis, which is quicker: longer programs, no shrinking."""
    done = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        num_blocks, block_size = int(rng.integers(2, 41)), int(rng.choice([1, 2, 4, 8]))
        simulation = Simulation(num_blocks, block_size, kinds=KINDS[name], events=seed % 2 == 0)
        for code in rng.integers(0, 2**40, 150).tolist():
            simulation.do(code)
        done += simulation.num_ops
    assert done == 12 * 150
