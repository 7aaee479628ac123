"""The report: one self-contained HTML page, without scripts and without anything to be fetched.

What models wrote is untrusted: every text goes through `html.escape`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from graftrl import __version__
from graftrl.report import plots, summary
from graftrl.report.data import (
    Graft,
    Run,
    example_grafts,
    exchange_table,
    methods_of,
    models_of,
    read_runs,
    score_cost_table,
    score_table,
)
from graftrl.report.tables import TextTable, as_latex, as_markdown
from graftrl.training.run_folder import write_text

_LONGEST_TEXT = 4000  # characters shown of a prompt or response

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --paper: #fbfbfc; --card: #ffffff; --line: #dfe3e9;
        --good: #1c7c71; --bad: #b04a1d; --mark: #eef3fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b4; --paper: #14171c; --card: #1b1f26; --line: #313844; --good: #4cc3b4;
          --bad: #f0946a; --mark: #202938; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.soft, figcaption { color: var(--soft); }
figure { margin: .8rem 0; padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; }
@media (max-width: 40rem) { figure { overflow-x: auto; } figure svg { min-width: 36rem; } }
figcaption { font-size: .88rem; margin-top: .5rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; min-width: 50%; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
         white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, .left { text-align: left; }
.forms { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .88rem; margin: -.4rem 0 1rem; }
.forms details[open] { flex-basis: 100%; }
.forms pre { white-space: pre; overflow-x: auto; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; text-align: left; font: .84rem/1.45 ui-monospace, monospace;
          min-width: 16rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: .84rem/1.45 ui-monospace, monospace;
      background: var(--mark); padding: .6rem .8rem; border-radius: 6px; margin: .4rem 0; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .2rem 1.1rem .8rem;
          margin: 1rem 0; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
summary { cursor: pointer; color: var(--soft); }
"""


def write_report(runs: Sequence[Run], path: Path, title: str) -> Path:
    """Write the page about some runs of `read_runs`; an existing file is replaced as a whole."""
    write_text(path, render_report(runs, title))
    return path


def report_folders(folders: Sequence[Path], path: Path, title: str) -> Path:
    """The same, from run folders."""
    return write_report(read_runs(folders), path, title)


def render_report(
    runs: Sequence[Run],
    title: str,
    figures: Mapping[str, Any] | None = None,
    tables: Mapping[str, TextTable] | None = None,
) -> str:
    """The page as a string.

    Args:
        figures, tables: of `plots.drawn` and `summary.tables_of`, if they are there already.

    Raises:
        ConfigError: matplotlib is missing.
    """
    plots.require_matplotlib()
    content = _Content(
        runs, plots.drawn(runs) if figures is None else figures, summary.tables_of(runs) if tables is None else tables
    )
    sections = [_results(content)]
    if any(run.metrics for run in runs):
        sections += [
            _learning(content),
            *_exchanges(content),
            _complementarity(content),
            _clipping(content),
            _entropy(content),
            _cost(content),
            _examples(runs),
        ]
    sections.append(_settings(runs))
    seeds = sorted({run.seed for run in runs})
    count = sum(len(run.parts) for run in runs)
    lead = (
        f"{count} {'run' if count == 1 else 'runs'}: {', '.join(methods_of(runs))} on models "
        f"{', '.join(models_of(runs))}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    )
    return page(title, lead, sections)


@dataclass(frozen=True)
class _Content:
    """What sections are made from; `figure` and `table` are empty where the runs have nothing for them."""

    runs: Sequence[Run]
    figures: Mapping[str, Any]
    tables: Mapping[str, TextTable]

    def figure(self, name: str, caption: str = "") -> str:
        drawing = self.figures.get(name)
        return "" if drawing is None else figure(plots.to_svg(drawing, name), caption)

    def table(self, name: str) -> str:
        found = self.tables.get(name)
        return "" if found is None else text_table(found)


# Sections -------------------------------------------------------------------------------------------------------------


def _results(content: _Content) -> str:
    intro = "" if "results" in content.tables else "No run has been validated yet."
    return section("Results", intro, content.table("results") + content.table("runs"))


def _learning(content: _Content) -> str:
    validated = not score_cost_table(content.runs).is_empty()
    return section(
        "Learning curves",
        ("Above: mean" if validated else "Mean")
        + f" reward of the training rollouts, smoothed over {plots.SMOOTHING} steps. "
        + ("Below: pass@1 on the validation prompts; stars mark each run's selected checkpoint. " if validated else "")
        + "Lines are means over seeds, bands reach from the lowest to the highest.",
        content.figure("learning"),
    )


def _exchanges(content: _Content) -> list[str]:
    found = []
    for method, of_method in plots.by_method(content.runs).items():
        if exchange_table(of_method).is_empty():
            continue
        name = plots.file_name(method)
        body = content.figure(
            f"exchange-{name}",
            "Above: prompts that the method could take from the peer (candidates), and those of which it took "
            "responses (selected). Below: peer responses that entered the update. Means over seeds.",
        )
        if score_table(of_method).is_empty():
            told = "The method computes no compatibility scores."
            if not any(run.transfers is not None for run in of_method):
                told = "No peer response was transferred in these runs."
            body += f"<p>{escape(told)}</p>"
        else:
            body += content.figure(
                f"scores-{name}",
                "Compatibility s = exp(mean log-probability per token under the receiver − under the source) of every "
                "transferred response. Responses at or below δ get weight 0; the others min(s, 1).",
            )
            body += content.figure(
                f"drift-{name}", "The same over training: quantiles of the s of the responses transferred in a step."
            )
        found.append(section(f"Exchange: {method}", "", body))
    if content.table("exchange"):
        found.append(section("Exchange in numbers", "", content.table("exchange")))
    return found


def _complementarity(content: _Content) -> str:
    if "complementarity" not in content.figures:
        return ""
    return section(
        "Complementarity",
        "How often all of a model's responses to a prompt fail, and how often a peer then has at least one success: "
        "what an exchange could win. Counted from the rollouts, whether or not the method exchanges.",
        content.figure("complementarity"),
    )


def _clipping(content: _Content) -> str:
    return section(
        "Clipped tokens",
        "Share of loss tokens whose clipped surrogate is strictly smaller than the unclipped one, for a model's own "
        "responses and for grafted ones. Such tokens give no gradient.",
        content.figure("clipped") + content.table("clipped"),
    )


def _entropy(content: _Content) -> str:
    return section(
        "Entropy", "Of the sampled tokens, along a model's own responses; smoothed.", content.figure("entropy")
    )


def _cost(content: _Content) -> str:
    return section(
        "Cost",
        "All models together. Trained tokens enter the loss; passed tokens, prompts included, went through a forward "
        "and backward pass (rows without a gradient are spared it). Seconds leave out evaluation.",
        content.table("cost")
        + content.figure(
            "score-by-cost",
            "Validation pass@1, mean over models, against what training had cost by then; means over seeds. Stars: "
            "each run's best step.",
        )
        + content.figure("phases", "Where the time goes, evaluation included."),
    )


def _examples(runs: Sequence[Run]) -> str:
    grafts = example_grafts(runs)
    if not grafts:
        return section("Example grafts", "No group was replaced in these runs.")
    return section(
        "Example grafts",
        "Prompts on which all of the receiver's responses failed, and the peer's group that took their place. s: "
        "compatibility; w: weight in the loss; advantages come from the peer's whole group.",
        "".join(_example(graft) for graft in grafts),
    )


def _example(graft: Graft) -> str:
    own = [[_text(row["text"]), _reward(row["reward"])] for row in graft.own.iter_rows(named=True)]
    peer = [
        [
            _text(row["text"]),
            _reward(row["reward"]),
            _number(row["score"]),
            _number(row["weight"]),
            _number(row["advantage"], "+.3f"),
            _status(row["status"], row["reason"]),
        ]
        for row in graft.peer.iter_rows(named=True)
    ]
    return (
        f"<article><h3>Step {graft.step}: {escape(graft.source)} → {escape(graft.receiver)}</h3>"
        f"<pre>{escape(_cut(graft.prompt))}</pre>"
        f'<p class="soft">reference answer: <code>{escape(_cut(graft.reference))}</code></p>'
        f"<h3>{escape(graft.receiver)}'s own group, dropped</h3>{_raw_table(['response', 'reward'], own)}"
        f"<h3>{escape(graft.source)}'s group, in its place</h3>"
        f"{_raw_table(['response', 'reward', 's', 'w', 'advantage', 'status'], peer)}</article>"
    )


def _settings(runs: Sequence[Run]) -> str:
    blocks = []
    for method in methods_of(runs):
        run = next(run for run in runs if run.method == method)
        text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
        summary = f"<summary>{escape(method)} ({escape(str(run.folder))})</summary>"
        blocks.append(f"<details>{summary}<pre>{escape(text)}</pre></details>")
    return section("Settings", "The complete recipe of one run of each method, defaults included.", "".join(blocks))


# Pieces ---------------------------------------------------------------------------------------------------------------


def page(title: str, lead: str, sections: Sequence[str]) -> str:
    """The whole page: title and a line under it (texts), then sections of `section`; empty ones are left out."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(lead)}</p></header>\n'
        + "\n".join(section for section in sections if section)
        + f'\n<p class="soft">graftrl {escape(__version__)}</p>\n</main>\n</body>\n</html>\n'
    )


def section(title: str, intro: str, body: str = "") -> str:
    """`body` is HTML; title and introduction are text."""
    lead = f"<p>{escape(intro)}</p>" if intro else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def figure(svg: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{below}</figure>"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, escaped here; the first column is aligned left."""
    return _raw_table(headers, [[f"<td>{escape(cell)}</td>" for cell in row] for row in rows])


def text_table(content: TextTable) -> str:
    """A table with its caption, and folded below it the same as Markdown and LaTeX."""
    forms = "".join(
        f"<details><summary>as {name}</summary><pre>{escape(text)}</pre></details>"
        for name, text in (("Markdown", as_markdown(content)), ("LaTeX", as_latex(content)))
    )
    cells = [
        [f"<td{' class=left' if i < content.text_columns else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)]
        for row in content.rows
    ]
    return (
        f"<h3>{escape(content.title)}</h3>{_raw_table(content.header, cells, content.text_columns)}"
        f'<p class="soft">{escape(content.caption)}</p><div class="forms">{forms}</div>'
    )


def _raw_table(headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    head = "".join(
        f"<th{' class=left' if i < text_columns else ''}>{escape(header)}</th>" for i, header in enumerate(headers)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(text: str) -> str:
    return f'<td class="text">{escape(_cut(text))}</td>'


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} … ({len(text):,} characters)"


def _number(value: float | None, form: str = ".3f") -> str:
    return "<td></td>" if value is None else f"<td>{value:{form}}</td>"


def _reward(value: float) -> str:
    return f'<td class="{"good" if value == 1.0 else "bad"}">{value:g}</td>'


def _status(status: str | None, reason: str | None) -> str:
    shown = (status or "") + (f" ({reason})" if reason else "")
    return f'<td class="{"good" if status == "admitted" else "bad"}">{escape(shown)}</td>'
