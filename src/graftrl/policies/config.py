"""Settings of a policy: which model, in which precision, how it is optimised, how it samples."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from graftrl.settings import Settings


class LoraSettings(Settings):
    """Low-rank adapters (PEFT).

    rank: of the adapters' matrices.
    alpha: the adapters' output is scaled by alpha / rank.
    target_modules: "all-linear" adapts every linear layer except the output head; or names of layers.
    """

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    target_modules: Literal["all-linear"] | list[str] = "all-linear"

    @model_validator(mode="after")
    def _head_stays_plain(self) -> LoraSettings:
        if isinstance(self.target_modules, list) and {"lm_head", "embed_out"} & set(self.target_modules):
            raise ValueError("lora.target_modules names the output head, which must stay a plain matrix; leave it out")
        return self


class OptimizerSettings(Settings):
    """AdamW with a learning rate that stays constant after a linear warm-up.

    lr: learning rate.
    betas: decay of the running means of the gradient and of its square.
    eps: added to the denominator.
    weight_decay: decoupled, as AdamW's.
    max_grad_norm: gradients of a larger L2 norm are scaled down to it.
    warmup_steps: optimizer steps until the full learning rate.
    """

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)


class WeightsSettings(Settings):
    """A model as its weights and tokenizer are read, whether it trains or not.

    path: a local directory, a `.gguf` file, or a hub id.
    device: "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one.
    trust_remote_code: run Python code that comes with the model. Only for models whose code you have read.
    chat_template: "auto" is the tokenizer's, where it has one; "plain" gives the contents of the messages as they are.
    dtype: precision of the forward and backward passes. Weights and optimizer states are float32 in either case: in
        bfloat16 an update of 1e-6 would vanish in the rounding of the weight.
    chat_template_options: variables of the model's chat template, such as {enable_thinking: false} of Qwen3.
    bos: "auto" keeps what the tokenizer or chat template emits, and adds the missing BOS (with a note) where the model
        plainly expects one; "add" and "keep" decide it by hand.
    extra_stop_tokens: more tokens that end a response, such as "\\n" for one-line answers without a chat template; the
        first of them also ends a peer's response in this model's tokens.
    microbatch_tokens: rows of one forward pass times their padded length; any value gives the same gradient.
    logit_elements: most logits held at once, in elements; bounds the memory of large vocabularies.
    """

    section: ClassVar[str] = "models"  # of the recipe, for error messages

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    trust_remote_code: bool = False
    chat_template: Literal["auto", "plain"] = "auto"
    chat_template_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    bos: Literal["auto", "add", "keep"] = "auto"
    extra_stop_tokens: list[str] = Field(default_factory=list)
    microbatch_tokens: int = Field(16_384, ge=1)
    logit_elements: int = Field(16_777_216, ge=1)

    def place(self, name: str) -> str:
        """Where in the recipe these settings of that name stand."""
        return f"{self.section}.{name}"


class ModelSettings(WeightsSettings):
    """One policy.

    lora: train low-rank adapters instead of all weights; none: all weights.
    gradient_checkpointing: recompute activations in the backward pass: less memory, more time.
    optimizer: of this model.
    sample_rows: responses sampled side by side.
    """

    lora: LoraSettings | None = None
    gradient_checkpointing: bool = False
    optimizer: OptimizerSettings = OptimizerSettings()
    sample_rows: int = Field(512, ge=1)


FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")  # other braces stand for themselves: prompts are full of LaTeX
QUESTION = "question"
CONTEXTS = {
    "plain": "{question}",
    "hint": "{question}\n\nHint: {hint}",
    "solution": "{question}\n\nA reference solution:\n{solution}\n\nAnswer the question.",
}


class ScorerSettings(WeightsSettings):
    """A frozen model that tells log-probabilities of other models' responses, and the context it reads them in.

    path: as of a model; or a folder with a LoRA adapter (PEFT), whose base model is then loaded. Scorers of the same
        path share their weights.
    adapter: a folder with a LoRA adapter that is put on `path`. A scorer without it, on the same path, is the same
        weights with the adapter off.
    context: what takes the place of the last user message: "plain", the message as it is; "hint" or "solution", with
        what the prompt's metadata hold under that name; or a template of your own, in which {question} is the message,
        {answer} the reference answer, and any other {name} a field of the metadata.
    """

    section: ClassVar[str] = "scorers"

    adapter: str | None = None
    context: str = "plain"

    @field_validator("context")
    @classmethod
    def _is_a_template(cls, context: str) -> str:
        if QUESTION not in FIELD.findall(CONTEXTS.get(context, context)):
            raise ValueError(
                f"{context!r} is none of {', '.join(CONTEXTS)}; a template of your own must contain {{question}}"
            )
        return context

    @property
    def template(self) -> str:
        return CONTEXTS.get(self.context, self.context)


class SamplingSettings(Settings):
    """How training responses are drawn: from the plain distribution, temperature 1, top-p 1 and no top-k.

    max_prompt_tokens: longer prompts are left out.
    max_response_tokens: EOS included; a response that has none by then is cut.
    temperature, top_p: must be 1, else ratios and scores would be biased; the evaluation section has its own.
    top_k: must be 0 (off), for the same reason.
    """

    max_prompt_tokens: int = Field(2048, ge=1)
    max_response_tokens: int = Field(4096, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)

    @property
    def is_plain(self) -> bool:
        """True for the model's own distribution: log-probabilities of samples are then those of the policy."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0
