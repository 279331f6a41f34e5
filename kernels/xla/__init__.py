"""The backend in plain ``jax.numpy``: what CPUs run, and every machine that has no kernel of its own."""

from pagedjax.kernels.xla.attention import paged_attention
from pagedjax.kernels.xla.copy import copy_blocks
from pagedjax.kernels.xla.write import quantize, write_kv, write_quantized_kv

__all__ = ["copy_blocks", "paged_attention", "quantize", "write_kv", "write_quantized_kv"]
