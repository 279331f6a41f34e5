"""Breaking the code on purpose: replaces pieces of a function's source, which must be there."""

import inspect
import sys
import textwrap


def mutate(monkeypatch, owner, name: str, *pairs: str) -> None:
    """In ``owner.name`` each old piece becomes the new one: ``pairs`` are old, new, old, new …"""
    function = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in source, f"{old!r} is not in {name} any more"
        source = source.replace(old, new)
    module = sys.modules[function.__module__]
    namespace: dict = {}
    exec(compile(source, f"<mutant of {name}>", "exec"), module.__dict__, namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    if inspect.ismodule(owner):  # other modules have imported the function by name
        for each in list(sys.modules.values()):
            if getattr(each, "__name__", "").startswith("pagedjax.cache") and getattr(each, name, None) is function:
                monkeypatch.setattr(each, name, namespace[name])
