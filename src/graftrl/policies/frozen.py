"""Models whose weights never change: they tell log-probabilities of rows, and read no row twice in a step."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftrl.errors import DataError, ModelError
from graftrl.policies.config import WeightsSettings
from graftrl.policies.loading import Loaded, context_length, import_peft, load, resolve
from graftrl.policies.passes import Passes, find_device, row_length
from graftrl.policies.vocabulary import Distribution, top_logprobs
from graftrl.rollout import Row

Key = tuple[bytes, bytes]  # prompt ids, response ids
Place = tuple[str, str]  # path, device


class FrozenModel:
    """One reading of some weights: with one adapter or none, in one precision. Everything is without gradients.

    Rows are known by their tokens: what was read of a row is kept until `forget`, and serves every row of the same
    tokens.

    Args:
        using: a context in which the weights are those that are meant, such as one with an adapter switched off.
    """

    def __init__(
        self, passes: Passes, using: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> None:
        self.passes, self.using = passes, using
        self.keep_hidden = False  # log-probabilities are asked of rows that will also need sums over the vocabulary
        self._hidden: dict[Key, Tensor] = {}
        self._logprobs: dict[Key, NDArray[np.float32]] = {}

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """log q(token) of every response token, float32 [T] per row."""
        missing = self._missing(rows, self._logprobs)
        if self.keep_hidden:
            hidden = self._read(missing.values())
            with self.passes.precision():
                for (key, row), hidden_TH in zip(missing.items(), hidden, strict=True):
                    targets = torch.from_numpy(row.response_token_ids).to(hidden_TH.device)
                    self._logprobs[key] = self.passes.logprobs(hidden_TH, targets).cpu().numpy()
        else:
            with self.using():
                self._logprobs |= zip(missing, self.passes.score(list(missing.values())), strict=True)
        return [self._logprobs[_key(row)] for row in rows]

    @torch.no_grad()
    def distribution(self, rows: Sequence[Row]) -> Distribution:
        """The distributions over the vocabulary at all response tokens of the rows, one row after the other."""
        return Distribution(torch.cat(self._read(rows)), self.passes.loaded.head)

    @torch.no_grad()
    def top_k(self, rows: Sequence[Row], k: int) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """The k most likely tokens at every response token, int64 [T, k], and their log-probabilities, float32."""
        with self.passes.precision():
            tokens, logprobs = top_logprobs(self.distribution(rows), k, self.passes.settings.logit_elements)
        stops = np.cumsum([len(row.response_token_ids) for row in rows])[:-1]
        return list(zip(np.split(tokens.cpu().numpy(), stops), np.split(logprobs.cpu().numpy(), stops), strict=True))

    def forget(self) -> None:
        """Between steps: the same rows hardly come again."""
        self._hidden.clear()
        self._logprobs.clear()

    def _read(self, rows: Iterable[Row]) -> list[Tensor]:
        rows = list(rows)
        missing = self._missing(rows, self._hidden)
        with self.using():
            self._hidden |= zip(missing, self.passes.read(list(missing.values())), strict=True)
        return [self._hidden[_key(row)] for row in rows]

    def _missing(self, rows: Iterable[Row], known: dict[Key, Any]) -> dict[Key, Row]:
        missing = {_key(row): row for row in rows if _key(row) not in known}
        limit = context_length(self.passes.loaded.causal_lm)
        for row in missing.values():
            if limit is not None and row_length(row) > limit:
                raise DataError(
                    f"{self.passes.settings.path} has {limit} positions, but prompt {row.prompt_id!r} in its scorer's "
                    f"context has {row_length(row)} tokens with its response; shorten the context, or lower "
                    "sampling.max_response_tokens"
                )
        return missing


class FrozenWeights:
    """The frozen models of a process. Weights of one path are loaded once, whoever reads them, with which adapter."""

    def __init__(self) -> None:
        self._loaded: dict[Place, Loaded] = {}
        self._adapted: dict[Place, Any] = {}  # PEFT's view of the same models; its adapters are named by their folders
        self._models: dict[tuple[Place, str, str], FrozenModel] = {}
        self._adopted: list[FrozenModel] = []

    def model(self, name: str, settings: WeightsSettings) -> FrozenModel:
        """The frozen model of these settings.

        Raises:
            ModelError: as `load`; an adapter that is missing, or that changes more than can be switched off.
        """
        place, adapter, _ = key = _identity(name, settings)
        if key not in self._models:
            device = find_device(settings.device)
            if place not in self._loaded:
                self._loaded[place] = load(name, settings, device)
            if adapter:
                self._add_adapter(name, place, adapter)
            self._loaded[place].causal_lm.requires_grad_(False).eval()
            model = FrozenModel(Passes(self._loaded[place], settings, device), lambda: self._switched(place, adapter))
            model.passes.probe_sharing()
            self._models[key] = model
        return self._models[key]

    def adopt(self, model: FrozenModel, name: str, settings: WeightsSettings) -> None:
        """A model that is in memory already, such as the base of one that trains an adapter: it serves whoever asks for
        these settings without an adapter, and forgets with the others."""
        self._adopted.append(model)
        self._models.setdefault(_identity(name, settings), model)

    def forget(self) -> None:
        for model in (*self._models.values(), *self._adopted):
            model.forget()

    @contextlib.contextmanager
    def _switched(self, place: Place, adapter: str) -> Iterator[None]:
        """The weights with this adapter on and no other."""
        adapted = self._adapted.get(place)
        if adapted is None:
            yield
            return
        if adapter:
            adapted.set_adapter(_adapter_name(adapter))
        with contextlib.nullcontext() if adapter else adapted.disable_adapter():
            yield
        adapted.requires_grad_(False)  # PEFT lets the adapter that it switches on train

    def _add_adapter(self, name: str, place: Place, folder: str) -> None:
        peft = import_peft()
        where = f"scorers.{name}.adapter"
        loaded, adapter = self._loaded[place], _adapter_name(folder)
        try:
            config = peft.PeftConfig.from_pretrained(folder)
            if config.peft_type != peft.PeftType.LORA:
                raise ModelError(
                    f"{where}: {folder} is an adapter of the kind {config.peft_type.value}; only LoRA works"
                )
            if place in self._adapted:
                self._adapted[place].load_adapter(folder, adapter)
            else:
                self._adapted[place] = peft.PeftModel.from_pretrained(loaded.causal_lm, folder, adapter)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"{where}: cannot load {folder}: {str(error).splitlines()[0]}") from error
        if type(loaded.causal_lm.get_output_embeddings()) is not torch.nn.Linear:
            raise ModelError(f"{where}: {folder} adapts the output head, which must stay a plain matrix")


def _identity(name: str, settings: WeightsSettings) -> tuple[Place, str, str]:
    """What tells readings of weights apart: place, adapter ("" for none), precision."""
    place = (resolve(name, settings), str(find_device(settings.device)))
    return place, getattr(settings, "adapter", None) or "", settings.dtype


def _adapter_name(folder: str) -> str:
    """PEFT names modules by it: no dots."""
    return hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:12]


def _key(row: Row) -> Key:
    return row.prompt_token_ids.tobytes(), row.response_token_ids.tobytes()
