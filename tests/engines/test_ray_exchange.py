"""Live peers that meet at a Ray actor: a private cluster, jobs in processes of their own, and what dies in between."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from graftrl.live.service import Unreachable
from graftrl.training.run_folder import RunFolder

pytestmark = pytest.mark.ray
PATIENCE_S = 240  # for a cluster or a process to start on a busy machine


@pytest.fixture
def cluster(monkeypatch):
    """A head with a client server, in a process group of its own: its address, that for clients, and its process."""
    for name, value in {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # else some of its forks die: docs/how-to/live-peers.md
    }.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="graftrl-ray-", dir="/tmp"))  # Ray's sockets need a short path
    log = folder / "start.log"
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port=0", "--num-cpus=2",
        f"--ray-client-server-port={port}", "--include-dashboard=false", "--object-store-memory=100000000",
        f"--temp-dir={folder}",
    ]  # fmt: skip
    with log.open("w") as out:
        head = subprocess.Popen(command, start_new_session=True, stdout=out, stderr=out)

    def end():
        if head.poll() is None:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()

    try:
        found = None
        deadline = time.monotonic() + PATIENCE_S
        while found is None or not answers(port):
            assert head.poll() is None and time.monotonic() < deadline, log.read_text()
            found = re.search(r"--address='([^']+)'", log.read_text())
            time.sleep(0.5)
        yield found.group(1), f"ray://127.0.0.1:{port}", head.pid
    finally:
        end()
        shutil.rmtree(folder, ignore_errors=True)


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def eventually(call):
    """The result of a call on a service that may not have noticed yet what happened, or is slow to start."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (Unreachable, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def in_a_process(work, *arguments):
    """Runs a function of this module in a process of its own: what it leaves of Ray ends with it."""
    call = f"import {Path(__file__).stem} as tests; tests.{work.__name__}({', '.join(map(repr, arguments))})"
    done = subprocess.run([sys.executable, "-c", call], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_actor_holds_the_last_steps_and_is_started_again_with_what_each_job_published_last(cluster):
    _, client, head = cluster
    in_a_process(two_clients, client, head)


def two_clients(client, head):
    import ray

    from graftrl.live.ray_service import NAMESPACE
    from graftrl.live.service import open_service

    ours, theirs = (open_service(f"{client}/pair", None) for _ in range(2))
    eventually(ours.open)
    eventually(theirs.open)
    for step in range(1, 5):
        ours.publish("A", step, bytes([step]) * 1000, keep=2)
    theirs.publish("B", 4, b"four", keep=2)
    assert sorted(theirs.look("A")) == [3, 4] and theirs.fetch("A", 4) == bytes([4]) * 1000
    assert theirs.fetch("A", 2) is None and ours.fetch("B", 4) == b"four"
    before = theirs.look("A")
    ours.publish("A", 4, b"again", keep=2)
    assert theirs.look("A") != before and theirs.fetch("A", 4) == b"again"
    assert eventually(lambda: open_service(f"{client}/another", None).look("A")) == {}

    with eventually(lambda: ray.init(client, namespace=NAMESPACE)):
        ray.kill(ray.get_actor("pair", namespace=NAMESPACE))
    assert eventually(lambda: sorted(theirs.look("B"))) == [4]  # a new actor, told what was published last
    assert eventually(lambda: sorted(ours.look("A"))) == [4]
    assert theirs.fetch("A", 4) == b"again" and ours.fetch("B", 4) == b"four"

    os.killpg(head, signal.SIGKILL)
    with pytest.raises(Unreachable) as away:
        ours.look("A")
    assert "\n" not in str(away.value) and client in str(away.value)
    started = time.monotonic()
    with pytest.raises(Unreachable):
        ours.look("A")
    assert time.monotonic() - started < 5
    ours.close()
    theirs.close()


def test_a_job_that_drives_a_cluster_meets_others_on_another_one(cluster):
    _, client, _ = cluster
    in_a_process(driver_and_client, client)


def driver_and_client(client):
    """As `engine: ray` with a live peer at ray://: Ray is initialized before the service is opened."""
    import ray

    from graftrl.live.service import open_service

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    task = ray.remote(lambda x: x + 1)
    service = open_service(f"{client}/pair", None)
    eventually(service.open)
    service.publish("A", 1, b"one", keep=2)
    assert ray.get(task.remote(1)) == 2
    assert service.fetch("A", 1) == b"one"
    os.kill(service._child.pid, signal.SIGKILL)
    with pytest.raises(Unreachable, match="process has died"):
        service.look("A")
    assert eventually(lambda: service.fetch("A", 1)) == b"one"  # the actor outlives it; another child asks
    service.close()
    assert ray.get(task.remote(2)) == 3
    ray.shutdown()


def test_two_jobs_meet_at_the_actor_one_as_a_driver_and_one_as_a_client(cluster, pair, tmp_path):
    address, client, _ = cluster
    places = {"A": {"live": f"{client}/jobs"}, "B": {"live": "ray/jobs"}}
    processes = {}
    for name, other in (("A", "B"), ("B", "A")):
        recipe = {
            "name": "toy", "seed": 5, "threads": 1, "method": "graft-no-floor",
            "models": {name: {"path": pair[name], "optimizer": {"lr": 0.01}}},
            "peers": {other: {**places[name], "timeout_s": PATIENCE_S}},
            "ray": {"address": address},
            "task": {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 6},
            "training": {"steps": 3, "prompts_per_step": 8, "group_size": 4, "minibatch_prompts": 4},
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "training")}
        command = [sys.executable, "-m", "graftrl", "train", f"{tmp_path / name}.yaml", "--run", str(tmp_path / name)]
        with (tmp_path / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for name, process in processes.items():
            assert process.wait(timeout=2 * PATIENCE_S) == 0, (tmp_path / f"{name}.log").read_text()
    finally:
        for process in processes.values():
            process.kill()
    lines = {name: RunFolder(tmp_path / name).read_metrics() for name in "AB"}
    for name, other in (("A", "B"), ("B", "A")):
        for mine, theirs in zip(lines[name], lines[other], strict=True):
            assert (mine["peers"][other]["groups"], mine["peers"][other]["staleness"]) == (8, 0)
            assert mine["peers"][other]["bytes_received"] == theirs["peers"][name]["bytes_published"] > 1000
    assert sum(line["exchange"]["B->A"]["admitted"] for line in lines["A"]) > 0
