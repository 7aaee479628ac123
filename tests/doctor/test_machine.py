"""What is said about threads, disk, devices and packages, from given facts."""

import pytest

from graftrl.doctor import machine
from graftrl.doctor.machine import GIB, check_machine, check_space, describe, usable_cores


@pytest.fixture
def facts(tmp_path):
    found = describe(tmp_path / "runs" / "not" / "there")
    return {**found, "torch_threads": 2, "cores": 2.0, "gpus": [], "disk_free_bytes": 100 * GIB}


def of(facts, check):
    (finding,) = [finding for finding in check_machine(facts) if finding.check == check]
    return finding.level, finding.message


def test_the_facts_are_plain_and_complete(facts):
    assert facts["packages"]["torch"] and facts["memory_bytes"] >= facts["memory_available_bytes"] > 0
    assert facts["disk"].endswith("there")


def test_more_threads_than_cores_is_a_problem_with_the_number_to_set(facts):
    level, message = of({**facts, "torch_threads": 64, "cores": 2.5}, "threads")
    assert level == "problem" and "64 threads on 2.5 usable cores" in message and "OMP_NUM_THREADS=2" in message
    assert of(facts, "threads")[0] == "ok"


def test_a_containers_quota_counts(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "_CGROUP", quota)
    free = usable_cores()
    quota.write_text("50000 100000\n")
    assert usable_cores() == 0.5
    quota.write_text("max 100000\n")
    assert usable_cores() == free


def test_little_disk_is_noted_and_too_little_for_checkpoints_is_a_problem(facts):
    assert of(facts, "disk")[0] == "ok"
    little = {**facts, "disk_free_bytes": 4 * GIB}
    assert of(little, "disk")[0] == "note"
    assert check_space(little, GIB, 4).level == "ok"
    finding = check_space(little, GIB, 5)
    assert finding.level == "problem" and "need 5.0 GiB" in finding.message and "checkpoint.keep" in finding.message


def test_devices(facts, monkeypatch):
    assert of(facts, "gpu")[1].startswith("none")
    gpu = {"name": "H200", "memory_bytes": 141 * GIB}
    assert of({**facts, "gpus": [gpu]}, "gpu") == ("ok", "H200 (141 GiB)")
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    level, message = of({**facts, "cuda": None}, "gpu")
    assert level == "note" and "built without CUDA" in message


def test_missing_packages_and_an_offline_hub(facts, monkeypatch):
    assert not [finding for finding in check_machine(facts) if finding.check in ("packages", "hub")]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert of(facts, "hub")[0] == "note"
    without = {**facts, "packages": {**facts["packages"], "polars": None}}
    assert of(without, "packages") == ("problem", "not installed: polars; pip install graftrl")
