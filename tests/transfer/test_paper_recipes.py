"""The recipes of the P-OPD paper: its settings, and a dry run of each with configurations of the real sizes.

There is no hub here, so that models are their configurations with small tokenizers, and data are made up.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from graftrl.config import Recipe, load_recipe
from graftrl.errors import ConfigError, ModelError
from graftrl.training.dry_run import dry_run

RECIPES = Path(__file__).parents[2] / "recipes" / "paper"
PROXIES = [RECIPES / f"p-opd-proxy-qwen3-{size}.yaml" for size in ("4b", "1.7b")]
TRANSFERS = [RECIPES / f"p-opd-{name}-to-{target}.yaml" for name, target in (
    ("qwen3-4b", "8b"), ("qwen3-1.7b", "8b"), ("skywork-7b", "qwen3-8b"),
)]  # fmt: skip
QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": 40_960}
QWEN25 = {
    "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGURATIONS = {  # as published, and parameters in billions
    "Qwen3-8B": (hf.Qwen3Config, {**QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
                                  "num_attention_heads": 32, "tie_word_embeddings": False}, 8.2),
    "Qwen3-4B": (hf.Qwen3Config, {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                                  "num_attention_heads": 32, "tie_word_embeddings": True}, 4.0),
    "Qwen3-1.7B": (hf.Qwen3Config, {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                                    "num_attention_heads": 16, "tie_word_embeddings": True}, 1.7),
    "Qwen2.5-7B": (hf.Qwen2Config, QWEN25, 7.6),
    "Skywork-OR1-Math-7B": (hf.Qwen2Config, QWEN25, 7.6),
}  # fmt: skip
SPECIAL = {
    "Qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "Qwen2.5": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "Skywork": ("<|end_of_sentence|>", "<|User|>", "<|Assistant|>"),
}
TEMPLATES = {
    "Qwen3": "<|im_start|>{{ messages[0]['content'] }}<|im_end|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    "Qwen2.5": "<|im_start|>{{ messages[0]['content'] }}<|im_end|>",
    "Skywork": "<|User|>{{ messages[0]['content'] }}<|Assistant|>",
}  # fmt: skip


def tokenizer(family: str) -> hf.PreTrainedTokenizerFast:
    """Ordinary tokens are the same in all families, special ones are not."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[family]])
    eos = "<|im_end|>" if family == "Qwen3" else SPECIAL[family][0]
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=TEMPLATES[family])


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """Folders by the last part of the hub ids."""
    root = tmp_path_factory.mktemp("hub")
    for name, (kind, options, _) in CONFIGURATIONS.items():
        kind(**options).save_pretrained(root / name)
        tokenizer(name.split("-")[0]).save_pretrained(root / name)
    (root / "train.jsonl").write_text(
        "".join(json.dumps({"question": f"What is {n} + 1?", "final_answer": str(n + 1)}) + "\n" for n in range(600))
    )
    (root / "test.jsonl").write_text(json.dumps({"id": 1, "problem": "What is 1 + 1?", "answer": "2"}) + "\n")
    return root


def here(path: Path, hub: Path) -> Recipe:
    """The recipe with the hub's models and data from `hub`; a pair from stage 1 lies under its base's name."""
    plain = load_recipe(path)
    changes = [f"task.train={{path: {hub / 'train.jsonl'}, problem_field: question, answer_field: final_answer}}"]
    changes.append(f"task.validation={{path: {hub / 'test.jsonl'}}}")
    base = plain.scorers["base"].path.split("/")[-1] if plain.scorers else ""
    for section, settings in (("models", plain.models), ("scorers", plain.scorers)):
        for name, of in settings.items():
            place = base if of.path.startswith("runs/") else of.path.split("/")[-1]
            changes.append(f"{section}.{name}.path={hub / place}")
    return load_recipe(path, changes)


@pytest.mark.parametrize("path", PROXIES, ids=lambda path: path.stem)
def test_stage_one_has_the_papers_settings(path):
    r = load_recipe(path)
    assert r.method.name == "grpo" and r.method.kl_coefficient == 0
    t, s = r.training, r.sampling
    assert (t.steps, t.prompts_per_step, t.group_size, t.minibatch_prompts) == (500, 128, 8, 128)
    assert (s.max_response_tokens, s.temperature, s.top_p) == (16_384, 1.0, 1.0)
    (model,) = r.models.values()
    assert model.optimizer.lr == 1e-6 and model.chat_template_options == {"enable_thinking": False}
    assert r.task.train.hub == "zwhe99/DeepMath-103K" and r.evaluation.samples == 16


@pytest.mark.parametrize(("path", "calibration"), zip(TRANSFERS, (1.0, 1.5, 1.0), strict=True))
def test_stage_two_has_the_papers_settings(path, calibration):
    r = load_recipe(path)
    m, t, s = r.method, r.training, r.sampling
    assert (m.name, m.calibration, m.estimator, m.single_minibatch) == ("p_opd", calibration, "sampled", True)
    assert (t.prompts_per_step, t.group_size, t.minibatch_prompts) == (256, 8, 256)
    assert (s.max_response_tokens, s.temperature, s.top_p) == (16_384, 1.0, 1.0)
    target = r.models["target"]
    assert (target.path, target.optimizer.lr) == ("Qwen/Qwen3-8B", 1e-6)
    assert target.chat_template_options == {"enable_thinking": False}
    assert list(r.scorers) == ["expert", "base"]


@pytest.mark.parametrize("path", [*PROXIES, *TRANSFERS], ids=lambda path: path.stem)
def test_a_dry_run_with_the_real_sizes(path, hub):
    recipe = here(path, hub)
    found = dry_run(recipe)
    names = {"proxy": 1} if path in PROXIES else {"target": 1, "expert (scorer)": 1, "base (scorer)": 1}
    assert names.keys() <= {line.name for line in found.models}
    asked = {**recipe.models, **{f"{name} (scorer)": of for name, of in recipe.scorers.items()}}
    for line in found.models:
        if line.name in asked:
            billions = CONFIGURATIONS[Path(asked[line.name].path).name][2]
            assert line.parameters == pytest.approx(billions * 1e9, rel=0.02)
    spans = sum("spans of bytes" in note for note in found.notes)
    assert spans == (2 if "skywork" in path.name else 0)


def test_the_full_form_applies_inside_a_generation_and_not_across(hub):
    for path in TRANSFERS:
        recipe = here(path, hub)
        recipe = recipe.model_copy(update={"method": recipe.method.model_copy(update={"estimator": "full"})})
        if "skywork" in path.name:
            with pytest.raises(ConfigError, match=r"have different tokenizers, .* use estimator: sampled"):
                dry_run(recipe)
        else:
            assert dry_run(recipe).models


def test_a_pair_from_stage_one_that_is_not_there_is_named(hub):
    plain, placed = load_recipe(TRANSFERS[0]), here(TRANSFERS[0], hub)
    recipe = placed.model_copy(update={"scorers": {**placed.scorers, "expert": plain.scorers["expert"]}})
    with pytest.raises(ModelError, match=r"scorers\.expert\.path: no directory runs/proxies/qwen3-4b-math/expert"):
        dry_run(recipe)
