"""Scorers: contexts, adapter folders, conventions of checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError
from tiny_models import prompts

from graftrl.errors import DataError, ModelError
from graftrl.policies.config import LoraSettings, ScorerSettings
from graftrl.policies.frozen import FrozenWeights
from graftrl.policies.scorers import in_context, open_scorer, resolved
from graftrl.rollout import Prompt

METADATA = {"solution": r"\frac{1}{2} {hint}", "hint": "halve it", "wrong": "double it", "empty": ""}
PROMPT = Prompt(
    "p1",
    (
        {"role": "user", "content": "earlier"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "What is {x}?"},
    ),
    "1/2",
    "t",
    METADATA,
)


def last(context: str) -> str:
    settings = ScorerSettings(path="unused", context=context)
    return in_context(PROMPT, settings.template, "s").messages[-1]["content"]


def test_contexts_by_name_and_by_template():
    assert in_context(PROMPT, ScorerSettings(path="unused").template, "s") is PROMPT
    assert last("hint") == "What is {x}?\n\nHint: halve it"
    assert r"\frac{1}{2} {hint}" in last("solution") and "halve" not in last("solution")  # values are not templates
    assert last("{question} ({wrong}, not {answer}) in \\boxed{}") == "What is {x}? (double it, not 1/2) in \\boxed{}"


def test_only_the_last_user_message_changes():
    begun = Prompt("p2", (*PROMPT.messages, {"role": "assistant", "content": "It"}), "1/2", "t", METADATA)
    changed = in_context(begun, "{hint}: {question}", "s")
    assert changed.messages[:2] == PROMPT.messages[:2] and changed.prefix == "It" and changed.id == "p2"
    assert changed.question[-1]["content"] == "halve it: What is {x}?"


@pytest.mark.parametrize("field", ["missing", "empty"])
def test_a_prompt_without_the_field_is_named(field):
    with pytest.raises(DataError, match=rf"scorers.s.context needs '{field}', .* 'p1' .* solution, hint, wrong"):
        in_context(PROMPT, "{question} {" + field + "}", "s")


def test_a_context_without_the_question_is_refused():
    with pytest.raises(ValidationError, match="none of plain, hint, solution"):
        ScorerSettings(path="x", context="solutoin")


def test_a_scorers_prompts_come_in_its_context(model_folder):
    store, folder = FrozenWeights(), str(model_folder("llama"))
    plain = open_scorer("plain", ScorerSettings(path=folder, device="cpu"), store)
    hinted = open_scorer("hinted", ScorerSettings(path=folder, device="cpu", context="ab{question}"), store)
    (prompt,) = prompts("cd")
    assert plain.model is hinted.model and plain.fingerprint == hinted.fingerprint
    decode = plain.tokenizer.decode
    assert decode(plain.prompt_token_ids(prompt)) == "cd" and decode(hinted.prompt_token_ids(prompt)) == "abcd"


def test_an_adapter_folder_finds_its_base(policy, model_folder, tmp_path):
    p = policy("llama", lora=LoraSettings(rank=2), bos="add")
    p.save(tmp_path / "adapter")
    found = resolved("s", ScorerSettings(path=str(tmp_path / "adapter")))
    assert (found.path, found.adapter) == (str(model_folder("llama")), str(tmp_path / "adapter"))
    assert found.bos == "add"  # what the policy did while it trained
    assert resolved("s", ScorerSettings(path=str(tmp_path / "adapter"), bos="keep")).bos == "keep"
    scorer = open_scorer("s", ScorerSettings(path=str(tmp_path / "adapter"), device="cpu"), FrozenWeights())
    (prompt,) = prompts("cd")
    assert np.array_equal(scorer.prompt_token_ids(prompt), p.codec.prompt_token_ids(prompt))


def test_an_adapter_folder_without_its_base_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelError, match="does not name the model that it adapts"):
        resolved("s", ScorerSettings(path=str(tmp_path)))


def test_a_missing_scorer_is_named_by_its_section(tmp_path):
    with pytest.raises(ModelError, match=r"scorers\.s\.path: no directory"):
        open_scorer("s", ScorerSettings(path=str(tmp_path / "none")), FrozenWeights())
