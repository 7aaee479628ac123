r"""Finding the final answer of a response: the last \boxed{...} (or \fbox{...}) with balanced braces."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")


class BoxError(ValueError):
    """The response holds no usable box; the message is the reason to log."""


def last_box(response: str) -> str:
    r"""The content of the last outermost box, without the boxes nested inside it.

    Escaped braces do not count as braces. A box that is opened after the last whole one and never closed hides it: what
    the response ends on is cut off, and falling back to an earlier box would reward an answer it gave up.

    Raises BoxError when there is no box, the last one is not closed, or it is empty.
    """
    open_boxes: list[tuple[int, int]] = []  # (brace depth outside, start of the content)
    outermost: tuple[int, int] | None = None
    depth = 0
    for token in _TOKEN.finditer(response):
        text = token.group()
        if text.startswith(("\\boxed", "\\fbox")):
            open_boxes.append((depth, token.end()))
            depth += 1
        elif text == "{":
            depth += 1
        elif text == "}" and depth > 0:
            depth -= 1
            if open_boxes and open_boxes[-1][0] == depth:
                start = open_boxes.pop()[1]
                # a box that closes inside another one that never closes still counts; one inside a closed box does not
                outermost = (start, token.start())
    if outermost is None:
        raise BoxError("unclosed box" if open_boxes else "no boxed answer")
    if open_boxes and open_boxes[-1][1] > outermost[1]:
        raise BoxError("unclosed box")
    content = _BOX_COMMAND.sub("", response[outermost[0] : outermost[1]]).strip()
    if not content.strip("{} "):
        raise BoxError("empty box")
    return content
