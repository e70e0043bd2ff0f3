"""Runs a command as root of new user, mount and process namespaces that share nothing with the machine's own.

Usage: python3 tools/containers/namespace.py [--binfmt ELF-MACHINE:INTERPRETER] COMMAND [ARGUMENT...]

All user ids are kept, so that packages can be installed and images unpacked there. With --binfmt aarch64:QEMU, files
for that machine are executed by the static emulator, within these namespaces alone (binfmt_misc belongs to the user
namespace, from Linux 6.7 on). All processes end with the command. Exit code: the command's; needs root.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x0002_0000, 0x1000_0000, 0x2000_0000
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000
IDS = 65536
BINFMT = "/proc/sys/fs/binfmt_misc"
# ELF, 64 bits, little endian, executable or shared object, e_machine (elf.h): the other bytes are masked out.
MACHINES = {"aarch64": 0xB7, "x86_64": 0x3E}
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x{:02x}\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raises OSError for a failed call of the C library."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    """mount(2); raises OSError."""
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, None), f"mount {target}")


def register(binfmt: str) -> None:
    """Lets the kernel run a machine's files by an emulator; raises ValueError and OSError."""
    machine, _, interpreter = binfmt.partition(":")
    if machine not in MACHINES or not os.access(interpreter, os.X_OK):
        raise ValueError(f"--binfmt is {binfmt!r}; it must be {' or '.join(MACHINES)}, a colon, and an executable file")
    mount("binfmt_misc", BINFMT, "binfmt_misc")
    # Flag F opens the emulator now, so that it is found from within any root.
    line = f":{machine}:M::{MAGIC.format(MACHINES[machine])}:{MASK}:{os.path.abspath(interpreter)}:F"
    Path(BINFMT, "register").write_text(line, encoding="ascii")


def wait(process: int) -> int:
    """Exit code of a child, 128 + signal if a signal ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return code if code >= 0 else 128 - code


def inside(command: list[str], binfmt: str | None) -> int:
    """The first process of the namespaces: its own mounts, then the command."""
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    if binfmt is not None:
        register(binfmt)
    child = os.fork()
    if child == 0:
        os.execvp(command[0], command)
    # Orphans of containers land here; what outlives the command is ended by the kernel with this process.
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def run(command: list[str], binfmt: str | None) -> int:
    """Makes the namespaces; the id maps must be written from outside."""
    ready, go = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID), "unshare")
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os.setgid(0)
        os.setuid(0)
        first = os.fork()
        os._exit(inside(command, binfmt) if first == 0 else wait(first))
    os.close(ready[1])
    if os.read(ready[0], 1):
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{middle}/{name}").write_text(f"0 0 {IDS}\n", encoding="ascii")
        os.write(go[1], b"x")
    return wait(middle)


def main(arguments: list[str]) -> int:
    """Command line."""
    binfmt = None
    if arguments[:1] == ["--binfmt"]:
        binfmt, arguments = (arguments[1:2] or [""])[0], arguments[2:]
    if not arguments or os.geteuid() != 0:
        print(__doc__, file=sys.stderr)
        return 2
    return run(arguments, binfmt)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
