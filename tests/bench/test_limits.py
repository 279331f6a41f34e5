"""The floor: every form computes the same products, nothing is optimised away, and the figures are plausible."""

import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.bench import limits
from pagedjax.bench.limits import MIB, ProductsAlone, fastest_read, read_bandwidth

LAYER = [(24, 40), (24, 24), (24, 128), (64, 24)]  # fused q/k/v, output, fused gate/up, down


@pytest.mark.parametrize("form", limits._FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_form_is_the_same_product(form: str, dtype: str):
    how = limits._FORMS[form]
    rows, out = next((rows, out) for rows in (5, 1) for out in (40, 9000) if how.applies(rows, out))
    x, w = (np.random.default_rng(seed).standard_normal(shape) for seed, shape in enumerate(((rows, 24), (24, out))))
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    found = np.asarray(how.product(x, how.store(w)), np.float64)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_the_chain_takes_leading_rows_and_columns_and_repeats_columns_that_are_missing():
    plain = limits._FORMS["x[rows, in] @ w[in, out]"]
    products = [(3, 4, 6), (3, 5, 2), (1, 4, 4)]
    weights = [np.random.default_rng(seed).standard_normal(shape[1:]) for seed, shape in enumerate(products)]
    x = np.random.default_rng(9).standard_normal((3, 4))
    found = limits._chain([(product, plain) for product in products], jnp.asarray(x), list(map(jnp.asarray, weights)))
    narrow = (x @ weights[0])[:, :5] @ weights[1]
    expected = np.tile(narrow[:1], (1, 2)) @ weights[2]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("form", limits._FORMS)
def test_no_product_is_optimised_away(form: str):
    how = limits._FORMS[form]
    rows = 5 if how.applies(5, 9000) else 1
    products = [(rows, *shape) for shape in [*LAYER, *LAYER, (24, 9000)]]
    x = jnp.ones((rows, 24))
    weights = [how.store(jnp.ones(shape)) for _, *shape in products]
    chain = jax.jit(partial(limits._chain, [(product, how) for product in products]))
    counted = chain.lower(x, weights).compile().cost_analysis()["flops"]
    assert counted >= sum(2 * rows * size_in * size_out for _, size_in, size_out in products)


def test_products_report_operations_bytes_and_the_form_of_each_shape():
    found = ProductsAlone([*LAYER, *LAYER, (24, 512)], 5, "bfloat16", head_rows=1, form_repeats=2)
    layer = sum(size_in * size_out for size_in, size_out in LAYER)
    assert found.flops == 2 * 2 * 5 * layer + 2 * 24 * 512
    assert found.weight_bytes == 2 * (2 * layer + 24 * 512)
    assert set(found.forms) == {*((5, *shape) for shape in LAYER), (1, 24, 512)}
    assert set(found.forms.values()) <= set(limits._FORMS)
    assert found.measure(repeats=3).repeats == 3


def test_products_of_one_row_cost_at_least_the_reading_of_their_weights():
    found = ProductsAlone([(2048, 2048)] * 4, 1, "float32", form_repeats=2)
    assert found.weight_bytes == 64 * MIB
    assert min(found.time_s() for _ in range(3)) > found.weight_bytes / 10e12  # no device here reads 10 TB/s


def test_the_head_takes_all_rows_unless_told_otherwise():
    assert set(ProductsAlone([(4, 4), (4, 8)], 3, "float32", form_repeats=1).forms) == {(3, 4, 4), (3, 4, 8)}


@pytest.mark.parametrize(
    ("shapes", "rows", "head_rows", "message"),
    [
        ([], 1, None, "shapes is empty"),
        ([(4, 4)], 0, None, "head_rows is 0 and rows 0"),
        ([(4, 4), (4, 4)], 2, 3, "head_rows is 3 and rows 2"),
    ],
)
def test_products_that_cannot_be_chained_are_refused(shapes, rows, head_rows, message: str):
    with pytest.raises(ValueError, match=message):
        ProductsAlone(shapes, rows, "float32", head_rows=head_rows)


@pytest.mark.parametrize("num_bytes", [0, -64 * MIB, 100 * MIB])
def test_a_size_that_does_not_divide_into_the_forms_is_refused(num_bytes: int):
    with pytest.raises(ValueError, match="it must be a positive multiple of 67,108,864"):
        read_bandwidth(num_bytes=num_bytes)


def test_every_way_of_reading_reads_all_of_the_array():
    x = jnp.arange(16 * MIB, dtype=jnp.float32) % 7
    for form, read in limits._READS.items():
        total = np.asarray(jax.jit(read)(x), np.float64).sum()
        np.testing.assert_allclose(total, float(np.asarray(x, np.float64).sum()), rtol=1e-4, err_msg=form)


def best_threaded_read(num_bytes: int, num_threads: int, repeats: int = 10) -> float:
    """Bytes/s at which NumPy reads an array, each thread a part."""
    parts = np.array_split(np.ones(num_bytes // 8), num_threads)
    best = np.inf
    for _ in range(repeats):
        threads = [threading.Thread(target=np.max, args=(part,)) for part in parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compares with NumPy, which reads the host's memory")
def test_bandwidth_is_not_below_what_numpy_reads_with_threads():
    numpy_reads = max(best_threaded_read(512 * MIB, num_threads) for num_threads in (1, 2, 4))
    found = fastest_read()
    assert found.bytes_per_s == 512 * MIB / found.measurement.best_s
    assert found.bytes_per_s > 0.8 * numpy_reads
