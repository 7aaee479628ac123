"""Procedural problems of reasoning-gym: eager prompts, disjoint splits, and full-score-only verification."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from graftrl.errors import ConfigError, DataError
from graftrl.rollout import FinishReason, Prompt
from graftrl.tasks.base import Grade, Task
from graftrl.tasks.boxes import BoxError, last_box
from graftrl.tasks.config import GymDataset, ReasoningGymConfig

TASK_NAME = "reasoning_gym"
_INSTRUCTIONS = {
    "boxed": r"Give the final answer within \boxed{}.",
    "tag": "Give the final answer between <answer> and </answer>.",
}
_SHOT_ANSWERS = {"boxed": r"\boxed{%s}", "tag": "<answer>%s</answer>"}
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INTEGER = re.compile(r"(?<![\d.])-?\d+")
_WHOLE_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")


def extract_answer(pattern: str, response: str) -> str | None:
    """The answer in a response, or None; `pattern` as in `ReasoningGymConfig.answer_pattern`."""
    if pattern == "boxed":
        try:
            content = last_box(response)
        except BoxError:
            return None
        wrapped = _WHOLE_TEXT_COMMAND.fullmatch(content)
        return wrapped[1].strip() if wrapped else content
    if pattern == "first_line":
        return next((line.strip() for line in response.splitlines() if line.strip()), None)
    if pattern in ("first_integer", "last_integer"):
        integers = _INTEGER.findall(response)
        return (integers[0] if pattern == "first_integer" else integers[-1]) if integers else None
    matches: list[str] = (_TAG if pattern == "tag" else re.compile(pattern)).findall(response)
    return matches[-1].strip() if matches else None


@dataclass(frozen=True)
class GymVerifier:
    """Reward 1 iff the data set's scorer gives the extracted answer its full score; partial credit is 0."""

    answer_pattern: str

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
        answer = extract_answer(self.answer_pattern, response)
        if answer is None:
            return Grade(0.0, "no answer in the expected format")
        scorer = _create(prompt.metadata["dataset"], prompt.metadata["config"], seed=0, size=1)
        score = float(scorer.score_answer(answer=answer, entry=prompt.metadata["entry"]))
        return Grade(1.0, "correct") if score >= 1.0 else Grade(0.0, f"wrong answer (score {score:g})")


def build_reasoning_gym(config: ReasoningGymConfig) -> Task:
    """Raises ConfigError for an unknown data set or setting, DataError when a split is left without prompts."""
    shots = _draw(config, "shots", config.shots)
    taken = {entry["question"] for _, entry in shots}
    prefix = "".join(
        f"{_question_text(config, entry['question'])}\n{_shot_answer(config, entry['answer'])}\n\n"
        for _, entry in shots
    )
    notes: list[str] = []
    splits: dict[str, list[Prompt]] = {}
    for split, size in (("train", config.train_size), ("validation", config.validation_size)):
        drawn = _draw(config, split, size)
        questions = {entry["question"] for _, entry in drawn}
        if split == "train":  # repeats within training are the distribution of the data set
            kept = [pair for pair in drawn if pair[1]["question"] not in taken]
            origin = "that are shots"
        else:
            fresh = {entry["question"]: (dataset, entry) for dataset, entry in reversed(drawn)}
            kept = [pair for question, pair in reversed(fresh.items()) if question not in taken]
            origin = "that repeat or are in training"
        if size and not kept:
            raise DataError(
                f"reasoning_gym: no {split} question is left after leaving out those {origin}; "
                "these data sets have too few different questions"
            )
        if len(kept) < size:
            notes.append(f"reasoning_gym: {size - len(kept)} of {size} {split} questions left out {origin}")
        taken |= questions
        splits[split] = [_prompt(config, prefix, f"{split}-{i}", *pair) for i, pair in enumerate(kept)]
    verifier = GymVerifier(config.answer_pattern)
    return Task(TASK_NAME, splits["train"], splits["validation"], verifier, notes=tuple(notes))


def _prompt(config: ReasoningGymConfig, prefix: str, identifier: str, dataset: GymDataset, entry: Any) -> Prompt:
    user = {"role": "user", "content": prefix + _question_text(config, entry["question"])}
    system = ({"role": "system", "content": config.system},) if config.system is not None else ()
    return Prompt(
        id=identifier,
        messages=(*system, user),
        reference=str(entry["answer"]),
        task=TASK_NAME,
        metadata={"dataset": dataset.name, "config": json.dumps(dataset.config, sort_keys=True), "entry": entry},
    )


def _question_text(config: ReasoningGymConfig, question: str) -> str:
    if config.template is not None:  # not str.format: prompts are full of braces
        return config.template.replace("{question}", question)
    return f"{question} {_INSTRUCTIONS.get(config.answer_pattern, '')}".rstrip()


def _shot_answer(config: ReasoningGymConfig, answer: object) -> str:
    return _SHOT_ANSWERS.get(config.answer_pattern, "%s") % answer


def _draw(config: ReasoningGymConfig, split: str, size: int) -> list[tuple[GymDataset, dict[str, Any]]]:
    """`size` items of the mixture in a seeded order, each data set with its share of them."""
    mixing = random.Random(f"{config.seed}/{split}/mixing")
    total = sum(dataset.weight for dataset in config.datasets)
    cumulative, ends = 0.0, [0]
    for dataset in config.datasets:
        cumulative += dataset.weight
        ends.append(round(size * cumulative / total))
    items: list[tuple[GymDataset, dict[str, Any]]] = []
    for index, dataset in enumerate(config.datasets):
        # reasoning-gym draws item i from seed + i: neighbouring seeds would give the splits the same items
        seed = random.Random(f"{config.seed}/{split}/{index}").randrange(2**31)
        count = ends[index + 1] - ends[index]
        if count:
            generated = _create(dataset.name, json.dumps(dataset.config, sort_keys=True), seed=seed, size=count)
            items += [(dataset, generated[item]) for item in range(count)]
    mixing.shuffle(items)
    return items


@lru_cache
def _create(name: str, config_json: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("reasoning-gym tasks need its package: pip install 'graftrl[gym]'") from error
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config_json))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym data set {name!r}: {error}") from error
