"""The newest position of the master's database that this daemon has seen: it shows the master an older copy.

It is written before a desired set is acted on. It is a hint: without it the master has one report less.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ganger.agent.v1 import agent_pb2
from google.protobuf import json_format

from ganger_daemon.node.safe_files import read_json, write_hint


class DatabasePosition:
    """The position, read from disk at the start and written before each desired set is acted on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.message = agent_pb2.Seen()
        try:
            json_format.ParseDict(read_json(path), self.message, ignore_unknown_fields=True)
        except json_format.ParseError:
            self.message = agent_pb2.Seen()

    def note(self, store: str, desired_version: int, gangs: Iterable[agent_pb2.DesiredGang]) -> None:
        """Record a desired set of the database `store`. Versions are compared within one database only, ids always."""
        fresh = agent_pb2.Seen(store=store, desired_version=desired_version)
        fresh.next_epoch, fresh.next_job = self.message.next_epoch, self.message.next_job
        if store == self.message.store:
            fresh.desired_version = max(desired_version, self.message.desired_version)
        for gang in gangs:
            fresh.next_epoch = max(fresh.next_epoch, gang.epoch + 1)
            fresh.next_job = max(fresh.next_job, _number(gang.job) + 1)
        if fresh != self.message:
            self.message = fresh
            write_hint(self._path, json_format.MessageToDict(fresh))


def _number(job: str) -> int:
    text = job.removeprefix("jobs/")
    return int(text) if text.isdecimal() else 0
