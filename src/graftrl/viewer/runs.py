"""The runs that a page shows, as plain values ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from graftrl.chunks import EVALUATION
from graftrl.errors import DataError, RunError
from graftrl.logs.config import log_of_peer
from graftrl.logs.rollouts import step_file_name
from graftrl.report.data import Run, find_runs, is_run, read_runs, runs_below, stored_group
from graftrl.viewer.evaluations import EvaluatedBenchmark, find_evaluations
from graftrl.viewer.index import PROMPT, LogIndex, Query, Snapshot
from graftrl.viewer.reasons import Rules, StepCounts
from graftrl.viewer.tokens import TokenTexts

TOKENS_SHOWN = 1500  # of a response, unless all are asked for
PAGE = 50  # prompts in a list


@dataclass
class ViewedRun:
    """A run folder; an evaluation on one benchmark, whose runs count as steps; or a rollout log alone (both are None):
    without a recipe nothing is known of its method."""

    name: str
    path: Path
    index: LogIndex
    run: Run | None = None
    rules: Rules | None = None
    evaluation: EvaluatedBenchmark | None = None
    _texts: dict[Path, TokenTexts] = field(default_factory=dict)

    # Lists -----------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Name, method, models and steps; of a run the best step, of an evaluation each model's pass@1."""
        log = self.index.current()
        rates = log.groups.group_by("model").agg((pl.col("k") / pl.col("n")).mean().alias("rate")).sort("model")
        now = None if self.run is None else replace(self.run)  # a run keeps what it has read
        best = None if now is None else now.best_step
        return {
            "kind": "evaluation" if self.evaluation is not None else "log" if self.run is None else "run",
            "name": self.name,
            "path": str(self.path),
            "method": "" if self.run is None else self.run.method,
            "seed": None if self.run is None else self.run.seed,
            "models": log.models,
            "steps": log.steps,
            "prompts": log.groups.select(PROMPT).n_unique(),
            "exchanges": bool(log.moved.height),
            "pass_at_1": dict(rates.iter_rows()) if self.evaluation is not None else {},
            "best": None if now is None or best is None else {"step": best, "score": now.validation[best]},
        }

    def find(self, query: Query, page: int = 0, size: int = PAGE) -> dict[str, Any]:
        """One page of the prompts that fit, each with every model's group and what was transferred."""
        log = self.index.current()
        found = log.find(query, None if self.rules is None else self.rules.usable)
        shown = found.slice(page * size, size)
        groups = log.groups.join(shown, on=PROMPT, how="semi").partition_by(PROMPT, as_dict=True)
        moved = log.moved.join(shown, on=PROMPT, how="semi").partition_by(PROMPT, as_dict=True)
        none = log.moved.clear()
        items = [
            {
                "step": step,
                "prompt": prompt_id,
                "groups": groups[step, prompt_id].select("model", "k", "n", "reward").to_dicts(),
                "moved": moved.get((step, prompt_id), none)
                .select("source", pl.col("model").alias("receiver"), "responses", "admitted", "score")
                .to_dicts(),
            }
            for step, prompt_id in shown.iter_rows()
        ]
        return {"total": found.height, "page": page, "size": size, "items": _plain(items)}

    def neighbours(self, query: Query, step: int, prompt_id: str) -> dict[str, Any]:
        """The prompts before and after one in the list of those that fit; None at its ends."""
        log = self.index.current()
        found = log.find(query, None if self.rules is None else self.rules.usable).with_row_index("at")
        here = found.filter(step=step, prompt_id=prompt_id)["at"]
        if not len(here):
            return {"before": None, "after": None, "position": None, "total": found.height}
        at = int(here[0])

        def name(position: int) -> dict[str, Any] | None:
            if not 0 <= position < found.height:
                return None
            row = found.row(position, named=True)
            return {"step": row["step"], "prompt": row["prompt_id"]}

        return {"before": name(at - 1), "after": name(at + 1), "position": at, "total": found.height}

    # One prompt ------------------------------------------------------------------------------------------------------

    def prompt(self, step: int, prompt_id: str) -> dict[str, Any]:
        """Everything about a prompt in a step: messages, and every model's group with its tokens and its fate.

        Raises:
            DataError: it is not in the log, or its file cannot be read.
        """
        log = self.index.current()
        rows = log.responses(step, prompt_id)
        moved = log.transfers(step, prompt_id).to_dicts()
        first = rows.row(0, named=True)
        by_model = {model: of for (model,), of in rows.partition_by("model", as_dict=True, maintain_order=True).items()}
        columns = [
            self._column(model, of_model.to_dicts(), moved, self._own_texts(model))
            for model, of_model in by_model.items()
        ]
        columns += self._stored_columns(moved, set(by_model))
        counts = {model: (int((of["reward"] == 1.0).sum()), of.height) for model, of in by_model.items()}
        reasons = []
        if self.rules is not None:
            of_step = _step_counts(log, step)
            for receiver in by_model:
                of_receiver = [row for row in moved if row["receiver"] == receiver]
                reason = self.rules.explain(receiver, prompt_id, step, counts, of_receiver, of_step)
                reasons.append({"receiver": receiver, "outcome": reason.outcome, "text": reason.text})
        return {
            "step": step,
            "prompt": prompt_id,
            "task": first["task"],
            "reference": first["reference"],
            "messages": first["messages"],
            "reasons": reasons,
            "columns": _plain(columns),
        }

    def tokens(self, step: int, prompt_id: str, model: str, response_index: int) -> dict[str, Any]:
        """All tokens of one response.

        Raises:
            DataError: it is not in the log.
        """
        rows = self.index.current().responses(step, prompt_id)
        here = rows.filter(model=model, response_index=response_index)
        if not here.height:
            raise DataError(f"{self.path}: no response {response_index} of {model!r} to {prompt_id!r} in step {step}")
        return _plain(self._tokens(here.row(0, named=True), self._own_texts(model), limit=None))

    def _column(
        self, model: str, rows: Sequence[Mapping[str, Any]], moved: Sequence[Mapping[str, Any]], texts: TokenTexts
    ) -> dict[str, Any]:
        """A model's group."""
        return {
            "model": model,
            "k": sum(row["reward"] == 1.0 for row in rows),
            "n": len(rows),
            "version": rows[0]["policy_version"],
            "trained": self.evaluation is None,
            "sampling": {name: rows[0][name] for name in ("temperature", "top_p", "top_k")},
            "stored": False,
            "responses": [
                {
                    "index": row["response_index"],
                    "text": row["text"],
                    "reward": row["reward"],
                    "grade": row["grade_reason"],
                    "advantage": row["advantage"],
                    "finish": row["finish_reason"],
                    **self._tokens(row, texts, TOKENS_SHOWN),
                    "moved": _fates(moved, model, row["response_index"]),
                }
                for row in rows
            ],
        }

    @staticmethod
    def _tokens(row: Mapping[str, Any], texts: TokenTexts, limit: int | None) -> dict[str, Any]:
        """ids, logprobs, pieces (None: not cut, `uncut` says why), length (how many there are); at most `limit`."""
        ids, logprobs = row["token_ids"] or [], row["logprobs"] or []
        stopped = row["finish_reason"] == "stop"
        pieces = texts.cut(row["model"], ids, row["text"], ends_with_eos=stopped)
        contents = [p for p in (logprobs[:-1] if stopped else logprobs) if p is not None and math.isfinite(p)]
        return {
            "length": len(ids),
            "ids": ids[:limit],
            "logprobs": [None if p is None else round(p, 4) for p in logprobs[:limit]],
            "pieces": None if pieces is None else pieces[:limit],
            "uncut": texts.notes.get(row["model"], "") if pieces is None and ids else "",
            "eos": stopped,
            "mean": sum(contents) / len(contents) if contents else None,
        }

    def _stored_columns(self, moved: Sequence[Mapping[str, Any]], live: set[str]) -> list[dict[str, Any]]:
        """The groups of stored peers, from their logs, as far as they are still there."""
        columns = []
        stored = {} if self.rules is None else self.rules.stored
        for source in dict.fromkeys(row["source"] for row in moved if row["source"] not in live):
            of_source = [row for row in moved if row["source"] == source]
            received = self.path / "received" / step_file_name(int(of_source[0]["step"]))
            settings = None if source not in stored else log_of_peer(stored[source], str(source), received)
            group = None
            if settings is not None:
                group = stored_group(settings, int(of_source[0]["source_step"]), str(of_source[0]["prompt_id"]))
            rows = []
            for index in sorted({row["response_index"] for row in of_source}):
                response = None if group is None or index >= group.size else group.responses[index]
                first = next(row for row in of_source if row["response_index"] == index)
                rows.append(
                    {
                        "model": source,
                        "response_index": index,
                        "text": "(the peer's log is not there any more)" if response is None else response.text,
                        "token_ids": None if response is None else response.token_ids.tolist(),
                        "logprobs": None if response is None else response.logprobs.tolist(),
                        "finish_reason": None if response is None else response.finish_reason,
                        "reward": first["reward"],  # of this run's verifier
                        "grade_reason": "",
                        "advantage": None,
                        "policy_version": None,
                        **dict.fromkeys(("temperature", "top_p", "top_k")),
                    }
                )
            texts = TokenTexts(self.path, {}) if settings is None else self._texts_of(settings.log[0])
            columns.append({**self._column(source, rows, moved, texts), "stored": True})
        return columns

    def _own_texts(self, model: str) -> TokenTexts:
        return self._texts_of(self.path)

    def _texts_of(self, path: Path) -> TokenTexts:
        if path not in self._texts:
            if self.evaluation is not None:
                models = self.evaluation.models
            else:
                models = read_runs([path])[0].config["models"] if is_run(path) else {}
            self._texts[path] = TokenTexts(path, models)
        return self._texts[path]


def open_runs(paths: Sequence[Path]) -> list[ViewedRun]:
    """Run folders, evaluations, folders of both, and rollout logs (folders of Parquet files, or one file).

    Runs that have not finished a step, and evaluations without a response, are left out, unless there is nothing else.

    Raises:
        RunError: nothing there, or nothing to look at. DataError: a torn file; it is named.
    """
    evaluated = list(dict.fromkeys(each for path in paths for each in find_evaluations(path)))
    held = {each.folder for each in evaluated}
    empty = next((path for path in paths if (path / EVALUATION.file).is_file() and path not in held), None)
    if empty is not None:
        raise RunError(f"{empty}: no response has been sampled yet; nothing to look at")
    logs = [path for path in paths if path not in held and not is_run(path) and _is_log(path)]
    searched = [path for path in paths if path not in logs and not _only_evaluations(path, held)]
    runs = read_runs(find_runs(searched), presets=True) if searched else []
    started = [run for run in runs if run.rollouts is not None]
    if not started and not logs and not evaluated:
        raise RunError(
            f"{', '.join(str(run.folder) for run in runs)}: no step has been finished yet; nothing to look at"
        )
    viewed = [
        ViewedRun("", run.folder, LogIndex(run.folder, run.folder / "exchange"), run, Rules(run.config))
        for run in started
    ]
    viewed += [ViewedRun("", path, LogIndex(path)) for path in logs]
    viewed += [
        ViewedRun("", each.folder, LogIndex(each.folder, pattern=each.pattern), evaluation=each) for each in evaluated
    ]
    names = _short_names(dict.fromkeys(each.path for each in viewed))
    for each in viewed:
        each.name = names[each.path] + ("" if each.evaluation is None else f": {each.evaluation.benchmark}")
        each.index.current()  # a torn file is found here, before anything is served
    return viewed


def _only_evaluations(path: Path, held: Collection[Path]) -> bool:
    below = any(folder.is_relative_to(path) for folder in held)
    return below and not is_run(path) and next(runs_below(path), None) is None


def _is_log(path: Path) -> bool:
    """Whether a folder or file can be read as a rollout log without a recipe."""
    if path.is_file():
        return True
    return (path / "rollouts").is_dir() or next(path.glob("*.parquet"), None) is not None


def _short_names(paths: Iterable[Path]) -> dict[Path, str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    parts = {path: path.resolve().parts for path in paths}
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {path: "/".join(of[-length:]) for path, of in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {path: str(path) for path in parts}


def _step_counts(log: Snapshot, step: int) -> StepCounts:
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for model, prompt_id, k, n in log.groups.filter(step=step).select("model", "prompt_id", "k", "n").iter_rows():
        counts.setdefault(model, {})[prompt_id] = (k, n)
    return counts


def _fates(moved: Sequence[Mapping[str, Any]], source: str, index: int) -> list[dict[str, Any]]:
    """What became of a response, per receiver."""
    names = ("receiver", "status", "reason", "score", "weight", "advantage", "receiver_tokens")
    return [
        {name: row[name] for name in names}
        for row in moved
        if row["source"] == source and row["response_index"] == index
    ]


def _plain(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_plain(of) for of in value]
    return value
