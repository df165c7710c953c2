"""What the chaos benchmark reads in the log of an owner; the logs are made up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.going_back import Past, going_back

NAMES = {"id-a": "a", "id-b": "b", "id-c": "c"}


def asked(step: int) -> dict[str, Any]:
    return {"event": "copies are asked for", "next_step": step}


def whole(step: int, *stages: str, event: str = "copies", far: bool = True) -> dict[str, Any]:
    """Each set of tensors by the letters of those who hold it."""
    held_by = [[f"id-{peer}" for peer in stage] for stage in stages]
    return {"event": event, "next_step": step, "held_by": held_by, "holders": held_by, "far": far}


def saved(step: int) -> dict[str, Any]:
    return {"event": "checkpoint", "next_step": step}


def lost(*names: str) -> dict[str, Any]:
    return {"event": "a member was lost", "gone": list(names)}


def out_of_reach(step: int, epochs: int) -> dict[str, Any]:
    return {"event": "copies are out of a member's reach", "next_step": step, "far": False, "epochs": epochs}


def went(done: int, next_step: int, *, with_peers: bool) -> dict[str, Any]:
    return {"event": "the state to go on from", "done": done, "next_step": next_step, "with_peers": with_peers}


def read(*entries: dict[str, Any]) -> Past:
    return going_back(entries, NAMES)


COPIED = (asked(4), whole(4, "ab", "bc"), asked(8), whole(8, "ab", "bc"))


def test_the_newest_copy_that_survives_is_right() -> None:
    past = read(*COPIED, lost("a"), went(11, 8, with_peers=True))
    assert (past.wrong, past.every, [b.to_json() for b in past.backs]) == (
        [],
        4,
        [{"done": 11, "again": 3, "from": "peers"}],
    )


def test_who_joins_with_the_id_of_one_that_is_gone_has_no_copy_of_its() -> None:
    """Seed 10 of the chaos of 2026-11-22, whose names were those of the end."""
    joined = [{"event": "peer joined", "peer": "id-a", "name": name} for name in ("a", "new")]
    story = (
        joined[0],
        asked(4),
        whole(4, "ab", "bc"),
        whole(8, "a", "c"),
        lost("a"),
        went(11, 4, with_peers=True),
        joined[1],
    )
    assert going_back(story, NAMES | {"id-a": "new"}).wrong == []


def test_one_that_is_ahead_of_the_reports_does_not_count() -> None:
    assert read(*COPIED, lost("a"), went(7, 4, with_peers=True)).wrong == []
    assert read(*COPIED, lost("a"), went(7, 8, with_peers=True)).wrong == [
        "after 7 steps the run went back to 8 of peers, who held 4"
    ]


def test_copies_that_two_epochs_did_not_reach_do_not_count() -> None:
    """Seed 701243 of the storms: those who were left could not reach each other."""
    first = (saved(3), *COPIED, lost(), went(9, 8, with_peers=True), out_of_reach(8, 1), lost())
    second = (went(9, 8, with_peers=True), out_of_reach(8, 2), lost())
    assert read(*first, *second, went(9, 4, with_peers=True)).wrong == []
    assert read(*first, went(9, 3, with_peers=False)).wrong == [
        "after 9 steps the run went back to 3 of the disk, though peers held 8"
    ]


def test_without_a_holder_the_disk_is_right() -> None:
    past = read(saved(2), *COPIED, lost("a", "b"), went(11, 2, with_peers=False), asked(5), saved(10), lost("c"))
    assert (past.wrong, past.every) == ([], 4)
    assert past.backs[0].again == 9


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ((*COPIED, lost("a"), went(9, 4, with_peers=True)), "of peers, who held 8"),
        ((*COPIED, lost("a", "b"), went(9, 8, with_peers=True)), "of peers, who held None"),
        ((saved(2), *COPIED, lost("a"), went(9, 2, with_peers=False)), "of the disk, though peers held 8"),
        ((saved(2), saved(6), went(9, 2, with_peers=False)), "though the disk had 6"),
        ((*COPIED, asked(12), lost("a"), went(16, 8, with_peers=True)), "with copies every 4 steps at most"),
    ],
    ids=["an older copy", "a copy that is gone", "the disk", "an older checkpoint", "too many steps"],
)
def test_what_is_wrong_is_said(entries: tuple[dict[str, Any], ...], why: str) -> None:
    (wrong,) = read(*entries).wrong
    assert why in wrong


def test_a_run_that_goes_over_to_another_plan_computes_nothing_again() -> None:
    past = read(asked(4), whole(4, "ab"), saved(6), went(6, 6, with_peers=False), asked(9))
    assert (past.wrong, past.every, past.backs[0].again) == ([], 4, 0)


def test_what_is_handed_over_counts_as_long_as_its_makers_live() -> None:
    over = {**whole(11, "a", "b"), "event": "copies are handed over"}
    past = read(*COPIED, over, went(11, 11, with_peers=True), lost("a"), went(12, 8, with_peers=True))
    assert past.wrong == []
    assert read(*COPIED, over, went(11, 8, with_peers=True)).wrong == [
        "after 11 steps the run went back to 8 of peers, who held 11"
    ]


def test_copies_in_the_making_are_dropped_by_a_hand_over() -> None:
    """Seed 8804002 of the virtual chaos: it came two steps after copies were asked for, and one of its makers hung then."""
    over = {**whole(14, "a", "b"), "event": "copies are handed over"}
    story = (*COPIED, asked(12), over, went(14, 14, with_peers=True), lost("a"), went(14, 8, with_peers=True))
    past = read(*story)
    assert (past.wrong, past.every) == ([], 4)
    later = (asked(12), whole(12, "cb", "bc"), asked(16), lost("b"), went(18, 12, with_peers=True))
    (wrong,) = read(*story, *later).wrong
    assert wrong.startswith("after 18 steps the run went back to 12"), (
        "only the loss before the next whole copies may cost more"
    )
    (wrong,) = read(*(e for e in story if e is not over)).wrong
    assert wrong == "after 14 steps the run went back to 14 of peers, who held 8"
    (wrong,) = read(*COPIED, asked(12), lost("a"), went(14, 8, with_peers=True)).wrong
    assert "with copies every 4 steps at most" in wrong


def test_members_go_on_with_what_they_were_fed_while_the_owner_sleeps() -> None:
    """Seed 8805092 of the virtual chaos: it slept before it could tell keepers of the copies that it had asked for."""
    story = (*COPIED, asked(12), lost("a"), went(14, 8, with_peers=True))
    assert read(*story).wrong == ["after 14 steps the run went back to 8, with copies every 4 steps at most"]
    assert going_back(story, NAMES, slept=True).wrong == []
    story = (*COPIED, asked(12), asked(15), lost("a"), went(17, 8, with_peers=True))
    (wrong,) = going_back(story, NAMES, slept=True).wrong
    assert wrong == "after 17 steps the run went back to 8, with copies every 4 steps at most"


def test_a_loss_that_meets_copies_in_the_making_costs_the_steps_that_they_take() -> None:
    """Seed 1 of the chaos of 2026-11-27: half the bandwidth of a link, and copies took eleven of fifteen seconds to be whole."""

    def at(second: int, entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"timestamp": f"2026-11-27T16:06:{second:02}.000000Z"}

    slow = (at(0, asked(4)), at(10, whole(4, "ab", "bc")), at(15, asked(34)), at(25, whole(34, "ab", "bc")))
    quick = (at(0, asked(4)), at(1, whole(4, "ab", "bc")), at(15, asked(34)), at(16, whole(34, "ab", "bc")))
    end = (at(30, asked(64)), at(50, lost("a")))
    assert read(*slow, *end, went(80, 34, with_peers=True)).wrong == []
    assert read(*slow, *end, went(90, 34, with_peers=True)).wrong, "copies that take longer than ever before"
    assert read(*quick, *end, went(80, 34, with_peers=True)).wrong


def test_copies_in_another_region_count_when_no_others_are_left_and_their_keepers_are_members() -> None:
    region = (whole(4, "ab", "bc", event="far copies"), *COPIED)
    assert read(*region, lost("a"), went(11, 8, with_peers=True)).wrong == []
    away = (whole(2, "ac", "bc", event="far copies"), *COPIED, whole(9, "ab", "ab"))
    for disk, held in [(0, 2), (3, 2)]:
        back = read(saved(disk), *away[:-1], lost("a", "b"), went(11, max(disk, held), with_peers=disk < held))
        assert (back.wrong, back.backs[0].far) == ([], True)
    assert read(*away, lost("a", "b"), went(11, 0, with_peers=False)).wrong == []
    assert read(*away[:-1], whole(9, "ab", "ab", far=False), lost("a", "b"), went(11, 0, with_peers=False)).wrong == []
    assert read(*away[:-1], lost("a", "b"), went(11, 0, with_peers=False)).wrong == [
        "after 11 steps the run went back to 0 of the disk, though peers held 2"
    ]


def test_copies_before_the_newest_may_have_been_forgotten() -> None:
    """Seed 801946 of the virtual chaos: c had all of the older ones, and both who had a stage of the newest were cut off."""
    story = (asked(4), whole(4, "ac", "bc"), asked(8), whole(8, "ab", "bc"), lost("a", "b"))
    assert read(*story, went(11, 0, with_peers=False)).wrong == []
    (wrong,) = read(*story[:-1], lost("a"), went(11, 0, with_peers=False)).wrong
    assert wrong == "after 11 steps the run went back to 0 of the disk, though peers held 8"


def test_a_loss_among_steps_that_are_computed_again_costs_those_at_most() -> None:
    """Seed 801992 of the virtual chaos: twelve steps had been done before the first loss, and seven of them again before the
    second."""
    again = (lost("a", "b"), went(12, 0, with_peers=False), asked(1), whole(1, "cb", "bc"), asked(7), lost("b"))
    past = read(*COPIED, *again, went(12, 1, with_peers=True))
    assert (past.wrong, past.every) == ([], 6)


def test_a_plan_that_goes_on_where_another_one_ended_computes_no_step_again() -> None:
    handed = {"event": "copies are handed over", "next_step": 11, "held_by": [["id-a"], ["id-b"]]}
    assert read(*COPIED, handed, went(11, 11, with_peers=True)).wrong == []
    assert read(*COPIED, went(11, 8, with_peers=True)).wrong == [
        "after 11 steps the run went back to 8, and nobody was lost"
    ]
    refused = read(*COPIED, lost("a"), went(11, 8, with_peers=True), went(11, 8, with_peers=True))
    assert refused.wrong == [], "a plan that was refused, as of an old term"
