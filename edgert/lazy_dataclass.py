"""The standard library's `dataclass`, which compiles a method of a class when it is first called.

The standard decorator compiles six functions for each frozen class when its module is imported. A process imports about
a hundred such classes and makes values of a few: a quarter of the time that the daemon, a worker or a command took to
start.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """Do what `dataclasses.dataclass` does with the options frozen, eq and kw_only; it knows no others."""
        if cls is None:
            return lambda cls: _made(cls, **options)
        return _made(cls, **options)


def _made(cls: Any, *, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
    own = vars(cls)
    if "__init__" not in own:
        cls.__init__ = _late(cls, "__init__", init=True)
    if "__repr__" not in own:
        cls.__repr__ = _late(cls, "__repr__", repr=True)
    if eq and own.get("__hash__") is None:
        cls.__hash__ = _late(cls, "__hash__", eq=True, unsafe_hash=True) if frozen else None
    if eq and "__eq__" not in own:
        cls.__eq__ = _late(cls, "__eq__", eq=True)
    cls.__doc__ = cls.__doc__ or cls.__name__  # the standard decorator would write the signature, which takes long
    made = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    if frozen:
        cls.__setattr__, cls.__delattr__ = _refuse_to_set, _refuse_to_delete
    return made


def _late(cls: Any, name: str, **wanted: bool) -> Any:
    """Return a method that puts the standard one in its place when it is first called."""

    def late(self: Any, *args: Any, **named: Any) -> Any:
        setattr(cls, name, _standard(cls, name, **wanted))
        return getattr(cls, name)(self, *args, **named)

    return late


def _standard(cls: Any, name: str, **wanted: bool) -> Any:
    """Return the method `name` that the standard library compiles for the fields of `cls`."""
    every = cls.__dataclass_fields__
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": "", **every}
    if hasattr(cls, "__post_init__"):
        body["__post_init__"] = None  # the method that is compiled calls that of `cls`
    twin = type(cls.__name__, (), {**body, "__annotations__": {each: field.type for each, field in every.items()}})
    frozen = cls.__setattr__ is _refuse_to_set
    made: Any = dataclasses.dataclass(**{"init": False, "repr": False, "eq": False, "frozen": frozen, **wanted})(twin)
    return vars(made)[name]


def _refuse_to_set(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
