"""The results page of a study: Markdown tables and SVG plots, written from finished runs.

What a page says in words is made from the numbers: sign, interval and significance, no more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from graftrl.evaluation.intervals import t_interval
from graftrl.evaluation.significance import PairedTest, holm, paired_t_test
from graftrl.lab import distillation, figures, paper, programs_written
from graftrl.lab.measure import MOST_PROMPTS, SAMPLES, Measures
from graftrl.lab.pairs import Pair, Transfer
from graftrl.lab.plan import EVALUATE_EVERY, SELECTION_PROMPTS, VALIDATION_PROMPTS
from graftrl.lab.results import BOTH, Comparison, Cost, Result, compare, models_and_mean, scores
from graftrl.lab.studies import BASELINE, Study
from graftrl.report import plots
from graftrl.report.data import Run, clipping_table, exchange_table
from graftrl.report.tables import markdown_table, plus_minus

SELECTION_RULE = (
    f"every model is evaluated on {VALIDATION_PROMPTS} held-out prompts every {EVALUATE_EVERY} steps and after the "
    f"last; the step with the highest pass@1 on the first {SELECTION_PROMPTS} of them is selected (the first of "
    f"several, never the start), and the score is pass@1 of that step on the other "
    f"{VALIDATION_PROMPTS - SELECTION_PROMPTS}"
)


@dataclass
class Page:
    """What a part of the page reads. corrected: verdicts use Holm's p-values. plots: file name -> SVG, filled by parts;
    links are relative to the page."""

    study: Study
    pairs: Sequence[Pair | Transfer]
    results: Sequence[Result]
    corrected: bool = True
    plots: dict[str, str] = field(default_factory=dict)

    def of(self, pair: Pair | Transfer, method: str | None = None) -> list[Result]:
        return [r for r in self.results if r.cell.pair == pair and method in (None, r.cell.method)]

    def runs(self, pair: Pair | Transfer, methods: Sequence[str] | None = None) -> list[Run]:
        """In the study's order of methods, labelled as on the page."""
        return [
            replace(result.run, method=self.study.label(method))
            for method in methods or self.study.methods
            for result in self.of(pair, method)
        ]

    def picture(self, name: str, pair: Pair | Transfer, svg: str, alternative: str) -> str:
        file = f"{self.study.name}-{name}-{pair.name}.svg"
        self.plots[file] = plots.standalone(svg)
        return f"![{alternative}]({file})"

    def comparisons(self, methods: Sequence[str] | None = None) -> dict[str, list[Comparison]]:
        """By reference. What a reference was compared with before is not turned round for the next."""
        references = self.study.references
        given = methods or self.study.methods
        return {
            reference: compare(self.results, self.pairs, [m for m in given if m not in references[:i]], reference)
            for i, reference in enumerate(references)
        }


Part = Callable[[Page], str]


MEASURING_RULE = (
    f"after the last step every model answers {MOST_PROMPTS} held-out prompts {SAMPLES} times; pass@1 and pass@8 are "
    "unbiased estimates from these responses; the step is never selected"
)


def render(study: Study, sections: Sequence[Page], lead: str, tail: str = "") -> str:
    """The page as Markdown. sections: of the studies that make it, one as a rule. lead: how and where it was made.
    tail: what is missing."""
    parts = [f"# {study.title}", study.question, lead, tail]
    if study.includes and (whole := _joined(study, sections)).results:
        parts += [PARTS[name](whole) for name in study.parts]
    for page in sections:
        told = [PARTS[name](page) for name in page.study.parts] if page.results else []
        if len(sections) > 1:
            below = [re.sub("^#", "##", part, flags=re.MULTILINE) for part in told or ["No result yet."]]
            told = [f"## {page.study.title}", page.study.question, *below]
        parts += told
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _joined(study: Study, sections: Sequence[Page]) -> Page:
    """All sections as one page of the study that includes theirs."""
    pairs = dict.fromkeys(pair for page in sections for pair in page.pairs)
    results = {result.cell: result for page in sections for result in page.results}
    return Page(study, list(pairs), list(results.values()), all(page.corrected for page in sections))


# Parts ----------------------------------------------------------------------------------------------------------------


def verdicts(page: Page) -> str:
    """What came out, in words, against each reference."""
    paragraphs = ["## What came out"]
    for reference, compared in page.comparisons().items():
        found = [c for c in compared if c.model != BOTH]
        if not found:
            continue
        tested = sum(c.test.p is not None for c in found)
        how = f"corrected for {tested} comparisons (Holm), at 5 %" if page.corrected else "not corrected, at 5 % each"
        paragraphs.append(f"Against `{page.study.label(reference)}`, paired by seed, {how if tested else 'untested'}:")
        paragraphs.append(
            "\n".join(
                f"- {_verdict(page, method, [c for c in found if c.method == method])}"
                for method in page.study.methods
                if any(c.method == method for c in found)
            )
        )
    return "\n\n".join(paragraphs)


def _verdict(page: Page, method: str, found: Sequence[Comparison]) -> str:
    """`graft`: higher on 2 of 3 models (A in A-B +0.12, ...), not distinguishable on 1 (...)."""
    groups: dict[str, list[str]] = {}
    for c in found:
        where = f"{c.model} in {c.pair.name} {c.test.mean:+.3f}"
        groups.setdefault(c.verdict(page.corrected), []).append(where)
    order = ("higher", "lower", "not distinguishable", "not tested")
    said = [
        f"{verdict}{' (one seed)' if verdict == 'not tested' else ''} on {len(groups[verdict])} of {len(found)} "
        f"({', '.join(groups[verdict])})"
        for verdict in order
        if verdict in groups
    ]
    return f"`{page.study.label(method)}`: {'; '.join(said)}."


def score_tables(page: Page) -> str:
    """Per pair: scores and differences to the references."""
    study = page.study
    compared = {
        (c.pair.name, c.model, c.method, c.reference): c
        for of_reference in page.comparisons().values()
        for c in of_reference
    }
    header = ["model", "method", "seeds", "pass@1", "at the last step"]
    for reference in study.references:
        header += [f"− {reference}", "p", "p (Holm)"]
    blocks = [
        "## Scores",
        "pass@1 on test prompts: mean over seeds ± half-width of the 95 % t interval, at the selected checkpoint and "
        "at the last step. Differences (selected checkpoint) are paired by seed, with their 95 % t interval and p of "
        "the paired t-test. `both`: mean of the two models.",
    ]
    for pair in page.pairs:
        table = []
        for model in models_and_mean(pair):
            table += [
                _score_row(page, pair, model, method, compared) for method in study.methods if page.of(pair, method)
            ]
        if table:
            blocks += [f"### {pair.name}: {pair.description}", _before(page, pair)]
            blocks.append(markdown_table(header, table, text_columns=2))
    return "\n\n".join(blocks)


def _score_row(
    page: Page,
    pair: Pair | Transfer,
    model: str,
    method: str,
    compared: Mapping[tuple[str, str, str, str], Comparison],
) -> list[str]:
    values = scores(page.results, pair, method, model)
    last = scores(page.results, pair, method, model, last=True)
    row = [
        model,
        f"`{page.study.label(method)}`",
        str(len(values)),
        plus_minus(*t_interval(list(values.values()))),
        plus_minus(*t_interval(list(last.values()))),
    ]
    for reference in page.study.references:
        c = compared.get((pair.name, model, method, reference))
        if c is None:
            row += ["", "", ""]
        else:
            row += [plus_minus(c.test.mean, c.test.half_width, "+"), _p(c.test.p), _p(c.p_holm)]
    return row


def _before(page: Page, pair: Pair | Transfer) -> str:
    outcomes = [result.outcomes for result in page.of(pair)]
    means = {m: np.mean([of_run[m].before for of_run in outcomes]) for m in outcomes[0]}
    return "Before training: " + ", ".join(f"{m} {mean:.3f}" for m, mean in means.items()) + "."


def curves(page: Page) -> str:
    """Validation curves with the selected checkpoints."""
    blocks = [
        "## Validation curves",
        f"pass@1 on the {SELECTION_PROMPTS} selection prompts, mean over seeds. Stars: mean step and mean score of the "
        "selected checkpoints.",
    ]
    for pair in page.pairs:
        panels = {}
        for model in pair.models:
            of_method = {}
            for method in page.study.methods:
                outcomes = [result.outcomes[model] for result in page.of(pair, method)]
                if outcomes:
                    steps = sorted(set.intersection(*(set(outcome.curve) for outcome in outcomes)))
                    points = [(float(s), float(np.mean([outcome.curve[s] for outcome in outcomes]))) for s in steps]
                    star = (
                        float(np.mean([outcome.selected_step for outcome in outcomes])),
                        float(np.mean([outcome.validation for outcome in outcomes])),
                    )
                    of_method[page.study.label(method)] = (points, star)
            panels[model] = of_method
        if any(panels.values()):
            svg = figures.selection_curves(panels)
            blocks.append(page.picture("curves", pair, svg, f"validation curves of {pair.name}"))
    return "\n\n".join(blocks)


_COSTS: dict[str, Callable[[Cost], float]] = {
    "training, s": lambda cost: cost.wall_s,
    "generated tokens": lambda cost: cost.generated_tokens,
    "trained tokens": lambda cost: cost.trained_tokens,
}


def costs(page: Page) -> str:
    """Per pair: what both models cost, to the selected checkpoints and in whole."""
    blocks = [
        "## Cost of both models",
        "Means over seeds; in brackets, relative to the baseline. Training: wall seconds of one process with one "
        "thread, without evaluation and checkpoints. To the selected checkpoints: where each model has a run of its "
        "own, the sum of both up to their own checkpoints; of a joint run, up to the later one. Trained tokens are "
        "those that a loss is averaged over.",
    ]
    if "graft-stored" in page.study.methods:
        blocks.append("`graft-stored` leaves out the runs whose logs it reads.")
    header = ["method", "pass@1 of both"]
    for cost in _COSTS:
        header += [f"{cost}: selected", "whole run"]
    for pair in page.pairs:
        table = []
        base = page.of(pair, BASELINE)
        for method in page.study.methods:
            ours = page.of(pair, method)
            if not ours:
                continue
            row = [f"`{page.study.label(method)}`", plus_minus(*t_interval([r.score(BOTH) for r in ours]))]
            for value in _COSTS.values():
                for selected in (True, False):
                    row.append(_relative(_mean_cost(ours, value, selected), _mean_cost(base, value, selected)))
            table.append(row)
        if table:
            blocks += [f"### {pair.name}", markdown_table(header, table)]
    return "\n\n".join(blocks)


def _mean_cost(results: Sequence[Result], value: Callable[[Cost], float], selected: bool) -> float | None:
    if not results:
        return None
    return float(np.mean([value(result.selected if selected else result.full) for result in results]))


def _relative(value: float | None, base: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" + ("" if not base else f" ({value / base:.2f})")


def cost_plot(page: Page) -> str:
    blocks = [
        "## Score against cost",
        "pass@1 of both models (mean over seeds, 95 % t interval) against what they cost up to the selected "
        "checkpoints. The dashed line joins GRPO with more and more rollouts.",
    ]
    line = [page.study.label(m) for m in ("grpo", "grpo-n16", "grpo-n32")]
    for pair in page.pairs:
        panels: dict[str, dict[str, tuple[float, float, float | None]]] = {}
        for cost in ("training, s", "generated tokens"):
            panels[cost] = {}
            for method in page.study.methods:
                ours = page.of(pair, method)
                spent = _mean_cost(ours, _COSTS[cost], selected=True)
                if spent is not None:
                    mean, half = t_interval([result.score(BOTH) for result in ours])
                    panels[cost][page.study.label(method)] = (spent, mean, half)
        if panels["training, s"]:
            svg = figures.score_against_cost(panels, line, "pass@1 of both models")
            blocks.append(page.picture("cost", pair, svg, f"score against cost of {pair.name}"))
    return "\n\n".join(blocks)


def complementarity(page: Page) -> str:
    blocks = [
        "## Complementarity",
        "Above: training prompts on which all of a model's responses fail. Below: the share of these that the other "
        "model solves at least once. `grpo`: two independent runs. Means over seeds, smoothed; bands from the lowest "
        "to the highest seed.",
    ]
    for pair in page.pairs:
        runs = page.runs(pair, [m for m in (BASELINE, "graft") if m in page.study.methods])
        if runs:
            svg = plots.to_svg(plots.complementarity(runs), "complementarity")
            blocks.append(page.picture("complementarity", pair, svg, f"complementarity of {pair.name}"))
    return "\n\n".join(blocks)


def exchange(page: Page) -> str:
    """Per pair, method and direction: what was exchanged in a step."""
    header = [
        "pair", "method", "direction", "candidates", "selected", "responses", "admitted successes",
        "admitted failures", "gated",
    ]  # fmt: skip
    names = ("candidates", "selected", "responses", "admitted_successes", "admitted_failures", "gated")
    table = []
    for pair in page.pairs:
        for method in page.study.methods:
            counts = exchange_table([result.run for result in page.of(pair, method)])
            for direction in counts["direction"].unique().sort().to_list():
                means = counts.filter(direction=direction).select(pl.col(*names).mean()).row(0)
                label = f"`{page.study.label(method)}`"
                table.append([pair.name, label, direction.replace("->", " → "), *(f"{value:.2f}" for value in means)])
    if not table:
        return ""
    return (
        "## What was exchanged\n\nMeans per step, over all steps and seeds. Candidates and selected count prompts, the "
        "others responses; what each method calls a candidate is in docs/metrics.md.\n\n"
        + markdown_table(header, table, text_columns=3)
    )


def clipping(page: Page) -> str:
    """Per pair and method: clipped shares of own and of peers' tokens."""
    header = [
        "pair",
        "method",
        "model",
        "own tokens clipped",
        "grafted tokens clipped",
        "steps without a clipped grafted token",
    ]
    table = []
    for pair in page.pairs:
        for method in page.study.methods:
            counts = clipping_table([result.run for result in page.of(pair, method)])
            for model in pair.models:
                here = counts.filter(model=model)
                if here.is_empty():
                    continue
                grafted = here.filter((pl.col("kind") == "grafted") & (pl.col("tokens") > 0))
                unclipped = grafted.select((pl.col("clipped") == 0).mean()).item() if len(grafted) else None
                table.append(
                    [
                        pair.name,
                        f"`{page.study.label(method)}`",
                        model,
                        _percent(here.filter(kind="own")),
                        _percent(grafted),
                        "" if unclipped is None else f"{100 * unclipped:.1f} %",
                    ]
                )
    return (
        "## Clipped tokens\n\nShare of loss tokens whose clipped surrogate is strictly smaller than the unclipped one, "
        "over all steps and seeds. The last column is of the steps that trained on grafted tokens.\n\n"
        + _last_over_first(page)
        + markdown_table(header, table, text_columns=3)
    )


def _last_over_first(page: Page) -> str:
    """How many times as many grafted tokens are clipped with the peer last as with the peer first."""
    shares = {}
    for method in ("graft", "graft-peer-first"):
        counts = clipping_table([r.run for r in page.results if r.cell.method == method]).filter(kind="grafted")
        tokens, clipped = float(counts["tokens"].sum()), float(counts["clipped"].sum())
        if tokens == 0:
            return ""
        shares[method] = clipped / tokens
    last, first = shares.values()
    said = f"{100 * last:.3f} % of grafted tokens are clipped with the peer last and {100 * first:.3f} % with it first"
    return f"{said}{f', a factor of {last / first:.1f}' if first else ''}.\n\n"


def _percent(counts: pl.DataFrame) -> str:
    tokens, clipped = float(counts["tokens"].sum()), float(counts["clipped"].sum())
    return f"{100 * clipped / tokens:.3f} %" if tokens else ""


def stability(page: Page) -> str:
    """Per pair, model and method: spread over seeds and signs of trouble in the steps."""
    header = [
        "pair", "model", "method", "seeds", "pass@1", "standard deviation", "lowest", "lost after the selected step",
        "collapsed runs", "skipped minibatches", "gradient norm: median", "largest", "entropy: first 5 steps", "last 5",
    ]  # fmt: skip
    table = []
    for pair in page.pairs:
        for model in pair.models:
            for method in page.study.methods:
                ours = page.of(pair, method)
                if ours:
                    table.append([pair.name, model, f"`{page.study.label(method)}`", *_stability_row(ours, model)])
    spoken = _collapses(page)
    return (
        "## Stability\n\nStandard deviation over seeds of pass@1 at the selected checkpoint. Lost: mean of that score "
        "minus the one at the last step. Collapsed: ended below where it started. Skipped: minibatches whose gradient "
        "was not finite, in all runs. Gradient norms are means over a step's minibatches, before clipping; entropy is "
        f"in nats per token of own responses.\n\n{spoken}\n\n" + markdown_table(header, table, text_columns=3)
    )


def _stability_row(results: Sequence[Result], model: str) -> list[str]:
    outcomes = [result.outcomes[model] for result in results]
    finals = [outcome.score for outcome in outcomes]
    lines = [[line["models"][model] for line in result.run.metrics] for result in results]
    norms = [m["grad_norm"] for of_run in lines for m in of_run if m.get("grad_norm") is not None]
    first, last = (
        [m["entropy"] for of_run in lines for m in of_run[part] if m.get("entropy") is not None]
        for part in (slice(5), slice(-5, None))
    )
    return [
        str(len(finals)),
        f"{np.mean(finals):.3f}",
        f"{np.std(finals, ddof=1):.3f}" if len(finals) > 1 else "",
        f"{min(finals):.3f}",
        f"{np.mean([outcome.score - outcome.last_score for outcome in outcomes]):+.3f}",
        str(sum(outcome.last_score < outcome.before for outcome in outcomes)),
        str(sum(m.get("skipped_nonfinite", 0) for of_run in lines for m in of_run)),
        f"{np.median(norms):.2f}" if norms else "",
        f"{max(norms):.2f}" if norms else "",
        f"{np.mean(first):.3f}" if first else "",
        f"{np.mean(last):.3f}" if last else "",
    ]


def _collapses(page: Page) -> str:
    ended = [
        f"{model} of {result.cell.name} ({outcome.before:.3f} to {outcome.last_score:.3f})"
        for result in page.results
        for model, outcome in result.outcomes.items()
        if outcome.last_score < outcome.before
    ]
    total = sum(len(result.outcomes) for result in page.results)
    return f"{len(ended)} of {total} trainings collapsed{': ' + ', '.join(ended) if ended else ''}."


def entropy_plot(page: Page) -> str:
    blocks = ["## Entropy", "Along a model's own responses; means over seeds, bands from the lowest to the highest."]
    for pair in page.pairs:
        runs = page.runs(pair)
        if runs:
            svg = plots.to_svg(plots.entropy(runs), "entropy")
            blocks.append(page.picture("entropy", pair, svg, f"entropy of {pair.name}"))
    return "\n\n".join(blocks)


def paper_figures(page: Page) -> str:
    """The paper's numbers for the same methods, and whether the signs agree."""
    block = paper.MAIN if page.study.name in ("main", "stored") else paper.VARIANTS
    methods = [m for m in page.study.methods if m in block.scores]
    blocks = [
        "## The paper's figures",
        f"{paper.SOURCE}. Other models and another task: only signs and orders compare.",
    ]
    if page.study.name == "cost":
        table = [[f"`{m}`", *(f"{hours:.1f}" for hours in paper.GPU_HOURS[m])] for m in page.study.methods]
        blocks.append("GPU-hours for both models of its first pair:")
        blocks.append(markdown_table(["method", "to the selected checkpoints", "whole run"], table))
    elif page.study.name == "stability":
        table = [[model, *(plus_minus_points(*value) for value in values)] for model, values in paper.STABILITY.items()]
        blocks.append("Mean and standard deviation over three training runs:")
        blocks.append(markdown_table(["model", "`grpo`", "`graft`"], table))
    else:
        rows = [[f"`{page.study.label(m)}`", *_paper_row(block, m)] for m in methods]
        blocks.append(markdown_table(["method", *block.columns], rows))
        blocks.append(_agreement(page, block, methods))
    if page.study.name == "position":
        table = [
            [f"`{page.study.label(m)}`", f"{s:.3f} %", f"{q:.3f} %", f"{steps:.1f} %"]
            for m, (s, q, steps) in paper.GRAFTED_CLIPPED.items()
        ]
        header = ["grafted tokens clipped", "SmolLM3", "Qwen3", "steps without any"]
        blocks.append(markdown_table(header, table))
    return "\n\n".join(part for part in blocks if part)


def _paper_row(block: paper.Block, method: str) -> list[str]:
    cells = []
    for value, base in zip(block.scores[method], block.scores[BASELINE], strict=True):
        if value is None or base is None:
            cells.append("")
        else:
            cells.append(f"{value:.2f}" + ("" if method == BASELINE else f" ({value - base:+.2f})"))
    return cells


def _agreement(page: Page, block: paper.Block, methods: Sequence[str]) -> str:
    """Signs of the difference to each reference, in the paper and here."""
    lines = []
    for reference, compared in page.comparisons(methods).items():
        found = [c for c in compared if c.model != BOTH]
        for method in methods:
            here = [c.test.mean for c in found if c.method == method]
            if method == reference or not here:
                continue
            there = [
                a - b
                for a, b in zip(block.scores[method], block.scores[reference], strict=True)
                if a is not None and b is not None
            ]
            lines.append(
                f"- `{page.study.label(method)}` − `{page.study.label(reference)}`: in the paper above 0 on "
                f"{sum(d > 0 for d in there)} of {len(there)} models, here (means, whatever their significance) on "
                f"{sum(d > 0 for d in here)} of {len(here)}"
            )
    return "\n".join(lines)


def regimes(page: Page) -> str:
    """Per pair the mean of its models and the differences to the references; what holds over all pairs."""
    study, references = page.study, page.study.references
    how = "after Holm's correction over all differences to one reference" if page.corrected else "uncorrected"
    blocks = [
        "## What came out",
        "pass@1, mean over the models of a pair and over seeds, ± half-width of the 95 % t interval. Differences are "
        f"paired by seed; an asterisk: p < 0.05 {how}. All at the last step.",
        "\n".join(f"- {pair.name}: {pair.description}" for pair in page.pairs if page.of(pair)),
    ]
    forest: dict[str, dict[str, tuple[float, float | None]]] = {}
    overall: list[str] = []
    for reference in references:
        means = pair_comparisons(page, reference)
        methods = [m for m in study.methods if any(c.method == m for c in means)]
        header = ["pair", f"`{study.label(reference)}`", *(f"`{study.label(m)}` − it" for m in methods)]
        table = []
        for pair in page.pairs:
            base = scores(page.results, pair, reference, _whole(pair))
            if not base:
                continue
            row = [pair.name, plus_minus(*t_interval(list(base.values())))]
            for method in methods:
                c = next((c for c in means if (c.pair, c.method) == (pair, method)), None)
                row.append("" if c is None else _starred(c, page.corrected))
                if c is not None and reference == references[-1]:
                    forest.setdefault(study.label(method), {})[pair.name] = (c.test.mean, c.test.half_width)
            table.append(row)
        if table:
            blocks += [f"### Against `{study.label(reference)}`", markdown_table(header, table)]
        for method in methods:
            ours = [c for c in page.comparisons()[reference] if c.method == method]
            overall.append(_over_pairs(page, method, reference, ours))
    if forest:
        svg = figures.differences(forest, f"pass@1 − {study.label(references[-1])}")
        file = f"{study.name}-differences.svg"
        page.plots[file] = plots.standalone(svg)
        blocks.append(f"![differences to {study.label(references[-1])} by pair]({file})")
    return "\n\n".join([*blocks[:2], *(["\n".join(overall)] if overall else []), *blocks[2:]])  # the summary first


def pair_comparisons(page: Page, reference: str) -> list[Comparison]:
    """Of the mean over a pair's models; Holm's correction is over all of them, pairs and methods."""
    (compared,) = [found for name, found in page.comparisons().items() if name == reference]
    found = [c for c in compared if c.model == _whole(c.pair)]
    tested = [i for i, c in enumerate(found) if c.test.p is not None]
    adjusted = dict(zip(tested, holm([found[i].test.p or 0.0 for i in tested]), strict=True))
    return [replace(c, p_holm=adjusted.get(i)) for i, c in enumerate(found)]


def _whole(pair: Pair | Transfer) -> str:
    return models_and_mean(pair)[-1]


def _starred(c: Comparison, corrected: bool) -> str:
    star = "\\*" if c.verdict(corrected) in ("higher", "lower") else ""
    return f"{plus_minus(c.test.mean, c.test.half_width, '+')}{star}"


def tuned(page: Page) -> str:
    """The last reference against the best setting of a method in each pair."""
    study, reference = page.study, page.study.references[-1]
    found = best_settings(page)
    if not found:
        return ""
    table = []
    for of in found:
        means = [f"**{mean:.3f}**" if m == of.method else f"{mean:.3f}" for m, mean in of.means.items()]
        difference = plus_minus(of.test.mean, of.test.half_width, "+")
        table.append([of.pair.name, str(of.test.n), *means, difference])
    mean, half = t_interval([of.test.mean for of in found])
    header = ["pair", "seeds", *(f"`{study.label(m)}`" for m in study.tuned), f"`{study.label(reference)}` − best"]
    return "\n\n".join(
        [
            "## Against the best setting of each pair",
            "pass@1, mean over the models of a pair and over the seeds that all settings have. The best setting (bold) "
            "is chosen by the same runs that it is compared in, in its favour.",
            f"`{study.label(reference)}` − best setting: above 0 in {sum(of.test.mean > 0 for of in found)} of "
            f"{len(found)} pairs; mean over pairs {plus_minus(mean, half, '+')}.",
            markdown_table(header, table),
        ]
    )


@dataclass(frozen=True)
class BestSetting:
    """Of a pair. means: of every setting, over the seeds of all. test: last reference - best setting."""

    pair: Pair | Transfer
    method: str
    means: Mapping[str, float]
    test: PairedTest


def best_settings(page: Page) -> list[BestSetting]:
    """Per pair in which there are all of `Study.tuned` and the last reference: the setting with the highest mean."""
    found = []
    for pair in page.pairs:
        ours = scores(page.results, pair, page.study.references[-1], _whole(pair))
        settings = {m: scores(page.results, pair, m, _whole(pair)) for m in page.study.tuned}
        seeds = sorted(set(ours).intersection(*settings.values()))
        if seeds:
            means = {m: float(np.mean([of[s] for s in seeds])) for m, of in settings.items()}
            best = max(means, key=lambda m: means[m])
            test = paired_t_test([ours[s] for s in seeds], [settings[best][s] for s in seeds])
            found.append(BestSetting(pair, best, means, test))
    return found


def rivals(page: Page) -> str:
    """The last reference against every other method, over all pairs of all sections of the page."""
    study, reference = page.study, page.study.references[-1]
    pages = (page, replace(page, results=[_scored_by_pass8(result) for result in page.results]))
    table = []
    for method in study.methods:
        alone = replace(study, methods=(method,))
        of_pass1, of_pass8 = (pair_comparisons(replace(p, study=alone), reference) for p in pages)
        if of_pass1:
            # These are method - reference: where the method is lower, the reference is above it.
            found = Counter(c.verdict(page.corrected) for c in of_pass1)
            one, eight = ({c.pair.name: -c.test.mean for c in compared} for compared in (of_pass1, of_pass8))
            significant = (str(found["lower"]), str(found["higher"]))
            table.append(_rival_row(f"`{study.label(method)}`", one, eight, *significant))
    one, eight = ({of.pair.name: of.test.mean for of in best_settings(p)} for p in pages)
    if one:
        table.append(_rival_row(f"best of {', '.join(f'`{study.label(m)}`' for m in study.tuned)}", one, eight))
    if not table:
        return ""
    ours = study.label(reference)
    how = "after Holm's correction over the pairs of a row" if page.corrected else "uncorrected"
    header = [
        "against", "pairs", "above", "p < .05", "below", "p < .05", "mean over pairs", "below in", "pass@8: above",
        "mean over pairs",
    ]  # fmt: skip
    return (
        f"## `{ours}` against its rivals\n\nOver all pairs below in which both were trained: in how many the mean over "
        f"models and seeds of `{ours}` is above the rival's, and below it; in how many with p < .05 {how}. The "
        "interval is over pairs. The best setting is chosen in each pair by the runs that it is compared in, for "
        "pass@8 by pass@8; its differences are not tested. Read with it: [where it loses, and why](README.md#scion)."
        "\n\n" + markdown_table(header, table)
    )


def _rival_row(
    name: str, pass1: Mapping[str, float], pass8: Mapping[str, float], higher: str = "", lower: str = ""
) -> list[str]:
    """pass1, pass8: reference - rival by pair. higher, lower: in how many pairs that is significant."""
    below = {pair: d for pair, d in sorted(pass1.items(), key=lambda item: item[1]) if d < 0}
    return [
        name,
        str(len(pass1)),
        str(sum(d > 0 for d in pass1.values())),
        higher,
        str(len(below)),
        lower,
        plus_minus(*t_interval(list(pass1.values())), "+"),
        ", ".join(f"{pair} {d:+.3f}" for pair, d in below.items()),
        str(sum(d > 0 for d in pass8.values())),
        plus_minus(*t_interval(list(pass8.values())), "+"),
    ]


def _scored_by_pass8(result: Result) -> Result:
    return replace(
        result, outcomes={m: replace(o, score=o.measures.pass8) for m, o in result.outcomes.items() if o.measures}
    )


def _over_pairs(page: Page, method: str, reference: str, compared: Sequence[Comparison]) -> str:
    """A pair is a case, whatever its seeds: the interval is over pairs. Single models that lose are named, or counted
    where they are many."""
    differences = [c.test.mean for c in compared if c.model == _whole(c.pair)]
    mean, half = t_interval(differences)
    above = sum(d > 0 for d in differences)
    single = [c for c in compared if c.model != BOTH]
    lower = [f"{c.model} in {c.pair.name} {c.test.mean:+.3f}" for c in single if c.test.mean < 0]
    named = (
        f"models below 0: {', '.join(lower)}" if len(lower) <= 8 else f"{len(lower)} of {len(single)} models below 0"
    )
    return (
        f"- `{page.study.label(method)}` − `{page.study.label(reference)}`: above 0 in {above} of {len(differences)} "
        f"pairs; mean over pairs {plus_minus(mean, half, '+')}"
        f"{'; ' + named if lower else ''}."
    )


def measures(page: Page) -> str:
    """Per model and method what was measured after the last step, and the cost."""
    header = [
        "pair", "model", "method", "seeds", "pass@1", "pass@8", "entropy", "strong families", "forgotten", "others",
        "training, s", "generated tokens", "trained tokens",
    ]  # fmt: skip
    values: list[Callable[[Measures], float | None]] = [
        lambda m: m.pass1, lambda m: m.pass8, lambda m: m.entropy, lambda m: m.mean(strong=True), lambda m: m.forgotten,
        lambda m: m.mean(strong=False),
    ]  # fmt: skip
    table, before = [], []
    for pair in page.pairs:
        for model in pair.models:
            for method in page.study.methods:
                ours = page.of(pair, method)
                found = [m for result in ours if (m := result.outcomes[model].measures) is not None]
                if not found:
                    continue
                row = [pair.name, model, f"`{page.study.label(method)}`", str(len(found))]
                for value in values:
                    given = [x for m in found if (x := value(m)) is not None]
                    row.append(plus_minus(*t_interval(given)) if given else "")
                row += [f"{_mean_cost(ours, cost, selected=False) or 0:,.0f}" for cost in _COSTS.values()]
                table.append(row)
            first = next((m for r in page.of(pair) if (m := r.outcomes[model].measures) is not None), None)
            if first is not None and first.strong_before is not None:
                before.append(f"{model} in {pair.name} {first.strong_before:.3f} ({', '.join(first.strong)})")
    return (
        "## Measures\n\nMeans over seeds ± half-width of the 95 % t interval. Entropy: of the distribution of "
        "responses, in nats per response. Strong families: pass@1 where the model started at least half as well as in "
        "its best family; forgotten: mean over these of what was lost against the start, gains not counted. Training: "
        "seconds of one thread for all models of the pair; `-stored` runs and pairs leave out the runs whose logs they "
        f"read.\n\nStrong families before training: {'; '.join(before)}.\n\n"
        + markdown_table(header, table, text_columns=3)
    )


FALL = 0.3  # of pass@1 in one family: what counts as lost or won


def families(page: Page) -> str:
    """Single families that a method loses or wins against the references: a mean over families can hide either."""
    blocks = [
        "## Single families",
        f"Families whose pass@1 after the last step lies {FALL} or more below, and above, that of the same model and "
        "seed with the reference: mean number per model and seed. Named: those below with at least half of the seeds.",
    ]
    for reference in page.study.references:
        table = []
        for pair in page.pairs:
            for method in page.study.methods:
                found = [] if method == reference else _family_differences(page, pair, method, reference)
                if not found:
                    continue
                below = Counter((model, f) for model, of in found for f, d in of.items() if d <= -FALL)
                above = sum(d >= FALL for _, of in found for d in of.values())
                seeds = Counter(model for model, _ in found)
                named = sorted(f"{model} {f}" for (model, f), count in below.items() if 2 * count >= seeds[model])
                row = [f"{below.total() / len(found):.2f}", f"{above / len(found):.2f}", ", ".join(named)]
                table.append([pair.name, f"`{page.study.label(method)}`", *row])
        if table:
            header = ["pair", "method", "lost", "won", "lost with half of the seeds"]
            blocks += [f"### Against `{page.study.label(reference)}`", markdown_table(header, table, text_columns=2)]
    return "\n\n".join(blocks) if len(blocks) > 2 else ""


def _family_differences(
    page: Page, pair: Pair | Transfer, method: str, reference: str
) -> list[tuple[str, dict[str, float]]]:
    """Per model and seed that both have: by family, pass@1 of the method minus that of the reference."""
    base = {result.cell.seed: result for result in page.of(pair, reference)}
    found = []
    for ours in page.of(pair, method):
        theirs = base.get(ours.cell.seed)
        if theirs is None:
            continue
        for model in pair.models:
            a, b = ours.outcomes[model].measures, theirs.outcomes[model].measures
            if a is not None and b is not None:
                found.append((model, {f: rate - b.families.get(f, rate) for f, rate in a.families.items()}))
    return found


PARTS: dict[str, Part] = {
    "regimes": regimes,
    "tuned": tuned,
    "rivals": rivals,
    "families": families,
    "measures": measures,
    "verdicts": verdicts,
    "scores": score_tables,
    "curves": curves,
    "costs": costs,
    "cost plot": cost_plot,
    "complementarity": complementarity,
    "exchange": exchange,
    "clipping": clipping,
    "stability": stability,
    "entropy plot": entropy_plot,
    "paper": paper_figures,
    **distillation.PARTS,
    **programs_written.PARTS,
}


# Pieces ---------------------------------------------------------------------------------------------------------------


def plus_minus_points(mean: float, deviation: float) -> str:
    return f"{mean:.2f} ± {deviation:.2f}"


def _p(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
