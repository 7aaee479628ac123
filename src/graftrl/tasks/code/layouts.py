"""From rows of a data set to prompts with a `Problem`: known layouts, and your own fields."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from graftrl.errors import DataError
from graftrl.rollout import Prompt
from graftrl.tasks.code.oracles import HUMANEVAL_RULES, MBPP_RULES
from graftrl.tasks.code.plain import dumps
from graftrl.tasks.code.problems import METADATA_FIELD, Problem
from graftrl.tasks.config import CodeConfig, DataSource
from graftrl.tasks.data import Row, chosen_rows, refuse_duplicates

_LAYOUT_FIELDS = {
    "evalplus": ("prompt", "entry_point", "canonical_solution", "base_input", "plus_input"),
    "humaneval": ("prompt", "entry_point", "test"),
    "mbpp": ("code", "test_list"),
}
NO_TESTS = "no tests"


def read_problems(source: DataSource, config: CodeConfig) -> list[Prompt]:
    """All problems of a source, those that cannot be graded as well: their `Problem.fault` says why.

    Raises:
        DataError: a row that cannot be read, has another layout or lacks a field; a duplicate id; no row at all.
        ConfigError: reading needs a package that is not installed.
    """
    prompts = [_prompt(source, config, number, row) for number, row in chosen_rows(source)]
    if not prompts:
        raise DataError(f"{source.name}: the data set is empty")
    refuse_duplicates(prompts, source.name)
    return prompts


def problem_of(prompt: Prompt) -> Problem:
    problem = prompt.metadata[METADATA_FIELD]
    assert isinstance(problem, Problem)
    return problem


def _prompt(source: DataSource, config: CodeConfig, number: int, row: Row) -> Prompt:
    where = f"{source.name}, row {number}"
    layout = config.layout if config.layout != "auto" else _layout_of(row, source, config, where)
    identifier = row.get(source.id_field, row.get("task_id"))
    try:
        text, problem = _READERS[layout](row, source, config)
    except KeyError as error:
        there = ", ".join(key for key, value in row.items() if value is not None) or "none"
        raise DataError(f"{where}: no field {error.args[0]!r}; the row has: {there}") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{where}: not a problem of the layout {layout!r} ({error})") from error
    return Prompt(
        id=str(identifier) if identifier is not None else f"{source.stem}-{number}",
        messages=config.messages(text),
        reference=problem.solution,
        task="code",
        metadata={METADATA_FIELD: problem, "solution": problem.solution},
    )


def _layout_of(row: Row, source: DataSource, config: CodeConfig, where: str) -> str:
    if row.get(config.tests_field) is not None and row.get(source.problem_field) is not None:
        return "fields"
    for layout, fields in _LAYOUT_FIELDS.items():
        if all(row.get(field) is not None for field in fields):
            return layout
    known = "; ".join(f"{layout} ({', '.join(fields)})" for layout, fields in _LAYOUT_FIELDS.items())
    raise DataError(
        f"{where}: unknown layout, with the fields {', '.join(row) or 'none'}. Known are {known}, or name your fields: "
        "problem_field of the source, tests_field and entry_point_field of the task"
    )


def _evalplus(row: Row, source: DataSource, config: CodeConfig) -> tuple[str, Problem]:
    """HumanEval+ and MBPP+ as EvalPlus releases them: inputs, and a solution that says what is expected."""
    text, name = _text(row, "prompt"), _text(row, "entry_point")
    mbpp = str(row.get("task_id", "")).startswith("Mbpp/")
    inputs = [*_list(row, "base_input"), *_list(row, "plus_input")]
    if mbpp:
        inputs = _with_types(int(str(row["task_id"]).rpartition("/")[2]), inputs)
    context = text if _defines(text, name) else ""
    return text, Problem(
        entry_point=name,
        context=context,
        preamble=_preamble(context, name),
        solution=f"{text}\n{_text(row, 'canonical_solution')}",
        calls="".join(dumps([list(arguments), {}]).decode() + "\n" for arguments in inputs),
        rule=(MBPP_RULES if mbpp else HUMANEVAL_RULES).get(name, "equal"),
        atol=float(row.get("atol") or 0.0),
        fault="" if inputs else NO_TESTS,
    )


def _humaneval(row: Row, source: DataSource, config: CodeConfig) -> tuple[str, Problem]:
    """HumanEval, and HumanEval+ as the hub has it: `test` defines `check(candidate)`."""
    text, name, tests = _text(row, "prompt"), _text(row, "entry_point"), _text(row, "test")
    context = text if _defines(text, name) else ""
    preamble = _preamble(context, name)
    solution = row.get("canonical_solution")
    whole = f"{text}\n{solution}" if isinstance(solution, str) and context else str(solution or "")
    return text, Problem(
        entry_point=name,
        context=context,
        preamble=preamble,
        solution=whole,
        tests=_calling_check(tests, name),
        setup=whole or preamble,  # tests may use helpers that the prompt defines
        fault="" if tests.strip() else NO_TESTS,
    )


def _mbpp(row: Row, source: DataSource, config: CodeConfig) -> tuple[str, Problem]:
    """MBPP, and MBPP+ as the hub has it: `test_list` holds assertions; `test` of MBPP+ holds more.

    The first assertion is shown, because texts do not name the function.
    """
    solution = _text(row, "code").replace("\r\n", "\n")
    asserts = [str(line) for line in _list(row, "test_list")]
    setup = "\n".join([str(row.get("test_setup_code") or ""), *map(str, row.get("test_imports") or ())])
    tests = str(row.get("test") or "") or "\n".join(asserts)
    name = _tested_name("\n".join(asserts), solution)
    text = _text(row, "text" if row.get("prompt") is None else "prompt").strip()
    shown = f"{text}\nYour function must pass this test:\n{asserts[0]}" if asserts else text
    fault = NO_TESTS if not tests.strip() else "" if name else "no function under test can be found"
    return shown, Problem(entry_point=name, solution=solution, tests=f"{setup}\n{tests}", setup=solution, fault=fault)


def _fields(row: Row, source: DataSource, config: CodeConfig) -> tuple[str, Problem]:
    """Your own: a text, test code or a list of assertions, and optionally function name, solution and setup code."""
    text = _text(row, source.problem_field)
    given = row.get(config.tests_field)
    lines = given if isinstance(given, list) else [] if given is None else [given]
    tests = "\n".join(str(line) for line in lines)
    solution = str(row.get(source.answer_field) or "")
    setup = str(row.get(config.setup_field) or "")
    name = str(row.get(config.entry_point_field) or "") or _tested_name(tests, solution)
    context = text if name and _defines(text, name) else ""
    preamble = _preamble(context, name)
    if context and solution and not _defines(solution, name):
        solution = f"{text}\n{solution}"
    fault = NO_TESTS if not tests.strip() else "" if name else "no function under test can be found"
    return text, Problem(
        entry_point=name,
        context=context,
        preamble=preamble,
        solution=solution,
        tests=_calling_check(tests, name),
        setup="\n".join([solution or preamble, setup]),
        fault=fault,
    )


_READERS: dict[str, Callable[[Row, DataSource, CodeConfig], tuple[str, Problem]]] = {
    "evalplus": _evalplus, "humaneval": _humaneval, "mbpp": _mbpp, "fields": _fields,
}  # fmt: skip


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if value is None:
        raise KeyError(field)
    if not isinstance(value, str):
        raise TypeError(f"field {field!r} is no text")
    return value


def _list(row: Row, field: str) -> list[Any]:
    value = row.get(field)
    if value is None:
        raise KeyError(field)
    if isinstance(value, Mapping) and not value:  # so EvalPlus writes "none"
        return []
    if not isinstance(value, list):
        raise TypeError(f"field {field!r} is no list")
    return value


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", code, re.M) is not None


def _preamble(context: str, name: str) -> str:
    """What stands before the last definition of the function, if that is code by itself."""
    *_, start = (0, *(m.start() for m in re.finditer(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", context, re.M)))
    before = context[:start].rstrip()
    return before if _names(before) is not None else ""


def _calling_check(tests: str, name: str) -> str:
    return f"{tests}\n\ncheck({name})\n" if re.search(r"^def\s+check\s*\(", tests, re.M) else tests


def _tested_name(tests: str, solution: str) -> str:
    """The function that tests call: of those that the solution defines the last one, without a solution the first."""
    called = _names(tests) or []
    defined = [name for name in re.findall(r"^def\s+(\w+)", solution, re.M) if name in called]
    own = [name for name in called if not hasattr(builtins, name)]
    return defined[-1] if defined else own[0] if own and not solution else ""


def _names(code: str) -> list[str] | None:
    """The names that are called, from the outside in and in order; None if this is no Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]


# What MBPP+ writes as lists, because JSON has nothing else, by problem number. As in EvalPlus's loader.
_Convert = Callable[[Any], Any]


def _keep(value: Any) -> Any:
    return value


def _items(convert: _Convert) -> _Convert:
    return lambda values: [convert(value) for value in values]


def _tuple_of(convert: _Convert) -> _Convert:
    return lambda values: tuple(convert(value) for value in values)


def _first(*converts: _Convert) -> _Convert:
    """The first arguments, each by a conversion of its own; further ones stay."""
    return lambda values: [
        (converts[index] if index < len(converts) else _keep)(value) for index, value in enumerate(values)
    ]


def _deep(value: Any) -> Any:
    return tuple(_deep(item) for item in value) if isinstance(value, list) else value


def _if_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _set_or_dict(value: Any) -> Any:
    return set(value) if isinstance(value, list) and value else {}


def _dict_of_tuples(value: Any) -> Any:
    return {key: tuple(item) for key, item in value.items()}


_MBPP_TYPES: list[tuple[tuple[int, ...], _Convert]] = [
    (
        (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809),
        _items(tuple),
    ),
    ((63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780), _items(_items(tuple))),
    ((75, 413, 444, 753), _first(_items(tuple))),
    ((106, 750), _first(_keep, tuple)),
    ((115,), _items(_items(_set_or_dict))),
    ((124,), _first(float, complex)),
    ((250, 307, 405, 446, 617, 720, 763, 808), _first(tuple)),
    ((252,), _items(complex)),
    ((259, 401, 445), _items(_tuple_of(tuple))),
    ((278,), _items(_tuple_of(_if_list))),
    ((580, 615, 791), _deep),
    ((722,), _first(_dict_of_tuples)),
]


def _with_types(number: int, inputs: Iterable[Any]) -> list[Any]:
    convert = next((convert for numbers, convert in _MBPP_TYPES if number in numbers), _keep)
    return [convert(arguments) for arguments in inputs]
