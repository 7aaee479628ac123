"""The guide to clusters: its numbers are those of `graftrl plan`; its Slurm script runs, with stand-ins for Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from graftrl.plan.command import PlanRequest, run_plan
from graftrl.plan.devices import GIB

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")
PAIR = ROOT / "recipes" / "paper" / "smollm3-qwen3.yaml"


def block(language, beginning):
    found = re.findall(rf"^```{language}\n({re.escape(beginning)}.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return found[0]


@pytest.fixture
def plan(tmp_path):
    """Of the page's recipe, on one kind of GPU."""
    path = tmp_path / "pair.yaml"
    content = {**yaml.safe_load(PAIR.read_text()), **yaml.safe_load(block("yaml", "engine: ray"))}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return lambda device: run_plan(PlanRequest(path, device=[device], steps=1))


def rows():
    """Of the table of memory: label -> the two numbers."""
    lines = re.findall(r"^\| (.*?) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    return {label: (float(a), float(b)) for label, a, b in lines}


def test_the_memory_that_the_page_shows_is_the_plans(plan):
    found = plan("h200")
    assert found.fits and found.count == 4
    for i, policy in enumerate(found.policies):
        w = policy.workers
        shown = {
            "a trainer's weights, gradients, optimizer": w.trainer.resident,
            "its peak while it trains": w.trainer.training,
            "the sampler's share (`memory_share: 0.4`)": w.share,
            "of it keys and values": w.cache,
            "**most at once**: trainer's state, sampler and new weights": w.trainer_peak,
            "of": w.available,
        }
        for label, size in shown.items():
            assert rows()[label][i] == pytest.approx(size / GIB, abs=0.051), label
    held = [policy.workers.held for policy in found.policies]
    assert f"holds {held[0]} ({held[1]}) responses of 6,144 tokens" in PAGE
    smaller = plan("h100")
    peaks = [policy.workers.trainer_peak / GIB for policy in smaller.policies]
    assert smaller.fits and f"{peaks[0]:.1f} and {peaks[1]:.1f} of 74.5 GiB" in PAGE


# Slurm ---------------------------------------------------------------------------------------------------------------

STAND_INS = {
    "srun": 'while [[ "${1:-}" == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "scontrol $*" >>"$LOG"; fi',
    "hostname": "echo 10.0.0.1 fd00::1",
    "ray": """case "$1" in
        status) cat "$LOG.nodes" 2>/dev/null || exit 1 ;;
        start) echo "ray $*" >>"$LOG"; echo " 1 node_$RANDOM" >>"$LOG.nodes"; exec sleep 60 ;;
        *) echo "ray $*" >>"$LOG" ;;
    esac""",
    "graftrl": """echo "graftrl $* at $RAY_ADDRESS" >>"$LOG"
    trap 'sleep 0.2; echo "graftrl ended its step" >>"$LOG"; exit 0' TERM
    if [ -n "${STEPS:-}" ]; then sleep 60 & wait $!; fi
    exit "${CODE:-0}" """,
}


@pytest.fixture
def slurm(tmp_path):
    """A machine whose Slurm runs everything here and now. Starts the page's script."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    script = tmp_path / "graftrl.sbatch"
    script.write_text(block("bash", "#!/bin/bash").replace("sleep 2", "sleep 0.05"))
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def start(**environment):
        return subprocess.Popen(
            ["bash", str(script)],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "SLURM_JOB_ID": "70123",
                "SLURM_JOB_NODELIST": "node[1-2]", "RECIPE": "pair.yaml", "RUN": str(tmp_path / "run"), **environment,
            },
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    start.script, start.log = script, tmp_path / "log"
    return start


def test_the_script_is_sound_and_every_option_is_one_of_slurms(slurm):
    assert subprocess.run(["bash", "-n", slurm.script], capture_output=True).returncode == 0
    text = slurm.script.read_text()
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?(?: +# .*)?$", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH")
    assert {*options} <= {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "requeue",
        "open-mode", "output", "signal",
    }  # fmt: skip
    assert not re.search(r"^(?!#).*#SBATCH", text, re.MULTILINE) and text.startswith("#!/bin/bash\n#SBATCH")


def test_a_first_job_trains_with_all_nodes_in_the_cluster(slurm):
    job = slurm()
    assert job.wait(30) == 0, job.stderr.read()
    token, head, worker, train = slurm.log.read_text().splitlines()
    assert token == "ray get-auth-token --generate"
    assert head.startswith("ray start --head --node-ip-address=10.0.0.1 --port=20246 --block ")
    assert worker.startswith("ray start --address=10.0.0.1:20246 ")
    run = slurm.log.with_name("run")
    assert train == f"graftrl train pair.yaml --run {run} engine=ray ray.address=auto at 10.0.0.1:20246"


def test_a_job_whose_ray_does_not_start_ends(slurm):
    (slurm.script.parent / "ray").write_text('#!/bin/bash\n[ "$1" = get-auth-token ]\n')
    assert slurm().wait(30) != 0 and not slurm.log.exists()


def test_a_later_job_goes_on_with_the_run(slurm):
    run = slurm.log.with_name("run")
    run.mkdir()
    (run / "config.yaml").write_text("")
    assert slurm().wait(30) == 0
    assert slurm.log.read_text().splitlines()[-1] == f"graftrl resume {run} at 10.0.0.1:20246"


def test_before_its_time_is_over_the_job_ends_its_step_and_queues_again(slurm):
    job = slurm(STEPS="many")
    end = time.monotonic() + 30
    while "graftrl train" not in (slurm.log.read_text() if slurm.log.exists() else "") and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)  # until the stand-in waits
    job.send_signal(10)  # USR1, as Slurm sends it to the batch shell
    job.wait(30)
    assert slurm.log.read_text().splitlines()[-2:] == ["graftrl ended its step", "scontrol requeue 70123"]


def test_a_run_that_fails_ends_the_job_with_its_code_and_is_not_queued_again(slurm):
    job = slurm(CODE="3")
    assert job.wait(30) == 3
    assert "requeue" not in slurm.log.read_text()


def test_what_the_job_needs_is_asked_for(slurm):
    job = slurm(RUN="")
    assert job.wait(30) != 0 and "the run folder, on a disk that all nodes see" in job.stderr.read()
