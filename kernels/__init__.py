"""Device-side kernels that read and write pages: one folder a backend, and a NumPy oracle.

Nothing here knows of engines, modules or requests: arrays go in, arrays come out. ``xla`` is plain ``jax.numpy``
and runs wherever XLA does; ``reference`` is float64 NumPy with plain loops, which the tests hold the others to.
"""
