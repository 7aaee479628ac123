"""The recipe: one YAML file describes a run completely. Unknown keys and impossible combinations are refused here,
before any model loads."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_serializer, field_validator, model_validator

from graftrl.engines.config import RaySettings
from graftrl.errors import ConfigError
from graftrl.logs.config import AnyPeerSettings, LivePeerSettings, PeerSettings
from graftrl.methods import METHODS, Method, build_method
from graftrl.methods.extensions import SearchesWeights, UsesScorers
from graftrl.policies.config import ModelSettings, SamplingSettings, ScorerSettings
from graftrl.settings import Settings
from graftrl.shipped import find_recipe
from graftrl.tasks.config import TaskConfig


class TrainingSettings(Settings):
    """The batch of a step and how many steps.

    steps: total; either this or epochs.
    epochs: passes over the training prompts, the last partial batch of each dropped.
    prompts_per_step: that every model answers in a step.
    group_size: n, responses per prompt and model; 1 only where no advantage is relative to a group.
    minibatch_prompts: prompts of one optimizer step. epochs_per_batch: passes over a step's rows.
    importance_cap: most that truncated importance sampling weighs a token of an own response by, where the sampler's
        log-probabilities are not the trainer's; none: all tokens weigh 1.
    """

    steps: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    prompts_per_step: int = Field(128, ge=1)
    group_size: int = Field(8, ge=1)
    minibatch_prompts: int = Field(32, ge=1)
    epochs_per_batch: int = Field(1, ge=1)
    importance_cap: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSettings:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set exactly one of training.steps and training.epochs")
        if self.minibatch_prompts > self.prompts_per_step:
            raise ValueError(
                f"training.minibatch_prompts ({self.minibatch_prompts}) exceeds training.prompts_per_step "
                f"({self.prompts_per_step})"
            )
        return self


class EvaluationSettings(Settings):
    """pass@1 on validation prompts before training, every so many steps, and at the end.

    every: steps between evaluations; 0: never in between.
    prompts: how many of the validation prompts; none: all. samples: responses per prompt.
    temperature, top_p: of these responses; a temperature of 0 takes the most likely token.
    before: evaluate before training too.
    """

    every: int = Field(0, ge=0)
    prompts: int | None = Field(None, ge=1)
    samples: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    before: bool = True


class CheckpointSettings(Settings):
    """every: steps between checkpoints; a killed run loses at most the steps since the last. keep: newest kept, besides
    the one that was best in validation (mean pass@1 over the models).
    format: "whole" weights, as from_pretrained reads them; or "sharded": every trainer of the ray engine writes its own
        part, beside the next step. `graftrl export` makes whole weights of parts.
    """

    every: int = Field(1, ge=1)
    keep: int = Field(2, ge=1)
    format: Literal["whole", "sharded"] = "whole"


class VerificationSettings(Settings):
    """workers: processes that grade. limit_s: wall-clock seconds for one response; beyond it the reward is 0."""

    workers: int = Field(2, ge=1)
    limit_s: float = Field(5.0, gt=0)


class Recipe(Settings):
    """A run.

    name: of the run, and of its folder under runs/ where no other is given: letters, digits, ".", "_" and "-".
    seed: everything random follows from it. Runs of one seed see the same prompts in the same order.
    engine: where policies live: "local", in this process; or "ray", spread over many (docs/how-to/scale.md).
    ray: what each policy gets of a Ray cluster; read by `engine: ray`, its address also by live peers on Ray.
    threads: CPU threads; none: as many as torch takes.
    method: a name, or a mapping with `name` and options.
    models: the policies that train, by name.
    peers: models that this run does not train, by name: stored ones, read from logs, and live ones, trained by another
        job. A peer and a scorer of one name are one model.
    scorers: frozen models that only read responses, by name.
    task: prompts and their verifier; `kind` says which.
    sampling: how training responses are drawn.
    training: the batch of a step, and how many steps.
    evaluation: when and how validation prompts are answered.
    checkpoint: how often one is written, and how many stay.
    verification: the processes that grade.
    trackers: where metrics go besides metrics.jsonl: "tensorboard", "trackio", "wandb".
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(0, ge=0)
    engine: Literal["local", "ray"] = "local"
    ray: RaySettings = RaySettings()
    threads: int | None = Field(None, ge=1)
    method: Any
    models: dict[str, ModelSettings] = Field(min_length=1)
    peers: dict[str, AnyPeerSettings] = Field(default_factory=dict)
    scorers: dict[str, ScorerSettings] = Field(default_factory=dict)
    task: TaskConfig
    sampling: SamplingSettings = SamplingSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    verification: VerificationSettings = VerificationSettings()
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field(default_factory=list)

    @field_validator("models", "peers", "scorers")
    @classmethod
    def _names_are_file_names(cls, named: dict[str, Any]) -> dict[str, Any]:
        for name in named:
            if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
                raise ValueError(f"model name {name!r}: use letters, digits, '-', '_' and '.' (it names folders)")
        return named

    @field_validator("method")
    @classmethod
    def _method_exists(cls, method: Any) -> Any:
        if isinstance(method, Settings):
            return method
        if not isinstance(method, str | dict):
            raise ValueError("must be a name or a mapping with a name")
        try:
            return build_method(method).settings
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("method: ")) from error

    @field_serializer("method")
    def _dump_method(self, method: Settings) -> dict[str, Any]:
        return method.model_dump(mode="json")

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        method = self.build_method()
        both = sorted(self.models.keys() & self.peers.keys())
        if both:
            raise ValueError(f"{both[0]!r} is the name of a model and of a peer; give the peer another name")
        for name, peer in self.peers.items():
            if isinstance(peer, LivePeerSettings) and (peer.model or name) in self.models:
                raise ValueError(
                    f"peers.{name}.model is {peer.model!r}, a model of this recipe; both jobs publish under their "
                    "models' names, so these must differ"
                )
            if isinstance(peer, LivePeerSettings) and peer.live.split("/")[0] == "ray" and self.ray.address is None:
                raise ValueError(
                    f"peers.{name}.live is {peer.live!r}, but ray.address is not set: give it the cluster that both "
                    "jobs reach (HOST:PORT or auto), or name a shared folder in peers"
                )
        scored = sorted(self.models.keys() & self.scorers.keys())
        if scored:
            raise ValueError(f"{scored[0]!r} is the name of a model and of a scorer; give the scorer another name")
        if isinstance(method, UsesScorers):
            missing = [name for name in method.scorers if name not in self.scorers]
            if missing:
                raise ValueError(
                    f"method {method.settings.name!r} reads the scorers {', '.join(method.scorers)}, and there is no "
                    f"{missing[0]!r}; add it, such as scorers: {{{missing[0]}: {{path: MODEL}}}}"
                )
        givers = [name for name in getattr(method, "rollouts_of", ()) if name not in {*self.models, *self.peers}]
        if givers:
            raise ValueError(
                f"method {method.settings.name!r} needs the responses of {givers[0]!r}; add a peer of that name, such "
                f"as peers: {{{givers[0]}: {{log: RUN, match: prompt}}}}"
            )
        if len(self.models) + len(self.peers) < method.fewest_models:
            raise ValueError(
                f"method {method.settings.name!r} exchanges between models and needs at least {method.fewest_models} "
                f"under models and peers; there is {len(self.models) + len(self.peers)}"
            )
        if self.training.group_size < (fewest := getattr(method, "fewest_responses", 2)):
            raise ValueError(
                f"training.group_size is {self.training.group_size}, but the standard deviation of one sample is "
                f"undefined: the group-relative advantages of method {method.settings.name!r} need at least {fewest} "
                "responses a prompt"
            )
        if not self.sampling.is_plain:
            s = self.sampling
            raise ValueError(
                f"sampling.temperature={s.temperature:g}, top_p={s.top_p:g}, top_k={s.top_k}: training rollouts must "
                "come from the unmodified distribution (temperature 1, top_p 1, top_k 0), else importance ratios and "
                "compatibility scores are biased; use the evaluation section for other settings"
            )
        return self

    @model_validator(mode="after")
    def _engine_can(self) -> Recipe:
        strangers = sorted(self.ray.resources.keys() - self.models.keys())
        if strangers:
            raise ValueError(f"ray.resources names {strangers[0]!r}, which is none of the models")
        if self.engine == "local":
            if self.checkpoint.format == "sharded":
                raise ValueError(
                    "checkpoint.format: sharded is for the trainers of engine: ray; engine: local is one process that "
                    "writes whole weights: set checkpoint.format: whole"
                )
            return self
        method, unable = self.build_method(), "engine: ray cannot {} yet; set engine: local"
        if isinstance(method, SearchesWeights):
            raise ValueError(unable.format(f"search weights, as method {method.settings.name!r} does,"))
        for name, settings in self.models.items():
            if settings.lora is not None:
                raise ValueError(unable.format(f"train adapters (models.{name}.lora)"))
            if settings.path.endswith(".gguf"):
                raise ValueError(unable.format(f"train from a GGUF file (models.{name}.path)"))
        return self

    def build_method(self) -> Method:
        """A fresh instance of the recipe's method."""
        method: Any = self.method
        return build_method(method.model_dump())

    def without(self, lost: Collection[str]) -> Recipe:
        """The recipe of the other models. A method that exchanges is left with what these have, be it one's own rows.

        Raises:
            ConfigError: no model is left, or the method trains on the responses of a lost one.
        """
        if not lost:
            return self
        models = {name: settings for name, settings in self.models.items() if name not in lost}
        needed = sorted({*getattr(self.build_method(), "rollouts_of", ())} & {*lost})
        if not models or needed:
            why = f"method {self.method.name!r} needs the responses of {needed[0]!r}" if needed else "no model is left"
            raise ConfigError(f"without {', '.join(sorted(lost))} the run cannot go on: {why}")
        return self.model_copy(update={"models": models})

    def evaluation_sampling(self) -> SamplingSettings:
        """How validation responses are drawn: the training limits with the evaluation's temperature and top-p."""
        return self.sampling.model_copy(
            update={"temperature": self.evaluation.temperature, "top_p": self.evaluation.top_p}
        )


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply `key=value` overrides (dotted keys, values in YAML). Where there is no such file, a
    path like `recipes/quickstart.yaml` is the recipe that graftrl brings.

    Raises:
        ConfigError: one line that names the file, the key and what to change.
    """
    content = _read_yaml(path)
    for override in overrides:
        apply_override(content, override)
    return parse_recipe(content, str(path))


def load_task(path: Path) -> TaskConfig:
    """The task section of a YAML file, such as a recipe. Raises ConfigError as `load_recipe`."""
    content = _read_yaml(path)
    if "task" not in content:
        raise ConfigError(f"{path}: has no task section")
    return parse_task(content["task"], str(path))


def parse_task(content: Any, where: str) -> TaskConfig:
    """Validate a task section; `where` names it in errors."""
    try:
        return TypeAdapter(TaskConfig).validate_python(content)
    except ValidationError as error:
        raise ConfigError(f"{where}: task.{_first_problem(error)}") from error


def parse_peers(content: Mapping[str, Any], where: str) -> dict[str, PeerSettings]:
    """Validate a peers section; `where` names it in errors."""
    try:
        return TypeAdapter(dict[str, PeerSettings]).validate_python(dict(content))
    except ValidationError as error:
        raise ConfigError(f"{where}: peers.{_first_problem(error)}") from error


def parse_method(content: Mapping[str, Any], where: str) -> Method:
    """Build the method that a method section names; `where` names it in errors."""
    try:
        return build_method(content)
    except ValidationError as error:
        raise ConfigError(f"{where}: method.{_first_problem(error)}") from error


def parse_recipe(content: dict[str, Any], where: str) -> Recipe:
    """Validate a recipe given as a mapping; `where` names it in errors."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error)}") from error


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe, defaults included, as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content: Any = yaml.safe_load(find_recipe(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of keys to values")
    return content


def apply_override(content: dict[str, Any], override: str) -> None:
    """Put `key=value` into a recipe given as a mapping. Raises ConfigError where that cannot be."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write key=value, for example training.steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    put(content, key, value)


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Put a value under a dotted key of a recipe given as a mapping. Raises ConfigError where that cannot be."""
    *parents, last = key.split(".")
    target = content
    for parent in parents:
        inner = target.get(parent)
        if inner is None:
            inner = target[parent] = {}
        elif parent == "method" and isinstance(inner, str):
            inner = target[parent] = {"name": inner}
        elif not isinstance(inner, dict):
            raise ConfigError(f"override of {key!r}: {parent!r} is a value, not a section")
        target = inner
    target[last] = value


def _first_problem(error: ValidationError) -> str:
    """The most telling problem in one line; how many more there are."""
    problems = error.errors()
    problem = min(problems, key=lambda p: p["type"] != "extra_forbidden")
    location = ".".join(str(p) for p in problem["loc"] if not str(p).startswith("function-") and " " not in str(p))
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown key" + _suggestion(problem["loc"])
    elif problem["type"] == "missing":
        message = "is missing"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{location + ': ' if location else ''}{message}{more}"


def _suggestion(location: tuple[int | str, ...]) -> str:
    known = {name for model in _settings_models() for name in model.model_fields}
    close = difflib.get_close_matches(str(location[-1]), sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _settings_models() -> list[type[BaseModel]]:
    """What a recipe is made of, the settings of all methods included."""
    found: list[type[BaseModel]] = []
    todo: list[Any] = [Recipe, *(method.settings_type for method in METHODS.values())]
    while todo:
        current = todo.pop()
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            todo += get_args(current)
        elif current not in found:
            found.append(current)
            todo += [field.annotation for field in current.model_fields.values()]
    return found
