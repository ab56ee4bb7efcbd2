"""Run something in a forked child and kill it at a chosen step."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType


def survives(work: Callable[[], object], calls: int) -> bool:
    """Run ``work`` in a child that dies by SIGKILL at its ``calls``-th call of a built-in function.

    Every system call of Python code is one, so ever larger ``calls`` kill at every step there is. True if
    the child finished before.
    """
    child = os.fork()
    if child == 0:
        left = calls

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal left
            if event == "c_call":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.setprofile(count)
            work()
            status = 0
        except BaseException:
            sys.setprofile(None)
            traceback.print_exc()
        finally:
            sys.setprofile(None)
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def forked(work: Callable[[], object]) -> int:
    """Start ``work`` in a child; its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def wait(child: int) -> int:
    """The exit status of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
