"""Chat templates: the Jinja programs that turn messages into the text that a model was trained on.

They come with the weights, so they are foreign code: they run in Jinja's immutable sandbox, with the globals and the
whitespace rules that Hugging Face transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate", "ChatTemplateError"]


class ChatTemplateError(ValueError):
    """A chat template is damaged, or refuses the messages that it was given."""


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the model's chat template refuses the messages: {message}")


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A chat template; compiled when it is first used, so that loading a model does not import jinja2.

    Args:
        text: the Jinja program.
        source: the file that it comes from, for messages.
        variables: what it may use besides the messages: ``bos_token``, ``eos_token``, ….

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", source="doc")
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<user>Hi'
    """

    def __init__(self, text: str, *, source: str, variables: Mapping[str, Any] | None = None):
        self.text = text
        self.source = source
        self.variables = dict(variables or {})

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"{self.source}: the chat template is damaged ({error}); use raw prompts"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The text of a conversation.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            add_generation_prompt: end with the beginning of the assistant's answer.
            extra: further variables for the template (``tools``, ``enable_thinking``).

        Raises:
            ChatTemplateError: a template that is damaged, or one that refuses these messages.
        """
        import jinja2

        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ChatTemplateError(f"message {message!r} must be a mapping with 'role' and 'content'")
        values = {"tools": None, "documents": None, **self.variables, **extra}
        try:
            return self._compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatTemplateError(f"{self.source}: the chat template fails on these messages: {error}") from error
