"""Every decoder of bytes that a user, a job, another node or a file can have written, with the errors that it may
raise: all others are faults."""

from __future__ import annotations

import atexit
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from ganger import console, spec_values, text
from ganger.agent.v1 import agent_pb2
from ganger.array_spec import make_array
from ganger.cli import job_details, job_table
from ganger.injob import page, state_image
from ganger.injob.launcher.process_record import LaunchError, parse_launch
from ganger.injob.launcher.rank_tree import RestoreRequest, TreeRequest, parse_unit
from ganger.spec import load_job_file, make_spec
from ganger.training.state_codec import decode as decoded_state
from ganger.v1 import job_pb2, job_service_pb2, node_pb2, resources_pb2, scheduling_pb2
from ganger.wire import certificate_authority, resource_messages, resource_names, revocation, tls
from ganger.wire.channels import read_versions
from ganger.wire.errors import ApiError
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger_daemon.checkpoints import storage
from ganger_daemon.devices import virtual
from ganger_daemon.gang.control_pages import ControlPages, RunMark
from ganger_daemon.gang.exit_watcher import exit_of
from ganger_daemon.gang.gang_context import summary_of
from ganger_daemon.gang.job_output import PacketLog
from ganger_daemon.images import contract, packing
from ganger_daemon.node import accounts, core_table
from ganger_daemon.node.process_identity import NO_PROCESS
from ganger_daemon.transfer import state_stream
from ganger_master import config
from ganger_master.core.node_model import AccessToken
from ganger_master.decision_log import recording
from ganger_master.rpc import access, agent_messages, answer_messages, job_messages, planner_messages
from ganger_master.simulator.traces.reader import read_stream
from ganger_master.simulator.traces.rows import TraceError
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass


@dataclass(frozen=True)
class Decoder:
    """`decode` takes any bytes; `errors`: what it may raise; `seeds`: inputs that it accepts."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


def _text(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: decode(data.decode(errors="surrogateescape"))


def _json(decode: Callable[[Any], object]) -> Callable[[bytes], object]:
    """For what is given a JSON object that was decoded by a caller, which refuses all else."""

    def run(data: bytes) -> object:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return decode(content) if isinstance(content, dict) else None

    return run


_PLACE: Final = Path(tempfile.mkdtemp(prefix="ganger-fuzz-", dir="/dev/shm"))
# What the job files run.
(_PLACE / "train.py").touch()
atexit.register(shutil.rmtree, _PLACE, ignore_errors=True)


def _file(name: str, decode: Callable[[Path], object]) -> Callable[[bytes], object]:
    """For what reads a file by its path."""

    def run(data: bytes) -> object:
        path = _PLACE / name
        path.write_bytes(data)
        return decode(path)

    return run


# -- what a user writes ------------------------------------------------------------------------------------------------

_JOB_FILE: Final = b"""name: resnet
command: [python, train.py, --lr, "0.1"]
gpus: 2:8
time: 1:30:00
labels: {team: vision}
environment: {A: b}
locality: rack
checkpoint_every: 10m
signal: TERM@60
array: {grid: {lr: [0.1, 0.2], seed: [1, 2]}, at_once: 2}
"""
_ROLES_FILE: Final = b"""command: python train.py
locality: rack
roles:
- {name: ps, tasks: 2, gpus: 0, cpus: 2, memory: 4G, disk_mb_per_s: 5}
- {name: worker, tasks: 4, gpus: 1}
deadline: 2030-01-01
gpu_type: a100,h100
"""
_TRACE: Final = b"""job_id,submit_time_s,gpus,duration_s,user,model
a,0,1,60,u,resnet50
b,1.5,8,3600,v,
"""


def _described(path: Path) -> object:
    description = load_job_file(path)
    return make_array(description) if "array" in description else make_spec(description, {})


def _settings(text: str) -> object:
    return config.load({"state_dir": "/tmp/state"}, {}, text)


def _values(text: str) -> object:
    """Each parser of a flag by itself: one that refuses hides no other."""
    for parse in _PARSERS:
        try:
            parse(text)
        except (ValueError, ApiError):
            continue
    return None


_PARSERS: Final[tuple[Callable[[str], object], ...]] = (
    text.parse_memory,
    text.parse_duration,
    text.parse_cores,
    spec_values.parse_level,
    spec_values.parse_name,
    spec_values.parse_device_types,
    spec_values.parse_command,
    spec_values.parse_directory,
    spec_values.parse_gpus,
    spec_values.parse_weight,
    spec_values.parse_convergence,
    spec_values.parse_cores_or_auto,
    spec_values.parse_positive_duration,
    spec_values.parse_deadline,
    spec_values.parse_checkpoint_interval,
    spec_values.parse_scheduler,
    spec_values.parse_boolean,
    spec_values.parse_agent,
    spec_values.parse_mechanism,
    spec_values.parse_stop_signal,
    spec_values.parse_list,
    spec_values.parse_labels,
    partial(virtual.parse_topology, gpus=4),
    read_versions,
    core_table.parse_ids,
)


def _names(text: str) -> object:
    for parse in (
        resource_names.parse_job_name,
        resource_names.parse_array_name,
        resource_names.parse_member,
        resource_names.parse_quarantined_gang_name,
        resource_names.parse_node_name,
        resource_names.parse_node_set_name,
    ):
        try:
            parse(text)
        except (ValueError, ApiError):
            continue
    return None


# -- what a job or its launcher writes ---------------------------------------------------------------------------------


@lru_cache(1)
def _image() -> bytes:
    """A state image with two files of an image of processes."""
    facts = contract.ImageFacts(
        7, 1, (), (), ("/tmp",), contract.Machine("x86_64", ("avx",), "6.1", "criu 4"), labels={"a": "b"}
    )
    directory = Path(tempfile.mkdtemp(dir=_PLACE))
    contract.write_facts(directory, facts)
    (directory / "core-1.img").write_bytes(b"core" * 40)
    (directory / "pages-1.img").write_bytes(b"x" * 200)
    target = directory / "packed"
    with target.open("w+b") as file:
        packing.pack(directory, {"step": 3, "rank": 0, "world": 1}, file.fileno(), is_durable=False)
    return target.read_bytes()


def _mended(data: bytes) -> bytes:
    """The same image with digests that are right, so that what lies behind them is reached too."""
    try:
        preamble = state_image.parse_preamble(data)
    except state_image.ImageError:
        return data
    if preamble.total_bytes != len(data) or preamble.digest_kind not in (state_image.XXH3, state_image.CRC32):
        return data
    begin, end = state_image.PREAMBLE_BYTES, preamble.data_offset
    digest = state_image._header_digest(preamble, data[begin:end])
    fields = list(state_image.PREAMBLE.unpack(data[:begin]))
    fields[7] = digest
    chunks = state_image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)
    chunks.update(data[end : preamble.trailer_offset])
    return state_image.PREAMBLE.pack(*fields) + data[begin : preamble.trailer_offset] + chunks.trailer()


def _unpacked(path: Path) -> object:
    packing.facts_of(path)
    with tempfile.TemporaryDirectory(dir=_PLACE) as place, path.open("rb") as file:
        return packing.unpack(file.fileno(), Path(place))


def _image_file(data: bytes) -> object:
    path = _PLACE / "shard"
    path.write_bytes(_mended(data))
    return _unpacked(path)


def _shard(data: bytes) -> object:
    path = _PLACE / "rank-00000.state"
    path.write_bytes(_mended(data))
    return storage.describe_shard(path)


def _state(data: bytes) -> object:
    """The tree of a state image, as a user's process restores it."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return decoded_state(content, lambda number: [torch.zeros(8, dtype=torch.uint8)][number])


_TREES: Final = (
    b'{"$":"tensor","i":0}',
    b'[{"a":[1,2.5,null]},{"$":"tuple","v":[1,{"$":"set","v":[2]}]}]',
    b'{"$":"dict","v":[[1,2]]}',
    b'{"$":"ndarray","dtype":"<f4","shape":[2],"i":0}',
    b'{"$":"numpy scalar","dtype":"<f4","v":"AAAAAA=="}',
    b'{"$":"device","v":"cpu"}',
    b'{"$":"dtype","v":"float32"}',
    b'{"$":"complex","v":["1","2"]}',
    b'{"$":"counter","v":[["a",2]]}',
)


_MANIFEST: Final = json.dumps(
    {
        "format": 1,
        "job_uid": "u",
        "epoch": 1,
        "step": 10,
        "world": 1,
        "time": 1.0,
        "files": {"rank-00000.state": {"rank": 0, "bytes": 3, "digest": "crc32:00", "header_digest": "crc32:01"}},
    }
).encode()


def _checkpoint(data: bytes) -> object:
    directory = _PLACE / "checkpoint"
    directory.mkdir(exist_ok=True)
    (directory / storage.MANIFEST).write_bytes(data)
    (directory / "rank-00000.state").write_bytes(b"abc")
    found = storage.verify(directory)
    return str(found)


@lru_cache(1)
def _page() -> bytes:
    path = page.page_path(str(_PLACE), 0)
    Path(path).unlink(missing_ok=True)
    page.Page.create(path, epoch=5, rank=0, world=2, mapped=False).close()
    return Path(path).read_bytes()


def _pages(data: bytes) -> object:
    """A control page that a job has written over, as the daemon reads it."""
    directory = _PLACE / "pages"
    directory.mkdir(exist_ok=True)
    (directory / "rank-0.page").write_bytes(data)
    (directory / "rank-1.page").write_bytes(_page())
    pages = ControlPages(directory, 5, 2, (0,))
    try:
        if pages.open(0) and pages.readable:
            pages.points()
            pages.ranks(RunMark(0, {0: 0}))
            pages.threads()
            pages.checkpoint_sequence()
            pages.mark()
            return pages.progress(0), pages[0].metric_words()
        return pages.damage()
    finally:
        pages.close()


_LAUNCH: Final[dict[str, Any]] = {
    "name": "u/1/0",
    "argv": ["python", "train.py"],
    "env": {"A": "b"},
    "cwd": "/tmp",
    "log": "/tmp/log",
    "page": "/tmp/page",
    "exit_path": "/tmp/exit",
    "cgroup_procs": ["/sys/fs/cgroup/x"],
    "cores": [0, 1],
    "threads": 2,
    "arena": {"name": "a", "bytes": 10},
    "init": 7,
}
_RESTORE: Final = {
    "ranks": [{"launch": _LAUNCH, "pid": 3}],
    "command": ["criu", "restore"],
    "files": {"5": "/tmp/log"},
    "pid_file": "/tmp/pid",
}


def _launcher_requests(content: dict[str, Any]) -> object:
    for parse in (parse_launch, RestoreRequest.parse, parse_unit, lambda one: TreeRequest.parse(one["launches"], 0)):
        try:
            parse(content)
        # The launcher's loop refuses the request by these (`launcher.callers`).
        except (LaunchError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _exit_record(data: bytes) -> object:
    path = _PLACE / "exit.json"
    path.write_bytes(data)
    return exit_of(path, NO_PROCESS, None, launcher_lives=False)


def _packet(content: dict[str, Any]) -> object:
    return PacketLog("job").add(content)


# -- messages ----------------------------------------------------------------------------------------------------------

_NAMES: Final = {
    "job": "jobs/7",
    "name": "jobs/7",
    "node": "nodes/n1",
    "array": "arrays/3",
    "node_set": "nodeSets/1",
    "jobs": "jobs/7",
    "reason": "GPUS",
}


def _full(kind: Any, depth: int = 0) -> Any:
    """A message with every field set, so that mutations of it reach every conversion."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        inner = field.message_type
        if field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name):
            continue
        if inner is not None and (inner.GetOptions().map_entry or depth > 4):
            continue
        value: Any = 2
        if inner is not None:
            value = _full(inner, depth + 1)
        elif field.type == field.TYPE_STRING:
            is_node = kind.name == "NodeState" or (kind.name, field.name) == ("Checkpoint", "nodes")
            value = "nodes/n1" if is_node else _NAMES.get(field.name, "n1")
        elif field.type == field.TYPE_BYTES:
            value = b"x"
        elif field.type == field.TYPE_BOOL:
            value = True
        elif field.type == field.TYPE_ENUM:
            value = 1
        if field.is_repeated:
            getattr(message, field.name).append(value)
        elif inner is not None:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message


def _message_decoders() -> list[Decoder]:
    """The conversions of all requests that hold more than names."""
    caller = CallerIdentity(CallerRole.USER, "ann")
    kinds: list[tuple[type[Message], Callable[[Any], object]]] = [
        (job_pb2.JobSpec, job_messages.spec_from_wire),
        (job_service_pb2.JobUpdate, job_messages.update_from_wire),
        (job_service_pb2.CreateArrayRequest, lambda one: answer_messages.submission_from_wire(one, caller)),
        (agent_pb2.CreateSessionRequest, agent_messages.open_session_from_wire),
        (agent_pb2.ReconcileRequest, partial(agent_messages.observe_from_wire, "n1")),
        (job_pb2.Progress, partial(job_messages.progress_from_wire, 1)),
        (scheduling_pb2.LiveJob, planner_messages.live_job_from_wire),
        (scheduling_pb2.Plan, planner_messages.plan_from_wire),
        (node_pb2.NodeState, resource_messages.node_row_from_wire),
        (resources_pb2.Refusal, resource_messages.refusal_from_wire),
        (resources_pb2.Claim, resource_messages.claim_from_wire),
    ]
    return [
        Decoder(
            f"message {kind.DESCRIPTOR.name}",
            lambda data, kind=kind, decode=decode: decode(kind.FromString(data)),  # type: ignore[misc]
            (ApiError, DecodeError),
            [_full(kind.DESCRIPTOR).SerializeToString()],
        )
        for kind, decode in kinds
    ]


# What a terminal obeys: the C0 and C1 control characters but the end of a line.
_OBEYED: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def _shown(data: bytes) -> object:
    """A job whose texts a user chose, as an operator's screen shows it: no byte that a terminal obeys."""
    job = job_pb2.Job.FromString(data)
    with redirect_stdout(io.StringIO()) as screen:
        console.print_pairs(job_details.pairs(job))
        console.print_table(*job_table.members_table([job]))
    shown = screen.getvalue()
    assert not _OBEYED.search(shown), f"a terminal would obey {shown!r}"
    return shown


# -- certificates and access tokens ------------------------------------------------------------------------------------


@lru_cache(1)
def _certificates() -> tuple[bytes, bytes, Any]:
    """A certificate of a user, the list of revoked ones, and the authority that has signed both."""
    directory, ann = Path(tempfile.mkdtemp(dir=_PLACE)), CallerIdentity(CallerRole.USER, "ann")
    authority = directory / "authority"
    certificate_authority.make_authority(authority)
    certificate_authority.issue(authority, ann, [], 30.0, directory / "ann")
    certificate_authority.revoke(authority, [ann])
    signer, _ = certificate_authority.read_authority(authority)
    return (directory / "ann" / tls.CERTIFICATE).read_bytes(), (authority / revocation.REVOKED).read_bytes(), signer


def _lists(data: bytes) -> object:
    return revocation.parse_lists(data, [_certificates()[2]])


# Name, text and digest.
_TOKEN: Final = access.new_token("ann")


def _holders() -> access.TokenHolders:
    return access.TokenHolders({_TOKEN[0]: AccessToken(_TOKEN[0], "ann", _TOKEN[2], 0.0, 1e12)})


# -- the table ---------------------------------------------------------------------------------------------------------

_FLAGS: Final = (
    b"1:30:00",
    b"64GiB",
    b"2:8",
    b"1-3,7",
    b"TERM@60",
    b"a=b,c=d",
    b"2030-01-01",
    b"2x2",
    b"auto",
    b"0.5",
)
_FACTS: Final = (
    b'{"root_pid":1,"processes":1,"logs":[{"path":"/a","size_bytes":3,"is_written":true}],"files":[],'
    b'"own_directories":["/tmp"],"machine":{"architecture":"x","cpu_flags":["avx"],"kernel":"k","tool":"t"}}'
)
_LINES: Final = (
    b'{"line":"element","kind":"jobs","value":{"number":1}}',
    b'{"line":"command","time":1.0,"kind":"Cancel","command":{},"answer_kind":"Done","answer":{},"events":["x"]}',
    b'{"line":"end","time":1.0,"reason":"x","commands":3,"batches":4,"digest":""}',
)


@lru_cache(1)
def decoders() -> list[Decoder]:
    """The table."""
    launches = [json.dumps(_LAUNCH).encode(), json.dumps(_RESTORE).encode()]
    image, server = [_image()], (virtual.FIXTURES / "dgx-h100.json").read_bytes()
    image_errors = (state_image.ImageError, contract.ImageRefusedError, OSError)
    facts = _file(contract.FACTS, lambda path: contract.read_facts(path.parent))
    stream = state_stream.StreamRequest("t", "u", 1, 2, 0).line()
    credentials = (certificate_authority.CertificateError, ApiError, revocation.CredentialError)
    job = _full(job_pb2.Job.DESCRIPTOR).SerializeToString()
    return [
        Decoder("job file", _file("job.yaml", _described), (ApiError,), [_JOB_FILE, _ROLES_FILE]),
        Decoder("flags", _text(_values), (), _FLAGS),
        Decoder("names", _text(_names), (), [b"jobs/12", b"arrays/3", b"nodes/n1", b"nodeSets/1", b"jobs/12/gangs/3"]),
        Decoder("settings", _text(_settings), (config.ConfigError,), [b'policy = "fifo"\nlisten = "127.0.0.1:0"\n']),
        Decoder("trace", lambda data: read_stream(io.BytesIO(data), "trace"), (TraceError,), [_TRACE]),
        Decoder("map of accounts", _file("map", accounts.read_map), (ValueError,), [b"ann alice\nbob -\n# no\n"]),
        Decoder("recorded server", _file("server.json", virtual.read_recording), (ValueError,), [server]),
        Decoder("line of a recording", recording.decode_line, (recording.LineError,), _LINES),
        Decoder("image of processes", _image_file, image_errors, image),
        Decoder("facts of an image", facts, image_errors, [_FACTS]),
        Decoder("shard", _shard, (state_image.ImageError, OSError), image),
        Decoder("state tree", _state, (ValueError,), _TREES),
        Decoder("manifest", _checkpoint, (), [_MANIFEST]),
        Decoder("control page", _pages, (), [_page()]),
        Decoder("launcher request", _json(_launcher_requests), (), launches),
        Decoder("exit record", _exit_record, (), [b'{"pid": 3, "code": 1, "signal": null, "time": 1.5}']),
        Decoder("packet of a job", _json(_packet), (), [b'{"event": "error", "message": "Traceback\\nValueError: x"}']),
        Decoder("cause", _text(summary_of), (), [b"OSError: [Errno 28] No space left on device: '/x'"]),
        Decoder("stream request", state_stream.parse_request, (state_stream.StreamError,), [stream]),
        Decoder("stream line", state_stream.parse_line, (state_stream.StreamError,), [b'{"size": 3}']),
        Decoder("certificate", revocation.read_certificate, credentials, [_certificates()[0]]),
        Decoder("access token", _holders().holder_of, (ApiError,), [_TOKEN[1].encode()]),
        Decoder("revoked certificates", _lists, credentials, [_certificates()[1]]),
        Decoder("job on a screen", _shown, (DecodeError,), [job]),
        *_message_decoders(),
    ]
