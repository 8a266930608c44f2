"""What an order of the master looks like in a control page, and the details that stand beside it in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ganger.injob import page

from ganger_daemon.checkpoints.layout import unfinished_template
from ganger_daemon.core.orders import DesiredOrder, OrderIntent, ParkLevel
from ganger_daemon.failpoints import hit
from ganger_daemon.node.safe_files import make_directory, read_json, write_json


@dataclass(frozen=True, slots=True)
class OrderOnPage:
    sequence: int
    order: int
    stop_sequence: int = 0
    level: int = 0


_LEVELS = {
    ParkLevel.PAUSE: page.PageParkLevel.PAUSE,
    ParkLevel.OFFLOAD: page.PageParkLevel.OFFLOAD,
    ParkLevel.CHECKPOINT: page.PageParkLevel.CHECKPOINT,
}


def page_order(wanted: DesiredOrder) -> OrderOnPage | None:
    """None for a STOP without a checkpoint: that one comes as a signal, not through the page."""
    sequence = wanted.order.number
    match wanted.intent:
        case OrderIntent.RUN:
            return OrderOnPage(sequence, page.PageOrderKind.RUN)
        case OrderIntent.PREPARE:
            return OrderOnPage(sequence, page.PageOrderKind.WAIT)
        case OrderIntent.PARK:
            level = _LEVELS.get(wanted.level, page.PageParkLevel.PAUSE)
            return OrderOnPage(sequence, page.PageOrderKind.STOP, wanted.stop_sequence, level)
        case OrderIntent.HAND_OVER:
            return OrderOnPage(sequence, page.PageOrderKind.STOP, wanted.stop_sequence, page.PageParkLevel.HAND_OVER)
        case OrderIntent.STOP:
            if not wanted.checkpoint_first:
                return None
            return OrderOnPage(sequence, page.PageOrderKind.STOP, wanted.stop_sequence, page.PageParkLevel.CHECKPOINT)


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
