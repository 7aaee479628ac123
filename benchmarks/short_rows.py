"""Scoring and training on short answers: rows that pass as a tree against rows that share prompts, and whole rows.

Run as `python benchmarks/short_rows.py`. Six prompts, a long start that all of them have (a system message, solved
examples), 32 answers each of 1 to 8 tokens, of which many repeat. A random Qwen2 model scores the rows and adds up the
gradient of one minibatch, in one microbatch as far as it fits, float32. The three forms take turns; the first of each
is discarded. Whole rows are what trainers pass that know nothing of what rows share. That log-probabilities and
gradients are the same is checked.

`short_rows_over_tree`: seconds of whole rows over those of the tree. `shared_over_tree`: of shared prompts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from common import Setting, default_threads, gradient_difference, save_model
from graftrl.methods import build_method
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import HFPolicy, UpdateStats
from graftrl.rollout import Row

SETTING = Setting(
    "answers", vocabulary=400, prompts=6, group=32, new_tokens=8, microbatch_rows=192, hidden=384, layers=6, heads=6,
    feed_forward=1024,
)  # fmt: skip
START, OWN = 60, 20  # tokens of a prompt
ANSWERS = 40  # different ones, the r-th with a probability that falls as 1 / r
REPEATS = 4
SAME = 1e-4  # nats
SAME_GRADIENT = 1e-5  # relative
FORMS = ("whole", "shared", "tree")


def make_rows() -> list[Row]:
    rng = np.random.default_rng(0)
    most = SETTING.vocabulary - 2
    start = rng.integers(0, most, START)
    prompts = [np.concatenate([start, rng.integers(0, most, OWN)]) for _ in range(SETTING.prompts)]
    answers = [rng.integers(0, most, rng.integers(1, SETTING.new_tokens + 1)) for _ in range(ANSWERS)]
    ranks = 1 / np.arange(1, ANSWERS + 1)
    rows = []
    for i in range(SETTING.rows):
        answer = answers[rng.choice(ANSWERS, p=ranks / ranks.sum())]
        prompt = i // SETTING.group
        row = Row(str(prompt), prompts[prompt], answer, float(rng.choice([-1.0, 1.0])), "own", "model")
        row.old_logprobs = np.full(len(answer), -6.0, np.float32)
        rows.append(row)
    return rows


def measure() -> dict[str, float]:
    default_threads()
    rows, objective = make_rows(), build_method({"name": "grpo"}).objective(0)
    with tempfile.TemporaryDirectory() as folder:
        save_model(SETTING, Path(folder))
        tokens = SETTING.microbatch_rows * (START + OWN + SETTING.new_tokens)
        settings = ModelSettings(path=folder, device="cpu", bos="keep", microbatch_tokens=tokens)
        policy = HFPolicy("model", settings, SamplingSettings())
    shape, longest = policy.passes.tree_shape, policy.passes.longest_shared
    if shape is None or not longest:
        raise RuntimeError("this model's rows share nothing")
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    passed: dict[str, int] = {}
    scores: dict[str, np.ndarray] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for repeat in range(REPEATS + 1):
        for form in FORMS:
            policy.passes.tree_shape = shape if form == "tree" else None
            policy.passes.longest_shared = 0 if form == "whole" else longest
            stats, started = UpdateStats(), time.perf_counter()
            scored = policy.score(rows)
            policy._accumulate(rows, objective, stats)
            if repeat:
                seconds[form].append(time.perf_counter() - started)
            passed[form], scores[form] = stats.passed_tokens, np.concatenate(scored)
            if not repeat:
                named = policy.loaded.causal_lm.named_parameters()
                gradients[form] = {name: p.grad for name, p in named if p.grad is not None}
    worst = float(np.max([np.abs(scores[form] - scores["whole"]) for form in FORMS]))
    if not worst <= SAME:  # nor where one is not a number
        raise RuntimeError(f"log-probabilities differ by up to {worst:.1e} nats")
    apart = max(gradient_difference(gradients[form], gradients["whole"])[0] for form in FORMS)
    if apart > SAME_GRADIENT:
        raise RuntimeError(f"gradients differ by {apart:.1e} of their norm")
    medians = {form: statistics.median(seconds[form]) for form in FORMS}
    return {
        "short_rows_over_tree": medians["whole"] / medians["tree"],
        "shared_over_tree": medians["shared"] / medians["tree"],
        "largest_difference": worst,
        "gradient_difference": apart,
        **{f"{form}_seconds": value for form, value in medians.items()},
        **{f"{form}_passed_tokens": float(count) for form, count in passed.items()},
    }


def main() -> None:
    found = measure()
    print(f"{'':<8} {'seconds':>8} {'passed tokens':>14}")
    for form in FORMS:
        print(f"{form:<8} {found[f'{form}_seconds']:>8.3f} {found[f'{form}_passed_tokens']:>14,.0f}")
    print(f"whole over tree {found['short_rows_over_tree']:.1f}, shared over tree {found['shared_over_tree']:.1f}")


if __name__ == "__main__":
    main()
