"""Commands hand a list of masters on as a list: a node, or a job's scheduler, must find the leader later too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ganger.cli.cluster import _address_for_nodes
from ganger.client import Client
from ganger.console import CommandError
from ganger.scheduling.cli import DetachedScheduler
from ganger.wire.endpoints import find_endpoint

LIST = "m1.lab:7070,m2.lab:7070"


def client_of(masters: str) -> Client:
    return cast(Client, SimpleNamespace(endpoint=find_endpoint(masters, "/certs")))


def test_a_node_is_given_all_masters_that_the_operator_names() -> None:
    assert _address_for_nodes(client_of(LIST), None, ["n1.lab"]) == LIST
    assert _address_for_nodes(client_of(LIST), "m3.lab:1,m4.lab:1", ["n1.lab"]) == "m3.lab:1,m4.lab:1"
    assert _address_for_nodes(client_of("m1.lab:7070"), None, ["n1.lab"]) == "m1.lab:7070"


def test_a_list_with_an_address_that_nodes_cannot_dial_is_refused() -> None:
    with pytest.raises(CommandError, match="--master-address"):
        _address_for_nodes(client_of("m1.lab:7070,127.0.0.1:7070"), None, ["n1.lab"])


@pytest.mark.parametrize("master", [LIST, find_endpoint(LIST, "/certs")], ids=["text", "endpoint"])
def test_a_job_scheduler_of_its_own_is_given_all_masters(master: Any) -> None:
    assert DetachedScheduler("module:Class", master)._arguments[-2:] == ["--master", LIST]
