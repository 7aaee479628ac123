"""The least time a step could take here: its arithmetic and its bytes over this machine's measured rates.

Run as `python benchmarks/floor.py`. Rates are measured with torch's default threads: products of matrices at the step's
own shapes, exponentials in the cache, and a large copy. The floor of a phase is the larger of its arithmetic time and
its memory time; activations, attention, norms and everything between the products are taken to be free.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from common import SMALL, WIDE, Setting, default_threads


def best_seconds(work: Callable[[], object], repeats: int = 7, inner: int = 5) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            work()
        seconds.append((time.perf_counter() - start) / inner)
    return min(seconds)


def matmul_rate(m: int, k: int, n: int) -> float:
    """Floating-point operations per second of [m, k] @ [k, n]."""
    a, b, out = torch.randn(m, k), torch.randn(n, k), torch.empty(m, n)
    return 2 * m * k * n / best_seconds(lambda: torch.mm(a, b.t(), out=out))


def exp_rate() -> float:
    """Exponentials per second of an array that fits the cache."""
    x = torch.randn(1 << 17)
    out = torch.empty_like(x)
    return x.numel() / best_seconds(lambda: torch.exp(x, out=out))


def copy_rate() -> float:
    """Bytes read and written per second by a copy far larger than a core's cache."""
    x = torch.randn(1 << 25)
    out = torch.empty_like(x)
    return 2 * 4 * x.numel() / best_seconds(lambda: out.copy_(x), repeats=3, inner=1)


def floor(setting: Setting) -> dict[str, float]:
    """Seconds of sampling, training and both, with the counts and rates behind them."""
    hidden, kv = setting.hidden, setting.hidden * setting.kv_heads // setting.heads
    # Weights of the decoder's matrices: query and output, key and value, gate, up and down.
    decoder = setting.layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * setting.feed_forward)
    head = setting.vocabulary * hidden
    prompt = (setting.shortest_prompt + setting.longest_prompt) / 2
    drawn = setting.rows * setting.new_tokens
    rates = {
        # One step of decoding is a product with as many rows as there are responses.
        "decode_flops": matmul_rate(setting.rows, hidden, setting.feed_forward),
        "train_flops": matmul_rate(min(setting.microbatch_rows, 32) * 88, hidden, setting.feed_forward),
        "head_flops": matmul_rate(min(setting.rows, 256), hidden, min(setting.vocabulary, 1024)),
        "exps": exp_rate(),
        "bytes": copy_rate(),
    }
    # Sampling: 2 operations a weight and token; each prompt is read once. One exponential a logit.
    # Memory: all weights once a position, and the keys and values of all tokens so far.
    sampling = {
        "decoder_flops": 2 * decoder * (setting.prompts * prompt + drawn),
        "head_flops": 2 * head * drawn,
        "exps": drawn * setting.vocabulary,
        "bytes": 4 * (decoder + head) * setting.new_tokens
        + 4 * 2 * setting.layers * kv * drawn * (prompt + setting.new_tokens / 2),
    }
    # Training: forward, gradient of the input, gradient of the weight: 6 operations a weight and token, a prompt's
    # tokens once for its group. The head needs response tokens only; keeping its logits would spare it nothing but 2
    # more.
    # Memory: AdamW reads and writes weight and both moments, and reads the gradient.
    training = {
        "decoder_flops": 6 * decoder * (setting.prompts * prompt + drawn),
        "head_flops": 6 * head * drawn,
        "exps": drawn * setting.vocabulary,
        "bytes": 4 * 7 * (decoder + head),
    }
    result = {f"rate_{name}": rate for name, rate in rates.items()}
    for name, work, decoder_rate in (
        ("sampling", sampling, rates["decode_flops"]),
        ("training", training, rates["train_flops"]),
    ):
        arithmetic = (
            work["decoder_flops"] / decoder_rate
            + work["head_flops"] / rates["head_flops"]
            + work["exps"] / rates["exps"]
        )
        result[f"{name}_seconds"] = max(arithmetic, work["bytes"] / rates["bytes"])
        result |= {f"{name}_{key}": float(count) for key, count in work.items()}
    result["seconds"] = result["sampling_seconds"] + result["training_seconds"]
    return result


def report(setting: Setting, found: dict[str, float], ours: dict[str, float] | None = None) -> None:
    """Print the floor; `ours`: measured seconds of "sampling" and "training"."""
    rates = ", ".join(
        f"{name.removesuffix('_flops')} {found[f'rate_{name}'] / 1e9:.0f} GFLOP/s"
        for name in ("decode_flops", "train_flops", "head_flops")
    )
    print(f"{setting.name}: {rates}, {found['rate_exps'] / 1e9:.1f} G exp/s, {found['rate_bytes'] / 1e9:.1f} GB/s")
    for phase in ("sampling", "training"):
        least = found[f"{phase}_seconds"]
        flops = (found[f"{phase}_decoder_flops"] + found[f"{phase}_head_flops"]) / 1e9
        measured = "" if ours is None else f"; ours {ours[phase]:.3f} s, {ours[phase] / least:.1f} times the floor"
        print(f"  {phase:<8} {flops:.1f} GFLOP, floor {least:.3f} s{measured}")


def measure() -> dict[str, dict[str, float]]:
    default_threads()
    return {setting.name: floor(setting) for setting in (SMALL, WIDE)}


def main() -> None:
    for name, found in measure().items():
        report({"small": SMALL, "wide": WIDE}[name], found)


if __name__ == "__main__":
    main()
