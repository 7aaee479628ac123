"""What a sandboxed process takes from itself before it runs code that it does not trust. For Linux, without root.

Each layer holds on its own, and says what it could not do instead of failing:

- `limits` (setrlimit): memory, CPU time, size and number of open files, no core dumps.
- `landlock`: files. Reads below given folders, writes below one; nothing else, whoever the user is.
- `seccomp`: system calls. A short list is allowed; new processes, threads, programs, sockets, signals to others,
  tracing, mounts, permissions and kernel interfaces are not on it. Without Landlock, nothing that writes a file is.
- `namespaces`: a network of its own without any device, where the kernel lets users have one. A second lock only.

Everything is standard library, because this runs in an interpreter without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

LAYERS = ("limits", "landlock", "seccomp", "namespaces")  # all but the last must hold

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38  # linux/prctl.h
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000  # linux/sched.h
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h

# linux/landlock.h. The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG = 1, 2, 4, 8, 1 << 5, 1 << 8
_TRUNCATE = 1 << 14
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_RIGHTS = 3  # bind, connect; from version 4
_SCOPES = 3  # abstract Unix sockets, signals; from version 6

# System calls that are allowed: name, number on x86_64, number on aarch64. None: there is no such call.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    # open files and the clock
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "close": (3, 57), "close_range": (436, 436), "fstat": (5, 80), "lseek": (8, 62), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "fsync": (74, 82), "fdatasync": (75, 83), "sendfile": (40, 71),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    # the file system: looking. Landlock decides what can be read; names and sizes of other files can be seen.
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "getdents64": (217, 61), "umask": (95, 166),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214),
    # its own signals, its one thread, its own end
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "restart_syscall": (219, 128),
    "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293),
    "arch_prctl": (158, None), "membarrier": (324, 283), "sched_yield": (24, 124), "exit": (60, 93),
    "exit_group": (231, 94),
    # questions about itself and the machine
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getpgrp": (111, None), "uname": (63, 160),
    "sysinfo": (99, 179), "getcpu": (309, 168), "sched_getaffinity": (204, 123), "getrlimit": (97, 163),
    "getrandom": (318, 278),
}  # fmt: skip
# The file system: changing. Only where Landlock says which part of it.
_WRITING_CALLS: dict[str, tuple[int | None, int | None]] = {
    "ftruncate": (77, 46), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276),
}  # fmt: skip
# Allowed with some arguments only.
_OPENAT, _FCNTL, _IOCTL, _PRLIMIT = (257, 56), (72, 25), (16, 29), (302, 261)
_CAPSET = (126, 91)

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit number
_X32_BIT = 0x40000000  # on x86_64, the same calls under other numbers
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # duplicate, get and set flags: none that names another process
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451, 0x802C542A)  # is it a terminal, how wide, close on exec
_O_ACCMODE, _O_CREAT, _O_TRUNC, _O_APPEND, _O_TMPFILE = 0o3, 0o100, 0o1000, 0o2000, 0o20000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # linux/bpf_common.h
_KILL, _ALLOW, _DENY = 0x80000000, 0x7FFF0000, 0x00050000 | 1  # linux/seccomp.h; 1 is EPERM


def confine(settings: dict[str, Any]) -> dict[str, str]:
    """Give up everything that `settings` does not name: for good, and for all that this process may start.

    Args:
        settings: `memory` and `file_size` in bytes, `cpu` in seconds, `files` (open at once), `read` (paths of files
            and folders), `packages` (folders of which only names may be read), `write` (one folder).

    Returns:
        for each of `LAYERS` "" where it holds, else what the system said.
    """
    outcome = {"limits": _attempt(_limit, settings)}
    if sys.platform != "linux":
        return outcome | dict.fromkeys(LAYERS[1:], f"not on {sys.platform}")
    outcome["namespaces"] = _attempt(_unshare)
    _attempt(_drop_capabilities)  # of root, which would be above some limits; a user has none
    _attempt(_prctl, _PR_SET_NO_NEW_PRIVS, 1)  # without it the next two say that they cannot be had
    outcome["landlock"] = _attempt(_restrict_files, settings["read"], settings["packages"], settings["write"])
    writable = not outcome["landlock"]
    outcome["seccomp"] = _attempt(lambda: install_filter(filter_program(platform.machine(), writable)))
    return outcome


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` ends (Linux only)."""
    if sys.platform == "linux":
        _attempt(_prctl, _PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def filter_program(machine: str, writable: bool) -> bytes:
    """The seccomp filter for an architecture. writable: files may be opened for writing, where Landlock lets them be.

    Raises:
        OSError: there is no table of system calls for the architecture.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(f"no table of system calls for {machine}")
    column, audit = _ARCHITECTURES[machine]
    calls = [*_CALLS.values(), *(_WRITING_CALLS.values() if writable else ())]
    program = [_step(_LOAD, 4), _step(_EQUAL, audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    if machine == "x86_64":
        program += [_step(_AT_LEAST, _X32_BIT, 0, 1), _step(_RETURN, _DENY)]
    for numbers in calls:
        number = numbers[column]
        if number is not None:
            program += _if_call(number, [_step(_RETURN, _ALLOW)])
    # openat(folder, path, flags): a file that is not open for writing must not be emptied, which old Landlock forgets
    flags = _argument(2)
    if writable:
        check = [flags, _step(_AND, _O_ACCMODE | _O_TRUNC), *_deny_any(_O_TRUNC, _O_TRUNC | _O_ACCMODE)]
    else:
        writing = _O_ACCMODE | _O_CREAT | _O_TRUNC | _O_APPEND | _O_TMPFILE
        check = [flags, _step(_ANY_BIT, writing, 0, 1), _step(_RETURN, _DENY)]
    program += _if_call(_OPENAT[column], [*check, _step(_RETURN, _ALLOW)])
    program += _if_call(_FCNTL[column], [_argument(1), *_allow_any(*_FCNTL_COMMANDS), _step(_RETURN, _DENY)])
    program += _if_call(_IOCTL[column], [_argument(1), *_allow_any(*_IOCTL_REQUESTS), _step(_RETURN, _DENY)])
    # prlimit64(process, resource, new, old): its own limits may be read
    zero = [step for part in (_argument(0), _argument(2), _argument(2, high=True)) for step in (part, *_deny_unless(0))]
    program += _if_call(_PRLIMIT[column], [*zero, _step(_RETURN, _ALLOW)])
    return b"".join([*program, _step(_RETURN, _DENY)])


def denying_program(machine: str, numbers: Iterable[int]) -> bytes:
    """A filter that denies these calls alone; to see what happens on a machine whose kernel or container lacks them."""
    _, audit = _ARCHITECTURES[machine]
    program = [_step(_LOAD, 4), _step(_EQUAL, audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    return b"".join([*program, *_deny_any(*numbers), _step(_RETURN, _ALLOW)])


def install_filter(program: bytes) -> None:
    """Put a seccomp filter on this process. Raises OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    steps = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(steps))  # struct sock_fprog
    buffer = ctypes.create_string_buffer(header, len(header))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(buffer))


def _limit(settings: dict[str, Any]) -> None:
    import resource

    wanted = {
        "RLIMIT_AS": settings["memory"],
        "RLIMIT_CPU": settings["cpu"],
        "RLIMIT_FSIZE": settings["file_size"],
        "RLIMIT_NOFILE": settings["files"],
        "RLIMIT_NPROC": 0,  # of the whole user, and not for root: seccomp is what holds here
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    for name, value in wanted.items():
        which = getattr(resource, name, None)
        if which is not None:
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))


def _unshare() -> None:
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)


def _drop_capabilities() -> None:
    column, _ = _ARCHITECTURES[platform.machine()]
    header, none = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _syscall(_CAPSET[column], ctypes.c_char_p(header), ctypes.c_char_p(none))


def _restrict_files(read: Sequence[str], names: Sequence[str], write: str) -> None:
    version = _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    rights = _FS_RIGHTS[min(version, max(_FS_RIGHTS))]
    attributes = struct.pack("Q", rights)
    if version >= 4:
        attributes += struct.pack("Q", _TCP_RIGHTS)
    if version >= 6:
        attributes += struct.pack("Q", _SCOPES)
    ruleset = _syscall(
        _CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    )
    for path in read:
        _allow_below(ruleset, path, rights & (_READ_FILE | _READ_DIR))
    for path in names:
        _allow_below(ruleset, path, rights & _READ_DIR)
    _allow_below(ruleset, write, rights & (_READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _MAKE_REG | _REMOVE_FILE))
    _syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow_below(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
    rule = struct.pack("=Qi", rights, place)
    _syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.c_char_p(rule), ctypes.c_uint32(0))
    os.close(place)


def _attempt(act: Any, *arguments: Any) -> str:
    try:
        act(*arguments)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _prctl(option: int, *values: int) -> None:
    padded = (*values, 0, 0, 0, 0)[:4]
    _call("prctl", option, *(ctypes.c_ulong(value) for value in padded))


def _syscall(number: int, *arguments: Any) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def _call(name: str, *arguments: Any) -> int:
    result = int(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _if_call(number: int, steps: Sequence[bytes]) -> list[bytes]:
    """The steps, which must end in a return, for this call alone."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]


def _argument(index: int, high: bool = False) -> bytes:
    return _step(_LOAD, 16 + 8 * index + 4 * high)  # struct seccomp_data, little-endian


def _allow_any(*values: int) -> list[bytes]:
    return [step for value in values for step in (_step(_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW))]


def _deny_any(*values: int) -> list[bytes]:
    return [step for value in values for step in (_step(_EQUAL, value, 0, 1), _step(_RETURN, _DENY))]


def _deny_unless(value: int) -> list[bytes]:
    return [_step(_EQUAL, value, 1, 0), _step(_RETURN, _DENY)]
