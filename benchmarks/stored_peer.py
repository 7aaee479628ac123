"""What a stored peer costs: reading its log and choosing from it, and a stored GRAFT step against its GRPO step.

Run as `python benchmarks/stored_peer.py`. The laboratory's pair first trains with GRPO and leaves a rollout log. Then
model A trains through the ordinary loop with `recipes/stored.yaml`, 32 prompts of 8 responses a step: with GRPO, and
with GRAFT against B's part of the log. Both start from the same weights with the same seed and take turns step by step;
the first step of each is discarded. Step times leave evaluation and checkpoints out, and hold everything else.

`stored_peer_share`: reading the peer's groups (phase "peers") and GRAFT's selection, over the time of the step.
`stored_graft_over_grpo`: the GRAFT step over the GRPO step plus GRAFT's scoring pass. GRAFT also grades the recorded
responses anew and trains on grafted rows where our GRPO spares an all-fail group the forward and backward pass; a third
run, "grpo_full", passes all rows as other trainers do. The key is the stricter ratio, to the GRPO that spares them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import one_thread
from graft_vs_grpo import METHODS, PHASES, ROOT, Side
from graftrl.lab.cache import ensure_warm_pair
from graftrl.tasks import VerificationPool


def time_selection(side: Side) -> list[float]:
    """Seconds that the side's method spends on selecting, one value a step; filled as it trains."""
    spent: list[float] = []
    select = side.prepared.method.select  # type: ignore[attr-defined]

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        selected = select(*arguments)
        spent.append(time.perf_counter() - started)
        return selected

    side.prepared.method.select = timed  # type: ignore[attr-defined]
    return spent


def measure(steps: int = 60) -> dict[str, Any]:
    """The keys `stored_peer_share` and `stored_graft_over_grpo`, and where the time goes."""
    one_thread()
    folders = ensure_warm_pair(ROOT / "runs" / "lab-cache")
    with tempfile.TemporaryDirectory() as root:
        writer = Side("grpo", folders, Path(root) / "peer")
        verification = writer.recipe.verification
        with VerificationPool(verification.workers, verification.limit_s) as pool:
            for _ in range(steps + 1):
                writer.step(pool)
            peers = {"graft": f"peers.B.log={json.dumps(str(writer.run.root))}"}
            sides = {
                method: Side(method, {"A": folders["A"]}, Path(root), "stored.yaml", [peers.get(method, "peers={}")])
                for method in METHODS
            }
            selecting = time_selection(sides["graft"])
            for i in range(steps + 1):
                for method in METHODS if i % 2 else METHODS[::-1]:
                    sides[method].step(pool)
    graft = sides["graft"]
    grafted = graft.grafted_rows()[1:]
    if not any(grafted):
        raise RuntimeError("no step grafted anything: the comparison would be empty")
    seconds = {method: side.seconds_of(steps) for method, side in sides.items()}
    spent = {phase: sum(line["phase_s"].get(phase, 0.0) for line in graft.lines[1:]) for phase in (*PHASES, "peers")}
    found: dict[str, Any] = {method: side.summary() for method, side in sides.items()}
    found |= {
        "stored_peer_share": (spent["peers"] + sum(selecting[1:])) / seconds["graft"],
        "reading_ms": spent["peers"] / steps * 1e3,
        "selecting_ms": statistics.mean(selecting[1:]) * 1e3,
        "stored_graft_over_grpo": seconds["graft"] / (seconds["grpo"] + spent["scoring"]),
        "stored_graft_over_grpo_full": seconds["graft"] / (seconds["grpo_full"] + spent["scoring"]),
        "steps": steps,
        "grafted_rows": grafted,
    }
    report(found)
    return found


def report(found: dict[str, Any]) -> None:
    print(f"{'seconds a step':<16}" + "".join(f"{method:>10}" for method in METHODS))
    for phase in PHASES:
        print(f"  {phase:<14}" + "".join(f"{found[method]['phases'][phase]:>10.4f}" for method in METHODS))
    print(f"{'in all':<16}" + "".join(f"{found[method]['seconds_mean']:>10.4f}" for method in METHODS))
    print(f"{'passed tokens':<16}" + "".join(f"{found[method]['passed_tokens']:>10.0f}" for method in METHODS))
    print(f"grafted rows a step: mean {statistics.mean(found['grafted_rows']):.1f}")
    print(
        f"reading {found['reading_ms']:.2f} ms and selecting {found['selecting_ms']:.2f} ms a step, "
        f"{found['stored_peer_share']:.2%} of it; stored graft over grpo and scoring "
        f"{found['stored_graft_over_grpo']:.3f}, over grpo_full and scoring {found['stored_graft_over_grpo_full']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    measure()
