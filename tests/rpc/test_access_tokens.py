"""Access tokens of people: a token makes its holder the user that it names, until it ends or is revoked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.client import Client
from ganger.v1 import job_service_pb2, node_pb2
from ganger.wire import times
from ganger.wire.endpoints import Endpoint, find_endpoint
from ganger.wire.errors import CertificateInvalid, from_rpc_error, reason_of
from ganger.wire.servers import _LONGEST_TOKEN
from ganger_master.app import Master
from ganger_master.core.node_model import AccessToken
from ganger_master.rpc import audit
from ganger_master.rpc.access import TokenHolders, new_token
from hypothesis import given
from hypothesis import strategies as st
from rpc.certified import CertifiedMaster, serving_certified
from rpc.kit import Served, serving


def told(directory: Path, story: Callable[[CertifiedMaster], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with serving_certified(directory) as certified:
            await story(certified)

    asyncio.run(run())


async def reason(call: Any) -> str:
    try:
        await call
    except grpc.RpcError as error:
        return from_rpc_error(error).reason
    return "OK"


async def read_all(stream: Any) -> None:
    async for _ in stream:
        pass


async def created(operator: Served, user: str = "ann", lasts_s: float = 600.0) -> node_pb2.Token:
    request = node_pb2.CreateTokenRequest(user=user, lifetime=times.duration(lasts_s))
    return await operator.nodes.CreateToken(request)


def test_a_token_lets_its_holder_in_as_its_user_until_it_is_revoked_also_after_a_restart(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        olga = certified.calls("operator", "olga")
        token = await created(olga)
        assert (token.user, token.creator, token.HasField("revoke_time")) == ("ann", "olga", False)
        ann = certified.with_access_token(token.text)
        job = await ann.submit()
        assert job.user == "ann"
        other = await certified.calls("user", "bob").submit()
        cancel = job_service_pb2.CancelJobRequest
        assert await reason(ann.jobs.CancelJob(cancel(name=other.name))) == "JOB_NOT_YOURS"
        assert await reason(ann.nodes.DrainNode(node_pb2.DrainNodeRequest(name="nodes/n1"))) == "ROLE_NOT_PERMITTED"
        (listed,) = (await olga.nodes.ListTokens(node_pb2.ListTokensRequest())).tokens
        assert (listed.name, listed.text) == (token.name, "")
        cluster = await ann.nodes.GetCluster(node_pb2.GetClusterRequest())
        assert cluster.token_address == certified.master.token_address
        secret = token.text.rpartition(".")[2].encode()
        files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
        assert {"audit.jsonl", "ganger.db"} <= {path.name for path in files}
        assert [path for path in files if secret in path.read_bytes()] == []

        await certified.master.stop()
        certified.master = Master(certified.master.config)
        await certified.master.start()
        await go_on(certified, token.text)

    async def go_on(certified: CertifiedMaster, text: str) -> None:
        ann, olga = certified.with_access_token(text), certified.calls("operator", "olga")
        assert await reason(ann.jobs.ListJobs(job_service_pb2.ListJobsRequest())) == "OK"
        name = text.split(".")[1]
        revoked = await olga.nodes.RevokeToken(node_pb2.RevokeTokenRequest(name=name))
        again = await olga.nodes.RevokeToken(node_pb2.RevokeTokenRequest(name=name))
        assert revoked.HasField("revoke_time")
        assert again.revoke_time == revoked.revoke_time
        assert await reason(ann.jobs.ListJobs(job_service_pb2.ListJobsRequest())) == "TOKEN_REVOKED"
        unknown = node_pb2.RevokeTokenRequest(name="none")
        assert await reason(olga.nodes.RevokeToken(unknown)) == "TOKEN_NOT_FOUND"
        records = [json.loads(line) for line in (tmp_path / "state" / audit.FILE).read_text().splitlines()]
        last = [(one["caller"], one["method"], one["subject"], one["result"]) for one in records]
        assert ("operator/olga", "CreateToken", name, "OK") in last
        assert ("operator/olga", "RevokeToken", name, "OK") in last
        assert last[-2] == ("user/ann", "ListJobs", "", "TOKEN_REVOKED")
        kinds = [entry.kind for entry in await certified.master.writer.history("cluster", 0, 100)]
        assert [kind for kind in kinds if kind.startswith("token")] == ["token_created", "token_revoked"]

    told(tmp_path, story)


def test_a_revoked_token_ends_an_open_stream_with_its_next_message(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        olga = certified.calls("operator", "olga")
        token = await created(olga)
        ann = certified.with_access_token(token.text)
        job = await ann.submit()
        stream = ann.jobs.WatchJob(job_service_pb2.WatchJobRequest(name=job.name))
        assert (await anext(aiter(stream))).name == job.name
        await olga.nodes.RevokeToken(node_pb2.RevokeTokenRequest(name=token.name))
        await olga.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=job.name))
        assert await reason(read_all(stream)) == "TOKEN_REVOKED"

    told(tmp_path, story)


def test_a_token_ends_by_itself(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ann = certified.with_access_token((await created(certified.calls("operator", "olga"), lasts_s=0.5)).text)
        call = job_service_pb2.ListJobsRequest()
        found = "OK"
        async with asyncio.timeout(20.0):
            while found == "OK":
                found = await reason(ann.jobs.ListJobs(call))
        assert found == "TOKEN_EXPIRED"

    told(tmp_path, story)


def test_a_token_is_taken_over_tls_at_its_own_address_only(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        token = (await created(certified.calls("operator", "olga"))).text
        own = str(certified.authority.issue("user", "ann"))
        list_jobs = job_service_pb2.ListJobsRequest()

        def asked(endpoint: Endpoint) -> str:
            with Client(endpoint) as client:
                try:
                    return client.get_cluster().policy
                except Exception as error:
                    return f"{reason_of(error)}: {error}"

        local = await asyncio.to_thread(asked, Endpoint(certified.master.local_address, token))
        assert local.startswith("TOKEN_INVALID")
        elsewhere = await asyncio.to_thread(asked, Endpoint(certified.master.address, token, own))
        assert "asks for a certificate there: it takes tokens at the address of its --listen-tokens" in elsewhere
        assert await asyncio.to_thread(asked, Endpoint(certified.master.token_address, token, own)) == "fifo"
        # Nothing of the text can be exchanged.
        user, name, secret = token.rsplit(".", 2)
        for wrong in (
            f"olga.{name}.{secret}",
            f"{user}.{name}.{secret}x",
            f"{user}.{name}.",
            f"{user}.{'0' * 16}.{secret}",
        ):
            assert await reason(certified.with_access_token(wrong).jobs.ListJobs(list_jobs)) == "TOKEN_INVALID"

    told(tmp_path, story)


@pytest.mark.parametrize(
    ("user", "lasts_s", "wanted"),
    [("a b", 60.0, "REQUEST_INVALID"), ("", 60.0, "REQUEST_INVALID"), ("ann", 0.0, "REQUEST_INVALID"),
     ("ann", 400 * 86_400.0, "REQUEST_INVALID"), ("ann", 366 * 86_400.0, "OK")],
)  # fmt: skip
def test_a_token_has_a_user_and_an_end(tmp_path: Path, user: str, lasts_s: float, wanted: str) -> None:
    async def story(certified: CertifiedMaster) -> None:
        assert await reason(created(certified.calls("operator", "olga"), user, lasts_s)) == wanted

    told(tmp_path, story)


def test_a_master_that_takes_no_tokens_makes_none(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            assert await reason(created(served)) == "NOT_SUPPORTED"
            assert (await served.nodes.GetCluster(node_pb2.GetClusterRequest())).token_address == ""

    asyncio.run(story())


def test_a_client_finds_its_token_in_the_variable_or_in_a_file_that_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(certified: CertifiedMaster) -> None:
        token, directory = (await created(certified.calls("operator", "olga"))).text, tmp_path / "ann"
        directory.mkdir()
        (directory / "ca.pem").write_bytes((certified.authority.issue("user", "x") / "ca.pem").read_bytes())
        monkeypatch.setenv("GANGER_TLS", str(directory))

        def users() -> str:
            with Client(certified.master.token_address) as client:
                return client.submit(["true"]).message.user

        def refusal() -> str:
            with pytest.raises(Exception) as refused:  # noqa: PT011
                users()
            return str(refused.value)

        assert "or of a person ca.pem and token" in await asyncio.to_thread(refusal)
        (directory / "token").write_text(f"{token}\n")
        (directory / "token").chmod(0o640)
        assert "can be read by others (mode 0640): chmod 600 it" in await asyncio.to_thread(refusal)
        (directory / "token").chmod(0o600)
        assert await asyncio.to_thread(users) == "ann"
        monkeypatch.setenv("GANGER_TOKEN", "wrong")
        assert "the access token is none of this cluster" in await asyncio.to_thread(refusal)
        (directory / "token").unlink()
        monkeypatch.setenv("GANGER_TOKEN", token)
        assert await asyncio.to_thread(users) == "ann"
        assert token not in repr(find_endpoint(certified.master.token_address))
        other = tmp_path / "other"
        other.mkdir()
        (other / "ca.pem").write_bytes((certified.authority.issue("user", "y") / "cert.pem").read_bytes())
        monkeypatch.setenv("GANGER_TLS", str(other))
        with pytest.raises(CertificateInvalid, match="was not made by the authority"):
            await asyncio.to_thread(users)

    told(tmp_path, story)


NAME, TEXT, DIGEST = new_token("ann")
HOLDERS = TokenHolders({NAME: AccessToken(NAME, "ann", DIGEST, 0.0, 1e12)})


@given(st.binary(max_size=_LONGEST_TOKEN) | st.from_regex(rf"[a-z.]*{NAME}[.a-z]*", fullmatch=True).map(str.encode))
def test_any_bytes_are_a_token_or_refused(text: bytes) -> None:
    assert HOLDERS.holder_of(TEXT.encode()).name == "ann"
    with pytest.raises(Exception) as refused:  # noqa: PT011
        HOLDERS.holder_of(text)
    assert reason_of(refused.value) == "TOKEN_INVALID"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic YW5uOng=", "Bearer " + "x" * 4_000, TEXT], ids=range(6)
)
def test_a_header_that_is_none_is_refused_with_a_reason(tmp_path: Path, header: str) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ann = certified.with_access_token("")
        call = ann.jobs.ListJobs(job_service_pb2.ListJobsRequest(), metadata=(("authorization", header),))
        assert await reason(call) == "TOKEN_INVALID"

    told(tmp_path, story)
