"""What code of a response must not be able to do to the machine. Without the sandbox it can, but does no harm here."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from code_helpers import by_calls, by_tests, grade, run

from graftrl.tasks.code import sandbox
from graftrl.tasks.code.sandbox import Sandbox, TooMuch


def _ours() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = _ours()
    yield
    assert _ours() == before


@pytest.mark.parametrize(
    "loop", ["while True: pass", "10 ** (10 ** 9)", "import time; time.sleep(60)", "import signal; signal.pause()"]
)
@pytest.mark.parametrize("problem", [by_calls(), by_tests()], ids=["calls", "tests"])
def test_what_does_not_end_is_killed_at_its_limit(problem, loop):
    started = time.monotonic()
    grade_ = grade(problem, f"def add(a, b):\n    {loop}\n", time_s=0.5)
    assert (grade_.reward, grade_.reason) == (0.0, "time limit")
    assert time.monotonic() - started < 15.0


def test_signals_cannot_be_used_to_outlive_the_limit():
    code = """
    import signal
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    def add(a, b):
        while True:
            pass
    """
    assert grade(by_calls(), code, time_s=0.5).reason == "time limit"


def test_a_fork_bomb_makes_no_process():
    """One that stops by itself: a test must not take the machine down where the sandbox does not hold."""
    code = """
    import os, time
    def act():
        started = 0
        for _ in range(50):
            try:
                if os.fork() == 0:
                    time.sleep(5)
                    os._exit(0)
                started += 1
            except OSError:
                pass
        return started
    """
    assert run(code) == 0


@pytest.mark.parametrize(
    "attempt",
    [
        "os.fork()",
        "os.system('sleep 60')",
        "subprocess.Popen(['/bin/sleep', '60'])",
        "os.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
        "threading.Thread(target=time.sleep, args=(60,)).start()",
        "multiprocessing.Process(target=int).start()",
        "os.execv('/bin/sleep', ['sleep', '60'])",
    ],
)
def test_no_process_and_no_thread_can_be_started(attempt):
    code = f"import os, subprocess, threading, multiprocessing, time\ndef act():\n    return [{attempt}] and 'done'"
    answer = run(code)
    if attempt.startswith("os.system"):
        assert answer == "done"  # system() reports failure by its result
    else:
        assert str(answer).startswith(("PermissionError", "RuntimeError: can't start new thread"))


@pytest.mark.parametrize("hog", ["len(bytearray(8 * 1024**3))", "len([0] * 10**10)", "len('x' * 10**11)"])
def test_a_memory_hog_fails_alone(hog):
    assert grade(by_calls(), f"def add(a, b):\n    return {hog}\n").reason == "raised MemoryError"


def test_memory_that_grows_by_and_by_is_bounded():
    code = """
    kept = []
    def add(a, b):
        while True:
            kept.append(bytearray(1 << 20))
    """
    assert grade(by_calls(), code).reason == "raised MemoryError"


WRITES = {
    "open": "open(path, 'w').write('broken')",
    "append": "open(path, 'a').write('broken')",
    "empty it while reading": "os.open(path, os.O_RDONLY | os.O_TRUNC)",
    "empty it without access": "os.open(path, 3 | os.O_TRUNC)",
    "truncate": "os.truncate(path, 0)",
    "remove": "os.remove(path)",
    "rename away": "os.rename(path, 'mine')",
    "rename over": "open('mine', 'w').write('broken'); os.rename('mine', path)",
    "hard link": "os.link(path, 'mine')",
    "symbolic link": "os.symlink(path, 'mine'); open('mine', 'w').write('broken')",
    "permissions": "os.chmod(path, 0o777)",
    "owner": "os.chown(path, 1, 1)",
    "times": "os.utime(path, (0, 0))",
    "attributes": "os.setxattr(path, 'user.x', b'x')",
    "new file": "open(path + '.new', 'w')",
    "new folder": "os.mkdir(path + '.new')",
    "device": "os.mknod(path + '.new')",
    "from above": "open('../../' + os.path.basename(path), 'w').write('broken')",
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_no_file_outside_its_folder_is_changed(write, tmp_path):
    target = tmp_path / "precious"
    target.write_text("intact")
    before = target.stat()
    lines = "\n".join(f"    {part.strip()}" for part in write.split(";"))
    answer = run(f"import os\ndef act(path):\n{lines}\n    return 'done'", str(target))
    assert answer.startswith(("PermissionError", "OSError"))
    assert target.read_text() == "intact"
    after = target.stat()
    assert [after.st_mode, after.st_uid, after.st_mtime, after.st_nlink] == [
        before.st_mode, before.st_uid, before.st_mtime, before.st_nlink,
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "temporary"]


def test_its_own_folder_is_empty_and_may_be_written(tmp_path):
    code = """
    import os, tempfile
    def act():
        first = os.listdir(".")
        with open("notes", "w") as file:
            file.write("abc")
        os.rename("notes", "kept")
        with tempfile.TemporaryFile("w+") as file:
            file.write("x")
        return first, open("kept").read(), os.listdir("."), os.getcwd() == os.environ["HOME"]
    """
    assert run(code) == ([], "abc", ["kept"], True)


@pytest.mark.parametrize(
    "fill",
    [
        "open('a', 'wb').write(bytes(2 << 20))",
        "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(1000)]",
        "[open(str(n), 'wb').close() for n in range(100_000)]",
        "[kept.append(open(str(n), 'wb')) for n in range(1000)]",
    ],
)
def test_a_disk_cannot_be_filled(fill):
    code = f"import time\nkept = []\ndef act():\n    {fill}\n    time.sleep(5)"
    try:
        answer = run(code)
    except TooMuch:
        return
    assert answer.startswith("OSError: [Errno 27]" if "2 << 20" in fill else "OSError: [Errno 24]")


def test_a_disk_cannot_be_filled_by_removed_files_that_are_mapped():
    """Neither an open file nor a name is left of them, but their space is taken as long as the memory is mapped."""
    code = """
    import ctypes, os, time
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    def act():
        mapped = 0
        for n in range(300):
            with open("a", "w+b") as file:
                file.write(bytes(4096))
                file.flush()
                mapped += libc.mmap(None, 4096, 1, 2, file.fileno(), 0) != ctypes.c_void_p(-1).value
            os.remove("a")
        if mapped == 300:
            time.sleep(10)
    """
    with pytest.raises(TooMuch):
        run(code)


def test_who_answers_without_end_is_watched_as_well():
    code = """
    import os
    def act():
        for n in range(300):
            open(str(n), "wb").close()
        while True:
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"=null\\n")
                except OSError:
                    pass
    """
    with pytest.raises(TooMuch):
        run(code)


def test_a_secret_of_the_user_cannot_be_read(tmp_path, monkeypatch):
    secret = tmp_path / "token"
    secret.write_text("hunter2")
    monkeypatch.setenv("GRAFTRL_SECRET", "hunter2")
    code = """
    import glob, os
    def act(path, parent):
        found = []
        places = [path, "/etc/passwd", "/proc/self/environ", f"/proc/{parent}/environ", f"/proc/{parent}/cmdline",
                  f"/proc/{parent}/mem", os.path.expanduser("~root/.bashrc"), "/proc/self/mem", "/dev/mem"]
        for place in places:
            try:
                found.append(open(place, "rb").read(100))
            except OSError:
                pass
        for folder in (os.path.dirname(path), "/home", "/root", "/proc"):
            try:
                found.append(os.listdir(folder))
            except OSError:
                pass
        return found, "hunter2" in str(os.environ)
    """
    assert run(code, str(secret), os.getpid()) == ([], False)


@pytest.mark.parametrize(
    "call",
    [
        "socket.create_connection(('127.0.0.1', port), 2).sendall(b'x')",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
        "socket.socket(socket.AF_UNIX).connect(path)",
        "socket.socketpair()",
        "urllib.request.urlopen(f'http://127.0.0.1:{port}/', timeout=2)",
        "asyncio.run(asyncio.open_connection('127.0.0.1', port))",
    ],
)
def test_nothing_reaches_the_network_nor_this_machine(call, tmp_path):
    path = str(tmp_path / "socket")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        local.bind(path)
        local.listen()
        code = f"import asyncio, socket, urllib.request\ndef act(port, path):\n    {call}\n    return 'done'"
        answer = run(code, tcp.getsockname()[1], path)
        assert answer.startswith(("PermissionError", "OSError", "URLError"))
        for server in (tcp, local):
            server.settimeout(0.05)
            with pytest.raises(TimeoutError):
                server.accept()


@pytest.mark.parametrize(
    "kill", ["os.kill(parent, 0)", "os.killpg(parent, 0)", "os.kill(-1, 0)", "signal.pidfd_send_signal(3, 0)"]
)
def test_no_other_process_can_be_killed(kill):
    """Signal 0 is sent to no one, but needs the same right."""
    answer = run(f"import os, signal\ndef act(parent):\n    {kill}\n    return 'done'", os.getpid())
    assert answer.startswith("PermissionError")


def test_system_calls_by_number_are_refused_as_well():
    code = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def act(parent):
        buffer = ctypes.create_string_buffer(256)
        calls = {
            "fork": lambda: libc.fork(), "socket": lambda: libc.socket(2, 1, 0), "unshare": lambda: libc.unshare(1024),
            "ptrace": lambda: libc.ptrace(0, 0, 0, 0), "mount": lambda: libc.mount(b"x", b"/", b"tmpfs", 0, 0),
            "setuid": lambda: libc.setuid(0), "kill": lambda: libc.kill(parent, 0),
            "prlimit": lambda: libc.prlimit(parent, 0, None, buffer), "prctl": lambda: libc.prctl(1, 0, 0, 0, 0),
            "memfd": lambda: libc.memfd_create(b"x", 0), "setrlimit": lambda: libc.setrlimit(9, buffer),
            "process_vm_readv": lambda: libc.process_vm_readv(parent, buffer, 1, buffer, 1, 0),
            "fcntl": lambda: libc.fcntl(1, 8, parent),
        }
        return sorted(name for name, call in calls.items() if call() != -1)
    """
    assert run(code, os.getpid()) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")
@pytest.mark.parametrize(
    "machine_code",
    [
        b"\xb8\x02\x00\x00\x00\xcd\x80\xc3",  # mov eax, 2 (fork of 32-bit programs); int 0x80; ret
        b"\xb8\x39\x00\x00\x40\x0f\x05\xc3",  # mov eax, 57 (fork) with the x32 bit; syscall; ret
        b"\xb8\x39\x00\x00\x00\x0f\x05\xc3",  # mov eax, 57 (fork); syscall; ret
    ],
)
def test_no_other_door_of_the_kernel_starts_a_process(machine_code):
    code = """
    import ctypes, mmap
    def act(code):
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        memory.write(code)
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return ctypes.CFUNCTYPE(ctypes.c_int)(place)()
    """
    assert run(code, machine_code) in (None, -1)  # killed, or EPERM


def test_limits_cannot_be_raised():
    code = """
    import resource
    def act():
        raised = []
        for name in dir(resource):
            if name.startswith("RLIMIT_"):
                try:
                    resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    raised.append(name)
                except (OSError, ValueError):
                    pass
        return raised, resource.getrlimit(resource.RLIMIT_AS)[0]
    """
    assert run(code, sandbox=Sandbox(memory_mib=512)) == ([], 512 * 1024**2)


def test_only_named_packages_can_be_imported():
    code = """
    def act():
        import numpy
        try:
            import torch
        except OSError:
            return int(numpy.arange(4).sum())
    """
    assert run(code) == 6
    assert run("def act():\n    import numpy", sandbox=Sandbox(packages=())).startswith("ModuleNotFoundError")


def test_the_program_that_grades_is_not_in_reach(tmp_path):
    code = """
    def act():
        import sys
        child = sys.modules["graftrl.tasks.code.child"]
        open(child.__file__, "a").close()
    """
    assert run(code).startswith("PermissionError")


def test_standard_streams_lead_nowhere(capfd):
    code = """
    import os, sys
    def act():
        print("x" * 1_000_000)
        sys.stderr.write("y" * 1_000_000)
        os.write(1, b"z")
        try:
            input()
        except EOFError:
            return "no input"
    """
    assert run(code) == "no input"
    assert capfd.readouterr() == ("", "")


ORPHAN = """
import sys, tempfile, time
sys.path.insert(0, {here!r})
tempfile.tempdir = {place!r}
from code_helpers import run
print("ready", flush=True)
run("import time\\ndef act():\\n    time.sleep(100)", limit_s=100.0)
"""


def test_a_killed_owner_takes_its_child_along_and_the_folder_is_swept_later(tmp_path):
    place = Path(tempfile.gettempdir())
    script = ORPHAN.format(here=str(Path(__file__).parent), place=str(place))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        children: list[psutil.Process] = []
        while not (children and any(place.iterdir())):
            children = psutil.Process(owner.pid).children()
            time.sleep(0.02)
        sandbox._sweep.cache_clear()
        sandbox.sweep()
        assert len(list(place.iterdir())) == 1  # its owner lives
        owner.kill()
    psutil.wait_procs(children, timeout=5.0)
    assert not any(child.is_running() for child in children)
    (folder,) = place.iterdir()
    os.utime(folder, (0, 0))
    sandbox._sweep.cache_clear()
    sandbox.sweep()
    assert list(place.iterdir()) == []
