"""Text of a completion while it grows: whole characters only, and never a part of a stop string."""

from __future__ import annotations


class TextStream:
    """Collects text, ends at the first stop string, and shows only what can no longer become one.

    Args:
        stops: strings that end the text; the text ends before the first of them.

    >>> stream = TextStream(("END",))
    >>> stream.feed("a E"), stream.visible
    (False, 'a ')
    >>> stream.feed("ND b"), stream.visible
    (True, 'a ')
    """

    def __init__(self, stops: tuple[str, ...] = ()):
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._text = ""
        self._held = 0  # characters at the end that may be the beginning of a stop string
        self.stopped = False

    def feed(self, piece: str) -> bool:
        """Adds text; returns whether a stop string has ended it. Nothing is added after that."""
        if self.stopped or not piece:
            return self.stopped
        begin = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        if self._stops:
            found = [place for stop in self._stops if (place := self._text.find(stop, begin)) >= 0]
            if found:
                self._text, self._held, self.stopped = self._text[: min(found)], 0, True
            else:
                self._held = self._longest_beginning()
        return self.stopped

    def finish(self) -> str:
        """Ends the text: what was held back belongs to it after all."""
        self._held = 0
        return self._text

    @property
    def visible(self) -> str:
        """The text that is certain."""
        return self._text[: len(self._text) - self._held]

    def _longest_beginning(self) -> int:
        for size in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stops):
                return size
        return 0
