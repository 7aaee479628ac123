"""A plan on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from graftrl.plan.devices import GIB
from graftrl.plan.estimate import Plan


def show(plan: Plan, console: Console) -> None:
    if not console.is_terminal:
        console.width = 120  # a pipe has no width; a table must not be cut to 80 columns
    console.print(f"{plan.name}: {plan.method}; {plan.layout}", highlight=False)
    console.print(_memory(plan))
    console.print(_time(plan))
    console.print(_devices_time(plan))
    console.print(
        f"a step: {plan.step_seconds:,.1f} s ({plan.low:,.1f} to {plan.high:,.1f} in the simulated steps), "
        f"{plan.sampled_tokens:,} sampled tokens, {plan.sampled_tokens / plan.step_seconds:,.0f} a second, "
        f"{plan.passed_rows:,} rows through training",
        highlight=False,
    )
    if plan.scaling:
        console.print(_scaling(plan))
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for warning in plan.warnings:
        console.print(f"does NOT fit: {warning}", style="red", markup=False, highlight=False)
    for advice in plan.advice:
        what = "would fit with" if plan.warnings else "advice"
        console.print(f"{what}: {advice}", style="yellow", markup=False, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _memory(plan: Plan) -> Table:
    names = (f"{policy.name} ({policy.devices} x {policy.device})" for policy in plan.policies)
    table = _table("memory on each device, GiB", "", *names, "")
    parts = {
        "weights": "exact",
        "gradients": "exact",
        "optimizer": "exact",
        "sampler": "its own copy of the weights",
        "casts": "of the weights, while at work",
        "gathered": "of other devices' shards",
        "activations": "estimate",
        "logits": "at most",
        "cache": "at most",
        "training": "peak",
        "sampling": "peak",
    }
    for part, what in parts.items():
        sizes = [getattr(policy.memory, part) for policy in plan.policies]
        if any(sizes):
            table.add_row(part, *map(_gib, sizes), what)
    if plan.frozen:
        table.add_row("frozen models", *[_gib(plan.frozen)] * len(plan.policies), "beside these")
    table.add_row("all together", *(_gib(plan.peak[p.name]) for p in plan.policies), "the peak of a device")
    table.add_row("available", *(_gib(p.available) for p in plan.policies), "")
    return table


def _time(plan: Plan) -> Table:
    table = _table("seconds of a step", "phase", *(policy.name for policy in plan.policies), "step", "share")
    for phase, seconds in plan.seconds.items():
        parts = [f"{p.step[phase]:,.2f}" if phase in p.step else "" for p in plan.policies]
        table.add_row(phase, *parts, f"{seconds:,.2f}", f"{seconds / plan.step_seconds:.0%}")
    table.add_row("waits for a peer", *(f"{p.waits:,.2f}" for p in plan.policies), "", "")
    table.add_row("tokens sampled", *(f"{p.tokens:,}" for p in plan.policies), f"{plan.sampled_tokens:,}", "")
    return table


def _devices_time(plan: Plan) -> Table:
    table = _table("where the devices' time goes", *plan.used)
    for column in table.columns:
        column.justify = "right"
    table.add_row(*(f"{share:.0%}" for share in plan.used.values()))
    return table


def _scaling(plan: Plan) -> Table:
    table = _table(
        "the same step on more devices (simulated)",
        "devices", "placement", "s", "speed-up", "work", "tail", "peer", "role", "exchange", "grading", "comm.",
        "most goes to",
    )  # fmt: skip
    first = plan.scaling[0]
    for point in plan.scaling:
        bound = point.bound if point.bound != "slower peer" else f"slower peer ({point.slower})"
        table.add_row(
            f"{point.devices:,}",
            point.placement,
            f"{point.seconds:,.1f}",
            f"{first.seconds / point.seconds * first.devices:,.1f}",
            *(f"{share:.0%}" for share in point.shares.values()),
            bound,
        )
    return table
