"""A daemon's certificate is renewed by the master before it ends, for the same names and another key."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from ganger.agent.v1 import agent_pb2
from ganger.wire import certificate_authority
from ganger.wire.certificate_authority import (
    CertificateError,
    answer_renewal,
    issued_certificates,
    renew,
    replace_files,
    request_renewal,
)
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import UserLimit, from_rpc_error
from ganger.wire.tls import CERTIFICATE, KEY, check_directory
from ganger_daemon.node.certificate_renewal import keep_renewed
from ganger_master.rpc.access import RENEWALS_PER_HOUR, RenewalLimit
from kit.certified import Authority
from rpc.certified import CertifiedMaster, serving_certified
from rpc.kit import Speaker, until


@pytest.fixture(autouse=True)
def due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates of a minute are due at once: they seem to have lived for the five minutes that clocks may differ."""
    monkeypatch.setattr(certificate_authority, "_BEFORE", timedelta(0))


def told(tmp_path: Path, story: Callable[[CertifiedMaster], Awaitable[None]], **more: Any) -> None:
    async def run() -> None:
        async with serving_certified(tmp_path, **more) as certified:
            await story(certified)

    asyncio.run(run())


def minute(certified: CertifiedMaster, monkeypatch: pytest.MonkeyPatch, name: str = "n1") -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(certificate_authority, "_BEFORE", timedelta(minutes=5))
        return certified.authority.issue("daemon", name, days=1 / 1440, to=f"minute-{name}")


def read(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())


def names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_a_certificate_is_renewed_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(certified: CertifiedMaster) -> None:
        directory = minute(certified, monkeypatch)
        former, key = read(directory), (directory / KEY).read_bytes()
        kept = asyncio.ensure_future(
            keep_renewed(directory, lambda: Endpoint(certified.master.address, tls=str(directory)))
        )
        await until(lambda: read(directory).serial_number != former.serial_number)
        kept.cancel()
        renewed = read(directory)
        assert names_of(renewed) == names_of(former)
        assert renewed.not_valid_after_utc > former.not_valid_after_utc
        assert (directory / KEY).read_bytes() != key
        check_directory(directory)
        await Speaker(certified.with_certificate(directory), "n1").join()
        assert renewed.serial_number in {one.serial for one in issued_certificates(tmp_path / "authority")[0]}
        assert sorted(path.name for path in directory.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]

    told(tmp_path, story, authority=tmp_path / "authority")


def test_a_master_without_the_authority_renews_nothing_and_the_daemon_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(certified: CertifiedMaster) -> None:
        directory = minute(certified, monkeypatch)
        before = read(directory)
        asked: list[Endpoint] = []

        def master() -> Endpoint:
            asked.append(Endpoint(certified.master.address, tls=str(directory)))
            return asked[-1]

        kept = asyncio.ensure_future(keep_renewed(directory, master))
        await until(lambda: len(asked) >= 3)
        kept.cancel()
        with suppress(asyncio.CancelledError):
            await kept
        assert read(directory) == before

    with caplog.at_level(logging.WARNING, "ganger_daemon"):
        told(tmp_path, story)
    (said,) = [one for one in caplog.records if one.message == "certificate not renewed"]
    assert "NOT_SUPPORTED: this master renews no certificates" in said.error  # type: ignore[attr-defined]


def test_what_is_no_request_and_a_certificate_that_is_not_due_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(certified: CertifiedMaster) -> None:
        short = certified.with_certificate(minute(certified, monkeypatch))
        whole = request_renewal()[1]
        for request in (b"", b"nonsense", whole[:-60] + b"A" * 30 + whole[-30:]):
            assert "no request" in await refusal(short, request) or "not signed" in await refusal(short, request)
        monkeypatch.setattr(certificate_authority, "_BEFORE", timedelta(minutes=5))
        long = certified.calls("daemon", "n2")
        assert "the certificate is not due before" in await refusal(long, whole)

    told(tmp_path, story, authority=tmp_path / "authority")


async def refusal(served: Any, request: bytes) -> str:
    with pytest.raises(grpc.RpcError) as failed:
        await served.agents.RenewCertificate(agent_pb2.RenewCertificateRequest(signing_request=request))
    error = from_rpc_error(failed.value)
    assert error.reason == "REQUEST_INVALID"
    return error.message


def test_a_certificate_that_does_not_fit_its_key_changes_nothing(tmp_path: Path) -> None:
    directory = Authority(tmp_path).issue("daemon", "n1")
    other = Authority(tmp_path, "other").issue("daemon", "n1")
    before = (directory / KEY).read_bytes(), (directory / CERTIFICATE).read_bytes()
    for key, certificate in (
        (request_renewal()[0], before[1]),
        ((other / KEY).read_bytes(), (other / CERTIFICATE).read_bytes()),
        (before[0], b"nonsense"),
    ):
        with pytest.raises(CertificateError, match="the renewed certificate does not do"):
            replace_files(directory, before[1], key, certificate)
        assert ((directory / KEY).read_bytes(), (directory / CERTIFICATE).read_bytes()) == before


def test_an_operators_certificate_stays_although_a_renewed_one_arrives_after_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    directory, renewed = authority.issue("daemon", "n1"), authority.issue("daemon", "n1", to="renewed")
    former = (directory / CERTIFICATE).read_bytes()
    renew(tmp_path / "authority", directory, 1.0)
    before = (directory / KEY).read_bytes(), (directory / CERTIFICATE).read_bytes()
    with pytest.raises(CertificateError, match="has another certificate meanwhile"):
        replace_files(directory, former, (renewed / KEY).read_bytes(), (renewed / CERTIFICATE).read_bytes())
    assert ((directory / KEY).read_bytes(), (directory / CERTIFICATE).read_bytes()) == before


def test_a_disk_that_is_full_is_an_error_of_the_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Authority(tmp_path).issue("daemon", "n1")
    certificate, key = (directory / CERTIFICATE).read_bytes(), (directory / KEY).read_bytes()

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(certificate_authority, "TemporaryDirectory", full)
    with pytest.raises(CertificateError, match="no space left on device"):
        replace_files(directory, certificate, key, certificate)


def test_a_certificate_of_another_authority_is_not_renewed_into_one_of_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Authority(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(certificate_authority, "_BEFORE", timedelta(minutes=5))
        foreign = Authority(tmp_path, "other").issue("daemon", "n1", days=1 / 1440)
    with pytest.raises(CertificateError, match="was made by another authority than"):
        answer_renewal(tmp_path / "authority", (foreign / CERTIFICATE).read_bytes(), request_renewal()[1])


def test_a_revoked_certificate_is_not_renewed_although_the_master_does_not_have_the_list_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(certified: CertifiedMaster) -> None:
        stolen = minute(certified, monkeypatch)
        thief = certified.with_certificate(stolen)
        await thief.agents.RenewCertificate(agent_pb2.RenewCertificateRequest(signing_request=request_renewal()[1]))
        certified.authority.revoke(stolen)
        assert "was revoked" in await refusal(thief, request_renewal()[1])

    told(tmp_path, story, authority=tmp_path / "authority")


def test_a_certificate_is_renewed_a_few_times_an_hour_and_refusals_do_not_count() -> None:
    moment = [1_000_000.0]
    limit = RenewalLimit(lambda: moment[0])

    def renew_one(node: str, *, fails: bool = False) -> None:
        with limit.counted(node):
            if fails:
                raise CertificateError("not due")

    for _ in range(RENEWALS_PER_HOUR):
        with pytest.raises(CertificateError):
            renew_one("n1", fails=True)
        moment[0] += 60.0
        renew_one("n1")
    with pytest.raises(UserLimit, match="nodes/n1 was renewed 6 times in an hour: the next time at 14:47:40 UTC"):
        renew_one("n1")
    renew_one("n2")
    moment[0] = 1_000_060.0 + 3_600.0
    renew_one("n1")
    with pytest.raises(UserLimit):
        renew_one("n1")


def test_a_daemon_that_renews_again_and_again_leaves_a_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(certified: CertifiedMaster) -> None:
        daemon = certified.with_certificate(minute(certified, monkeypatch))
        request = agent_pb2.RenewCertificateRequest(signing_request=request_renewal()[1])
        before = len(issued_certificates(tmp_path / "authority")[0])
        calls = [daemon.agents.RenewCertificate(request) for _ in range(RENEWALS_PER_HOUR + 4)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [from_rpc_error(one).reason for one in answers if isinstance(one, grpc.RpcError)]
        assert refused == ["USER_LIMIT"] * 4
        assert len(issued_certificates(tmp_path / "authority")[0]) == before + RENEWALS_PER_HOUR

    told(tmp_path, story, authority=tmp_path / "authority")


def test_a_master_starts_although_a_record_of_the_authority_cannot_be_read(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        assert certified.master.address

    broken = tmp_path / "authority" / "issued"
    broken.mkdir(parents=True)
    (broken / "1.pem").write_text("nonsense")
    told(tmp_path, story, authority=tmp_path / "authority")
