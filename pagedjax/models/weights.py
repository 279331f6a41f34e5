"""Fills the parameters of a `Llama` from a file of weights, one slice of rows at a time.

A plan says for every parameter which rows of which tensors become which of its columns. Each parameter is allocated once, in the
target's dtype, at an address that the CPU backend takes over without a copy; the slices that are read,
dequantised, cast and transposed on the way are about a megabyte. So memory peaks at the target's size plus little.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import numpy as np
from flax import nnx

from pagedjax.models.config import ModelConfig
from pagedjax.models.errors import LoadError
from pagedjax.models.llama import Llama, gate_up_width
from pagedjax.models.tensor_file import TensorFile

__all__ = ["GGUF_NAMES", "HF_NAMES", "TensorNames", "fill_model"]

_SLICE_ROWS = 64  # a slice is transposed in the cache: 0.62 ms for 1536 x 576 float32 against 0.88 ms at once
_ALIGNMENT_BYTES = 64  # what XLA's CPU backend asks of a buffer to take it over as it is


@dataclass(frozen=True)
class TensorNames:
    """What a format calls the tensors; ``{}`` stands for the number of the layer.

    Attributes:
        permuted: rows of q and k come in the order of interleaved RoPE, pair by pair, instead of halves.
        ignored: tensors that say nothing more than the config does.
    """

    embedding: str
    norm: str
    head: str
    attention_norm: str
    q: str
    k: str
    v: str
    out: str
    feed_forward_norm: str
    gate: str
    up: str
    down: str
    permuted: bool
    ignored: tuple[str, ...] = ()


GGUF_NAMES = TensorNames(
    embedding="token_embd.weight",
    norm="output_norm.weight",
    head="output.weight",
    attention_norm="blk.{}.attn_norm.weight",
    q="blk.{}.attn_q.weight",
    k="blk.{}.attn_k.weight",
    v="blk.{}.attn_v.weight",
    out="blk.{}.attn_output.weight",
    feed_forward_norm="blk.{}.ffn_norm.weight",
    gate="blk.{}.ffn_gate.weight",
    up="blk.{}.ffn_up.weight",
    down="blk.{}.ffn_down.weight",
    permuted=True,
    ignored=("rope_freqs.weight",),  # read into ModelConfig.rope_factors
)
HF_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm="model.layers.{}.input_layernorm.weight",
    q="model.layers.{}.self_attn.q_proj.weight",
    k="model.layers.{}.self_attn.k_proj.weight",
    v="model.layers.{}.self_attn.v_proj.weight",
    out="model.layers.{}.self_attn.o_proj.weight",
    feed_forward_norm="model.layers.{}.post_attention_layernorm.weight",
    gate="model.layers.{}.mlp.gate_proj.weight",
    up="model.layers.{}.mlp.up_proj.weight",
    down="model.layers.{}.mlp.down_proj.weight",
    permuted=False,
    ignored=("model.layers.{}.self_attn.rotary_emb.inv_freq",),  # follows from rope_theta
)


@dataclass(frozen=True)
class _Piece:
    """Rows ``start:start + count`` of a tensor become the columns (or rows) of a parameter from `place` on."""

    tensor: str
    start: int
    count: int
    place: int
    pair_dim: int = 0  # head_dim where the rows of each head are ordered pair by pair


@dataclass(frozen=True)
class _Filling:
    """How one parameter is filled."""

    param: nnx.Param
    pieces: list[_Piece]
    transposed: bool


@dataclass
class _Plan:
    fillings: list[_Filling] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # what each tensor must look like

    def add(self, param: nnx.Param, *pieces: _Piece, transposed: bool = False) -> None:
        self.fillings.append(_Filling(param, list(pieces), transposed))

    def vector(self, param: nnx.Param, name: str) -> None:
        self.shapes[name] = param.get_value().shape
        self.add(param, _Piece(name, 0, self.shapes[name][0], 0))

    def matrix(self, param: nnx.Param, name: str) -> None:
        columns, rows = param.get_value().shape
        self.shapes[name] = (rows, columns)
        self.add(param, _Piece(name, 0, rows, 0), transposed=True)


def _plan(model: Llama, names: TensorNames) -> _Plan:
    config, plan = model.config, _Plan()
    plan.vector(model.norm.weight, names.norm)
    plan.shapes[names.embedding] = (config.vocab_size, config.hidden_size)
    plan.add(model.embedding, _Piece(names.embedding, 0, config.vocab_size, 0))
    if model.lm_head is not None:
        plan.matrix(model.lm_head, names.head)
    for index, layer in enumerate(model.layers):
        plan.vector(layer.attention_norm.weight, names.attention_norm.format(index))
        plan.vector(layer.feed_forward_norm.weight, names.feed_forward_norm.format(index))
        plan.matrix(layer.attention.out, names.out.format(index))
        plan.matrix(layer.feed_forward.down, names.down.format(index))
        q, k, v = (name.format(index) for name in (names.q, names.k, names.v))
        dim, queries = config.head_dim, config.num_heads // config.num_kv_heads * config.head_dim
        plan.shapes[q] = (config.num_heads * dim, config.hidden_size)
        plan.shapes[k] = plan.shapes[v] = (config.num_kv_heads * dim, config.hidden_size)
        pair_dim = dim if names.permuted else 0
        pieces = []
        for head in range(config.num_kv_heads):
            place = head * (queries + 2 * dim)
            pieces.append(_Piece(q, head * queries, queries, place, pair_dim))
            pieces.append(_Piece(k, head * dim, dim, place + queries, pair_dim))
            pieces.append(_Piece(v, head * dim, dim, place + queries + dim))
        plan.add(layer.attention.qkv, *pieces, transposed=True)
        gate, up = names.gate.format(index), names.up.format(index)
        plan.shapes[gate] = plan.shapes[up] = (config.intermediate_size, config.hidden_size)
        width = gate_up_width(config.intermediate_size)
        pieces = []
        for start in range(0, config.intermediate_size, width):
            pieces.append(_Piece(gate, start, width, 2 * start))
            pieces.append(_Piece(up, start, width, 2 * start + width))
        plan.add(layer.feed_forward.gate_up, *pieces, transposed=True)
    return plan


def _check(file: TensorFile, plan: _Plan, names: TensorNames, config: ModelConfig) -> None:
    """Raises one LoadError that names every tensor that is missing, surplus or of the wrong shape."""
    ignored = {name.format(layer) for name in names.ignored for layer in range(config.num_layers)}
    if config.tie_embeddings:
        ignored.add(names.head)  # some files repeat the embedding; what is tied is said by the config
    complaints = []
    missing = [name for name in plan.shapes if name not in file.tensors]
    surplus = [name for name in file.tensors if name not in plan.shapes and name not in ignored]
    if missing:
        complaints.append(f"missing: {', '.join(missing)}")
    if surplus:
        complaints.append(f"not known to the model: {', '.join(surplus)}")
    wrong = [
        f"{name} is {list(file.tensors[name].shape)} but must be {list(shape)}"
        for name, shape in plan.shapes.items()
        if name in file.tensors and file.tensors[name].shape != shape
    ]
    if wrong:
        complaints.append(f"wrong shape: {', '.join(wrong)}")
    if complaints:
        raise LoadError(f"{file.path}: the tensors do not fit the config; {'; '.join(complaints)}")


def _allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[offset : offset + num_bytes].view(dtype).reshape(shape)


def _slices(piece: _Piece) -> Iterator[tuple[int, int]]:
    step = _SLICE_ROWS
    if piece.pair_dim:
        step = max(1, _SLICE_ROWS // piece.pair_dim) * piece.pair_dim
    for start in range(0, piece.count, step):
        yield start, min(piece.count, start + step)


def _fill(file: TensorFile, filling: _Filling) -> jax.Array:
    wanted = filling.param.get_value()
    target = _allocate(wanted.shape, np.dtype(wanted.dtype))
    # NumPy moves integers faster than the two-byte floats of ml_dtypes
    raw = target.view(np.dtype(f"u{target.dtype.itemsize}"))
    for piece in filling.pieces:
        for start, stop in _slices(piece):
            rows = file.read_rows(piece.tensor, piece.start + start, piece.start + stop).astype(
                target.dtype, copy=False
            )
            bits = rows.view(raw.dtype)
            if piece.pair_dim:
                half = piece.pair_dim // 2
                bits = bits.reshape(-1, half, 2, bits.shape[-1]).swapaxes(1, 2).reshape(bits.shape)
            span = slice(piece.place + start, piece.place + stop)
            if filling.transposed:
                raw[:, span] = bits.T
            else:
                raw[span] = bits
    return jax.device_put(target)


def fill_model(
    model: Llama, file: TensorFile, names: TensorNames, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Reads all parameters of `model` from `file`, cast to the dtype that each of them has.

    Args:
        model: made without `rngs`: its parameters are shapes.
        file: the weights; stays open.
        names: what the file calls the tensors.
        progress: called with (bytes filled, bytes in all) after each parameter.

    Raises:
        LoadError: tensors that are missing, surplus, wrongly shaped or in a format that cannot be read.
    """
    plan = _plan(model, names)
    _check(file, plan, names, model.config)
    sizes = [int(np.prod(f.param.get_value().shape)) * f.param.get_value().dtype.itemsize for f in plan.fillings]
    done = 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            arrays = pool.map(lambda filling: _fill(file, filling), plan.fillings)
            for filling, size, array in zip(plan.fillings, sizes, arrays, strict=True):
                filling.param.set_value(array)
                done += size
                if progress is not None:
                    progress(done, sum(sizes))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
