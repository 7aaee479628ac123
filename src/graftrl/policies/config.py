"""Settings of a policy: which model, in which precision, how it is optimised, how it samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from graftrl.settings import Settings


class LoraSettings(Settings):
    """Low-rank adapters (PEFT). `target_modules: all-linear` adapts every linear layer except the output head."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    target_modules: Literal["all-linear"] | list[str] = "all-linear"

    @model_validator(mode="after")
    def _head_stays_plain(self) -> LoraSettings:
        if isinstance(self.target_modules, list) and {"lm_head", "embed_out"} & set(self.target_modules):
            raise ValueError("lora.target_modules names the output head, which must stay a plain matrix; leave it out")
        return self


class OptimizerSettings(Settings):
    """AdamW with a constant learning rate after `warmup_steps` (counted in optimizer steps)."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)


class ModelSettings(Settings):
    """One policy.

    path: a local directory, a `.gguf` file, or a hub id.
    dtype: precision of the forward and backward passes. Weights and optimizer states are float32 in either case: in
        bfloat16 an update of 1e-6 would vanish in the rounding of the weight.
    bos: "auto" keeps what the tokenizer or chat template emits, and adds the missing BOS (with a note) where the model
        plainly expects one; "add" and "keep" decide it by hand.
    extra_stop_tokens: more tokens that end a response, such as "\\n" for one-line answers without a chat template; the
        first of them also ends a peer's response in this model's tokens.
    microbatch_tokens: rows of one forward pass times their padded length; any value gives the same gradient.
    sample_rows: responses sampled side by side.
    logit_elements: most logits held at once, in elements; bounds the memory of large vocabularies.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    trust_remote_code: bool = False
    chat_template: Literal["auto", "plain"] = "auto"
    bos: Literal["auto", "add", "keep"] = "auto"
    extra_stop_tokens: list[str] = Field(default_factory=list)
    lora: LoraSettings | None = None
    gradient_checkpointing: bool = False
    optimizer: OptimizerSettings = OptimizerSettings()
    microbatch_tokens: int = Field(16_384, ge=1)
    sample_rows: int = Field(512, ge=1)
    logit_elements: int = Field(16_777_216, ge=1)


class SamplingSettings(Settings):
    """How responses are drawn. Lengths are in tokens; the response limit includes the EOS."""

    max_prompt_tokens: int = Field(2048, ge=1)
    max_response_tokens: int = Field(4096, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)

    @property
    def is_plain(self) -> bool:
        """True for the model's own distribution: log-probabilities of samples are then those of the policy."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0
