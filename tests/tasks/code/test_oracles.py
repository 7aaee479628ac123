"""Rules of comparison against EvalPlus's, which compares with NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftrl.tasks.code.oracles import HUMANEVAL_RULES, MBPP_RULES, is_right
from graftrl.tasks.code.plain import Opaque


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        (3, 3, True),
        (3.0, 3, True),
        (True, 1, True),
        (3, 4, False),
        (0.3, 0.1 + 0.2, True),
        (0.30001, 0.3, False),
        (1, 1.0000001, False),  # another type: no tolerance
        ([1.0, 2.0], [1.0, 2.0000001], True),
        ((1.0, 2.0), [1.0, 2.0], False),
        ([1.0], [1.0, 2.0], False),
        ([[1.0]], [[1.0000001]], False),  # not a list of numbers: EvalPlus compares exactly
        ([], [], True),
        ({"a": 1}, {"a": 1}, True),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (math.nan, 1.0, False),
        ("a", "a", True),
        (None, 0.0, False),
        (Opaque("x"), None, False),
    ],
)
def test_equality(value, expected, right):
    assert is_right("equal", 0.0, (), value, expected) is right


FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(
    st.lists(FLOATS, max_size=4), st.lists(st.floats(-1e-4, 1e-4), min_size=4, max_size=4), st.sampled_from([0.0, 1e-4])
)
def test_tolerance_is_numpys(expected, shifts, atol):
    value = [x + shift for x, shift in zip(expected, shifts, strict=False)]
    tolerance = atol or (1e-6 if expected else 0.0)
    wanted = value == expected or (tolerance > 0 and bool(np.allclose(value, expected, rtol=1e-7, atol=tolerance)))
    assert is_right("equal", atol, (), value, expected) == wanted


@given(st.recursive(FLOATS, lambda inner: st.lists(inner, max_size=3), max_leaves=8))
def test_a_value_is_always_right_for_itself(value):
    assert is_right("equal", 0.0, (), value, value)


@pytest.mark.parametrize(
    ("rule", "arguments", "value", "expected", "right"),
    [
        ("same set", (), [1, 2, 2], (2, 1), True),
        ("same set", (), [1, 3], (2, 1), False),
        ("same set", (), None, (2, 1), False),
        ("same set", (), [[1]], (2, 1), False),
        ("not none", (), Opaque("re.Match"), Opaque("re.Match"), True),
        ("not none", (), True, Opaque("re.Match"), True),
        ("not none", (), False, None, True),
        ("not none", (), None, None, True),
        ("not none", (), None, Opaque("re.Match"), False),
        ("not none", (), False, True, False),
        ("not none", (), "found", True, True),
        ("pyramid", (3, 4), 33, 33, True),
        ("pyramid", (3, 4), 35, 33, True),  # 9 + 2 * 3 * sqrt(1.5^2 + 4^2) = 34.6
        ("pyramid", (3, 4), 34, 33, False),
        ("digits", (1, 23), 4, 9, True),  # 01 and 23: 2 + 2
        ("digits", (1, 23), 9, 9, True),
        ("digits", (1, 23), 5, 9, False),
        ("root", ([-6, 11, -6, 1],), 2.0, 1.0, True),  # (x-1)(x-2)(x-3)
        ("root", ([-6, 11, -6, 1],), 2.1, 1.0, False),
        ("root", ([1, 2],), "x", -0.5, False),
        ("root", ([1, 2],), 1e200, -0.5, False),
    ],
)
def test_rules_of_single_problems(rule, arguments, value, expected, right):
    assert is_right(rule, 1e-4 if rule == "root" else 0.0, arguments, value, expected) is right


def test_every_rule_that_a_problem_names_exists():
    for rule in {*MBPP_RULES.values(), *HUMANEVAL_RULES.values()}:
        is_right(rule, 0.0, (1, 1), 1, 1)
