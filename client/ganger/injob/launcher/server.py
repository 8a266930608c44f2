"""The launcher's loop: one thread, one selector over callers, children and messages of children. The ends of ranks are
recorded on disk. Nothing else waits for a disk or a child: what may take long is done by forked helpers."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Callable, NoReturn

from ganger.injob.launcher import child_process
from ganger.injob.launcher.callers import Caller, LauncherCallers
from ganger.injob.launcher.child_process import open_listener
from ganger.injob.launcher.children import LauncherChild, LauncherChildren, LeaseKeeper
from ganger.injob.launcher.namespaces import end_children, fork_in
from ganger.injob.launcher.orphan_reaper import ReaperNotes
from ganger.injob.launcher.process_record import (
    Launch,
    LaunchError,
    from_page,
    parse_launch,
    publish,
    python_command,
)
from ganger.injob.launcher.rank_tree import (
    RestoreRequest,
    TreeRequest,
    be_root,
    end_family,
    listener_port,
    parse_unit,
    read_pids,
    restored_ranks,
    restored_root,
    tree_members,
)
from ganger.injob.launcher.starter import Starter, StarterError, begin
from ganger.injob.process_identity import start_ticks
from ganger.injob.state_image import make_arena, recover_arena

# Answers a request: with fields, and a descriptor where one is given.
Reply = Callable[..., None]

_RETRY_S = 1.0
_LOOK_S = 2.0


class ChildTask(BaseException):
    """Raised in a forked child to leave the loop; ``run`` is what the child is for."""

    def __init__(self, run: Callable[[], NoReturn]) -> None:
        super().__init__()
        self.run = run


class LauncherServer:
    """See the module. ``may_fork``: scripts of this interpreter run in forked children; otherwise all are executed."""

    def __init__(
        self,
        path: str,
        listener: socket.socket,
        lock: int,
        preloaded: list[str],
        may_fork: bool,
        idle_s: float,
        starter: Starter | None = None,
        notes: ReaperNotes | None = None,
    ) -> None:
        self._path = path
        self._lock = lock
        self._preloaded = preloaded
        self._may_fork = may_fork
        self._idle_s = idle_s
        self._starter = starter
        self._selector = selectors.DefaultSelector()
        self._callers = LauncherCallers(self._selector, listener, self._answer)
        self._notes = notes
        self._children = LauncherChildren(self._selector, self._close_arena, notes)
        self._arenas: dict[str, int] = {}
        self._stopping = False

    def serve(self) -> None:
        """Serve until idle for long enough. Raises ChildTask in forked children."""
        busy_at = time.monotonic()
        while not self._stopping:
            for key, _ in self._selector.select(self._pause()):
                if key.fd in self._selector.get_map():  # an earlier one of this round may have ended it
                    key.data()
            self._children.record_again()
            if self._children or self._callers or self._children.has_unrecorded:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at >= self._idle_s or not os.path.exists(self._path):
                break  # without its socket no client can connect any more
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass  # the directory was removed already

    def _pause(self) -> float:
        """Keep the leases that have ended, and return for how long nothing else is due."""
        # One that is being started runs nothing of its job yet. Frozen before it is settled, it would never be settled.
        settled = (one for one in self._children if one.settle is None)
        looks = [one.keeper.look() for one in settled if one.keeper is not None]
        # a lease may be made shorter at any time, and a rank lose its boundaries
        looks += [_RETRY_S] if looks or self._children.has_unrecorded else [_LOOK_S, self._idle_s]
        return max(0.0, min(looks))

    def _answer(self, caller: Caller, request: Mapping[str, Any]) -> None:
        operation = _OPERATIONS.get(request.get("op"))
        if operation is None:
            raise LaunchError("UNKNOWN_OPERATION", f"this launcher has no operation {request.get('op')!r}")
        operation(self, request, partial(self._callers.reply, caller, request.get("id")))

    def _info(self, request: Mapping[str, Any], reply: Reply) -> None:
        reply(
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()),
            python=sys.executable,
            version=sys.version.split()[0],
            torch="torch" in self._preloaded,
            fork_safe=self._may_fork,
            serves_stores=self._serves_stores,
        )

    def _fork(self, request: Mapping[str, Any], reply: Reply) -> None:
        launch = parse_launch(request["launch"])
        self._reject_running(launch)
        arena = self._arena_for(launch)
        self._touch(launch, arena)
        with child_process.failure_pipe() as (read_end, write_end):
            started = None
            is_script = python_command(launch.argv, launch.env, launch.cwd) is not None
            if not (self._may_fork and is_script):
                with suppress(StarterError):  # then it is forked from here
                    started = self._start(request["launch"], write_end, arena)
            pid, word = started or (os.fork(), None)
        if pid == 0:
            self._become_child(keep=[write_end, *([] if arena is None else [arena])])
            raise ChildTask(lambda: child_process.start(launch, self._may_fork, arena, write_end))
        os.close(write_end)
        new = self._children.add_rank(launch, pid)
        if word is not None:
            begin(word)
        # The child closes its end when it is settled (exec closes it too), or writes what went wrong.
        self._children.settle_later(new, read_end, lambda: self._answer_settled(reply, new))

    def _fork_together(self, request: Mapping[str, Any], reply: Reply) -> None:
        """Start ranks below one parent, with a rendezvous store beside them where ``store_host`` is given."""
        host = str(request.get("store_host") or "")
        if host:
            self._check_serves_stores()
        listener = open_listener(host) if host else None
        try:
            wanted = TreeRequest.parse(request["launches"], listener_port(listener))
            for launch in wanted.launches:
                self._reject_running(launch)
            arenas = [self._arena_for(launch) for launch in wanted.launches]
            for launch, arena in zip(wanted.launches, arenas):
                self._touch(launch, arena)
            with ExitStack() as stack:
                pipes = [stack.enter_context(child_process.failure_pipe()) for _ in wanted.launches]
                report, write_end = stack.enter_context(child_process.failure_pipe())
                pid = os.fork()
            if pid == 0:
                task = self._tree_task(wanted, host, listener, arenas, [end for _, end in pipes], write_end)
                raise ChildTask(partial(task, [report, *(end for end, _ in pipes)]))
        finally:
            if listener is not None:
                listener.close()
        for descriptor in (write_end, *(end for _, end in pipes)):
            os.close(descriptor)
        root = self._children.add(LauncherChild(wanted.name, "root", pid))
        ends = [end for end, _ in pipes]
        self._selector.register(report, selectors.EVENT_READ, lambda: self._gather(reply, wanted, root, report, ends))

    def _tree_task(
        self,
        wanted: TreeRequest,
        host: str,
        listener: socket.socket | None,
        arenas: list[int | None],
        write_ends: list[int],
        report: int,
    ) -> Callable[[list[int]], NoReturn]:
        members = tree_members(wanted, arenas, write_ends, self._may_fork, host, listener)
        self._become_child(keep=[report, *(one for member in members for one in member.descriptors)])
        enter = partial(child_process.enter_alone, wanted.launches[0]._replace(name=wanted.name))
        return lambda foreign: be_root(members, len(wanted.launches), enter, report, foreign)

    def _gather(self, reply: Reply, wanted: TreeRequest, root: LauncherChild, report: int, ends: list[int]) -> None:
        self._selector.unregister(report)
        try:
            ranks = self._children.add_ranks(root, list(zip(wanted.launches, read_pids(report))))
        except LaunchError as error:
            for descriptor in ends:
                os.close(descriptor)
            end_family(root.pid)
            reply(error={"reason": error.reason, "message": str(error)})
            return
        finally:
            os.close(report)
        unsettled = set(ranks)

        def settled(one: LauncherChild) -> None:
            unsettled.discard(one)
            if unsettled:
                return
            error = next((rank.launch_error for rank in ranks if rank.launch_error), None)
            content: dict[str, Any] = {"error": error} if error else self._tree_facts(root, ranks)
            reply(port=wanted.port, **content)

        for rank, read_end in zip(ranks, ends):
            self._children.settle_later(rank, read_end, partial(settled, rank))

    def _tree_facts(self, root: LauncherChild, ranks: list[LauncherChild]) -> dict[str, Any]:
        processes = [{"pid": one.pid, "start_ticks": one.start_ticks} for one in ranks]
        return {"pid": root.pid, "start_ticks": root.start_ticks, "ranks": processes}

    def _unit(self, request: Mapping[str, Any], reply: Reply) -> None:
        unit, procs = parse_unit(request["unit"])
        content = {"unit": unit._asdict(), "cgroup_procs": procs}
        with child_process.failure_pipe() as (read_end, write_end):
            try:
                pid, word = self._start(content, write_end, flags=unit.flags)
            except StarterError as error:
                raise LaunchError("UNIT", f"no unit can be made: {error}") from error
        os.close(write_end)
        new = self._children.add(LauncherChild(unit.name, "init", pid))
        begin(word)
        self._children.settle_later(new, read_end, lambda: self._answer_settled(reply, new))

    def _restore(self, request: Mapping[str, Any], reply: Reply) -> None:
        wanted = RestoreRequest.parse(request)
        launch = wanted.launch
        for rank in wanted.ranks:
            self._reject_running(rank.launch)
        with child_process.failure_pipe() as (read_end, write_end):
            pid = fork_in(launch.init, os.fork)
        if pid == 0:
            self._become_child(keep=[write_end])
            place = os.path.dirname(wanted.pid_file)
            raise ChildTask(lambda: child_process.restore(launch, wanted.command, place, wanted.files, write_end))
        os.close(write_end)
        new = self._children.add(LauncherChild(f"{launch.name}/restore", "helper", pid))

        def finish(result: Any) -> None:
            error = child_process.error_of_child(read_end, f"{new.name} was killed")
            os.close(read_end)
            try:
                if error or result is None or result.si_code != os.CLD_EXITED or result.si_status != 0:
                    raise LaunchError("RESTORE", (error or {}).get("message", "the process image was not restored"))
                root_pid = restored_root(wanted)
                if wanted.is_tree:
                    root = self._children.add(LauncherChild(f"{launch.name}/root", "root", root_pid))
                    ranks = self._children.add_ranks(root, restored_ranks(wanted))
                else:
                    root = self._children.add_rank(launch, root_pid)
                    ranks = [root]
                reply(**self._tree_facts(root, ranks))
            except LaunchError as problem:
                end_children(launch.init, {child.pid for child in self._children})
                reply(error={"reason": problem.reason, "message": str(problem)})

        new.ended = finish

    def _reject_running(self, launch: Launch) -> None:
        if self._children.is_running(launch.name):
            raise LaunchError("ALREADY_RUNNING", f"{launch.name} runs already")

    def _start(
        self, content: Mapping[str, Any], write_end: int, arena: int | None = None, flags: int = 0
    ) -> tuple[int, int]:
        """Start a process by the starter. Return its pid and the descriptor that lets it begin. Raises StarterError."""
        if self._starter is None:
            raise StarterError("this launcher has no starter")
        try:
            return self._starter.start(content, write_end, arena, flags)
        except StarterError as error:
            if error.is_lost:
                print(f"ganger launcher: {error}; what is executed is forked from here now", file=sys.stderr)
                self._starter.end()
                self._starter = None
            raise

    def _answer_settled(self, reply: Reply, new: LauncherChild) -> None:
        if new.launch_error:
            reply(error=new.launch_error)
        else:
            reply(pid=new.pid, start_ticks=new.start_ticks)

    def _touch(self, launch: Launch, arena: int | None) -> None:
        if arena is not None and launch.touched_bytes:
            self._helper(f"{launch.name}/touch", lambda **_: None, lambda: child_process.touch_arena(launch, arena))

    def _arena_for(self, launch: Launch) -> int | None:
        if not launch.arena_bytes:
            return None
        name = launch.arena_name
        self._arenas[name] = make_arena(self._arenas.get(name), name, launch.arena_bytes)
        return self._arenas[name]

    def _arena(self, request: Mapping[str, Any], reply: Reply) -> None:
        name, size = str(request["name"]), int(request.get("bytes", 0))
        if size:
            self._arenas[name] = make_arena(self._arenas.get(name), name, size)
        elif name not in self._arenas:
            raise LaunchError("NO_ARENA", f"there is no arena {name}")
        descriptor = self._arenas[name]
        reply(descriptor, bytes=os.fstat(descriptor).st_size)

    def _drop_arena(self, request: Mapping[str, Any], reply: Reply) -> None:
        descriptor = self._arenas.pop(str(request["name"]), None)
        if descriptor is not None:
            os.close(descriptor)
        reply()

    @property
    def _serves_stores(self) -> bool:
        return "torch.distributed" in self._preloaded or not self._preloaded

    def _check_serves_stores(self) -> None:
        if not self._serves_stores:
            raise LaunchError("NO_TORCH", f"{sys.executable} has no torch, so it can serve no rendezvous store")

    def _store(self, request: Mapping[str, Any], reply: Reply) -> None:
        directory, host = str(request["directory"]), str(request["host"])
        self._check_serves_stores()
        for other in self._children:
            if other.kind == "store" and other.name == directory:
                reply(pid=other.pid, start_ticks=other.start_ticks, port=other.port)
                return
        # Opened here, so that the answer need not wait for the child: early connections wait in its queue.
        with open_listener(host) as listener:
            pid = os.fork()
            if pid == 0:
                self._become_child(keep=[])
                held = listener.dup()
                raise ChildTask(lambda: child_process.run_store(directory, host, held))
            new = self._children.add(LauncherChild(directory, "store", pid))
            new.port = listener.getsockname()[1]
        reply(pid=new.pid, start_ticks=new.start_ticks, port=new.port)

    def _publish(self, request: Mapping[str, Any], reply: Reply) -> None:
        temporary, final, manifest = str(request["temporary"]), str(request["final"]), dict(request["manifest"])
        self._helper(f"publish {final}", reply, lambda: publish(temporary, final, manifest))

    def _list(self, request: Mapping[str, Any], reply: Reply) -> None:
        children = [
            {name: getattr(one, name) for name in ("name", "kind", "pid", "start_ticks", "adopted")}
            for one in self._children
        ]
        reply(children=children)

    def _adopt(self, request: Mapping[str, Any], reply: Reply) -> None:
        """Take over a rank whose launcher is gone; if it is gone too, record its end now."""
        name, pid, ticks = str(request["name"]), int(request["pid"]), int(request["start_ticks"])
        page, exit_path = str(request.get("page", "")), str(request["exit_path"])
        if any(one.pid == pid and one.start_ticks == ticks for one in self._children):
            reply(alive=True)
            return
        try:
            pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):
            pidfd = -1
        # Looked at through the open pidfd, so that the pid cannot change hands in between.
        if pidfd < 0 or start_ticks(pid) != ticks:
            if pidfd >= 0:
                os.close(pidfd)
            if not os.path.exists(exit_path):
                self._children.record(exit_path, from_page(name, pid, ticks, page))
            reply(alive=False)
            return
        arena = request.get("arena")
        if arena and arena["name"] not in self._arenas:
            found = recover_arena(pid, arena["name"])
            if found is not None:
                self._arenas[arena["name"]] = found
        keeper = LeaseKeeper(name, pid, page, str(request.get("freezer", "")), list(request.get("cgroup_procs", ())))
        self._children.add(
            LauncherChild(name, "rank", pid, page, exit_path, adopted=True, ticks=ticks, pidfd=pidfd, keeper=keeper)
        )
        reply(alive=True)

    def _stop(self, request: Mapping[str, Any], reply: Reply) -> None:
        busy = [one.name for one in self._children if one.kind == "rank"]
        if busy:
            raise LaunchError("BUSY", f"still the parent of {', '.join(busy[:8])}")
        self._stopping = True
        reply()

    def _helper(self, name: str, reply: Reply, work: Callable[[], None]) -> None:
        with child_process.failure_pipe() as (read_end, write_end):
            pid = os.fork()
        if pid == 0:
            self._become_child(keep=[write_end, *self._arenas.values()])
            raise ChildTask(lambda: child_process.run_helper(work, write_end))
        os.close(write_end)
        self._children.add(LauncherChild(name, "helper", pid))

        def finish() -> None:
            died = f"{name} was killed"
            answer = child_process.error_of_child(read_end, died)
            self._selector.unregister(read_end)
            os.close(read_end)
            if answer is None:
                answer = {"reason": "HELPER_DIED", "message": died}
            reply(**({"error": answer} if answer else {}))

        self._selector.register(read_end, selectors.EVENT_READ, finish)

    def _close_arena(self, name: str) -> None:
        arena = self._arenas.pop(name, None)
        if arena is not None:
            os.close(arena)  # no rank fills it any more; a daemon that still streams from it has its own descriptor

    def _become_child(self, keep: list[int]) -> None:
        """Close the launcher's descriptors in a forked child, except `keep`, by their objects: none is closed twice."""
        registered = [key.fileobj for key in self._selector.get_map().values()]
        self._selector.close()
        for thing in registered:
            if isinstance(thing, int):
                if thing not in keep:
                    os.close(thing)
            elif isinstance(thing, socket.socket):
                thing.close()
        for one in self._children:
            if one.keeper is not None:
                one.keeper.close()
        for descriptor in (self._lock, *self._arenas.values()):
            if descriptor not in keep:
                os.close(descriptor)
        if self._starter is not None:
            # With this copy open, the starter would not notice the launcher's end.
            self._starter.hang_up()
        if self._notes is not None:
            self._notes.close()


_OPERATIONS: dict[Any, Callable[[LauncherServer, Mapping[str, Any], Reply], None]] = {
    "info": LauncherServer._info,
    "fork": LauncherServer._fork,
    "fork_together": LauncherServer._fork_together,
    "unit": LauncherServer._unit,
    "restore": LauncherServer._restore,
    "arena": LauncherServer._arena,
    "drop_arena": LauncherServer._drop_arena,
    "store": LauncherServer._store,
    "publish": LauncherServer._publish,
    "list": LauncherServer._list,
    "adopt": LauncherServer._adopt,
    "stop": LauncherServer._stop,
}
