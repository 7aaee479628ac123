"""Loading a GGUF file (llama.cpp's format) as an ordinary float32 model that can be trained and saved."""

from __future__ import annotations

import copy
import functools
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from graftrl.errors import ModelError

# What the parsers of transformers and gguf raise on a damaged file; they promise nothing narrower.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error)


def load_gguf(path: Path) -> tuple[Any, Any]:
    """The model, dequantised to float32, and the tokenizer with the file's special tokens and chat template.

    Both save and reload with `from_pretrained` like any other model; nothing of the quantisation remains.

    Raises:
        ModelError: a package is missing, the file is damaged, or transformers cannot convert its architecture.
    """
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ModelError(
            f"{path}: reading GGUF needs {' and '.join(missing)}: pip install 'graftrl[gguf]' {' '.join(missing)}"
        )
    import gguf

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    # Newer versions of transformers can keep the weights packed, which cannot be trained.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _knows_packed_weights() else {}
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file")
        # transformers parses the file three times; of a large vocabulary each takes many seconds. It makes the table of
        # names again for every module.
        # Its progress bar knows no switch and would break into the display of a run.
        with (
            mock.patch.object(gguf, "GGUFReader", functools.lru_cache(maxsize=1)(gguf.GGUFReader)),
            mock.patch.object(gguf, "get_tensor_name_map", functools.lru_cache(maxsize=1)(gguf.get_tensor_name_map)),
            mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors, create=True),
        ):
            tokenizer = AutoTokenizer.from_pretrained(**source)
            quantised = AutoModelForCausalLM.from_pretrained(**source, **unpack, dtype=torch.float32)
    except _DAMAGE as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: cannot read this GGUF file (damaged, or of an unknown kind): {reason}") from error
    return _without_quantisation(quantised), tokenizer


def _knows_packed_weights() -> bool:
    return hasattr(transformers, "GgufConfig")


def _without_quantisation(quantised: Any) -> Any:
    """The same weights in a fresh model: transformers refuses to save one that came from a quantised file."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""
    with init_empty_weights(include_buffers=False):  # random numbers would only be thrown away
        fresh = type(quantised)(config)
    fresh.load_state_dict(quantised.state_dict(), assign=True)  # takes the tensors over: no second copy in memory
    fresh.tie_weights()
    fresh.requires_grad_(True)
    fresh.generation_config = copy.deepcopy(quantised.generation_config)
    return fresh.eval()
