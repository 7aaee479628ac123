from __future__ import annotations

from graftrl.report.tables import latex_table, markdown_table


def test_markdown_aligns_text_left_and_numbers_right():
    assert markdown_table(["a", "b", "c"], [["x", "y", "1"]], 2) == "| a | b | c |\n| --- | --- | ---: |\n| x | y | 1 |"


def test_latex_is_a_booktabs_tabular_with_its_characters_escaped():
    assert latex_table(["model_a", "50 %"], [["A & B", "1.0 ± 0.1"], ["{x}", "< 0.001"]]) == "\n".join(
        [
            r"\begin{tabular}{lr}",
            r"\toprule",
            r"model\_a & 50 \% \\",
            r"\midrule",
            r"A \& B & 1.0 $\pm$ 0.1 \\",
            r"\{x\} & $<$ 0.001 \\",
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )
