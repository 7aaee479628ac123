from __future__ import annotations

import pytest

from graftrl.tasks.code.extract import program_of
from graftrl.tasks.code.problems import Problem

CONTEXT = 'import math\n\ndef area(r: float) -> float:\n    """Of a circle."""\n'
BY_TEXT = Problem("area")
BY_CODE = Problem("area", context=CONTEXT, preamble="import math")
BODY = "    return math.pi * r**2\n"
WHOLE = f"def area(r):\n{BODY}"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (f"Sure.\n```python\n{WHOLE}```\nDone.", WHOLE),
        (f"```\n{WHOLE}```", WHOLE),
        (f"```py\n{WHOLE}```", WHOLE),
        (f"~~~~Python\n{WHOLE}~~~~", WHOLE),
        (f"```python\ndef area(r): return 0\n```\nBetter:\n```python\n{WHOLE}```", WHOLE),
        (f"```python\n{WHOLE}```\nUse it:\n```python\nprint(area(1))\n```\n```\n3.14\n```", WHOLE),
        (f"```python\n{WHOLE}", WHOLE),  # cut, or the end was a stop token
        (f"````python\n{WHOLE}```\n````", WHOLE + "```\n"),
        (f"```bash\npip install x\n```\n```python\n{WHOLE}```", WHOLE),
        ("  ```python\n  def area(r):\n      return 1\n  ```", "def area(r):\n    return 1\n"),
        ("```python\narea = lambda r: 1\n```", "area = lambda r: 1\n"),
        ("```python\nasync def area(r):\n    return 1\n```", "async def area(r):\n    return 1\n"),
        ("```python\ndef other(r):\n    return 1\n```", "def other(r):\n    return 1\n"),  # fails, with a reason
        (f"It goes like this.\n\nimport math\n\n{WHOLE}\n\nI hope it helps.", f"import math\n\n{WHOLE}"),
        (
            f"{WHOLE}X = 1\nprint(area(2))\nThat is all.",
            f"{WHOLE}X = 1\nprint(area(2))\n".replace("X = 1\nprint(area(2))\n", ""),
        ),
        (f"{WHOLE}\n@cache\ndef helper():\n    return 1\nBye", f"{WHOLE}\n@cache\ndef helper():\n    return 1\n"),
    ],
)
def test_code_of_a_problem_in_words(response, code):
    assert program_of(BY_TEXT, response) == (code,)


@pytest.mark.parametrize(
    "response",
    ["", "I do not know.", "area(r) is pi r squared", "```java\nint area(int r) {}\n```", "```python\n\n```", BODY],
)
def test_no_code_of_a_problem_in_words(response):
    assert program_of(BY_TEXT, response) is None


def test_a_whole_function_gets_what_stands_before_it_in_the_problem():
    assert program_of(BY_CODE, f"```python\n{WHOLE}```") == ("import math", WHOLE)
    assert program_of(BY_CODE, WHOLE) == ("import math", WHOLE)


@pytest.mark.parametrize(
    "response",
    [
        BODY,
        f"\n{BODY}",
        f"{BODY}\n\ndef other():\n    pass\n",
        f"{BODY}\nprint(area(1))",
        f"```python\n{BODY}```",
        f"{BODY}# end",
    ],
)
def test_a_body_completes_the_code_of_the_problem(response):
    (program,) = program_of(BY_CODE, response) or ()
    space: dict[str, object] = {}
    exec(program, space)
    assert space["area"](1.0) == pytest.approx(3.14159265)  # type: ignore[operator]
    assert "other" not in space


@pytest.mark.parametrize("response", ["I do not know.", "", "\n\n", "The area is\n    math.pi"])
def test_prose_does_not_complete_code(response):
    assert program_of(BY_CODE, response) is None


def test_a_block_that_is_no_body_stays_what_it_is():
    assert program_of(BY_CODE, "```python\nprint(1)\n```") == ("print(1)\n",)
