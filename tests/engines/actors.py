"""Objects in processes of their own, which are asked for work as the ray engine asks its actors; without Ray."""

from __future__ import annotations

import multiprocessing
import traceback

import torch

from graftrl.engines.ray import trainer as trainers
from graftrl.engines.ray.trainer import Trainer
from graftrl.engines.ray.vllm_worker import TakesWeights

_SECONDS = 120
_context = multiprocessing.get_context("forkserver")  # imports once, then forks before any thread is there
_context.set_forkserver_preload(["actors", "transformers", "graftrl.policies.hf"])


class Actor:
    def __init__(self, cls, *args):
        self._pipe, other = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(other, cls, args), daemon=True)
        self._process.start()
        other.close()

    def ask(self, method, *args):
        self._pipe.send((method, args))
        return self

    def answer(self):
        assert self._pipe.poll(_SECONDS), "no answer"
        failed, value = self._pipe.recv()
        if failed:
            raise RuntimeError(value)
        return value

    def end(self):
        self._process.kill()
        self._process.join()


def answers(asked):
    return [actor.answer() for actor in list(asked)]


def _serve(pipe, cls, args):
    torch.set_num_threads(1)
    served = cls(*args)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, getattr(served, method)(*args)))
        except Exception:  # noqa: BLE001 - whatever it is, the test shall say it
            pipe.send((True, traceback.format_exc()))


class LocalTrainer(Trainer):
    """On this machine, without Ray to ask for its address."""

    def __init__(self, name, rank, size):
        super().__init__(name, rank, size, 1, float(_SECONDS))
        trainers._own_address = lambda: "127.0.0.1"

    def step(self, minibatches, recipe):
        """An update by the recipe's method; its objective cannot go through a pipe, as it can through Ray."""
        return self.update(minibatches, recipe.build_method().objective)

    def whole(self):
        """A copy: what a pipe carries is otherwise shared with this process, which may change it."""
        weights = self._policy.ranks.whole_weights(self._policy.loaded.causal_lm)
        return {name: value.numpy().copy() for name, value in weights.items()}


class Worker(TakesWeights):
    """What of vLLM's worker is used: a rank among its sampler's devices, and a reload from an iterator."""

    def __init__(self, rank=0):
        self.rank, self.device, self.got = rank, torch.device("cpu"), []

    def reload_weights(self, weights_iterator):
        self.got = [(name, value.float().numpy().copy(), str(value.dtype)) for name, value in weights_iterator]

    def weights(self):
        return self.got


def opened(recipe, name, ranks, checkpoint=None):
    """So many trainers of a recipe's model, joined."""
    started = [Actor(LocalTrainer, name, rank, ranks) for rank in range(ranks)]
    address = started[0].ask("listen").answer()
    answers(trainer.ask("open", address, recipe, checkpoint) for trainer in started)
    return started
