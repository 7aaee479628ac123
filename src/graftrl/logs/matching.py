"""Which prompt of a recipe's task a logged prompt is, so that both have one id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from graftrl.errors import DataError
from graftrl.rollout import Message, Prompt
from graftrl.tasks import build_task
from graftrl.tasks.build import AnyTaskConfig
from graftrl.tasks.config import CodeConfig, FunctionConfig, MathConfig


def text_id(messages: Sequence[Message]) -> str:
    """An id from the prompt's text alone: equal texts have equal ids, in every log."""
    text = "\n".join(message["content"] for message in messages)
    return f"sha256-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


@dataclass(frozen=True)
class Match:
    """prompt: as the recipe asks it. alike: the log asked it in the same words."""

    prompt: Prompt
    alike: bool


class TaskPrompts:
    """The training prompts of a task, found again by the text of their problem.

    A logged prompt matches the problem whose text it contains: chat templates and instructions around it may differ. Of
    problems that contain each other the longest counts; where several remain (solved examples in front of the question,
    say) the match is refused.
    """

    def __init__(self, config: AnyTaskConfig) -> None:
        bare = config
        templated = isinstance(config, MathConfig | CodeConfig) or (
            isinstance(config, FunctionConfig) and config.prompts is None
        )
        if templated:  # the problem as the data set has it; the same ids
            bare = config.model_copy(update={"system": None, "suffix": "", "template": None})
        self._prompts: dict[str, Prompt] = {}
        self.repeated = 0
        for prompt in build_task(bare).train:
            problem = prompt.question[-1]["content"].strip()
            if problem in self._prompts:
                self.repeated += 1
            elif isinstance(config, MathConfig | CodeConfig | FunctionConfig) and templated:
                self._prompts[problem] = replace(prompt, messages=config.messages(prompt.question[-1]["content"]))
            else:
                self._prompts[problem] = prompt
        self._known: dict[str, Match | None] = {}

    def find(self, texts: Sequence[str]) -> list[Match | None]:
        """For each text the prompt that it asks; None where there is none.

        Raises:
            DataError: a text contains several problems.
        """
        new = sorted({text for text in texts if text not in self._known})
        unclear = [text for text in new if text.strip() not in self._prompts]
        for text in new:
            self._known[text] = self._match(text, [text.strip()])
        if unclear:
            problems = list(self._prompts)
            found = pl.Series(unclear).str.extract_many(problems, overlapping=True)
            for text, contained in zip(unclear, found.to_list(), strict=True):
                self._known[text] = self._match(text, _outermost(contained))
        return [self._known[text] for text in texts]

    def _match(self, text: str, problems: list[str]) -> Match | None:
        if len(problems) > 1:
            ids = ", ".join(repr(self._prompts[problem].id) for problem in problems[:3])
            raise DataError(f"the prompt {text[:60]!r}... contains several problems of the task: {ids}")
        prompt = self._prompts.get(problems[0]) if problems else None
        return None if prompt is None else Match(prompt, prompt.question[-1]["content"].strip() in text)


def _outermost(problems: Sequence[str]) -> list[str]:
    """Without those that are part of another."""
    different = sorted(set(problems))
    return [p for p in different if not any(p != other and p in other for other in different)]
