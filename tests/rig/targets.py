"""Whatever reads bytes of others, as a table: what is valid, who reads it, and the errors that are answers.

The idea: one table serves a short test (tests/test_targets.py) and a long run (benchmarks/fuzz.py). A value is plain data or bytes,
changed at random (tests/rig/mutations.py). What is signed is signed after the change, as a member could do it. A number names
every changed value, so a failure is repeated by its name and number.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import random
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from dht.membership import Members, RevokedList, certify, opened
from dht.records import (
    LeaseRecord,
    LinkRecord,
    PeerRecord,
    Record,
    RevokedRecord,
    RunRecord,
    check,
    learn_list,
    open_sealed,
    place,
    seal,
)
from dht.roster import Roster
from dht.signing import CHECK_BYTES, Grant, Identity, MeshKey, Token
from dht.terms import TermFile
from meshcee.capture import capture, decode_program, encode_program
from meshcee.codec import CODECS, Coder, accepted
from meshcee.config import Limits
from meshcee.errors import (
    CheckpointError,
    GraphError,
    MeshceeError,
    NotPermittedError,
    PlanError,
    ProtocolError,
    UsageError,
)
from meshcee.fields import plain, read, unpack
from meshcee.figures import BlockTimes, JobCosts, Measured
from meshcee.figures.kernels import class_of
from meshcee.figures.profile import BlockCost, DeviceProfile, LinkProfile
from meshcee.figures.versions import Versions
from meshcee.files import dumps
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import LeftOut, Member, Pipeline, Plan, Predicted, Stage
from meshcee.stage import tensors
from peers.cli.plan import read_plan
from peers.cli.view import plan_table
from peers.device.worker.packets import Confinement, Verdict, understood
from peers.groups.meeting import Meeting
from peers.measure.block_profiler import ProfileRequest
from peers.member.inbox import TakeCopy, named_tensors
from peers.node.admission import Membership
from peers.node.datasets.service import Asked, Wanted
from peers.owner.answers import Answers, CodecNews
from peers.planning.coordinator import PlanRequest
from peers.state.checkpoint import Checkpoint
from peers.state.shelf import JOURNAL, Seal, covered
from peers.transport import handshake
from peers.transport.base import Frame, StreamClosed
from peers.transport.direct import Direct
from peers.transport.frame import DATA, FRAME_VERSION, MAGIC, MAX_KIND_CHARS, Decoder, Encoder, views
from peers.wire import messages
from peers.wire.failures import reported
from peers.wire.messages import Round, error_from, error_header
from peers.wire.offer import Offer, Terms
from peers.wire.progress import Doing
from peers.wire.spans import read_spans
from peers.wire.weights import StateReceiver, digests_in, names_of
from tests.rig import zoo
from tests.rig.habits import job_of
from tests.rig.mutations import MOST_BYTES, mutated

__all__ = [
    "ADDRESS",
    "DEVICE",
    "KEY",
    "ME",
    "NOW",
    "OTHER",
    "PLAN",
    "TARGETS",
    "UNTIL",
    "Target",
    "attempt",
    "case",
    "changed",
    "sealed_body",
    "token_of",
]

MOST_CHARACTERS = 200_000  # of a value as Python writes it
UNFOLDED = 64  # a byte of msgpack may become so many
LONGEST_S = 2.0  # of the processor, while memory is counted; a target with a smaller share may take longer
MOST_SAID = 2000  # characters of a refusal
TOOK = "it took"
NOW, UNTIL = 1000.0, 1018.0


@dataclass(frozen=True)
class Target:
    """One reader. `share` is how many of its inputs are tried for each one of the others: 1, or less where reading takes long."""

    name: str
    valid: Callable[[], Sequence[Any]]
    read: Callable[[Any], object]
    refusals: tuple[type[BaseException], ...] = (ProtocolError,)
    share: float = 1.0


def case(target: Target, number: int) -> Any:
    """The changed value of this number. Who reads bytes is given bytes, and who reads a map a map."""
    return changed(target, random.Random(f"{target.name} {number}"))


def changed(target: Target, draw: random.Random) -> Any:
    value = draw.choice(target.valid())
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        while type(other := mutated(value, draw)) is not type(value) or len(repr(other)) > MOST_CHARACTERS:
            pass
        value = other
    return value


def attempt(target: Target, value: Any) -> tuple[bool, str]:
    """Read it: whether it was refused, and what is wrong with how it was read ("" when nothing is)."""
    outcome = _attempt(target, value)
    return _attempt(target, value) if outcome[1].startswith(TOOK) else outcome  # other threads take memory too


def _attempt(target: Target, value: Any) -> tuple[bool, str]:
    refused, wrong, began_s = False, "", time.thread_time()
    tracemalloc.start()
    try:
        target.read(value)
    except target.refusals as error:
        refused = True
        if "\n" in str(error) or len(str(error)) > MOST_SAID:
            wrong = f"a refusal of {len(str(error))} characters, or of several lines: {str(error)[:200]!r}"
    except Exception as error:
        wrong = repr(error)[:500]
    finally:
        took_s, (_, peak) = time.thread_time() - began_s, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if took_s > LONGEST_S / target.share:
        wrong = wrong or f"{TOOK} {took_s:.1f} s"
    if peak > MOST_BYTES + UNFOLDED * len(value if isinstance(value, bytes) else repr(value)):
        wrong = wrong or f"{TOOK} {peak >> 10} KiB"
    return refused, wrong


# -- who speaks


def _identity(letter: bytes) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(letter * 32))


KEY = MeshKey(b"k" * 32)
ROOT, ME, OTHER = map(_identity, (b"r", b"m", b"o"))
ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{ME.peer_id}"
VERSIONS = Versions("0.1", "2.13.0+cpu", "3.11.7")
DEVICE = DeviceProfile("cpu", "a processor", 1 << 33, 1e11, 8, "AMD AVX2", VERSIONS, "5ba1", 16, True, True)
LINK = LinkProfile(0.01, 1e6, NOW, (0.008, 0.02), (9e5, 2e6))
PLAN = Plan(
    2,
    (Pipeline(2, (Stage(0, 1, (Member("a", 2),), 2, 2, "bf16"), Stage(1, 3, (Member("b", 1), Member("c", 1)), 1, 1))),),
    Predicted(1.0, 4.0, 0.5),
    (LeftOut("d", "it is slow"),),
)
CERTIFICATE = certify(ROOT, b"", ROOT.peer_id, ME.peer_id, "own", "an invite", NOW)
ADMINS = certify(ROOT, b"", ROOT.peer_id, OTHER.peer_id, "admin", "", NOW)
OF_AN_ADMIN = certify(OTHER, ADMINS, ROOT.peer_id, ME.peer_id, "own", "an invite", NOW)
GRANT = Grant(ROOT.peer_id, ROOT.peer_id, ME.peer_id, "ab12", "own", 3, NOW)
LAYOUT = {"a": (torch.float32, (2,)), "b": (torch.float32, ())}
DIGEST = b"d" * 32


def members() -> Members:
    return Members(ROOT.peer_id, CERTIFICATE, clock=lambda: NOW)


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def sealed_body(kind: str, body: bytes) -> bytes:
    """What a hostile member of the mesh can send: any content, correctly signed."""
    covered = packed(["meshcee record 2", kind, ME.peer_id, UNTIL, body])
    signature = ME.sign(covered)
    return packed([kind, ME.peer_id, UNTIL, body, signature, b"", KEY.mac(covered + signature)])


def token_of(value: Any, by: Identity = ROOT) -> str:
    """The text of an invite, of [addresses, grant], signed and with the right sum."""
    addresses, grant = value
    told = packed(["meshcee invite 1", *grant]) if isinstance(grant, list) else grant
    body = packed([addresses, told, by.sign(told) if isinstance(told, bytes) else b""])
    data = hashlib.sha256(body).digest()[:CHECK_BYTES] + body
    return "meshcee2." + base64.urlsafe_b64encode(data).decode().rstrip("=")


# -- frames and handshakes

FRAMES = (
    Frame("hello", {"version": 4, "names": ["a", {"b": None}]}),
    Frame("input", {"round": 1}, [b"x" * 100, b"", b"y" * 3000]),
    Frame("news", {}, [b"z"] * 9),
)
SMALL = Limits(payload_bytes=64 << 10, header_bytes=16 << 10)


def encoded(check: bool) -> list[bytes]:
    encoder = Encoder(SMALL, check)
    found = []
    for frame in FRAMES:
        head, _ = encoder.head(frame, [len(p) for p in frame.payloads])
        found.append(b"".join((head, *encoder.chunks(views(frame)))) + encoder.control(3, 70_000) + encoder.control(5))
    return found


def head(value: Any) -> None:
    """Of a frame: [kind, header, sizes of payloads]."""
    body = packed(value)
    word = int.from_bytes(MAGIC + bytes([FRAME_VERSION, DATA]), "big") << 32 | len(body)
    Decoder(SMALL, check=False).feed(struct.pack("!QQ", word, 0) + body)


class Said:
    """A stream whose other side says these frames, whatever it hears. `due` makes a frame of what was sent until then."""

    def __init__(self, due: Sequence[Callable[[list[Frame]], Frame]]) -> None:
        self.peer_id = ME.peer_id
        self._due, self._sent = list(due), list[Frame]()

    async def send(self, frame: Frame) -> None:
        self._sent.append(Frame(frame.kind, msgpack.unpackb(packed(dict(frame.header)))))

    async def recv(self) -> Frame:
        if not self._due:
            raise StreamClosed("it is over")
        return self._due.pop(0)(self._sent)


def finished(work: Coroutine[Any, Any, object]) -> object:
    """What it returns; nothing in it waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


RIGHT = b"p" * 32  # stands for the proof that is right
HELLO = {"version": handshake.PROTOCOL_VERSION, "software": "0", "peer": ME.peer_id, "to": OTHER.peer_id}
HELLO |= {"purpose": "gossip", "nonce": b"n" * 32, "shown": CERTIFICATE, "direct": b"k" * 32}
ANSWER = {"version": handshake.PROTOCOL_VERSION, "software": "0", "peer": ME.peer_id, "nonce": b"n" * 32}
ANSWER |= {"shown": CERTIFICATE, "proof": RIGHT}


def frame_of(value: Any) -> Frame:
    """As a decoder gives it: [kind, header]."""
    kind, header = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if not isinstance(kind, str) or len(kind) > MAX_KIND_CHARS or not isinstance(header, dict):
        raise ProtocolError("a decoder gives none")
    return Frame(kind, header)


def accept(value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        return
    hello, proof = map(frame_of, value)

    def proving(sent: list[Frame]) -> Frame:
        if proof.header.get("proof") != RIGHT:
            return proof
        right = handshake.prove(KEY.secret, "dialer", hello.header, sent[-1].header)
        return Frame(proof.kind, {**proof.header, "proof": right})

    direct = Direct(["/ip4/0.0.0.0/tcp/0"], 0, None)  # type: ignore[arg-type]  # nobody waits
    direct.ports[4] = 1
    stream: Any = Said([lambda sent: hello, proving])
    path = direct.here([ADDRESS])
    finished(handshake.accept(stream, OTHER.peer_id, KEY.secret, members=members(), path=path))


def dial(value: Any) -> None:
    answer = frame_of(value)

    def answering(sent: list[Frame]) -> Frame:
        header = answer.header
        if header.get("proof") == RIGHT and {"version", "peer", "nonce", "shown"} <= header.keys():
            header = {**header, "proof": handshake.prove(KEY.secret, "acceptor", sent[0].header, header)}
        return Frame(answer.kind, header)

    stream: Any = Said([answering])
    finished(handshake.dial(stream, OTHER.peer_id, "gossip", KEY.secret, members=members()))


# -- records

RECORDS: tuple[Record, ...] = (
    PeerRecord(
        ME.peer_id, NOW, "ann", (ADDRESS,), "lab", DEVICE, True, True, False, 900.0, "ab", 1, "0.1", ("x",), (("s", 9),)
    ),
    LinkRecord(ME.peer_id, NOW, ((OTHER.peer_id, LINK),)),
    LeaseRecord(ME.peer_id, NOW, 7, True),
    RunRecord(ME.peer_id, NOW, "gpt", (1, 2), 30, 1.5, PLAN.to_json()),
    RevokedRecord(ME.peer_id, NOW, (OTHER.peer_id,), ("an invite",)),
)
FORGED = (ProtocolError, NotPermittedError)


def record(kind: type[Record], wire: Any) -> None:
    """Read as every peer does, and used as some do."""
    found = open_sealed(kind, ME.peer_id, sealed_body(kind.kind, packed(wire)), KEY)
    roster: Roster[Record] = Roster(8.0)
    roster.absorb({ME.peer_id: found}, NOW, 5.0)
    found.to_wire()
    if isinstance(found, PeerRecord) and found.device is not None:
        str(class_of(found.device))
    if isinstance(found, RunRecord) and found.plan is not None:
        plan_table(Plan.from_json(found.plan), {})
    if isinstance(found, RevokedRecord):
        members().learn(RevokedList(ME.peer_id, found.sent_at, frozenset(found.peers), frozenset(found.invites)))


def envelope(data: Any) -> None:
    """Nodes that store ask `place`, which never raises; then whoever reads."""
    place(data, KEY, None, members())
    learn_list(data, KEY, Limits(), members(), NOW)
    check(data, KEY)


# -- jobs

BLOCK = BlockCost("h", 1e6, 4000, 4000, 1000, 100, 100)
TIMES = BlockTimes(
    (0, 1), (1, 2), tuple(((((0.1, 0.2, 0.3),) * 2),) * 2 for _ in range(3)), (0.01, 0.01), (1e-4, 1e-4, 1e-4)
)


def planning() -> list[Any]:
    """What a coordinator plans from: a request of an owner, and figures that peers have published."""
    costs = JobCosts([BLOCK] * 3, 8, None, alike=(0, 1, 1), tied=((0, 2, 4000),), feeds=((100, (0,)),))
    devices = {p: plain(replace(DEVICE, name=p, host="")) for p in "abc"}
    wires = [[a, b, [0.01, 0.02, 9e5, 1e6, 2e6]] for a in "abc" for b in "abc" if a != b]
    return [[plain(PlanRequest(costs, {"a": TIMES})), devices, wires, {"a": "lab"}]]


def plan_for(value: Any) -> None:
    try:
        request, devices, wires, hints = value
        read_devices = {
            p: PeerRecord.from_wire({**_peer(), "device": one}, ME.peer_id, "x") for p, one in devices.items()
        }
        found = {p: record.device for p, record in read_devices.items() if record.device is not None}
        links = {
            (a, b): LinkProfile(low, mid, 0.0, (low, high), (least, most))
            for a, b, (low, high, least, mid, most) in wires
        }
        links = {pair: link for pair, link in links.items() if found.keys() >= {*pair}}
        places = {p: hint for p, hint in hints.items() if isinstance(hint, str)}
    except (TypeError, ValueError, AttributeError):
        raise ProtocolError("records have other fields") from None
    frame = Frame(messages.PLAN_REQUEST, {}, [packed(request)])
    PlanRequest.from_frame(frame).plan(Measured(found, links, {}, places))


def _peer() -> dict[str, Any]:
    return RECORDS[0].to_wire()


@functools.cache
def offered() -> tuple[Offer, Frame]:
    job = Job(
        model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        loss=nn.functional.mse_loss,
        data=[(torch.zeros(2), torch.zeros(2))] * 4,
        optimizer=Optimizer("AdamW", lr=0.1, groups={"*.bias": {"weight_decay": 0.0}}),
        batch_size=4,
        steps=1,
        clip_norm=1.0,
    )
    captured = capture(job)
    blocks = captured.train.num_blocks
    stages = (Stage(0, 1, (Member("a", 2),), 2, 2), Stage(1, blocks, (Member("b", 2),), 1, 1))
    plan = Plan(2, (Pipeline(2, stages),), Predicted(1.0, 4.0, 0.5), (LeftOut("c", "slow"),))
    terms, addresses = Terms.of(job, captured, 60.0), {"a": ("/ip4/192.0.2.1/tcp/1",)}
    made = Offer(terms, plan, (0, 1), (1, "a"), "b", captured.train, None, addresses, True, ("a",), "run", "o")  # type: ignore[arg-type]
    return made, made.frame(("a",))


def offer(value: Any) -> None:
    """[header, body]: its graphs are a target of their own."""
    made, frame = offered()
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], dict):
        return
    header, body = value
    found = Offer.from_frame(Frame(frame.kind, header, [packed(body), b""]), [made.train], "b", "o")
    sizes = found.max_payload_bytes, found.state_bytes, found.max_in_flight, found.flops
    assert all(size is not None for size in (*sizes, found.place, found.boundaries, found.expected_optimizer))


@functools.cache
def graphs() -> list[bytes]:
    jobs = zoo.make("cnn"), job_of("CustomFunctions")
    return [*(encode_program(capture(job).train) for job in jobs), encode_program(offered()[0].train)]


def graph(data: Any) -> None:
    assert decode_program(encode_program(decode_program(data))) is not None


def arriving() -> list[Any]:
    """What stages send each other: the tensors as they are, and by each codec."""
    values = [torch.linspace(-1, 1, 96).reshape(4, 24), torch.arange(5), None, 3, 0.5]
    found: list[Any] = []
    for name in CODECS:
        coder = Coder(name)
        meta, payloads = tensors.pack(values, lambda index, tensor, coder=coder: coder.encode(tensor, 1))
        found.append([name, meta, [bytes(payload) for payload in payloads]])
    return found


def arrive(value: Any) -> None:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], list):
        return
    name, meta, payloads = value
    if not all(isinstance(payload, bytes) for payload in payloads):
        return
    codecs = accepted(name) if isinstance(name, str) and name in CODECS else ()
    for one in tensors.unpack(meta, [bytearray(p) for p in payloads], codecs=codecs, limit_bytes=1 << 20):
        assert not isinstance(one, torch.Tensor) or one.nbytes <= 1 << 20


def state(data: Any) -> None:
    StateReceiver(LAYOUT).take(Frame(messages.STATE, {}, [data]))


def journal(body: Any) -> None:
    told = packed(body)
    Seal.read(packed([ME.peer_id, told, ME.sign(covered(JOURNAL, ME.peer_id, told))]))


SEALED = {"job": "gpt", "run": "gpt-1", "incarnation": 1, "at": NOW}
SEALED |= {"files": [["run.json", 3, DIGEST], ["reports.jsonl", 0, DIGEST]]}


ALONE = Plan(2, (Pipeline(1, (Stage(0, 1, (Member("a", 2),), 1, 1, "bf16"),)),))
CODED = {"codec": "bf16", "error": 0.001, "raw_bytes": 100, "wire_bytes": 50}
APPLIED = {"codecs": {"f": CODED}, "seconds": {"f": 1.0, "wait": 6.0, "total": 10.0}, "norm": 1.0, "fed": 1e6}
APPLIED |= {"links": {"a": [None, 2e6, 1_500_000.0]}}


def applied(told: Mapping[str, Any]) -> None:
    """A member's word of a step, and what the owner makes of it."""
    answers = Answers(Round(0, 0, (1.0,)), 1, ())
    place: Any = SimpleNamespace(plan=ALONE, pipeline=0, index=0, peer="a")
    answers.apply(place, told)
    answers.observed()
    answers.limit(ALONE, {}, 10.0)
    CodecNews(ALONE).hear(answers)


def header(name: str, value: Any, reading: Callable[[Mapping[str, Any]], object]) -> Target:
    return Target(f"header: {name}", lambda: [value], lambda one: reading(one if isinstance(one, dict) else {}))


def payload(name: str, value: Any, reading: Callable[[bytes], object], *more: type[BaseException]) -> Target:
    return Target(f"payload: {name}", lambda: [packed(value)], reading, (ProtocolError, *more))


def frame(kind: str, *payloads: bytes) -> Frame:
    return Frame(kind, {}, payloads)


# -- files


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Until the process ends."""
    return tempfile.TemporaryDirectory(prefix="meshcee-targets-")


def file(data: bytes) -> Path:
    path = Path(folder().name) / "file"
    path.write_bytes(data)
    return path


def plan_file(data: Any) -> None:
    plan = read_plan(file(data))
    plan.hash(), plan_table(plan, {})


def checkpoint() -> list[Any]:
    parts = {"model-0.safetensors": {"a": torch.zeros(2)}, "optimizer-0.safetensors": {"a/step": torch.zeros(())}}
    files = {name: safetensors.torch.save(one) for name, one in parts.items()}
    about = {"format": 1, "next_step": 3, "micro_batch": 2, "job": {"seed": 1}, "name": "gpt", "persistent": ["a"]}
    table = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    return [[dumps({**about, "files": table}).encode(), *files.values()]]


def read_checkpoint(value: Any) -> None:
    """[manifest, model, optimizer]; the table in the manifest is right, unless the change was there."""
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, bytes) for one in value):
        return
    valid, place = checkpoint()[0], Path(folder().name) / "step-00000003"
    place.mkdir(exist_ok=True)
    manifest = value[0]
    for name, data, right in zip(("model-0.safetensors", "optimizer-0.safetensors"), value[1:], valid[1:]):
        (place / name).write_bytes(data)
        manifest = manifest.replace(*(hashlib.sha256(one).hexdigest().encode() for one in (right, data)))
    (place / "manifest.json").write_bytes(manifest)
    found = Checkpoint(place)
    assert found.next_step >= 0
    assert found.micro_batch >= 0
    found.verify()
    for state in (found.weights(found.names), found.optimizer(["a"])):
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())


ASKED = Asked("scans", 9, 1, 4, (("x", "float32", (2, 3)),), ((OTHER.peer_id, ("x",)),))
ENDED = MeshceeError, StreamClosed
TARGETS: tuple[Target, ...] = (
    Target("frames", lambda: encoded(True), lambda data: Decoder(SMALL).feed(data)),
    Target(
        "frames, sealed by their connection",
        lambda: encoded(False),
        lambda data: Decoder(SMALL, check=False).feed(data),
    ),
    Target("heads of frames", lambda: [[f.kind, dict(f.header), [len(p) for p in f.payloads]] for f in FRAMES], head),
    Target(
        "a hello and a proof", lambda: [[["hello", HELLO], ["proof", {"proof": RIGHT, "direct": []}]]], accept, ENDED
    ),
    Target("an answer", lambda: [["answer", ANSWER]], dial, ENDED),
    *(
        Target(f"{r.kind} record", lambda r=r: [r.to_wire()], functools.partial(record, type(r)), FORGED)  # type: ignore[misc]
        for r in RECORDS
    ),
    Target("envelopes", lambda: [seal(r, ME, KEY, UNTIL, certificate=CERTIFICATE) for r in RECORDS], envelope, FORGED),
    Target("certificates", lambda: [CERTIFICATE, OF_AN_ADMIN], lambda data: opened(data, ROOT.peer_id), FORGED),
    Target(
        "invites",
        lambda: [Token.sign(ROOT, (ADDRESS,), GRANT).encode(), ADDRESS],
        Token.parse,
        (UsageError, NotPermittedError),
    ),
    Target(
        "invites, signed",
        lambda: [[[ADDRESS], list(GRANT)]],
        lambda v: Token.parse(token_of(_pair(v))),
        (UsageError, NotPermittedError),
    ),
    Target("an invite that is shown", lambda: [GRANT.pack()], Grant.unpack),
    Target("requests for a plan", planning, plan_for, (ProtocolError, PlanError), share=0.01),
    Target(
        "offers",
        lambda: [[dict(offered()[1].header), msgpack.unpackb(offered()[1].payloads[0])]],
        offer,
        (ProtocolError, PlanError, UsageError),
        share=0.3,
    ),
    Target("graphs", graphs, graph, (GraphError,), share=0.5),
    Target("tensors", arriving, arrive),
    Target("weights", lambda: [safetensors.torch.save({"a": torch.zeros(2), "b": torch.zeros(())})], state),
    header("a question for data", plain(ASKED), lambda one: read(one, Asked, "a question for data").layout),
    header(
        "a question for samples",
        plain(Wanted(1, 2, 3, ((0, 0, 4),))),
        lambda one: read(one, Wanted, "a question for samples"),
    ),
    payload("recipes", {"a": [b"", "0" * 64]}, lambda data: StateReceiver(LAYOUT, recipes=True).follow(data)),
    payload(
        "digests",
        {"a": DIGEST, "b": DIGEST},
        lambda data: digests_in(frame(messages.KEEP, data, b"\x80"), (LAYOUT, {})),
    ),
    payload("names", ["a", "b"], lambda data: names_of(frame(messages.AGAIN, data), 0, {"a", "b"})),
    payload("spans", [["F", 0, 1.0, 2.0], ["wait", -1, 2.0, 2.5]], lambda data: read_spans([data])),
    payload("profiles", plain(TIMES), lambda data: BlockTimes.from_json(unpack(data, 1 << 20, "x"))),
    payload(
        "requests for a profile",
        plain(ProfileRequest((0,), None, (1, 2), (1.0,), "fp32", Optimizer("SGD", lr=1.0), {})),
        ProfileRequest.unpack,
        UsageError,
    ),
    payload(
        "meeting",
        ["k", b"v"],
        lambda data: Meeting(lambda k, v: None, 1.0).hear(*_pair(unpack(data, 1 << 16, "x"))),
        NotPermittedError,
    ),
    payload("a worker's words", plain(Confinement(("a",), ("b",), ())), lambda data: understood(data, Confinement)),
    payload("a worker's verdict", plain(Verdict("no")), lambda data: understood(data, Verdict)),
    Target("journals", lambda: [SEALED], journal, FORGED),
    header("epoch", {"epoch": [0, 1]}, messages.epoch_of),
    header("term", {"term": [1, "a"]}, messages.term_of),
    header("run", {"run": "r"}, messages.run_of),
    header(
        "step",
        Round(1, 0, (0.5, 0.25), ({"lr": 0.1},), tail=1).header(),
        lambda h: Round.from_header(h, forward_only=False, max_micro=8),
    ),
    header("copy", {"next_step": 1, "since": 0, "besides": [1]}, TakeCopy.from_header),
    header(
        "names",
        {"names": ["a", "b"]},
        lambda h: named_tensors(h, [torch.zeros(1), None], dict.fromkeys("ab", torch.zeros(1))),
    ),
    header("doing", dict(Doing(1, True, 5, ("a",)).frame().header), Doing.from_header),
    header("applied", APPLIED, applied),
    header("failed", error_header(PlanError("x"), of="a", lost="a"), lambda h: reported(h, "a", 3, str)),
    header("error", error_header(PlanError("x")), error_from),
    Target(
        "plan files",
        lambda: [dumps(PLAN.to_json()).encode(), dumps({"plan": PLAN.to_json()}).encode()],
        plan_file,
        (UsageError, PlanError),
    ),
    Target("checkpoints", checkpoint, read_checkpoint, (CheckpointError, UsageError), share=0.5),
    Target(
        "files of terms",
        lambda: [b'{"counter": 7, "accepted": [6, "a"]}'],
        lambda data: TermFile(file(data)).load(),
        (UsageError,),
    ),
    Target(
        "files of members",
        lambda: [
            dumps(
                {
                    "root": "r",
                    "key": "ab" * 32,
                    "certificate": "ab",
                    "lists": ["cd"],
                    "addresses": ["x"],
                    "others": ["y"],
                }
            ).encode()
        ],
        lambda data: Membership.read(file(data)),
        (),
    ),
)


def _pair(value: Any) -> Any:
    """A list of two; ProtocolError for what its reader is never given."""
    if not isinstance(value, list) or len(value) != 2:
        raise NotPermittedError("it is none")
    return value
