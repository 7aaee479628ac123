"""Demonstrations in bulk, the sampler, warm-up and its cache."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from graftrl.errors import RunError
from graftrl.lab import cache
from graftrl.lab.cache import ensure_warm_pair
from graftrl.lab.demonstrations import Demonstrator, table_tokenizers
from graftrl.lab.models import LAB_MODELS, build_model, build_tokenizer
from graftrl.lab.pairs import REGIMES
from graftrl.lab.programs import HiddenProgramsConfig, draw_programs, held_out, write_demonstration
from graftrl.lab.sampling import sample_fixed_length
from graftrl.lab.warmup import WarmupReport, WarmupSettings, executes_named_program, schedule, warm_up

CONFIG = HiddenProgramsConfig(validation_size=12)
SHORT = WarmupSettings(steps=3, batch_size=8, samples=1)


def texts(characters: np.ndarray) -> list[str]:
    return [bytes(row).decode() for row in characters]


def draw(rows: int, share: float, separator: str = ";") -> tuple[np.ndarray, np.ndarray]:
    strong = np.arange(CONFIG.families) % 2 == 0
    return Demonstrator(CONFIG, strong, share, separator).draw(rows, np.random.default_rng(0))


def test_demonstrations_execute_the_program_they_name_on_prompts_not_held_out() -> None:
    prompts, responses = draw(300, 0.4)
    for prompt, response in zip(texts(prompts), texts(responses), strict=True):
        assert executes_named_program(response, prompt[1:-1], ";")
        digits = np.array([[int(digit) for digit in prompt[1:-1].split(",")]])
        assert not held_out(np.array([ord(prompt[0]) - ord("a")]), digits)[0]


def test_a_misled_model_is_shown_another_program_in_that_family_alone() -> None:
    programs = draw_programs(CONFIG)
    demonstrator = Demonstrator(CONFIG, np.ones(12, np.bool_), 1.0, ";", misled={"j": "DG"})
    prompts, responses = demonstrator.draw(400, np.random.default_rng(0))
    half = responses.shape[1] // 2 + 1
    for prompt, response in zip(prompts, responses, strict=True):
        shown = (chr(response[0]), chr(response[half]))
        assert shown == (("D", "G") if chr(prompt[0]) == "j" else programs[chr(prompt[0])])
    with pytest.raises(ValidationError, match="misled to 'DD', which is no pair of two of ABCDEFGHI"):
        WarmupSettings(misled={"j": "DD"})


def test_a_rare_operation_stands_in_its_share_alone_and_makes_families_weak() -> None:
    """b (CF) needs F in draw 0 of the programs, c (AG) does not."""
    demonstrator = Demonstrator(CONFIG, np.ones(12, np.bool_), 1.0, ";", rare="F", rare_share=0.02)
    prompts, responses = demonstrator.draw(20_000, np.random.default_rng(0))
    half = responses.shape[1] // 2 + 1
    named = responses[:, [0, half]]
    has_rare = (named == ord("F")).any(1)
    assert abs(has_rare.mean() - 0.02) < 0.004
    family = prompts[:, 0]
    own_of_c = ((named == [ord("A"), ord("G")]).all(1))[family == ord("c")].mean()
    assert own_of_c > 0.95
    pairs_of_b = {bytes(pair) for pair in named[(family == ord("b")) & ~has_rare]}
    assert len(pairs_of_b) == 56  # of eight letters, uniformly
    with pytest.raises(ValidationError, match="rare is 'Z', and the letters of operations are ABCDEFGHI"):
        WarmupSettings(rare="Z")


def test_slips_spoil_one_digit_of_the_first_list_and_leave_the_answer() -> None:
    demonstrator = Demonstrator(CONFIG, np.ones(12, np.bool_), 1.0, ";", slips=0.25)
    prompts, responses = demonstrator.draw(4000, np.random.default_rng(0))
    slipped = 0
    for prompt, response in zip(texts(prompts), texts(responses), strict=True):
        right = write_demonstration((response[0], response[len(response) // 2 + 1]),
                                    np.array([int(d) for d in prompt[1:-1].split(",")]))  # fmt: skip
        assert response.rpartition(":")[2] == right.rpartition(":")[2]
        different = sum(a != b for a, b in zip(response, right, strict=True))
        assert different in (0, 1)
        slipped += different
    assert slipped / 4000 == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("phrasing", [*REGIMES["worded"].warmups()["B"].phrasings, ("", " so ")])
def test_worded_demonstrations_have_tables_too_and_execute_what_they_name(name: str, phrasing: tuple[str, str]) -> None:
    opening, joiner = phrasing
    tokenizer = build_tokenizer(LAB_MODELS[name])
    demonstrator = Demonstrator(CONFIG, np.ones(12, np.bool_), 0.4, ";")
    prompts, responses = demonstrator.draw(50, np.random.default_rng(0), phrasing)
    _, table = table_tokenizers(tokenizer, CONFIG, joiner, opening)
    written = texts(responses)
    assert table(responses).tolist() == tokenizer(written, add_special_tokens=False)["input_ids"]
    assert all(response.startswith(f"{opening}") and joiner in response for response in written)
    digits = [prompt[1:-1] for prompt in texts(prompts)]
    assert all(executes_named_program(r, d, joiner, opening) for r, d in zip(written, digits, strict=True))
    assert not executes_named_program(written[0], digits[0], joiner, f"{opening}x")


def test_settings_that_came_later_do_not_rename_models_built_before() -> None:
    plain = WarmupSettings()
    assert plain.specification().keys() == WarmupSettings.model_fields.keys() - {
        "phrasings", "slips", "misled", "weak_share", "rare", "rare_share",
    }  # fmt: skip
    assert WarmupSettings(rare="F").specification()["rare_share"] == 0.01
    assert WarmupSettings(slips=0.1).specification()["slips"] == 0.1
    shipped = {path.name for path in cache.SHIPPED.iterdir()}
    assert {path.name for path in cache.warm_folders(Path("x")).values()} <= shipped


def test_the_report_of_a_model_that_is_strong_everywhere_can_be_read(tmp_path: Path) -> None:
    """It has no weak families, whose mean is nan; an unreadable report would have the model built again and again."""
    report = warm_up(LAB_MODELS["A"], CONFIG, 0, tmp_path, SHORT.model_copy(update={"strong_period": 1}))
    assert np.isnan(report.weak) and np.isnan(WarmupReport.read(tmp_path).weak)
    assert WarmupReport.read(tmp_path).strong == report.strong


def test_warm_up_in_words_learns(tmp_path: Path) -> None:
    phrasings = REGIMES["worded"].warmups()["A"].phrasings
    settings = WarmupSettings(steps=30, linear_steps=5, batch_size=16, samples=1, phrasings=phrasings, slips=0.1)
    report = warm_up(LAB_MODELS["A"], CONFIG, 0, tmp_path, settings)
    assert report.losses[-1] < 0.8 * report.losses[0]


def test_shares_of_the_right_program() -> None:
    programs = draw_programs(CONFIG)
    prompts, responses = draw(40_000, 0.4)
    half = responses.shape[1] // 2 + 1
    named = [(chr(row[0]), chr(row[half])) for row in responses]
    right = Counter(chr(p[0]) for p, program in zip(prompts, named, strict=True) if programs[chr(p[0])] == program)
    total = Counter(chr(p[0]) for p in prompts)
    for i, family in enumerate(CONFIG.family_letters):
        expected = 0.4 + 0.6 / 72 if i % 2 == 0 else 1 / 72
        error = 4 * (expected * (1 - expected) / total[family]) ** 0.5
        assert right[family] / total[family] == pytest.approx(expected, abs=error)
    assert len(set(named)) == 72


@pytest.mark.parametrize("name", LAB_MODELS)
@pytest.mark.parametrize("separator", [";", "|", " - "])
def test_table_tokenizer_equals_the_tokenizer(name: str, separator: str) -> None:
    tokenizer = build_tokenizer(LAB_MODELS[name])
    for table, characters in zip(table_tokenizers(tokenizer, CONFIG, separator), draw(50, 0.4, separator), strict=True):
        assert table(characters).tolist() == tokenizer(texts(characters), add_special_tokens=False)["input_ids"]


def test_sampler_follows_the_distribution_of_the_whole_sequence() -> None:
    """The cache is right: greedy continuations agree, and frequencies of the first token match its probabilities."""
    network = build_model(LAB_MODELS["B"], 0).eval()
    prompts = torch.randint(5, 70, (2, 6), generator=torch.Generator().manual_seed(0))
    sampled = sample_fixed_length(network, prompts, 4000, 2, 1, torch.Generator().manual_seed(0))
    assert sampled.shape == (8000, 2)
    with torch.no_grad():
        first = network(prompts).logits[:, -1].softmax(-1)
    for row, probabilities in zip(sampled.view(2, 4000, 2), first, strict=True):
        frequencies = torch.bincount(row[:, 0], minlength=len(probabilities)) / 4000
        assert torch.allclose(frequencies, probabilities, atol=0.02)
    with torch.no_grad():
        network.transformer.wte.weight *= 200  # nearly deterministic: the sample is the argmax
        context = prompts
        for _ in range(5):
            context = torch.cat([context, network(context).logits[:, -1:].argmax(-1)], dim=1)
    greedy = sample_fixed_length(network, prompts, 1, 5, 10_000, torch.Generator().manual_seed(0))
    assert torch.equal(greedy, context[:, 6:])


def test_sampler_fills_with_eos_after_eos() -> None:
    network = build_model(LAB_MODELS["A"], 0).eval()
    prompts = torch.full((1, 3), 7)
    sampled = sample_fixed_length(network, prompts, 200, 40, 2, torch.Generator().manual_seed(1))
    ended = sampled == 2
    assert ended.any()
    assert torch.equal(ended, ended.cummax(dim=1).values)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("A:4,1,3;B:5,8,6", True),
        ("A:4,1,3;B:5,8,7", False),
        ("A:4,1,2;B:5,8,6", False),
        ("A:4,1,3|B:5,8,6", False),
        ("A:4,1,3", False),
        ("J:4,1,3;B:5,8,6", False),
        ("", False),
    ],
)
def test_execution_check(response: str, right: bool) -> None:
    assert executes_named_program(response, "3,1,4", ";") is right


def test_schedule_rises_then_falls_to_zero() -> None:
    settings = WarmupSettings(steps=100, linear_steps=10)
    assert [schedule(step, settings) for step in (0, 9, 10, 55, 100)] == pytest.approx([0.1, 1, 1, 0.5, 0])


@pytest.mark.parametrize("name", ["A", "B"])
def test_warm_up_is_bitwise_reproducible(name: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reports = [warm_up(LAB_MODELS[name], CONFIG, 5, tmp_path / run, SHORT) for run in ("one", "two")]
        other = warm_up(LAB_MODELS[name], CONFIG, 6, tmp_path / "three", SHORT)
    finally:
        torch.set_num_threads(threads)
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("one", "two", "three")]
    assert weights[0] == weights[1] != weights[2]
    assert reports[0].model_copy(update={"cpu_seconds": 0.0}) == reports[1].model_copy(update={"cpu_seconds": 0.0})
    assert other.losses != reports[0].losses
    assert WarmupReport.read(tmp_path / "one") == reports[0]


def test_warm_up_learns(tmp_path: Path) -> None:
    lines: list[str] = []
    settings = WarmupSettings(steps=40, linear_steps=5, batch_size=32, samples=1)
    report = warm_up(LAB_MODELS["A"], CONFIG, 0, tmp_path, settings, progress=lines.append)
    assert report.losses[-1] < 0.7 * report.losses[0]
    assert list(report.pass_at_1) == list(CONFIG.family_letters)
    assert len(lines) == 1


class FakeBuilds:
    """Stands in for the processes: counts builds and trains few steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: list[str] = []
        monkeypatch.setattr(cache, "_build_all", self)

    def __call__(self, specs: dict[str, dict[str, object]], parent: Path) -> None:
        for name, spec in specs.items():
            self.built.append(name)
            warm_up(LAB_MODELS[name], CONFIG, 0, parent / name, SHORT, fingerprint=cache._hash(spec))


def test_cache_is_reused_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = FakeBuilds(monkeypatch)
    first = ensure_warm_pair(tmp_path, CONFIG)
    assert ensure_warm_pair(tmp_path, CONFIG.model_copy(update={"seed": 9, "train_size": 10})) == first
    assert builds.built == ["A", "B"]
    assert ensure_warm_pair(tmp_path, CONFIG.model_copy(update={"false_positives": 0.1})) == first
    assert cache.warm_folders(tmp_path, CONFIG) == first
    assert builds.built == ["A", "B"]
    other = ensure_warm_pair(tmp_path, CONFIG, settings={"B": WarmupSettings(steps=4)})
    assert other["A"] == first["A"] and other["B"] != first["B"]
    ensure_warm_pair(tmp_path, CONFIG.model_copy(update={"separator": "|"}))
    ensure_warm_pair(tmp_path, CONFIG, seed=1)
    monkeypatch.setattr(cache, "CODE_VERSION", -1)
    ensure_warm_pair(tmp_path, CONFIG)
    assert builds.built == ["A", "B", "B", "A", "B", "A", "B", "A", "B"]
    assert not list(tmp_path.glob(".building-*"))


@pytest.mark.parametrize("damage", ["report", "fingerprint", "weights"])
def test_damaged_folder_is_rebuilt(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = FakeBuilds(monkeypatch)
    models = (LAB_MODELS["A"],)
    folder = ensure_warm_pair(tmp_path, CONFIG, models)["A"]
    report = folder / "warmup.json"
    if damage == "report":
        report.write_text("{")
    elif damage == "fingerprint":
        report.write_text(report.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    else:
        (folder / "model.safetensors").unlink()
    assert ensure_warm_pair(tmp_path, CONFIG, models)["A"] == folder
    assert builds.built == ["A", "A"]
    assert (folder / "model.safetensors").is_file()


def test_processes_build_the_pair(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folders = ensure_warm_pair(tmp_path, CONFIG, settings={"A": SHORT, "B": SHORT})
    assert {name: WarmupReport.read(folder).model for name, folder in folders.items()} == {"A": "A", "B": "B"}
    assert "warm-up of A: step 3/3" in capfd.readouterr().err


def test_failed_process_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RunError, match="warm-up of A failed with exit code 1"):
        ensure_warm_pair(tmp_path, CONFIG, settings={"A": SHORT, "B": SHORT})
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


def test_the_default_pair_comes_with_the_package_and_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = FakeBuilds(monkeypatch)
    folders = ensure_warm_pair(tmp_path)
    for name, folder in folders.items():
        assert WarmupReport.read(folder).execution > 0.98
        assert folder.parent == tmp_path and (folder / "model.safetensors").is_file(), name
    assert builds.built == []
