"""Names for content: a chain of SHA-256 hashes, one for each whole block of a sequence.

The hash of a block covers the hash of the block before it, the block's tokens as little-endian int32 and the extra keys
that touch it, so it names the whole prefix and is the same in every process. The chain starts at a *root*, which
carries the cache salt, the adapter, the epoch of the weights and the block size. Every extra key is written with a
tag and its length: no two kinds of key, nor two values of one kind, can produce the same bytes.

The hash is cryptographic because a look-up trusts it: whoever can make two prompts collide reads another user's
cache. A faster hash without that property would save about 0.3 µs a block; we do not offer one.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Tokens = NDArray[np.int32]
Span = tuple[int, int, bytes]
_sha256 = hashlib.sha256


@dataclass(frozen=True)
class ExtraKeys:
    """What must agree, besides the tokens, before one request may use the cache of another.

    Attributes:
        salt: separates tenants: requests with different salts share nothing.
        adapter: name of a LoRA adapter, or ``(name, revision)``.
        spans: ``(start, end, digest)``: the tokens ``start … end - 1`` stand for an image or for embeddings with this
            digest (bytes). Sorted and disjoint. Reuse ends before the first token of a span that differs.
    """

    salt: str | bytes | None = None
    adapter: str | tuple[str, str] | None = None
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        end_before = 0
        for start, end, digest in self.spans:
            if not (end_before <= start < end and isinstance(digest, bytes)):
                raise ValueError(
                    f"span ({start}, {end}, {digest!r}) must begin at or after {end_before}, end after it begins and "
                    "have a digest of bytes; spans are sorted and disjoint"
                )
            end_before = end


NO_KEYS = ExtraKeys()


def _field(tag: bytes, value: str | bytes | int) -> bytes:
    """``value`` with its tag, its type and its length, so that a sequence of fields can be read only one way."""
    if isinstance(value, int):
        value, kind = value.to_bytes(8, "little", signed=True), b"i"
    elif isinstance(value, str):
        value, kind = value.encode("utf-8", "surrogatepass"), b"s"
    else:
        kind = b"b"
    return tag + kind + len(value).to_bytes(8, "little") + value


def root_hash(keys: ExtraKeys, epoch: int, block_size: int) -> bytes:
    """The start of a hash chain: 32 bytes."""
    data = b"pagedjax.cache.1" + _field(b"B", block_size) + _field(b"E", epoch)
    if keys.salt is not None:
        data += _field(b"S", keys.salt)
    if keys.adapter is not None:
        name, revision = (keys.adapter, None) if isinstance(keys.adapter, str) else keys.adapter
        data += _field(b"A", name)
        if revision is not None:
            data += _field(b"R", revision)
    return _sha256(data).digest()


def hash_block(parent: bytes, token_bytes: bytes, extra: bytes = b"") -> bytes:
    """The hash (32 bytes) of a block after ``parent``; ``extra`` is what `span_bytes` says of it."""
    return _sha256(parent + token_bytes + extra).digest()


def hash_chain(root: bytes, blocks: list[bytes]) -> list[bytes]:
    """Hashes of consecutive whole blocks without spans; ``blocks`` holds the bytes of each one's tokens."""
    sha256 = _sha256
    parent = root
    return [parent := sha256(parent + block).digest() for block in blocks]


def as_tokens(tokens: ArrayLike) -> Tokens:
    """``tokens`` as a contiguous int32 array [num_tokens]. An int32 array costs nothing, a long list a lot."""
    array = np.ascontiguousarray(tokens, dtype=np.int32)
    if array.ndim != 1:
        raise ValueError(f"tokens has shape {array.shape} but must have one axis, [num_tokens]")
    return array


def block_bytes(tokens: Tokens, block_size: int) -> list[bytes]:
    """The bytes of each whole block of ``tokens`` [num_tokens]."""
    whole = tokens.size // block_size * block_size
    return tokens[:whole].view(np.dtype(("V", 4 * block_size))).tolist() if whole else []


def spans_in(spans: tuple[Span, ...], start: int, end: int) -> tuple[Span, ...]:
    """The spans that touch the tokens ``start … end - 1``, relative to ``start``. A begin may be negative; an end is
    cut off, since what comes later cannot matter.
    """
    return tuple((a - start, min(b, end) - start, digest) for a, b, digest in spans if a < end and b > start)


def span_bytes(spans: tuple[Span, ...]) -> bytes:
    """Relative spans as tagged bytes, for `hash_block`."""
    return b"".join(_field(b"F", a) + _field(b"T", b) + _field(b"D", digest) for a, b, digest in spans)


def common_span_run(ours: tuple[Span, ...], theirs: tuple[Span, ...], num_tokens: int) -> int:
    """How many of the first ``num_tokens`` tokens have the same extra key, given relative spans."""
    for at in range(num_tokens):
        if _key_at(ours, at) != _key_at(theirs, at):
            return at
    return num_tokens


def _key_at(spans: tuple[Span, ...], at: int) -> tuple[bytes, int] | None:
    return next(((digest, at - a) for a, b, digest in spans if a <= at < b), None)


def lookup_tokens(tokens: Tokens, spans: tuple[Span, ...]) -> Tokens:
    """A copy of ``tokens`` in which those under a span are replaced by negative numbers drawn from the digest, the
    position in the span and the token itself, so that comparing tokens nearly always compares the extra keys too.
    A prefix index that is searched by these still compares the keys themselves before it trusts a match.
    """
    mixed = tokens.copy()
    for start, end, digest in spans:
        seed = int.from_bytes(_sha256(b"span" + digest).digest()[:8], "little")
        at = np.arange(min(end, tokens.size) - start, dtype=np.uint64)
        code = (at + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        code ^= tokens[start:end].astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed[start:end] = ((code >> np.uint64(33)).astype(np.int64) - (1 << 31)).astype(np.int32)
    return mixed
