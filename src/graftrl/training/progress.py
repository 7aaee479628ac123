"""What a person sees while a run trains: a bar and one row per model; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from graftrl.config import Recipe
from graftrl.logs.config import LivePeerSettings
from graftrl.training.run_folder import TrainingState


class Display(Protocol):
    def start(self, recipe: Recipe, steps: int, state: TrainingState, notes: Sequence[str]) -> None: ...

    def step(self, metrics: Mapping[str, Any]) -> None: ...

    def evaluated(self, step: int, results: Mapping[str, Mapping[str, Any]]) -> None: ...

    def finish(self, state: TrainingState, steps: int) -> None: ...


class Silent:
    """No output; notes of a step are still in metrics.jsonl."""

    def start(self, recipe: Recipe, steps: int, state: TrainingState, notes: Sequence[str]) -> None: ...

    def step(self, metrics: Mapping[str, Any]) -> None: ...

    def evaluated(self, step: int, results: Mapping[str, Mapping[str, Any]]) -> None: ...

    def finish(self, state: TrainingState, steps: int) -> None: ...


class Terminal:
    """Live table on a terminal; elsewhere a line a step, at most one every `line_s` seconds."""

    def __init__(self, console: Console | None = None, line_s: float = 5.0) -> None:
        self.console = console or Console()
        self.line_s = line_s
        self.seen_notes: set[str] = set()
        self.live: Live | None = None
        self.last_line = 0.0
        self.steps = 0
        self.seconds: Counter[str] = Counter()  # per phase, of the steps shown

    def start(self, recipe: Recipe, steps: int, state: TrainingState, notes: Sequence[str]) -> None:
        self.steps = steps
        method = recipe.method.name
        live = [name for name, peer in recipe.peers.items() if isinstance(peer, LivePeerSettings)]
        kinds = {"stored": [name for name in recipe.peers if name not in live], "live": live}
        peers = "".join(f" ({kind} peer: {', '.join(names)})" for kind, names in kinds.items() if names)
        self.console.print(
            f"[bold]{recipe.name}[/]: {method} on {', '.join(recipe.models)}{peers}, {steps} steps of "
            f"{recipe.training.prompts_per_step} prompts x {recipe.training.group_size} responses"
        )
        for note in notes:
            self._note(note)
        self.bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self.task = self.bar.add_task("", total=steps, completed=state.step)
        if self.console.is_terminal:
            self.live = Live(self.bar, console=self.console, refresh_per_second=4)
            self.live.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.seconds.update(metrics["phase_s"])
        for note in metrics["notes"]:
            self._note(note)
        self.bar.update(self.task, completed=metrics["step"])
        if "evaluation" in metrics:
            self.evaluated(metrics["step"], metrics["evaluation"])
        if self.live is not None:
            self.live.update(Group(self.bar, _table(metrics)))
        elif time.monotonic() - self.last_line >= self.line_s or metrics["step"] == self.steps:
            self.last_line = time.monotonic()
            self.console.print(_line(metrics, self.steps), soft_wrap=True, highlight=False)

    def evaluated(self, step: int, results: Mapping[str, Mapping[str, Any]]) -> None:
        scores = ", ".join(
            f"{model} {r['pass_at_1']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" for model, r in results.items()
        )
        self.console.print(f"step {step}: validation pass@1 {scores}", markup=False, highlight=False, soft_wrap=True)

    def finish(self, state: TrainingState, steps: int) -> None:
        if self.live is not None:
            self.live.stop()
        if state.step < steps:
            self.console.print(f"stopped after step {state.step} of {steps}; everything is saved", highlight=False)
        if total := self.seconds.total():
            parts = (f"{phase} {s:.1f} s ({s / total:.0%})" for phase, s in self.seconds.most_common())
            self.console.print(f"time: {', '.join(parts)}", highlight=False, soft_wrap=True)

    def _note(self, note: str) -> None:
        if note not in self.seen_notes:
            self.seen_notes.add(note)
            self.console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _received(metrics: Mapping[str, Any], model: str) -> tuple[int, int]:
    """Prompts grafted into a model this step, and admitted responses."""
    arriving = [stats for key, stats in metrics["exchange"].items() if key.endswith(f"->{model}")]
    return sum(s["selected"] for s in arriving), sum(s["admitted"] for s in arriving)


def _table(metrics: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("model", "reward", "pass@n", "all-fail", "grafted prompts", "admitted", "tokens", "grad norm"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for model, m in metrics["models"].items():
        prompts, admitted = _received(metrics, model)
        if not m["groups"]:
            table.add_row(model, *["-"] * 7)
            continue
        norm = m["grad_norm"]
        table.add_row(
            model, f"{m['reward_mean']:.3f}", f"{m['pass_at_n']:.3f}", f"{m['all_fail']:.3f}", str(prompts),
            str(admitted), f"{m['response_tokens_mean']:.1f}", "-" if norm is None else f"{norm:.2f}",
        )  # fmt: skip
    table.caption = f"{metrics['sampled_tokens_per_s']:,.0f} sampled tokens/s, {metrics['step_s']:.2f} s a step"
    return table


def _line(metrics: Mapping[str, Any], steps: int) -> str:
    parts = []
    for model, m in metrics["models"].items():
        prompts, admitted = _received(metrics, model)
        reward = f"reward {m['reward_mean']:.3f} pass@n {m['pass_at_n']:.3f}" if m["groups"] else "no group kept"
        parts.append(f"{model}: {reward}" + (f" grafted {prompts} ({admitted})" if metrics["exchange"] else ""))
    left = (steps - metrics["step"]) * metrics["wall_s"] / metrics["step"]
    return (
        f"step {metrics['step']}/{steps}  {'  '.join(parts)}  {metrics['sampled_tokens_per_s']:,.0f} tokens/s  "
        f"{left:,.0f} s left"
    )
