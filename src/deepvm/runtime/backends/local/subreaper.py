"""A command -> its exit code, when all of its processes have ended: the keeper of a process tree.

As a subreaper it becomes the parent of every orphan below it, whatever its session: a keeper without children has left
no process behind. It ends them when its owner asks for it, when the command ends, and when the owner ends or is killed.

Started by its file name, in an isolated interpreter (20 ms, 9 MB), so it imports nothing but the standard library:

    python -I -S subreaper.py CONTROL OWNER NAMESPACE COMMAND...

The tree's output comes through a pipe and is appended to this process's own output, a log. A full disk thus loses
output, but ends no process. Of a progress bar, which rewrites its line, one state a second is kept.

CONTROL is a socket: the owner writes lines, ``terminate`` (SIGTERM to the command) or ``kill SECONDS`` (end the tree
then), and reads the command's exit code at the end. NAMESPACE is the file of a network namespace, or empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _CLONE_NEWNET = 1, 36, 0x40000000  # prctl.h, sched.h
_POLL_S = 1.0  # between two checks that the owner exists
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between two rounds of killing; a process needs a moment to end
_NOT_FOUND = 127  # a shell's exit code
_LOG = 1  # the descriptor
_UPDATE_S = 1.0  # between two states of a line that is rewritten
_MOST_HELD = 2**16  # bytes of such a line

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    control, owner, namespace, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    os.set_inheritable(control, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    owner_end = os.pidfd_open(owner)  # not PDEATHSIG, which comes when the thread that started this one ends
    if os.getppid() != owner:  # it ended before, and its pid may belong to a new process
        return
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    printed, printing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(printed, False)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(printing, stream)
        _become(command, namespace, keeper)
    os.close(printing)
    output = _Output(printed)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _signal(child, signal.SIGTERM))
    ended = _watch(child, control, owner, owner_end, woken, output)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = _end_all(child, ended)
    output.close()
    with contextlib.suppress(OSError):  # the owner may be gone
        os.write(control, b"%d\n" % code)
    os._exit(0)


def _become(command: list[str], namespace: str, keeper: int) -> None:
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case the keeper itself is killed
        if os.getppid() != keeper:
            os._exit(1)
        os.setsid()  # a command that signals its own group must not reach its keeper
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which exec would pass on
            signal.signal(number, signal.SIG_DFL)
        if namespace:
            joined = os.open(namespace, os.O_RDONLY)  # the command does not inherit it
            if _libc.setns(joined, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "it cannot be joined", namespace)
        os.execvp(command[0], command)  # noqa: S606
    except (OSError, ValueError) as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(_NOT_FOUND)


def _watch(child: int, control: int, owner: int, owner_end: int, woken: int, output: _Output) -> int | None:
    """Wait until the tree must end. Return the command's wait status if it ended by itself."""
    kill_at_s, rest = math.inf, b""
    while (now_s := time.monotonic()) < kill_at_s:
        sources = [control, owner_end, woken, *output.sources]
        ready = select.select(sources, [], [], min(_POLL_S, kill_at_s - now_s))[0]
        if woken in ready:
            os.read(woken, 4096)
        output.take(ready)
        ended, _ = _reap(child)
        if ended is not None:
            return ended
        if owner_end in ready or os.getppid() != owner:
            return None
        if control not in ready:
            continue
        try:
            got = os.read(control, 4096)
        except OSError:
            got = b""
        if not got:  # the owner closed it
            return None
        *lines, rest = (rest + got).split(b"\n")
        for line in lines:
            word, _, seconds = line.partition(b" ")
            if word == b"terminate":
                _signal(child, signal.SIGTERM)
            else:
                kill_at_s = min(kill_at_s, time.monotonic() + float(seconds))
    return None


class _Output:
    """Copies the tree's output from a pipe into the log."""

    def __init__(self, printed: int) -> None:
        self.sources = [printed]
        self._held = b""  # a line's last state that may be rewritten, with its carriage return
        self._updated_s = 0.0
        self._lost, self._why = 0, ""

    def take(self, ready: list[int]) -> None:
        if self.sources and self.sources[0] in ready:
            try:
                got = os.read(self.sources[0], _MOST_HELD)
            except BlockingIOError:
                return
            if not got:  # all writers have ended
                os.close(self.sources.pop())
            self._add(got)
        elif self._held and time.monotonic() - self._updated_s >= _UPDATE_S:
            self._flush()

    def close(self) -> None:
        while self.sources and select.select(self.sources, [], [], 0)[0]:
            self.take(self.sources)
        self._flush()

    def _add(self, got: bytes) -> None:
        *lines, rest = (self._held + got).split(b"\n")
        first, update = _newest(rest)
        self._held = b""
        self._write(b"".join(b"".join(_newest(line)) + b"\n" for line in lines) + first)
        self._held = update
        if len(update) > _MOST_HELD or time.monotonic() - self._updated_s >= _UPDATE_S:
            self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if held:
            self._updated_s = time.monotonic()
            self._write(held)

    def _write(self, found: bytes) -> None:
        if self._lost and found:
            note = f"\n[{self._lost} bytes of output are lost: {self._why}]\n".encode()
            try:
                os.write(_LOG, note)
                self._lost = 0
            except OSError:
                self._lost += len(found)
                return
        while found:
            try:
                found = found[os.write(_LOG, found) :]
            except OSError as error:  # a full disk, most of all
                self._lost, self._why = self._lost + len(found), error.strerror or str(error)
                return


def _newest(line: bytes) -> tuple[bytes, bytes]:
    """Return the beginning of a line, and its last state after that if it was rewritten: b"\\r 90%"."""
    begins = line.find(b"\r")
    if begins < 0 or begins == len(line) - 1:
        return (line, b"") if begins < 0 else (line[:begins], line[begins:])
    newest = line.rfind(b"\r", 0, len(line) - 1)
    return line[:begins], line[newest:]


def _end_all(child: int, ended: int | None) -> int:
    """Kill everything that is left, and return the command's exit code."""
    pause_s, left = _PAUSE_S, True
    while left:
        below = _descendants()
        for group in {group for _, group in below} - {os.getpgrp(), 0, 1}:  # -1 would be every process there is
            _signal(-group, signal.SIGKILL)  # also those that it got since it was listed
        for pid, _ in below:
            _signal(pid, signal.SIGKILL)
        found, left = _reap(child)
        ended = found if ended is None else ended
        if left:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return -signal.SIGKILL if ended is None else os.waitstatus_to_exitcode(ended)


def _reap(child: int) -> tuple[int | None, bool]:
    """Return the command's wait status if it has just ended, and True if there are more children."""
    status = None
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                status = found[1]
    except ChildProcessError:
        return status, False
    return status, True


def _descendants() -> list[tuple[int, int]]:
    """Return pids and process groups. /proc/PID/stat is on every Linux; /proc/PID/task/*/children is not."""
    below: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    _, parent, group = file.read().rpartition(b")")[2].split()[:3]
            except OSError:  # it has just ended
                continue
            below.setdefault(int(parent), []).append((int(name), int(group)))
    found = list(below.get(os.getpid(), ()))
    for pid, _ in found:  # which grows
        found += below.get(pid, ())
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    main()
