"""Settings of the tasks, told apart by `kind`. `graftrl.tasks.build_task` turns one into a `Task`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from graftrl.lab.programs import HiddenProgramsConfig
from graftrl.settings import Settings

MATH_SUFFIX = r"Let's think step by step and output the final answer within \boxed{}."
NAMED_PATTERNS = ("boxed", "tag", "first_integer", "last_integer", "first_line")
CODE_TEMPLATE = (
    "Write a Python function that solves the following problem. Answer with the complete function, and the imports it "
    "needs, in one ```python block.\n\n{problem}"
)
FILE_SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".jsonl.gz")


class DataSource(Settings):
    """Rows of a JSONL or Parquet file (`path`) or of a Hugging Face hub data set (`hub`, `subset`, `split`).

    path: a `.jsonl`, `.jsonl.gz`, `.ndjson` or `.parquet` file. Either this or hub.
    hub: id of a data set on the hub; needs graftrl[hub].
    subset: configuration of the hub data set. split: of the hub data set.
    id_field: rows get the id `<file stem>-<row number>`, from 1, when no row has this field.
    problem_field: with the problem's text. answer_field: with the reference answer.
    limit: keep that many rows, drawn with the seed, in file order; none: all.
    seed: of that draw.
    """

    path: Path | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    id_field: str = "id"
    problem_field: str = "problem"
    answer_field: str = "answer"
    limit: int | None = Field(default=None, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _one_place(self) -> DataSource:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give either `path` or `hub`")
        if self.path is not None and not self.path.name.endswith(FILE_SUFFIXES):
            raise ValueError(f"{self.path} is none of {', '.join(FILE_SUFFIXES)}")
        return self

    @property
    def name(self) -> str:
        """What error messages call it."""
        return str(self.path) if self.path is not None else f"hub:{self.hub}[{self.split}]"

    @property
    def stem(self) -> str:
        if self.path is None:
            return f"{str(self.hub).rpartition('/')[2]}-{self.split}"
        return Path(self.path.name.removesuffix(".gz")).stem


class ProblemTemplate(Settings):
    """How a problem becomes chat messages: an optional system message and one user message.

    system: content of a system message; none: no such message.
    suffix: the user message is the problem, a space and this.
    template: the user message in place of problem and suffix, with `{problem}` where the problem goes.
    """

    system: str | None = None
    suffix: str = ""
    template: str | None = None

    @model_validator(mode="after")
    def _template_holds_problem(self) -> ProblemTemplate:
        if self.template is not None:
            if "{problem}" not in self.template:
                raise ValueError("`template` must contain {problem}")
            if self.suffix not in ("", type(self).model_fields["suffix"].default):  # a complete dump holds the default
                raise ValueError("`template` replaces `suffix`: write the suffix into the template")
        return self

    def messages(self, problem: str) -> tuple[dict[str, str], ...]:
        if self.template is not None:  # not str.format: prompts are full of braces
            text = self.template.replace("{problem}", problem)
        else:
            text = f"{problem} {self.suffix}" if self.suffix else problem
        system = ({"role": "system", "content": self.system},) if self.system is not None else ()
        return (*system, {"role": "user", "content": text})


class MathConfig(ProblemTemplate):
    r"""Problems with a mathematical answer, graded by `graftrl.tasks.math.MathVerifier` on the last \boxed{}.

    train, validation: where the problems are.
    require_box: a response without a box is wrong; else its final answer is looked for in the text, which a policy can
        exploit.
    """

    kind: Literal["math"] = "math"
    train: DataSource
    validation: DataSource | None = None
    suffix: str = MATH_SUFFIX
    require_box: bool = True


class GymDataset(Settings):
    """One reasoning-gym data set.

    name: the library's. config: its own options.
    weight: share of the prompts relative to the others'.
    """

    name: str
    config: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, gt=0)


class ReasoningGymConfig(Settings):
    """Procedural problems of the reasoning-gym library.

    datasets: which, mixed by their weights.
    train_size, validation_size: prompts before repeated questions are left out of validation.
    seed: of the questions.
    answer_pattern: where the answer stands in a response: "boxed" (the last box), "tag" (the last pair of <answer>
        tags), "first_integer", "last_integer", "first_line" (the first that is not empty), or a regular expression with
        one group, of which the last match counts.
    system: content of a system message; none: no such message.
    template: the user message, with `{question}`; none asks for the format of `answer_pattern` after the question.
    shots: solved examples in front of the question; their questions are in neither training nor validation.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    datasets: tuple[GymDataset, ...] = Field(min_length=1)
    train_size: int = Field(default=10_000, ge=1)
    validation_size: int = Field(default=200, ge=0)
    seed: int = 0
    answer_pattern: str = "boxed"
    system: str | None = None
    template: str | None = None
    shots: int = Field(default=0, ge=0)

    @field_validator("answer_pattern")
    @classmethod
    def _usable_pattern(cls, value: str) -> str:
        if value not in NAMED_PATTERNS:
            try:
                groups = re.compile(value).groups
            except re.error as error:
                raise ValueError(
                    f"{value!r} is none of {', '.join(NAMED_PATTERNS)} and no regular expression: {error}"
                ) from error
            if groups != 1:
                raise ValueError(
                    f"{value!r} is none of {', '.join(NAMED_PATTERNS)}; a regular expression needs exactly one group"
                )
        return value

    @model_validator(mode="after")
    def _template_holds_question(self) -> ReasoningGymConfig:
        if self.template is not None and "{question}" not in self.template:
            raise ValueError("`template` must contain {question}")
        return self


class FunctionConfig(ProblemTemplate):
    """Your own verifier, and your own prompts or a data source. Functions are written `module:function`.

    prompts, validation_prompts: called without arguments; return or yield `Prompt`s or dicts with `prompt` (text) or
        `messages` (a list of {"role", "content"}), and optionally `id`, `answer`, `metadata`.
    train, validation: rows of a file or hub data set instead; other fields of a row are in `prompt.metadata`.
    verifier: called as `f(prompt, response, finish_reason)`; returns a bool, a number in [0, 1] or a `Grade`.
    """

    kind: Literal["function"] = "function"
    prompts: str | None = None
    validation_prompts: str | None = None
    train: DataSource | None = None
    validation: DataSource | None = None
    verifier: str

    @field_validator("prompts", "validation_prompts", "verifier")
    @classmethod
    def _names_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:[\w.]+", value):
            raise ValueError(f"{value!r} is not of the form module:function")
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> FunctionConfig:
        if (self.prompts is None) == (self.train is None):
            raise ValueError("give either `prompts` (a function) or `train` (a data source)")
        if self.validation_prompts is not None and self.validation is not None:
            raise ValueError("give at most one of `validation_prompts` and `validation`")
        return self


class CodeConfig(ProblemTemplate):
    """Functions to be written in Python, graded by running them against tests in a sandbox.

    train, validation: where the problems are.
    layout: of the rows: "evalplus" (HumanEval+ and MBPP+ as released), "humaneval" (also HumanEval+ on the hub), "mbpp"
        (also MBPP+ on the hub), "fields" (your own), or "auto", by the fields that a row has.
    tests_field: of the layout "fields": code that calls the function, or a list of assertions. The source's
        problem_field and answer_field hold the problem and, if there is one, its solution.
    entry_point_field: of that layout: the function's name; may be left out. setup_field: code before the tests.
    time_s: seconds that a response may run; longer where the problem's own solution takes more than a quarter of them.
    max_time_s: but no longer than this.
    memory_mib: address space of each process that runs code of a response.
    packages: distributions that this code may import besides the standard library.
    sandbox: "strict" refuses to run where a layer of protection does not hold; "weaker" runs with what there is.
    check: run the problems' own solutions when the data is loaded, and leave out problems whose tests they fail.
    """

    kind: Literal["code"] = "code"
    train: DataSource
    validation: DataSource | None = None
    template: str | None = CODE_TEMPLATE
    layout: Literal["auto", "evalplus", "humaneval", "mbpp", "fields"] = "auto"
    tests_field: str = "tests"
    entry_point_field: str = "entry_point"
    setup_field: str = "setup"
    time_s: float = Field(default=5.0, gt=0)
    max_time_s: float = Field(default=60.0, gt=0)
    memory_mib: int = Field(default=1024, ge=128, le=4096)
    packages: tuple[str, ...] = ("numpy",)
    sandbox: Literal["strict", "weaker"] = "strict"
    check: bool = False

    @model_validator(mode="after")
    def _limits_in_order(self) -> CodeConfig:
        if self.time_s > self.max_time_s:
            raise ValueError(f"time_s ({self.time_s:g}) is more than max_time_s ({self.max_time_s:g})")
        return self


TaskConfig = Annotated[
    MathConfig | ReasoningGymConfig | FunctionConfig | CodeConfig | HiddenProgramsConfig, Field(discriminator="kind")
]
