from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftrl.tasks.code.plain import Opaque, dumps, loads

ATOMS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.integers(min_value=2**62, max_value=2**70)
)  # fmt: skip
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(ATOMS, inner) | st.frozensets(ATOMS),
    max_leaves=20,
)


def _same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return _same(list(a.items()), list(b.items()))
    return bool(a == b)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value):
    line = dumps(value)
    assert b"\n" not in line
    assert _same(loads(line), value)


@given(st.sets(st.integers()))
def test_sets_come_back_as_sets(value):
    back = loads(dumps(value))
    assert type(back) is set and back == value


def test_huge_integers_and_odd_floats_come_back():
    huge = 7 ** (10**5)
    assert loads(dumps([huge, -huge, math.inf, -math.inf])) == [huge, -huge, math.inf, -math.inf]
    assert math.isnan(loads(dumps(math.nan)))
    assert loads(dumps("\ud800\u2028")) == "\ud800\u2028"


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "travels_as"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(list, {1: [2]}), {1: [2]}),
        (OrderedDict(a=1), {"a": 1}),
        (namedtuple("Pair", "a b")(1, 2), (1, 2)),
        (Colour.RED, 1),
        (np.float64(0.5), 0.5),
        (np.int8(3), 3),
        (np.bool_(True), True),
        (bytearray(b"x"), bytearray(b"x")),
    ],
)
def test_subclasses_travel_as_what_they_extend(value, travels_as):
    assert _same(loads(dumps(value)), travels_as)
    assert _same(loads(dumps([value])), [travels_as])


@pytest.mark.parametrize("value", [object(), iter([]), range(3), np.arange(3), print, {1: 2}.keys(), np.longdouble(1)])
def test_what_is_no_plain_data_equals_nothing(value):
    back = loads(dumps(value))
    assert type(back) is Opaque
    assert back not in (loads(dumps(value)), 0, None)


@pytest.mark.parametrize(
    "line",
    ["", "[", '{"x":[]}', "{}", '{"t":1}', '{"t":[1],"s":[1]}', '{"d":[1]}', '{"s":[[]]}', '{"i":"z"}', '{"b":"0"}',
     '{"c":["a","b"]}', '{"c":[1]}', '{"d":[[[],1]]}', "9" * 5000],
)  # fmt: skip
def test_malformed_lines_raise_and_nothing_else(line):
    with pytest.raises((ValueError, TypeError)):
        loads(line)


def test_deep_nesting_is_refused_both_ways():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        dumps(deep)
    with pytest.raises(RecursionError):
        loads("[" * 100_000)


def test_a_flat_list_is_ordinary_json():
    assert json.loads(dumps([1, 2.5, "x", None, True])) == [1, 2.5, "x", None, True]
