"""A programming problem as its verifier needs it. Plain texts: it travels to the workers with every response."""

from __future__ import annotations

from dataclasses import dataclass

METADATA_FIELD = "code"  # of `Prompt.metadata`, where a problem is found


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to be written, and how it is tested: by `calls` or by `tests`.

    entry_point: the function's name.
    context: code that ends with the function's signature, if the problem is stated like that; "" otherwise.
    preamble: what of `context` stands before the function: imports, helpers.
    solution: a whole program that solves it; "" if none is known.
    calls: one line of `graftrl.tasks.code.child` for each call; a response must return what `solution` returns.
    rule, atol: how results are compared, see `graftrl.tasks.code.oracles`.
    tests: test code that calls the function by its name and raises an exception if it is wrong.
    setup: code that the tests need beforehand.
    fault: why the problem cannot be graded; "" as a rule.
    """

    entry_point: str
    context: str = ""
    preamble: str = ""
    solution: str = ""
    calls: str = ""
    rule: str = "equal"
    atol: float = 0.0
    tests: str = ""
    setup: str = ""
    fault: str = ""
