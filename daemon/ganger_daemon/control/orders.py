"""What an order of the master looks like in a control page, and the details that stand beside it in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ganger.injob import page

from ganger_daemon.checkpoints.layout import unfinished_template
from ganger_daemon.core.orders import Intent, Level, Wanted
from ganger_daemon.failpoints import hit
from ganger_daemon.files import make_directory, read_json, write_json


@dataclass(frozen=True, slots=True)
class PageOrder:
    sequence: int
    order: int
    stop_sequence: int = 0
    level: int = 0


_LEVELS = {Level.PAUSE: page.Level.PAUSE, Level.OFFLOAD: page.Level.OFFLOAD, Level.CHECKPOINT: page.Level.CHECKPOINT}


def page_order(wanted: Wanted) -> PageOrder | None:
    """None for a STOP without a checkpoint: that one comes as a signal, not through the page."""
    sequence = wanted.order.number
    match wanted.intent:
        case Intent.RUN:
            return PageOrder(sequence, page.Order.RUN)
        case Intent.PREPARE:
            return PageOrder(sequence, page.Order.WAIT)
        case Intent.PARK:
            level = _LEVELS.get(wanted.level, page.Level.PAUSE)
            return PageOrder(sequence, page.Order.STOP, wanted.stop_sequence, level)
        case Intent.HAND_OVER:
            return PageOrder(sequence, page.Order.STOP, wanted.stop_sequence, page.Level.HAND_OVER)
        case Intent.STOP:
            if not wanted.checkpoint_first:
                return None
            return PageOrder(sequence, page.Order.STOP, wanted.stop_sequence, page.Level.CHECKPOINT)


def write_details(orders: Path, name: str, storage: Path | None, job_uid: str, epoch: int) -> None:
    """orders/NAME.json: where a shard goes. Written before the order is published, so that whoever sees it finds it;
    not again by a daemon that takes over, for its time is when the order was given."""
    make_directory(orders)
    details = {}
    if storage is not None:
        template = unfinished_template(storage, job_uid, epoch)
        details = {"checkpoint_directory": template, "checkpoint": template}
    path = orders / f"{name}.json"
    if not path.exists() or read_json(path) != details:
        write_json(path, details)
    hit("order-half-written")
