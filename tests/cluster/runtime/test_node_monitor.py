"""The nodes that come and go while a job runs; no Ray is started."""

from cluster.runtime import capacity
from cluster.runtime.capacity import Node
from cluster.runtime.node_monitor import NodeMonitor


def test_a_node_that_goes_is_not_called_lost_and_counted_all_the_same(monkeypatch, caplog):
    both = [Node("cpu-1", {"CPU": 4}, id="a"), Node("cpu-2", {"CPU": 4}, id="b")]
    monkeypatch.setattr(capacity, "nodes", lambda: both)
    monitor = NodeMonitor()
    monkeypatch.setattr(capacity, "nodes", lambda: both[:1])
    monitor.update()
    (said,) = caplog.messages  # an autoscaler that removed an idle node says the same to Ray
    assert said == "node cpu-2 left after 0s; Ray repeats elsewhere what ran there, if anything did"
    summary = monitor.stop().to_dict()
    assert (summary["nodes"], summary["lost"], summary["joined"]) == (2, 1, 0)
