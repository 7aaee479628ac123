"""The co-training loop: one step is sample, grade, exchange, update, log, checkpoint. It knows rows, not methods."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftrl.config import Recipe
from graftrl.engines.base import Engine, Writing
from graftrl.engines.open import open_engine
from graftrl.errors import ConfigError, WorkerLost
from graftrl.evaluation.intervals import bootstrap_interval
from graftrl.exchange import all_fail_overlap
from graftrl.live.sides import Received
from graftrl.logs.rollouts import write_rollouts, write_transfers
from graftrl.methods import Method, StepContext
from graftrl.methods.base import FRESH_KINDS
from graftrl.methods.extensions import PreparesPrompts, PromptContext, SearchesWeights, UsesScorers
from graftrl.objective import Term
from graftrl.objective.importance import logprob_gap, truncated_importance_weights
from graftrl.rollout import Group, Prompt, Row, successes_by_model
from graftrl.seeds import derive_seed, generator
from graftrl.tasks import Task, VerificationPool, build_task, grade_groups
from graftrl.training.data import PromptStream, check_lengths, prompt_length, within_limit
from graftrl.training.history import History
from graftrl.training.live import LivePeers, live_metrics
from graftrl.training.peers import Remembered, StoredPeer, open_peers, peer_metrics, regrade
from graftrl.training.progress import Display
from graftrl.training.run_folder import RunFolder, TrainingState, disk_errors
from graftrl.training.search import move_weights, sample_members
from graftrl.training.survivors import Survivors
from graftrl.training.trackers import open_trackers

EXACT_NATS = 1e-4  # generation log-probabilities this close to a scoring pass serve as old_logprobs


@dataclass
class Prepared:
    """What a run needs before its first step; `prepare` checks all of it."""

    task: Task
    engine: Engine
    method: Method
    train: PromptStream
    validation: Sequence[Prompt]
    lengths: list[Callable[[Prompt], int]]
    steps: int
    notes: list[str]
    peers: list[StoredPeer] = field(default_factory=list)
    history: History = field(default_factory=lambda: History(None))
    live: LivePeers = field(default_factory=lambda: LivePeers({}, ()))


def prepare(recipe: Recipe, run: RunFolder | None = None, engine: Engine | None = None) -> Prepared:
    """Load data and models and check that they fit together. engine: with the recipe's models, where it is open.

    Raises ConfigError, DataError or ModelError.
    """
    task = build_task(recipe.task)
    engine = engine or open_engine(recipe, None if run is None else run.latest_checkpoint())
    limit = recipe.sampling.max_prompt_tokens
    lengths = [prompt_length(codec) for codec in engine.codecs.values()]
    train, notes = within_limit(task.train, lengths, limit, "training prompts")
    stream = PromptStream(train, recipe.training.prompts_per_step, recipe.seed)
    validation: Sequence[Prompt] = list(task.validation)[: recipe.evaluation.prompts]
    if validation:
        validation, more = within_limit(list(validation), lengths, limit, "validation prompts")
        notes += more
    steps = recipe.training.steps or (recipe.training.epochs or 0) * stream.batches_per_epoch
    peers = open_peers(recipe.peers, stream, steps, recipe.seed)
    method = recipe.build_method()
    if isinstance(method, UsesScorers):
        notes += method.check_scorers(engine.codecs, engine.scorers)
    notes = [*task.notes, *engine.notes, *notes, *(note for peer in peers for note in peer.notes)]
    live = LivePeers(recipe.peers, list(recipe.models), recipe.ray.address, run)
    return Prepared(task, engine, method, stream, validation, lengths, steps, notes, peers, History(run), live)


def train(run: RunFolder, recipe: Recipe, display: Display, *, bring_back: bool = False) -> TrainingState:
    """Train from the run folder's last whole checkpoint (or from the start) to the recipe's last step.

    Ctrl-C finishes the step under way, saves, and returns; a second one stops at once. Where the engine loses workers
    the run goes on from its last checkpoint with new ones, or without their model: see `Survivors`.

    Args:
        bring_back: train models again that an earlier part of the run lost.

    Raises:
        WorkerLost: workers were lost and no model can go on.
    """
    with run.locked(), disk_errors(run.root), ExitStack() as opened:
        _, state, notes = run.rewind()
        survivors = Survivors(run, recipe, state, bring_back=bring_back)
        prepared = prepare(survivors.recipe, run)
        opened.callback(prepared.engine.close)
        notes = notes if state.step else []
        while True:
            try:
                return _train(run, survivors, prepared, state, display, notes)
            except WorkerLost as error:
                _, state, _ = run.rewind()
                notes = survivors.recover(prepared.engine, state, error)
                prepared = prepare(survivors.recipe, run, prepared.engine)


def _train(
    run: RunFolder,
    survivors: Survivors,
    prepared: Prepared,
    state: TrainingState,
    display: Display,
    notes: Sequence[str],
) -> TrainingState:
    recipe = survivors.recipe

    def save(folder: Path) -> Writing | None:
        writing = prepared.engine.save(folder)
        survivors.carry(folder)
        return writing

    with ExitStack() as opened:
        opened.callback(run.settle, wait=False)  # a checkpoint that is written is kept, whatever ends the run
        opened.callback(prepared.live.close)
        prepared.live.begin(state.step)
        notes = [*notes, *survivors.notes]
        display.start(recipe, prepared.steps, state, [*prepared.notes, *notes])
        trackers = open_trackers(recipe, run)
        verification = recipe.verification
        with VerificationPool(verification.workers, verification.limit_s) as pool, interruptible() as interrupted:
            if state.step == 0 and prepared.validation and recipe.evaluation.before:
                display.evaluated(0, evaluate(recipe, prepared, run, pool, 0))
            stop = False
            while state.step < prepared.steps and not stop:
                metrics = train_step(recipe, prepared, run, pool, state)
                metrics["models"] |= {model: group_metrics([]) for model in survivors.lost}
                news = [f"step {state.step}: {event}" for event in prepared.engine.news()]
                metrics["notes"] = [*survivors.notes, *news, *metrics["notes"]]
                stop = interrupted()  # asked once a step: what stops the loop is what was saved
                due = state.step % recipe.checkpoint.every == 0 or state.step in (prepared.steps, state.best_step)
                if due or stop:
                    run.save_checkpoint(state, save, recipe.checkpoint.keep)
                run.append_metrics(metrics)
                run.settle(wait=False)
                run.upload()
                trackers.log(metrics)
                display.step(metrics)
        run.settle(wait=True)
        run.upload()
        trackers.close()
        display.finish(state, prepared.steps)
    return state


def train_step(
    recipe: Recipe, prepared: Prepared, run: RunFolder, pool: VerificationPool, state: TrainingState
) -> dict[str, Any]:
    """One step; advances `state` and returns its line of metrics."""
    engine, method = prepared.engine, prepared.method
    step, clock, sampled_before = state.step + 1, Clock(), state.sampled_tokens
    groups = collect_groups(recipe, prepared, pool, state, clock)

    for model, of_model in groups.items():
        rewards = [reward for group in of_model for reward in group.rewards.tolist()]
        state.mean_rewards.setdefault(model, []).append(float(np.mean(rewards)) if rewards else 0.0)

    def score(model: str, rows: Sequence[Row]) -> list[Any]:
        with clock("scoring"):
            return engine.score(model, rows)

    with clock("peers"):
        fingerprints = {model: codec.fingerprint for model, codec in engine.codecs.items()}
        live, published = prepared.live.meet(step, recipe.name, groups, fingerprints)

    context = StepContext(
        step=step,
        seed=derive_seed(recipe.seed, "exchange", step),
        group_size=recipe.training.group_size,
        max_response_tokens=recipe.sampling.max_response_tokens,
        codecs=engine.codecs,
        score=Remembered(score) if any(peer.scores for peer in prepared.peers) else score,
        mean_rewards=state.mean_rewards,
        receivers=tuple(groups),
        elsewhere=tuple(name for name, received in live.items() if not received.alone),
        stored={peer.name: peer.fingerprint for peer in prepared.peers}
        | {name: received.fingerprint for name, received in live.items()},
        history=prepared.history,
        memory=state.memory,
        scorers=engine.scorers,
    )
    from_peers, of_peers, notes = read_peers(prepared, groups, live, context, pool, state, clock)
    for name, received in live.items():
        of_peers[name] |= live_metrics(received, step, published[name])
    with clock("exchange"):
        everyone = {**groups, **from_peers}
        exchange = method.exchange(everyone, context)
        if exchange.rows.keys() - groups.keys():
            raise ConfigError(
                f"method {method.settings.name!r} made rows for {sorted(exchange.rows.keys() - groups.keys())}, which "
                "only give and are not trained; let it loop over context.receivers"
            )
    state.memory = exchange.memory
    rows, old_logprobs = settle_old_logprobs(
        engine, method, exchange.rows, state, clock, recipe.training.importance_cap
    )
    with clock("training"):
        minibatches = {
            model: [
                minibatch
                for epoch in range(recipe.training.epochs_per_batch)
                for minibatch in method.order(
                    of_model, recipe.training.minibatch_prompts, generator(recipe.seed, "order", step, model, epoch)
                )
            ]
            for model, of_model in rows.items()
        }
        gaps = engine.sync_gaps()  # of the weights that sampled this step
        updates = engine.update(minibatches, method.objective)
    with clock("logging"):
        write_rollouts(
            run.step_file("rollouts", step),
            run=recipe.name,
            step=step,
            groups=groups,
            sampling=recipe.sampling,
            fingerprints=fingerprints,
        )
        if exchange.transfers:
            write_transfers(run.step_file("exchange", step), step, exchange.transfers)
    state.step = step
    metrics: dict[str, Any] = {
        "step": step,
        "epoch": state.batches / prepared.train.batches_per_epoch,
        "models": {
            model: {
                **group_metrics(of_model),
                **updates[model].summary(),
                **old_logprobs[model],
                **({"sync_gap_mean": gaps[model].mean, "sync_gap_max": gaps[model].largest} if model in gaps else {}),
                "method": exchange.diagnostics.get(model, {}),
            }
            for model, of_model in groups.items()
        },
        "exchange": exchange.directions,
        "complementarity": all_fail_overlap(successes_by_model(everyone), receivers=list(groups)),
        "peers": of_peers,
        "notes": [*notes, *exchange.notes],
        "verification": dict(pool.outcomes),
    }
    evaluation = recipe.evaluation
    due = step == prepared.steps or (evaluation.every > 0 and step % evaluation.every == 0)
    if due and prepared.validation:
        with clock("evaluation"):
            metrics["evaluation"] = evaluate(recipe, prepared, run, pool, step)
        mean = float(np.mean([result["pass_at_1"] for result in metrics["evaluation"].values()]))
        if state.best_score is None or mean > state.best_score:
            state.best_step, state.best_score = step, mean
    phases = clock.seconds()
    step_s = clock.total()
    # Training time alone, so that runs with and without evaluation compare.
    state.wall_s += step_s - phases.get("evaluation", 0.0)
    state.trained_tokens += sum(updates[model].tokens.total() for model in groups)
    state.passed_tokens += sum(updates[model].passed_tokens for model in groups)
    metrics |= {
        "step_s": step_s,
        "phase_s": phases,
        "sampled_tokens_per_s": (state.sampled_tokens - sampled_before) / step_s,
        "wall_s": state.wall_s,
        "cost": {
            "sampled_tokens": state.sampled_tokens,
            "trained_tokens": state.trained_tokens,
            "passed_tokens": state.passed_tokens,
        },
    }
    state.metrics = metrics
    return metrics


def collect_groups(
    recipe: Recipe, prepared: Prepared, pool: VerificationPool, state: TrainingState, clock: Clock
) -> dict[str, list[Group]]:
    """Every model's groups for this step: the same prompts for all, unless the method refuses some (dynamic sampling).

    With a filter each model goes on with further batches until it has `prompts_per_step` groups or the rounds are
    spent; it then trains on what there is. A method that searches weights moves them here: its groups are its update.
    """
    engine, method, wanted = prepared.engine, prepared.method, recipe.training.prompts_per_step
    groups: dict[str, list[Group]] = {model: [] for model in recipe.models}
    for round_index in range(method.sampling_rounds):
        needy = [model for model, kept in groups.items() if len(kept) < wanted]
        if not needy:
            break
        prompts = prepared.train.batch(state.batches)
        check_lengths(prompts, prepared.lengths, recipe.sampling.max_prompt_tokens)
        state.batches += 1
        with clock("sampling"):
            seeds = {m: derive_seed(recipe.seed, "rollout", state.step + 1, round_index, m) for m in needy}
            asked = prompts_for(needy, prompts, recipe, prepared, state)
            if isinstance(method, SearchesWeights):
                sampled = sample_members(engine, method, asked, recipe.training.group_size, seeds)
            else:
                sampled = engine.sample(asked, recipe.training.group_size, seeds)
        everything = [group for of_model in sampled.values() for group in of_model]
        state.sampled_tokens += sum(len(response.token_ids) for group in everything for response in group.responses)
        with clock("grading"):
            grade_groups(prepared.task, everything, pool)
        if isinstance(method, SearchesWeights):
            with clock("training"):
                move_weights(engine, method, sampled, seeds)
        for model, fresh in sampled.items():
            kept = fresh if method.filter is None else [group for group in fresh if method.filter(group)]
            groups[model] = [*groups[model], *kept][:wanted]
    return groups


def prompts_for(
    models: Sequence[str], prompts: Sequence[Prompt], recipe: Recipe, prepared: Prepared, state: TrainingState
) -> dict[str, Sequence[Prompt]]:
    """What each model is asked: the batch's prompts, as the method prepares them if it does."""
    method = prepared.method
    if not isinstance(method, PreparesPrompts):
        return dict.fromkeys(models, prompts)
    codecs, limit = prepared.engine.codecs, recipe.sampling.max_prompt_tokens
    progress = state.step / prepared.steps
    return {
        model: method.prepare(model, prompts, PromptContext(progress, codecs[model], limit, state.memory))
        for model in models
    }


def read_peers(
    prepared: Prepared,
    groups: Mapping[str, Sequence[Group]],
    live: Mapping[str, Received],
    context: StepContext,
    pool: VerificationPool,
    state: TrainingState,
    clock: Clock,
) -> tuple[dict[str, list[Group]], dict[str, dict[str, Any]], list[str]]:
    """The stored and live peers' groups on the step's prompts, graded by the current verifier; their metrics; notes.

    A peer's mean reward of this step enters `state.mean_rewards` where it has answered any of the prompts.
    """
    from_peers: dict[str, list[Group]] = {}
    metrics: dict[str, dict[str, Any]] = {}
    notes = [note for received in live.values() for note in received.notes]
    prompts = len({group.prompt.id for of_model in groups.values() for group in of_model})
    for peer in prepared.peers:
        with clock("peers"):
            from_peers[peer.name] = peer.groups(groups, prepared.method, context)
    from_peers |= {name: received.groups for name, received in live.items()}
    for name, found in from_peers.items():
        with clock("grading"):
            contradicted = regrade(prepared.task, found, pool)
        metrics[name] = peer_metrics(found, prompts, contradicted)
        if found:
            state.mean_rewards.setdefault(name, []).append(metrics[name]["reward_mean"])
        if contradicted:
            notes.append(
                f"peer {name}: the verifier contradicts its recorded rewards, and the verifier's count; how many is in "
                f"metrics.jsonl (peers/{name}/contradicted)"
            )
    return from_peers, metrics, notes


def _check_rows(method: Method, rows: Sequence[Row], terms: Sequence[Term]) -> None:
    """What a method of the user's own can get wrong without anything failing later, or failing far from its cause."""
    known = {kind for term in terms for kind in term.kinds}
    for row in rows:
        if row.kind not in known:
            raise ConfigError(
                f"method {method.settings.name!r} made a row of kind {row.kind!r}, which no term of its objective "
                f"takes; there are terms for {', '.join(sorted(known))}"
            )
        if row.old_logprobs is None:
            raise ConfigError(
                f"method {method.settings.name!r} made a row of kind {row.kind!r} without old_logprobs; take them from "
                "context.score, or zeros where the token loss has no ratio"
            )


def settle_old_logprobs(
    engine: Engine,
    method: Method,
    rows: Mapping[str, list[Row]],
    state: TrainingState,
    clock: Clock,
    importance_cap: float | None = None,
) -> tuple[dict[str, list[Row]], dict[str, dict[str, Any]]]:
    """Give every own row exact `old_logprobs`; drop own rows whose log-probabilities are not finite.

    Generation log-probabilities serve where the first step finds them equal to a scoring pass within EXACT_NATS; else
    (bfloat16, another sampler) own rows that carry a gradient are scored again. Truncated importance sampling then
    weighs their tokens, if a cap is given.
    """
    settled: dict[str, list[Row]] = {}
    report: dict[str, dict[str, Any]] = {}
    terms = method.objective(0).terms
    for model, of_model in rows.items():
        _check_rows(method, of_model, terms)
        kept = [row for row in of_model if row.old_logprobs is None or np.isfinite(row.old_logprobs).all()]
        own = [row for row in kept if row.kind in FRESH_KINDS]
        gap = None
        if model not in state.exact_generation and own:
            with clock("scoring"):
                gap = engine.generation_gap(model, own[:64])
            state.exact_generation[model] = gap <= EXACT_NATS
        exact = state.exact_generation.get(model, True)
        sampler: dict[str, Any] = {}
        if not exact:
            training = [row for row in own if any(term.needs_pass(row) for term in terms)]
            with clock("scoring"):
                sampler = rescore(training, engine.score(model, training), importance_cap)
        settled[model] = kept
        report[model] = {
            "old_logprobs": "generation" if exact else "recomputed",
            "generation_gap": gap,
            **sampler,
            "rows_not_finite": len(of_model) - len(kept),
        }
    return settled, report


def rescore(rows: Sequence[Row], fresh: Sequence[NDArray[np.float32]], cap: float | None) -> dict[str, Any]:
    """Put the trainer's log-probabilities in the place of the sampler's; how far these were off, for the metrics.

    cap: of truncated importance sampling, whose weights are multiplied into the advantages.
    """
    known = [(row, row.old_logprobs, new) for row, new in zip(rows, fresh, strict=True) if row.old_logprobs is not None]
    gap = logprob_gap([old for _, old, _ in known], [new for _, _, new in known])
    found: dict[str, Any] = {"sampler_gap_mean": None, "sampler_gap_max": None}
    if np.isfinite(gap.mean):
        found = {"sampler_gap_mean": gap.mean, "sampler_gap_max": gap.largest}
    if cap is not None and known:
        weights = [truncated_importance_weights(new, old, cap) for _, old, new in known]
        for (row, _, _), of_row in zip(known, weights, strict=True):
            row.advantages = np.asarray(row.advantages, np.float32) * of_row
        every = np.concatenate(weights)
        found |= {"importance_weight_mean": float(every.mean()), "importance_capped": float((every >= cap).mean())}
    for row, new in zip(rows, fresh, strict=True):
        row.old_logprobs = new
    return found


def group_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """What a model's own rollouts say, before any exchange. Shares are of groups; lengths in the model's tokens."""
    responses = [response for group in groups for response in group.responses]
    if not responses:
        return {"groups": 0, "sampled_tokens": 0}
    tokens = np.array([len(response.token_ids) for response in responses])
    logprobs = np.concatenate([response.logprobs for response in responses])
    return {
        "groups": len(groups),
        "reward_mean": float(np.mean([response.reward for response in responses])),
        "all_fail": float(np.mean([group.all_fail for group in groups])),
        "all_success": float(np.mean([group.all_success for group in groups])),
        "mixed": float(np.mean([not group.all_fail and not group.all_success for group in groups])),
        "pass_at_n": float(np.mean([group.successes > 0 for group in groups])),
        "response_tokens_mean": float(tokens.mean()),
        "truncated": float(np.mean([response.finish_reason == "length" for response in responses])),
        "sampled_tokens": int(tokens.sum()),
        "entropy": float(-logprobs[np.isfinite(logprobs)].mean()),  # unbiased: own samples, in nats per token
    }


def evaluate(
    recipe: Recipe, prepared: Prepared, run: RunFolder, pool: VerificationPool, step: int
) -> dict[str, dict[str, Any]]:
    """pass@1 of every model on the validation prompts, with an interval over problems; kept per problem on disk."""
    prompts, samples = prepared.validation, recipe.evaluation.samples
    seeds = {model: derive_seed(recipe.seed, "evaluation", model) for model in recipe.models}
    groups = prepared.engine.sample(dict.fromkeys(recipe.models, prompts), samples, seeds, recipe.evaluation_sampling())
    grade_groups(prepared.task, [group for of_model in groups.values() for group in of_model], pool)
    results = {}
    for model, of_model in groups.items():
        mean, low, high = bootstrap_interval([group.successes / samples for group in of_model])
        responses = [response for group in of_model for response in group.responses]
        results[model] = {
            "pass_at_1": mean,
            "low": low,
            "high": high,
            "problems": len(of_model),
            "samples": samples,
            "response_tokens_mean": float(np.mean([len(response.token_ids) for response in responses])),
            "truncated": float(np.mean([response.finish_reason == "length" for response in responses])),
        }
    per_problem = {
        model: {group.prompt.id: group.successes for group in of_model} for model, of_model in groups.items()
    }
    run.write_json(run.step_file("evaluations", step), {"step": step, "results": results, "successes": per_problem})
    return results


class Clock:
    """Seconds spent in each phase of a step; a phase inside another counts only for the inner one."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._started = self._last = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._book()
        self._running.append(phase)
        try:
            yield
        finally:
            self._book()
            self._running.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._spent[self._running[-1]] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return dict(self._spent)

    def total(self) -> float:
        return time.perf_counter() - self._started


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) only sets a flag that the loop reads between steps; the second one interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = False

    def handler(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
