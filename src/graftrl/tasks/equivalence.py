r"""Are two final answers the same mathematical object? math-verify decides; the guards here correct its kinds of fault.

math-verify is generous where it should be exact: it rounds decimals to six places and chops differences below 1e-15, so
all tiny numbers are equal; it takes the right-hand side of any equation as the answer; two equations that it cannot
solve are equal; words become products of letters, so anagrams are equal; units and number bases are thrown away. And
it is strict about spelling: unicode mathematics, thin spaces in numbers, `4.5e33`, reversed chains of inequalities.
Here a spelling is normalised first, a positive verdict stands only if it cannot be refuted, and a negative one is
reconsidered where both answers are sets of real numbers.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.logic import And as ParsedAnd
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.grader import is_expr_of_only_symbols
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

# Without its own time-outs math-verify warns once per process; the pool is the clock here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Units are dropped here: math-verify takes many trailing letters for a unit, so that 2t and 2ab would be 2.
_EXTRACTION = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
_BOXED_ONLY = [replace(_EXTRACTION, normalization_config=replace(_EXTRACTION.normalization_config, units=False))]
_HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # how a percent sign is parsed
_DECIMAL_TOLERANCE = 2e-6  # relative; 0.333333 is 1/3, 0.33333 is not
# Where symbols get values: positive, so that roots and logarithms have one branch, and of different magnitudes.
_SAMPLE_POINTS = ((7, 19), (23, 17), (89, 13))


# --- spelling -------------------------------------------------------------------------------------------------------

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "，": ",", "（": "(", "）": ")",
    }
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_REWRITES = (
    # math-verify sees the imaginary unit only where it stands alone
    (re.compile(r"((?<![A-Za-z\\])[A-Za-z]|[\d})])i(?![A-Za-z])"), r"\1 i"),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}"),
    (re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\w+))"), lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}"),
    (re.compile(r"(?<=\d)(?:\\[,;: ]|,\s*\\!\s*|\{,\})(?=\d{3}(?!\d))"), ""),  # 10\,080 and 29,\!322
    (re.compile(r"\\frac\s*(\\pi|\d)\s*(\\pi|\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|.)"), ""),
    (re.compile(r"_\{?\\(max|min|odot|oplus)\}?(?![A-Za-z])"), r"_{\1}"),
    (re.compile(r"(?<![A-Za-z\\])E(?=_)"), r"\\mathcal{E}"),  # a symbol with an index, not Euler's number
    (re.compile(r"(?<=\d)\.(?=\s*(?:[^\d\s]|$))"), ""),  # -1./3 and 5.
    (
        re.compile(r"(?<![A-Za-z\\\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.{])"),
        lambda match: rf"{match[1]} \cdot 10^{{{int(match[2])}}}",
    ),
)
_STYLED_NUMBER = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it)|boldsymbol|bm|underline|mbox)\s*\{\s*([-+]?[\d.,/]+)\s*\}"
)
_INTEGER = re.compile(r"-?\d{1,1000}")
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+")
_LEADING_RELATION = re.compile(r"^(?:=|\\approx|\\sim|\\simeq)\s*")


def normalize_spelling(answer: str) -> str:
    """The same answer in the LaTeX that math-verify reads: no delimiters, unicode mathematics or spaced thousands."""
    text = answer.strip().translate(_UNICODE)
    for left, right in _MATH_DELIMITERS:
        inner = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and inner and left not in inner:
            text = inner.strip()
            break
    text = _STYLED_NUMBER.sub(r"\1", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _LEADING_RELATION.sub("", text.strip().rstrip(".,; "))
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    return text


# --- what the spelling says and the parsed form no longer does -----------------------------------------------------

_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
_WORDS = re.compile(r"[a-z][a-z0-9 ,;'\-]*")
_BASE = re.compile(r"(?P<digits>[0-9A-Za-z]+)_\{?(?P<base>\d{1,2})\}?")
_UNIT = re.compile(r"(?<=[\d}\s])\s*(?P<name>[A-Za-z]+)\.?\s*(?:\^\{?(?P<power>[23])\}?)?$")
_TRAILING_TEXT = re.compile(r"(?<=[\w})%\s])(?<![,;=]\s)\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}\s*(?:\^\{?\d\}?)?$")
_TRAILING_SPACE = re.compile(r"(?:\\[ ,;:!]|\s|~|\\$)+$")
_TRAILING_WORDS = re.compile(r"(?<=[\d})\s])\s*(?<!\\)(?P<words>[A-Za-z]+(?:\.?\s+[A-Za-z]+)*)\.?\s*(?:\^\{?[23]\}?)?$")
_UNIT_SIGN = re.compile(r"(?:(?P<percent>\\?%)|\^\s*\{?\s*\\circ\s*\}?)$")
_UNIT_NAMES = {
    spelling: unit
    for unit, spellings in {
        "millimetre": "mm millimeter millimetre", "centimetre": "cm centimeter centimetre", "metre": "m meter metre",
        "kilometre": "km kilometer kilometre", "inch": "in inch inche", "foot": "ft foot feet", "yard": "yd yard",
        "mile": "mi mile", "second": "s sec second", "minute": "min minute", "hour": "h hr hour", "day": "day",
        "week": "week", "month": "month", "year": "yr year", "gram": "g gram", "kilogram": "kg kilogram",
        "cent": "cent", "dollar": "dollar", "percent": "pct percent", "degree": "deg degree", "radian": "rad radian",
    }.items()
    for spelling in spellings.split()
}  # fmt: skip


def _words(answer: str) -> tuple[str, ...] | None:
    """The sorted list of words or phrases when the answer is text rather than mathematics, else None."""
    unwrapped = _TEXT_COMMAND.sub(r"\1", answer)
    text = " ".join(unwrapped.replace("~", " ").replace(r"\ ", " ").lower().split()).strip(" .()")
    if not _WORDS.fullmatch(text):
        return None
    if unwrapped == answer and not re.search("[a-z]{4}", text):  # without \text, `abc` is a product of variables
        return None
    return tuple(sorted(part.strip() for part in re.split(r"[,;]|\band\b", text) if part.strip()))


def _plain_words(answer: str) -> tuple[str, ...]:
    text = " ".join(_TEXT_COMMAND.sub(r"\1", answer).lower().split()).strip(" .()")
    return tuple(sorted(part.strip(" ()") for part in re.split(r"[,;]|\band\b", text) if part.strip()))


def _is_unit(name: str) -> bool:
    name = name.lower()
    return name in _UNIT_NAMES or name.removesuffix("s") in _UNIT_NAMES


def _without_unit(answer: str, one_letter: bool) -> str:
    """The answer without a trailing unit or counted noun; a single letter counts as one only if `one_letter`."""
    text = _TRAILING_SPACE.sub("", _TRAILING_TEXT.sub("", answer)) or answer
    found = _TRAILING_WORDS.search(text)
    if found is None:
        return text
    words = found["words"].replace(".", " ").split()
    if words[0] in ("and", "or") or (len(words) == 1 and len(words[0]) == 1 and not one_letter):
        return text
    if not all(_is_unit(word) or len(word) > 3 or word in ("per", "sq", "cu") for word in words):
        return text
    return text[: found.start()].rstrip() or text


def _unit(answer: str) -> tuple[str, str] | None:
    if sign := _UNIT_SIGN.search(answer):
        return ("percent" if sign["percent"] else "degree", "1")
    found = _UNIT.search(_TEXT_COMMAND.sub(r" \1", answer).rstrip())
    if found is None or (len(found["name"]) == 1 and not _TRAILING_TEXT.search(answer)):  # a variable
        return None
    name = found["name"].lower()
    unit = _UNIT_NAMES.get(name) or _UNIT_NAMES.get(name.removesuffix("s"))
    return (unit, found["power"] or "1") if unit else None


def _spelling_verdict(reference: str, answer: str) -> bool | None:
    """True or False where the spelling alone decides, None where the parsed forms have to."""
    reference_words = _words(reference)
    if reference_words is not None:
        return reference_words == _plain_words(answer)
    base, answer_base = _BASE.fullmatch(reference), _BASE.fullmatch(answer)
    if base and answer_base:
        return base["base"] == answer_base["base"] and base["digits"].lstrip("0") == answer_base["digits"].lstrip("0")
    unit, answer_unit = _unit(reference), _unit(answer)
    if unit and answer_unit and unit != answer_unit:
        return False
    return None


# --- parsed forms ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)  # a reference is parsed once for all responses of its group
def _parsed(answer: str) -> tuple[Any, ...]:
    return tuple(parse(rf"\boxed{{{answer}}}", _BOXED_ONLY, parsing_timeout=None))


def _parsed_reference(reference: str) -> tuple[Any, ...]:
    return _parsed(_without_unit(reference, one_letter=False))


def _parsed_answer(answer: str, gold: Any) -> tuple[Any, ...]:
    """One letter after an answer can be a unit only when the reference is a plain value."""
    value = gold.rhs if isinstance(gold, sympy.Eq) else gold
    return _parsed(_without_unit(answer, one_letter=not getattr(value, "free_symbols", None)))


def parsable(answer: str) -> bool:
    """Whether the answer can be graded as mathematics or as words. May be slow on hostile input: give it a clock."""
    text = normalize_spelling(answer)
    return _words(text) is not None or any(not isinstance(form, str) for form in _parsed_reference(text))


def equivalent(reference: str, answer: str) -> bool:
    """Whether the answer is the reference. May be slow, or hang in C code, on hostile input: give it a clock."""
    reference, answer = normalize_spelling(reference), normalize_spelling(answer)
    if not answer or not reference:
        return False
    if reference == answer:
        return True
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):  # most pairs; the parser costs milliseconds
        return int(reference) == int(answer)
    verdict = _spelling_verdict(reference, answer)
    if verdict is not None:
        return verdict
    if not (gold := _parsed_reference(reference)) or not (target := _parsed_answer(answer, gold[0])):
        return False
    if equal_forms(gold, target):
        return not _answers_with_equation(gold[0], target[0], answer)
    return _same_real_set((gold[0], reference), (target[0], answer))


def equal_forms(gold: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
    """math-verify's verdict on two parses, unless it can be refuted."""
    if not gold or not target:
        return False
    if not verify(list(gold), list(target), allow_set_relation_comp=True, timeout_seconds=None):
        return _equal_complex(gold[0], target[0])
    return not _refuted(gold[0], target[0])


def _equal_complex(gold: Any, target: Any) -> bool:
    """Whether two expressions are equal once the letter i, parsed as a symbol, is the imaginary unit."""
    if not (isinstance(gold, sympy.Expr) and isinstance(target, sympy.Expr)):
        return False
    units = {symbol: sympy.I for symbol in gold.free_symbols | target.free_symbols if symbol.name == "i"}
    if not units:
        return False
    gold, target = gold.subs(units).doit(), target.subs(units).doit()
    return bool(verify(gold, target, timeout_seconds=None)) and not _refuted(gold, target)


def _answers_with_equation(gold: Any, target: Any, answer: str) -> bool:
    """Whether an answer like `2x = 5` poses as the value 5: only `x = 5`, or a true chain such as `2 + 3 = 5`, does."""
    if _links(gold) or not (links := _links(target)) or not all(isinstance(link, sympy.Eq) for link in links):
        return False
    subject = links[0].lhs
    if subject.free_symbols or isinstance(subject, AppliedUndef):
        return not (is_expr_of_only_symbols(subject) or isinstance(subject, AppliedUndef))
    degrees = "circ" in answer  # parsed as plain numbers, so `sin 30° = 1/2` cannot be checked
    return not degrees and any(_different(link.lhs, link.rhs) for link in links if not link.free_symbols)


def _links(form: Any) -> list[Any]:
    """The relations of a chain `a < b < c`, of a conjunction or of a single relation; empty for anything else."""
    if isinstance(form, Relational):
        return [form]
    if isinstance(form, ParsedAnd):
        return list(form._unsorted_args)
    return []


def _refuted(gold: Any, target: Any) -> bool:
    """Whether two forms that math-verify holds equal are certainly not."""
    if gold == target:
        return False
    gold_links, target_links = _links(gold), _links(target)
    if gold_links and target_links:
        if len(gold_links) == len(target_links) == 1 and isinstance(gold, sympy.Eq) and isinstance(target, sympy.Eq):
            return not _same_equation(gold, target)
        return False
    if gold_links and isinstance(gold_links[-1], sympy.Eq):
        return _refuted(gold_links[-1].rhs, target)
    if target_links and isinstance(target_links[-1], sympy.Eq):
        return _refuted(gold, target_links[-1].rhs)
    if isinstance(gold, sympy.Interval) and isinstance(target, sympy.Interval):
        return _different(gold.start, target.start) or _different(gold.end, target.end)
    if isinstance(gold, sympy.FiniteSet) and isinstance(target, sympy.FiniteSet):
        return any(all(_refuted(a, b) for b in target.args) for a in gold.args)
    if isinstance(gold, sympy.Tuple) and isinstance(target, sympy.Tuple) and len(gold) == len(target):
        return any(_refuted(a, b) for a, b in zip(gold, target, strict=True))
    if isinstance(gold, sympy.MatrixBase) and isinstance(target, sympy.MatrixBase) and gold.shape == target.shape:
        return any(_different(a, b) for a, b in zip(gold.flat(), target.flat(), strict=True))
    if not isinstance(gold, sympy.Set) and len(getattr(target, "_unsorted_args", ())) > 1:
        return True  # `2, 2` is no way to answer 2
    if isinstance(gold, sympy.Symbol) or isinstance(target, sympy.Symbol):
        return False  # math-verify compares names here, `$abc$` is a*b*c
    return isinstance(gold, sympy.Expr) and isinstance(target, sympy.Expr) and _different(gold, target)


def _different(a: Any, b: Any) -> bool:
    """Whether two expressions are proven to differ, to any magnitude: 1/2004! is neither 1/2006! nor 0."""
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)) or a == b:
        return False
    if _HUNDREDTH in (*a.args, *b.args):  # 50% may be given as 50 or as 0.5
        bare = [form.xreplace({_HUNDREDTH: sympy.S.One}) for form in (a, b)]
        return _different(a.doit(), b.doit()) and _different(bare[0], bare[1])
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    points = _SAMPLE_POINTS if symbols else ((1, 1),)
    return all(
        _differ_at(a, b, {symbol: sympy.Rational(p + 6 * i, q) for i, symbol in enumerate(symbols)}) for p, q in points
    )


def _differ_at(a: sympy.Expr, b: sympy.Expr, point: dict[Any, Any]) -> bool:
    try:
        if a.has(sympy.Float) or b.has(sympy.Float):
            left, right = (abs(form.subs(point)).evalf(15) for form in (a, b))
            gap = abs((a - b).subs(point)).evalf(15)
            return bool(gap > _DECIMAL_TOLERANCE * max(left, right))
        # evalf raises its working precision until the difference has a significant digit or `maxn` digits have not
        # shown one; in the second case the result carries one bit of precision
        gap = abs(a.subs(point).doit() - b.subs(point).doit()).evalf(15, maxn=300)
        return bool(gap.is_Float and gap._prec > 1 and gap > 0) or bool(gap.is_Rational and gap > 0)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return False  # no number to compare: nothing is proven


def _same_equation(gold: sympy.Eq, target: sympy.Eq) -> bool:
    """Equal solution sets: proportional sides, or equal solutions for one of the symbols."""
    if gold.free_symbols != target.free_symbols:
        return False
    try:
        a, b = sympy.sympify(gold.lhs - gold.rhs).doit(), sympy.sympify(target.lhs - target.rhs).doit()
        if a == b:
            return True
        if a == 0 or b == 0:
            return False
        ratio = sympy.simplify(a / b)
        if not ratio.free_symbols:
            return bool(ratio.is_finite and ratio != 0)
        for symbol in sorted(gold.free_symbols, key=str):
            solutions = sympy.solve(a, symbol), sympy.solve(b, symbol)
            if solutions[0] and solutions[1]:
                return all(
                    any(sympy.simplify(x - y) == 0 for y in solutions[1 - side])
                    for side in (0, 1)
                    for x in solutions[side]
                )
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return False
    return False


# --- sets of real numbers ------------------------------------------------------------------------------------------


def _same_real_set(gold: tuple[Any, str], target: tuple[Any, str]) -> bool:
    """Whether two forms, at least one of them with inequalities in one variable, are the same set of reals."""
    if not any(
        isinstance(link, Relational) and not isinstance(link, sympy.Eq) for link in _relations(gold[0], target[0])
    ):
        return False
    symbols = gold[0].free_symbols | target[0].free_symbols
    if len(symbols) != 1:
        return False
    try:
        first, second = (_real_set(form, text, symbols) for form, text in (gold, target))
        return first is not None and second is not None and first == second
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return False


def _relations(*forms: Any) -> list[Any]:
    return [link for form in forms for part in _alternatives(form) for link in _links(part)]


def _alternatives(form: Any) -> list[Any]:
    return list(form.args) if isinstance(form, sympy.FiniteSet) else [form]


def _real_set(form: Any, text: str, symbols: set[Any]) -> Any:
    """The form as a sympy set, None when it is no set. Inequalities are joined by "and" unless "or" is written."""
    parts = _alternatives(form)
    if all(_links(part) for part in parts):
        real = sympy.Symbol("x", real=True)
        sets = [
            sympy.Intersection(
                *(type(link)(link.lhs, link.rhs).subs(dict.fromkeys(symbols, real)).as_set() for link in _links(part))
            )
            for part in parts
        ]
        return sympy.Union(*sets) if re.search(r"\bor\b|\\lor|\\vee", text) else sympy.Intersection(*sets)
    return form.doit() if isinstance(form, sympy.Set) and not form.free_symbols else None
