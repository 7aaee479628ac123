"""Between prompts and token ids: chat template, BOS, EOS. One codec per model; the exchange reads it too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftrl.errors import ModelError
from graftrl.exchange.retokenize import tokenizer_fingerprint
from graftrl.policies.config import WeightsSettings
from graftrl.rollout import Prompt


class Codec:
    """A tokenizer with the model's conventions.

    eos_ids: every id that ends a response (a generation config may list several).
    eos_id: the one that is appended to a grafted response: the first of `extra_stop_tokens`, with which this model ends
        its own responses, else the tokenizer's EOS.
    prepend_bos: the model expects a BOS that neither tokenizer nor template emits.
    architecture: of the model, in words; "" where it is not known.
    """

    def __init__(self, tokenizer: Any, name: str, settings: WeightsSettings, config_eos: Sequence[int]) -> None:
        self.tokenizer, self.name, self.architecture = tokenizer, name, ""
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        extra = [_stop_id(tokenizer, token) for token in settings.extra_stop_tokens]
        unknown = [token for token, i in zip(settings.extra_stop_tokens, extra, strict=True) if i is None]
        if unknown:
            raise ModelError(f"{settings.place(name)}.extra_stop_tokens: {unknown} are no tokens of {settings.path}")
        own = tokenizer.eos_token_id
        self.eos_ids: tuple[int, ...] = tuple(sorted({*config_eos, *(i for i in (own, *extra) if i is not None)}))
        if not self.eos_ids:
            raise ModelError(
                f"model {name!r} ({settings.path}): neither tokenizer nor generation config names an EOS token, so a "
                f"response could never end; set {settings.place(name)}.extra_stop_tokens"
            )
        self.eos_id: int = next((i for i in (*extra, own) if i is not None), self.eos_ids[0])
        self.uses_template = settings.chat_template == "auto" and bool(tokenizer.chat_template)
        self.template_options: dict[str, Any] = settings.chat_template_options
        self._check_template_options(settings)
        self.prepend_bos = settings.bos == "add"
        if self.prepend_bos and tokenizer.bos_token_id is None:
            where = f"{settings.place(name)}.bos"
            raise ModelError(f"{where} is 'add' but the tokenizer of {settings.path} has no BOS token")
        self._prompt_ids: dict[tuple[str, str], NDArray[np.int64]] = {}

    def prompt_token_ids(self, prompt: Prompt) -> NDArray[np.int64]:
        """The prompt in this model's tokens, at most one BOS. Remembered by task and id, unless it has a prefix."""
        if prompt.prefix:  # which may be another one in every step
            return np.array(self.encode_prompt(prompt), dtype=np.int64)
        key = (prompt.task, prompt.id)
        known = self._prompt_ids.get(key)
        if known is None:
            known = self._prompt_ids[key] = np.array(self.encode_prompt(prompt), dtype=np.int64)
        return known

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        if self.uses_template:
            # The template writes its own BOS; the tokenizer must not add a second one.
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in prompt.question],
                tokenize=False,
                add_generation_prompt=True,
                **self.template_options,
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        else:
            text = "\n".join(message["content"] for message in prompt.question)
            ids = self.tokenizer.encode(text, add_special_tokens=True)
            if ids and ids[-1] in self.eos_ids:  # some tokenizers close every text with an EOS
                ids = ids[:-1]
        bos = self.tokenizer.bos_token_id
        if self.prepend_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        # The beginning of the answer stands where the model would begin it, after the template's generation prompt.
        return [*ids, *self.tokenizer.encode(prompt.prefix, add_special_tokens=False)] if prompt.prefix else ids

    def _check_template_options(self, settings: WeightsSettings) -> None:
        """A template does not object to a variable that it does not have, so that a slip would change nothing."""
        where = f"{settings.place(self.name)}.chat_template_options"
        if self.template_options and not self.uses_template:
            raise ModelError(f"{where}: {settings.path} has no chat template in use; leave them out")
        for name in self.template_options:
            known = re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template))
            if not known or name in ("messages", "add_generation_prompt", "tokenize"):
                raise ModelError(f"{where}: {name!r} is no variable of {settings.path}'s chat template that can be set")

    def decode_response(self, token_ids: Sequence[int] | NDArray[np.int64], *, stopped: bool) -> str:
        """The response's text without its EOS; other special tokens stay visible."""
        contents = token_ids[:-1] if stopped else token_ids
        return self.tokenizer.decode(
            [int(i) for i in contents], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _stop_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token as its vocabulary spells it ("<|im_end|>") or of a text that is one token ("\\n")."""
    index = tokenizer.convert_tokens_to_ids(token)
    if index is not None and index != tokenizer.unk_token_id:
        return int(index)
    ids = tokenizer.encode(token, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None
