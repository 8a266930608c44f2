"""Hides commands, environments and tokens in a recording.

Environment variables, program arguments and the storage token are replaced. Replacements have the same length, and
equal texts have equal replacements, so that decisions (on lengths, NULs and equality) do not change. They derive from a
key that is never stored, so guessing a text cannot be verified.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import replace as replace_fields
from hashlib import blake2b
from itertools import cycle, islice
from typing import Final

from msgspec.structs import replace

from ganger_master.core.commands import Command, OpenSession, SubmitArray, SubmitJob
from ganger_master.core.job_model import JobSpec
from ganger_master.core.state_image import Image

# One of each length in UTF-8.
_LONGER: Final = {2: "\u00b7", 3: "\u2026", 4: "\U0001f512"}


class Redaction:
    """Hides commands, environments and tokens. `key`: random, of this recording alone. `with_environment`: only
    tokens."""

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
        if self._with_environment or not (spec.environment or len(spec.command) > 1):
            return spec
        # Made of the whole description, so that no two that differ in one short word look the same.
        signs = self._signs(repr((spec.command, sorted(spec.environment.items()))))
        command = (*spec.command[:1], *(_hidden(word, signs) for word in spec.command[1:]))
        # Two are the same in whatever order they name variables, and keep theirs.
        hidden = {name: _hidden(word, signs) for name, word in sorted(spec.environment.items())}
        return replace(spec, command=command, environment={name: hidden[name] for name in spec.environment})

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
    """Return a character that takes as many bytes as `sign`."""
    return sign if sign == "\0" else _LONGER.get(len(sign.encode(errors="surrogatepass")), hidden)
