"""A model's conventions: where tokenizer, chat template and weights disagree, and what others have tripped over.

Nothing is loaded but config and tokenizer; with `weights` the weights too, to measure what only they can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import torch

from graftrl.config import Recipe
from graftrl.doctor.findings import Finding, Level
from graftrl.errors import ModelError
from graftrl.exchange import Rejected, encode_response
from graftrl.policies.codec import Codec
from graftrl.policies.config import ModelSettings, SamplingSettings, WeightsSettings
from graftrl.policies.loading import check_context, load, load_skeleton, resolve
from graftrl.policies.scorers import resolved
from graftrl.rollout import Prompt
from graftrl.training.memory import estimate_memory

_QUESTION = Prompt("doctor", ({"role": "user", "content": "What is 2 + 3?"},), "5", "doctor")
_ANSWER = "Two and three make 5, so the answer is 5."
_ROUND_TRIP = "So $x^2 = 9$:\n\n- x is 3 or  -3; the answer is \\boxed{3}.\n"


def check_models(recipe: Recipe, *, weights: bool = False) -> tuple[list[Finding], int]:
    """The models and scorers of a recipe, and how they fit together.

    Returns:
        findings, and the bytes of a checkpoint of all models.
    """
    findings: list[Finding] = []
    codecs: dict[str, Codec] = {}
    size = 0
    for name, settings in recipe.models.items():
        found, skeleton = check_model(name, settings, sampling=recipe.sampling, weights=weights)
        findings += found
        if skeleton is not None:
            model, codecs[name] = skeleton
            memory = estimate_memory(model, settings, recipe.sampling)
            size += memory.optimizer + 4 * (memory.parameters if settings.lora is None else memory.trainable)
    for name, scorer in recipe.scorers.items():
        try:
            findings += check_model(f"{name} (scorer)", resolved(name, scorer), weights=weights)[0]
        except ModelError as error:
            findings.append(Finding("problem", f"{name} (scorer)", "loading", str(error)))
    names = list(codecs)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            same = codecs[first].fingerprint == codecs[second].fingerprint
            how = "one tokenizer: token ids are passed on" if same else "two tokenizers: texts are encoded anew"
            findings.append(Finding("ok", f"{first}, {second}", "tokenizers", how))
    return findings, size


def check_model(
    name: str, settings: WeightsSettings, *, sampling: SamplingSettings | None = None, weights: bool = False
) -> tuple[list[Finding], tuple[Any, Codec] | None]:
    """What is found about one model, and its skeleton and codec where they can be loaded."""
    try:
        skeleton, codec = load_skeleton(name, settings)
    except ModelError as error:
        return [Finding("problem", name, "loading", str(error))], None
    findings = [
        Finding(level, name, check, message)
        for check, found in (
            ("weights", _weights(name, settings)),
            ("vocabulary", _vocabulary(skeleton, codec)),
            ("pad", _pad(codec)),
            ("eos", _eos(codec, settings.place(name))),
            ("bos", _bos(codec, settings.place(name))),
            ("chat template", _chat_template(codec)),
            ("round trip", _round_trip(codec)),
            ("context", _context(name, skeleton, sampling)),
        )
        for level, message in found
    ]
    if weights:
        measured = _measure(name, settings)
        if measured[-1].level == "ok":  # what was to be measured, was
            findings = [finding for finding in findings if (finding.check, finding.level) != ("bos", "note")]
        findings += measured
    return findings, (skeleton, codec)


Found = Iterator[tuple[Level, str]]


def _weights(name: str, settings: WeightsSettings) -> Found:
    folder = Path(resolve(name, settings))
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin"))
        why = "only pickled weights (*.bin), which may run code when loaded" if pickled else "no weights"
        yield "problem", f"{settings.path} holds {why}; save the model as safetensors"


def _vocabulary(skeleton: Any, codec: Codec) -> Found:
    tokens, rows = len(codec.tokenizer), skeleton.get_input_embeddings().weight.shape[0]
    if tokens > rows:
        yield (
            "problem",
            f"the tokenizer has {tokens:,} tokens but the model embeds {rows:,}: some ids would be out of range. They "
            "do not belong together, or tokens were added without resizing the embeddings",
        )
    else:
        yield "ok", f"{tokens:,} tokens, {rows:,} embeddings"


def _pad(codec: Codec) -> Found:
    pad = codec.tokenizer.pad_token_id
    if pad is not None and pad in codec.eos_ids:
        yield (
            "note",
            f"padding is an EOS ({codec.tokenizer.pad_token!r}). Masks come from lengths here; trainers that mask by "
            "id would never teach this model to stop",
        )


def _eos(codec: Codec, place: str) -> Found:
    tokenizer = codec.tokenizer
    names = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in codec.eos_ids)
    end = turn_end(codec) if codec.uses_template else None
    if end is None:
        yield "ok", f"a response ends with {names}"
        return
    token = tokenizer.convert_ids_to_tokens(end)
    if end not in codec.eos_ids:
        yield (
            "problem",
            f"the chat template ends an answer with {token!r}, but only {names} end a response: responses would run on "
            f"to the limit; set {place}.extra_stop_tokens: [{token!r}]",
        )
    elif end != codec.eos_id:
        yield (
            "note",
            f"the chat template ends an answer with {token!r}; a peer's response would get "
            f"{tokenizer.convert_ids_to_tokens(codec.eos_id)!r} instead; {place}.extra_stop_tokens: [{token!r}] makes "
            "it the same",
        )
    else:
        yield "ok", f"a response ends with {names}, an answer in the chat template with {token!r}"


def turn_end(codec: Codec) -> int | None:
    """The id of the token after an assistant's answer in the chat template; None if it writes nothing there."""
    text = _rendered(codec, answered=True)
    after = "" if text is None else text.partition(_ANSWER)[2].lstrip()
    ids = codec.tokenizer.encode(after, add_special_tokens=False) if after else []
    return int(ids[0]) if ids else None


def _rendered(codec: Codec, *, answered: bool, **options: Any) -> str | None:
    """The chat template on a question, with its answer or without; None where it refuses them."""
    messages = [dict(_QUESTION.messages[0])]
    if answered:
        messages.append({"role": "assistant", "content": _ANSWER})
    try:
        return str(codec.tokenizer.apply_chat_template(messages, tokenize=False, **codec.template_options, **options))
    except (jinja2.TemplateError, ValueError, TypeError):
        return None


def _bos(codec: Codec, place: str) -> Found:
    tokenizer = codec.tokenizer
    if tokenizer.bos_token_id is None:
        return
    ids = codec.encode_prompt(_QUESTION)
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        yield "problem", f"prompts begin with two {tokenizer.bos_token!r}: the chat template writes one too many"
    elif ids[:1] == [tokenizer.bos_token_id]:
        yield "ok", f"prompts begin with {tokenizer.bos_token!r}"
    else:
        yield (
            "note",
            f"the tokenizer has a BOS, {tokenizer.bos_token!r}, but prompts do not begin with it. When the weights are "
            f"loaded it is measured whether the model needs one ({place}.bos: auto); `doctor --weights` does it now",
        )


def _chat_template(codec: Codec) -> Found:
    if not codec.tokenizer.chat_template:
        yield "note", "there is none: prompts are given as plain text, as suits a base model"
        return
    if not codec.uses_template:
        yield "note", "there is one, and chat_template: plain leaves it out"
        return
    answered, asked = _rendered(codec, answered=True), _rendered(codec, answered=False)
    if asked is None:
        yield "problem", "it cannot render a user message; use chat_template: plain or mend the template"
        return
    if answered is None:
        yield "note", "it refuses an assistant's answer; a prompt with the beginning of an answer cannot be checked"
    elif _ANSWER not in answered:
        yield (
            "problem",
            "it drops the assistant's answer, so that it is not what conversations were trained on; mend the template",
        )
    question = _QUESTION.messages[0]["content"]
    if question not in asked:
        yield "problem", "it drops the user's message; mend the template"
    if "system" in asked.partition(question)[0]:
        yield "note", "it adds a system message of its own to every prompt"
    if _rendered(codec, answered=False, add_generation_prompt=True) == asked:
        yield "note", "add_generation_prompt changes nothing: the model begins its answer without a header"


def _round_trip(codec: Codec) -> Found:
    unknown = codec.tokenizer.unk_token_id
    if unknown is not None and unknown in codec.tokenizer.encode(_ROUND_TRIP, add_special_tokens=False):
        yield "note", "its vocabulary lacks characters of ordinary text: a peer's responses that hold them are rejected"
        return
    found = encode_response(_ROUND_TRIP, codec.tokenizer)
    if isinstance(found, Rejected):
        yield (
            "problem",
            f"ordinary text does not survive encoding and decoding ({found.reason}): a peer's responses would be "
            "rejected; the tokenizer normalises or strips text",
        )


def _context(name: str, skeleton: Any, sampling: SamplingSettings | None) -> Found:
    if sampling is not None:
        try:
            check_context(name, skeleton, sampling)
        except ModelError as error:
            yield "problem", str(error)


def _measure(name: str, settings: WeightsSettings) -> list[Finding]:
    try:
        loaded = load(name, settings, torch.device("cpu"))
    except ModelError as error:
        return [Finding("problem", name, "loading", str(error))]
    missing = [Finding("note", name, "bos", note) for note in loaded.notes]
    found = missing or [Finding("ok", name, "bos", "measured: none has to be added to prompts")]
    return [*found, Finding("ok", name, "loading", "weights load, and their output head is as expected")]


def settings_of(path: str) -> ModelSettings:
    """Of a model that is given by its path alone."""
    return ModelSettings(path=path)
