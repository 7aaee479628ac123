"""Runs on Ray: what tests of several files do with them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file

from graftrl.config import parse_recipe
from graftrl.engines.local import LocalEngine
from graftrl.logs.reader import RolloutLog
from graftrl.training import loop
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


def recipe_of(models, *, steps, method="graft-no-floor", trainers=2, samplers=1, **sections):
    """A recipe on Ray as a mapping, without vLLM. models: name -> folder."""
    # eps above float32's error in a gradient: Adam's first step is otherwise the sign of rounding noise
    optimizer = {"lr": 0.01, "eps": 1e-5}
    ray = {
        "sampler": "transformers",
        "resources": {name: {"trainers": trainers, "samplers": samplers} for name in models},
        "timeout_s": 240,
        "restart_s": 240,
        **sections.pop("ray", {}),
    }
    return {
        "name": "toy", "seed": 5, "threads": 1, "engine": "ray", "method": method,
        "models": {
            name: {"path": path, "device": "cpu", "optimizer": optimizer, "microbatch_tokens": 200}
            for name, path in models.items()
        },
        "ray": ray,
        "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"},
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
        "training": {"steps": steps, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
        "verification": {"workers": 1},
        "checkpoint": {"keep": 10},
        **sections,
    }  # fmt: skip


def run_of(content, root, display=None):
    run = RunFolder.create(root, parse_recipe(content, "test"))
    train(run, run.recipe(), display or Silent())
    return run


class Remembering(Silent):
    """Keeps all notes."""

    def __init__(self):
        self.notes = []

    def start(self, recipe, steps, state, notes):
        self.notes += notes


class Replaying(LocalEngine):
    """The local engine, with the responses that another run drew."""

    log: RolloutLog
    step = 0

    def sample(self, prompts, n, seeds, sampling=None):
        self.step += 1
        return {
            model: [
                replace(self.log.groups(model, [(self.step, p.id)])[self.step, p.id], prompt=p, log_step=None)
                for p in given
            ]
            for model, given in prompts.items()
        }


def replay(content, run, root):
    """The run on the local engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replaying, "log", RolloutLog(run.root), raising=False)
        patch.setattr(loop, "open_engine", Replaying)
        return run_of({**content, "engine": "local"}, root)


def weights(run, step, name):
    return load_file(run.checkpoint(step) / name / "model.safetensors")


def assert_close(ours, theirs):
    """The same structure, numbers to float tolerance."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key])
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    else:
        assert ours == theirs


def assert_same_numbers(ours, theirs, names="AB"):
    """Of two lines of metrics."""
    assert_close(ours["exchange"], theirs["exchange"])
    for name in names:
        a, b = ours["models"][name], theirs["models"][name]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        for key in ("reward_mean", "optimizer_steps", "trained_tokens", "clipped_tokens", "old_logprobs"):
            assert a[key] == b[key], key


def assert_same_weights(ours, theirs, step, names="AB"):
    for name in names:
        a, b = weights(ours, step, name), weights(theirs, step, name)
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_allclose(a[key].numpy(), b[key].numpy(), rtol=1e-3, atol=2e-5)


# Faults ---------------------------------------------------------------------------------------------------------------


def assert_whole(run, steps):
    """Metrics, rollouts and exchange tell of the same steps, each once, and nothing half-written lies beside them."""
    assert [line["step"] for line in run.read_metrics()] == list(range(1, steps + 1))
    for kind in ("rollouts", "exchange"):
        files = sorted(file.name for file in (run.root / kind).iterdir())
        assert {int(name[5:11]) for name in files} <= set(range(1, steps + 1)), files
        assert kind == "exchange" or len(files) == steps
    assert not list(run.checkpoints.glob(".*"))
    assert max(run.checkpoint_steps()) == steps


def signal_worker(actor, number=signal.SIGKILL):
    import ray

    os.kill(pid := ray.get(actor.pid.remote()), number)
    return pid


def during(seconds, work):
    """Do work in this many seconds from now, beside what runs."""
    thread = threading.Thread(target=lambda: (time.sleep(seconds), work()), daemon=True)
    thread.start()
    return thread


@contextmanager
def time_limit(seconds):
    """Nothing that waits for a lost process waits for ever."""

    def stop(signum, frame):
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
