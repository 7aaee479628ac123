from pathlib import Path

import pytest
import yaml

from graftrl.config import dump_recipe, load_recipe, load_task, parse_recipe
from graftrl.errors import ConfigError


def content(**sections):
    recipe = {
        "name": "r",
        "method": "graft",
        "models": {"A": {"path": "a"}, "B": {"path": "b"}},
        "task": {"kind": "hidden_programs"},
        "training": {"steps": 3},
    }
    return {**recipe, **sections}


def refusal(**sections) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(content(**sections), "r.yaml")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("r.yaml: ")
    return message


def test_defaults_are_the_papers_settings():
    recipe = parse_recipe(content(), "r.yaml")
    t, s, o, m = recipe.training, recipe.sampling, recipe.models["A"].optimizer, recipe.method
    assert (t.prompts_per_step, t.group_size, t.minibatch_prompts, t.epochs_per_batch) == (128, 8, 32, 1)
    assert (s.max_prompt_tokens, s.max_response_tokens, s.temperature, s.top_p, s.top_k) == (2048, 4096, 1.0, 1.0, 0)
    assert (o.lr, o.betas, o.weight_decay, o.max_grad_norm) == (1e-6, (0.9, 0.999), 0.01, 1.0)
    assert (m.threshold, m.clip_low, m.clip_high, m.weighting, m.balanced) == (0.8, 0.2, 0.28, "gate", True)
    assert (m.kl_coefficient, m.dual_clip, m.normalize_std) == (0.0, None, True)


def test_a_dumped_recipe_loads_to_the_same_recipe(tmp_path):
    recipe = parse_recipe(content(method={"name": "graft", "threshold": 0.7}), "r.yaml")
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "r.yaml") == recipe


def test_a_group_of_one_is_refused_where_an_advantage_is_relative_to_the_group():
    one = {"steps": 1, "group_size": 1}
    for method in ("graft", "grpo", "scion", "hacpo", "es"):
        assert "standard deviation of one sample" in refusal(training=one, method=method)
    assert "training.group_size" in refusal(training={"steps": 1, "group_size": 0}, method="opd")
    scorers = {"teacher": {"path": "t"}, "expert": {"path": "t"}, "base": {"path": "a"}}
    for method in ("opd", "p_opd"):
        assert parse_recipe(content(training=one, method=method, scorers=scorers), "r.yaml").training.group_size == 1


@pytest.mark.parametrize("setting", [{"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 50}])
def test_sampling_from_another_distribution_is_refused_for_training(setting):
    message = refusal(sampling=setting)
    assert "unmodified distribution" in message and "evaluation" in message
    parse_recipe(content(evaluation={"temperature": 0.6, "top_p": 0.95}), "r.yaml")  # evaluation may


def test_unknown_keys_are_refused_with_a_suggestion():
    assert refusal(trainig={"steps": 3}).endswith("trainig: unknown key; did you mean 'training'?")
    assert "training.stepz: unknown key; did you mean 'steps'?" in refusal(training={"stepz": 3, "steps": 1})
    assert "method.treshold: unknown key" in refusal(method={"name": "graft", "treshold": 0.7})


def test_impossible_combinations_are_refused():
    assert "at least 2" in refusal(models={"A": {"path": "a"}})
    assert "minibatch_prompts (64) exceeds" in refusal(
        training={"steps": 1, "prompts_per_step": 32, "minibatch_prompts": 64}
    )
    assert "exactly one of training.steps and training.epochs" in refusal(training={"steps": 1, "epochs": 1})
    assert "exactly one of" in refusal(training={})
    assert "unknown method 'graftt'" in refusal(method="graftt")
    assert "letters, digits" in refusal(models={"../A": {"path": "a"}, "B": {"path": "b"}})
    assert "output head" in refusal(
        models={"A": {"path": "a", "lora": {"target_modules": ["lm_head"]}}, "B": {"path": "b"}}
    )


def test_a_stored_peer_counts_for_methods_that_need_two_and_survives_a_round_trip():
    one, peers = {"A": {"path": "a"}}, {"B": {"log": ["runs/x", "runs/y"], "match": "prompt", "choose": "random"}}
    recipe = parse_recipe(content(models=one, peers=peers), "r.yaml")
    assert [str(path) for path in recipe.peers["B"].log] == ["runs/x", "runs/y"] and recipe.peers["B"].model is None
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe)), "again") == recipe
    short = parse_recipe(content(models=one, peers={"B": {"log": "runs/x"}}), "r.yaml").peers["B"]
    assert ([str(path) for path in short.log], short.match, short.choose) == (["runs/x"], "step_and_prompt", "newest")


def test_the_stored_recipe_is_the_quickstarts_with_one_model_and_a_log():
    folder = Path(__file__).parents[1] / "recipes"
    stored, quickstart = (load_recipe(folder / f"{name}.yaml") for name in ("stored", "quickstart"))
    assert stored.models == {"A": quickstart.models["A"]} and stored.peers["B"].model == "B"
    rest = {"name": "x", "models": stored.models, "peers": {}}
    assert stored.model_copy(update=rest) == quickstart.model_copy(update=rest)


def test_peers_that_cannot_work_are_refused():
    def refused(name="B", **peer):
        return refusal(peers={name: peer})

    assert "'A' is the name of a model and of a peer" in refused("A", log="x")
    assert "letters, digits" in refused("B->A", log="x")
    assert "peers.B.log: is missing" in refused(model="B")
    assert "peers.B.log: name a run folder" in refused(log=[]) and "name a run folder" in refused(log=3)
    assert "set match to 'prompt'" in refused(log="x", choose="random")
    assert "peers.B.chose: unknown key; did you mean 'choose'?" in refused(log="x", chose="random")
    assert "peers.B.match" in refused(log="x", match="step")


def test_missing_sections_are_named():
    recipe = content()
    del recipe["task"]
    with pytest.raises(ConfigError, match="task: is missing"):
        parse_recipe(recipe, "r.yaml")


def test_overrides_reach_nested_keys_and_keep_yaml_types(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(content()))
    recipe = load_recipe(
        path, ["training.steps=7", "method.threshold=0.7", "models.A.optimizer.lr=1e-5", "trackers=[tensorboard]"]
    )
    assert recipe.training.steps == 7 and recipe.method.threshold == 0.7
    assert recipe.models["A"].optimizer.lr == 1e-5 and recipe.trackers == ["tensorboard"]
    assert load_recipe(path, ["method=grpo"]).method.name == "grpo"


@pytest.mark.parametrize(
    ("override", "message"),
    [("steps", "write key=value"), ("name.x=1", "is a value, not a section"), ("seed=[", "not valid YAML")],
)
def test_bad_overrides_are_refused(tmp_path, override, message):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(content()))
    with pytest.raises(ConfigError, match=message):
        load_recipe(path, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML"), ("- a", "a mapping"), ("!!python/object:os.system {}", "not valid YAML")],
)
def test_files_that_are_no_recipe_are_refused(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)
    with pytest.raises(ConfigError, match="no such recipe"):
        load_recipe(tmp_path / "absent.yaml")


def test_a_method_of_your_own_is_named_by_module_and_class():
    with pytest.raises(ConfigError, match="cannot import"):
        parse_recipe(content(method="no_such_module:Method"), "r.yaml")
    with pytest.raises(ConfigError, match="lacks"):
        parse_recipe(content(method="collections:OrderedDict"), "r.yaml")


def test_the_task_section_of_any_yaml_file_can_be_read(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text("task: {kind: hidden_programs, families: 3, validation_size: 6}")
    assert load_task(path).families == 3
    for text, message in (("x: 1", "no task section"), ("task: {kind: math}", "task.math.train: is missing")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_task(path)
