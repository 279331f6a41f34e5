"""Many small host arrays in one: a named layout over a flat ``int32`` buffer.

A step ships a dozen small arrays to the device. Each would cost a transfer of its own; packed into one buffer
they cost one, and the compiled step takes them apart with static slices. Floats travel as their bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Field:
    """An array of the layout: its shape, whether it holds float32, and what fills it where nothing is set."""

    shape: tuple[int, ...]
    is_float: bool = False
    fill: float = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout:
    """Where each named array lies in the buffer.

    >>> layout = Layout({"ids": Field((2, 2), fill=-1), "scale": Field((1,), is_float=True, fill=0.5)})
    >>> buffer = layout.empty()
    >>> layout.view(buffer, "ids")[0] = 7
    >>> {name: array.tolist() for name, array in layout.unpack(jnp.asarray(buffer)).items()}
    {'ids': [[7, 7], [-1, -1]], 'scale': [0.5]}
    """

    def __init__(self, fields: Mapping[str, Field]):
        self.fields = dict(fields)
        self._start: dict[str, int] = {}
        position = 0
        for name, field in self.fields.items():
            self._start[name] = position
            position += field.size
        self.size = position
        self._template = np.zeros(self.size, np.int32)
        for name, field in self.fields.items():
            self.view(self._template, name)[...] = field.fill

    def empty(self) -> np.ndarray:
        """A new buffer, int32 ``[size]``, every field filled with its fill value."""
        return self._template.copy()

    def view(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """The named array inside `buffer`, to be written to."""
        field, start = self.fields[name], self._start[name]
        part = buffer[start : start + field.size]
        return (part.view(np.float32) if field.is_float else part).reshape(field.shape)

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """All arrays, inside a compiled step."""
        arrays = {}
        for name, field in self.fields.items():
            part = lax.slice_in_dim(buffer, self._start[name], self._start[name] + field.size)
            part = lax.bitcast_convert_type(part, jnp.float32) if field.is_float else part
            arrays[name] = part.reshape(field.shape)
        return arrays
