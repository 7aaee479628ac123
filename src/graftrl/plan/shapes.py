"""The shapes of a recipe's models: well-known ones from a table, so that a plan needs no download; others from their
config."""

from __future__ import annotations

from graftrl.errors import ModelError
from graftrl.policies.config import WeightsSettings
from graftrl.policies.costs import ModelShape, llama_shape, shape_of
from graftrl.policies.loading import load_skeleton


def _qwen3(layers: int, hidden: int, heads: int, feed_forward: int, tied: bool = True) -> ModelShape:
    return llama_shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_size=128,
        feed_forward=feed_forward,
        vocabulary=151_936,
        tied=tied,
        head_norms=True,
    )


_LLAMA_3B = llama_shape(layers=28, hidden=3072, heads=24, kv_heads=8, feed_forward=8192, vocabulary=128_256)
_SMOLLM3 = llama_shape(layers=36, hidden=2048, heads=16, kv_heads=4, feed_forward=11_008, vocabulary=128_256)
_QWEN2_7B = llama_shape(
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    feed_forward=18_944,
    vocabulary=152_064,
    tied=False,
    qkv_bias=True,
)

# From the models' published configs; a trailing "-Base" or "-Instruct" changes no shape.
KNOWN = {
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 3072),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 6144),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 32, 9728),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 12_288, tied=False),
    "HuggingFaceTB/SmolLM3-3B": _SMOLLM3,
    "meta-llama/Llama-3.2-3B": _LLAMA_3B,
    "OctoThinker/OctoThinker-3B-Hybrid": _LLAMA_3B,
    "Qwen/Qwen2.5-7B": _QWEN2_7B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN2_7B,
    "Skywork/Skywork-OR1-Math-7B": _QWEN2_7B,
}


def shape_for(name: str, settings: WeightsSettings) -> tuple[ModelShape, str]:
    """The shape of a recipe's model, and where it comes from.

    Raises:
        ModelError: neither known nor loadable.
    """
    known = KNOWN.get(settings.path.removesuffix("-Base").removesuffix("-Instruct"))
    if known is not None:
        return known, "a built-in table"
    try:
        model, _ = load_skeleton(name, settings)
    except ModelError as error:
        raise ModelError(f"{error}; of hub ids, these need no download: {', '.join(KNOWN)}") from error
    return shape_of(model), "its config"
