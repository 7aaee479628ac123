"""The parts of a page about transfers: what came out beside the P-OPD paper's claims, lambda, budget and costs.

As in `graftrl.lab.pages`, what is said in words is made from the numbers: sign, interval and significance, no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graftrl.evaluation.intervals import t_interval
from graftrl.evaluation.significance import PairedTest, paired_t_test
from graftrl.lab import figures, paper
from graftrl.lab.optimum import Optimum, fit_optimum
from graftrl.lab.pairs import TRANSFERS
from graftrl.lab.results import BEFORE, Result, Scores, scores
from graftrl.lab.studies import BASELINE, CALIBRATIONS, EXPLORED, calibrated, explored
from graftrl.report.tables import markdown_table, plus_minus

if TYPE_CHECKING:
    from graftrl.lab.pages import Page

_SPANS = {"opd": "opd-spans", "p_opd": "p_opd-spans"}


def of(page: Page, transfer: str, method: str, last: bool = False) -> dict[int, float]:
    """Scores of a transfer's target by seed. `before`: without training, from whatever run starts there. A method that
    reads other tokenizers by spans of bytes goes by its own name too."""
    pair = TRANSFERS[transfer]
    if method == BEFORE:
        return {r.cell.seed: r.outcomes[pair.target].before for r in page.results if r.cell.pair == pair}
    found = scores(page.results, pair, method, pair.target, last)
    return found or scores(page.results, pair, _SPANS.get(method, method), pair.target, last)


def difference(first: Scores, second: Scores) -> PairedTest | None:
    """Paired by seed; None where the two share none."""
    shared = sorted(first.keys() & second.keys())
    return paired_t_test([first[s] for s in shared], [second[s] for s in shared]) if shared else None


def verdict(test: PairedTest | None, direction: int) -> str:
    """Whether a claim about the sign of a difference holds: 1 above 0, -1 below 0, 0 no difference that shows.

    "undecided" where the 95 % interval holds both 0 and the claimed side.
    """
    if test is None:
        return "not measured"
    if test.half_width is None:
        return "one seed: not tested"
    found = 0 if abs(test.mean) <= test.half_width else int(np.sign(test.mean))
    if found == direction:
        return "holds"
    return "undecided" if found == 0 else "does not hold"


# What came out --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A row of the page's first table."""

    question: str
    here: str
    claimed: str
    holds: str


def findings(page: Page) -> str:
    rows = [row for make in _FINDINGS for row in make(page)]
    table = [[row.question, row.here, row.claimed, row.holds] for row in rows]
    return (
        "## What came out\n\nDifferences of pass@1 are paired by seed, with their 95 % t interval; unless it says "
        "otherwise they are at the selected checkpoints. `M → A`: the proxy M teaches the target A. A claim holds, or "
        "does not, where the interval lies on one side of 0; it is not corrected for the number of rows. The paper's "
        f"figures: {paper.P_OPD_SOURCE}.\n\n"
        + markdown_table(["question", "here", "the paper", "holds here"], table, text_columns=4)
    )


def _said(test: PairedTest | None) -> str:
    if test is None:
        return "not measured"
    return f"{plus_minus(test.mean, test.half_width, '+')} ({test.n} seed{'s' if test.n > 1 else ''})"


def _mean(values: Scores) -> str:
    return f"{np.mean(list(values.values())):.3f}" if values else "not measured"


def _arrows(transfer: str) -> str:
    return transfer.replace("_trained", " (trained)").replace("-", " → ")


def _compared(page: Page, transfer: str, claimed: str, direction: int = 1) -> Finding:
    """P-OPD against OPD."""
    first, second = (of(page, transfer, method) for method in ("p_opd", "opd"))
    test, last = difference(first, second), difference(*(of(page, transfer, m, last=True) for m in ("p_opd", "opd")))
    here = f"P-OPD {_mean(first)}, OPD {_mean(second)}: {_said(test)}; at the last step {_said(last)}"
    return Finding(
        f"P-OPD against OPD, {_arrows(transfer)}: {TRANSFERS[transfer].description}",
        here if test else "not measured",
        claimed,
        verdict(test, direction),
    )


def _gained(page: Page, transfer: str, method: str, claimed: str, direction: int = 1, last: bool = False) -> Finding:
    """A method against the target's start."""
    test = difference(of(page, transfer, method, last), of(page, transfer, BEFORE))
    name = method.upper().replace("_", "-")
    here = f"{_mean(of(page, transfer, BEFORE))} to {_mean(of(page, transfer, method, last))}: {_said(test)}"
    return Finding(
        f"{name} against the target's start, {_arrows(transfer)}{', at the last step' if last else ''}",
        here if test else "not measured",
        claimed,
        verdict(test, direction),
    )


def _points(proxy: str, target: str = "8B") -> str:
    p_opd, opd = paper.P_OPD[proxy, "p_opd", target], paper.P_OPD[proxy, "opd", target]
    return f"{proxy} → {target}: P-OPD {p_opd}, OPD {opd} ({p_opd - opd:+.1f})"


def _main(page: Page) -> list[Finding]:
    over_grpo = difference(of(page, "M-A", "p_opd"), of(page, "M-A", BASELINE))
    own = difference(of(page, "M", BASELINE), of(page, "M", BEFORE))
    return [
        Finding(
            "What reinforcement learning gave the proxy M itself",
            f"{_mean(of(page, 'M', BEFORE))} to {_mean(of(page, 'M', BASELINE))}: {_said(own)}",
            f"4B: {paper.P_OPD['', 'before', '4B']} to {paper.P_OPD['', 'grpo', '4B']}",
            verdict(own, 1),
        ),
        _compared(page, "M-A", _points("4B")),
        _gained(page, "M-A", "p_opd", "8B: 17.3 to 47.5, as much as the proxy gained"),
        Finding(
            "P-OPD against GRPO on the target itself, M → A",
            f"P-OPD {_mean(of(page, 'M-A', 'p_opd'))}, GRPO {_mean(of(page, 'M-A', BASELINE))}: {_said(over_grpo)}",
            "after as many steps of exploration GRPO on the target is better; proxies that explore longer match it",
            verdict(over_grpo, -1),
        ),
    ]


def _weaker(page: Page) -> list[Finding]:
    more = _surplus(page, "S-A", "S")
    below = difference(of(page, "S", BASELINE), of(page, "S-A", BASELINE))
    return [
        _compared(page, "S-A", _points("1.7B")),
        Finding(
            "Does the target gain as much from the weak proxy S as that did itself?",
            f"S gained {_said(difference(of(page, 'S', BASELINE), of(page, 'S', BEFORE)))} and ended {_said(below)} "
            f"beside GRPO on A; A's gain by P-OPD minus S's: {_said(more)}"
            if more
            else "not measured",
            "8B gained 19.3 from a proxy that gained 17.0",
            verdict(more, 1),
        ),
    ]


def _surplus(page: Page, transfer: str, proxy: str) -> PairedTest | None:
    """The target's gain by P-OPD minus what reinforcement learning gave the proxy."""
    parts = [
        of(page, transfer, "p_opd"),
        of(page, transfer, BEFORE),
        of(page, proxy, BASELINE),
        of(page, proxy, BEFORE),
    ]
    seeds = set.intersection(*(set(part) for part in parts))
    target, start, after, before = ({s: part[s] for s in seeds} for part in parts)
    return difference({s: target[s] - start[s] for s in seeds}, {s: after[s] - before[s] for s in seeds})


def _surpassing(page: Page) -> list[Finding]:
    name = "M-A_trained"
    above = difference(of(page, name, BEFORE), of(page, "M", BASELINE))
    claims = (
        ("opd", -1, f"matching a weaker expert constrains what the target does better (the target here starts "
                    f"{_said(above)} above the proxy's end)"),
        ("p_opd", 1, "the target need not be worse than the proxy: a proxy at 45.2 brings 8B to 52.5"),
    )  # fmt: skip
    return [
        *(_gained(page, name, method, claimed, direction, last=True) for method, direction, claimed in claims),
        _compared(page, name, _points("7B of the generation before")),
    ]


def _sequence(page: Page) -> list[Finding]:
    start, direct, chained = (of(page, *where) for where in (("M-A", BEFORE), ("M-A", "p_opd"), ("M-S-A", "p_opd")))
    gained, lost = difference(chained, start), difference(chained, direct)
    whole = difference({s: direct[s] for s in direct if s in chained}, start)
    share = f"; {gained.mean / whole.mean:.0%} of the gain is kept" if gained and whole and whole.mean > 0 else ""
    there = {key: paper.P_OPD[key, "p_opd", "8B"] - paper.P_OPD["", "before", "8B"] for key in ("4B-1.7B", "4B")}
    return [
        Finding(
            "Through a smaller model, M → S → A: gain over the target's start",
            f"{_said(gained)}; against M → A {_said(lost)}{share}",
            f"4B → 1.7B → 8B: {there['4B-1.7B']:+.1f} of {there['4B']:+.1f}, "
            f"{there['4B-1.7B'] / there['4B']:.0%} of the gain",
            verdict(gained, 1),
        )
    ]


def _calibrations(page: Page) -> list[Finding]:
    optima = {proxy: optimum_of(page, f"{proxy}-A") for proxy in ("M", "S")}
    rows = [
        Finding(
            f"Best lambda, {proxy} → A",
            _spoken(optimum) if optimum else "not measured",
            f"{there} → 8B: {paper.P_OPD_OPTIMA[there]}",
            "not measured" if optimum is None
            else "holds" if optimum.low <= paper.P_OPD_OPTIMA[there] <= optimum.high and optimum.inside > 0.5
            else "does not hold",
        )
        for (proxy, optimum), there in zip(optima.items(), paper.P_OPD_OPTIMA, strict=True)
    ]  # fmt: skip
    middle, small = optima.values()
    if middle is None or small is None:
        return rows
    ratios = small.resampled / middle.resampled  # of the same draws of seeds where both have as many
    low, high = np.quantile(ratios, [0.025, 0.975])
    ordered = "holds" if low > 1 else "does not hold" if high < 1 else "undecided"
    said = f"best lambda of S over that of M: {small.value / middle.value:.2f} [{low:.2f}, {high:.2f}]"
    return [*rows, Finding("Does a weaker proxy need a larger lambda?", said, "yes: 1.57 against 1.08", ordered)]


def _budgets(page: Page) -> list[Finding]:
    test = difference(of(page, "M-A", "p_opd"), of(page, "M-A", explored(1)))
    own = difference(of(page, "M", BASELINE), dict(_explored_scores(page, 1)))
    return [
        Finding(
            "P-OPD from the proxy's whole run against a quarter of it, M → A",
            f"{_said(test)}; the proxy itself gained {_said(own)} in between",
            "more exploration of the proxy transfers better",
            verdict(test, 1),
        )
    ]


def _variants(page: Page) -> list[Finding]:
    said = {
        "opd_ft": ("no significant gain over OPD", 0),
        "opd_urm": ("no significant gain over OPD", 0),
        "ra_opd": ("not in this paper", None),
        "rstg": ("not in this paper", None),
        "w2s_opd": ("not in this paper; here the contrast is of scale: M before training against S", None),
    }
    rows = []
    for method, (claimed, direction) in said.items():
        ours = of(page, "M-A", method)
        test, start = difference(ours, of(page, "M-A", "opd")), difference(ours, of(page, "M-A", BEFORE))
        holds = "" if direction is None else verdict(test, direction)
        name = method.upper().replace("_", "-")
        last = difference(of(page, "M-A", method, last=True), of(page, "M-A", BEFORE))
        here = f"{_mean(ours)}: {_said(test)} against OPD, {_said(start)} against the start"
        here += f", {_said(last)} at the last step"
        rows.append(Finding(f"{name}, M → A", here if start else "not measured", claimed, holds))
    return rows


def _others(page: Page) -> list[Finding]:
    return [
        _gained(page, "M-B", "p_opd", "one tokenizer for all models; another one is not tried"),
        _compared(
            page, "M-B", "not tried; across generations of one vocabulary " + _points("7B of the generation before")
        ),
        _compared(page, "P-A", "P-OPD needs a useful direction, not the proxy's distribution"),
    ]


# Lambda ---------------------------------------------------------------------------------------------------------------


def by_calibration(page: Page, transfer: str) -> dict[float, dict[int, float]]:
    """Scores of P-OPD by lambda and seed, of the lambdas that were trained."""
    found = {value: of(page, transfer, calibrated(value)) for value in CALIBRATIONS}
    return {value: of_seed for value, of_seed in found.items() if of_seed}


def optimum_of(page: Page, transfer: str) -> Optimum | None:
    """None where there is too little to fit."""
    table = by_calibration(page, transfer)
    if len(table) < 3 or not set.intersection(*(set(of_seed) for of_seed in table.values())):
        return None
    return fit_optimum(table)


def _spoken(optimum: Optimum) -> str:
    where = f"{optimum.value:.2f} [{optimum.low:.2f}, {optimum.high:.2f}]"
    return f"{where}; {optimum.inside:.0%} of the resamples have their top inside the range"


def calibration(page: Page) -> str:
    transfers = [name for name in ("M-A", "S-A") if optimum_of(page, name)]
    if not transfers:
        return ""
    table, panels, smooth = [], {}, {}
    for name in transfers:
        measured, fitted = by_calibration(page, name), optimum_of(page, name)
        assert fitted is not None
        points = [(value, *t_interval(list(of_seed.values()))) for value, of_seed in measured.items()]
        for value, mean, half in points:
            last = t_interval(list(of(page, name, calibrated(value), last=True).values()))
            row = [_arrows(name), f"{value:g}", str(len(measured[value])), plus_minus(mean, half), plus_minus(*last)]
            table.append(row)
        title = f"{_arrows(name)}: best at {fitted.value:.2f}"
        panels[title] = {"P-OPD": points}
        grid = np.geomspace(min(measured), max(measured), 40)
        smooth[title] = {"P-OPD": [(float(x), fitted.at(x)) for x in grid]}
    svg = figures.lines_with_intervals(panels, ["λ"] * len(panels), "pass@1", smooth=smooth, ticks=CALIBRATIONS)
    said = "\n".join(
        f"- {_arrows(name)}: {_spoken(fitted)}" for name in transfers if (fitted := optimum_of(page, name))
    )
    return (
        "## Lambda\n\nThe best lambda is the top of a parabola in log lambda, fitted to the means over seeds; where it "
        "has no top in the range, the better end. Intervals: 95 % bootstrap over seeds, which is coarse with few of "
        f"them.\n\n{said}\n\n"
        + markdown_table(["transfer", "λ", "seeds", "pass@1", "at the last step"], table)
        + "\n\n"
        + page.picture("lambda", TRANSFERS["M-A"], svg, "score of P-OPD by lambda")
    )


# The proxy's budget ---------------------------------------------------------------------------------------------------


def _explored_scores(page: Page, quarters: int) -> list[tuple[int, float]]:
    """By seed, test score of the proxy M after so many quarters of its run; the whole validation set's, whatever is
    selected."""
    found = []
    for result in page.of(TRANSFERS["M"], BASELINE):
        step = result.run.last_step * quarters // 4
        evaluated = min(result.outcomes["M"].tests, key=lambda other: abs(other - step))
        found.append((result.cell.seed, result.outcomes["M"].tests[evaluated]))
    return found


def budget(page: Page) -> str:
    rows, proxies, targets = [], [], []
    before = of(page, "M-A", BEFORE)
    steps = max((result.run.last_step for result in page.of(TRANSFERS["M"], BASELINE)), default=0)
    for quarters in (*EXPLORED, 4):
        target = of(page, "M-A", explored(quarters))
        proxy = {seed: score for seed, score in _explored_scores(page, quarters) if seed in target}
        if not target or not proxy:
            continue
        step = steps * quarters // 4
        gain = difference(target, before)
        assert gain is not None
        proxies.append((float(step), *t_interval(list(proxy.values()))))
        targets.append((float(step), *t_interval(list(target.values()))))
        rows.append(
            [str(step), str(len(target)), *(plus_minus(*points[-1][1:]) for points in (proxies, targets)),
             plus_minus(gain.mean, gain.half_width, "+")]
        )  # fmt: skip
    if not rows:
        return ""
    svg = figures.lines_with_intervals(
        {"M → A": {"proxy M": proxies, "target A": targets}}, ["steps of the proxy's GRPO"], "pass@1"
    )
    return (
        "## The proxy's budget\n\nP-OPD with the expert as it was after part of the proxy's run.\n\n"
        + markdown_table(
            ["steps of GRPO on the proxy", "seeds", "proxy", "target", "target's gain"], rows, text_columns=0
        )
        + "\n\n"
        + page.picture("budget", TRANSFERS["M-A"], svg, "score of proxy and target by the proxy's steps")
    )


# Cost -----------------------------------------------------------------------------------------------------------------

LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_SPENT: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "training, s": lambda line: float(line["wall_s"]),
    "generated tokens": lambda line: float(line["cost"]["sampled_tokens"]),
}


def course(result: Result, cost: str) -> list[tuple[float, float]]:
    """(cost so far, pass@1 on all validation prompts) of every evaluated step."""
    spent = {0: 0.0} | {int(line["step"]): _SPENT[cost](line) for line in result.run.metrics}
    return [(spent[step], score) for step, score in sorted(result.run.validation.items())]


def cost_to_reach(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Where a course first reaches a level, straight lines between its points; None: nowhere."""
    if points[0][1] >= level:
        return points[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 >= level:
            return x0 + (level - y0) / (y1 - y0) * (x1 - x0)
    return None


def reaching(page: Page) -> str:
    """What it costs to bring the target A to a score, with and without the proxy's own run."""
    proxies = {result.cell.seed: result for result in page.of(TRANSFERS["M"], BASELINE)}
    ways = {
        "GRPO on the target": (BASELINE, False),
        "OPD": ("opd", False),
        "P-OPD": ("p_opd", False),
        "P-OPD and the proxy's run": ("p_opd", True),
    }
    header = ["pass@1"]
    for cost in _SPENT:
        header += [f"{way}: {cost}" for way in ways]
    panels: dict[str, dict[str, list[figures.Measured]]] = {cost: {} for cost in _SPENT}
    rows = [[f"{level:g}"] for level in LEVELS]
    for cost, spent in _SPENT.items():
        for way, (method, whole) in ways.items():
            courses = []
            for result in page.of(TRANSFERS["M-A"], method):
                proxy = proxies.get(result.cell.seed)
                if not whole or proxy is not None:
                    offset = spent(proxy.run.metrics[-1]) if whole and proxy is not None else 0.0
                    courses.append([(x + offset, y) for x, y in course(result, cost)])
            for row, level in zip(rows, LEVELS, strict=True):
                row.append(_reached([cost_to_reach(points, level) for points in courses]))
            if courses:
                means = np.mean(courses, axis=0)
                panels[cost][way] = [(float(x), float(y), None) for x, y in means]
    rows = [row for row in rows if any("never" not in cell for cell in row[1:])]
    if not rows or not any(panels["training, s"].values()):
        return ""
    svg = figures.lines_with_intervals(panels, list(panels), "pass@1")
    return (
        "## Cost to reach a score\n\nOf bringing A to a pass@1 on all validation prompts, M → A: mean over the seeds "
        "that reach it, interpolated between evaluations. Seconds are those of training steps on one thread; runs were "
        "made beside other work, so that seconds compare only roughly, and tokens exactly. A proxy's run is paid once, "
        "however many targets learn from it.\n\n"
        + markdown_table(header, rows, text_columns=0)
        + "\n\n"
        + page.picture("cost", TRANSFERS["M-A"], svg, "score of the target by cost")
    )


def _reached(costs: Sequence[float | None]) -> str:
    reached = [cost for cost in costs if cost is not None]
    if not reached:
        return "never"
    few = "" if len(reached) == len(costs) else f" ({len(reached)} of {len(costs)} seeds)"
    return f"{np.mean(reached):,.0f}{few}"


# Curves and notes -----------------------------------------------------------------------------------------------------

_DRAWN = ("M-A", "S-A", "M-A_trained", "M-B", "P-A")


def transfer_curves(page: Page) -> str:
    panels: dict[str, dict[str, list[figures.Measured]]] = {}
    for name in _DRAWN:
        pair, of_method = TRANSFERS[name], {}
        for method in (BASELINE, "opd", "p_opd"):
            results = page.of(pair, method) or page.of(pair, _SPANS.get(method, method))
            if results:
                curves = [result.run.validation for result in results]
                steps = sorted(set.intersection(*(set(curve) for curve in curves)))
                of_method[method] = [(float(s), *t_interval([curve[s] for curve in curves])) for s in steps]
        if len(of_method) > 1:
            panels[_arrows(name)] = of_method
    if not panels:
        return ""
    svg = figures.lines_with_intervals(panels, ["step"] * len(panels), "pass@1")
    return (
        "## Validation curves\n\npass@1 of the target on all validation prompts, mean over seeds with 95 % t "
        "intervals. M → A (trained): from where A's own GRPO run ended.\n\n"
        + page.picture("curves", TRANSFERS["M-A"], svg, "validation curves of the targets")
    )


def setup(page: Page) -> str:
    return SETUP


SETUP = """## How it was set up

- **Models.** S, M and A are one family: Llama, one tokenizer, widths 32, 48 and 64 (25,000, 53,000 and 91,000 weights),
  strong in the same families of the task, and the smaller, the worse at executing the program that they name. B is
  GPT-2 with another tokenizer. P is small too, executes well, and is strong where A is weak.
- **Proxies** explore by GRPO in 40 steps, which is far from the convergence that the paper trains its proxies to. The
  expert is the last checkpoint. With one seed, all methods read the same proxy's run.
- **Targets** distil in 30 steps, each with as many optimizer steps as GRPO has (four), and `estimator: full`; M → B
  cannot sum over one vocabulary, so it has `estimator: sampled` over spans of bytes, and differs from M → A in the
  estimator as well as in the target. lambda is 1 where nothing is said.
- **RSTG** runs 40 steps, being GRPO with a teacher. The teacher's answers are the rollout log of the proxy's own run.
- **W2S-OPD** with an expert and its base is P-OPD (alpha = 1 / lambda). Its row here is the contrast of scale: M
  against S, both before reinforcement learning.
- **AVSD**, and W2S-OPD's contrast of hints, make no sense here: these models have read nothing but prompts of the task,
  so that a hint or a solution in the context tells them nothing.
- Sizes and warm-ups were chosen by the warm-ups' own reports; the number of steps by a pilot with seed 0, which is in
  the tables too. Nothing else was tuned."""

_FINDINGS: tuple[Callable[[Page], list[Finding]], ...] = (
    _main, _weaker, _surpassing, _sequence, _calibrations, _budgets, _variants, _others,
)  # fmt: skip
PARTS: dict[str, Callable[[Page], str]] = {
    "findings": findings,
    "calibration": calibration,
    "budget": budget,
    "reaching": reaching,
    "transfer curves": transfer_curves,
    "setup": setup,
}
