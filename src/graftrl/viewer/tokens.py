"""Token ids as pieces of text, with whatever tokenizer of the model lies on this machine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from graftrl.exchange.spans import token_ends
from graftrl.training.run_folder import RunFolder

FILE = "tokenizer.json"


class TokenTexts:
    """Cuts responses of a run's models into their tokens. A tokenizer is loaded when it is first needed, and only from
    disk: from the run's newest checkpoint, the folder that the recipe names, or the hub's local cache.

    Attributes:
        notes: model -> why its responses are not cut.
    """

    def __init__(self, folder: Path, models: Mapping[str, Any]) -> None:
        """models: the section of the recipe; empty for a log without one."""
        self._folder, self._models = folder, models
        self._loaded: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self._lock = threading.Lock()

    def cut(self, model: str, token_ids: Sequence[int], text: str, *, ends_with_eos: bool) -> list[str] | None:
        """The text of each token, `""` for one that only goes on with a character; the EOS as its vocabulary spells it.

        None where no tokenizer is found, or none that gives this text.
        """
        tokenizer = self._tokenizer(model)
        if tokenizer is None or not token_ids:
            return None
        contents = list(token_ids[: len(token_ids) - ends_with_eos])
        if tokenizer.decode(contents, skip_special_tokens=False) != text:
            self.notes[model] = f"the tokenizer found for {model} does not give this text"
            return None
        ids = np.asarray(token_ids, dtype=np.int64)
        ends = token_ends(ids, SimpleNamespace(backend_tokenizer=tokenizer), ends_with_eos=ends_with_eos)
        encoded = text.encode("utf-8")
        starts = [0, *ends[: len(contents)].tolist()]
        pieces = [encoded[start:end].decode("utf-8", "replace") for start, end in itertools.pairwise(starts)]
        return [*pieces, tokenizer.id_to_token(int(token_ids[-1])) or ""] if ends_with_eos else pieces

    def _tokenizer(self, model: str) -> Any:
        with self._lock:
            if model not in self._loaded:
                self._loaded[model] = self._load(model)
            return self._loaded[model]

    def _load(self, model: str) -> Any:
        file = self._file(model)
        if file is None:
            inside = str((self._models.get(model) or {}).get("path", "")).endswith(".gguf")
            self.notes[model] = (
                f"the tokenizer of {model} lies in a GGUF file, which is not opened here"
                if inside
                else f"no tokenizer of {model} on this machine"
            )
            return None
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises no narrower class
            self.notes[model] = f"{file} cannot be read: {str(error).splitlines()[0]}"
            return None

    def _file(self, model: str) -> Path | None:
        run = RunFolder(self._folder)
        places = [run.checkpoint(step) / model for step in reversed(run.checkpoint_steps())]
        path = (self._models.get(model) or {}).get("path")
        if path is not None:
            places.append(Path(path).expanduser())
        found = next((place / FILE for place in places if (place / FILE).is_file()), None)
        return found if found is not None or path is None else _in_hub_cache(str(path))


def _in_hub_cache(name: str) -> Path | None:
    """Of a hub id, without a request."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, FILE)
    except HFValidationError:  # a path that is not there any more
        return None
    return Path(found) if isinstance(found, str) else None
