"""Run every benchmark, print one table, write `latest.json`; run as `python benchmarks/run_all.py` or `make bench`."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

import distill_memory
import floor
import graft_vs_grpo
import selection
import short_rows
import step_vs_trl
import stored_peer
from common import HERE, SETTINGS, machine
from graftrl.training.run_folder import write_text

# key: (target or None, whether more is better)
TARGETS: dict[str, tuple[float | None, bool]] = {
    "step_speedup_vs_trl": (2.0, True),
    "step_speedup_vs_trl_150k": (4.0, True),
    "memory_growth_vs_trl_150k": (0.5, False),
    "graft_over_grpo": (1.15, False),
    "stored_peer_share": (0.02, False),
    "stored_graft_over_grpo": (1.05, False),
    "select_1m_seconds": (5.0, False),
    "distill_memory_share": (0.25, False),
    "short_rows_over_tree": (3.0, True),
}


def collect() -> dict[str, Any]:
    started = time.perf_counter()
    steps = step_vs_trl.measure()
    graft = graft_vs_grpo.measure()
    stored = stored_peer.measure()
    floors = floor.measure()
    for name, found in floors.items():
        ours = {phase: steps[f"{name}_step"]["ours_phases"][phase] for phase in ("sampling", "training")}
        floor.report(SETTINGS[name], found, ours)
        for phase, seconds in ours.items():
            found[f"{phase}_over_floor"] = seconds / found[f"{phase}_seconds"]
    selected = selection.measure()
    distilled = distill_memory.measure()
    short = short_rows.measure()
    values = {**steps, **graft, **stored, **selected, **distilled, **short}
    return {
        **{key: float(values[key]) for key in TARGETS},
        "targets": {key: target for key, (target, _) in TARGETS.items()},
        "details": {
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds_in_all": time.perf_counter() - started,
            "machine": machine(),
            "step_vs_trl": {key: value for key, value in steps.items() if key not in TARGETS},
            "graft_vs_grpo": {key: value for key, value in graft.items() if key not in TARGETS},
            "stored_peer": {key: value for key, value in stored.items() if key not in TARGETS},
            "floor": floors,
            "selection": selected,
            "distill_memory": {key: value for key, value in distilled.items() if key not in TARGETS},
            "short_rows": {key: value for key, value in short.items() if key not in TARGETS},
        },
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<28} {'value':>8} {'target':>9}  met"]
    for key, (target, more) in TARGETS.items():
        value = result[key]
        if target is None:
            lines.append(f"{key:<28} {value:>8.3f} {'none':>9}")
            continue
        met = value >= target if more else value <= target
        lines.append(f"{key:<28} {value:>8.3f} {'>=' if more else '<='} {target:>6g}  {'yes' if met else 'NO'}")
    return "\n".join(lines)


def main() -> None:
    result = collect()
    print("\n" + table(result))
    latest = HERE / "latest.json"
    write_text(latest, json.dumps(result, indent=1) + "\n")
    print(f"{result['details']['seconds_in_all']:.0f} s in all; written to {latest}")


if __name__ == "__main__":
    main()
