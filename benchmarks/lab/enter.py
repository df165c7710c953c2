"""`python -I -S enter.py NAMESPACE_FILE PARENT_PID COMMAND...`: become COMMAND inside a network namespace of the lab.

The idea: no shell and no helper stays between; the kernel ends the command when the lab dies, even by kill -9.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def main() -> None:
    path, parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(file, CLONE_NEWNET) != 0:
        sys.exit(f"cannot enter {path}: {os.strerror(ctypes.get_errno())}")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we could ask
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
