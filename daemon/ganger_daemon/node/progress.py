"""Reports how fast the gangs of this node go: one batch every few seconds, lossy, over one stream."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2

from ganger_daemon.gang.observation import add_metrics
from ganger_daemon.node.gang_set import GangSet

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
_RETRY_SECONDS = 2.0


async def report_progress(stub: Any, session: str, gangs: GangSet) -> None:
    """Until cancelled; a stream that breaks is opened again."""
    while True:
        try:
            await stub.ReportProgress(_reports(session, gangs))
        except grpc.aio.AioRpcError as error:
            log.debug("progress stream broke off", extra={"code": error.code().name})
        await asyncio.sleep(_RETRY_SECONDS)


async def _reports(session: str, gangs: GangSet) -> AsyncIterator[agent_pb2.ProgressReport]:
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        report = batch(session, gangs)
        if report.gangs:
            yield report


def batch(session: str, gangs: GangSet) -> agent_pb2.ProgressReport:
    report = agent_pb2.ProgressReport(session=session)
    now = time.time()
    for gang in gangs.all():
        found, concern = gang.progress(), gang.concern()
        metrics = gang.metrics()
        if found is None and not concern and not metrics:
            continue
        progress = job_pb2.Progress(loss=math.nan, concern=concern)
        progress.time.FromNanoseconds(int(now * 1e9))
        if found is not None:
            look, progress.steps_per_second, progress.data_wait_share = found
            used = gang.used(progress.data_wait_share)
            if used is not None:
                progress.device_use = used
            progress.step, progress.samples, progress.loss = look.step, look.samples, look.loss
            progress.training_epoch, progress.training_epochs = look.training_epoch, look.training_epochs
            read = time.time()
            if look.step:
                progress.step_time.FromNanoseconds(int((read - look.step_age_seconds) * 1e9))
            if look.since_age_seconds is not None:
                progress.since_time.FromNanoseconds(int((read - look.since_age_seconds) * 1e9))
        add_metrics(progress, metrics)
        report.gangs.add(job=gang.desired.job, epoch=gang.desired.epoch, progress=progress)
    return report
