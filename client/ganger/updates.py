"""What people change of a job, in the keys of a job file and by its rules, as the wire's JobUpdate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ganger.spec import make_spec
from ganger.v1.job_pb2 import JobSpec
from ganger.v1.job_service_pb2 import JobUpdate
from ganger.wire.errors import SpecInvalid, Violation

KEYS = ("name", "priority", "time", "gpu_type", "locality", "tolerance", "patience", "memory", "cpus_per_gpu")
# Of these each says it anew for all.
_LOCALITY = ("locality", "tolerance", "patience")
_NO_LIMIT = "never"


def make_update(changes: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> JobUpdate:
    """The update of `changes`, keys of a job file with their new values; time "never" takes the limit away. `origins`
    as in `make_spec`. Raises SpecInvalid with every violation."""
    given = {key: value for key, value in changes.items() if value is not None}
    known = f"what can be changed is {', '.join(KEYS)}"
    if not given:
        raise SpecInvalid(f"say what to change: {known}")
    wrong = [Violation((origins or {}).get(key, key), known) for key in given if key not in KEYS]
    described = {key: value for key, value in given.items() if key in KEYS and (key, value) != ("time", _NO_LIMIT)}
    try:
        # What is not described is not looked at.
        spec = make_spec({**described, "command": ["any"], "directory": "/"}, {}, origins, wrong)
    except SpecInvalid as error:
        raise SpecInvalid("the job cannot be updated as described", violations=error.violations) from None
    return _picked(spec, given)


def _picked(spec: JobSpec, given: Mapping[str, Any]) -> JobUpdate:
    update = JobUpdate()
    if "name" in given:
        update.display_name = spec.display_name
    if "priority" in given:
        update.priority = spec.priority
    if "time" in given:
        # None in the spec: of no length.
        update.time_limit.CopyFrom(spec.time_limit)
    if "gpu_type" in given:
        update.device_type = spec.device_type
    if any(key in given for key in _LOCALITY):
        update.locality.CopyFrom(spec.locality)
    shape = spec.roles[0].shape
    if "memory" in given:
        update.memory_bytes = shape.memory_bytes
    if "cpus_per_gpu" in given:
        update.millicores_per_gpu = shape.millicores
    return update
