"""Tables of text cells as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$", "<": r"$<$", "−": "$-$",
    }
)  # fmt: skip


@dataclass(frozen=True)
class TextTable:
    """The first `text_columns` columns hold text, the others numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    text_columns: int
    caption: str


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """The first `text_columns` columns are aligned left, the others right."""
    rule = ["---" if i < text_columns else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """The same as a tabular for the package booktabs; cells are plain text, LaTeX's own characters are escaped."""
    lines = [" & ".join(cell.translate(_LATEX) for cell in cells) + r" \\" for cells in (header, *rows)]
    columns = "l" * text_columns + "r" * (len(header) - text_columns)
    body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}"])


def as_markdown(table: TextTable) -> str:
    """Title, table and caption."""
    body = markdown_table(table.header, table.rows, table.text_columns)
    return "\n\n".join(part for part in (f"**{table.title}**", body, table.caption) if part)


def as_latex(table: TextTable) -> str:
    """The tabular under a comment with its title."""
    return f"% {table.title}\n{latex_table(table.header, table.rows, table.text_columns)}"


def plus_minus(mean: float, half_width: float | None, sign: str = "") -> str:
    """`+0.071 ± 0.029`; the mean alone without an interval."""
    return f"{mean:{sign}.3f}" + ("" if half_width is None else f" ± {half_width:.3f}")
