"""Run folders as tables: what the report, the quickstart and notebooks read.

Every table has the columns `method` (a label that tells the runs' methods apart) and `seed`. Large files (rollouts,
exchanges) are read lazily, only the columns that a table needs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml
from pydantic import ValidationError

from graftrl.chunks import EVALUATION
from graftrl.errors import ConfigError, DataError, RunError
from graftrl.evaluation.intervals import bootstrap_interval, paired_t_interval, t_interval
from graftrl.logs.config import PeerSettings, log_of_peer
from graftrl.logs.reader import RolloutLog, check_file, collect
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, TRANSFER_SCHEMA, read_steps, step_file_name
from graftrl.methods import PRESETS, build_method
from graftrl.rollout import Group
from graftrl.training.run_folder import RunFolder

_IGNORED = ("name", "seed", "threads", "trackers", "verification", "checkpoint")  # settings, in the labels of runs
BASELINE = "grpo"  # gains are against this method where it is among the runs


@dataclass(frozen=True)
class Run:
    """One run folder. `method` is its label among the runs read together; `config` is config.yaml as it stands."""

    folder: Path
    config: Mapping[str, Any]
    method: str

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def models(self) -> list[str]:
        return list(self.config["models"])

    @property
    def parts(self) -> tuple[Run, ...]:
        """The run folders it was read from."""
        return (self,)

    @property
    def threshold(self) -> float | None:
        """delta of the gate, for methods that have one."""
        value = self.config["method"].get("threshold")
        return None if value is None else float(value)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return RunFolder(self.folder).read_metrics()

    @property
    def rollouts(self) -> pl.LazyFrame | None:
        return _lazily(self.folder / "rollouts")

    @property
    def transfers(self) -> pl.LazyFrame | None:
        """None when no peer response was ever transferred."""
        return _lazily(self.folder / "exchange")

    @cached_property
    def evaluations(self) -> dict[int, dict[str, Any]]:
        """By step: the contents of evaluations/step-N.json."""
        found = {}
        for file in sorted((self.folder / "evaluations").glob("step-*.json")):
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
                found[int(content["step"])] = content
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise RunError(f"{file}: not the results of an evaluation ({error}); remove it") from error
        return found

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def planned_steps(self) -> int | None:
        """None where the recipe counts epochs."""
        steps: int | None = self.config.get("training", {}).get("steps")
        return steps

    @property
    def final_evaluation(self) -> dict[str, Any] | None:
        """None for a run that is not finished or was not evaluated at its end."""
        planned = self.planned_steps
        if self.last_step == 0 or (planned is not None and self.last_step < planned):
            return None
        return self.evaluations.get(self.last_step)

    @cached_property
    def best_step(self) -> int | None:
        """By the rule of docs/run-folder.md; None where nothing was validated after the start."""
        means = {step: mean for step, mean in sorted(self.validation.items()) if step > 0}
        return max(means, key=lambda step: means[step]) if means else None

    @cached_property
    def validation(self) -> dict[int, float]:
        """pass@1 by step, mean over models."""
        return {
            step: float(np.mean([result["pass_at_1"] for result in evaluation["results"].values()]))
            for step, evaluation in self.evaluations.items()
        }

    @property
    def selected(self) -> dict[str, int]:
        """Per model the best step of its run; empty where nothing was validated."""
        return {} if self.best_step is None else dict.fromkeys(self.models, self.best_step)


@dataclass(frozen=True)
class JoinedRun(Run):
    """Runs of one method and seed that trained different models, read as one run of all these models.

    Of each part its own models count. Costs, seconds and token counts are summed over the parts, step by step; the
    steps are those that all parts have.
    """

    joined: tuple[Run, ...] = ()

    @property
    def parts(self) -> tuple[Run, ...]:
        return self.joined

    @property
    def models(self) -> list[str]:
        return [model for part in self.parts for model in part.models]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return [
            {
                "step": lines[0]["step"],
                "models": {
                    model: line["models"][model]
                    for part, line in zip(self.parts, lines, strict=True)
                    for model in part.models
                },
                "exchange": {direction: counts for line in lines for direction, counts in line["exchange"].items()},
                "step_s": sum(line["step_s"] for line in lines),
                "wall_s": sum(line["wall_s"] for line in lines),
                "phase_s": _summed([line["phase_s"] for line in lines]),
                "cost": _summed([line["cost"] for line in lines]),
            }
            for lines in zip(*(part.metrics for part in self.parts), strict=False)
        ]

    @property
    def rollouts(self) -> pl.LazyFrame | None:
        frames = [
            part.rollouts.filter(pl.col("model").is_in(part.models)) for part in self.parts if part.rollouts is not None
        ]
        return pl.concat(frames) if frames else None

    @property
    def transfers(self) -> pl.LazyFrame | None:
        frames = [part.transfers for part in self.parts if part.transfers is not None]
        return pl.concat(frames) if frames else None

    @cached_property
    def evaluations(self) -> dict[int, dict[str, Any]]:
        steps = [step for step in self.parts[0].evaluations if all(step in part.evaluations for part in self.parts)]
        return {
            step: {
                "step": step,
                **{
                    kind: {model: part.evaluations[step][kind][model] for part in self.parts for model in part.models}
                    for kind in ("results", "successes")
                },
            }
            for step in steps
        }

    @property
    def selected(self) -> dict[str, int]:
        return {model: step for part in self.parts for model, step in part.selected.items() if model in part.models}


def join_runs(runs: Sequence[Run]) -> Run:
    """One run of all models that some runs of one method and seed trained; a single run is returned as it is."""
    if len(runs) == 1:
        return runs[0]
    first = runs[0]
    models = {model: settings for run in runs for model, settings in run.config["models"].items()}
    return JoinedRun(first.folder, {**first.config, "models": models}, first.method, tuple(runs))


def read_runs(folders: Sequence[Path], *, presets: bool = False) -> list[Run]:
    """The runs of some folders, labelled: `grpo`, or `graft (weighting=none)` where runs of one method differ.

    Args:
        presets: call a method by its preset's name where its options are those: `graft-no-gate`.

    Raises:
        RunError: a folder is no run folder, or its config.yaml cannot be read.
    """
    configs = {folder: _read_config(folder) for folder in folders}
    if not configs:
        raise RunError("no run folder was given")
    names = {f: str(config["method"]["name"]) for f, config in configs.items()}
    if presets:
        names = {folder: _preset(configs[folder]["method"]) or name for folder, name in names.items()}
    labels = _labels(configs, names)
    return [Run(folder, config, labels[folder]) for folder, config in configs.items()]


def join_seeds(runs: Sequence[Run]) -> list[Run]:
    """Runs of one method and seed that trained different models as one run of all of them; the others as they are."""
    groups: dict[tuple[str, int], list[list[Run]]] = {}
    for run in runs:
        parties = groups.setdefault((run.method, run.seed), [])
        free = next((party for party in parties if not set(models_of(party)) & set(run.models)), None)
        if free is None:
            parties.append([run])
        else:
            free.append(run)
    return [join_runs(party) for parties in groups.values() for party in parties]


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among some paths, and all that lie anywhere below the others; each once, in the order of names.

    Raises:
        RunError: a path does not exist, or there is no run in it.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise RunError(f"{path}: no such folder")
        below = [path] if is_run(path) else sorted(runs_below(path))
        if not below and (path / EVALUATION.file).is_file():
            raise RunError(
                f"{path}: an evaluation, no run; its tables are in results.md, and graftrl view shows its responses"
            )
        if not below:
            raise RunError(f"{path}: no run in it (no folder below it has a config.yaml)")
        found |= dict.fromkeys(below)
    return list(found)


def runs_below(path: Path) -> Iterator[Path]:
    """Run folders anywhere below a path, which is none."""
    for parent, folders, files in os.walk(path):
        if "config.yaml" in files:
            folders.clear()  # what lies inside a run is no run
            yield Path(parent)
        else:
            folders[:] = [name for name in folders if not name.startswith(".")]


def methods_of(runs: Sequence[Run]) -> list[str]:
    """Labels in order of first appearance, the baseline first."""
    labels = list(dict.fromkeys(run.method for run in runs))
    return sorted(labels, key=lambda label: label != BASELINE)


def models_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(model for run in runs for model in run.models))


# Scores ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """A method's final pass@1 on the validation prompts. half_width: of the 95 % t interval over seeds, None for one.

    gain, gain_half_width: over the baseline, paired by seed; None for the baseline or without it.
    """

    seeds: dict[int, float]
    mean: float
    half_width: float | None
    gain: float | None = None
    gain_half_width: float | None = None
    gains: dict[int, float] | None = None


@dataclass(frozen=True)
class ModelScores:
    """before: pass@1 before training with its 95 % bootstrap interval over problems, None if it was not measured."""

    before: tuple[float, float, float] | None
    methods: dict[str, Score]


def scores(runs: Sequence[Run]) -> dict[str, ModelScores]:
    """Per model. Only finished runs count: those with an evaluation after their last step."""
    final = {model: _final_scores(runs, model) for model in models_of(runs)}
    return {
        model: ModelScores(_before(runs, model), _with_gains(by_method))
        for model, by_method in final.items()
        if by_method
    }


def best_scores(runs: Sequence[Run]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Per model and method, of every run that was validated: the selected step and pass@1 there, in the order of
    seeds. They are the prompts that the step was selected on, so that this score flatters."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        for model, step in run.selected.items():
            if step in run.evaluations:  # of a joined run: at steps that all parts were validated at
                score = float(run.evaluations[step]["results"][model]["pass_at_1"])
                found.setdefault(model, {}).setdefault(run.method, []).append((step, score))
    return found


def _final_scores(runs: Sequence[Run], model: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {method: {} for method in methods_of(runs)}
    for run in runs:
        final = run.final_evaluation
        if final is not None and model in final["results"]:
            found[run.method][run.seed] = float(final["results"][model]["pass_at_1"])
    return {method: seeds for method, seeds in found.items() if seeds}


def _with_gains(by_method: Mapping[str, dict[int, float]]) -> dict[str, Score]:
    baseline = by_method.get(BASELINE, {})
    result = {}
    for method, seeds in by_method.items():
        mean, half = t_interval(list(seeds.values()))
        shared = [seed for seed in seeds if seed in baseline]
        if method == BASELINE or not shared:
            result[method] = Score(seeds, mean, half)
            continue
        gain, gain_half = paired_t_interval([seeds[s] for s in shared], [baseline[s] for s in shared])
        result[method] = Score(seeds, mean, half, gain, gain_half, {s: seeds[s] - baseline[s] for s in shared})
    return result


def _before(runs: Sequence[Run], model: str) -> tuple[float, float, float] | None:
    """Over problems: each problem's share of right samples in all seeds' evaluations at step 0.

    Runs of one seed evaluate the same models with the same draws, so each seed counts once.
    """
    right: dict[str, list[float]] = {}
    seen: set[int] = set()
    for run in runs:
        evaluation = run.evaluations.get(0)
        if evaluation is None or model not in evaluation["successes"] or run.seed in seen:
            continue
        seen.add(run.seed)
        samples = int(evaluation["results"][model]["samples"])
        for problem, successes in evaluation["successes"][model].items():
            right.setdefault(problem, []).append(successes / samples)
    return bootstrap_interval([float(np.mean(values)) for values in right.values()]) if right else None


# Tables from metrics.jsonl --------------------------------------------------------------------------------------------


def learning_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run, step and model: reward and group shares, clipped-token fractions by kind of row."""
    rows = [
        {
            "method": run.method,
            "seed": run.seed,
            "step": line["step"],
            "model": model,
            "reward_mean": values.get("reward_mean"),
            "pass_at_n": values.get("pass_at_n"),
            "all_fail": values.get("all_fail"),
            "response_tokens_mean": values.get("response_tokens_mean"),
            "entropy": values.get("entropy"),
            "grad_norm": values.get("grad_norm"),
        }
        for run in runs
        for line in run.metrics
        for model, values in line["models"].items()
    ]
    floats = ("reward_mean", "pass_at_n", "all_fail", "response_tokens_mean", "entropy", "grad_norm")
    return _frame(rows, ("step", "model"), floats)


def validation_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run, evaluated step and model: pass@1."""
    rows = [
        {"method": run.method, "seed": run.seed, "step": step, "model": model, "pass_at_1": result["pass_at_1"]}
        for run in runs
        for step, evaluation in run.evaluations.items()
        for model, result in evaluation["results"].items()
    ]
    return _frame(rows, ("step", "model"), ("pass_at_1",))


def clipping_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run, step, model and kind of row (own, grafted, ...): loss tokens and clipped ones."""
    rows = [
        {
            "method": run.method,
            "seed": run.seed,
            "step": line["step"],
            "model": model,
            "kind": kind,
            "tokens": tokens,
            "clipped": values["clipped_tokens"].get(kind, 0),
        }
        for run in runs
        for line in run.metrics
        for model, values in line["models"].items()
        for kind, tokens in values.get("trained_tokens", {}).items()
    ]
    return _frame(rows, ("step", "model", "kind"), ("tokens", "clipped"))


EXCHANGE_COUNTS = ("candidates", "selected", "responses", "admitted_successes", "admitted_failures", "gated")


def exchange_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run, step and direction ("source->receiver"): counts of prompts and responses."""
    rows = [
        {
            "method": run.method,
            "seed": run.seed,
            "step": line["step"],
            "direction": direction,
            **{name: counts.get(name, 0) for name in EXCHANGE_COUNTS},
            "rejected": sum(counts.get("rejected", {}).values()),
        }
        for run in runs
        for line in run.metrics
        for direction, counts in line["exchange"].items()
    ]
    return _frame(rows, ("step", "direction"), (*EXCHANGE_COUNTS, "rejected"))


def phase_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run and phase: seconds in all steps."""
    rows = []
    for run in runs:
        seconds: dict[str, float] = {}
        for line in run.metrics:
            for phase, spent in line["phase_s"].items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
            seconds["other"] = seconds.get("other", 0.0) + line["step_s"] - sum(line["phase_s"].values())
        rows += [
            {"method": run.method, "seed": run.seed, "phase": phase, "seconds": spent}
            for phase, spent in seconds.items()
        ]
    return _frame(rows, ("phase",), ("seconds",))


def cost_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run: steps, tokens of all models, seconds. trained_tokens enter the loss; passed_tokens went through
    a forward and backward pass, prompts included."""
    rows = []
    for run in runs:
        models = [values for line in run.metrics for values in line["models"].values()]
        rows.append(
            {
                "method": run.method,
                "seed": run.seed,
                "steps": float(run.last_step),
                "sampled_tokens": float(sum(values.get("sampled_tokens", 0) for values in models)),
                "trained_tokens": float(sum(sum(values.get("trained_tokens", {}).values()) for values in models)),
                "passed_tokens": float(sum(values.get("passed_tokens", 0) for values in models)),
                "wall_s": float(run.metrics[-1]["wall_s"]) if run.metrics else 0.0,
            }
        )
    return _frame(rows, (), ("steps", "sampled_tokens", "trained_tokens", "passed_tokens", "wall_s"))


def score_cost_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run and validated step: pass@1, mean over models; what training had cost all models by then; whether
    it is the best step (`best`)."""
    rows = []
    for run in runs:
        lines = {0: {}, **{line["step"]: line for line in run.metrics}}
        for step, score in sorted(run.validation.items()):
            if step not in lines:
                continue  # evaluated, but killed before the step's line was written
            cost = lines[step].get("cost", {})
            rows.append(
                {
                    "method": run.method,
                    "seed": run.seed,
                    "step": step,
                    "pass_at_1": score,
                    "training_s": lines[step].get("wall_s", 0.0),
                    "sampled_tokens": cost.get("sampled_tokens", 0),
                    "passed_tokens": cost.get("passed_tokens", 0),
                    "best": float(step == run.best_step),
                }
            )
    numbers = ("pass_at_1", "training_s", "sampled_tokens", "passed_tokens", "best")
    return _frame(rows, ("step",), numbers).with_columns(pl.col("best") == 1)


# Tables from Parquet files --------------------------------------------------------------------------------------------


def complementarity_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per run, step and model: prompts on which all its responses fail, and those of them that a peer solves.

    Counted from the rollouts, so it exists for methods without an exchange too. Stored peers' rollouts lie elsewhere:
    runs with such peers say in their metrics how many prompts the most helpful peer solves.
    """
    frames = []
    for run in runs:
        if any(part.config.get("peers") for part in run.parts):
            frames.append(_complementarity_in_metrics(run).lazy())
            continue
        rollouts = run.rollouts
        if rollouts is None or len(run.models) < 2:
            continue
        groups = rollouts.group_by("step", "model", "prompt_id").agg(k=(pl.col("reward") == 1.0).sum())
        by_prompt = groups.with_columns(
            best_peer=pl.max_horizontal(
                *[
                    pl.when(pl.col("model") != peer)
                    .then(pl.col("k").filter(pl.col("model") == peer).max().over("step", "prompt_id"))
                    .otherwise(None)
                    for peer in run.models
                ]
            )
        )
        frames.append(
            by_prompt.group_by("step", "model")
            .agg(
                prompts=pl.len().cast(pl.Float64),
                all_fail=(pl.col("k") == 0).sum().cast(pl.Float64),
                solved_by_peer=((pl.col("k") == 0) & (pl.col("best_peer") >= 1)).sum().cast(pl.Float64),
            )
            .select(
                pl.lit(run.method).alias("method"),
                pl.lit(run.seed).cast(pl.Int64).alias("seed"),
                pl.col("step").cast(pl.Int64),
                "model", "prompts", "all_fail", "solved_by_peer",
            )
        )  # fmt: skip
    if not frames:
        return _frame([], ("step", "model"), ("prompts", "all_fail", "solved_by_peer"))
    return _collect(pl.concat(frames).sort("method", "seed", "step", "model"), runs)


def _complementarity_in_metrics(run: Run) -> pl.DataFrame:
    rows = []
    for part in run.parts:
        for line in part.metrics:
            for model in part.models:
                peers = [of for pair, of in line["complementarity"].items() if pair.endswith(f"->{model}")]
                if not peers:
                    continue
                solved = [of["all_fail_prompts"] * (of["solved_by_peer"] or 0.0) for of in peers]
                rows.append(
                    {
                        "method": run.method,
                        "seed": run.seed,
                        "step": line["step"],
                        "model": model,
                        "prompts": line["models"][model]["groups"],
                        "all_fail": peers[0]["all_fail_prompts"],
                        "solved_by_peer": max(solved),
                    }
                )
    return _frame(rows, ("step", "model"), ("prompts", "all_fail", "solved_by_peer"))


def score_table(runs: Sequence[Run]) -> pl.DataFrame:
    """One row per transferred response that has a compatibility score: direction, s, reward, status."""
    frames = []
    for run in runs:
        transfers = run.transfers
        if transfers is not None:
            frames.append(
                transfers.filter(pl.col("score").is_not_null()).select(
                    pl.lit(run.method).alias("method"),
                    pl.lit(run.seed).cast(pl.Int64).alias("seed"),
                    pl.col("step").cast(pl.Int64),
                    pl.format("{}->{}", "source", "receiver").alias("direction"),
                    "score",
                    "reward",
                    "status",
                )
            )
    if not frames:
        empty = _frame([], ("step", "direction"), ("score", "reward"))
        return empty.with_columns(status=pl.lit("", pl.String))
    return _collect(pl.concat(frames), runs)


@dataclass(frozen=True)
class Graft:
    """One prompt whose group was replaced: what the receiver tried, and the peer's group as the receiver saw it.

    own: columns text, reward. peer: text, reward, score, weight, advantage, status, reason.
    """

    run: Run
    step: int
    receiver: str
    source: str
    prompt: str
    reference: str
    own: pl.DataFrame
    peer: pl.DataFrame


def example_grafts(runs: Sequence[Run], count: int = 3) -> list[Graft]:
    """Grafts that show the rule at work: some responses admitted, preferably some gated, from all directions and from
    the beginning to the end of the exchange. Fewer if there are not as many; the same ones for the same runs."""
    for run in runs:
        transfers = run.transfers
        if transfers is None or run.rollouts is None:
            continue
        grafts = (
            transfers.group_by("step", "receiver", "source", "prompt_id")
            .agg(
                source_step=pl.col("source_step").first(),
                telling=((pl.col("status") == "admitted") & (pl.col("reward") == 1.0)).any().cast(pl.Int32)
                + ((pl.col("status") == "admitted").any() & (pl.col("status") != "admitted").any()).cast(pl.Int32),
            )
            .sort("step", "receiver", "prompt_id")
            .pipe(_collect, [run])
        )
        if len(grafts):
            return [_read_graft(run, chosen) for chosen in _spread(grafts, count)]
    return []


def _spread(grafts: pl.DataFrame, count: int) -> list[dict[str, Any]]:
    """Directions in turn; within a direction the most telling ones, evenly over its steps."""
    by_direction = [
        of.filter(pl.col("telling") == pl.col("telling").max()).to_dicts()
        for of in grafts.partition_by("receiver", "source", maintain_order=True)
    ]
    pools = [pool for pool in by_direction if pool]
    chosen: list[dict[str, Any]] = []
    for i in range(count):
        pool = pools[i % len(pools)]
        position = round(i * (len(pool) - 1) / max(count - 1, 1))
        if pool[position] not in chosen:
            chosen.append(pool[position])
    rest = [graft for graft in grafts.to_dicts() if graft not in chosen]
    return sorted([*chosen, *rest[: count - len(chosen)]], key=lambda graft: graft["step"])


def _read_graft(whole: Run, chosen: Mapping[str, Any]) -> Graft:
    run = next(part for part in whole.parts if chosen["receiver"] in part.models)
    rollouts, transfers = run.rollouts, run.transfers
    if rollouts is None or transfers is None:
        raise DataError(f"{run.folder}: the rollout log went away while it was read")
    here = (pl.col("step") == chosen["step"]) & (pl.col("prompt_id") == chosen["prompt_id"])
    responses = (
        rollouts.filter(here)
        .select("model", "response_index", "messages", "reference", "text", "reward")
        .sort("response_index")
        .pipe(_collect, [run])
    )
    moved = (
        transfers.filter(here & (pl.col("receiver") == chosen["receiver"]) & (pl.col("source") == chosen["source"]))
        .select("response_index", "reward", "score", "weight", "advantage", "status", "reason")
        .pipe(_collect, [run])
    )
    stored = run.config.get("peers", {}).get(chosen["source"])
    if stored is None:
        written = responses.filter(pl.col("model") == chosen["source"]).select("response_index", "text", "reward")
        peer = written.join(moved.drop("reward"), on="response_index", how="left", maintain_order="left")
    else:  # the verifier's rewards, not those of the log
        received = run.folder / "received" / step_file_name(int(chosen["step"]))
        log = log_of_peer(stored, str(chosen["source"]), received)
        group = stored_group(log, int(chosen["source_step"]), chosen["prompt_id"])
        texts = [] if group is None else [response.text for response in group.responses]
        schema = {"response_index": pl.Int32, "text": pl.String}
        written = pl.DataFrame({"response_index": range(len(texts)), "text": texts}, schema=schema)
        peer = moved.sort("response_index").join(written, on="response_index", how="left", maintain_order="left")
        peer = peer.with_columns(pl.col("text").fill_null("(the peer's log is not there any more)"))
    first = responses.row(0, named=True)
    return Graft(
        run=whole,
        step=int(chosen["step"]),
        receiver=str(chosen["receiver"]),
        source=str(chosen["source"]),
        prompt="\n".join(message["content"] for message in first["messages"]),
        reference=str(first["reference"]),
        own=responses.filter(pl.col("model") == chosen["receiver"]).select("text", "reward"),
        peer=peer.select("text", "reward", "score", "weight", "advantage", "status", "reason"),
    )


def stored_group(peer: PeerSettings, step: int, prompt_id: str) -> Group | None:
    """What a stored peer wrote, from its log; None if the log went away."""
    found: Group | None = None
    for path in peer.log:
        with contextlib.suppress(DataError):  # this log lacks the group; another has it
            log = RolloutLog(path)
            found = log.groups(peer.model or log.models[0], [(step, prompt_id)])[step, prompt_id]
    return found


# Pieces ---------------------------------------------------------------------------------------------------------------


def _summed(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(each.get(key, 0) for each in counts) for key in dict.fromkeys(k for each in counts for k in each)}


def _collect(frame: pl.LazyFrame, runs: Sequence[Run]) -> pl.DataFrame:
    """The result of a query on runs' Parquet files. Raises DataError naming the file that cannot be read."""
    try:
        return frame.collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        for part in (part for run in runs for part in run.parts):
            for kind, schema in (("rollouts", ROLLOUT_SCHEMA), ("exchange", TRANSFER_SCHEMA)):
                for file in sorted((part.folder / kind).glob("step-*.parquet")):
                    check_file(file, schema)
                    collect(file, pl.scan_parquet(file))
        folders = ", ".join(str(run.folder) for run in runs)
        raise DataError(f"{folders}: the logs cannot be read: {str(error).strip().splitlines()[0]}") from error


def _lazily(folder: Path) -> pl.LazyFrame | None:
    return read_steps(folder) if next(folder.glob("step-*.parquet"), None) is not None else None


def _frame(rows: list[dict[str, Any]], keys: Sequence[str], numbers: Sequence[str]) -> pl.DataFrame:
    text = {"method", "model", "direction", "kind", "phase"}
    schema: dict[str, Any] = {
        **{key: pl.String if key in text else pl.Int64 for key in ("method", "seed", *keys)},
        **dict.fromkeys(numbers, pl.Float64),
    }
    return pl.DataFrame(rows, schema=schema, orient="row", strict=False)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{folder} is no run folder (it has no config.yaml)") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("method"), dict) or not config.get("models"):
        raise RunError(f"{path}: not the config of a run")
    return config


def _preset(settings: Mapping[str, Any]) -> str | None:
    """The name of the preset that has exactly these options; None for none, and for a method's own defaults."""
    name = str(settings["name"])
    presets = [preset for preset, given in PRESETS.items() if given["name"] == name]
    if not presets:  # nor is a class of the user's own imported
        return None
    try:
        options = build_method(settings).settings
    except (ConfigError, ValidationError):  # written by another version
        return None
    if options == build_method(name).settings:
        return None
    return next((preset for preset in presets if build_method(preset).settings == options), None)


def _labels(configs: Mapping[Path, Mapping[str, Any]], names: Mapping[Path, str]) -> dict[Path, str]:
    by_name: dict[str, list[Path]] = {}
    for folder, name in names.items():
        by_name.setdefault(name, []).append(folder)
    labels = {}
    for name, folders in by_name.items():
        differing = _differing([configs[folder] for folder in folders])
        for folder in folders:
            flat = dict(_settings(configs[folder]))
            given = [f"{key.removeprefix('method.')}={flat[key]}" for key in differing if key in flat]
            labels[folder] = f"{name} ({', '.join(given)})" if given else name
    return _told_apart(labels, configs)


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings whose values differ. Those of a model are compared between the runs that have it; which models there
    are counts only where a model was trained in different company."""
    flat = [dict(_settings(config)) for config in configs]
    keys = sorted({key for settings in flat for key in settings})
    company: dict[str, set[str]] = {}
    for config in configs:
        for model in config["models"]:
            company.setdefault(model, set()).add(_company(config))
    alone = all(len(groups) == 1 for groups in company.values())
    differing = []
    for key in keys:
        model = next((model for model in company if key.startswith(f"models.{model}.")), None)
        values = {
            repr(settings.get(key))
            for settings, config in zip(flat, configs, strict=True)
            if model is None or model in config["models"]
        }
        if len(values) > 1 and not (key == "models" and alone):
            differing.append(key)
    return differing


def _told_apart(labels: Mapping[Path, str], configs: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """A second run of the same settings and seed is a method of its own, so that it does not hide the first."""
    seen: set[tuple[str, int, str]] = set()
    found = {}
    for folder, label in labels.items():
        keys = {(label, int(configs[folder].get("seed", 0)), model) for model in configs[folder]["models"]}
        found[folder] = f"{label} [{folder}]" if keys & seen else label
        seen |= keys
    return found


def _company(config: Mapping[str, Any]) -> str:
    return "+".join(config["models"])


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flattened, without what may differ between seeds of one setting (the run's name, its seed, its models' paths) and
    what no number depends on. `models` alone says which models there are."""
    if not prefix:
        yield "models", _company(config)
    for key, value in config.items():
        name = prefix + str(key)
        if name in _IGNORED or (name.startswith("models.") and name.endswith(".path")):
            continue
        if isinstance(value, Mapping):
            yield from _settings(value, f"{name}.")
        else:
            yield name, value
