"""What may arrive at a stage: each frame once, within the window, of the round that runs or the next ones."""

import pytest
import torch

from meshcee.errors import ProtocolError
from peers.member.inbox import Inbox, named_tensors


def test_each_arrival_is_taken_once() -> None:
    inbox = Inbox(limit=4)
    inbox.put_forward(0, 0, "a", ())
    inbox.put_forward(0, 0, "b", ())
    assert inbox.forward[(0, 0)].keys() == {"a", "b"}
    with pytest.raises(ProtocolError, match="twice"):
        inbox.put_forward(0, 0, "a", ())
    assert inbox.changed.is_set()


def test_a_sender_that_ignores_the_window_is_refused() -> None:
    inbox = Inbox(limit=3)
    for micro in range(3):
        inbox.put_back(0, micro, "a", ())
    with pytest.raises(ProtocolError, match="ignores the window"):
        inbox.put_back(0, 3, "a", ())


def test_finished_walks_and_far_futures_are_refused() -> None:
    inbox = Inbox(limit=2)
    inbox.put_raw(0, 0, {})
    inbox.finish(0)
    assert not inbox.raw
    with pytest.raises(ProtocolError, match="round 0"):
        inbox.put_raw(0, 1, {})
    with pytest.raises(ProtocolError, match="round 9"):
        inbox.put_commit(9, None)


def test_shared_gradients_of_several_stages_are_merged_but_not_doubled() -> None:
    inbox = Inbox(limit=2)
    one = torch.ones(1)
    inbox.put_shared(0, 0, "p1", {"a": one})
    inbox.put_shared(0, 0, "p2", {"a": one, "b": one})
    assert inbox.shared[(0, 0)].keys() == {("a", "p1"), ("a", "p2"), ("b", "p2")}
    with pytest.raises(ProtocolError, match="twice"):
        inbox.put_shared(0, 0, "p2", {"b": one})
    inbox.put_totals(0, {"a": one})
    with pytest.raises(ProtocolError, match="twice"):
        inbox.put_totals(0, {"a": one})


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["a", "made up"], [torch.ones(2), torch.ones(2)]),
        (["a"], [torch.ones(1).expand(1 << 48)]),
        (["a"], [torch.ones(2, dtype=torch.float64)]),
        (["a", "b"], [torch.ones(2)]),
    ],
    ids=["a name that is not shared", "another shape", "another type", "a tensor too few"],
)
def test_gradients_of_what_the_sender_does_not_share_are_refused(names: list[str], values: list[object]) -> None:
    like = {"a": torch.zeros(2), "b": torch.zeros(2)}
    assert named_tensors({"names": ["a", "b"]}, [torch.ones(2), None], like).keys() == like.keys()
    with pytest.raises(ProtocolError, match="shared gradient"):
        named_tensors({"names": names}, values, like)
