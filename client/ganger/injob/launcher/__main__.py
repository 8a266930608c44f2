"""``python -m ganger.injob.launcher --socket PATH``: one launcher, run by the interpreter of the jobs it starts."""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="ganger.injob.launcher", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket to serve, in a directory only its user may enter")
    parser.add_argument("--idle-s", type=float, default=300.0, help="end after so long without child or caller")
    parser.add_argument("--no-preload", action="store_true", help="import nothing ahead of time; start all by exec")
    arguments = parser.parse_args()
    path = os.path.abspath(arguments.socket)

    from ganger.injob.launcher import child_process, orphan_reaper, starter

    # While this process is small, and before it has anything that no other may keep.
    notes = orphan_reaper.leave_reaper()
    helper = starter.make_starter(child_process.start_executed)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"ganger launcher: another one serves {path}", file=sys.stderr)
        raise SystemExit(0) from None
    # What a child may keep: everything open so far but the lock.
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    os.umask(0o077)
    listener.bind(path)
    # From here on callers can connect; they are answered when the imports are done.
    listener.listen(64)

    from ganger.injob.launcher import preload
    from ganger.injob.launcher.server import ChildTask, LauncherServer

    preloaded = [] if arguments.no_preload else preload.preload()
    may_fork = not arguments.no_preload and preload.is_fork_safe()
    server = LauncherServer(path, listener, lock, preloaded, may_fork, arguments.idle_s, helper, notes)
    try:
        server.serve()
    except ChildTask as task:
        # In a child: the launcher's frames are gone before the user's begin.
        run = task.run
    else:
        return
    del server, listener
    run()


if __name__ == "__main__":
    main()
