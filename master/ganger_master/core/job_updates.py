"""What a user changes of a job that is there already, and what is kept of it with the job: plain values."""

from __future__ import annotations

from ganger.cluster.resources import Locality, Role
from msgspec import Struct


class Update(Struct, frozen=True, gc=False, omit_defaults=True):
    """What is to be otherwise; None stays as it is. A time limit of zero takes it away; zero cores (of each GPU) and
    bytes (of each task) leave them to the scheduler."""

    display_name: str | None = None
    priority: int | None = None
    time_limit_seconds: float | None = None
    device_type: str | None = None
    locality: Locality | None = None
    memory_bytes: int | None = None
    millicores_per_gpu: int | None = None


class Updated(Struct, frozen=True, gc=False):
    """An update that was carried out, and the id under which it was asked for: it is not a second time."""

    request_id: str
    update: Update


class Submitted(Struct, frozen=True, gc=False):
    """What of a job's spec can be updated, as it was submitted: by this a repeated submission is known again."""

    display_name: str
    priority: int
    time_limit_seconds: float | None
    device_type: str
    locality: Locality
    roles: tuple[Role, ...]
