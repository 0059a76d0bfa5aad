"""Classes of kernels, with the initialiser that NKI's compiler gives them."""

from __future__ import annotations

import dataclasses
import inspect


class NKIObject:
    """Base of kernels' configuration objects; keyword arguments become attributes.

    A subclass without an `__init__` gets the compiler's, with or without @dataclass (nki-language-guide.rst, "Class
    Support"): a parameter for each field, None where it has no default, then `__post_init__`.
    """

    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)

    def __post_init__(self):
        pass

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        fields = _class_fields(cls)
        if fields and "__init__" not in vars(cls) and cls.__init__ in _initialisers:
            cls.__init__ = _initialiser(fields)  # @dataclass keeps one that is there


def _initialiser(fields: dict):
    names = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in fields])

    def __init__(self, *args, **kwargs):
        for name, value in (fields | names.bind_partial(*args, **kwargs).arguments).items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    _initialisers.add(__init__)
    return __init__


_initialisers = {NKIObject.__init__}  # what is not the user's own


def _class_fields(cls: type) -> dict:
    """Annotated names, then plain attributes, with their defaults; none where only @dataclass knows what they mean."""
    fields: dict = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(NKIObject)]):
        annotations = {name: str(kind) for name, kind in vars(base).get("__annotations__", {}).items()}
        defaults = {name: value for name, value in vars(base).items() if name in annotations or _is_plain(name, value)}
        if any(word in kind for word in ("KW_ONLY", "InitVar") for kind in annotations.values()) or any(
            isinstance(value, dataclasses.Field) for value in defaults.values()
        ):
            return {}
        fields |= dict.fromkeys(name for name, kind in annotations.items() if "ClassVar" not in kind)
        fields |= {name: value for name, value in defaults.items() if "ClassVar" not in annotations.get(name, "")}
    return fields


def _is_plain(name: str, value) -> bool:
    return not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
