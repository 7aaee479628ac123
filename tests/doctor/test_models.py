"""Each trap of a model is found, named and mended in one line; sound models have none."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftrl.config import parse_recipe
from graftrl.doctor.models import check_model, check_models, settings_of, turn_end
from graftrl.policies.config import ModelSettings, SamplingSettings
from graftrl.policies.loading import load_skeleton

# Of the laboratory's tokenizer: a header, the text, and </s>.
SOUND = (
    "{% for m in messages %}{{ '>' if m['role'] == 'user' else ':' }}{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


@pytest.fixture
def model(pair, tmp_path):
    """A copy of model A whose tokenizer or generation config is changed."""

    def build(*, template=SOUND, tokens=(), eos=None, tokenizer_changes=None):
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(pair["A"], folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        for name, value in (tokenizer_changes or {}).items():
            setattr(tokenizer, name, value)
        if tokens:
            tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
        tokenizer.save_pretrained(folder)
        if eos is not None:
            config = json.loads((folder / "generation_config.json").read_text())
            (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
        return folder

    return build


def found(folder, check, **settings):
    findings, _ = check_model("m", ModelSettings(path=str(folder), **settings))
    return [(finding.level, finding.message) for finding in findings if finding.check == check]


def only(folder, check, level, **settings):
    matching = [message for each, message in found(folder, check, **settings) if each == level]
    assert len(matching) == 1 and "\n" not in matching[0]
    return matching[0]


def test_a_sound_model_has_no_problem(model):
    findings, skeleton = check_model(
        "m", settings_of(str(model())), sampling=SamplingSettings(max_prompt_tokens=20, max_response_tokens=20)
    )
    assert {finding.level for finding in findings} == {"ok", "note"} and skeleton is not None
    assert found(model(), "eos")[0][0] == "ok" and "'</s>'" in found(model(), "eos")[0][1]
    assert found(model(), "chat template") == []


def test_a_template_that_ends_answers_with_a_token_that_ends_no_response(model):
    folder = model(template=SOUND.replace("</s>", "<pad>"))
    message = only(folder, "eos", "problem")
    assert "'<pad>'" in message and "models.m.extra_stop_tokens: ['<pad>']" in message
    assert found(folder, "eos", extra_stop_tokens=["<pad>"])[0][0] == "ok"


def test_an_end_of_turn_among_several_eos_that_is_not_the_tokenizers(model):
    folder = model(template=SOUND.replace("</s>", "<pad>"), eos=[2, 3])
    message = only(folder, "eos", "note")
    assert "'<pad>'" in message and "'</s>'" in message and "extra_stop_tokens" in message


def test_the_end_of_a_turn_is_found_behind_white_space_and_may_be_missing(model):
    def end(template):
        return turn_end(load_skeleton("m", settings_of(str(model(template=template))))[1])

    assert end(SOUND.replace("</s>", "\n</s>")) == 2
    assert end("{% for m in messages %}{{ m['content'] }}{% endfor %}") is None


def test_padding_that_is_an_eos(model):
    assert "'</s>'" in only(model(tokenizer_changes={"pad_token": "</s>"}), "pad", "note")
    assert found(model(), "pad") == []


def test_a_template_that_drops_the_answer_or_the_question(model):
    drops = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    assert "drops the assistant's answer" in only(model(template=drops), "chat template", "problem")
    deaf = "{% for m in messages %}{% if m['role'] != 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    assert "drops the user's message" in only(model(template=deaf), "chat template", "problem")


def test_a_template_that_refuses_an_answer_or_everything(model):
    one = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0]['content'] }}"
    notes = [message for level, message in found(model(template=one), "chat template") if level == "note"]
    assert any("refuses an assistant's answer" in note for note in notes)
    none = "{{ raise_exception('never') }}"
    folder = model(template=none)
    codec_free = found(folder, "chat template", chat_template="plain")
    assert codec_free == [("note", "there is one, and chat_template: plain leaves it out")]


def test_a_template_with_a_system_message_of_its_own_or_without_a_generation_prompt(model):
    system = "system:be brief" + SOUND
    notes = [message for level, message in found(model(template=system), "chat template")]
    assert any("system message of its own" in note for note in notes)
    plain = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    assert "add_generation_prompt changes nothing" in only(model(template=plain), "chat template", "note")


def test_a_missing_and_a_doubled_bos(model):
    assert "'<s>'" in only(model(), "bos", "note")
    assert "two '<s>'" in only(model(template="<s><s>" + SOUND), "bos", "problem")
    assert found(model(template="<s>" + SOUND), "bos")[0][0] == "ok"


def test_a_tokenizer_larger_than_the_embeddings(model):
    assert "out of range" in only(model(tokens=[f"<t{i}>" for i in range(9)]), "vocabulary", "problem")


def test_a_model_without_safetensors(model):
    folder = model()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "may run code" in only(folder, "weights", "problem")
    (folder / "pytorch_model.bin").unlink()
    assert "no weights" in only(folder, "weights", "problem")


def test_text_that_does_not_survive_the_tokenizer(model, tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyz $^=239:-;\\{}.\n"
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(["<unk>", "</s>", *characters])}, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.decoder = decoders.Fuse()
    folder = model()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    assert "changed by round trip" in only(folder, "round trip", "problem")


def test_a_context_that_is_too_short_for_the_recipe(model):
    findings, _ = check_model("m", settings_of(str(model())), sampling=SamplingSettings())
    assert next(f.message for f in findings if f.check == "context").startswith("model 'm' has 128 positions")


def test_a_missing_model_is_a_problem_not_a_crash(tmp_path):
    findings, skeleton = check_model("m", settings_of(str(tmp_path / "none")))
    assert [(f.level, f.check) for f in findings] == [("problem", "loading")] and skeleton is None


def test_weights_are_measured_when_asked(model):
    findings, _ = check_model("m", settings_of(str(model())), weights=True)
    assert [(f.level, f.message) for f in findings if f.check == "bos"] == [
        ("ok", "measured: none has to be added to prompts")
    ]
    assert [f.level for f in findings if f.check == "loading"] == ["ok"]
    folder = model()
    (folder / "model.safetensors").write_bytes(b"torn")
    findings, _ = check_model("m", settings_of(str(folder)), weights=True)
    assert [f.level for f in findings if f.check == "loading"] == ["problem"]


def test_a_recipes_models_are_checked_together(pair):
    recipe = {
        "name": "r",
        "method": "graft",
        "models": {"A": {"path": pair["A"]}, "B": {"path": pair["B"]}, "A2": {"path": pair["A"]}},
        "scorers": {"teacher": {"path": "/none/such"}},
        "task": {"kind": "hidden_programs"},
        "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 30},
        "training": {"steps": 1, "prompts_per_step": 4, "minibatch_prompts": 4},
    }
    findings, size = check_models(parse_recipe(recipe, "test"))
    together = {f.about: f.message for f in findings if f.check == "tokenizers"}
    assert "two tokenizers" in together["A, B"] and "one tokenizer" in together["A, A2"]
    assert [f.level for f in findings if f.about == "teacher (scorer)"] == ["problem"]
    parameters = [sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(pair[m]).parameters()) for m in "ABA"]
    assert size == 12 * sum(parameters)  # weights and both of AdamW's moments, in float32
