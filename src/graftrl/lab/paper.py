"""Figures of the GRAFT paper (Park et al., 2026), to stand beside the laboratory's: average score over five mathematics
benchmarks, of models of 1.7 to 3 billion parameters; and of the P-OPD paper, at the end. Other models on another task:
only signs and orders compare."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "Park et al. (2026), average over five mathematics benchmarks in points"


@dataclass(frozen=True)
class Block:
    """One table of the paper. columns: the models. scores: by method, one value a column, None where not given."""

    columns: tuple[str, ...]
    scores: dict[str, tuple[float | None, ...]]


_MAIN_COLUMNS = (
    "SmolLM3 (with Qwen3)", "SmolLM3 (with OctoThinker)", "Qwen3 (with SmolLM3)", "Qwen3 (with OctoThinker)",
    "OctoThinker (with Qwen3)", "OctoThinker (with SmolLM3)",
)  # fmt: skip

MAIN = Block(
    _MAIN_COLUMNS,
    {
        "grpo": (32.60, 32.60, 31.20, 31.20, 21.18, 21.18),
        "grpo-n16": (33.38, 33.38, 32.15, 32.15, 22.40, 22.40),
        "grpo-n32": (35.71, 35.71, 32.43, 32.43, 23.39, 23.39),
        "hacpo": (31.51, 28.43, 27.24, 28.42, 20.89, 21.89),
        "sgt": (34.88, 32.07, 31.24, 31.00, 21.93, 22.51),
        "graft": (37.06, 33.26, 33.44, 32.78, 23.47, 22.60),
        "graft-stored": (35.28, 34.66, 33.01, 32.63, 23.08, 21.98),
    },
)

# SmolLM3-3B-Base and Qwen3-1.7B-Base, trained together.
VARIANTS = Block(
    ("SmolLM3", "Qwen3"),
    {
        "grpo": (32.60, 31.20),
        "graft": (37.06, 33.44),
        "graft-no-gate": (28.70, 30.93),
        "graft-no-floor": (35.17, 29.88),
        "graft-unbalanced": (35.06, 32.96),
        "graft-sequence-ratio": (35.21, 32.99),
        "graft-random-prompts": (34.66, 31.86),
        "graft-random-admission": (35.20, 32.35),
        "graft-peer-first": (34.61, 31.73),
        "graft-peer-uniform": (33.49, 32.41),
        "graft-pooled": (33.07, 30.78),
        "graft-success-only": (29.22, 29.51),
        "graft-success-only-no-floor": (32.14, 29.85),
        "graft-hacpo-update": (28.97, 27.79),
        "graft-sgt-update": (34.08, 31.89),
        "graft-luffy-update": (32.51, 31.41),
        "graft-delta-0.7": (34.17, 32.90),
        "graft-delta-0.9": (36.14, 31.90),
    },
)

# GPU-hours for both models: to the selected checkpoints, and for the whole run.
GPU_HOURS: dict[str, tuple[float, float]] = {
    "grpo": (28.6, 29.9),
    "grpo-n16": (43.1, 57.3),
    "grpo-n32": (92.0, 145.1),
    "dapo": (50.8, 67.9),
    "hacpo": (44.0, 47.1),
    "sgt": (46.2, 53.1),
    "graft": (40.9, 43.3),
    "graft-stored": (23.2, 33.3),
}

# Clipped grafted tokens in percent (SmolLM3, Qwen3) and steps without any, in steps 1 to 48.
GRAFTED_CLIPPED: dict[str, tuple[float, float, float]] = {
    "graft-peer-first": (0.004, 0.002, 97.6),
    "graft-peer-uniform": (0.130, 0.248, 13.0),
    "graft": (0.277, 0.440, 0.0),
}

# Mean and standard deviation over three training runs: (GRPO, GRAFT).
STABILITY: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "SmolLM3 (with Qwen3)": ((32.15, 1.48), (36.12, 0.85)),
    "SmolLM3 (with OctoThinker)": ((32.15, 1.48), (33.06, 0.31)),
    "Qwen3 (with SmolLM3)": ((31.38, 0.16), (33.24, 0.33)),
    "Qwen3 (with OctoThinker)": ((31.38, 0.16), (32.37, 0.41)),
    "OctoThinker (with Qwen3)": ((21.14, 0.22), (23.19, 0.24)),
    "OctoThinker (with SmolLM3)": ((21.14, 0.22), (22.56, 1.07)),
}

# P-OPD (arXiv 2607.11505): averages over four mathematics benchmarks of Qwen3 models, tables 1 to 3. Keys are
# (proxy, method, target); without a proxy, the target before and after its own reinforcement learning.
P_OPD_SOURCE = "arXiv 2607.11505, average over four mathematics benchmarks in points"
P_OPD: dict[tuple[str, str, str], float] = {
    ("", "before", "1.7B"): 8.5,
    ("", "grpo", "1.7B"): 25.5,
    ("", "before", "4B"): 16.0,
    ("", "grpo", "4B"): 46.5,
    ("", "before", "8B"): 17.3,
    ("", "grpo", "8B"): 44.5,
    ("4B", "opd", "8B"): 43.6,
    ("4B", "p_opd", "8B"): 47.5,
    ("1.7B", "opd", "8B"): 28.3,
    ("1.7B", "p_opd", "8B"): 36.6,
    ("4B-1.7B", "p_opd", "8B"): 43.9,
    ("7B of the generation before", "opd", "8B"): 44.1,
    ("7B of the generation before", "p_opd", "8B"): 52.5,
}
P_OPD_OPTIMA = {"4B": 1.08, "1.7B": 1.57}  # figure 4, the top of a cubic
