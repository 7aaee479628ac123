"""How much memory a policy will need: counted where it can be counted, estimated (and labelled so) elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graftrl.policies.config import ModelSettings, SamplingSettings


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. weights, gradients and optimizer are exact; activations are an estimate; cache and logits are limits."""

    parameters: int
    trainable: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    cache: int
    logits: int

    @property
    def training(self) -> int:
        """The peak while training: the sampler's cache is gone by then."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    @property
    def sampling(self) -> int:
        """The peak while sampling: optimizer states stay."""
        return self.weights + self.optimizer + self.cache + self.logits

    @property
    def peak(self) -> int:
        return max(self.training, self.sampling)


def estimate_memory(causal_lm: Any, settings: ModelSettings, sampling: SamplingSettings) -> MemoryEstimate:
    """Memory of one policy; `causal_lm` may live on the meta device.

    Activations per token and layer: about 34 hidden-size values without checkpointing (Korthikanti et al., 2022,
    without the attention matrix, which fused attention does not keep), 2 with it.
    """
    config = causal_lm.config.get_text_config()
    parameters = sum(p.numel() for p in causal_lm.parameters())
    trainable = parameters if settings.lora is None else _lora_parameters(causal_lm, settings.lora.rank)
    width = 2 if settings.dtype == "bfloat16" else 4
    tokens = max(settings.microbatch_tokens, sampling.max_prompt_tokens + sampling.max_response_tokens)
    per_layer = 2 if settings.gradient_checkpointing else 34
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = sampling.max_prompt_tokens + sampling.max_response_tokens
    return MemoryEstimate(
        parameters=parameters,
        trainable=trainable,
        weights=4 * parameters + (2 * parameters if width == 2 else 0),  # float32, and the copy that autocast makes
        gradients=4 * trainable,
        optimizer=8 * trainable,
        activations=tokens * config.num_hidden_layers * per_layer * config.hidden_size * width,
        cache=settings.sample_rows * length * config.num_hidden_layers * 2 * heads * head_size * width,
        logits=3 * 4 * settings.logit_elements,
    )


def _lora_parameters(causal_lm: Any, rank: int) -> int:
    """Upper bound: adapters on every linear layer but the output head."""
    from torch import nn

    head = causal_lm.get_output_embeddings()
    return sum(
        rank * (module.in_features + module.out_features)
        for module in causal_lm.modules()
        if isinstance(module, nn.Linear) and module is not head
    )
