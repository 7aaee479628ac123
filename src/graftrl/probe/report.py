"""The probe's result as a whole, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graftrl import __version__
from graftrl.probe.analysis import Direction, ModelSummary, directions, summarize_model, winnable
from graftrl.probe.observe import Observed
from graftrl.probe.verdict import Verdict, judge


@dataclass(frozen=True)
class ProbeReport:
    """origins: where each model's responses come from: a model's path, or a log. thresholds: the swept values of delta.
    notes: what a person should know about how the numbers came about."""

    name: str
    task: str
    origins: dict[str, str]
    prompts: int
    group_size: int
    thresholds: list[float]
    models: dict[str, ModelSummary]
    directions: list[Direction]
    verdict: Verdict
    notes: list[str]

    def to_json(self) -> str:
        """One object; the fields are listed in docs/how-to/probe.md."""
        content: dict[str, Any] = {"schema_version": 1, "graftrl": __version__, **asdict(self)}
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)


def build_report(
    observed: Observed,
    *,
    name: str,
    task: str,
    origins: Mapping[str, str],
    thresholds: Sequence[float],
    step_sizes: Sequence[int],
    seed: int,
    notes: Sequence[str],
) -> ProbeReport:
    """Args:
    step_sizes: prompts a step to estimate the exchange for; the verdict speaks of the first.
    seed: decides between equally good sources, as when the responses were scored.
    """
    successes, n = observed.successes, observed.group_size
    models = {
        model: summarize_model(list(of_model.values()), n, observed.tokens[model], observed.truncated[model])
        for model, of_model in successes.items()
    }
    found = directions(successes, n, step_sizes, observed.scored, thresholds, seed)
    return ProbeReport(
        name=name,
        task=task,
        origins=dict(origins),
        prompts=len(observed.keys),
        group_size=n,
        thresholds=list(thresholds),
        models=models,
        directions=found,
        verdict=judge(models, found, winnable(successes), step_sizes[0]),
        notes=[*notes, *observed.notes],
    )
