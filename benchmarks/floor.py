"""The least time a step could take here: its arithmetic and its bytes over this machine's measured rates.

Run as `python benchmarks/floor.py`. Rates are measured with torch's default threads: products of matrices at the step's
own shapes, exponentials in the cache, and a large copy. The floor of a phase is the larger of its arithmetic time and
its memory time; activations, attention, norms and everything between the products are taken to be free.
"""

from __future__ import annotations

from common import SMALL, WIDE, Setting, default_threads
from graftrl.plan.measure import copy_rate, exp_rate, matmul_rate
from graftrl.policies.config import ModelSettings
from graftrl.policies.costs import ADAM_BYTES, ModelShape, llama_shape, sampling_work, training_work


def shape_of_setting(setting: Setting) -> ModelShape:
    """Of the model that `save_model` makes."""
    return llama_shape(
        layers=setting.layers,
        hidden=setting.hidden,
        heads=setting.heads,
        kv_heads=setting.kv_heads,
        feed_forward=setting.feed_forward,
        vocabulary=setting.vocabulary,
        qkv_bias=True,
    )


def floor(setting: Setting) -> dict[str, float]:
    """Seconds of sampling, training and both, with the counts and rates behind them."""
    hidden, shape = setting.hidden, shape_of_setting(setting)
    prompts = [(setting.shortest_prompt + setting.longest_prompt) // 2] * setting.prompts
    rows = [(prompts[0], setting.new_tokens)] * setting.rows
    rates = {
        # One step of decoding is a product with as many rows as there are responses.
        "decode_flops": matmul_rate(setting.rows, hidden, setting.feed_forward),
        "train_flops": matmul_rate(min(setting.microbatch_rows, 32) * 88, hidden, setting.feed_forward),
        "head_flops": matmul_rate(min(setting.rows, 256), hidden, min(setting.vocabulary, 1024)),
        "exps": exp_rate(),
        "bytes": copy_rate(),
    }
    # Traffic between the products and attention's operations are left out, and the head's logits are taken to be kept:
    # three products a weight where a policy that computes them again needs four, and one exponential, not two.
    sampled = sampling_work(shape, prompts, rows, 4)
    sampling = {
        "decoder_flops": sampled.decoder,
        "head_flops": sampled.head,
        "exps": sampled.exps,
        "bytes": sampled.bytes,
    }
    trained = training_work(shape, rows, ModelSettings(path="-"), shared_prompts=prompts)
    training = {
        "decoder_flops": trained.decoder,
        "head_flops": trained.head * 3 / 4,
        "exps": trained.exps / 2,
        "bytes": ADAM_BYTES * (shape.matrices + shape.head),
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
