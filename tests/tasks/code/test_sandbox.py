"""What a machine lacks is found, said, and refused; and what is left then."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from code_helpers import SOLUTION, by_calls, grade

from graftrl.errors import ConfigError
from graftrl.tasks.code import confine
from graftrl.tasks.code.sandbox import Sandbox

LACKING = """
import platform, sys
sys.path.insert(0, {here!r})
from code_helpers import SOLUTION, by_calls, grade, run
from graftrl.errors import ConfigError
from graftrl.tasks.code.confine import denying_program, install_filter
from graftrl.tasks.code.sandbox import Sandbox
install_filter(denying_program(platform.machine(), {calls!r}))
strict, weaker = Sandbox(), Sandbox(weaker=True)
try:
    print("strict:", strict.require())
except ConfigError as error:
    print("refused:", error)
print("weaker:", weaker.require())
print("right:", grade(by_calls(), SOLUTION, sandbox=weaker))
print("write:", run("def act():\\n    open('mine', 'w')", sandbox=weaker))
print("read:", run("def act():\\n    return open({__file__!r}).read(5)", sandbox=weaker))
print("strict all the same:", end=" ")
try:
    print(grade(by_calls(), SOLUTION, sandbox=strict))
except RuntimeError as error:
    print(error)
"""
COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)
UNSHARE, LANDLOCK, PRCTL = {0: (272, 444, 157), 1: (97, 444, 167)}[COLUMN]


def _lacking(*calls: int) -> dict[str, str]:
    """What the sandbox says on a machine whose kernel or container refuses these system calls."""
    script = LACKING.replace("{here!r}", repr(str(Path(__file__).parent))).replace("{calls!r}", repr(calls))
    script = script.replace("{__file__!r}", repr(__file__))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_without_user_namespaces_as_in_most_containers_everything_still_holds():
    said = _lacking(UNSHARE)
    assert said["strict"] == "[]"
    assert said["right"] == "Grade(reward=1.0, reason='correct')"


def test_without_landlock_files_can_be_read_but_none_can_be_written():
    said = _lacking(LANDLOCK)
    assert said["refused"].startswith(
        "code of models could read files of the user on this machine (landlock: Operation not permitted); the sandbox "
        "needs Linux 5.13"
    )
    assert "`sandbox: weaker`" in said["refused"]
    assert said["weaker"] == "['read files of the user']"
    assert said["right"] == "Grade(reward=1.0, reason='correct')"
    assert said["write"].startswith("PermissionError")
    assert said["read"] == '"""Wh'
    assert said["strict all the same"] == "the sandbox does not hold: landlock"


def test_without_seccomp_the_weaker_sandbox_says_what_is_lost():
    """prctl is refused: neither seccomp nor, for users other than root, Landlock can be had."""
    said = _lacking(PRCTL)
    assert "use the network" in said["refused"] and "seccomp: Operation not permitted" in said["refused"]
    assert "use the network" in said["weaker"]
    assert "use more memory than its limit" not in said["weaker"]
    assert said["right"] == "Grade(reward=1.0, reason='correct')"


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="the package 'no-such-thing' is not installed"):
        Sandbox(packages=("no-such-thing",)).require()


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/python"])
def test_a_python_that_does_not_start_is_an_error_not_a_silent_zero(program, monkeypatch):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(ConfigError, match=r"does not run on this machine|can be started: No such file"):
        Sandbox(memory_mib=300).require()


def test_a_machine_without_room_for_folders_is_told(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match=r"no folder for code of models in .*nowhere \(No such file"):
            Sandbox(memory_mib=301).require()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("writable", [True, False])
def test_a_filter_can_be_made_for_every_architecture_with_a_table(machine, writable):
    program = confine.filter_program(machine, writable)
    assert len(program) % 8 == 0 and len(program) // 8 < 4096


def test_an_architecture_without_a_table_is_refused():
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        confine.filter_program("riscv64", True)


HEADERS = [
    ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0, r"#define __NR_(\w+)\s+(\d+)"),
    ("/usr/include/asm-generic/unistd.h", 1, r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
]


@pytest.mark.parametrize(("header", "column", "pattern"), HEADERS, ids=["x86_64", "aarch64"])
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(header, column, pattern):
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    numbers = {name: int(number) for name, number in re.findall(pattern, Path(header).read_text())}
    if column == 1:  # names that the generic table gives to 64-bit machines only
        numbers |= {"newfstatat": numbers["fstatat"], "lseek": 62} if "fstatat" in numbers else {}
    special = {
        "openat": confine._OPENAT, "fcntl": confine._FCNTL, "ioctl": confine._IOCTL, "prlimit64": confine._PRLIMIT,
        "capset": confine._CAPSET,
    }  # fmt: skip
    for name, pair in {**confine._CALLS, **confine._WRITING_CALLS, **special}.items():
        if pair[column] is not None:
            assert numbers[name] == pair[column], name
    assert {numbers["landlock_create_ruleset"], numbers["landlock_add_rule"], numbers["landlock_restrict_self"]} == {
        confine._CREATE_RULESET, confine._ADD_RULE, confine._RESTRICT_SELF,
    }  # fmt: skip


def test_what_must_never_be_allowed_is_not():
    forbidden = {
        "fork", "vfork", "clone", "clone3", "execve", "execveat", "socket", "socketpair", "connect", "bind", "kill",
        "tkill", "tgkill", "ptrace", "process_vm_readv", "process_vm_writev", "mount", "umount2", "unshare", "setns",
        "chroot", "pivot_root", "setrlimit", "setuid", "chmod", "fchmod", "chown", "link", "linkat", "symlink",
        "symlinkat", "mknod", "truncate", "open", "creat", "openat2", "io_uring_setup", "bpf", "keyctl", "memfd_create",
        "prctl", "seccomp", "landlock_restrict_self", "pidfd_open", "pidfd_send_signal", "userfaultfd",
    }  # fmt: skip
    assert not forbidden & {*confine._CALLS, *confine._WRITING_CALLS}


def test_the_default_sandbox_holds_here():
    assert Sandbox().require() == []
    assert grade(by_calls(), SOLUTION).reward == 1.0


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("verifier", ("torch", "transformers", "pydantic", "polars")),
        ("child", ("torch", "transformers", "pydantic", "polars", "numpy")),
    ],
)
def test_workers_and_sandboxed_processes_start_light(module, heavy):
    code = f"import sys, graftrl.tasks.code.{module}; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
