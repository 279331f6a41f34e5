"""What the host knows of each running sequence, one array element a row, so that a batch is one NumPy operation.

A row counts its tokens four ways. *Known*: the host has their ids. *Scheduled*: they are computed, or will be by the
step that is being put together. *Written*: the step that computes them has been dispatched. *Settled*: that step has
been read back, so it can no longer fail. A row whose ``num_scheduled`` stays below its ``limit`` needs no attention
at all: that one comparison is what makes a decode step cheap.
"""

import numpy as np
from numpy.typing import NDArray

from pagedjax.cache.hashing import Span, Tokens, common_span_run, spans_in
from pagedjax.cache.kinds import NEVER, cdiv

FREE = np.iinfo(np.int64).max


class Rows:
    """The rows ``0 … max_rows - 1``.

    Attributes:
        tokens: int32 ``[max_rows, width]``: known ids, those under a span replaced by look-up codes.
        limit: tokens up to which the row may grow without looking at its blocks; -1 if the row is free.
        version: grows whenever tokens that a look-up may have seen go, or move to another block.
        num_indexed: whole blocks at the front that have been given to the prefix index.
        index_at: written and known tokens at which the next block is whole; NEVER if the row is not indexed.
        open_parent: for each row the hash before its unfinished block; empty if nobody may look there.
        serial: when the row was taken: larger than that of any row taken before; FREE if the row is free.
        hashes: of the row's whole known blocks, at least of the indexed ones.
    """

    def __init__(self, max_rows: int, max_len: int, block_size: int) -> None:
        self.max_rows, self.max_len, self.block_size = max_rows, max_len, block_size
        self.max_blocks = cdiv(max_len, block_size)
        self.token_blocks = cdiv(max_len + 1, block_size)  # the last token may be known without ever being computed
        self.width = self.token_blocks * block_size
        self.tokens = np.zeros((max_rows, self.width), np.int32)
        self.flat_tokens = self.tokens.reshape(-1)
        self.block_tokens = self.flat_tokens.view(np.dtype(("V", 4 * block_size)))
        self.base = np.arange(max_rows, dtype=np.intp) * self.width
        self.num_scheduled = np.zeros(max_rows, np.int32)
        self.num_written = np.zeros(max_rows, np.int32)
        self.num_known = np.zeros(max_rows, np.int32)
        self.num_settled = np.zeros(max_rows, np.int32)
        self.num_indexed = np.zeros(max_rows, np.int32)
        self.limit = np.full(max_rows, -1, np.int32)
        self.index_at = np.full(max_rows, NEVER, np.int32)
        self.open_parent: list[bytes] = [b""] * max_rows
        self.serial = np.full(max_rows, FREE, np.int64)
        self.hashes: list[list[bytes]] = [[] for _ in range(max_rows)]
        self.roots: list[bytes] = [b""] * max_rows
        self.spans: list[tuple[Span, ...]] = [()] * max_rows
        self.true_tokens: dict[int, Tokens] = {}  # of rows with spans, whose `tokens` hold codes
        self.free = list(range(max_rows - 1, -1, -1))
        self.last_serial = 0
        self.num_given_back = 0
        self.version = 0

    def is_used(self, row: int) -> bool:
        return 0 <= row < self.max_rows and bool(self.serial[row] != FREE)

    @property
    def used(self) -> list[int]:
        return (self.serial != FREE).nonzero()[0].tolist()

    def take(self) -> int:
        row = self.free.pop()
        self.last_serial += 1
        self.serial[row] = self.last_serial
        return row

    def give_back(self, row: int) -> None:
        for array, value in (
            (self.num_scheduled, 0),
            (self.num_written, 0),
            (self.num_known, 0),
            (self.num_settled, 0),
            (self.num_indexed, 0),
            (self.limit, -1),
            (self.index_at, NEVER),
            (self.serial, FREE),
        ):
            array[row] = value
        self.open_parent[row] = b""
        self.hashes[row] = []
        self.spans[row] = ()
        self.true_tokens.pop(row, None)
        self.free.append(row)
        self.num_given_back += 1
        self.version += 1

    def start_indexing(self, row: int, root: bytes, hashes: list[bytes], num_indexed: int) -> None:
        """Says that the first ``num_indexed`` blocks are in the index and that the others shall follow."""
        self.roots[row] = root
        self.hashes[row] = hashes
        self.num_indexed[row] = num_indexed
        self.index_at[row] = (num_indexed + 1) * self.block_size
        self.open_parent[row] = self.parent(row, num_indexed)

    def stop_indexing(self, row: int) -> None:
        self.index_at[row] = NEVER
        self.open_parent[row] = b""

    def parent(self, row: int, block: int) -> bytes:
        """The hash before block ``block`` of the row."""
        return self.hashes[row][block - 1] if block else self.roots[row]

    def true_token_bytes(self, row: int, start: int, end: int) -> bytes:
        return self.true_tokens.get(row, self.tokens[row])[start:end].tobytes()

    def block_detail(self, row: int, start: int, end: int) -> tuple[bytes, tuple[Span, ...]] | None:
        """What the index must keep of the tokens ``start … end - 1`` besides their codes, if a span touches them."""
        spans = spans_in(self.spans[row], start, end) if self.spans[row] else ()
        return (self.true_token_bytes(row, start, end), spans) if spans else None

    def put_tokens(self, row: int, start: int, tokens: Tokens) -> None:
        """Writes known tokens that no span touches."""
        self.tokens[row, start : start + tokens.size] = tokens
        if row in self.true_tokens:
            self.true_tokens[row][start : start + tokens.size] = tokens

    def push(self, batch: NDArray[np.intp], ids: NDArray[np.int32]) -> None:
        """Appends one known token to each of several distinct rows."""
        known = self.num_known[batch]
        if known.max(initial=0) >= self.width:
            raise ValueError(
                f"row {batch[known.argmax()]} would know {known.max() + 1} tokens but max_len is {self.max_len}"
            )
        self.flat_tokens[self.base[batch] + known] = ids
        self.num_known[batch] = known + 1
        for row in self.true_tokens.keys() & set(batch.tolist()) if self.true_tokens else ():
            at = int(self.num_known[row]) - 1
            self.true_tokens[row][at] = self.tokens[row, at]

    def extend(self, batch: NDArray[np.intp], ids: NDArray[np.int32], counts: NDArray[np.intp]) -> None:
        """Appends the first ``counts[i]`` tokens of ``ids[i]`` to row ``batch[i]``."""
        for row, tokens, count in zip(batch.tolist(), ids, counts.tolist(), strict=True):
            known = int(self.num_known[row])
            if known + count > self.width:
                raise ValueError(f"row {row} would know {known + count} tokens but max_len is {self.max_len}")
            self.put_tokens(row, known, tokens[:count])
            self.num_known[row] = known + count

    def forget_tokens(self, row: int, num_tokens: int) -> None:
        """Only the first ``num_tokens`` tokens are known from now on."""
        self.num_known[row] = num_tokens
        del self.hashes[row][num_tokens // self.block_size :]
        self.spans[row] = tuple((a, min(b, num_tokens), digest) for a, b, digest in self.spans[row] if a < num_tokens)

    def visible_run(
        self, parent: bytes, block: int, query: Tokens, true_query: Tokens, spans: tuple[Span, ...]
    ) -> tuple[int, int]:
        """The running row whose unfinished block ``block``, after the prefix ``parent``, shares the longest run with
        ``query`` (up to a block of look-up tokens; ``spans`` relative to it): ``(number of tokens, row)`` or ``(0,
        -1)``.
        """
        if parent not in self.open_parent:
            return 0, -1
        rows = np.array([row for row, its_parent in enumerate(self.open_parent) if its_parent == parent])
        start, n = block * self.block_size, query.size
        visible = np.minimum(self.num_written[rows], self.num_known[rows]) - start
        same = self.tokens[rows, start : start + n] == query
        run = np.where(same.all(axis=1), n, same.argmin(axis=1))
        run = np.minimum(run, visible)
        best = (0, -1)
        for at in np.argsort(-run, kind="stable").tolist():
            row, length = int(rows[at]), int(run[at])
            if length <= best[0]:
                break
            if spans or self.spans[row]:
                truth = self.true_tokens.get(row, self.tokens[row])[start : start + length] == true_query[:length]
                length = length if truth.all() else int(truth.argmin())
                length = common_span_run(spans, spans_in(self.spans[row], start, start + n), length)
            best = max(best, (length, row))
        return best

    def leader(self, root: bytes, query: Tokens, hit: int, gain: int, in_place_size: int = 1) -> int | None:
        """The row that is computing at least ``gain`` more tokens of ``query`` than the ``hit`` tokens that can be had
        now; None if there is none.
        """
        rows = (self.num_known - self.num_written >= gain).nonzero()[0]
        if not len(rows) or hit >= query.size:
            return None
        rows = rows[(self.index_at[rows] != NEVER) & (self.tokens[rows, hit] == query[hit])]
        best, best_row = hit + gain - 1, None
        for row in rows.tolist():
            if self.roots[row] != root:
                continue
            n = min(int(self.num_known[row]), query.size)
            same = self.tokens[row, :n] == query[:n]
            run = n if same.all() else int(same.argmin())
            run = run // in_place_size * in_place_size
            if run > best:
                best, best_row = run, row
        return best_row
