"""Pairs (reference, answer) by the kind of fault that they guard against."""

from __future__ import annotations

import pytest

from graftrl.tasks.equivalence import equivalent, normalize_spelling, parsable

EQUAL = {
    "fractions and decimals": [
        (r"\frac{1}{3}", r"\frac{2}{6}"), (r"\frac12", "0.5"), ("0.5", r"\frac12"), (r"\frac13", "0.333333"),
        (r"\frac{2}{3}", "0.666667"), (r"\frac32", r"1\frac12"), ("5", "5.0"), ("5", "5."), ("5", "05"),
        ("0.1", "0.10"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\sqrt2", "1.414214"),
        ("5", r"\frac{10}{2}"),
        ("-1./3", r"-\frac13"), (r"\frac \pi4", r"\frac{\pi}{4}"), ("5", "$5$"), ("5", r"\(5\)"), ("5", r"\textbf{5}"),
        ("5", r"\boldsymbol{5}"), ("5", r"\approx 5"), ("120", "5!"),
    ],
    "algebra": [
        ("2x+3", "3+2x"), ("(x+1)^2", "x^2+2x+1"), ("ab", "ba"), (r"\sin^2 x+\cos^2 x", "1"),
        ("2^{n+1}", r"2\cdot 2^n"),
        ("1 + 274i", "1+274 i"), ("i", r"\sqrt{-1}"), ("-i", r"\frac{1}{i}"), ("E_{1}", "E_1"),
        (r"\sin^2 t", r"\sin^2 t"),
    ],
    "tiny and huge numbers": [
        (r"\frac{1}{2004!}", r"\frac{1}{2004!}"), ("10^{-7}", "0.0000001"), (r"\frac{1}{10^{20}}", "10^{-20}"),
        ("4.5e33", r"4.5\times 10^{33}"), ("3e8", r"3\cdot 10^8"),
    ],
    "intervals and inequalities": [
        ("(0,12.5)", "0<x<12.5"), ("0<x<12.5", "(0,12.5)"), ("[0,12.5]", r"0\le x\le 12.5"), ("x>3", r"(3,\infty)"),
        (r"(3,\infty)", "x>3"), (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"), ("1<x<2", "2>x>1"),
        (r"x>1 \text{ and } x<2", "(1,2)"), ("x<2", "2x<4"), ("x>-1", "-x<1"), (r"x \in [-2,7]", "[-2,7]"),
        (r"x\in[-2,7]", r"-2\le x\le 7"),
    ],
    "lists and sets": [
        ("1331 and 1728", "1331, 1728"), ("1331 and 1728", "1728 and 1331"), (r"1331 \text{ and } 1728", "1331,1728"),
        (r"\{1,2\}", "2,1"), ("x=1 or x=2", "1,2"), ("1,2", r"x=1 \text{ or } x=2"), ("(1,2),(3,4)", "(3,4),(1,2)"),
        ("(1,2)", "(x,y)=(1,2)"), (r"\pm 2", "2,-2"), ("2,-2", r"\pm 2"), (r"1\pm\sqrt{2}", r"1+\sqrt2,1-\sqrt2"),
        (r"\emptyset", r"\{\}"),
    ],
    "equations": [
        ("3*x-1*y+13=0", "3x-y+13=0"), ("3x-y+13=0", "6x-2y+26=0"), ("3x-y+13=0", "y=3x+13"), ("xy=2", r"y=\frac2x"),
        ("x^2+y^2=1", "x^2+y^2-1=0"), ("y=2x", "2x"), ("2x", "f(x)=2x"), ("x=5", "5"), ("5", "x=5"), ("5", "2+3=5"),
        ("5", "f(2)=5"), ("10", r"\binom{5}{2}=10"), (r"\frac12", r"\sin 30^\circ=\frac12"),
    ],
    "units and signs": [
        (r"50\%", "50"), (r"50\%", "0.5"), ("0.5", r"50\%"), (r"50\%", r"\frac12"), (r"5\text{ cm}", "5"),
        ("5", r"5\mathrm{cm}"), ("5 cm", "5"), ("5", "5 dollars"), (r"6\text{ cm}^2", "6"), (r"\$5", "5"),
        (r"10\text{ meters}", r"10\text{ m}"), (r"30^\circ", "30"), ("30", r"30^{\circ}"), ("30", "30°"), ("5", "5 m"),
        (r"4\pi h\text{ cm}", r"4\pi h"), (r"8\sqrt{3} \text { square inches}", r"8\sqrt3"),
    ],
    "thousands": [
        ("1,000", "1000"), ("1000", r"1{,}000"), (r"10\,080", "10,080"), ("12345678", "12,345,678"),
        (r"\dfrac{1}{29,\!322,\!216}", r"\frac{1}{29322216}"), (r"\$32{,}348", "32348"), ("1000", "1 000"),
        ("111111111", r"111, \! 111, \! 111"),
        (r"50\%", r"50\text{ percent}"), (r"30^\circ", r"30\text{ degrees}"), ("(1,2)", "1,2"),
    ],
    "unicode": [
        (r"\frac12", "½"), (r"\sqrt3", "√3"), (r"2\pi", "2π"), ("-5", "−5"), ("6", "2×3"), (r"x\le 3", "x≤3"),
        (r"\infty", "∞"), ("x^2", "x²"),
    ],
    "text": [
        (r"\text{even}", "even"), (r"\text{Even}", r"\text{even}"), (r"\text{(C)}", "C"),
        (r"\text{(C)}", r"\textbf{(C)}"),
        ("A", r"\text{A}"), (r"\text{(E)},", r"\text{E}"), (r"\text{June 20}", "June 20"), ("A, C", "C, A"),
        (r"\text{Briana, Debra}", "Debra and Briana"), (r"\text{no solution}", "No solution"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
        (r"\begin{pmatrix}1/2\\0\end{pmatrix}", r"\begin{pmatrix}0.5\\0\end{pmatrix}"),
    ],
    "number bases": [("1011_2", "1011_{2}"), ("1011_2", "1011")],
}  # fmt: skip

DIFFERENT = {
    "fractions and decimals": [
        (r"\frac13", "0.33"), (r"\frac{2}{3}", "0.6667"), (r"\sqrt2", "1.41"), (r"\pi", "3.14"),
        (r"\pi", r"\frac{22}{7}"),
        ("5", "-5"), ("5", "5!"), ("5", "five"), ("5", "not 5"), ("12,34", "1234"), ("1", "1,000"), ("5", " "),
    ],
    "algebra": [
        ("x", "y"), ("2t", "2"), ("2ab", "2"), (r"\frac12 h", r"\frac12"), (r"\sin^2 t", r"\sin^2"),
        (r"2\pi r", r"2\pi"),
        ("2", "2t"), ("2i", "2"), ("3+4i", "3-4i"), ("p - q", "q-p"), ("E_1", "E_2"),
    ],
    "tiny and huge numbers": [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), (r"\frac{1}{2004!}", "0"), ("0", r"\frac{1}{2004!}"),
        ("0", "10^{-30}"),
        ("e^{-1000}", "e^{-1001}"), ("10^{-30}", r"2\cdot 10^{-30}"), ("0.0000001", "0.0000002"), ("1+10^{-20}", "1"),
        (r"\frac{x}{2004!}", r"\frac{x}{2006!}"), (r"\pi\cdot 10^{-30}", r"2\pi\cdot10^{-30}"), ("2004!", "2004!+1"),
        (r"\pi+e^{-100}", r"\pi"), ("10^{-30}x", r"2\cdot10^{-30}x"), (r"\sqrt2,10^{-20}", r"\sqrt2,2\cdot10^{-20}"),
        ("(0,10^{-20})", r"(0,2\cdot10^{-20})"), ("2^{1009}", "2^{1010}"), ("4.5e33", r"4.6\times 10^{33}"),
        ("6.7e-27", "6.8e-27"), (r"\infty", r"-\infty"), ("0", r"\frac00"), ("1", r"\infty"),
        (r"\begin{pmatrix} 10^{-30} \\ 0 \end{pmatrix}", r"\begin{pmatrix} 2\cdot10^{-30} \\ 0 \end{pmatrix}"),
    ],
    "intervals and inequalities": [
        ("[0,12.5]", "(0,12.5)"), ("(0,12.5)", "0<=x<12.5"), ("[1,2)", "[1,2]"), (r"(3,\infty)", r"x\ge3"),
        ("x<1", "x<2"),
        ("x<1", "x>1"), ("x<1", "-x<1"), (r"(1,2)\cup(3,4)", "(1,2)"), (r"x \in [-2,7]", "[-2,8]"), ("x>1", "x=1"),
    ],
    "lists and sets": [
        ("1331 and 1728", "1728"), ("1331 and 1728", "1331"), ("3", "1,2,3"), ("1,2,3", "3"), ("1,2,3", "1,2"),
        ("1 or 2", "2"), ("5", r"5 \text{ or } 6"), ("x=1,x=2", "x=1"), ("(1,2)", "(2,1)"), ("(2,1)", "1,2"),
        ("(1,2),(3,4)", "(1,2),(3,5)"), ("42", r"1,2,\ldots,42"), ("2", "2,2"), (r"\pm 2", "2"), ("2", r"\pm 2"),
        (r"\pm 2", r"\pm 3"),
        (r"1\pm\sqrt{2}", r"1+\sqrt2"), ("x=1,y=2", "x=1,y=3"), (r"\varnothing", "0"),
    ],
    "equations": [
        ("3*x-1*y+13=0", "3x + 4y + 14=0"), ("x+y=0", "x-y=0"), ("a+b=0", "a+2b=0"), ("x^2+y^2=0", "x^2+2y^2=0"),
        ("y=2x", "y=3x"), ("x^2+y^2=25", "x^2+y^2=5"), (r"\sin x=0", r"\cos x=0"), ("x^5-x+1=0", "x^5-x+2=0"),
        ("e^x+y=0", "e^x+2y=0"), ("x=5", "y=5"), ("5", "2x=5"), ("5", "2+2=5"), ("5", "x+1=5"), ("5", "x^2=5"),
        (r"y=\pm x", "y=x"), ("5", r"5 \neq 6"),
    ],
    "units and signs": [
        (r"5\text{ cm}", r"5\text{ m}"), (r"5\text{ cm}^2", r"5\text{ cm}^3"),
        (r"10\text{ minutes}", r"10\text{ hours}"),
        (r"50\%", "5"), (r"30^\circ", "31"), (r"75\%", r"75^\circ"), (r"15\mbox{ cm}^2", r"15^\circ"),
    ],
    "text": [
        (r"\text{even}", r"\text{odd}"), (r"\text{dog}", r"\text{god}"), ("even", "neve"),
        (r"\text{east}", r"\text{seat}"),
        (r"\text{C}", "D"), (r"\text{June 20}", "20"), (r"\text{A, C}", "A"), (r"\text{even}", "5"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ],
    "number bases": [("1011_2", "1011_3"), ("123_5", "123_6")],
}  # fmt: skip


def _flat(table: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    return [pair for pairs in table.values() for pair in pairs]


@pytest.mark.parametrize(("reference", "answer"), _flat(EQUAL))
def test_equal_answers_are_equivalent(reference: str, answer: str) -> None:
    assert equivalent(reference, answer)


@pytest.mark.parametrize(("reference", "answer"), _flat(DIFFERENT))
def test_different_answers_are_not_equivalent(reference: str, answer: str) -> None:
    assert not equivalent(reference, answer)


@pytest.mark.parametrize("answer", [pair[0] for pair in _flat(EQUAL)[::3]])
def test_normalizing_the_spelling_twice_changes_nothing(answer: str) -> None:
    assert normalize_spelling(normalize_spelling(answer)) == normalize_spelling(answer)


@pytest.mark.parametrize("answer", ["", "np.arcsin(10/13)", "t(0,4]"])
def test_an_answer_that_cannot_be_graded_is_not_parsable(answer: str) -> None:
    assert not parsable(answer)
