"""In which state a GPU is, as a value of its node and of what is free there."""

from __future__ import annotations

import pytest
from ganger.cluster.resources import NodeRow
from ganger_master.core.node_model import Node
from ganger_master.metrics import gpus_of

HEARD = {"heard": True}


@pytest.mark.parametrize(
    ("node", "free", "expected"),
    [
        (HEARD, 0b1111, {"idle": 4}),
        (HEARD, 0b0011, {"idle": 2, "busy": 2}),
        (HEARD | {"device_faults": {3: "XID 79"}}, 0b0011, {"idle": 2, "busy": 1, "faulty": 1}),
        (HEARD | {"draining": True}, 0b0001, {"drained": 1, "busy": 3}),
        (HEARD | {"cordoned": True}, 0b1111, {"drained": 4}),
        (HEARD | {"silent": True}, 0b0011, {"silent": 2, "busy": 2}),
        (HEARD | {"lost": True}, 0b0011, {"lost": 4}),
        ({}, 0b1111, {"unknown": 4}),
    ],
)
def test_each_gpu_of_a_node_is_in_one_state(node: dict[str, object], free: int, expected: dict[str, int]) -> None:
    found = gpus_of(Node("n1", "machine", "four", **node), 4, NodeRow("n1", "four", free, (), 0))  # type: ignore[arg-type]
    assert +found == expected
    assert found.total() == 4
