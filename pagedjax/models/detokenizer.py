"""Text from token ids that come one at a time, never ending in half a character.

A token may hold part of a UTF-8 character. Where tokens are bytes (byte-level BPE) the bytes are decoded
incrementally, which costs the same for every token. Other decoders look at a token's neighbours, so a short window is
decoded again and what is new is taken.
"""

import codecs
from collections.abc import Callable
from typing import Protocol

__all__ = ["ByteDetokenizer", "Detokenizer", "WindowDetokenizer", "bytes_of_token"]


class Detokenizer(Protocol):
    """What a stream of one completion needs."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, maybe empty; it never ends in half a character."""
        ...

    def flush(self) -> str:
        """The end of the stream: what was held back, an unfinished character as U+FFFD."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def bytes_of_token(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; one outside the alphabet stands for its own UTF-8.

    >>> bytes_of_token("Ġcaf"), bytes_of_token("Ã"), bytes_of_token("a b")
    (b' caf', b'\\xc3', b'a b')
    """
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


class ByteDetokenizer:
    """Detokeniser of byte-level vocabularies.

    Args:
        token_bytes: bytes of a token id; empty for what is not shown.

    >>> stream = ByteDetokenizer({0: b"caf", 1: b"\\xc3", 2: b"\\xa9"}.__getitem__)
    >>> [stream.push(0), stream.push(1), stream.push(2), stream.flush()]
    ['caf', '', 'é', '']
    """

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokeniser of any vocabulary: decodes the last few tokens again at each step.

    Args:
        decode: text of a list of token ids.
    """

    _MAX_HELD = 64  # tokens that are no text at all are let through then, so that the window stays short

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._num_shown = 0  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        self._window.append(token_id)
        return self._advance(hold=len(self._window) - self._num_shown < self._MAX_HELD)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._advance(hold=False)

    def _advance(self, *, hold: bool) -> str:
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        if hold and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(shown) :]
        if new:
            self._window = self._window[self._num_shown :]
            self._num_shown = len(self._window)
        return new
