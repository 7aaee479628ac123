"""Values as text that cannot do anything: JSON, with tags for the types of Python that JSON lacks.

A list is a JSON list; every other container is an object with one key. Subclasses travel as the type they extend, which
is all that the other side may see of them. What is no plain data arrives as an `Opaque`, equal to nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_SMALL = 2**63  # larger integers are written in base 16: reading them is linear, and Python limits decimal digits


@dataclass(frozen=True, eq=False)
class Opaque:
    """Stands for an object that is no plain data. kind: its type's name."""

    kind: str


def dumps(value: Any) -> bytes:
    """One line of text, without its end. Raises RecursionError for values that are nested too deeply."""
    return json.dumps(_encode(value), separators=(",", ":")).encode()


def loads(line: bytes | str) -> Any:
    """The value of a line, whoever wrote it. Raises ValueError, TypeError or RecursionError for anything malformed."""
    return json.loads(line, object_hook=_decode)


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is list:
        return _items(value)
    if isinstance(value, int):
        number = int(value)
        return number if -_SMALL < number < _SMALL else {"i": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, tuple):
        return {"t": _items(value)}
    if isinstance(value, dict):
        return {"d": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return _items(value)
    if isinstance(value, set | frozenset):
        return {"f" if isinstance(value, frozenset) else "s": _items(value)}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"a" if isinstance(value, bytearray) else "b": value.hex()}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():  # a scalar; arrays equal nothing
        item = value.item()
        return {"o": kind.__name__} if type(item) is kind else _encode(item)
    return {"o": f"{kind.__module__}.{kind.__qualname__}"[:100]}


def _items(values: Any) -> list[Any]:
    kinds = set(map(type, values))
    if kinds == {int} and min(values) > -_SMALL and max(values) < _SMALL:
        return list(values)
    if kinds <= {str, float, bool, type(None)}:
        return list(values)
    return [_encode(value) for value in values]


def _decode(tagged: dict[str, Any]) -> Any:
    if len(tagged) != 1:
        raise ValueError("an object needs exactly one tag")
    ((tag, content),) = tagged.items()
    if tag == "i" and isinstance(content, str):
        return int(content, 16)
    if tag == "b" and isinstance(content, str):
        return bytes.fromhex(content)
    if tag == "a" and isinstance(content, str):
        return bytearray.fromhex(content)
    if tag == "o" and isinstance(content, str):
        return Opaque(content)
    if not isinstance(content, list):
        raise ValueError(f"the tag {tag!r} needs a list")
    if tag == "t":
        return tuple(content)
    if tag == "d":
        return dict(content)
    if tag == "s":
        return set(content)
    if tag == "f":
        return frozenset(content)
    if tag == "c":
        real, imaginary = content
        return complex(float(real), float(imaginary))
    raise ValueError(f"unknown tag {tag!r}")
