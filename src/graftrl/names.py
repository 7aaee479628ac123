"""Short names of models and files that can name folders."""

from __future__ import annotations

from collections.abc import Sequence


def file_name(text: str) -> str:
    """The text with everything but ASCII letters, digits, '-', '_' and '.' replaced by '-', and no leading dot."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in text).lstrip(".")


def model_names(paths: Sequence[str]) -> list[str]:
    """Short names of models: the last part of each path; a second one of the same name gets a number."""
    names: list[str] = []
    for path in paths:
        plain = file_name(path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")) or "model"
        name, number = plain, 2
        while name in names:
            name, number = f"{plain}-{number}", number + 1
        names.append(name)
    return names
