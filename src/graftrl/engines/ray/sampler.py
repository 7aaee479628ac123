"""A vLLM sampler, in a process of its own: prompts of token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftrl.engines.ray.weights import Chunk, Route
from graftrl.policies.config import SamplingSettings
from graftrl.policies.sampling import Sampled

Ids = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True)
class SamplerOptions:
    """path: of the model's config and first weights. sleeps: it gives its memory away between samplings. memory_share:
    of a GPU's memory. eager: without compiling and captured graphs, which pays only on a GPU."""

    path: str
    dtype: str
    max_tokens: int
    tensor_parallel: int = 1
    memory_share: float = 0.85
    sleeps: bool = False
    eager: bool = False
    trust_remote_code: bool = False


class Sampler:
    """Owns one vLLM engine. The model's conventions are the caller's: it knows neither tokenizer nor template."""

    def __init__(self, options: SamplerOptions) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # this process is the engine's already
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        self._options = options
        self._llm = LLM(
            model=options.path,
            skip_tokenizer_init=True,
            dtype=options.dtype,
            generation_config="vllm",  # the model's own would cut the distribution
            max_model_len=options.max_tokens,
            tensor_parallel_size=options.tensor_parallel,
            gpu_memory_utilization=options.memory_share,
            enable_sleep_mode=options.sleeps,
            enforce_eager=options.eager,
            trust_remote_code=options.trust_remote_code,
            logprobs_mode="processed_logprobs",  # those of the distribution that was drawn from
            worker_extension_cls="graftrl.engines.ray.vllm_worker.TakesWeights",
            seed=0,
        )
        self._asleep = False

    def sample(
        self, prompts: Sequence[Ids], n: int, seeds: Sequence[int], sampling: SamplingSettings, eos_ids: Sequence[int]
    ) -> list[list[Sampled]]:
        """n responses to each prompt, drawn from the prompt's seed: whoever samples beside it changes nothing."""
        from vllm import SamplingParams

        wanted = [
            SamplingParams(
                n=n,
                seed=seed,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_response_tokens,
                stop_token_ids=list(eos_ids),
                ignore_eos=True,  # those ids say it all
                logprobs=0,  # of the drawn token alone
                detokenize=False,
            )
            for seed in seeds
        ]
        self.wake()
        outputs = self._llm.generate(_inputs(prompts), wanted, use_tqdm=False)
        return [
            [
                Sampled(
                    np.array(one.token_ids, np.int64),
                    np.array([of[i].logprob for i, of in zip(one.token_ids, one.logprobs, strict=True)], np.float32),
                    one.finish_reason == "stop",
                )
                for one in sorted(output.outputs, key=lambda one: one.index)
            ]
            for output in outputs
        ]

    def score(self, sequences: Sequence[tuple[Ids, Ids]]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the second ids of each pair after the first, float32 [T]."""
        from vllm import SamplingParams

        self.wake()
        whole = [[*map(int, prompt), *map(int, response)] for prompt, response in sequences]
        options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate(_inputs(whole), options, use_tqdm=False)
        return [
            np.array(
                [
                    of[i].logprob
                    for i, of in zip(ids[len(prompt) :], output.prompt_logprobs[len(prompt) :], strict=True)
                ],
                np.float32,
            )
            for ids, output, (prompt, _) in zip(whole, outputs, sequences, strict=True)
        ]

    def join(self, route: Route) -> None:
        """Open this sampler's end of a link to a trainer, which opens its own at the same time."""
        self._llm.collective_rpc("graftrl_join", args=(route,))

    def take(self, chunks: Sequence[Chunk]) -> float:
        """Put the weights that come over the link in the place of those it has; the seconds without waiting for them.

        chunks: in the order in which the trainer sends them, which it does at the same time.
        """
        self.wake()
        return self._renewed(self._llm.collective_rpc("graftrl_take", args=(chunks, self._options.dtype)))

    def load(self, parts: Sequence[Any]) -> float:
        """As `take`, from references to a chunk and its bytes each, as `Trainer.weights` gives them."""
        import ray

        self.wake()
        found = [ray.get(part) for part in parts]  # views of the object store
        if self._options.tensor_parallel == 1:
            return self._renewed(self._llm.collective_rpc("graftrl_read", args=(found, self._options.dtype)))
        folder = Path(tempfile.mkdtemp(prefix="graftrl-weights-", dir=_roomy(sum(data.nbytes for _, data in found))))
        try:  # the devices' processes see no object store
            files = [(chunk, folder / str(number)) for number, (chunk, _) in enumerate(found)]
            for (_, file), (_, data) in zip(files, found, strict=True):
                data.tofile(file)
            return self._renewed(self._llm.collective_rpc("graftrl_read", args=(files, self._options.dtype)))
        finally:
            shutil.rmtree(folder)

    def _renewed(self, seconds: Sequence[float]) -> float:
        self._llm.reset_prefix_cache()  # keys and values of the old weights
        return max(seconds)

    def sleep(self) -> None:
        """Give the memory of cache and weights away, where it was made to."""
        if self._options.sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def pid(self) -> int:
        return os.getpid()


def _roomy(size: int) -> Path | None:
    """A folder in memory if it has the room, else the one for temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 * size else None


def _inputs(prompts: Sequence[Ids]) -> list[Any]:
    return [{"prompt_token_ids": [int(i) for i in ids]} for ids in prompts]
