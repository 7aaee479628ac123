"""The finished steps of a run, read back from its own rollout files."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from graftrl.logs.reader import RolloutLog
from graftrl.rollout import Group
from graftrl.training.run_folder import RunFolder


class History:
    """What a method may look back at. It comes from the files whether the run was interrupted or not, so that a resumed
    run sees the same; each file is read once, and kept as long as later calls ask for its step."""

    def __init__(self, run: RunFolder | None) -> None:
        self._run = run
        self._kept: dict[tuple[str, int], list[Group]] = {}

    def __call__(self, model: str, steps: range) -> list[Group]:
        """The model's groups of these finished steps, by step and then prompt id, each with its `log_step`.
        Prompts have no metadata.

        Raises:
            DataError: a rollout file that is missing, torn or not usable.
        """
        asked = {step: self._kept.get((model, step)) for step in steps}
        self._kept = {key: groups for key, groups in self._kept.items() if key[0] != model}
        for step in steps:
            found = asked[step]
            self._kept[model, step] = self._read(model, step) if found is None else found
        return [group for step in steps for group in self._kept[model, step]]

    def _read(self, model: str, step: int) -> list[Group]:
        if self._run is None:
            return []
        file = self._run.fetch(self._run.step_file("rollouts", step))
        if file.exists() and not pl.scan_parquet(file).select(pl.len()).collect().item():
            return []  # dynamic sampling kept no group of any model
        log = RolloutLog(file)
        if model not in log.models:
            return []
        keys = [(step, prompt_id) for prompt_id in log.group_index(model)["prompt_id"]]
        return [replace(group, log_step=step) for group in log.groups(model, keys).values()]
