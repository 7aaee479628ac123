from __future__ import annotations

import pytest

from graftrl.tasks.boxes import BoxError, last_box


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{5} but then \boxed{7}", "7"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{5}}", "{5}"),
        (r"\boxed{x = \boxed{5} + 1}", "x = {5} + 1"),
        (r"\boxed{7 is wrong \boxed{5}", "5"),  # the outer box never closes
        (r"} } \boxed{5} }", "5"),
        ("\\boxed{\n5\n}", "5"),
        (r"I put it in \boxed. \boxed{5} as \boxed asks", "5"),
    ],
)
def test_the_last_outermost_box_counts(response: str, content: str) -> None:
    assert last_box(response) == content


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "no boxed answer"),
        ("the answer is 5", "no boxed answer"),
        (r"\boxed 5", "no boxed answer"),
        (r"\boxed{}", "empty box"),
        (r"\boxed{ {} }", "empty box"),
        (r"\boxed{5} as asked within \boxed{}", "empty box"),
        (r"\boxed{5", "unclosed box"),
        (r"\boxed{5} no, \boxed{7", "unclosed box"),
        (r"\boxed{\frac{1}{2}", "unclosed box"),
    ],
)
def test_a_response_without_a_usable_box_says_why(response: str, reason: str) -> None:
    with pytest.raises(BoxError, match=reason):
        last_box(response)


def test_a_megabyte_of_braces_is_read_in_linear_time() -> None:
    assert last_box("{" * 500_000 + r"\boxed{5}" + "}" * 500_000) == "5"
    with pytest.raises(BoxError, match="unclosed"):
        last_box(r"\boxed{" * 100_000)
