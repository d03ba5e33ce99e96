"""A class of `edgert.lazy_dataclass` behaves like one of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, FrozenInstanceError, asdict, field, fields, replace
from typing import Any, ClassVar

import pytest

from edgert import lazy_dataclass

Decorator = Callable[..., Any]
LAZY: Decorator = lazy_dataclass.dataclass


@lazy_dataclass.dataclass(frozen=True)
class Sent:
    """A class that can be found by its name."""

    value: int


def classes(dataclass: Decorator) -> tuple[Any, ...]:
    """Return classes of each shape that the packages use."""

    @dataclass(frozen=True)
    class Point:
        """A frozen class with each kind of default."""

        known: ClassVar[int] = 7
        x: int
        y: float = 1.5
        names: tuple[str, ...] = ()
        more: dict[str, int] = field(default_factory=dict, hash=False)
        hidden: str = field(default="s", repr=False, compare=False)
        made: int = field(init=False, default=3)

    @dataclass
    class Counter:
        n: int = 0
        log: list[str] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.n += 1

    @dataclass(frozen=True)
    class Base:
        a: int

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("negative")

    @dataclass(frozen=True)
    class Below(Base):
        b: int = 2

        @property
        def total(self) -> int:
            return self.a + self.b

    @dataclass(frozen=True, eq=False)
    class Same:
        a: int

    @dataclass(frozen=True, kw_only=True)
    class Named:
        b: int = 1
        a: int

    @dataclass
    class Mixed:
        a: int
        _: KW_ONLY
        b: int = 2

    @dataclass(frozen=True)
    class Own:
        a: int

        def __repr__(self) -> str:
            return f"own {self.a}"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.a % 10 == other.a % 10

        def __hash__(self) -> int:
            return self.a % 10

    return Point, Counter, Base, Below, Same, Named, Mixed, Own


def told(work: Callable[[], Any]) -> str:
    """Return the result of `work`, or its exception, without the addresses of objects."""
    try:
        return repr(work()).replace("_standard.<locals>.", "")
    except Exception as error:  # noqa: BLE001  # any: it is compared
        return f"{type(error).__name__}: {error}"


def answers(dataclass: Decorator) -> list[str]:
    point, counter, base, below, same, named, mixed, own = classes(dataclass)
    a, b, n = point(1, names=("k",), more={"m": 1}), below(1), counter(5, ["s"])
    works: list[Callable[[], Any]] = [
        lambda: a,
        lambda: a == point(1, names=("k",), more={"m": 1}, hidden="other"),
        lambda: (a == point(2), a != point(2), a == 1, a == copy.copy(a)),
        lambda: hash(a) == hash(point(1, names=("k",))),
        lambda: len({a, point(1, names=("k",), more={"m": 1})}),
        lambda: point(),
        lambda: point(1, 2, 3, 4, 5, 6),
        lambda: point(1, z=2),
        lambda: setattr(a, "x", 2),
        lambda: setattr(a, "new", 2),
        lambda: delattr(a, "x"),
        lambda: (a.more is not point(1).more, a.known, a.made, point.y),
        lambda: replace(a, y=0.0),
        lambda: replace(a, made=1),
        lambda: (asdict(a), dataclasses.astuple(a)),
        lambda: [(each.name, each.type, each.default, each.init) for each in fields(point)],
        lambda: (dataclasses.is_dataclass(point), point.__match_args__, point.__doc__),
        lambda: (n, n == counter(5, ["s"]), counter().log is counter().log),
        lambda: hash(n),
        lambda: setattr(n, "n", 9),
        lambda: (n, b, b.total, b == below(1, 2), b == base(1), below(b=4, a=3)),
        lambda: base(-1),
        lambda: below(-1),
        lambda: (same(1) == same(1), len({same(1), same(1)})),
        lambda: (named(a=1), named(a=1, b=2)),
        lambda: named(1),
        lambda: (mixed(1, b=3), mixed.__match_args__),
        lambda: mixed(1, 3),
        lambda: (own(11), own(11) == own(1), len({own(11), own(1)})),
    ]
    return [told(work) for work in works]


def test_each_shape_of_class_answers_like_the_standard_one() -> None:
    assert answers(LAZY) == answers(dataclasses.dataclass)


def test_a_class_of_others_may_extend_it() -> None:
    point, *_ = classes(LAZY)

    class Further(point):  # type: ignore[misc,valid-type]
        def __init__(self, x: int) -> None:
            super().__init__(x, 2.0)

    assert (Further(3).x, Further(3).y, Further(3) == Further(3)) == (3, 2.0, True)


def test_a_value_from_another_process_is_equal_and_frozen() -> None:
    """Such a value is made without a call of `__init__`."""
    sent = pickle.dumps(Sent(3))
    program = (
        "import pickle, sys; from tests.device.test_lazy_dataclass import Sent\n"
        "got = pickle.loads(bytes.fromhex(sys.argv[1])); print(got, got == Sent(3), hash(got) == hash(Sent(3)))\n"
        "try: got.value = 4\nexcept Exception as error: print(type(error).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program, sent.hex()], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["Sent(value=3) True True", "FrozenInstanceError", ""]


def test_threads_may_make_the_first_values_at_once() -> None:
    for _ in range(50):
        point, *_ = classes(LAZY)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(point, range(8)))
        assert [each.x for each in made] == list(range(8))


def test_a_mistake_shows_when_the_class_is_made() -> None:
    with pytest.raises(ValueError, match="mutable default"):

        @lazy_dataclass.dataclass
        class _Mutable:
            a: list[int] = []  # noqa: RUF012

    with pytest.raises(TypeError, match="order"):
        LAZY(order=True)(type("Ordered", (), {}))
    with pytest.raises(FrozenInstanceError):
        Sent(1).value = 2  # type: ignore[misc]
