"""What the benchmarks share: a random tiny model with its tokenizer, prompts, a reward; readings of memory and machine,
and how far gradients are apart."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import math
import os
import platform
import string
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

HERE = Path(__file__).resolve().parent


DEFAULT_THREADS = torch.get_num_threads()  # one a core


def default_threads() -> None:
    torch.set_num_threads(DEFAULT_THREADS)


def one_thread() -> None:
    """As the laboratory's runs: several side by side, each on one thread."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Setting:
    """One step: `prompts` x `group` responses of `new_tokens` tokens each, trained in microbatches of `microbatch_rows`
    rows, one optimizer step."""

    name: str
    vocabulary: int
    prompts: int
    group: int
    new_tokens: int
    microbatch_rows: int
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 256
    shortest_prompt: int = 8
    longest_prompt: int = 24

    @property
    def rows(self) -> int:
        return self.prompts * self.group


SMALL = Setting("small", vocabulary=400, prompts=32, group=8, new_tokens=64, microbatch_rows=32)
WIDE = Setting("wide", vocabulary=151_936, prompts=8, group=8, new_tokens=32, microbatch_rows=32)
SETTINGS = {setting.name: setting for setting in (SMALL, WIDE)}


def save_model(setting: Setting, folder: Path, seed: int = 0) -> None:
    """A Qwen2 model with random weights (tied head) and a byte-level tokenizer that merges letters."""
    torch.manual_seed(seed)
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    pairs = [a + b for a, b in itertools.product(letters, repeat=2)]
    candidates = itertools.chain(
        itertools.product(letters, repeat=2), itertools.product(pairs, letters), itertools.product(pairs, repeat=2)
    )
    merges = list(itertools.islice(candidates, setting.vocabulary - len(byte_tokens) - 2))
    tokens = [*byte_tokens, *(a + b for a, b in merges), "<|pad|>", "<|endoftext|>"]
    Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, pad_token="<|pad|>"
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden,
        intermediate_size=setting.feed_forward,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=setting.vocabulary - 1,
        pad_token_id=setting.vocabulary - 2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def prompt_texts(setting: Setting, steps: int) -> list[str]:
    """Distinct prompts for `steps` steps; each step's longest has the same length. A digit is a token."""
    rng = np.random.default_rng(1)
    texts = []
    for i in range(setting.prompts * steps):
        length = setting.longest_prompt
        if i % setting.prompts:
            length = int(rng.integers(setting.shortest_prompt, setting.longest_prompt + 1))
        texts.append("".join(str(digit) for digit in rng.integers(0, 10, size=length)))
    return texts


def coin(text: str) -> float:
    """A deterministic reward that half of all texts get, so that almost every group is mixed and no row is spared."""
    return float(zlib.crc32(text.encode()) & 1)


# Equality -------------------------------------------------------------------------------------------------------------


def gradient_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference over the norm of their gradients, by the parameters' names; and that norm.

    Raises:
        RuntimeError: not the same parameters, or gradients that tell nothing: theirs all 0, or some not finite.
    """
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    size = float(torch.stack([g.norm() for g in theirs.values()]).norm())
    difference = float(torch.stack([(ours[name] - g).norm() for name, g in theirs.items()]).norm())
    if not (math.isfinite(difference) and 0 < size < math.inf):
        raise RuntimeError(f"gradients that cannot be compared: norm {size}, difference {difference}")
    return difference / size, size


# Memory ---------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The largest resident set since the start or the last `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Give freed memory back to the system, then start the kernel's high-water mark anew from here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


# Running and reporting ------------------------------------------------------------------------------------------------


def machine(packages: tuple[str, ...] = ("torch", "transformers", "trl", "numpy", "graftrl")) -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "torch_threads": DEFAULT_THREADS,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def in_subprocess(script: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark script in a fresh interpreter; it writes its result as JSON to the file given last."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        subprocess.run([sys.executable, str(HERE / script), *arguments, str(result)], check=True, cwd=HERE)
        found: dict[str, Any] = json.loads(result.read_text())
    return found
