"""What is durable, and who is woken by its news."""

from __future__ import annotations

from ganger_master.core.model import Matrix, NodeSet, SuspendLevel
from ganger_master.runtime.publication import Committed, Publication

MATRIX = Matrix(1, ((1,), (2,)), 60.0, SuspendLevel.OFFLOAD)


def test_who_watches_all_jobs_is_woken_by_a_matrix_that_is_made_and_by_one_that_is_no_more() -> None:
    committed = Committed()
    key = ("node_set", "1")
    with committed.watching_jobs() as news:
        news.mark.clear()
        committed.publish(Publication())
        assert not news.mark.is_set()
        committed.publish(Publication({key: NodeSet(1, ("n1",), "n1", MATRIX)}))
        assert news.mark.is_set()
        assert committed.sets[1].coming is None
        news.mark.clear()
        committed.publish(Publication(removes=(key,)))
        assert news.mark.is_set()
        assert committed.sets == {}
