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
    if any(policy.workers for policy in plan.policies):
        console.print(_workers(plan))
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
    of_trainers = any(policy.workers for policy in plan.policies)
    title = f"memory on each {'trainer' if of_trainers else 'device'}, GiB"
    table = _table(title, "", *names, "")
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
    if of_trainers:
        parts.pop("sampling")
    for part, what in parts.items():
        sizes = [getattr(policy.memory, part) for policy in plan.policies]
        if any(sizes):
            table.add_row(part, *map(_gib, sizes), what)
    if plan.frozen:
        table.add_row("frozen models", *[_gib(plan.frozen)] * len(plan.policies), "beside these")
    table.add_row("all together", *(_gib(plan.peak[p.name]) for p in plan.policies), "the peak of a device")
    table.add_row("available", *(_gib(p.available) for p in plan.policies), "")
    return table


def _workers(plan: Plan) -> Table:
    """What the engine ray gives each policy."""
    found = [(policy, policy.workers) for policy in plan.policies if policy.workers is not None]
    names = (
        f"{policy.name} ({w.samplers}{f' x {w.tensor_parallel}' if w.tensor_parallel > 1 else ''}"
        f"{', shared' if w.shared else ''})"
        for policy, w in found
    )
    table = _table("samplers: memory on each device, GiB, and work", "", *names, "")
    table.add_row("share of a device", *(_gib(w.share) for _, w in found), "memory_share")
    table.add_row("weights", *(_gib(w.sampler_weights) for _, w in found), "")
    if any(w.workspace for _, w in found):
        table.add_row("workspace", *(_gib(w.workspace) for _, w in found), "assumed")
    table.add_row("keys and values", *(_gib(w.cache) for _, w in found), "what is left")
    table.add_row("one token's, KiB", *(f"{w.token / 1024:,.1f}" for _, w in found), "")
    table.add_row("responses at once", *(f"{w.held:,}" for _, w in found), "of the greatest length")
    table.add_row("responses of a step", *(f"{w.asked:,}" for _, w in found), "for each sampler")
    table.add_row("rows of a minibatch", *(f"{w.rows:,}" for _, w in found), "for each trainer, at most")
    table.add_row("tokens of a minibatch", *(f"{w.rows * w.longest:,}" for _, w in found), "for each trainer, at most")
    table.add_row("new weights, at once", *(_gib(w.chunk) for _, w in found), "of a sync, beside the shards")
    for kind in ("devices", "trainers", "samplers"):
        if any(kind in policy.idle for policy, _ in found):
            shares = (f"{policy.idle[kind]:.0%}" if kind in policy.idle else "" for policy, _ in found)
            table.add_row(f"{kind} idle", *shares, "of a step's time")
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
