"""Responses to benchmarks, kept: sampling what is missing, one model in memory at a time, and grading again.

`rollouts/MODEL/BENCHMARK/run-R-chunk-C.parquet` holds one chunk of problems in one run, in the schema of rollout logs;
`step` is the run. Its random draws are a function of (seed, model, benchmark, run, chunk) alone.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch

from graftrl.chunks import CHUNK, Progress, chunk_sizes, fill, prompts_in
from graftrl.errors import DataError, ModelError
from graftrl.evaluation.benchmarks import Benchmark
from graftrl.evaluation.models import Subject
from graftrl.evaluation.scores import Answers, read_answers
from graftrl.logs.reader import RolloutLog
from graftrl.logs.rollouts import write_rollouts
from graftrl.policies.codec import Codec
from graftrl.policies.config import SamplingSettings
from graftrl.policies.hf import HFPolicy
from graftrl.policies.loading import context_length, load_skeleton, resolve
from graftrl.rollout import Prompt
from graftrl.seeds import derive_seed
from graftrl.tasks import VerificationPool, grade_groups
from graftrl.training.peers import regrade


@dataclass(frozen=True)
class Draws:
    """How responses are drawn. samples: per problem and run. max_tokens: of a response, EOS included."""

    seed: int
    samples: int
    temperature: float
    top_p: float
    max_tokens: int

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(max_response_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p)


class Responses:
    """The responses of an evaluation's folder, of all its models, benchmarks and runs."""

    def __init__(self, root: Path, draws: Draws, runs: int, limit: int | None) -> None:
        """limit: only the first problems of each benchmark; None for all."""
        self.root, self.draws, self.runs, self.limit = root, draws, runs, limit

    def file(self, model: str, benchmark: str, run: int, chunk: int) -> Path:
        """run and chunk count from 1."""
        return self.root / "rollouts" / model / benchmark / f"run-{run:02d}-chunk-{chunk:04d}.parquet"

    def wanted(self, benchmark: Benchmark) -> list[int]:
        """Problems of each chunk."""
        total = len(benchmark.prompts)
        return chunk_sizes(total if self.limit is None else min(self.limit, total), CHUNK)

    def files(self, model: str, benchmark: Benchmark) -> list[Path]:
        """All files of a model and benchmark, by run and chunk, whether they are there or not."""
        chunks = range(1, 1 + len(self.wanted(benchmark)))
        return [self.file(model, benchmark.name, run, chunk) for run in range(1, 1 + self.runs) for chunk in chunks]

    def complete(self, model: str, benchmark: Benchmark) -> bool:
        wanted = self.wanted(benchmark)
        files = self.files(model, benchmark)
        return all(prompts_in(file) >= wanted[i % len(wanted)] for i, file in enumerate(files))

    def answers(self, model: str, benchmark: Benchmark) -> Answers:
        """Of a model and benchmark that are complete."""
        problems = [prompt.id for prompt in benchmark.prompts[: self.limit]]
        return read_answers(self.files(model, benchmark), problems, self.runs, self.draws.samples)

    def sample(
        self, subjects: Sequence[Subject], benchmarks: Sequence[Benchmark], pool: VerificationPool, progress: Progress
    ) -> list[str]:
        """Sample and grade what is missing; models of which nothing is missing are not loaded.

        progress: counts problems over all models, benchmarks and runs.

        Returns:
            notes for people.

        Raises:
            ModelError: a model that cannot be loaded, or a problem that does not fit into its context.
        """
        problems = self.runs * sum(sum(self.wanted(benchmark)) for benchmark in benchmarks)
        needy = self._needy(subjects, benchmarks)
        notes: list[str] = []
        for index, subject in enumerate(subjects):
            done, total = index * problems, len(subjects) * problems
            if subject in needy:
                policy = self._load(subject, benchmarks)
                notes += policy.notes
                for benchmark in benchmarks:
                    for run in range(1, 1 + self.runs):
                        self._fill(policy, subject, benchmark, run, pool, _further(progress, done, total))
                        done += sum(self.wanted(benchmark))
                del policy
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            progress((index + 1) * problems, total)
        return notes

    def _fill(
        self,
        policy: HFPolicy,
        subject: Subject,
        benchmark: Benchmark,
        run: int,
        pool: VerificationPool,
        progress: Progress,
    ) -> None:
        draws = self.draws

        def answer(index: int, size: int) -> None:
            prompts = benchmark.prompts[index * CHUNK : index * CHUNK + size]
            seed = derive_seed(draws.seed, "evaluation", subject.name, benchmark.name, run, index)
            groups = policy.sample(prompts, draws.samples, seed, draws.sampling)
            grade_groups(benchmark.task, groups, pool)
            write_rollouts(
                self.file(subject.name, benchmark.name, run, index + 1),
                run=self.root.resolve().name,
                step=run,
                groups={subject.name: groups},
                sampling=draws.sampling,
                fingerprints={subject.name: policy.codec.fingerprint},
                policy_version=subject.step or 0,
            )

        def finished(index: int) -> int:
            return prompts_in(self.file(subject.name, benchmark.name, run, index + 1))

        fill(self.wanted(benchmark), finished, answer, progress)

    # Models ---------------------------------------------------------------------------------------------------------

    def check(self, subjects: Sequence[Subject], benchmarks: Sequence[Benchmark]) -> None:
        """What can be told of the models without their weights, of those that are to be loaded. Raises as `sample`."""
        for subject in self._needy(subjects, benchmarks):
            if not resolve(subject.name, subject.settings).endswith(".gguf"):  # which has no skeleton
                model, codec = load_skeleton(subject.name, subject.settings)
                self._check_lengths(subject, benchmarks, codec, context_length(model))

    def _needy(self, subjects: Sequence[Subject], benchmarks: Sequence[Benchmark]) -> list[Subject]:
        return [s for s in subjects if not all(self.complete(s.name, benchmark) for benchmark in benchmarks)]

    def _load(self, subject: Subject, benchmarks: Sequence[Benchmark]) -> HFPolicy:
        policy = HFPolicy(subject.name, subject.settings, self.draws.sampling, subject.adapter)
        self._check_lengths(subject, benchmarks, policy.codec, context_length(policy.loaded.causal_lm))
        return policy

    def _check_lengths(
        self, subject: Subject, benchmarks: Sequence[Benchmark], codec: Codec, context: int | None
    ) -> None:
        for benchmark in benchmarks:
            for prompt in benchmark.prompts[: self.limit]:
                length = len(codec.prompt_token_ids(prompt))
                if length == 0:
                    raise ModelError(f"model {subject.name!r}: problem {prompt.id!r} of {benchmark.name} has no token")
                if context is not None and length + self.draws.max_tokens > context:
                    raise ModelError(
                        f"model {subject.name!r} has {context} positions, but problem {prompt.id!r} of "
                        f"{benchmark.name} takes {length} and --max-tokens {self.draws.max_tokens}; set --max-tokens "
                        f"to {context - length} or less"
                        if length < context
                        else f"model {subject.name!r} has {context} positions, but problem {prompt.id!r} of "
                        f"{benchmark.name} takes {length}"
                    )


def _further(progress: Progress, done: int, total: int) -> Progress:
    return lambda new, _: progress(done + new, total)


# Grading again --------------------------------------------------------------------------------------------------------


def logged_prompts(files: Sequence[Path]) -> list[Prompt]:
    """The prompts of some chunks, each once, in the order of the files."""
    found: dict[str, Prompt] = {}
    for file in files:
        for prompt_id, messages, reference, task in (
            pl.read_parquet(file, columns=["prompt_id", "messages", "reference", "task"])
            .unique("prompt_id", maintain_order=True)
            .iter_rows()
        ):
            found.setdefault(prompt_id, Prompt(prompt_id, tuple(messages), reference, task))
    return list(found.values())


def grade_again(file: Path, benchmark: Benchmark, pool: VerificationPool) -> int:
    """Put the current verifier's rewards into a chunk, in place; returns how many differ from those before."""
    log = RolloutLog(file)
    (model,) = log.models
    frame = pl.read_parquet(file, columns=["run", "step", "prompt_id", "policy_version", "tokenizer_fingerprint"])
    sampling = pl.read_parquet(file, columns=["temperature", "top_p", "top_k"]).row(0, named=True)
    first = frame.row(0, named=True)
    keys = [(first["step"], prompt_id) for prompt_id in frame["prompt_id"].unique(maintain_order=True)]
    groups = list(log.groups(model, keys).values())
    prompts = {prompt.id: prompt for prompt in benchmark.prompts}
    for group in groups:
        if group.prompt.id not in prompts:
            raise DataError(f"{file}: {benchmark.name} has no problem {group.prompt.id!r}")
        group.prompt = prompts[group.prompt.id]
    changed = regrade(benchmark.task, groups, pool)
    write_rollouts(
        file,
        run=first["run"],
        step=first["step"],
        groups={model: groups},
        sampling=SamplingSettings(**sampling),
        fingerprints={model: first["tokenizer_fingerprint"]},
        policy_version=first["policy_version"],
    )
    return changed
