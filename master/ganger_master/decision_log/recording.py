"""The lines of a recording: JSON with one value a line; and the hiding of what a recording must not show.

Of a master: a header; a state, its elements first; then every command with what was answered, and a line for every
batch. A state that comes later is that of a master that has started over. The last line says how the recording ended,
and what state it ended in; a file without one is not whole.

Of a planner: a header; a loop; then what it observed, its plans and their verdicts. A loop that comes later is that of
a new connection to the master, and continues from the one before.

Hidden are commands, environments and tokens. Environment variables, program arguments and the storage token are
replaced. Replacements have the same length, and equal texts have equal replacements, so that decisions (on lengths,
NULs and equality) do not change. They derive from a key that is never stored, so guessing a text cannot be verified.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace as replace_fields
from hashlib import blake2b
from itertools import cycle, islice
from typing import Any, Final, TypeAlias, get_args

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from ganger_master.core.answers import Answer, ChangeAnswer
from ganger_master.core.commands import Command, OpenSession, SubmitArray, SubmitJob
from ganger_master.core.events import Effects
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.node_model import Node
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state_image import Image

# By program. A format rises when a file that was written before cannot be read any more.
FORMATS: Final[Mapping[str, int]] = {"master": 2, "planner": 3}


class Header(Struct, frozen=True, tag="recording", tag_field="line"):
    """`began`: Unix seconds by the master's clock, as all times. `program`: "master" or "planner"."""

    format: int
    ganger: str
    began: float
    policy: str
    with_environment: bool = False
    program: str = "master"


class Element(Struct, frozen=True, tag="element", tag_field="line"):
    """One of the state that follows."""

    kind: str
    value: Raw


class StateLine(Struct, frozen=True, tag="state", tag_field="line"):
    """All of a state but its elements. `cause`: why there is a state."""

    time: float
    cause: str
    image: Image


class CommandLine(Struct, frozen=True, tag="command", tag_field="line"):
    """What was asked, what was answered, and the kinds of events that happened."""

    time: float
    kind: str
    command: Raw
    answer_kind: str
    answer: Raw
    events: tuple[str, ...] = ()


class BatchLine(Struct, frozen=True, tag="batch", tag_field="line"):
    """What the commands before led to, when it was drawn together."""

    time: float
    effects: Effects
    turns: tuple[GrantedLease, ...] = ()


class BrokenLine(Struct, frozen=True, tag="broken", tag_field="line"):
    """The core failed at a command, or (no kind) at the end of a batch; or the planner failed at the observation in the
    line before, or as it made a plan."""

    time: float
    error: str
    kind: str = ""
    command: Raw = Raw(b"null")


class End(Struct, frozen=True, tag="end", tag_field="line"):
    """`digest`: of the state it ended in; empty when there was none to be trusted."""

    time: float
    reason: str
    commands: int
    batches: int
    digest: str = ""


class LoopLine(Struct, frozen=True, tag="loop", tag_field="line"):
    """A planner's loop begins. `pace`: a `TrialPace`, from `pack`; `memory`: what the first loop of a file continues
    from, as `planner.memory.packed` has it, or empty."""

    time: float
    policy: str
    plan_every_s: float
    pace: bytes
    memory: bytes = b""


class ClusterLine(Struct, frozen=True, tag="cluster", tag_field="line"):
    """The planner observed a change of the cluster. `deltas`: the messages `ClusterDelta` that make one moment."""

    time: float
    deltas: tuple[bytes, ...]


class ProgressLine(Struct, frozen=True, tag="progress", tag_field="line"):
    """The planner observed reports of jobs. `batch`: a message `ProgressBatch`."""

    time: float
    batch: bytes


class PlanLine(Struct, frozen=True, tag="plan", tag_field="line"):
    """The planner made a plan. `plan`: a `planner.context.Plan`, from `pack`."""

    time: float
    plan: bytes


class VerdictLine(Struct, frozen=True, tag="verdict", tag_field="line"):
    """The planner observed the verdict on its last plan. `planning_s`: seconds that the plan took."""

    time: float
    planning_s: float
    answers: tuple[ChangeAnswer, ...] = ()


MasterLine: TypeAlias = Element | StateLine | CommandLine | BatchLine | BrokenLine
PlannerLine: TypeAlias = LoopLine | ClusterLine | ProgressLine | PlanLine | VerdictLine
Line: TypeAlias = Header | MasterLine | PlannerLine | End

_COMMANDS: Final[Mapping[str, type[Command]]] = {kind.__name__: kind for kind in get_args(Command)}
_ANSWERS: Final[Mapping[str, type[Answer]]] = {kind.__name__: kind for kind in get_args(Answer)}
# Elements have lines of their own: a large state encoded as one value would hold up everything else in its process.
_ELEMENTS: Final[Mapping[str, type[Any]]] = {"nodes": Node, "jobs": JobRecord, "gangs": Gang, "former": Request}
_encode: Final = msgspec.json.Encoder().encode
_decode_line: Final = msgspec.json.Decoder(Line).decode


class LineError(ValueError):
    """A line that is none of a recording; the message says why."""


def encode_line(line: Line) -> bytes:
    return _encode(line) + b"\n"


def decode_line(data: bytes) -> Line:
    """Return a line from its JSON. Raises LineError."""
    try:
        line: Line = _decode_line(data)
    except (ValueError, RecursionError) as error:
        raise LineError(str(error)) from error
    return line


def state_lines(image: Image, time: float, cause: str) -> Iterator[Line]:
    for name in _ELEMENTS:
        for element in getattr(image, name):
            yield Element(name, Raw(_encode(element)))
    yield StateLine(time, cause, msgspec.structs.replace(image, **dict.fromkeys(_ELEMENTS, ())))


def image_of_lines(elements: Iterable[Element], line: StateLine) -> Image:
    """Return a state's image from its lines. Raises LineError for elements of an unknown kind."""
    found: dict[str, list[Any]] = {name: [] for name in _ELEMENTS}
    for element in elements:
        if element.kind not in found:
            raise LineError(f"there are no elements of kind {element.kind!r}")
        found[element.kind].append(decoded(element.value, _ELEMENTS[element.kind]))
    return msgspec.structs.replace(line.image, **{name: tuple(each) for name, each in found.items()})


def digest_of(image: Image) -> str:
    digest = blake2b(digest_size=16)
    for line in state_lines(image, 0.0, ""):
        digest.update(encode_line(line))
    return digest.hexdigest()


def raw(value: Command | Answer) -> tuple[str, Raw]:
    """Name of its kind, and the value."""
    return type(value).__name__, raw_of(value)


def raw_of(value: object) -> Raw:
    return Raw(_encode(value))


def command_of(line: CommandLine | BrokenLine) -> Command:
    """Return the command of a line. Raises LineError."""
    if line.kind not in _COMMANDS:
        raise LineError(f"there is no command {line.kind!r}")
    command: Command = decoded(line.command, _COMMANDS[line.kind])
    return command


def answer_of(line: CommandLine) -> Answer:
    """Return the answer of a line. Raises LineError."""
    if line.answer_kind not in _ANSWERS:
        raise LineError(f"there is no answer {line.answer_kind!r}")
    answer: Answer = decoded(line.answer, _ANSWERS[line.answer_kind])
    return answer


def decoded(value: Raw, kind: type[Any]) -> Any:
    """Return the value of a kind from its JSON. Raises LineError."""
    return _decoded(msgspec.json.decode, value, kind)


def pack(value: object) -> bytes:
    """Return a value as bytes of msgpack, which has a form for every float; JSON has none for those not finite."""
    return msgspec.msgpack.encode(value)


def unpack(value: bytes, kind: type[Any]) -> Any:
    """Return the value of a kind from `pack`. Raises LineError."""
    return _decoded(msgspec.msgpack.decode, value, kind)


def _decoded(decode: Callable[..., Any], value: Raw | bytes, kind: type[Any]) -> Any:
    try:
        return decode(value, type=kind)
    except (ValueError, RecursionError) as error:
        raise LineError(f"{kind.__name__}: {error}") from error


def failure_of(error: BaseException) -> str:
    """Return how a failure is recorded."""
    return f"{type(error).__name__}: {error}"


def take_header(recorded: Iterator[Line]) -> Header:
    """Return the first line. Raises LineError if it is no header."""
    header = next(recorded, None)
    if not isinstance(header, Header):
        raise LineError("no header")
    return header


def text_of(value: object) -> str:
    """Return a value as text for people."""
    kind = f"{type(value).__name__} " if isinstance(value, Struct) else ""
    return kind + msgspec.json.encode(value).decode()


# One of each length in UTF-8.
_LONGER: Final = {2: "\u00b7", 3: "\u2026", 4: "\U0001f512"}


class Redaction:
    """Hides commands, environments and tokens. `key`: random, of this recording. `with_environment`: only tokens."""

    def __init__(self, key: bytes, with_environment: bool = False) -> None:
        self._key = key
        self._with_environment = with_environment

    def command(self, command: Command) -> Command:
        match command:
            case SubmitJob():
                return replace(command, spec=self.spec(command.spec))
            case SubmitArray() if not self._with_environment:
                members = tuple([(index, self._parameters(given)) for index, given in command.members])
                return replace(command, spec=self.spec(command.spec), members=members)
            case OpenSession():
                return replace(command, storage_token=self._token(command.storage_token))
            case _:
                return command

    def image(self, image: Image) -> Image:
        return replace(
            image,
            settings=replace_fields(image.settings, storage_token=self._token(image.settings.storage_token)),
            counters=replace(image.counters, storage_token=self._token(image.counters.storage_token)),
            jobs=tuple([replace(job, spec=self.spec(job.spec)) for job in image.jobs]),
        )

    def spec(self, spec: JobSpec) -> JobSpec:
        if spec.array is not None and not self._with_environment:
            array = replace(spec.array, parameters=self._parameters(spec.array.parameters))
            spec = replace(spec, array=array)
        if self._with_environment or not (spec.environment or len(spec.command) > 1 or spec.role_programs):
            return spec
        # Made of the whole description, so that no two that differ in one short word look the same.
        command, environment = self._program(spec.command, spec.environment)
        programs = [(one, *self._program(one.command, one.environment)) for one in spec.role_programs]
        return replace(
            spec,
            command=command,
            environment=environment,
            role_programs=tuple([replace(one, command=own, environment=more) for one, own, more in programs]),
        )

    def _program(
        self, command: tuple[str, ...], environment: Mapping[str, str]
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        signs = self._signs(repr((command, sorted(environment.items()))))
        # Two are the same in whatever order they name variables, and keep theirs.
        hidden = {name: _hidden(word, signs) for name, word in sorted(environment.items())}
        words = (*command[:1], *(_hidden(word, signs) for word in command[1:]))
        return words, {name: hidden[name] for name in environment}

    def _parameters(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the parameters of an array member with hidden values; they are its arguments."""
        return {name: _hidden(text, self._signs(text)) for name, text in given.items()}

    def _token(self, token: str) -> str:
        return _hidden(token, self._signs(token))

    def _signs(self, text: str) -> Iterator[str]:
        """Return an endless iterator of characters that look random and are the same for the same text."""
        digest = blake2b(text.encode(errors="surrogatepass"), key=self._key, digest_size=63).digest()
        return cycle(urlsafe_b64encode(digest).decode())


def _hidden(word: str, signs: Iterator[str]) -> str:
    hidden = "".join(islice(signs, len(word)))
    if word.isascii() and "\0" not in word:
        return hidden
    return "".join(map(_alike, word, hidden))


def _alike(sign: str, hidden: str) -> str:
    return sign if sign == "\0" else _LONGER.get(len(sign.encode(errors="surrogatepass")), hidden)
