"""A plan's plots: memory, where a step's time goes, and how it scales."""

from __future__ import annotations

from typing import Any

from graftrl.plan.devices import GIB
from graftrl.plan.estimate import Plan
from graftrl.plan.simulate import LOSSES
from graftrl.report.plots import COLORS, MUTED, panels

_PARTS = ("weights", "gradients", "optimizer", "sampler", "casts", "gathered", "activations", "logits", "cache")


def drawn(plan: Plan) -> dict[str, Any]:
    """File name without suffix -> figure."""
    figures = {"memory": memory(plan), "phases": phases(plan)}
    if plan.scaling:
        figures |= {"scaling": scaling(plan), "where": where(plan)}
    return figures


def memory(plan: Plan) -> Any:
    """Bytes on each device while training and while sampling."""
    figure, (axis,) = panels(1, size=(9.2, 1.3 + 0.75 * len(plan.policies)))
    labels, at = [], 0
    for policy in plan.policies:
        m = policy.memory
        out = {"training": {"cache"}, "sampling": {"activations", "gathered", *({"casts"} if m.sampler else ())}}
        for phase, absent in out.items():
            left = 0.0
            for part, color in zip(_PARTS, COLORS, strict=False):
                size = 0.0 if part in absent else getattr(m, part) / GIB
                axis.barh(at, size, left=left, color=color, height=0.7, label=part if at == 0 else None)
                left += size
            labels.append(f"{policy.name}, {phase}")
            at += 1
    for policy in plan.policies:
        if policy.workers is not None:
            axis.barh(at, policy.workers.share / GIB, color=MUTED, height=0.7)
            labels.append(f"{policy.name}, sampler")
            at += 1
    if plan.shared and len(plan.policies) > 1:
        axis.barh(at, next(iter(plan.peak.values())) / GIB, color=MUTED, height=0.7)
        labels.append("in turn, at most")
        at += 1
    for limit in sorted({policy.available / GIB for policy in plan.policies}):
        axis.axvline(limit, color=MUTED, linestyle="--", linewidth=1.2)
    axis.set_yticks(range(at), labels)
    axis.invert_yaxis()
    axis.set(xlabel="GiB on each device (dashed: what it has)", title=plan.layout)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05))
    return figure


def phases(plan: Plan) -> Any:
    """Seconds of each policy's part of the phases."""
    figure, (axis,) = panels(1, size=(9.2, 1.2 + 0.5 * (len(plan.policies) + 1)))
    bars = {**{policy.name: policy.step for policy in plan.policies}, "step": plan.seconds}
    left = dict.fromkeys(bars, 0.0)
    for phase, color in zip(plan.seconds, COLORS, strict=False):
        for name, seconds in bars.items():
            value = seconds.get(phase, 0.0)
            axis.barh(name, value, left=left[name], color=color, height=0.6, label=phase if name == "step" else None)
            left[name] += value
    axis.invert_yaxis()
    axis.set(xlabel="seconds", title=f"{plan.name}: {plan.layout}")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05))
    return figure


def scaling(plan: Plan) -> Any:
    """Step time by number of devices, shared in turn or own; dashed: if communication took no time."""
    figure, (axis,) = panels(1, size=(9.2, 4.0))
    for placement, color in zip(("shared", "own"), COLORS, strict=False):
        points = [p for p in plan.scaling if p.placement == placement]
        if not points:
            continue
        devices = [p.devices for p in points]
        axis.fill_between(devices, [p.low for p in points], [p.high for p in points], color=color, alpha=0.18)
        axis.plot(devices, [p.seconds for p in points], "o-", color=color, label=f"{placement} devices")
        axis.plot(devices, [p.ideal for p in points], "--", color=color, label=f"{placement}, communication free")
    start = plan.scaling[0]
    counts = sorted({p.devices for p in plan.scaling})
    axis.plot(counts, [start.seconds * start.devices / n for n in counts], ":", color=MUTED, label="proportional")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.minorticks_off()
    axis.set(xlabel="devices in all", ylabel="seconds of a step", title=plan.name)
    axis.legend()
    return figure


def where(plan: Plan) -> Any:
    """Shares of the devices' time by number of devices."""
    placements = [name for name in ("shared", "own") if any(p.placement == name for p in plan.scaling)]
    losses = {
        name: color for name, color in zip(LOSSES, COLORS, strict=False) if any(p.shares[name] for p in plan.scaling)
    }
    figure, axes = panels(len(placements), size=(9.2, 3.6))
    for axis, placement in zip(axes, placements, strict=True):
        points = [p for p in plan.scaling if p.placement == placement]
        axis.stackplot(
            [p.devices for p in points],
            *([p.shares[name] for p in points] for name in losses),
            colors=list(losses.values()),
            labels=list(losses),
        )
        axis.set_xscale("log", base=2)
        axis.set_xticks([p.devices for p in points], [str(p.devices) for p in points], rotation=60, fontsize=8)
        axis.minorticks_off()
        axis.set(title=f"{placement} devices", xlabel="devices in all", ylim=(0, 1))
        axis.margins(x=0)
    axes[0].set_ylabel("share of the devices' time")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return figure
