"""`graftrl eval`: from what a user asks to tables on the terminal and a folder that keeps every response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console

from graftrl.chunks import EVALUATION, model_files, model_record, shown, told_where
from graftrl.errors import ConfigError, RunError
from graftrl.evaluation.benchmarks import (
    Benchmark,
    BenchmarkOptions,
    find_benchmarks,
    reopen,
    task_benchmark,
    with_unusable,
)
from graftrl.evaluation.models import Subject, find_models
from graftrl.evaluation.passk import powers_up_to
from graftrl.evaluation.plots import pass_at_k_curves
from graftrl.evaluation.report import BenchmarkInfo, EvaluationReport, listed, print_report, to_latex, to_markdown
from graftrl.evaluation.sampling import Draws, Responses, grade_again, logged_prompts
from graftrl.evaluation.scores import Answers, compare_models, score_model
from graftrl.report.plots import require_matplotlib, save
from graftrl.tasks import VerificationPool
from graftrl.training.run_folder import RunFolder, disk_errors, write_text

RESULTS, MARKDOWN, LATEX, PROBLEMS = "results.json", "results.md", "results.tex", "problems.csv"
PASS_AT_K = "pass-at-k"  # .svg and .png
MAX_TOKENS = 4096  # the paper's response limit
_AGAIN = "the same command goes on where this one stopped"
_MANY_CUT = 0.1  # share of responses; beyond it a score is in part that of the limit
_PLACES = ("source", "train", "validation")  # where a benchmark's problems lie, which may move


@dataclass(frozen=True)
class EvalRequest:
    """What was asked for on the command line; None is "not given".

    benchmarks: names or paths; none for the validation prompts of the runs that the models come from.
    samples: responses to a problem in each of `runs`. limit: only the first problems of each benchmark.
    k: of pass@k. model_options: of `ModelSettings`. latex: also write results.tex. plots: also
    draw pass@k.
    """

    models: Sequence[str] = ()
    benchmarks: Sequence[str] = ()
    benchmark_options: BenchmarkOptions = field(default_factory=BenchmarkOptions)
    model_options: Mapping[str, Any] | None = None
    samples: int = 8
    runs: int = 5
    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int | None = None
    limit: int | None = None
    k: Sequence[int] = ()
    seed: int = 0
    threads: int | None = None
    workers: int = 2
    limit_s: float = 5.0
    out: Path | None = None
    latex: bool = False
    plots: bool = False


def run_evaluation(
    request: EvalRequest, console: Console | None = None, progress: Console | None = None
) -> EvaluationReport:
    """Sample what is missing, grade, compute, write results, print.

    Args:
        console: for the result; None prints nothing. progress: for what is done so far; standard error if None.

    Raises:
        GraftrlError: one line that says what to mend. Chunks of problems that were finished are kept.
    """
    if request.plots:
        require_matplotlib()
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    ks = _ks(request)
    subjects = find_models(request.models, dict(request.model_options or {}))
    benchmarks = _benchmarks(request, subjects)
    draws = Draws(
        seed=request.seed,
        samples=request.samples,
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=_max_tokens(request, subjects),
    )
    root = request.out or Path("runs") / f"eval-{'-'.join(subject.name for subject in subjects)}"[:100]
    responses = Responses(root, draws, request.runs, request.limit)
    pool = VerificationPool(request.workers, request.limit_s)
    with pool, disk_errors(root, again=_AGAIN, option="--out"):
        _asked(root, request, draws, subjects, benchmarks, ks)
        responses.check(subjects, benchmarks)  # before the folder is there, which a mistake should not leave behind
        root.mkdir(parents=True, exist_ok=True)
        with RunFolder(root).locked("--out"), told_where(root, "problems"):
            asked, files = _asked(root, request, draws, subjects, benchmarks, ks)
            EVALUATION.write(root, asked, files)
            with shown("problems", progress) as progressed:
                notes = responses.sample(subjects, benchmarks, pool, progressed)
            notes = [*dict.fromkeys(subject.note for subject in subjects if subject.note is not None), *notes]
            report, written = _finish(responses, asked, benchmarks, notes, latex=request.latex, plots=request.plots)
    if console is not None:
        _print(report, written, console)
    return report


def run_regrade(
    root: Path,
    console: Console | None = None,
    progress: Console | None = None,
    *,
    workers: int = 2,
    limit_s: float = 5.0,
    latex: bool = False,
    plots: bool = False,
) -> EvaluationReport:
    """Grade every response in the folder again with the current verifier, and write and print the results anew.

    Raises:
        RunError: the folder holds no evaluation, or one that is not finished (what is there is graded all the same).
        GraftrlError: one line that says what to mend. Files that were graded again stay so.
    """
    if plots:
        require_matplotlib()
    held = EVALUATION.read(root) if root.is_dir() else None
    if held is None:
        raise RunError(f"{root} holds no evaluation to grade again")
    asked = held[0]
    with disk_errors(root, again="the same command grades again", option="folder"), RunFolder(root).locked("folder"):
        benchmarks, changed = _grade_all(root, asked, workers, limit_s, progress)
        wanted, draws = asked["report"], Draws(**asked["settings"])
        responses = Responses(root, draws, wanted["runs"], wanted["limit"])
        chosen = [benchmarks[name] for name in wanted["benchmarks"] if name in benchmarks]
        if len(chosen) < len(wanted["benchmarks"]) or not all(
            responses.complete(model, benchmark) for model in wanted["models"] for benchmark in chosen
        ):
            raise RunError(
                f"{root}: {changed} rewards changed; the evaluation is not finished, so that there are no results "
                "yet: give its command again"
            )
        total = f"graded again with graftrl's current verifier: {changed} rewards changed"
        report, written = _finish(responses, asked, chosen, [total], latex=latex, plots=plots)
    if console is not None:
        _print(report, written, console)
    return report


def _grade_all(
    root: Path, asked: dict[str, Any], workers: int, limit_s: float, progress: Console | None
) -> tuple[dict[str, Benchmark], int]:
    """The benchmarks that have responses, and how many rewards changed."""
    files = {name: sorted((root / "rollouts").glob(f"*/{name}/run-*-chunk-*.parquet")) for name in asked["benchmarks"]}
    files = {name: of for name, of in files.items() if of}
    reopened = [reopen(name, asked["benchmarks"][name], logged_prompts(of)) for name, of in files.items()]
    benchmarks = {benchmark.name: benchmark for benchmark in with_unusable(reopened)}
    changed = done = 0
    with VerificationPool(workers, limit_s) as pool, shown("files", progress) as progressed:
        for name, of_benchmark in files.items():
            for file in of_benchmark:
                changed += grade_again(file, benchmarks[name], pool)
                done += 1
                progressed(done, sum(len(of) for of in files.values()))
    return benchmarks, changed


# What was asked -------------------------------------------------------------------------------------------------------


def _ks(request: EvalRequest) -> list[int]:
    """1 and those asked for; by default the powers of two up to the number of responses, and that number.

    Raises:
        ConfigError: pass@k of more responses than there are.
    """
    responses = request.samples * request.runs
    if not request.k:
        return powers_up_to(responses)
    ks = sorted({1, *request.k})
    if ks[0] < 1 or ks[-1] > responses:
        k = ks[0] if ks[0] < 1 else ks[-1]
        raise ConfigError(
            f"--k {k}: pass@k needs k between 1 and the {responses} responses to a problem (--samples "
            f"{request.samples} x --runs {request.runs}); draw more or choose another k"
        )
    return ks


def _benchmarks(request: EvalRequest, subjects: Sequence[Subject]) -> list[Benchmark]:
    if request.benchmarks:
        return find_benchmarks(request.benchmarks, request.benchmark_options)
    tasks = [subject.recipe.task if subject.recipe is not None else None for subject in subjects]
    if tasks[0] is None or any(task != tasks[0] for task in tasks):
        raise ConfigError(
            "say what to evaluate on: --benchmarks math500,... or files; only runs on one task are evaluated on its "
            "validation prompts without it"
        )
    origin = subjects[0].origin.rpartition(":")[0]
    return with_unusable([task_benchmark("validation", tasks[0], origin)])


def _max_tokens(request: EvalRequest, subjects: Sequence[Subject]) -> int:
    """The limit that was given, else that of the runs' recipes if all models come from runs and agree."""
    if request.max_tokens is not None:
        return request.max_tokens
    limits = {s.recipe.sampling.max_response_tokens if s.recipe is not None else None for s in subjects}
    limit = limits.pop() if len(limits) == 1 else None
    return MAX_TOKENS if limit is None else limit


def _asked(
    root: Path,
    request: EvalRequest,
    draws: Draws,
    subjects: Sequence[Subject],
    benchmarks: Sequence[Benchmark],
    ks: Sequence[int],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the folder's record is to say, and the models' files; models and benchmarks add to those that it has.

    Raises:
        RunError: the folder holds responses that were drawn otherwise, from other weights or to other problems.
    """
    models = {
        s.name: {
            "origin": s.origin,
            **model_record(s.settings),
            "adapter": None if s.adapter is None else str(s.adapter),
        }
        for s in subjects
    }
    asked = {
        "settings": asdict(draws),
        "models": models,
        "benchmarks": {benchmark.name: benchmark.record() for benchmark in benchmarks},
        "report": {
            "models": list(models),
            "benchmarks": [benchmark.name for benchmark in benchmarks],
            "runs": request.runs,
            "limit": request.limit,
            "k": list(ks),
        },
    }
    files = {s.name: found for s in subjects if (found := model_files(s.files_at))}
    held = EVALUATION.read(root)
    if held is not None and any((root / "rollouts").glob("*/*/*.parquet")):
        before, files_then = held
        EVALUATION.refuse_other(root, _decisive(before, asked), _decisive(asked, before))
        EVALUATION.refuse_changed(root, files_then, files)
        for section in ("models", "benchmarks"):
            asked[section] = {**before[section], **asked[section]}
        files = {**files_then, **files}
    return asked, files


def _decisive(record: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What decides responses and rewards, of the models and benchmarks that another record has too."""
    models = {
        name: {key: value for key, value in model.items() if key != "origin"}
        for name, model in record["models"].items()
        if name in other["models"]
    }
    benchmarks = {
        name: {
            "problems": benchmark["problems"],
            "sha256": benchmark["sha256"],
            "config": {key: value for key, value in benchmark["config"].items() if key not in _PLACES},
        }
        for name, benchmark in record["benchmarks"].items()
        if name in other["benchmarks"]
    }
    return {"settings": record["settings"], "models": models, "benchmarks": benchmarks}


# Results --------------------------------------------------------------------------------------------------------------


def _finish(
    responses: Responses,
    asked: Mapping[str, Any],
    benchmarks: Sequence[Benchmark],
    notes: Sequence[str],
    *,
    latex: bool,
    plots: bool,
) -> tuple[EvaluationReport, list[Path]]:
    """Compute the result and write it; returns it and the files for people, the JSON first."""
    wanted, root = asked["report"], responses.root
    answers = {
        model: {benchmark.name: responses.answers(model, benchmark) for benchmark in benchmarks}
        for model in wanted["models"]
    }
    info = {
        b.name: BenchmarkInfo(
            kind=b.kind,
            origin=b.origin,
            problems=sum(responses.wanted(b)),
            of=asked["benchmarks"][b.name]["problems"],
            unusable=[prompt.id for prompt in b.prompts[: responses.limit] if prompt.id in set(b.unusable)],
        )
        for b in benchmarks
    }
    report = EvaluationReport(
        settings={**asked["settings"], "runs": wanted["runs"]},
        benchmarks=info,
        origins={model: asked["models"][model]["origin"] for model in wanted["models"]},
        models={model: score_model(of, wanted["k"]) for model, of in answers.items()},
        comparisons=compare_models(answers) if len(answers) > 1 else [],
        notes=[*notes, *(note for b in benchmarks for note in b.notes), *_notes(info, answers, asked["settings"])],
    )
    write_text(root / PROBLEMS, _per_problem(answers).write_csv())
    files = [root / RESULTS, root / MARKDOWN]
    write_text(root / MARKDOWN, to_markdown(report))
    if latex:
        files.append(root / LATEX)
        write_text(root / LATEX, to_latex(report))
    if plots:
        files += save({PASS_AT_K: pass_at_k_curves(report)}, root)
    write_text(root / RESULTS, report.to_json() + "\n")
    return report, files


def _notes(
    info: Mapping[str, BenchmarkInfo], answers: Mapping[str, Mapping[str, Answers]], settings: Mapping[str, Any]
) -> list[str]:
    notes = []
    for name, of in info.items():
        if of.problems < of.of:
            notes.append(
                f"{name}: only the first {of.problems} of {of.of} problems; not comparable with published scores"
            )
        if of.unusable:
            notes.append(
                f"{name}: {len(of.unusable)} of {of.problems} references cannot be graded against and count as wrong: "
                f"{listed(of.unusable)}"
            )
    for model, of_model in answers.items():
        late = sum(n for a in of_model.values() for reason, n in a.reasons.items() if reason.startswith("time limit"))
        if late:
            notes.append(f"{model}: {late} responses could not be graded within the time limit and count as wrong")
        for name, a in of_model.items():
            if (share := a.cut.sum() / (a.responses * len(a.problems))) > _MANY_CUT:
                notes.append(
                    f"{model}, {name}: {share:.0%} of the responses were cut at {settings['max_tokens']} tokens and "
                    "are mostly wrong for that; --max-tokens allows more"
                )
    if settings["temperature"] == 0:
        notes.append("temperature 0: all responses to a problem are the same")
    return notes


def _per_problem(answers: Mapping[str, Mapping[str, Answers]]) -> pl.DataFrame:
    rows = [
        (model, name, run + 1, problem, a.samples, *(int(x[run, i]) for x in (a.right, a.tokens, a.cut)))
        for model, of_model in answers.items()
        for name, a in of_model.items()
        for run in range(a.runs)
        for i, problem in enumerate(a.problems)
    ]
    columns = ("model", "benchmark", "run", "problem", "samples", "right", "tokens", "cut")
    return pl.DataFrame(rows, schema=columns, orient="row")


def _print(report: EvaluationReport, files: Sequence[Path], console: Console) -> None:
    print_report(report, console)
    for file in files:
        console.print(str(file), highlight=False, soft_wrap=True)
