"""The rollout log of any GRPOTrainer, so that a run of today can be a peer tomorrow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from accelerate.utils import gather_object
from numpy.typing import NDArray
from transformers import TrainerCallback

from graftrl.errors import ConfigError, DataError, RunError
from graftrl.integrations.trl.batch import Fields, Graded, ScriptCodec, add_logprobs, read_groups
from graftrl.integrations.trl.support import refuse_unrecordable
from graftrl.logs.folders import writing
from graftrl.logs.rollouts import step_file_name, write_rollouts
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group


def generation_number(trainer: Any) -> int:
    """Which generation batch of the run this is, from 1: the step of its log. A resumed run goes on counting."""
    args = trainer.args
    accumulation = args.gradient_accumulation_steps
    microbatches = trainer.state.global_step * accumulation + trainer._step % accumulation
    return int(microbatches // (args.steps_per_generation * trainer.num_iterations)) + 1


class RolloutWriter:
    """One model's log in a folder: rollouts/step-000001.parquet, one file for each generation batch."""

    def __init__(self, folder: Path | str, model: str, trainer: Any) -> None:
        self.folder, self.model = Path(folder), model
        self.sampling = SamplingSettings(
            max_response_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k or 0,
        )

    def begin(self, finished_steps: int) -> None:
        """Raises RunError where a run that starts anew would write over a log."""
        held = next((self.folder / "rollouts").glob("step-*.parquet"), None)
        if held is not None and not finished_steps:
            raise RunError(f"{self.folder}: holds a rollout log already; choose another folder or remove it")

    def write(self, step: int, groups: Sequence[Group], fingerprint: str, policy_version: int) -> None:
        """Raises RunError where the folder cannot be written."""
        path = self.folder / "rollouts" / step_file_name(step)
        with writing(path):
            write_rollouts(
                path,
                run=self.folder.name,
                step=step,
                groups={self.model: groups},
                sampling=self.sampling,
                fingerprints={self.model: fingerprint},
                policy_version=policy_version,
            )


class RolloutLogCallback(TrainerCallback):  # type: ignore[misc]
    """Writes what a GRPOTrainer samples for training as a rollout log.

        trainer.add_callback(RolloutLogCallback(trainer, "runs/trl-B", model="B"))

    With several processes the first one writes what all sampled. Responses without a reward are left out.

    Args:
        trainer: the GRPOTrainer, or a subclass.
        folder: gets rollouts/step-000001.parquet, one file for each generation batch.
        model: the model's name in the log.
        logprobs: "given" records log-probabilities where TRL computes them (a sampler's, or those of a forward pass
            when samples are used for several optimizer steps). "compute" runs a forward pass where it does not: about
            a third of an update's time. Without log-probabilities a log cannot be a peer; `graftrl logs score` adds
            them only with the weights of that step.
        id_field: column of the data set with the prompts' ids; without it an id is a hash of the prompt's text.
        reference_field: column with reference answers, to be kept in the log.
        reward: which reward function's value counts; needed where there are several.
        success_above: rewards above it become 1, others 0. Without it they must lie in [0, 1].

    Raises:
        ConfigError: sampling settings that a log cannot record; tools; several reward functions and no word which.
    """

    def __init__(
        self,
        trainer: Any,
        folder: Path | str,
        *,
        model: str,
        logprobs: Literal["given", "compute"] = "given",
        id_field: str = "id",
        reference_field: str | None = None,
        reward: str | None = None,
        success_above: float | None = None,
    ) -> None:
        refuse_unrecordable(trainer.args)
        if trainer.tools or trainer.rollout_func is not None:
            raise ConfigError("a rollout log holds plain responses; tools, environments and rollout_func write others")
        names = list(trainer.reward_func_names)
        if reward is not None and reward not in names:
            raise ConfigError(f"reward={reward!r} is none of the trainer's reward functions: {', '.join(names)}")
        if reward is None and len(names) > 1:
            raise ConfigError(f"say which reward counts as success, such as reward={names[0]!r}: {', '.join(names)}")
        self._trainer, self._logprobs, self._success_above = trainer, logprobs, success_above
        self._reward = names.index(reward) if reward is not None else 0
        self._fields = Fields(id_field, reference_field)
        self._codec = ScriptCodec(trainer, model)
        self._writer = RolloutWriter(folder, model, trainer)
        self._graded: Graded | None = None
        self._listen()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._writer.begin(state.global_step)

    def _listen(self) -> None:
        """TRL tells callbacks nothing of what it samples, so its methods are wrapped on this one trainer."""
        trainer = self._trainer
        grade, generate = trainer._calculate_rewards, trainer._generate_and_score_completions

        def calculate_rewards(inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
            rewards = grade(inputs, prompts, completions, completion_ids)
            first = trainer.accelerator.process_index * len(prompts)
            self._graded = Graded(completion_ids, rewards[first : first + len(prompts)])
            return rewards

        def generate_and_score(inputs: Any) -> Any:
            output = generate(inputs)
            if trainer.model.training:
                self._record(inputs, output)
            return output

        trainer._calculate_rewards = calculate_rewards
        trainer._generate_and_score_completions = generate_and_score

    def _record(self, inputs: Sequence[Any], output: dict[str, Any]) -> None:
        assert self._graded is not None
        trainer, model = self._trainer, self._writer.model
        prompts = [self._fields.prompt(example) for example in inputs]
        groups = read_groups(model, prompts, output, self._graded.completion_ids, self._rewards(), self._codec)
        if self._logprobs == "compute":
            with _evaluating(trainer.model):
                add_logprobs(trainer, groups, self._codec)
        graded = [(group.prompt, r) for group in groups for r in group.responses if r.reward is not None]
        gathered = gather_object(graded)
        if not trainer.accelerator.is_main_process:
            return
        by_prompt: dict[str, Group] = {}
        for prompt, response in gathered:
            by_prompt.setdefault(prompt.id, Group(model, prompt, [])).responses.append(response)
        self._writer.write(
            generation_number(trainer), list(by_prompt.values()), self._codec.fingerprint, trainer.state.global_step
        )

    def _rewards(self) -> NDArray[np.float64]:
        assert self._graded is not None
        rewards: NDArray[np.float64] = self._graded.rewards_per_function[:, self._reward].double().cpu().numpy()
        if self._success_above is not None:
            return np.where(np.isnan(rewards), np.nan, rewards > self._success_above)
        odd = rewards[(rewards < 0) | (rewards > 1)]
        if len(odd):
            raise DataError(
                f"reward {odd[0]:g} of {self._trainer.reward_func_names[self._reward]!r} is not in [0, 1]; a rollout "
                "log needs success_above=X, which makes rewards above X 1 and others 0"
            )
        return rewards


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout is off, as it was while sampling."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
