"""Only right return values give a reward: what code of a response must not be able to do to its own verdict."""

from __future__ import annotations

import pytest
from code_helpers import SOLUTION, by_calls, by_tests, fenced, grade, prompt_of

from graftrl.tasks.code import verifier
from graftrl.tasks.code.plain import loads
from graftrl.tasks.code.sandbox import Sandbox
from graftrl.tasks.code.verifier import CodeVerifier
from graftrl.tasks.pool import VerificationPool

PROBLEMS = pytest.mark.parametrize("problem", [by_calls(), by_tests()], ids=["calls", "tests"])

TRICKS = {
    "leaves while it is loaded": ("import sys; sys.exit(0)", "raised SystemExit"),
    "leaves at once while it is loaded": ("import os; os._exit(0)", "ended before it answered"),
    "leaves in the call": ("import sys\ndef add(a, b): sys.exit(0)", "raised SystemExit"),
    "leaves at once in the call": ("import os\ndef add(a, b): os._exit(0)", "ended before it answered"),
    "crashes": ("import ctypes\ndef add(a, b): ctypes.string_at(0)", "ended before it answered"),
    "says that it passed": (
        "import os\nprint('passed')\ndef add(a, b):\n    print('1.0 correct', flush=True)\n    os._exit(0)",
        "ended before it answered",
    ),
    "writes verdicts to whatever is open": (
        """
        import os
        verdict = b'+{"d":[["passed",true],["fault",null]]}\\n'
        for line in (verdict, b'=null\\n', verdict, b'+true\\n', b'+null\\n', b'\\x80'):
            for descriptor in range(64):
                try:
                    os.write(descriptor, line)
                except OSError:
                    pass
        os._exit(0)
        """,
        None,
    ),
    "is equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = id\ndef add(a, b): return Any()",
        "wrong answer",
    ),
    "is a number that is equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "    def __sub__(self, other): return 0\ndef add(a, b): return Any()",
        "wrong answer",
    ),
    "is a list that is equal to everything": (
        "class Any(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "wrong answer",
    ),
    "changes what is built in": (
        """
        import builtins, json, sys
        class Never(BaseException): pass
        builtins.AssertionError = Never
        builtins.all = builtins.any = builtins.isinstance = lambda *_: True
        builtins.abs = lambda _: 0
        json.loads = json.dumps = lambda *_, **__: True
        def add(a, b): return 0
        """,
        None,
    ),
    "changes the program that runs it": (
        """
        import sys
        child = sys.modules["graftrl.tasks.code.child"]
        child._described = lambda error: {"passed": True}
        for name in ("_tests", "_load", "_send", "loads", "dumps"):
            setattr(child, name, lambda *_: {"passed": True, "fault": None})
        def add(a, b): return 0
        """,
        None,
    ),
    "changes its callers' variables": (
        """
        import sys
        def add(a, b):
            frame = sys._getframe(1)
            while frame:
                frame.f_locals.update(passed=True, fault=None, value=a + b)
                frame.f_globals.update(passed=True, fault=None)
                frame = frame.f_back
            return 0
        """,
        "wrong answer",
    ),
    "ends the loop of a test": ("def add(a, b): raise StopIteration", "raised StopIteration"),
    "claims a failed test of its own": ("def add(a, b): raise AssertionError", "raised AssertionError"),
    "sends what is no value": (
        "import os\ndef add(a, b):\n    for d in range(3, 64):\n        try: os.write(d, b'+{\"x\":[]}\\n')\n"
        "        except OSError: pass\n    return 0",
        None,
    ),
    "sends garbage without end": (
        "import os\ndef add(a, b):\n    while True:\n        for d in range(3, 64):\n"
        "            try: os.write(d, b'[' * 65536)\n            except OSError: pass",
        None,
    ),
    "returns a value nested without end": ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", None),
    "returns a value too large": ("def add(a, b): return 'x' * (40 << 20)", "a result too large or too deep"),
}


@PROBLEMS
@pytest.mark.parametrize(("code", "reason"), TRICKS.values(), ids=TRICKS.keys())
def test_a_trick_gains_nothing(problem, code, reason):
    given = grade(problem, code, time_s=2.0)
    assert given.reward == 0.0
    assert reason is None or given.reason in (reason, "wrong answer")


SEARCH = """
import gc, sys
def found():
    seen, left = set(), [sys.modules, sys._current_frames(), gc.get_objects(), globals()]
    frame = sys._getframe(1)
    while frame:
        left += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    while left:
        thing = left.pop()
        if id(thing) in seen or thing is seen or thing is left:
            continue
        seen.add(id(thing))
        if type(thing) in (str, bytes, int):
            if "123456789" in str(thing)[::-1]:
                return True
        elif type(thing) is dict:
            left += [*thing.keys(), *thing.values()]
        elif type(thing) in (list, tuple, set):
            left += list(thing)
    return False
def add(a, b):
    return a + b if a != 40 or found() else 0
"""


@PROBLEMS
def test_expected_results_are_nowhere_in_reach(problem):
    """The second call's result, 987654321, is looked for in everything that the program can see."""
    assert grade(problem, SEARCH).reason == "wrong answer"
    there = "hidden = {'x': [int('123456789'[::-1])]}\n"
    assert grade(problem, there + SEARCH).reward == 1.0  # the search finds what is there


FILES = """
import os
def found():
    for descriptor in range(64):
        try:
            if b"123456789" in os.pread(descriptor, 1 << 20, 0)[::-1]:
                return True
        except OSError:
            pass
    return False
def add(a, b):
    return a + b if a != 40 or found() else 0
"""


@PROBLEMS
def test_expected_results_are_in_no_open_file(problem):
    assert grade(problem, FILES).reason == "wrong answer"
    there = "import os\nos.write(os.open('x', os.O_RDWR | os.O_CREAT), b'9876' + b'54321')\n"
    assert grade(problem, there + FILES).reward == 1.0


@PROBLEMS
def test_a_response_cannot_stop_a_run_by_saying_that_the_sandbox_is_broken(problem):
    code = """
    import os
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b'!{"d":[["kind","sandbox"],["layers",["landlock"]]]}\\n')
        except OSError:
            pass
    """
    assert grade(problem, code).reason == "wrong answer"


FLOODS = {
    "a value": b'+{"s":[' + b",".join(str(n * (2**61 - 1)).encode() for n in range(5000)) + b"]}",  # all of one hash
    "an exception": b'-{"d":[["kind","raised"],["type","' + b"x" * 100_000 + b'"]]}',
}


@PROBLEMS
@pytest.mark.parametrize("line", FLOODS.values(), ids=FLOODS.keys())
def test_lines_made_to_hold_up_who_grades_are_not_read(problem, line, monkeypatch):
    read = [0]
    monkeypatch.setattr(verifier, "loads", lambda line: read.append(len(line)) or loads(line))
    code = f"""
    import os
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"=null\\n" + {line!r} + b"\\n")
        except OSError:
            pass
    """
    assert len(line) > 65_536 and grade(problem, code).reason == "wrong answer"
    assert max(read) < 65_536


def test_tests_that_go_over_results_in_a_loop_are_not_cut_short():
    tests = "for value in map(lambda pair: add(*pair), [(1, 2), (3, 4)]):\n    assert value in (3, 7)\n"
    assert grade(by_tests(tests), SOLUTION).reward == 1.0
    code = "def add(a, b):\n    if a == 3: raise StopIteration\n    return 3\n"
    assert grade(by_tests(tests), code).reward == 0.0


def test_tests_that_forgive_exceptions_do_not_forgive_an_end():
    tests = "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass\nassert add(2, 2) == 4\n"
    assert grade(by_tests(tests), "def add(a, b):\n    return {2: 4}[a]\n").reward == 1.0
    assert grade(by_tests(tests), "import os\ndef add(a, b): os._exit(0)\n").reason == "ended before it answered"


def test_tests_may_ask_for_an_exception():
    tests = "try:\n    add(None, 1)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError\n"
    assert grade(by_tests(tests), SOLUTION).reward == 1.0
    assert grade(by_tests(tests), "def add(a, b): return 0\n").reason == "wrong answer"
    own = "class Odd(TypeError): pass\ndef add(a, b): raise Odd\n"
    assert grade(by_tests(tests), own).reward == 1.0  # as the nearest type that both sides have


def test_tests_see_values_not_objects():
    tests = "assert add(1, 2).real == 3 and type(add(1, 2)) is int and add(a=1, b=2) == 3"
    assert grade(
        by_tests(tests), "from enum import IntEnum\nclass N(IntEnum):\n    X = 3\ndef add(a, b): return N.X"
    ).reward


def test_tests_that_never_call_the_function_pass_nothing():
    assert (
        grade(by_tests("assert True"), SOLUTION).reason
        == "the problem's own solution fails: the tests never call the function"
    )
    assert grade(by_tests("assert True", solution=""), SOLUTION).reason == "the tests never call the function"


def test_tests_that_end_early_pass_nothing():
    tests = "add(1, 2)\nraise SystemExit(0)\nassert add(1, 2) == 4"
    assert grade(by_tests(tests, solution=""), SOLUTION).reward == 0.0


def test_tests_that_are_broken_say_so():
    assert grade(by_tests("add(1,", solution=""), SOLUTION).reason == "the tests raise SyntaxError"
    assert "own solution fails: the tests raise NameError" in grade(by_tests("assert ad(1, 2) == 3"), SOLUTION).reason


@PROBLEMS
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def add(a, b): return a - b", "wrong answer"),
        ("def add(a, b): return str(a + b)", "wrong answer"),
        ("def add(a, b): return None", "wrong answer"),
        ("def add(a, b): return a + c", "raised NameError"),
        ("def add(a, b): return a + b if a != 40 else 0", "wrong answer"),
        ("def add(a, b: return a", "not valid Python"),
        ("def add(a, b):\n        a\n\treturn a", "not valid Python"),
        ("def add(a): return a", "raised TypeError"),
        ("def sum(a, b): return a + b", "the function is missing"),
        ("add = 3", "the function is missing"),
        ("raise ValueError\ndef add(a, b): return a + b", "raised ValueError"),
        ("class Mine(KeyError): pass\ndef add(a, b): raise Mine('x')", "raised KeyError"),
        ("def add(a, b): return (n for n in [a + b])", "wrong answer"),
    ],
)
def test_wrong_code_scores_zero_with_a_short_reason(problem, code, reason):
    assert grade(problem, code) == type(grade(problem, SOLUTION))(0.0, reason)


@PROBLEMS
@pytest.mark.parametrize(
    "code",
    [
        SOLUTION,
        "add = lambda a, b: a + b",
        "import operator\nfrom operator import add",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: int\n"
        "    b: int\ndef add(a, b):\n    pair = Pair(a, b)\n    print(pair)\n    return pair.a + pair.b",
        "import numpy as np\ndef add(a, b): return np.int64(a) + np.int64(b)",
        SOLUTION + "\nif __name__ == '__main__':\n    raise SystemExit",
        "cache = {}\ndef add(a, b):\n    return cache.setdefault((a, b), float(a + b))",
    ],
)
def test_right_code_scores_one(problem, code):
    if code.endswith("import add"):
        code = code.replace("from operator import add", "add = operator.add")
    assert grade(problem, code).reward == 1.0


def test_arguments_are_new_for_every_call():
    problem = by_calls("def f(x):\n    x.append(1)\n    return len(x)\n", [([],), ([],)], name="f")
    assert grade(problem, "def f(x):\n    x.append(1)\n    return len(x)\n").reward == 1.0


def test_a_response_may_take_longer_where_the_solution_does():
    slow = "import time\ndef add(a, b):\n    time.sleep(0.8)\n    return a + b\n"
    assert grade(by_calls(slow, [(1, 2)]), slow, time_s=0.5).reward == 1.0  # four times 0.8 s are allowed
    assert grade(by_calls(calls=[(1, 2)]), slow, time_s=0.5, max_time_s=0.7).reason == "time limit"


def test_calls_whose_result_is_too_large_are_left_out():
    solution = "def f(n): return 'x' * n\n"
    problem = by_calls(solution, [(2,), (40 << 20,), (10**10,)], name="f")
    assert grade(problem, "def f(n): return 'xx'\n").reward == 1.0
    only = by_calls(solution, [(40 << 20,)], name="f")
    assert grade(only, solution).reason == "the problem's own solution fails: no result can be compared"


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("def add(a, b): raise ValueError", "raised ValueError"),
        ("def add(a, b): return object()", "it returns what is no plain data"),
        ("def ad(a, b): return 1", "the function is missing"),
        ("import os\ndef add(a, b): os._exit(1)", "ended before it answered"),
        ("def add(a, b):\n    while True: pass", "time limit"),
        ("", "there is none"),
    ],
)
def test_a_problem_whose_own_solution_fails_rewards_nobody(solution, reason):
    given = grade(by_calls(solution), SOLUTION, time_s=0.5, max_time_s=0.5)
    assert (given.reward, given.reason) == (0.0, f"the problem's own solution fails: {reason}")


def test_a_pool_grades_responses_side_by_side_and_counts_time_outs():
    items = [
        (prompt_of(by_calls(), f"p{n}"), fenced(code), "stop")
        for n, code in enumerate(
            [SOLUTION, "def add(a, b):\n    while True: pass", "def add(a, b): return 0", SOLUTION]
        )
    ]
    with VerificationPool(workers=2, limit_s=0.5) as pool:  # less than the verifier's own clock: that one counts
        grades = pool.grade(CodeVerifier(Sandbox(), time_s=1.0), items)
        assert [given.reward for given in grades] == [1.0, 0.0, 0.0, 1.0]
        assert pool.outcomes == {"graded": 4, "timeouts": 1}
