"""Benchmarks: what is asked and how it is verified. Known ones by name, your own by file.

A benchmark names the kind of its task, which decides the verifier. Unlike training, evaluation leaves nothing out: a
problem whose reference cannot be graded against counts as wrong, so that a score has the benchmark's own denominator.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from graftrl.config import load_task, parse_task
from graftrl.errors import ConfigError, DataError
from graftrl.names import file_name
from graftrl.rollout import Prompt
from graftrl.tasks import MathVerifier, Task, build_task
from graftrl.tasks.base import Verifier
from graftrl.tasks.build import AnyTaskConfig, code_verifier, usable_references, with_final_answer
from graftrl.tasks.code.layouts import problem_of, read_problems
from graftrl.tasks.config import (
    FILE_SUFFIXES,
    MATH_SUFFIX,
    CodeConfig,
    DataSource,
    FunctionConfig,
    MathConfig,
    ProblemTemplate,
)
from graftrl.tasks.data import numbered_rows, read_prompts
from graftrl.tasks.functions import FunctionVerifier


@dataclass(frozen=True)
class Known:
    """Where the hub has a benchmark and in which fields. problems: of the published benchmark.

    kind: of its task; a "code" task finds its fields by itself. files: further names of a local copy. answer_after: as
    in `MathBenchmark`.
    """

    hub: str
    problems: int
    split: str = "test"
    subset: str | None = None
    id_field: str = "id"
    problem_field: str = "problem"
    answer_field: str = "answer"
    files: tuple[str, ...] = ()
    answer_after: str | None = None
    kind: Literal["math", "code"] = "math"


KNOWN: dict[str, Known] = {
    "math500": Known("HuggingFaceH4/MATH-500", 500, id_field="unique_id"),
    "aime2024": Known("HuggingFaceH4/aime_2024", 30, split="train"),
    "aime2025": Known("math-ai/aime25", 30),
    "amc23": Known("math-ai/amc23", 40, problem_field="question"),
    "minerva": Known("math-ai/minervamath", 272, problem_field="question", files=("minerva_math",)),
    "gsm8k": Known(
        "openai/gsm8k", 1319, subset="main", problem_field="question", files=("gsm8k_test",), answer_after="####"
    ),
    "olympiadbench": Known(
        "Hothan/OlympiadBench", 674, split="train", subset="OE_TO_maths_en_COMP", problem_field="question",
        answer_field="final_answer",
    ),
    "humaneval+": Known("evalplus/humanevalplus", 164, id_field="task_id", files=("HumanEvalPlus",), kind="code"),
    "mbpp+": Known("evalplus/mbppplus", 378, id_field="task_id", files=("MbppPlus",), kind="code"),
}  # fmt: skip


class MathBenchmark(ProblemTemplate):
    r"""Problems with a mathematical answer, graded on the last \boxed{}.

    answer_after: what stands before the final answer in a reference that is a whole solution, such as GSM8K's `####`.
    """

    kind: Literal["math"] = "math"
    source: DataSource
    suffix: str = MATH_SUFFIX
    require_box: bool = True
    answer_after: str | None = None


@dataclass(frozen=True)
class BenchmarkOptions:
    """What the command line says about benchmarks; None is "not given".

    data: a folder with local copies of known benchmarks. The fields are those of files. system and template are for all
    but YAML files, which have their own.
    """

    data: Path | None = None
    system: str | None = None
    template: str | None = None
    id_field: str | None = None
    problem_field: str | None = None
    answer_field: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        given = {name: getattr(self, name) for name in ("id_field", "problem_field", "answer_field")}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def words(self) -> dict[str, str]:
        """How a problem is put into words."""
        return {key: value for key in ("system", "template") if (value := getattr(self, key)) is not None}


@dataclass(frozen=True)
class Benchmark:
    """origin: where the problems come from. prompts: all of them, with `task` set to the benchmark's name.

    unusable: ids of problems whose reference cannot be graded against.
    """

    name: str
    kind: str
    origin: str
    config: MathBenchmark | AnyTaskConfig
    prompts: tuple[Prompt, ...]
    verifier: Verifier
    in_process: bool = False
    unusable: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def task(self) -> Task:
        """For `grade_groups`."""
        return Task(self.name, (), self.prompts, self.verifier, self.in_process)

    def record(self) -> dict[str, Any]:
        """What decides the responses and rewards, and enough to grade them again."""
        content = [[p.id, [dict(message) for message in p.messages], p.reference] for p in self.prompts]
        digest = hashlib.sha256(json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()
        config = self.config.model_dump(mode="json")
        return {"origin": self.origin, "config": config, "problems": len(self.prompts), "sha256": digest}


def find_benchmarks(names: Sequence[str], options: BenchmarkOptions) -> list[Benchmark]:
    """Load benchmarks by known name, by problem file (.jsonl, .ndjson, .parquet), or by a YAML file with a task
    section, whose validation prompts count.

    Raises:
        ConfigError: a name that is not known, two benchmarks of one name, options that do not fit.
        DataError: a file that is missing, cannot be read or holds no problem; a duplicate id.
    """
    if not names:
        raise ConfigError(f"no benchmark is named; known are {', '.join(KNOWN)}, or give a file")
    if options.data is not None and not options.data.is_dir():
        raise DataError(f"--data {options.data}: no such folder")
    if options.words and all(_is_task_file(name) for name in names):
        raise ConfigError(f"--{next(iter(options.words))} is for problem files; {names[0]} says it in its task section")
    found = [_find(name, options) for name in names]
    for benchmark in found:
        if sum(other.name == benchmark.name for other in found) > 1:
            origins = " and ".join(other.origin for other in found if other.name == benchmark.name)
            raise ConfigError(f"two benchmarks are called {benchmark.name!r} ({origins}); rename a file")
    return with_unusable(found)


def task_benchmark(name: str, config: AnyTaskConfig, origin: str) -> Benchmark:
    """A task's validation prompts as a benchmark, before its references were checked.

    Raises:
        DataError: the task has none, or they cannot be read.
    """
    if isinstance(config, MathConfig):
        if config.validation is None:
            raise DataError(f"{origin}: the task has no validation prompts; add task.validation")
        words: dict[str, Any] = {"system": config.system, "require_box": config.require_box}
        words |= {"suffix": config.suffix} if config.template is None else {"template": config.template}
        return _math(name, MathBenchmark(source=config.validation, **words), origin)
    if isinstance(config, FunctionConfig) and config.validation is not None:
        prompts: Sequence[Prompt] = read_prompts(config.validation, config, name)
        verifier: Verifier = FunctionVerifier(config.verifier)
        in_process, notes = False, tuple[str, ...]()
    elif isinstance(config, CodeConfig) and config.validation is not None:
        prompts = read_problems(config.validation, config)
        verifier, weaker = code_verifier(config)
        in_process, notes = False, tuple(weaker)
    else:
        task = build_task(config)
        prompts, verifier, in_process, notes = task.validation, task.verifier, task.in_process, task.notes
    if not prompts:
        raise DataError(f"{origin}: the task has no validation prompts")
    own = tuple(replace(prompt, task=name) for prompt in prompts)
    unusable = tuple(p.id for p in own if problem_of(p).fault) if isinstance(config, CodeConfig) else ()
    return Benchmark(name, config.kind, origin, config, own, verifier, in_process, unusable, notes)


def reopen(name: str, record: Mapping[str, Any], logged: Sequence[Prompt]) -> Benchmark:
    """A benchmark from its record, to grade responses again. Mathematics needs nothing but the log; other tasks are
    built anew, because their verifiers may read more of a problem than a log holds.

    Args:
        logged: its prompts, as the log has them.

    Raises:
        DataError: the task does not give the same prompts any more.
    """
    config, origin = record["config"], record["origin"]
    if config["kind"] == "math":
        settings = MathBenchmark.model_validate(config)
        return Benchmark(name, "math", origin, settings, tuple(logged), _math_verifier(settings))
    benchmark = task_benchmark(name, parse_task(config, origin), origin)
    if benchmark.record()["sha256"] != record["sha256"]:
        raise DataError(f"{origin}: its prompts are not those that were evaluated; they cannot be graded with it")
    return benchmark


def with_unusable(benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    """The benchmarks with `unusable` filled in; all mathematical references are checked in one go."""
    references = {
        prompt.reference for benchmark in benchmarks if benchmark.kind == "math" for prompt in benchmark.prompts
    }
    usable = usable_references(references)
    return [
        replace(b, unusable=tuple(prompt.id for prompt in b.prompts if prompt.reference not in usable))
        if b.kind == "math"
        else b
        for b in benchmarks
    ]


def _find(name: str, options: BenchmarkOptions) -> Benchmark:
    path = Path(name).expanduser()
    if name in KNOWN:
        return _known(name, KNOWN[name], options)
    if _is_task_file(name):
        return task_benchmark(file_name(path.stem), load_task(path), name)
    if path.name.endswith(FILE_SUFFIXES):
        source = DataSource(path=path, **options.fields)
        return _math(file_name(source.stem), _settings(source, options), name)
    local = None if options.data is None else _local_copy(options.data, (name,))
    if local is not None:
        return _math(file_name(name), _settings(DataSource(path=local, **options.fields), options), str(local))
    close = difflib.get_close_matches(name, KNOWN, n=1)
    suggestion = f"; did you mean {close[0]!r}?" if close else ";"
    raise ConfigError(
        f"unknown benchmark {name!r}{suggestion} known are {', '.join(KNOWN)}, or give a {', '.join(FILE_SUFFIXES)} or "
        ".yaml file"
    )


def _is_task_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _known(name: str, known: Known, options: BenchmarkOptions) -> Benchmark:
    if options.data is None:
        source = DataSource(
            hub=known.hub, subset=known.subset, split=known.split, id_field=known.id_field,
            problem_field=known.problem_field, answer_field=known.answer_field,
        )  # fmt: skip
    else:
        path = _local_copy(options.data, (name, *known.files))
        if path is None:
            tried = ", ".join(f"{stem}.jsonl" for stem in (name, *known.files))
            raise DataError(f"{options.data}: has no copy of {name}: none of {tried}, nor as .parquet")
        source = DataSource(path=path, **_fields_of_copy(path, known, options))
    try:
        if known.kind == "code":
            _check_template(options)
            config = CodeConfig(train=source, validation=source, **options.words)
            benchmark = task_benchmark(name, config, source.name)
        else:
            benchmark = _math(name, _settings(source, options, known.answer_after), source.name)
    except DataError as error:
        if options.data is not None:
            raise
        raise DataError(f"{error}; --data FOLDER reads {name}.jsonl or {name}.parquet from a folder instead") from error
    if len(benchmark.prompts) == known.problems:
        return benchmark
    note = (
        f"{name}: {source.name} has {len(benchmark.prompts)} problems, the published benchmark {known.problems}; "
        "scores do not compare exactly"
    )
    return replace(benchmark, notes=(*benchmark.notes, note))


def _local_copy(folder: Path, stems: Sequence[str]) -> Path | None:
    places = (folder / f"{stem}{suffix}" for stem in stems for suffix in FILE_SUFFIXES)
    return next((place for place in places if place.is_file()), None)


def _fields_of_copy(path: Path, known: Known, options: BenchmarkOptions) -> dict[str, str]:
    """A copy has the fields id, problem and answer, or the hub's own; the options overrule both."""
    row = next(iter(numbered_rows(DataSource(path=path))), (0, {}))[1]
    fields = {"id_field": "id" if "id" in row else known.id_field}
    if not {"problem", "answer"} <= row.keys() and {known.problem_field, known.answer_field} <= row.keys():
        fields |= {"problem_field": known.problem_field, "answer_field": known.answer_field}
    return {**fields, **options.fields}


def _check_template(options: BenchmarkOptions) -> None:
    if options.template is not None and "{problem}" not in options.template:
        raise ConfigError(f"--template {options.template!r} must contain {{problem}}")


def _settings(source: DataSource, options: BenchmarkOptions, answer_after: str | None = None) -> MathBenchmark:
    _check_template(options)
    return MathBenchmark(source=source, answer_after=answer_after, **options.words)


def _math(name: str, config: MathBenchmark, origin: str) -> Benchmark:
    source = config.source
    prompts = [with_final_answer(prompt, source.answer_field) for prompt in read_prompts(source, config, name)]
    mark = config.answer_after
    if mark is not None:
        # rpartition: all of a reference that has no mark
        prompts = [replace(prompt, reference=prompt.reference.rpartition(mark)[2].strip()) for prompt in prompts]
    return Benchmark(name, "math", origin, config, tuple(prompts), _math_verifier(config))


def _math_verifier(config: MathBenchmark) -> MathVerifier:
    return MathVerifier(require_box=config.require_box, check_reference=True)
