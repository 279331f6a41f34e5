"""The one error that loading a model raises."""

__all__ = ["LoadError"]


class LoadError(ValueError):
    """A model could not be loaded; the message is one line that names the file, the value and the way out."""
