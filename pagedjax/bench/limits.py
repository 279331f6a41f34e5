"""What the machine could do at best: the floor that a step's time is compared with.

Two limits are measured, not looked up: how fast memory is read, and how long a model's matrix products take alone. A
decode step cannot be faster than its products plus the reading of its KV; what it takes beyond that is ours to remove.
A floor that is too high flatters, so each limit is tried in several forms and the fastest counts, whatever the form.
All of it runs on jax's default device.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.bench.timing import Measurement, measure

MIB = 1 << 20


@dataclass(frozen=True)
class ReadBandwidth:
    """How fast memory is read.

    Attributes:
      bytes_per_s: of the fastest form's best repeat.
      form: which form that was.
      measurement: its repeats, each a pass over `num_bytes`.
      num_bytes: size of the array.
    """

    bytes_per_s: float
    form: str
    measurement: Measurement
    num_bytes: int


def _read_in_order(x: jax.Array) -> jax.Array:
    return jnp.sum(x)


def _read_in_two_columns(x: jax.Array) -> jax.Array:
    return jnp.sum(x.reshape(2, -1, 1024), axis=1)


def _times_vector(x: jax.Array) -> jax.Array:
    return x.reshape(-1, 8192) @ jnp.ones(8192, x.dtype)


def _vector_times(x: jax.Array) -> jax.Array:
    return jnp.ones(8192, x.dtype) @ x.reshape(8192, -1)


_READS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "sum": _read_in_order,
    "sum of two columns": _read_in_two_columns,
    "matrix times vector": _times_vector,
    "vector times matrix": _vector_times,
}


def read_bandwidth(*, num_bytes: int = 512 * MIB, repeats: int = 15) -> float:
    """Return the bytes/s at which the device reads its memory at best; see `fastest_read`."""
    return fastest_read(num_bytes=num_bytes, repeats=repeats).bytes_per_s


def fastest_read(*, num_bytes: int = 512 * MIB, repeats: int = 15) -> ReadBandwidth:
    """Measure how fast the device reads its memory: one float32 array, read once, by the fastest of several reductions.

    On a CPU XLA's plain sum is bound by its additions and reads on one core: hence the products with a vector.

    Args:
      num_bytes: size of the array, bytes; far larger than the caches, or they are what is measured.
      repeats: passes of each form; the best one counts.

    Raises:
      ValueError: num_bytes is no positive multiple of 64 MiB.
    """
    if num_bytes < 1 or num_bytes % (64 * MIB):
        raise ValueError(f"num_bytes is {num_bytes:,}; it must be a positive multiple of {64 * MIB:,}")
    x = jax.block_until_ready(jnp.ones(num_bytes // 4, jnp.float32))
    timed = _race({form: partial(jax.jit(read), x) for form, read in _READS.items()}, repeats)
    form = _fastest(timed)
    return ReadBandwidth(num_bytes / timed[form].best_s, form, timed[form], num_bytes)


@dataclass(frozen=True)
class _Form:
    """A way to compute x[rows, in] times a weight.

    Attributes:
      product: x[rows, in] and the stored weight -> [rows, out].
      store: w[in, out] -> what is kept of it instead.
      applies: rows and out -> whether the form is worth trying.
    """

    product: Callable[[jax.Array, Any], jax.Array]
    store: Callable[[jax.Array], Any]
    applies: Callable[[int, int], bool] = lambda rows, out: True


_PIECE = 4096  # columns


def _contract(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), precision=precision)


def _in_out(w: jax.Array) -> jax.Array:
    return w


def _out_in(w: jax.Array) -> jax.Array:
    return jnp.array(w.T, copy=True)


def _pieces(w: jax.Array) -> list[jax.Array]:
    return [jnp.array(w[:, start : start + _PIECE].T, copy=True) for start in range(0, w.shape[1], _PIECE)]


def _times_pieces(x: jax.Array, pieces: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([_contract(piece, x, 1, 1) for piece in pieces]).T


def _as_two_rows(form: _Form) -> _Form:
    """One row computed as two, the second one zero: for bfloat16 XLA's product of one row is slow on a CPU."""

    def product(x: jax.Array, w: Any) -> jax.Array:
        return form.product(jnp.pad(x, ((0, 1), (0, 0))), w)[:1]

    return _Form(product, form.store, lambda rows, out: rows == 1 and form.applies(rows, out))


def _is_head(rows: int, out: int) -> bool:
    """Whether a product is as wide as a vocabulary: its weights may be kept in any form, those of layers not."""
    return out > _PIECE


_FORMS: dict[str, _Form] = {
    "x[rows, in] @ w[in, out]": _Form(lambda x, w: _contract(x, w, 1, 0), _in_out),
    "(w[in, out].T @ x.T).T": _Form(lambda x, w: _contract(w, x, 0, 1).T, _in_out),
    "x[rows, in] @ w[out, in].T": _Form(lambda x, w: _contract(x, w, 1, 1), _out_in, _is_head),
    "(w[out, in] @ x.T).T": _Form(lambda x, w: _contract(w, x, 1, 1).T, _out_in, _is_head),
    "(w[out, in] @ x.T).T in pieces": _Form(_times_pieces, _pieces, _is_head),
}
_FORMS |= {f"{name}, as two rows": _as_two_rows(form) for name, form in _FORMS.items()}


class ProductsAlone:
    """The matrix products of a model and nothing else, in one compiled call that reads each weight once.

    The products are chained as in a model: each takes the leading columns of the one before (behind an optimisation
    barrier, so that none of its columns is dropped). For each shape several forms are timed on as many weights, once in
    a process, and the call is made of the fastest ones. float32 products have precision HIGHEST.

    Attributes:
      forms: for each (rows, in, out), the form that was fastest.
      flops: operations of one call; a multiply-add counts two.
      weight_bytes: bytes of all the weights.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        rows: int,
        dtype: str,
        *,
        head_rows: int | None = None,
        form_repeats: int = 5,
    ) -> None:
        """Make random weights, choose the forms and compile: this takes seconds.

        Args:
          shapes: (in, out) of each weight, in order.
          rows: rows of x.
          dtype: of x and the weights: the name, such as ``bfloat16``.
          head_rows: rows that the last product takes; all of them by default.
          form_repeats: how often each form is timed before one is chosen.

        Raises:
          ValueError: there are no shapes, or the rows do not fit.
        """
        head_rows = rows if head_rows is None else head_rows
        if not shapes:
            raise ValueError("shapes is empty; there is no product to time")
        if not 1 <= head_rows <= rows:
            raise ValueError(
                f"head_rows is {head_rows} and rows {rows}; both must be at least 1, and head_rows at most rows"
            )
        products = [(rows, *shape) for shape in shapes[:-1]] + [(head_rows, *shapes[-1])]
        counts = Counter(products)
        self.forms = {product: _fastest_form(product, count, dtype, form_repeats) for product, count in counts.items()}
        weights = [
            _FORMS[self.forms[product]].store(_weight(index, product[1:], dtype))
            for index, product in enumerate(products)
        ]
        self.flops = sum(2 * num_rows * size_in * size_out for num_rows, size_in, size_out in products)
        self.weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        chain = jax.jit(partial(_chain, [(product, _FORMS[self.forms[product]]) for product in products]))
        self._call = partial(chain, _inputs(products[0], dtype), weights)
        jax.block_until_ready(self._call())

    def time_s(self) -> float:
        """Return the seconds of one call, waited for."""
        return self.measure(repeats=1).best_s

    def measure(self, *, repeats: int) -> Measurement:
        """Return the seconds of several calls."""
        return measure(self._call, repeats=repeats, warmup=0)


def _weight(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, scaled so that products keep the scale of their input: nothing overflows or denormalises."""
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * shape[0] ** -0.5).astype(dtype)


def _inputs(product: tuple[int, int, int], dtype: str) -> jax.Array:
    num_rows, size_in, _ = product
    return jax.random.normal(jax.random.key(0), (num_rows, size_in), jnp.float32).astype(dtype)


@cache
def _fastest_form(product: tuple[int, int, int], num_weights: int, dtype: str, repeats: int) -> str:
    """Return the form that computes that many products of one shape, each with its own weight, in the least time."""
    weights = [_weight(index, product[1:], dtype) for index in range(num_weights)]
    x = _inputs(product, dtype)
    stored: dict[Callable[[jax.Array], Any], list[Any]] = {}
    calls = {}
    for name, form in _FORMS.items():
        if form.applies(product[0], product[2]):
            if form.store not in stored:
                stored[form.store] = [form.store(weight) for weight in weights]
            chain = jax.jit(partial(_chain, [(product, form)] * num_weights))
            calls[name] = partial(chain, x, stored[form.store])
    return _fastest(_race(calls, repeats))


def _chain(plan: Sequence[tuple[tuple[int, int, int], _Form]], x: jax.Array, weights: Sequence[Any]) -> jax.Array:
    """Each product of the leading rows and columns of the one before; columns repeat where there are too few."""
    for ((num_rows, size_in, _), form), weight in zip(plan, weights, strict=True):
        if x.shape[1] < size_in:
            x = jnp.tile(x, (1, -(-size_in // x.shape[1])))
        x = lax.optimization_barrier(form.product(x[:num_rows, :size_in], weight))
    return x


def _race(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Measurement]:
    """Time each call `repeats` times, in turn, so that a disturbance hits all of them."""
    for call in calls.values():
        jax.block_until_ready(call())
    samples: dict[str, tuple[float, ...]] = dict.fromkeys(calls, ())
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name] += measure(call, repeats=1, warmup=0).samples_s
    return {name: Measurement(taken) for name, taken in samples.items()}


def _fastest(timed: Mapping[str, Measurement]) -> str:
    return min(timed, key=lambda name: timed[name].best_s)
