"""Loading a causal language model and its tokenizer: a local directory, a GGUF file, or a hub id."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from graftrl.errors import ModelError
from graftrl.hub import hub_or_cache
from graftrl.policies import shards
from graftrl.policies.codec import Codec
from graftrl.policies.config import SamplingSettings, WeightsSettings
from graftrl.policies.logprobs import Head

_PROBE = "The capital of France is Paris. Two plus two is four, and the sun rises in the east every morning."


@dataclass(frozen=True)
class Loaded:
    """causal_lm: the model in float32, dropout off. decoder: ids to final hidden states. first_head: the output head as
    it was loaded. notes: for people."""

    causal_lm: Any
    decoder: nn.Module
    first_head: Head
    codec: Codec
    notes: tuple[str, ...]

    @property
    def head(self) -> Head:
        """As it is now: sharding puts other tensors in the weights' place, for a forward pass or for good."""
        layer = self.causal_lm.get_output_embeddings()
        return replace(self.first_head, weight=layer.weight, bias=layer.bias)


def load(name: str, settings: WeightsSettings, device: torch.device) -> Loaded:
    """Load, switch dropout off, and check what later numbers rest on.

    Raises:
        ModelError: the model is missing, has no plain output head, or the head applied here does not reproduce the
            model's own logits.
    """
    causal_lm, tokenizer = load_pretrained(name, settings)
    switch_off_dropout(causal_lm)
    causal_lm.to(device).eval()
    if len(tokenizer) > causal_lm.get_input_embeddings().weight.shape[0]:
        raise ModelError(
            f"model {name!r} ({settings.path}): the tokenizer has {len(tokenizer)} tokens, the model embeds "
            f"{causal_lm.get_input_embeddings().weight.shape[0]}; tokenizer and weights do not belong together"
        )
    decoder, head = split_head(name, settings, causal_lm)
    _check_head(name, settings, causal_lm, decoder, head)
    codec, notes = make_codec(name, settings, causal_lm, tokenizer)
    return Loaded(causal_lm, decoder, head, codec, notes)


def switch_off_dropout(model: nn.Module) -> None:
    """In training mode too: a ratio of 1 on the first minibatch needs a deterministic forward pass."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


def make_codec(name: str, settings: WeightsSettings, causal_lm: Any, tokenizer: Any) -> tuple[Codec, tuple[str, ...]]:
    """The codec of these settings, with the BOS that the model is found to expect, and a note where that is added."""
    codec = Codec(tokenizer, name, settings, _eos_ids(causal_lm))
    codec.architecture = describe(causal_lm)
    note = _missing_bos(settings.place(name), causal_lm, codec) if settings.bos == "auto" else None
    codec.prepend_bos = codec.prepend_bos or note is not None
    return codec, () if note is None else (note,)


def load_pretrained(name: str, settings: WeightsSettings) -> tuple[Any, Any]:
    """The transformers model (float32) and tokenizer of a path; every failure is a ModelError that names the model."""
    source = resolve(name, settings)
    if source.endswith(".gguf"):
        from graftrl.policies.gguf import load_gguf

        return load_gguf(Path(source))
    with _named_errors(name, settings, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    if shards.is_sharded(Path(source)):
        return _from_shards(name, settings, Path(source)), tokenizer
    with _named_errors(name, settings, "model"):
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    if info["missing_keys"]:  # transformers fills them with random numbers
        raise ModelError(
            f"{settings.place(name)}.path: {settings.path!r} lacks {len(info['missing_keys'])} of the weights that its "
            f"config asks for, such as {min(info['missing_keys'])}; the files are incomplete"
        )
    return model, tokenizer


def load_skeleton(name: str, settings: WeightsSettings, dtype: torch.dtype | None = None) -> tuple[Any, Codec]:
    """The model without its weights (on the meta device) and its codec; a GGUF file is loaded whole.

    dtype: of the weights that are not there; none: as the model's config says.
    """
    source = resolve(name, settings)
    if source.endswith(".gguf"):
        model, tokenizer = load_pretrained(name, settings)
        return model, Codec(tokenizer, name, settings, _eos_ids(model))
    with _named_errors(name, settings, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    with _named_errors(name, settings, "model"):
        model = _without_weights(source, settings, dtype)
    codec = Codec(tokenizer, name, settings, _eos_ids(model))
    codec.architecture = describe(model)
    return model, codec


def _without_weights(source: str, settings: WeightsSettings, dtype: torch.dtype | None) -> Any:
    config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code, **options)
    with contextlib.suppress(OSError):  # a model may have none
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def _from_shards(name: str, settings: WeightsSettings, folder: Path) -> Any:
    """The whole model (float32, in the host's memory) of a folder with the parts that several ranks wrote."""
    with _named_errors(name, settings, "model"):
        skeleton = _without_weights(str(folder), settings, torch.float32)
    weights = shards.read_whole(folder, skeleton)
    with _named_errors(name, settings, "model"):
        # transformers makes what no checkpoint holds, such as rotary frequencies, and ties what is tied
        model = type(skeleton).from_pretrained(None, config=skeleton.config, state_dict=weights, dtype=torch.float32)
    model.generation_config = skeleton.generation_config
    return model


def copy_model(name: str, settings: WeightsSettings, folder: Path, target: Path, without: Sequence[str] = ()) -> None:
    """Write a model's folder as `from_pretrained` reads it: a copy, or whole weights made of parts.

    without: patterns of files that stay behind.

    Raises:
        ModelError: the parts cannot be read.
    """
    if shards.is_sharded(folder):
        model, _ = load_pretrained(name, settings.model_copy(update={"path": str(folder)}))
        model.save_pretrained(target)
        without = (*without, shards.FOLDER, shards.BUFFERS)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*without), dirs_exist_ok=True)


def describe(causal_lm: Any) -> str:
    """The architecture and its sizes in words: the same for a model before and after it was trained."""
    config = causal_lm.config.get_text_config()
    names = {"layers": "num_hidden_layers", "hidden size": "hidden_size", "feed-forward size": "intermediate_size"}
    sizes = {word: getattr(config, name, None) for word, name in names.items()}
    known = ", ".join(f"{word} {size:,}" for word, size in sizes.items() if size is not None)
    return f"{type(causal_lm).__name__} ({known})"


def resolve(name: str, settings: WeightsSettings) -> str:
    """An existing GGUF file or directory, or a hub id. Raises ModelError for a local path that does not exist."""
    path = Path(settings.path).expanduser()
    if settings.path.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"{settings.place(name)}.path: no GGUF file at {settings.path}")
        return str(path)
    looks_local = settings.path.startswith((".", "/", "~")) or settings.path.count("/") > 1
    if looks_local and not path.is_dir():
        raise ModelError(f"{settings.place(name)}.path: no directory {settings.path}{_how_to_make(path)}")
    return str(path) if path.is_dir() else settings.path


def _how_to_make(path: Path) -> str:
    """Where the shipped recipes expect the laboratory's models, what puts them there."""
    if path.parent.name != "lab-cache":
        return ""
    return "; `graftrl quickstart` puts the laboratory's models there, and so does `python -m graftrl.lab.transfer`"


@contextlib.contextmanager
def _named_errors(name: str, settings: WeightsSettings, what: str) -> Iterator[None]:
    local = Path(settings.path).expanduser().exists()
    obstacle: str | None = None
    try:
        with contextlib.nullcontext() if local else hub_or_cache() as obstacle:
            yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if obstacle is not None:
            reason = f"no such directory, not (whole) in the hub's local cache, and {obstacle}"
        elif not local:
            reason = f"no such directory, and as a hub id: {reason}"
        where = f"{settings.place(name)}.path"
        raise ModelError(f"{where}: cannot load the {what} of {settings.path!r}: {reason}") from error


def context_length(causal_lm: Any) -> int | None:
    """Most positions of prompt and response together; None where the model's config names no limit."""
    positions: int | None = getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None)
    return positions


def check_context(name: str, causal_lm: Any, sampling: SamplingSettings) -> None:
    """Raises ModelError when the longest prompt and response together exceed the model's positions."""
    positions = context_length(causal_lm)
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    if positions is not None and longest > positions:
        raise ModelError(
            f"model {name!r} has {positions} positions, but sampling.max_prompt_tokens + max_response_tokens is "
            f"{longest}; lower one of them"
        )


def import_peft() -> Any:
    """The package for LoRA adapters. Raises ModelError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ModelError("lora needs the package peft: pip install 'graftrl[lora]'") from error
    return peft


def _eos_ids(causal_lm: Any) -> list[int]:
    found: list[int] = []
    generation: GenerationConfig | None = getattr(causal_lm, "generation_config", None)
    for config in (generation, causal_lm.config):
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else []
    return found


def split_head(name: str, settings: WeightsSettings, causal_lm: Any) -> tuple[nn.Module, Head]:
    head = causal_lm.get_output_embeddings()
    decoder = getattr(causal_lm, causal_lm.base_model_prefix, None)
    if not isinstance(head, nn.Linear) or decoder is None:
        raise ModelError(f"model {name!r} ({settings.path}): {type(causal_lm).__name__} has no plain output head")
    config = causal_lm.config.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None):
        scale = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None):
        scale = 1.0 / float(config.logits_scaling)
    cap = getattr(config, "final_logit_softcapping", None)
    return decoder, Head(head.weight, head.bias, scale, None if cap is None else float(cap))


@torch.no_grad()
def _check_head(name: str, settings: WeightsSettings, causal_lm: Any, decoder: nn.Module, head: Head) -> None:
    ids = torch.arange(8, device=head.weight.device)[None, :] % head.weight.shape[0]
    own = causal_lm(input_ids=ids).logits[0].float()
    ours = head.logits(decoder(input_ids=ids).last_hidden_state[0])
    if not own.isfinite().all():
        raise ModelError(
            f"{settings.place(name)}.path: {settings.path!r} gives log-probabilities that are not finite; its weights "
            "are damaged"
        )
    if own.shape != ours.shape or not torch.allclose(own, ours, rtol=1e-4, atol=1e-3):
        raise ModelError(
            f"model {name!r} ({settings.path}): {type(causal_lm).__name__} transforms its logits in a way this version "
            "does not know, so log-probabilities would be wrong; please report the architecture"
        )


@torch.no_grad()
def _missing_bos(place: str, causal_lm: Any, codec: Codec) -> str | None:
    """A note when prompts carry no BOS and the model predicts plain English far better with one."""
    tokenizer = codec.tokenizer
    bos = tokenizer.bos_token_id
    if bos is None or bos in tokenizer.encode("a", add_special_tokens=True):
        return None
    if codec.uses_template and tokenizer.bos_token in tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    ):
        return None
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    if len(ids) < 8 or tokenizer.decode(ids) != _PROBE:  # not a language model of English
        return None
    without = _mean_logprob(causal_lm, ids, skip=0)
    with_bos = _mean_logprob(causal_lm, [bos, *ids], skip=1)
    if with_bos - without < 1.0:
        return None
    return (
        f"model {codec.name!r}: its tokenizer emits no BOS but the model expects one (mean log-probability "
        f"{without:.1f} without, {with_bos:.1f} with); it is added to prompts ({place}.bos: keep leaves it out)"
    )


def _mean_logprob(causal_lm: Any, ids: list[int], skip: int) -> float:
    """Mean log-probability of the same tokens (all but the first of the text) with or without a prefix."""
    tokens = torch.tensor([ids], device=next(causal_lm.parameters()).device)
    logprobs: Tensor = causal_lm(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
    return float(logprobs.gather(-1, tokens[0, 1:, None])[skip:].mean())
