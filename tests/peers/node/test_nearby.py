"""A short code lets one machine in, and nobody who guesses: right, wrong, used, late, garbage, too large, in the middle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from dht import Grant, Identity, Token
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, ProtocolError, UsageError
from peers.node.nearby import Code, CodeWindow, Door, Ending, announced, ask, browse, fresh_label
from peers.node.nearby.code import CODE_S, MOST_WRONG
from peers.node.nearby.door import SIDE_S
from peers.node.nearby.exchange import MAX_MESSAGE_BYTES, DoorSide, JoinerSide, refusal

LABEL, CODE, WRONG = "abcd2345", Code("48217733"), Code("48217734")
ROOT, AT, ME = (Identity.generate() for _ in range(3))
HERE = ["127.0.0.1"]


def line(at: Identity = AT) -> str:
    grant = Grant(ROOT.peer_id, ROOT.peer_id, at.peer_id, "one", "own", 8, time.time() + 3600)
    return Token.sign(ROOT, [f"/ip4/192.0.2.{i}/tcp/4001/p2p/{at.peer_id}" for i in range(8)], grant).encode()


@dataclass
class Shown:
    """A code that is shown, and a clock that a test moves."""

    door: Door
    clock: list[float]

    async def ask(self, code: Code = CODE, label: str = LABEL) -> str:
        return await ask(HERE, self.door.port, label, code, ME.peer_id)

    async def say(self, *messages: bytes) -> list[bytes]:
        """As somebody who speaks for himself; what comes back until the other side hangs up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.door.port)
        found: list[bytes] = []
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            for message in messages:
                writer.write(message)
                size = int.from_bytes(await reader.readexactly(2), "big")
                found.append(await reader.readexactly(size))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return found


async def at_once(pause_s: float) -> None:
    await asyncio.sleep(0)


@asynccontextmanager
async def shown() -> AsyncIterator[Shown]:
    clock = [0.0]
    window = CodeWindow(lambda: clock[0])
    async with Door(CODE, LABEL, AT.peer_id, line, window, host="127.0.0.1", pause=at_once) as door:
        yield Shown(door, clock)


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def test_a_code_is_read_as_people_type_it_and_is_told_by_nobody_else() -> None:
    assert Code.parse(" 4821 7733 ") == Code.parse("4821-7733") == CODE
    assert str(CODE) == "4821-7733"
    assert "4821" not in repr(CODE)
    assert len({Code.fresh().digits for _ in range(50)}) > 45
    for text in ("", "4821", "4821-773x", "٤٨٢١٧٧٣٣", "482177333"):
        with pytest.raises(UsageError, match="8 digits"):
            Code.parse(text)


async def test_who_types_the_code_gets_the_line() -> None:
    async with shown() as here:
        got = Token.parse(await here.ask())
        assert got.grant is not None
        assert (got.grant.at, got.grant.role) == (AT.peer_id, "own")
        assert await here.door.wait() is Ending.USED


async def test_a_wrong_code_says_so_and_the_third_one_ends_it() -> None:
    async with shown() as here:
        for left in ("2 more can be tried", "1 more can be tried", "invite --code"):
            with pytest.raises(NotPermittedError, match=left):
                await here.ask(WRONG)
        assert await here.door.wait() is Ending.GUESSED
        with pytest.raises(JoinError):
            async with asyncio.timeout(2 * SIDE_S):
                await here.ask()


async def test_guesses_that_are_begun_together_are_counted_all_the_same() -> None:
    async with shown() as here:
        told = await asyncio.gather(*(here.ask(WRONG) for _ in range(12)), return_exceptions=True)
        refused = [error for error in told if isinstance(error, NotPermittedError)]
        assert len(refused) == here.door.window.wrong <= MOST_WRONG
        assert not [one for one in told if isinstance(one, str)]


async def test_a_code_lets_in_one_machine() -> None:
    async with shown() as here:
        await here.ask()
        assert await here.door.wait() is Ending.USED
        assert here.door.window.why_not
        with pytest.raises(JoinError):
            async with asyncio.timeout(2 * SIDE_S):
                await here.ask()


async def test_a_code_ends_after_ten_minutes_even_between_two_messages() -> None:
    async with shown() as here:
        await asyncio.sleep(0.02)  # it waits for somebody
        here.clock[0] = CODE_S
        with pytest.raises(NotPermittedError, match="10 minutes after"):
            await here.ask()
    window = CodeWindow(lambda: 0.0, 0.02)
    async with Door(CODE, LABEL, AT.peer_id, line, window, host="127.0.0.1") as door:
        assert await door.wait() is Ending.EXPIRED

    async with shown() as here:
        side = JoinerSide(CODE, LABEL, ME.peer_id)
        reader, writer = await asyncio.open_connection("127.0.0.1", here.door.port)
        writer.write(framed(side.hello()))
        answer = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        here.clock[0] = CODE_S + 1
        writer.write(framed(side.prove(answer)))
        with pytest.raises(NotPermittedError, match="has ended"):
            side.open(await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big")))
        writer.close()
        assert not here.door.window.is_used


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00\x00",
        b"\x00\x05hello",
        (MAX_MESSAGE_BYTES + 1).to_bytes(2, "big") + b"x" * (MAX_MESSAGE_BYTES + 1),
        framed(b"\x94\xa1a" * 100),
        framed(b"\xdd\xff\xff\xff\xff"),
        framed(JoinerSide(CODE, "other234", ME.peer_id).hello()),
        framed(JoinerSide(CODE, LABEL, "nobody").hello()),
        framed(JoinerSide(CODE, LABEL, ME.peer_id).hello()[:-33] + b"A" + b"\xff" * 32),  # no point of the curve
    ],
    ids=["nothing", "empty", "text", "too large", "list", "huge list", "other mesh", "no peer", "no point"],
)
async def test_garbage_gets_no_answer_and_costs_no_guess(message: bytes) -> None:
    async with shown() as here:
        if message:
            assert await here.say(message) == []
        else:
            _, writer = await asyncio.open_connection("127.0.0.1", here.door.port)
            writer.close()
        assert here.door.window.wrong == 0
        async with asyncio.timeout(2 * SIDE_S):
            assert await here.ask()


async def test_a_proof_that_is_none_is_a_guess_or_garbage_and_gets_no_invite() -> None:
    async with shown() as here:
        for proof in (framed(b"\x91\xc4\x20" + bytes(32)), framed(b"\x91\xc4\x01x")):
            answers = await here.say(framed(JoinerSide(CODE, LABEL, ME.peer_id).hello()), proof)
            assert all(b"meshcee2" not in answer for answer in answers)
        assert here.door.window.wrong == 1


async def test_of_one_address_two_connections_wait() -> None:
    async with shown() as here:
        held = [await asyncio.open_connection("127.0.0.1", here.door.port) for _ in range(2)]
        await asyncio.sleep(0.02)
        reader, third = await asyncio.open_connection("127.0.0.1", here.door.port)
        with suppress(ConnectionError):
            assert await reader.read() == b"", "hung up at once"
        for _, writer in (*held, (reader, third)):
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        await asyncio.sleep(0.05)
        assert await here.ask()


def exchanged(joiner: JoinerSide, door: DoorSide, change: int | None = None, by: bytes = b"") -> str:
    """Without a network; message number `change` has `by` in place of what was sent."""
    hello = joiner.hello()
    answer = door.answer(hello if change != 0 else hello.replace(ME.peer_id.encode(), by))
    proof = joiner.prove(answer if change != 1 else answer.replace(AT.peer_id.encode(), by))
    if not door.knows(proof):
        raise NotPermittedError("wrong")
    return joiner.open(door.sealed(line()))


def test_both_names_and_the_label_are_bound() -> None:
    other = Identity.generate().peer_id
    assert exchanged(JoinerSide(CODE, LABEL, ME.peer_id), DoorSide(CODE, LABEL, AT.peer_id))
    for change in (0, 1):
        with pytest.raises(NotPermittedError):
            exchanged(JoinerSide(CODE, LABEL, ME.peer_id), DoorSide(CODE, LABEL, AT.peer_id), change, other.encode())
    with pytest.raises(ProtocolError):
        exchanged(JoinerSide(CODE, LABEL, ME.peer_id), DoorSide(CODE, "other234", AT.peer_id))


def test_who_does_not_know_the_code_cannot_play_the_first_machine() -> None:
    joiner, false = JoinerSide(CODE, LABEL, ME.peer_id), DoorSide(WRONG, LABEL, AT.peer_id)
    proof = joiner.prove(false.answer(joiner.hello()))
    assert not false.knows(proof)
    with pytest.raises(NotPermittedError, match="does not know the code"):
        joiner.open(false.sealed(line()))


def test_an_invite_of_another_peer_than_the_one_that_answered_is_refused() -> None:
    joiner, door = JoinerSide(CODE, LABEL, ME.peer_id), DoorSide(CODE, LABEL, AT.peer_id)
    assert door.knows(joiner.prove(door.answer(joiner.hello())))
    with pytest.raises(ProtocolError, match="another peer's"):
        joiner.open(door.sealed(line(ROOT)))


def test_whatever_stands_for_a_point_is_refused_as_a_message() -> None:
    """The library raises a class of its own for some, and others for the rest: none may end the peer that shows a code."""
    hello = JoinerSide(CODE, LABEL, ME.peer_id).hello()
    points = [bytes(32), b"\x01" + bytes(31), b"\xff" * 32, *(bytes([i, *range(31)]) for i in range(24))]
    refused = 0
    for point in points:
        try:
            DoorSide(CODE, LABEL, AT.peer_id).answer(hello[:-32] + point)
        except ProtocolError:
            refused += 1
    assert refused > len(points) / 2


def test_a_refusal_is_one_sentence_whoever_wrote_it() -> None:
    side = JoinerSide(CODE, LABEL, ME.peer_id)
    side.hello()
    with pytest.raises(NotPermittedError, match="by this code: it is closed"):
        side.prove(refusal("it is closed"))
    with pytest.raises(MeshceeError):
        side.prove(refusal("x" * 5000) + b"x")


async def test_a_code_is_found_by_multicast_dns_and_its_label_is_all_that_is_told() -> None:
    label = fresh_label()
    async with announced(label, 4711, HERE) as is_told:
        if not is_told:
            pytest.skip("multicast DNS cannot be used on loopback here")
        found = [one for one in await browse(3.0, HERE) if one.label == label]
    if not found:
        pytest.skip("loopback carries no multicast here")
    assert [(one.addresses, one.port) for one in found] == [(("127.0.0.1",), 4711)]


async def test_who_answers_in_the_first_machines_place_has_one_guess_whatever_addresses_it_tells() -> None:
    async with shown() as here:
        false = DoorSide(WRONG, LABEL, AT.peer_id)
        proofs = 0

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal proofs
            hello = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            writer.write(framed(false.answer(hello)))
            proofs += len(await reader.readexactly(2)) > 0
            writer.close()

        server = await asyncio.start_server(play, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(JoinError):
            await ask(HERE * 5, port, LABEL, CODE, ME.peer_id)
        server.close()
        assert proofs == 1
        assert await here.ask()


async def test_where_nobody_answers_the_line_is_the_way() -> None:
    with pytest.raises(JoinError, match="--join LINE"):
        await ask(HERE, 9, LABEL, CODE, ME.peer_id)
