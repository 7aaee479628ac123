"""From settings to a task: load, check every reference, say what was left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from graftrl.lab.programs import HiddenProgramsConfig, build_hidden_programs
from graftrl.rollout import Prompt
from graftrl.tasks.base import Task, Verifier
from graftrl.tasks.boxes import BoxError, last_box
from graftrl.tasks.code.layouts import problem_of, read_problems
from graftrl.tasks.code.sandbox import Sandbox
from graftrl.tasks.code.verifier import CodeVerifier, SolutionCheck
from graftrl.tasks.config import (
    CodeConfig,
    DataSource,
    FunctionConfig,
    MathConfig,
    ProblemTemplate,
    ReasoningGymConfig,
)
from graftrl.tasks.data import drop, load_prompts, refuse_duplicates
from graftrl.tasks.functions import FunctionVerifier, function_prompts, resolve
from graftrl.tasks.gym import build_reasoning_gym
from graftrl.tasks.math import MathVerifier, ReferenceCheck, plain
from graftrl.tasks.pool import Item, VerificationPool

_REFERENCE_LIMIT_S = 5.0

AnyTaskConfig = MathConfig | ReasoningGymConfig | FunctionConfig | CodeConfig | HiddenProgramsConfig


def build_task(config: AnyTaskConfig) -> Task:
    """Load the task that the settings describe.

    Raises ConfigError for settings that cannot work, DataError for data that cannot be read or holds nothing usable.
    """
    if isinstance(config, MathConfig):
        return _build_math(config)
    if isinstance(config, ReasoningGymConfig):
        return build_reasoning_gym(config)
    if isinstance(config, FunctionConfig):
        return _build_function(config)
    if isinstance(config, CodeConfig):
        return _build_code(config)
    return build_hidden_programs(config)


def _build_math(config: MathConfig) -> Task:
    train, train_notes = _math_prompts(config.train, config)
    validation, validation_notes = _math_prompts(config.validation, config)
    notes = (*train_notes, *validation_notes, *_overlap(train, validation))
    return Task("math", train, validation, MathVerifier(require_box=config.require_box), notes=notes)


def _math_prompts(source: DataSource | None, template: ProblemTemplate) -> tuple[list[Prompt], list[str]]:
    if source is None:
        return [], []
    prompts, notes = load_prompts(source, template, "math")
    prompts = [with_final_answer(prompt, source.answer_field) for prompt in prompts]
    usable = usable_references({prompt.reference for prompt in prompts})
    kept, more = drop(
        prompts, lambda prompt: prompt.reference in usable, source.name, "a reference that cannot be parsed"
    )
    return kept, notes + more


def with_final_answer(prompt: Prompt, answer_field: str) -> Prompt:
    """The prompt with its final answer as the reference; a whole solution goes into the metadata, by its field."""
    answer = _final_answer(prompt.reference)
    if answer == prompt.reference:
        return prompt
    return replace(prompt, reference=answer, metadata={**prompt.metadata, answer_field: prompt.reference})


def _final_answer(reference: str) -> str:
    r"""The last box of a reference that is a whole solution (data sets such as MATH); "" when its box is unusable."""
    if "\\boxed" not in reference and "\\fbox" not in reference:
        return reference
    try:
        return last_box(reference)
    except BoxError:
        return ""


def usable_references(references: set[str]) -> set[str]:
    """Those that can be graded against. Under a clock: a reference may hang the parser as well as a response."""
    doubtful = sorted(reference for reference in references if not plain(reference))
    if not doubtful:
        return references
    items: list[Item] = [(Prompt(reference, (), reference, "math"), "", "stop") for reference in doubtful]
    with VerificationPool(min(4, os.cpu_count() or 1), _REFERENCE_LIMIT_S) as pool:
        grades = pool.grade(ReferenceCheck(), items)
    return references - {reference for reference, grade in zip(doubtful, grades, strict=True) if grade.reward < 1.0}


def _build_function(config: FunctionConfig) -> Task:
    resolve(config.verifier)
    verifier: Verifier = FunctionVerifier(config.verifier)
    train, train_notes = _own_prompts(config.prompts, config.train, config)
    validation, validation_notes = _own_prompts(config.validation_prompts, config.validation, config)
    notes = (*train_notes, *validation_notes, *_overlap(train, validation))
    return Task("function", train, validation, verifier, notes=notes)


def _own_prompts(
    function: str | None, source: DataSource | None, template: ProblemTemplate
) -> tuple[list[Prompt], list[str]]:
    if function is not None:
        prompts = function_prompts(function, "function")
        refuse_duplicates(prompts, function)
        return prompts, []
    return load_prompts(source, template, "function") if source is not None else ([], [])


def _build_code(config: CodeConfig) -> Task:
    verifier, notes = code_verifier(config)
    train, train_notes = _code_prompts(config.train, config)
    validation, validation_notes = _code_prompts(config.validation, config)
    notes += [*train_notes, *validation_notes, *_overlap(train, validation)]
    return Task("code", train, validation, verifier, notes=tuple(notes))


def code_verifier(config: CodeConfig) -> tuple[CodeVerifier, list[str]]:
    """The verifier, and notes on a weaker sandbox. Raises ConfigError where the sandbox does not hold."""
    sandbox = Sandbox(config.memory_mib, config.packages, weaker=config.sandbox == "weaker")
    opened = sandbox.require()
    notes = [f"the sandbox is weaker: code of models could {', '.join(opened)}"] if opened else []
    return CodeVerifier(sandbox, config.time_s, config.max_time_s), notes


def _code_prompts(source: DataSource | None, config: CodeConfig) -> tuple[list[Prompt], list[str]]:
    if source is None:
        return [], []
    prompts = read_problems(source, config)
    faults = {prompt.id: problem_of(prompt).fault for prompt in prompts}
    first = next((fault for fault in faults.values() if fault), "")
    kept, notes = drop(prompts, lambda prompt: not faults[prompt.id], source.name, first)
    if not config.check:
        return kept, notes
    faults = failing_solutions(kept, code_verifier(config)[0])
    first = next((fault for fault in faults.values() if fault), "")
    kept, more = drop(
        kept, lambda prompt: prompt.id not in faults, source.name, f"a solution of their own that fails: {first}"
    )
    return kept, [*notes, *more]


def failing_solutions(prompts: Sequence[Prompt], verifier: CodeVerifier) -> dict[str, str]:
    """The ids of problems whose tests refuse the problem's own solution, and why."""
    items: list[Item] = [(prompt, "", "stop") for prompt in prompts if problem_of(prompt).solution]
    with VerificationPool(os.cpu_count() or 1, _REFERENCE_LIMIT_S) as pool:
        grades = pool.grade(SolutionCheck(verifier), items)
    return {item[0].id: grade.reason for item, grade in zip(items, grades, strict=True) if grade.reward < 1.0}


def _overlap(train: Sequence[Prompt], validation: Sequence[Prompt]) -> list[str]:
    texts = {prompt.text for prompt in train}
    shared = sum(prompt.text in texts for prompt in validation)
    return [f"{shared} of {len(validation)} validation prompts are also in training"] if shared else []
