"""`graftrl plan` as a user meets it, and the page about it."""

from __future__ import annotations

import io
import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
import yaml
from rich.console import Console

from graftrl.cli import app
from graftrl.config import load_recipe
from graftrl.errors import ConfigError
from graftrl.plan.command import PlanRequest, layout_of, read_log, run_plan, with_numbers
from graftrl.plan.devices import DEVICES, GIB
from graftrl.plan.show import show
from graftrl.training.dry_run import dry_run

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "recipes" / "paper" / "smollm3-qwen3.yaml"
FEWER = ("models.smollm3.sample_rows=64", "models.qwen3.sample_rows=64")


@pytest.fixture
def tiny(tmp_path, monkeypatch, pair):
    """A recipe of two tiny models whose task is importable."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "training"))
    content = {
        "name": "toy",
        "method": "graft",
        "models": {name: {"path": path, "device": "cpu"} for name, path in pair.items()},
        "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:verify"},
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 8},
        "training": {"steps": 1, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


SMALL = ("training.prompts_per_step=32", "training.minibatch_prompts=16")


def plan(*overrides, **options):
    return run_plan(PlanRequest(PAIR, [*FEWER, *SMALL, *overrides], **{"steps": 2, **options}))


@pytest.mark.parametrize(
    "name", ["smollm3-qwen3", "octothinker-qwen3", "smollm3-octothinker", "p-opd-skywork-7b-to-qwen3-8b"]
)
def test_the_papers_recipes_are_planned_without_a_download(name):
    found = run_plan(PlanRequest(PAIR.with_name(f"{name}.yaml"), device=["h200"], steps=1))
    assert {policy.source for policy in found.policies} == {"a built-in table"}
    assert found.step_seconds > 0 and (found.fits or found.advice)


def test_the_table_and_the_json_have_the_same_numbers(graftrl, tiny):
    code, out, err = graftrl("plan", tiny, "--steps", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["fits"] and found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert sum(found["used"].values()) == pytest.approx(1.0)
    assert [policy["device"] for policy in found["policies"]] == ["cpu", "cpu"]
    code, out, _ = graftrl("plan", tiny, "--steps", "1")
    assert code == 0 and f"{found['sampled_tokens']:,}" in out and "where the devices' time goes" in out
    assert "does NOT fit" not in out


def test_a_dry_run_and_a_plan_agree_on_memory(tiny):
    recipe = load_recipe(tiny)
    ours, theirs = run_plan(PlanRequest(tiny, steps=1)), dry_run(recipe)
    for policy, line in zip(ours.policies, theirs.models, strict=True):
        assert (policy.parameters, policy.memory.weights) == (line.parameters, line.weights)
        assert policy.memory.gradients + policy.memory.optimizer == line.optimizer
    # The plan knows that a step has 32 responses; the dry run allows sample_rows.
    few = load_recipe(tiny, [f"models.{name}.sample_rows=32" for name in "AB"])
    assert ours.peak["A"] == ours.peak["B"] == dry_run(few).peak_bytes


def test_what_does_not_fit_is_said_and_what_would(graftrl):
    code, out, _ = graftrl("plan", PAIR, "--device", "h100", "--steps", "1")
    assert code == 0 and "does NOT fit: all policies: about" in out and "would fit with" in out


def test_advice_on_memory_is_true():
    """Each piece of advice, taken, makes it fit."""
    short = PlanRequest(PAIR, device=["h100"], steps=1)
    advice = run_plan(short).advice
    assert len(advice) >= 2
    for text in advice:
        changes = re.findall(r"models\.NAME\.(\S+)=(\S+)", text)
        overrides = [f"models.{name}.{key}={value}" for name in ("smollm3", "qwen3") for key, value in changes]
        times = re.search(r"(\d+) times as many", text)
        taken = run_plan(
            PlanRequest(
                PAIR,
                overrides,
                device=["h100"],
                devices=[times[1]] if times else [],
                own=True if "--own" in text else None,
                sampler=True if times or "--own" in text else None,
                steps=1,
            )
        )
        assert taken.fits, text


def test_own_devices_hold_one_policy_each_and_more_hold_less():
    shared, own = plan(device=["h200"]), plan(device=["h200"], own=True)
    assert shared.count == 1 and own.count == 2
    assert max(own.peak.values()) < shared.peak["qwen3"]
    sizes = [plan(device=["h200"], own=True, devices=[str(n)]).peak["smollm3"] for n in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.5 * sizes[0]


def test_devices_and_kinds_by_policy():
    recipe = load_recipe(PAIR)
    layout = layout_of(recipe, PlanRequest(PAIR, devices=["2", "qwen3=1"], device=["h100", "qwen3=l40s"]))
    assert layout.devices == {"smollm3": 2, "qwen3": 1} and not layout.shared and layout.count == 3
    assert (layout.kinds["smollm3"].name, layout.kinds["qwen3"].name) == ("h100", "l40s")
    assert layout_of(recipe, PlanRequest(PAIR)).shared


def test_the_resources_of_a_ray_recipe_are_its_layout():
    resources = ["engine=ray", "ray.resources.smollm3={trainers: 4, samplers: 4, devices: shared}",
                 "ray.resources.qwen3={trainers: 2, samplers: 3}"]  # fmt: skip
    layout = layout_of(load_recipe(PAIR, resources), PlanRequest(PAIR))
    assert layout.devices == {"smollm3": 4, "qwen3": 2} and layout.samplers == {"qwen3": 3}
    assert layout.count == 9 and layout.sampler and not layout.shared
    found = plan(*resources, device=["h200"])
    assert found.count == 9 and "qwen3 on 2 x h200 + 3 for sampling" in found.layout
    assert found.used["other role"] > 0
    for policy in found.policies:
        w = policy.workers
        assert policy.memory == w.trainer and found.peak[policy.name] == w.peak
        assert (w.trainers, w.samplers, w.shared) == ((4, 4, True) if policy.name == "smollm3" else (2, 3, False))
        assert w.asked == -(-32 * 8 // w.samplers) and w.rows == 16 * 8 // w.trainers
    shared, own = (policy.idle for policy in found.policies)
    assert shared.keys() == {"devices"} and own.keys() == {"trainers", "samplers"}
    spent = found.policies[1].step
    assert own["samplers"] == pytest.approx(1 - (spent["sampling"] + spent["sync"]) / found.step_seconds)
    assert own["trainers"] == pytest.approx(
        1 - (spent["scoring"] + spent["training"] + spent["sync"]) / found.step_seconds
    )
    other = plan(*resources, device=["h200"], devices=["2"])  # an option wins
    assert other.used["other role"] == 0 and all(policy.workers is None for policy in other.policies)


def test_the_workers_of_a_ray_recipe_are_shown(graftrl):
    resources = "ray.resources={smollm3: {trainers: 2, samplers: 2, devices: shared}, qwen3: {trainers: 2}}"
    asked = ["plan", PAIR, "engine=ray", resources, *FEWER, *SMALL, "--device", "h200", "--steps", "1"]
    code, out, _ = graftrl(*asked)
    assert code == 0 and "memory on each trainer" in out and "smollm3 (2, shared)" in out and "qwen3 (1)" in out
    assert "keys and values" in out and "samplers idle" in out and "does NOT fit" not in out
    found = json.loads(graftrl(*asked, "--json")[1])
    w = found["policies"][0]["workers"]
    assert w["held"] == w["cache"] // (w["token"] * w["longest"]) > 0 and w["token"] == 2 * 36 * 2 * 512


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ray.resources.smollm3={trainers: 1, devices: shared, memory_share: 0.1}", "do not hold its weights"),
        ("ray.resources.smollm3={trainers: 1, devices: shared, memory_share: 0.6}", "that shares its device need"),
        ("ray.resources.smollm3={memory_share: 0.99}", "lower ray.resources.smollm3.memory_share"),
    ],
)
def test_workers_that_do_not_fit_are_named(change, said):
    found = plan("engine=ray", change, device=["h100"], steps=1)
    assert not found.fits and any(said in text for text in found.warnings) and found.advice


def test_advice_on_workers_is_true():
    tight = ["engine=ray", "ray.resources={smollm3: {devices: shared}, qwen3: {devices: shared}}"]
    advice = run_plan(PlanRequest(PAIR, tight, device=["a100"], steps=1)).advice
    assert "2 times as many devices" in advice[-1] or "devices=own" in "".join(advice)
    for text in advice:
        changes = [f"models.{n}.{k}={v}" for n in ("smollm3", "qwen3") for k, v in
                   re.findall(r"models\.NAME\.(\S+)=(\S+)", text)]  # fmt: skip
        times = int((re.search(r"(\d+) times as many", text) or [0, 1])[1])
        devices = "own" if "devices=own" in text else "shared"
        resources = f"{{trainers: {times}, samplers: {times}, devices: {devices}}}"
        changed = [*changes, *(f"ray.resources.{name}={resources}" for name in ("smollm3", "qwen3"))]
        assert run_plan(PlanRequest(PAIR, [*tight, *changed], device=["a100"], steps=1)).fits, text


def test_a_dry_run_of_a_ray_recipe_counts_its_workers(graftrl, tiny):
    resources = ["engine=ray", "ray.resources.A={trainers: 2, samplers: 1}"]
    code, out, _ = graftrl("train", tiny, "--dry-run", "--json", *resources)
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["peak_bytes"] == sum(w["together"] for w in found["workers"].values())
    assert found["workers"]["A"]["trainers"] == 2 and found["workers"]["B"]["trainers"] == 1
    assert [line["peak"] for line in found["models"]] == [
        max(w["trainer_peak"], w["sampler_peak"]) for w in found["workers"].values()
    ]
    code, out, _ = graftrl("train", tiny, "--dry-run", *resources)
    assert code == 0 and "A: trainers 2, each at most" in out and "on others" in out
    code, out, _ = graftrl("train", tiny, "--dry-run", *resources, "ray.address=auto")
    assert code == 0 and "graftrl plan --device KIND" in out and "memory: about" not in out


def test_numbers_of_a_device_can_be_set():
    device = with_numbers(DEVICES["h100"], ["tflops=500", "bandwidth=2000", "memory=96", "products=0.55", "node=4"])
    assert (device.bf16, device.bandwidth, device.memory, device.products, device.node) == (5e14, 2e12, 96e9, 0.55, 4)
    faster = plan(device=["h200"], numbers=["products=0.8"])
    assert faster.seconds["training"] < plan(device=["h200"]).seconds["training"]
    assert with_numbers(DEVICES["cpu"], ["overhead=100"]).overhead == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--device", "h900"], "h900"),
        (["--devices", "0"], "from 1 to"),
        (["--devices", "qwen4=2"], "qwen4"),
        (["--set", "speed=3"], "speed=3"),
        (["--set", "products=1.5"], "between 0 and 1"),
        (["--set", "tflops=fast"], "no number"),
        (["--response-tokens", "9000"], "--response-tokens"),
        (["--exchanged", "1.5"], "--exchanged"),
        (["--spread", "0"], "--spread"),
        (["--device", "smollm3=h100", "--device", "qwen3=a100", "--shared"], "share their kind"),
        (["--devices", "smollm3=2", "--devices", "qwen3=4", "--shared"], "same number"),
    ],
)
def test_bad_options_are_refused_in_one_line(graftrl, options, named):
    code, out, err = graftrl("plan", PAIR, *options)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and named in err


def test_an_unknown_model_is_named(graftrl):
    code, _, err = graftrl("plan", PAIR, "models.qwen3.path=/no/such/model")
    assert code == 2 and "/no/such/model" in err and "Qwen/Qwen3-1.7B" in err


def test_longer_responses_of_one_policy_make_it_the_slower_peer():
    found = plan(device=["h200"], own=True, devices=["4"], response_tokens=["200", "qwen3=1500"])
    assert found.policies[0].waits > 10 * found.policies[1].waits
    assert any("slower peer" in text and "qwen3=" in text for text in found.advice)


def test_the_scaling_table_has_both_placements_and_falls_where_communication_is_free():
    found = plan(device=["h200"], scale=[1, 2, 16])
    assert [(p.devices, p.placement) for p in found.scaling] == [
        (1, "shared"), (2, "shared"), (2, "own"), (16, "shared"), (16, "own")
    ]  # fmt: skip
    for placement in ("shared", "own"):
        points = [p for p in found.scaling if p.placement == placement]
        ideals = [p.ideal for p in points]
        assert ideals == sorted(ideals, reverse=True)
        assert all(p.seconds >= p.ideal * (1 - 1e-9) and p.low <= p.seconds <= p.high for p in points)
    console = Console(width=150, record=True, file=io.StringIO())
    show(found, console)
    assert "the same step on more devices" in console.export_text()


def test_a_log_gives_lengths_and_exchange(graftrl, tiny, tmp_path):
    run = tmp_path / "run"
    assert graftrl("train", tiny, "--run", run, "--quiet", "threads=1")[0] == 0
    lengths, exchanged, contrast = read_log(run, ["A", "B"])
    assert {name: len(values) for name, values in lengths.items()} == {"A": 32, "B": 32}
    assert all(1 <= length <= 8 for values in lengths.values() for length in values)
    assert 0 <= exchanged <= 1 and 0 <= contrast <= 1
    found = run_plan(PlanRequest(tiny, log=run, steps=1))
    assert found.workload["lengths"] == {"A": 32, "B": 32} and found.workload["contrast"] == contrast
    with pytest.raises(ConfigError, match="has none of C; it has A, B"):
        read_log(run, ["C"])


def test_plots_are_svg(graftrl, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, _ = graftrl(
        "plan", PAIR, *FEWER, *SMALL, "--device", "h200", "--scale", "2", "--steps", "1", "--plots", tmp_path
    )
    assert code == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"plan-{n}.svg" for n in ("memory", "phases", "scaling", "where")]
    for file in files:
        assert ET.fromstring(file.read_text()).tag.endswith("svg")


def test_scorers_and_references_take_memory(tiny, pair):
    alone = run_plan(PlanRequest(tiny, steps=1))
    with_reference = run_plan(PlanRequest(tiny, ["method={name: grpo, kl_coefficient: 0.1}"], steps=1))
    assert with_reference.frozen == sum(4 * policy.parameters for policy in alone.policies) and alone.frozen == 0
    assert any("frozen models" in note for note in with_reference.notes)
    assert with_reference.seconds["scoring"] > 0.0


def test_the_devices_of_a_data_sheet_are_in_decimal_units():
    assert DEVICES["h100"].memory / GIB == pytest.approx(74.5, abs=0.1)


# The page -------------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "how-to" / "plan.md").read_text(encoding="utf-8")


def _commands():
    """Lines of `graftrl plan` in the page's shell blocks, continued lines joined, comments left out."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("graftrl plan")]


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_the_commands_of_the_page_parse(command):
    group = typer.main.get_command(app)
    context = group.commands["plan"].make_context("plan", command[1:], resilient_parsing=False)
    assert context.params["recipe_path"] is not None
    for option in ("device", "devices", "numbers"):
        assert not context.params[option] or all(context.params[option])


def test_the_page_shows_its_plots():
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE)
    assert len(shown) == 4 and all((ROOT / "docs" / "how-to" / path).exists() for path in shown)
