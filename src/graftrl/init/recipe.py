"""A recipe from a few answers, with comments, checked before it is written."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from graftrl.config import Recipe, parse_recipe, parse_task
from graftrl.errors import ConfigError, GraftrlError
from graftrl.methods import METHODS, PRESETS
from graftrl.names import file_name, model_names
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.loading import context_length, load_skeleton
from graftrl.tasks import build_task
from graftrl.tasks.config import FILE_SUFFIXES, DataSource
from graftrl.tasks.data import numbered_rows
from graftrl.training.run_folder import write_text

TaskKind = Literal["math", "code", "reasoning_gym", "function", "hidden_programs"]
_NONE = "none"  # the answer that leaves something out
TASKS: dict[TaskKind, str] = {
    "math": "problems with a mathematical answer: fields id, problem, answer",
    "code": "Python functions that are tested",
    "reasoning_gym": "procedural problems of the reasoning-gym library",
    "function": "your own prompts and verifier",
    "hidden_programs": "the laboratory's task for tiny models",
}
PAPER = {"prompts_per_step": 128, "group_size": 8, "minibatch_prompts": 32}  # of the GRAFT paper
Ask = Callable[[str, str | None], str]  # question, default -> answer


@dataclass(frozen=True)
class Answers:
    """What a recipe is made of; None and () stand for what was not said.

    models, peers, scorers: "NAME=PATH", or a path alone. train, validation: a file, or a hub data set. datasets: of
    reasoning-gym.
    """

    name: str | None = None
    models: Sequence[str] = ()
    peers: Sequence[str] = ()
    scorers: Sequence[str] = ()
    method: str | None = None
    task: TaskKind | None = None
    train: str | None = None
    validation: str | None = None
    datasets: Sequence[str] = ()
    prompts: str | None = None
    verifier: str | None = None
    steps: int | None = None
    epochs: int | None = None
    prompts_per_step: int | None = None
    group_size: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    lr: float | None = None
    dtype: str | None = None
    seed: int = 0


def write_recipe(
    answers: Answers, file: Path, *, ask: Ask | None = None, force: bool = False
) -> tuple[Recipe, list[str]]:
    """Complete the answers, check the recipe that they make, and write it.

    Args:
        ask: puts a question for what is missing; None: what is missing is an error.
        force: write over a file that is there.

    Returns:
        the recipe, and notes for people.

    Raises:
        ConfigError: the file exists; an answer is missing or does not work. Nothing is then written.
    """
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name, or --force to write over it")
    complete = _complete(answers, ask)
    text, notes = _text(complete, file)
    recipe = parse_recipe(yaml.safe_load(text), str(file))
    write_text(file, text)
    return recipe, notes


# Questions ------------------------------------------------------------------------------------------------------------


def _complete(answers: Answers, ask: Ask | None) -> Answers:
    missing: list[str] = []

    def need(option: str, question: str, default: str | None = None) -> str:
        if ask is None:
            missing.append(option)
            return ""
        return ask(question, default).strip()

    if not answers.models:
        given = need("--model", "Models to train (paths or hub ids, separated by spaces; NAME=PATH names one)")
        answers = replace(answers, models=given.split())
    if answers.method is None:
        several = len(answers.models) + len(answers.peers) > 1
        default = "graft" if several else "grpo"
        method = default if ask is None else _until(ask, "Method", default, _method_fault)
        answers = replace(answers, method=method)
    if fault := _method_fault(str(answers.method)):
        raise ConfigError(f"--method {fault}")
    if answers.task is None:
        kinds = "; ".join(f"{kind}: {what}" for kind, what in TASKS.items())
        task = need("--task", "") if ask is None else _until(ask, f"Task ({kinds})", "math", _task_fault)
        answers = replace(answers, task=task)  # type: ignore[arg-type]
    if answers.task and (fault := _task_fault(answers.task)):
        raise ConfigError(f"--task {fault}")
    if answers.task in ("math", "code") and answers.train is None:
        answers = replace(
            answers, train=need("--train", "Training problems (a .jsonl or .parquet file, or a hub data set)")
        )
        if ask is not None and answers.validation is None:
            given = need("--validation", "Validation problems (likewise)", _NONE)
            answers = replace(answers, validation=None if given == _NONE else given)
    if answers.task == "reasoning_gym" and not answers.datasets:
        answers = replace(
            answers, datasets=need("--dataset", "Data sets of reasoning-gym, separated by spaces").split()
        )
    if answers.task == "function":
        if answers.verifier is None:
            answers = replace(answers, verifier=need("--verifier", "Verifier (module:function)"))
        if answers.prompts is None and answers.train is None:
            given = need("--prompts", "Prompts (module:function, a .jsonl or .parquet file, or a hub data set)")
            is_source = given.endswith(FILE_SUFFIXES) or ":" not in given
            answers = replace(answers, train=given) if is_source else replace(answers, prompts=given)
    if missing:
        raise ConfigError(f"graftrl init needs {', '.join(missing)} (on a terminal it asks)")
    return answers


def _until(ask: Ask, question: str, default: str, fault_of: Callable[[str], str]) -> str:
    """Ask until an answer has no fault: a slip must not cost the answers before it."""
    answer = ask(question, default).strip()
    while fault := fault_of(answer):
        answer = ask(f"{fault}. {question}", default).strip()
    return answer


def _method_fault(method: str) -> str:
    """Why this is no method; "" if it is one."""
    if method in METHODS or method in PRESETS or ":" in method:
        return ""
    close = difflib.get_close_matches(method, [*METHODS, *PRESETS], n=1)
    suggestion = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{method}: unknown; {suggestion} are {', '.join(METHODS)}, and the presets in docs/methods/index.md"


def _task_fault(task: str) -> str:
    return "" if task in TASKS else f"{task}: unknown; known are {', '.join(TASKS)}"


# The recipe -----------------------------------------------------------------------------------------------------------


def _text(answers: Answers, file: Path) -> tuple[str, list[str]]:
    models, peers, scorers = (_named(given) for given in (answers.models, answers.peers, answers.scorers))
    notes: list[str] = []
    sampling = _lengths(answers, models, notes)
    training = _training(answers, notes)
    of_models = {
        name: {
            "path": path,
            **({"dtype": answers.dtype} if answers.dtype else {}),
            "optimizer": {"lr": answers.lr if answers.lr is not None else 1e-6},
        }
        for name, path in models.items()
    }
    parts: list[tuple[str, Mapping[str, Any]]] = [  # a comment, and what stands under it
        ("", {"name": answers.name or file_name(file.stem) or "recipe", "seed": answers.seed}),
        (
            "How the models learn: docs/methods/index.md lists the methods and their options.",
            {"method": answers.method},
        ),
        (
            "The models that train. Also: gradient_checkpointing, lora, chat_template, extra_stop_tokens.",
            {"models": of_models},
        ),
    ]
    if peers:
        what = "These only give: their responses are read from rollout logs."
        parts.append((what, {"peers": {name: {"log": log, "match": "prompt"} for name, log in peers.items()}}))
    if scorers:
        what = "These only read: frozen models that the method asks."
        parts.append((what, {"scorers": {name: {"path": path} for name, path in scorers.items()}}))
    plain = "Training responses come from the plain distribution: temperature 1, no top-p, no top-k."
    step = "A step: each model answers prompts_per_step prompts group_size times; one optimizer step a minibatch."
    when = "pass@1 on the validation prompts, before, every so many steps, and at the end."
    parts += [
        ("Prompts and the verifier that grades responses: docs/how-to/tasks.md.", {"task": _task(answers)}),
        (plain, {"sampling": sampling}),
        (step, {"training": training}),
        (when, {"evaluation": {"every": 10}}),
        ("An interrupted run repeats at most the steps since the last checkpoint.", {"checkpoint": {"every": 5}}),
    ]
    check, train = f"graftrl train {file} --dry-run", f"graftrl train {file}"
    head = f"# Written by graftrl init. Check it, then train:\n#\n#     {check}\n#     {train}\n"
    body = [
        (f"# {comment}\n" if comment else "") + yaml.safe_dump(dict(part), sort_keys=False, allow_unicode=True)
        for comment, part in parts
    ]
    return "\n".join([head, *body]), notes


def _named(given: Sequence[str]) -> dict[str, str]:
    """{name: path}; names that were not given come from the paths."""
    pairs = [item.partition("=") if "=" in item else ("", "", item) for item in given]
    short = iter(model_names([path for name, _, path in pairs if not name]))
    named: dict[str, str] = {}
    for name, _, path in pairs:
        chosen = name or next(short)
        if chosen in named:
            raise ConfigError(f"two models are called {chosen!r}; give names, such as other={path}")
        named[chosen] = path
    return named


def _source(given: str) -> dict[str, str]:
    return {"path": given} if given.endswith(FILE_SUFFIXES) else {"hub": given}


def _task(answers: Answers) -> dict[str, Any]:
    task: dict[str, Any] = {"kind": answers.task}
    if answers.datasets:
        task["datasets"] = [{"name": name} for name in answers.datasets]
    if answers.prompts is not None:
        task["prompts"] = answers.prompts
    if answers.train is not None:
        task["train"] = _source(answers.train)
    if answers.validation is not None:
        task["validation"] = _source(answers.validation)
    if answers.verifier is not None:
        task["verifier"] = answers.verifier
    return task


def _training(answers: Answers, notes: list[str]) -> dict[str, Any]:
    """The paper's batch, or as much of it as there are prompts."""
    length: dict[str, Any] = {"epochs": answers.epochs} if answers.epochs else {"steps": answers.steps or 100}
    wanted = answers.prompts_per_step or PAPER["prompts_per_step"]
    known = _prompt_count(answers)
    prompts = wanted if known is None else min(wanted, known)
    if prompts < wanted:
        notes.append(f"there are {known} training prompts, so that training.prompts_per_step is {prompts}")
    return {
        **length,
        "prompts_per_step": prompts,
        "group_size": answers.group_size or PAPER["group_size"],
        "minibatch_prompts": min(PAPER["minibatch_prompts"], prompts),
    }


def _prompt_count(answers: Answers) -> int | None:
    """How many training prompts there are, where that can be known without a download."""
    if answers.train is not None:
        source = _source(answers.train)
        return sum(1 for _ in numbered_rows(DataSource(path=Path(source["path"])))) if "path" in source else None
    if answers.prompts is not None:
        return len(build_task(parse_task(_task(answers), "graftrl init")).train)
    return None


def _lengths(answers: Answers, models: Mapping[str, str], notes: list[str]) -> dict[str, int]:
    """The usual limits, or what fits the smallest context of the models that lie on this machine."""
    usual = SamplingSettings()
    prompt = answers.max_prompt_tokens or usual.max_prompt_tokens
    response = answers.max_response_tokens or usual.max_response_tokens
    positions = min((p for p in map(_positions, models.items()) if p is not None), default=None)
    if positions is not None and prompt + response > positions:
        if answers.max_prompt_tokens and answers.max_response_tokens:
            raise ConfigError(f"--max-prompt-tokens and --max-response-tokens exceed a model's {positions} positions")
        if answers.max_prompt_tokens:
            response = positions - prompt
        elif answers.max_response_tokens:
            prompt = positions - response
        else:
            prompt = positions // 3
            response = positions - prompt
        notes.append(
            f"a model has {positions} positions, so that prompts have {prompt} and responses {response} tokens at most"
        )
    return {"max_prompt_tokens": prompt, "max_response_tokens": response}


def _positions(model: tuple[str, str]) -> int | None:
    name, path = model
    if not Path(path).expanduser().exists():
        return None
    try:
        return context_length(load_skeleton(name, ModelSettings(path=path))[0])
    except GraftrlError:
        return None  # `--dry-run` says what is wrong with the model
