"""`graftrl probe` as a user meets it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from graftrl.config import dump_recipe
from graftrl.names import model_names
from graftrl.probe import command, live

FAIL, HALF = (0, 0), (0, 1)
TASK = {"task": {"kind": "hidden_programs"}, "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 30}}


@pytest.fixture
def task(tmp_path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(TASK))
    return path


def refused(result: tuple[int, str, str], code: int = 2) -> str:
    """The one line on standard error."""
    assert result[0] == code and result[1] == "" and result[2].startswith("error: ") and result[2].count("\n") == 1
    return result[2]


@pytest.fixture
def no_page(monkeypatch):
    """Plots take a second that a test of numbers need not spend."""
    monkeypatch.setattr(command, "render_page", lambda report, observed: "")


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)


def test_the_warm_pair_from_models_to_verdict(graftrl, warm, task, tmp_path):
    out = tmp_path / "out"
    code, printed, _ = graftrl(
        "probe", warm["A"], warm["B"], "--task", task, "--prompts", 64, "--threads", 1, "--out", out,
    )  # fmt: skip
    assert code == 0
    names = [Path(warm[name]).name for name in "AB"]
    for words in (
        "pass@1",
        "pass@8",
        "solved by source",
        "selected of 128",
        "δ 0.8",
        "An exchange pays for",
        "Try first:",
    ):
        assert words in printed
    result = json.loads((out / "probe.json").read_text())
    assert list(result["models"]) == names and result["prompts"] == 64 and result["group_size"] == 8
    for model in result["models"].values():  # the laboratory warms up to .38 on six families of twelve, .02 on the rest
        assert 0.12 < model["pass_at"]["1"]["low"] < 0.2 < model["pass_at"]["1"]["high"] < 0.3
        assert model["pass_at"]["8"]["value"] == pytest.approx(1 - model["all_fail"])
    for direction in result["directions"]:  # each is strong where the other is weak
        assert direction["solved_share"]["value"] > 0.9 and direction["candidates"] >= 15
        (step,) = direction["per_step"]
        assert step["prompts"] == 128 and step["selected"]["value"] <= step["candidates"]["value"]
        assert direction["candidates"] * 128 / 64 == pytest.approx(step["candidates"]["value"], rel=0.1)
        c = direction["compatibility"]
        assert c["groups"] == direction["candidates"] and c["successes"] + c["failures"] == 8 * c["groups"]
        # on a prompt of its weak families a receiver lacks about 3.4 nats, over about 20 tokens: exp(-0.17) = 0.84
        assert 0.78 < c["success_quantiles"][1] < 0.9 and c["rejected"] == {}
    assert result["verdict"]["pays"] == dict.fromkeys(names, "yes")
    assert (result["verdict"]["method"], result["verdict"]["threshold"]) == ("scion", 0.8)

    page = (out / "probe.html").read_text()
    assert _Tags(page).tags.count("svg") == 4 and "Try first: scion" in page
    assert not {"script", "img", "link", "image"} & set(_Tags(page).tags) and "http" not in page


def test_other_thresholds_and_json_need_no_model(graftrl, warm, task, tmp_path, monkeypatch, no_page):
    arguments = ["probe", warm["A"], warm["B"], "--task", task, "--prompts", 8, "--out", tmp_path / "out"]
    assert graftrl(*arguments)[0] == 0
    monkeypatch.setattr(live, "LocalEngine", None)
    code, printed, _ = graftrl(*arguments, "--delta", 0.65, "--json")
    result = json.loads(printed)
    assert code == 0 and result["thresholds"] == [0.0, 0.5, 0.6, 0.65, 0.7, 0.8, 0.9]
    assert [a["threshold"] for a in result["directions"][0]["compatibility"]["admission"]] == result["thresholds"]
    assert printed == (tmp_path / "out" / "probe.json").read_text()


def test_a_recipe_gives_models_task_step_and_threshold(graftrl, recipe, tmp_path, no_page):
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe(method={"name": "graft", "threshold": 0.75})))
    code, printed, _ = graftrl(
        "probe", "--recipe", path, "training.group_size=2", "--prompts", 8, "--out", tmp_path / "out", "--json"
    )
    result = json.loads(printed)
    assert code == 0 and result["name"] == "warm" and result["group_size"] == 2 and 0.75 in result["thresholds"]
    assert [step["prompts"] for step in result["directions"][0]["per_step"]] == [32, 128]
    assert result["verdict"]["step_prompts"] == 32


def test_three_models_and_the_same_model_twice(graftrl, warm, task, tmp_path, no_page):
    code, printed, _ = graftrl(
        "probe", warm["A"], warm["B"], warm["A"], "--task", task, "--prompts", 64, "--out", tmp_path / "out", "--json"
    )
    result = json.loads(printed)
    a, _, again = result["models"]
    assert code == 0 and again == f"{a}-2" and len(result["directions"]) == 6
    between = [d["compatibility"] for d in result["directions"] if {d["source"], d["receiver"]} == {a, again}]
    scored = [c for c in between if c is not None]
    assert scored  # the two sample different responses, and each finds the other's as probable as the other did
    for c in scored:
        assert c["success_quantiles"] == pytest.approx([1, 1, 1], abs=1e-4)
        assert c["failure_quantiles"] == pytest.approx([1, 1, 1], abs=1e-4)


def test_logs_alone_and_the_scores_that_they_hold(graftrl, write_log, transfer, tmp_path):
    steps = {1: {"A": {"p1": FAIL, "p2": HALF}, "B": {"p1": HALF, "p2": FAIL}}}
    silent = write_log("silent", steps)
    code, printed, _ = graftrl("probe", "--log", silent, "--out", tmp_path / "out")
    assert code == 0 and "note: s is not known" in printed and "Compatibility" not in printed
    assert "s is not known" in (tmp_path / "out" / "probe.html").read_text()
    moved = [transfer("A", "B", "p1", 0, 0.0, 0.9), transfer("A", "B", "p1", 1, 1.0, 0.85)]
    code, printed, _ = graftrl("probe", "--log", write_log("told", steps, moved), "--out", tmp_path / "out")
    assert code == 0 and "s comes from the logs' exchanges: 1 groups" in printed and "0.85" in printed


def test_a_recipes_models_score_a_log(graftrl, recipe, tmp_path, no_page):
    settings = recipe()
    live.sample(settings, tmp_path / "log", 8)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(settings))
    code, printed, _ = graftrl("probe", "--log", tmp_path / "log", "--recipe", path, "--out", tmp_path / "a", "--json")
    computed = json.loads(printed)
    assert code == 0 and any("recipe's models" in note for note in computed["notes"])
    logged = json.loads(graftrl("probe", "--log", tmp_path / "log", "--out", tmp_path / "b", "--json")[1])
    for one, other in zip(computed["directions"], logged["directions"], strict=True):
        assert one["compatibility"]["success_quantiles"] == pytest.approx(other["compatibility"]["success_quantiles"])
    renamed = tmp_path / "renamed.yaml"
    content = yaml.safe_load(path.read_text())
    content["models"]["C"] = content["models"].pop("B")
    renamed.write_text(yaml.safe_dump(content))
    result = graftrl("probe", "--log", tmp_path / "log", "--recipe", renamed, "--out", tmp_path / "c")
    assert "has no model 'B'" in refused(result)


def test_names_from_logs_are_text_on_page_and_terminal(graftrl, write_log, tmp_path):
    hostile = "<script>alert(1)</script>"
    log = write_log("run", {1: {hostile: {"p1": FAIL}, "[red]B": {"p1": HALF}}})
    code, printed, _ = graftrl("probe", "--log", log, "--out", tmp_path / "out")
    assert code == 0 and "[red]B" in printed
    page = (tmp_path / "out" / "probe.html").read_text()
    assert "script" not in _Tags(page).tags and "&lt;script&gt;" in page


def test_bad_input_is_one_line_and_a_non_zero_exit(graftrl, warm, task, recipe, write_log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = warm.values()
    assert "two models or more, not 1" in refused(graftrl("probe", a, "--task", task))
    assert "two models or more, not 0" in refused(graftrl("probe"))
    assert "--task FILE.yaml" in refused(graftrl("probe", a, b))
    assert "no such recipe" in refused(graftrl("probe", a, b, "--task", "none.yaml"))
    assert "no directory" in refused(graftrl("probe", a, "/none/of/it", "--task", task))
    assert "temperature=0.7" in refused(graftrl("probe", a, b, "--task", task, "sampling.temperature=0.7"))
    assert "positions" in refused(graftrl("probe", a, b, "--task", task, "--max-response-tokens", 100000))
    assert "not all numbers >= 0" in refused(graftrl("probe", a, b, "--task", task, "--delta", -1))
    assert "group_size" in refused(graftrl("probe", a, b, "--task", task, "--group-size", 1))
    taskless = tmp_path / "taskless.yaml"
    taskless.write_text("sampling: {max_prompt_tokens: 8}")
    assert "task: is missing" in refused(graftrl("probe", a, b, "--task", taskless))
    one = tmp_path / "one.yaml"
    one.write_text(dump_recipe(recipe(method="grpo", models={"A": {"path": a}})))
    assert "there is one; name two under models" in refused(graftrl("probe", "--recipe", one))
    assert "leave out" in refused(graftrl("probe", a, b, "--recipe", one))
    assert "--task goes with models" in refused(graftrl("probe", "--recipe", one, "--task", task))
    assert "no recipe to change" in refused(graftrl("probe", "--log", "x", "seed=2"))
    assert "no such file or folder" in refused(graftrl("probe", "--log", "nowhere"))
    log = write_log("single", {1: {"A": {"p1": FAIL}}})
    assert "give a second --log" in refused(graftrl("probe", "--log", log))
    assert list((tmp_path / "runs").glob("*/probe.json")) == []


@pytest.mark.parametrize("verifier", ["never", "half"])
def test_a_task_whose_rewards_teach_nothing(graftrl, warm, tmp_path, monkeypatch, verifier):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "training"))
    task = {"kind": "function", "prompts": "toy_task:prompts", "verifier": f"toy_task:{verifier}"}
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump({**TASK, "task": task}))
    result = graftrl(
        "probe", *warm.values(), "--task", path, "--prompts", 4, "--group-size", 2, "--out", tmp_path / "out"
    )
    if verifier == "half":
        assert "has reward 0.5" in refused(result)
    else:
        assert result[0] == 0 and "Try first: grpo" in result[1]
        assert "nothing to score" in (tmp_path / "out" / "probe.html").read_text()


def test_a_task_without_prompts_is_refused(graftrl, warm, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "training"))
    path = tmp_path / "task.yaml"
    empty = {"kind": "function", "prompts": "toy_task:nothing", "verifier": "toy_task:never"}
    path.write_text(yaml.safe_dump({**TASK, "task": empty}))
    assert "no prompts" in refused(graftrl("probe", *warm.values(), "--task", path, "--out", tmp_path / "out"))


def test_an_interrupted_probe_says_what_is_kept(graftrl, warm, task, tmp_path, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "grade_groups", interrupted)
    code, _, err = graftrl("probe", *warm.values(), "--task", task, "--out", tmp_path / "out")
    assert code == 130 and "the same command goes on from there" in err


def test_a_folder_in_use_is_refused(graftrl, warm, task, tmp_path):
    from graftrl.training.run_folder import RunFolder

    (tmp_path / "out").mkdir()
    with RunFolder(tmp_path / "out").locked():
        result = graftrl("probe", *warm.values(), "--task", task, "--out", tmp_path / "out")
    assert "in use by another process; wait for it or choose another --out" in refused(result, 3)


def test_models_get_the_last_part_of_their_path_as_name():
    assert model_names(["Qwen/Qwen3-1.7B-Base", "runs/lab cache/", "x/m.gguf", "y/m.gguf", "y/m", ".."]) == [
        "Qwen3-1.7B-Base", "lab-cache", "m", "m-2", "m-3", "model",
    ]  # fmt: skip
