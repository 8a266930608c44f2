"""Job schedulers of users: one that knows what it wants, and all the ways in which one can be useless."""

from __future__ import annotations

import os
import signal
import threading
import time

import grpc
from ganger.cluster.placement import candidates
from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from ganger.scheduling import JobScheduler, PlacementLease, Proposal
from ganger.v1 import scheduling_pb2
from ganger.v1.scheduling_pb2_grpc import SchedulingServiceStub
from ganger.wire import resource_messages as convert
from ganger.wire.channels import open_channel
from ganger.wire.endpoints import find_endpoint


class Last(JobScheduler):
    """Wants the last node by name."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        print(f"asked for {turn.job}", flush=True)
        placement = candidates(view, turn.shape, only=[max(view.names())])
        return Proposal(placement.candidates, placement.refusals)


class Killed(JobScheduler):
    """Dies when it is first asked."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")


class Raising(JobScheduler):
    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        raise RuntimeError("broken on purpose")


class Hung(JobScheduler):
    """Never comes back."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        threading.Event().wait()
        raise AssertionError("not reached")


def _absurd() -> tuple[Claim, ...]:
    return (Claim("n0", 1 << 60, (), 1),)


class Absurd(JobScheduler):
    """Keeps asking for what cannot be."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        return Proposal((_absurd(),) * 16)


class Spamming(JobScheduler):
    """Asks for what cannot be from many threads, as fast as it can, and never uses its turn."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        for _ in range(4):
            threading.Thread(target=_spam, args=(turn,), daemon=True).start()
        # The lease runs out meanwhile.
        time.sleep(turn.lease_s)
        return Proposal((_absurd(),))


def _spam(turn: PlacementLease) -> None:
    request = scheduling_pb2.GangRequest(
        job=turn.job,
        revision=turn.revision,
        lease=turn.turn,
        candidates=[scheduling_pb2.Candidate(claims=convert.claims_to_wire(_absurd()))] * 16,
    )
    with open_channel(find_endpoint()) as channel:
        stub = SchedulingServiceStub(channel)
        while True:
            try:
                stub.RequestGang(request)
            except grpc.RpcError:
                continue
