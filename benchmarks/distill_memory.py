"""Memory of an update with P-OPD's full form against the plain way to write it, and first of all the same gradient.

Run as `python benchmarks/distill_memory.py`. Four random Qwen2 models with a vocabulary of 151,936: the target, its
frozen start, and a smaller proxy before and after its training. 16 rows of 32 response tokens, float32, one optimizer
step.

Ours is the product's own update: hidden states of the frozen models are kept, logits exist for a few positions at a
time. The plain form calls all four models and holds their logits [rows, tokens, vocabulary], of the response tokens
alone, for autograd. Each side runs in a fresh process. A first update goes before, so that the baseline holds weights,
gradients and Adam's states on both sides. The growth is the high-water mark of resident memory (VmHWM, reset through
/proc/self/clear_refs just before the update) minus resident memory at the reset.

`distill_memory_share`: growth of ours over growth of the plain form.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common import (
    Setting,
    gradient_difference,
    in_subprocess,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
    save_model,
)
from graftrl.methods import build_method
from graftrl.policies.config import ModelSettings, OptimizerSettings, SamplingSettings, ScorerSettings
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.hf import HFPolicy
from graftrl.rollout import Row

TARGET = Setting("target", vocabulary=151_936, prompts=4, group=4, new_tokens=32, microbatch_rows=16)
PROXY = replace(TARGET, name="proxy", hidden=32, feed_forward=128)
MODELS = {"target": TARGET, "base": PROXY, "expert": PROXY}
PROMPT_TOKENS, CALIBRATION, LR, NO_CLIPPING = 16, 1.5, 1e-4, 1e9


def make_rows() -> list[Row]:
    """Responses in tokens drawn uniformly; the full form asks for no more than that they are there."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, TARGET.vocabulary - 2, (TARGET.prompts, PROMPT_TOKENS))
    rows = []
    for i in range(TARGET.rows):
        prompt, response = prompts[i // TARGET.group], rng.integers(0, TARGET.vocabulary - 2, TARGET.new_tokens)
        row = Row(str(i // TARGET.group), prompt, response, 1.0, "own", "target")
        row.old_logprobs, row.contexts = np.zeros(TARGET.new_tokens, np.float32), {"expert": prompt, "base": prompt}
        rows.append(row)
    return rows


class Ours:
    """The policy and the method as a run has them."""

    def __init__(self, root: Path) -> None:
        self.frozen = FrozenWeights()
        optimizer = OptimizerSettings(lr=LR, max_grad_norm=NO_CLIPPING)
        settings = ModelSettings(path=str(root / "target"), device="cpu", bos="keep", optimizer=optimizer)
        self.policy = HFPolicy("target", settings, SamplingSettings(), frozen=self.frozen)
        self.scorers = {
            name: self.frozen.model(name, ScorerSettings(path=str(root / name), device="cpu", bos="keep"))
            for name in ("base", "expert")
        }
        self.method = build_method({"name": "p_opd", "estimator": "full", "calibration": CALIBRATION})

    def update(self, rows: Sequence[Row]) -> float:
        """The loss; gradients stay in the parameters."""
        stats = self.policy.update([rows], self.method.objective, self.scorers)
        self.frozen.forget()
        return stats.losses[0]

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.policy.loaded.causal_lm.named_parameters() if p.grad is not None}


class Plain:
    """Four models of transformers and the formula as it is printed."""

    def __init__(self, root: Path) -> None:
        paths = {"target": "target", "reference": "target", "base": "base", "expert": "expert"}
        self.models: dict[str, Any] = {
            name: AutoModelForCausalLM.from_pretrained(root / path, dtype=torch.float32) for name, path in paths.items()
        }
        self.optimizer = torch.optim.AdamW(self.models["target"].parameters(), lr=LR, weight_decay=0.01, fused=True)

    def update(self, rows: Sequence[Row]) -> float:
        ids = torch.from_numpy(np.stack([np.concatenate([r.prompt_token_ids, r.response_token_ids]) for r in rows]))
        self.optimizer.zero_grad()
        with torch.no_grad():
            frozen = {name: self._logits(name, ids) for name in ("reference", "base", "expert")}
        loss = self._loss(self._logits("target", ids), frozen)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _logits(self, name: str, ids: Tensor) -> Tensor:
        logits: Tensor = self.models[name](input_ids=ids, logits_to_keep=TARGET.new_tokens + 1, use_cache=False).logits
        return logits[:, :-1]

    def _loss(self, logits: Tensor, frozen: Mapping[str, Tensor]) -> Tensor:
        own = logits.log_softmax(-1)
        with torch.no_grad():
            of_proxy = frozen["expert"].log_softmax(-1) - frozen["base"].log_softmax(-1)
            target = of_proxy + CALIBRATION * frozen["reference"].log_softmax(-1)
        return -(own.exp() * (target - CALIBRATION * own)).sum(-1).mean()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.models["target"].named_parameters() if p.grad is not None}


SIDES = {"ours": Ours, "plain": Plain}


def check_equality(root: Path) -> dict[str, float]:
    """Two updates by either side with one group's rows; in the second the target has left its start.

    Raises:
        RuntimeError: losses or gradients differ by more than rounding.
    """
    ours, plain, rows = Ours(root), Plain(root), make_rows()[: TARGET.group]
    found: dict[str, float] = {}
    for name in ("first", "second"):
        losses = ours.update(rows), plain.update(rows)
        difference, _ = gradient_difference(ours.gradients(), plain.gradients())
        found |= {
            f"{name}_loss_ours": losses[0],
            f"{name}_loss_plain": losses[1],
            f"{name}_gradient_relative_difference": difference,
        }
        if abs(losses[0] - losses[1]) > 1e-5 or difference > 1e-4:
            raise RuntimeError(f"not the same objective: {found}")
    return found


def measure_side(side: str, root: Path) -> dict[str, float]:
    """Growth of resident memory and seconds of one update; meant for a fresh process."""
    trainer, rows = SIDES[side](root), make_rows()
    trainer.update(rows[: TARGET.group])
    reset_peak()
    before, started = resident_bytes(), time.perf_counter()
    trainer.update(rows)
    seconds, peak = time.perf_counter() - started, peak_resident_bytes()
    return {"before": before, "peak": peak, "growth": peak - before, "seconds": seconds}


def measure() -> dict[str, Any]:
    """The key `distill_memory_share`, and what either side took."""
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for seed, (name, setting) in enumerate(MODELS.items()):
            save_model(setting, root / name, seed)
        equality = check_equality(root)
        sides = {side: in_subprocess("distill_memory.py", "--side", side, "--models", folder) for side in SIDES}
    share = sides["ours"]["growth"] / sides["plain"]["growth"]
    worst = max(value for key, value in equality.items() if "difference" in key)
    print(f"full form of P-OPD: the same gradient, relative difference {worst:.1e}")
    for side, found in sides.items():
        mib = {key: found[key] / 2**20 for key in ("before", "growth")}
        print(f"{side}: {mib['growth']:.0f} MiB more than {mib['before']:.0f} MiB, {found['seconds']:.1f} s")
    print(f"distill_memory_share {share:.3f}", flush=True)
    return {"distill_memory_share": share, "sides": sides, "equality": equality}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--models", type=Path)
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        transformers_logging.disable_progress_bar()
        arguments.result.write_text(json.dumps(measure_side(arguments.side, arguments.models)))
    else:
        measure()
