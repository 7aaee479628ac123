from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from task_helpers import prompt

from graftrl.errors import ConfigError
from graftrl.rollout import Group, Response
from graftrl.tasks.base import Grade, Task
from graftrl.tasks.functions import FunctionVerifier
from graftrl.tasks.pool import Item, VerificationPool, grade_groups

OBEY = FunctionVerifier("task_helpers:obey")


def _items(*responses: str) -> list[Item]:
    return [(prompt("5", f"p{i}"), response, "stop") for i, response in enumerate(responses)]


def _worker_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "graftrl.tasks.worker" in child.cmdline()
    ]


def _gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_hang_in_c_code_scores_zero_and_hits_no_other_item() -> None:
    before = len(_worker_processes())
    with VerificationPool(workers=1, limit_s=1.0) as pool:
        grades = pool.grade(OBEY, _items("ok", "hang", "ok", "ok"))
        assert [grade.reward for grade in grades] == [1.0, 0.0, 1.0, 1.0]
        assert grades[1].reason == "time limit of 1 s"
        assert pool.outcomes == {"graded": 4, "timeouts": 1}
    assert len(_worker_processes()) == before


@pytest.mark.parametrize("in_process", [True, False])
def test_an_answer_that_the_prompt_began_is_graded_as_a_whole(in_process: bool) -> None:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "return t"})
    begun = replace(prompt("5", "p"), messages=messages)
    responses = [Response(text, np.array([1]), np.zeros(1, np.float32), "stop") for text in ("rue", "wo")]
    group = Group("A", begun, responses)
    task = Task("t", [], [], OBEY, in_process=in_process)
    with VerificationPool(workers=1, limit_s=20.0) as pool:
        grade_groups(task, [group], pool)
    assert group.rewards.tolist() == [1.0, 0.0]
    assert [response.text for response in group.responses] == ["rue", "wo"]  # what the model said stays apart


@pytest.mark.parametrize("command", ["exit", "abort"])
def test_a_dying_worker_takes_only_its_own_item_along(command: str) -> None:
    with VerificationPool(workers=1, limit_s=20.0) as pool:
        grades = pool.grade(OBEY, _items("ok", command, "ok"))
        assert [grade.reward for grade in grades] == [1.0, 0.0, 1.0]
        assert grades[1].reason == "verifier process died"
        assert pool.outcomes["deaths"] == 1


def test_a_memory_bomb_fails_alone(pool: VerificationPool) -> None:
    grades = pool.grade(OBEY, _items("ok", "eat", "ok"))
    assert [grade.reward for grade in grades] == [1.0, 0.0, 1.0]
    assert "MemoryError" in grades[1].reason


def test_the_limit_counts_neither_the_queue_nor_the_start_of_a_process() -> None:
    with VerificationPool(workers=1, limit_s=1.0) as pool:
        started = time.monotonic()
        grades = pool.grade(OBEY, _items("sleep 0.5", "sleep 0.501", "sleep 0.502", "sleep 0.503"))
        assert time.monotonic() - started > 2.0
        assert all(grade.reward == 1.0 for grade in grades)


def test_a_raising_or_printing_verifier_is_harmless(pool: VerificationPool) -> None:
    grades = pool.grade(OBEY, _items("raise", "print", "ok"))
    assert [grade.reward for grade in grades] == [0.0, 1.0, 1.0]
    assert grades[0].reason == "verifier raised KeyError: 'missing'"


def test_equal_items_are_graded_once(pool: VerificationPool, tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    item: Item = (prompt("5"), f"count {tally}", "stop")
    cut: Item = (prompt("5"), f"count {tally}", "length")
    grades = pool.grade(OBEY, [item, item, cut, item])
    assert tally.read_text() == ".."
    assert len(grades) == 4


def test_children_of_a_stuck_verifier_die_with_it(tmp_path: Path) -> None:
    with VerificationPool(workers=1, limit_s=2.0) as pool:
        pool.grade(OBEY, _items(f"spawn {tmp_path / 'pid'}"))
    assert _gone(int((tmp_path / "pid").read_text()), within_s=5.0)


def test_two_workers_grade_at_the_same_time(pool: VerificationPool) -> None:
    grades = pool.grade(OBEY, _items("sleep 0.3", "sleep 0.31", "sleep 0.32", "sleep 0.33"))
    assert len({grade.reason for grade in grades}) == 2


def test_a_closed_pool_leaves_no_process_and_can_be_used_again() -> None:
    before = len(_worker_processes())
    pool = VerificationPool(workers=1, limit_s=20.0)
    for _ in range(2):
        assert pool.grade(OBEY, _items("ok"))[0].reward == 1.0
        assert len(_worker_processes()) == before + 1
        pool.close()
        assert len(_worker_processes()) == before


ORPHAN_SCRIPT = """
import os, threading, time
from graftrl.rollout import Prompt
from graftrl.tasks.functions import FunctionVerifier
from graftrl.tasks.pool import VerificationPool

print("imported", flush=True)
pool = VerificationPool(workers=1, limit_s=300.0)
item = (Prompt("p", (), "5", "t"), "hang", "stop")
ready = (Prompt("r", (), "5", "t"), "ok", "stop")
obey = FunctionVerifier("task_helpers:obey")
print(pool.grade(obey, [ready])[0].reason, flush=True)
threading.Thread(target=pool.grade, args=(obey, [item]), daemon=True).start()
time.sleep({seconds})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_worker_stuck_in_c_code_dies_with_a_killed_parent() -> None:
    """The script has no __main__ guard either: workers must not run it again."""
    script = ORPHAN_SCRIPT.format(seconds=60)
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == "imported"
        worker = int(parent.stdout.readline().split()[-1])
        time.sleep(0.5)
        assert psutil.pid_exists(worker)
        os.kill(parent.pid, signal.SIGKILL)
    assert _gone(worker, within_s=5.0)


def test_a_verifier_that_cannot_reach_a_worker_is_refused(pool: VerificationPool) -> None:
    def local(*_: object) -> Grade:
        return Grade(1.0, "")

    with pytest.raises(ConfigError, match="cannot be sent"):
        pool.grade(local, _items("ok"))
    with pytest.raises(ConfigError, match="workers >= 1"):
        VerificationPool(workers=0, limit_s=1.0)


def _group(model: str, *texts: str) -> Group:
    ids, logprobs = np.array([1], dtype=np.int64), np.zeros(1, dtype=np.float32)
    return Group(model, prompt("5"), [Response(text, ids, logprobs, "stop") for text in texts])


@pytest.mark.parametrize("in_process", [False, True])
def test_groups_of_all_models_are_filled_in_place(pool: VerificationPool, in_process: bool) -> None:
    groups = [_group("a", "return true", "raise"), _group("b", "return half")]
    grade_groups(Task("t", [], [], OBEY, in_process=in_process), groups, pool)
    assert [list(group.rewards) for group in groups] == [[1.0, 0.0], [0.5]]
    assert groups[0].responses[1].grade_reason.startswith("verifier raised KeyError")
    assert groups[0].successes == 1


def test_a_worker_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, graftrl.tasks.worker, graftrl.tasks.math;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pydantic', 'polars')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
