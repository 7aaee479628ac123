"""Memory and time of reading rollout logs by size; run as `python benchmarks/log_memory.py [responses ...]`.

A log of step files (128 prompts x 8 responses of 20 to 100 tokens a step) is written once per size, then each
operation runs in a fresh interpreter, which reports by how much its resident memory grew at most and the seconds spent.
`one file` is the same log as a single Parquet file, the worst case for reading one step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from common import peak_resident_bytes, reset_peak
from graftrl.logs.reader import RolloutLog
from graftrl.logs.rollouts import ROLLOUT_SCHEMA, step_file_name, write_frame
from graftrl.logs.summary import summarize
from graftrl.logs.validate import validate_log
from graftrl.viewer.index import LogIndex, Query

SIZES = (100_000, 1_000_000)
PROMPTS, GROUP = 128, 8
ROWS = PROMPTS * GROUP
DATASET = 12_000  # prompts that steps draw from, in turn


def step_frame(step: int, rng: np.random.Generator) -> pl.DataFrame:
    lengths = rng.integers(20, 101, ROWS)
    tokens = pl.DataFrame(
        {
            "response": np.repeat(np.arange(ROWS), lengths),
            "token_ids": rng.integers(0, 32_000, lengths.sum()),
            "logprobs": -rng.exponential(0.4, lengths.sum()),
        }
    )
    lists = tokens.group_by("response", maintain_order=True).agg("token_ids", "logprobs")
    first = (step - 1) * PROMPTS
    prompts = np.repeat(np.arange(first, first + PROMPTS) % DATASET, GROUP)
    words = [pl.Series(rng.integers(0, 10**18, ROWS)) for _ in range(10)]
    columns = {
        "run": ["synthetic"] * ROWS,
        "step": [step] * ROWS,
        "model": ["small"] * ROWS,
        "policy_version": [step - 1] * ROWS,
        "prompt_id": [f"train-{i}" for i in prompts],
        "task": ["math"] * ROWS,
        "messages": [[{"role": "user", "content": f"What is the answer to problem {i}? " * 4}] for i in prompts],
        "reference": [str(i) for i in prompts],
        "response_index": np.tile(np.arange(GROUP), PROMPTS),
        "text": pl.select(pl.format(" ".join(["{}"] * 10), *words)).to_series(),
        "token_ids": lists["token_ids"],
        "logprobs": lists["logprobs"],
        "finish_reason": ["stop"] * ROWS,
        "reward": (rng.random(ROWS) < 0.3).astype(float),
        "grade_reason": ["correct"] * ROWS,
        "advantage": rng.normal(size=ROWS),
        "temperature": [1.0] * ROWS,
        "top_p": [1.0] * ROWS,
        "top_k": [0] * ROWS,
        "tokenizer_fingerprint": ["0123456789abcdef"] * ROWS,
    }
    return pl.DataFrame([pl.Series(name, columns[name]).cast(dtype) for name, dtype in ROLLOUT_SCHEMA.items()])


def write_log(responses: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    for step in range(1, responses // ROWS + 1):
        write_frame(folder / step_file_name(step), step_frame(step, rng))


def read_one_step(path: Path) -> int:
    log = RolloutLog(path)
    middle = log.steps("small")[len(log.steps("small")) // 2]
    keys = [(middle, prompt_id) for prompt_id in log.group_index("small").filter(step=middle)["prompt_id"]]
    return len(log.groups("small", keys))


def view_list(path: Path) -> int:
    return LogIndex(path).current().find(Query(reward="mixed")).height


def view_search(path: Path) -> int:
    return LogIndex(path).current().find(Query(text="123456")).height


def view_prompt(path: Path) -> int:
    log = LogIndex(path).current()
    group = log.groups.row(log.groups.height // 2, named=True)
    return log.responses(group["step"], group["prompt_id"]).height


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "open": RolloutLog,
    "inspect": summarize,
    "validate": lambda path: sum(1 for _ in validate_log(path)),
    "group index": lambda path: RolloutLog(path).group_index("small").height,
    "index and one step": read_one_step,
    "view: list": view_list,
    "view: search texts": view_search,
    "view: one prompt": view_prompt,
}


def measure_here(operation: str, path: Path) -> dict[str, float]:
    reset_peak()
    before, start = peak_resident_bytes(), time.perf_counter()
    OPERATIONS[operation](path)
    return {"seconds": time.perf_counter() - start, "megabytes": (peak_resident_bytes() - before) / 1e6}


def measure(operation: str, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--operation", operation, str(path)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main(sizes: list[int]) -> None:
    print(f"{'responses':>11} {'layout':>10} {'GB':>6}  {'operation':<20} {'peak MB':>8} {'seconds':>8}")
    for responses in sizes:
        with tempfile.TemporaryDirectory() as name:
            steps = Path(name) / "steps"
            write_log(responses, steps)
            layouts = {"steps": steps}
            if responses <= 1_000_000:
                single = Path(name) / "log.parquet"
                pl.scan_parquet(str(steps / "*.parquet")).sink_parquet(
                    single, metadata={"graftrl": '{"schema_version": 1}'}
                )
                layouts["one file"] = single
            for layout, path in layouts.items():
                files = [path] if path.is_file() else list(path.iterdir())
                size = sum(file.stat().st_size for file in files) / 1e9
                for operation in OPERATIONS:
                    result = measure(operation, path)
                    print(
                        f"{responses:>11,} {layout:>10} {size:>6.2f}  {operation:<20} "
                        f"{result['megabytes']:>8.0f} {result['seconds']:>8.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--operation"]:
        print(json.dumps(measure_here(sys.argv[2], Path(sys.argv[3]))))
    else:
        main([int(size) for size in sys.argv[1:]] or list(SIZES))
