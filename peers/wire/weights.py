"""Weights on the wire: safetensors, a few tensors a frame, or how to come by them; checked against what is expected.

The idea: the receiver knows every name, type and shape from the graph before a byte arrives. So a frame that lies
about its size is refused and nothing is allocated for it. What both sides agree on in the end are the bits. The hash
covers every tensor, whether it was sent, made by recipe or still there, and one that came out differently is asked for
again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Annotated, NamedTuple

import msgpack
import safetensors
import safetensors.torch
import torch
from msgspec import Meta

from meshcee.capture.initial_state import InitialState
from meshcee.errors import ProtocolError
from meshcee.fields import read, unpack
from meshcee.files.tensor_files import Layout, byte_view
from peers.transport import Frame
from peers.wire import messages

__all__ = [
    "DIGEST_BYTES",
    "GROUP_BYTES",
    "SLACK_BYTES",
    "SLOWEST_BYTES_PER_S",
    "StateReceiver",
    "StateSender",
    "digest_of",
    "digests_in",
    "digests_of",
    "names_of",
    "state_frames",
]

DIGEST_BYTES = 32
GROUP_BYTES = 16 << 20  # tensors are grouped into frames of about this size
RECIPES_BYTES = 1 << 20  # and recipes into frames of about this
AS_BEFORE = b""  # the recipe for what the receiver may still have
Digests = dict[str, Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]]
SLACK_BYTES = 1 << 20  # names and offsets that safetensors adds
SLOWEST_BYTES_PER_S = 1 << 20  # weights may take as long as a link of this speed needs


class Recipe(NamedTuple):
    """How one tensor is made, and what it then is."""

    recipe: bytes
    digest: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]


Recipes = Annotated[dict[str, Recipe], Meta(max_length=1 << 16)]


class StateSender:
    """Frames of a state. One tensor, or the tensors of one frame, are in memory at a time if `state` makes them on demand.

    `known` are digests of what is not in `state`, but held by peers.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], known: Mapping[str, str] | None = None) -> None:
        self._state = state
        self._known = known or {}
        self._digests: dict[str, str] = {}

    def frames(self, names: Iterable[str], *, recipes: bool = False, held: Collection[str] = ()) -> Iterator[Frame]:
        """STATE frames that together hold each of these once, then STATE_END with the hash of all so far.

        `recipes` allows RECIPES frames for tensors of which it is known how they are made; of those `held`, which the receiver
        may have, an empty recipe is sent.
        """
        group: dict[str, torch.Tensor] = {}
        made: dict[str, tuple[bytes, str]] = {}
        made_bytes = 0
        for name in names:
            way = self._way_of(name, recipes=recipes, held=name in held)
            if isinstance(way, bytes):
                made[name] = (way, self._digests[name])
                made_bytes += len(way) + len(name) + len(self._digests[name])
                if made_bytes > RECIPES_BYTES:
                    yield Frame(messages.RECIPES, {}, [msgpack.packb(made)])
                    made, made_bytes = {}, 0
                continue
            if group and sum(t.nbytes for t in group.values()) + way.nbytes > GROUP_BYTES:
                # Whoever waits for this frame to be sent should not hold the tensors as well.
                payload, group = safetensors.torch.save(group), {}
                yield Frame(messages.STATE, {}, [payload])
                del payload
            # safetensors refuses views that share memory: tied parameters are already one entry, a clone is rare.
            group[name] = way.clone() if way._is_view() else way
            del way
        if made:
            yield Frame(messages.RECIPES, {}, [msgpack.packb(made)])
        if group:
            payload, group = safetensors.torch.save(group), {}
            yield Frame(messages.STATE, {}, [payload])
            del payload
        yield Frame(messages.STATE_END, {"hash": self.hash})

    def _way_of(self, name: str, *, recipes: bool, held: bool) -> bytes | torch.Tensor:
        """How a value gets there: by a recipe, or as it is."""
        if name in self._known:
            self._digests[name] = self._known[name]
            return AS_BEFORE
        tensor = self._state[name].detach().cpu().contiguous()
        self._digests[name] = digest_of(tensor)
        recipe = AS_BEFORE if held else None
        if recipes and isinstance(self._state, InitialState):
            recipe = self._state.recipe(name)
        return tensor if recipe is None else recipe

    @property
    def hash(self) -> str:
        return _hash(self._digests)


def state_frames(state: Mapping[str, torch.Tensor]) -> Iterator[Frame]:
    """All of a state, as values."""
    return StateSender(state).frames(state)


def names_of(frame: Frame, part: int, known: Set[str]) -> list[str]:
    """What an AGAIN frame asks for of the weights (part 0) or the optimizer's state (1): some of the known names, each
    once. Raises ProtocolError."""
    what = "the names that it asks for again"
    most = 9 + sum(9 + 4 * len(name) for name in known)  # as msgpack
    if part >= len(frame.payloads):
        raise ProtocolError(f"{what} did not come")
    names = read(unpack(frame.payloads[part], most, what), list[str], what)
    if len(set(names)) != len(names) or not set(names) <= known:
        raise ProtocolError("it asked again for weights that it was not offered")
    return names


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 over type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)};".encode())
    digest.update(byte_view(tensor))
    return digest.hexdigest()


def _hash(digests: Mapping[str, str]) -> str:
    """SHA-256 over names and digests, in name order."""
    return hashlib.sha256("".join(f"{name}:{digests[name]};" for name in sorted(digests)).encode()).hexdigest()


class StateReceiver:
    """Collects STATE frames. `expected` maps each name to its type and shape; anything else is refused.

    `partial`: not all of it need come, as of an optimizer that has not met every parameter yet. `recipes`: RECIPES
    frames are followed; what then has other bits than the sender's is in `unequal`, and may come as values. `held` gives
    what may be here of a name with a digest, for empty recipes. `late`: what is unequal may be taken from elsewhere later.
    """

    def __init__(
        self,
        expected: Layout,
        *,
        partial: bool = False,
        recipes: bool = False,
        held: Callable[[str, str], Iterable[torch.Tensor]] = lambda name, digest: (),
        late: bool = False,
    ) -> None:
        self._expected = dict(expected)
        self._partial = partial
        self._recipes = recipes
        self._held = held
        self._late = late
        self.digests: dict[str, str] = {}  # of what is unequal too: what it must be
        self.state: dict[str, torch.Tensor] = {}
        self.unequal: set[str] = set()
        self._asked = False  # for what is unequal: it must come now
        self.hash = ""  # of all of it, once `take` has returned True
        largest = max((dtype.itemsize * math.prod(shape) for dtype, shape in self._expected.values()), default=0)
        self.max_payload_bytes = max(largest, GROUP_BYTES) + SLACK_BYTES

    def take(self, frame: Frame) -> bool:
        """Add one frame; True once STATE_END has confirmed that everything expected is here, unharmed, or `unequal`."""
        if frame.kind == messages.STATE_END:
            absent = set() if self._partial else self._expected.keys() - self.state.keys()
            missing = sorted(absent | self.unequal if self._asked and not self._late else absent - self.unequal)
            self._asked = True
            if missing:
                raise ProtocolError(f"weights of {missing[0]} and {len(missing) - 1} others never arrived")
            self.hash = _hash(self.digests)
            if not self.unequal and messages.need(frame.header, "hash", str) != self.hash:
                raise ProtocolError("the weights that arrived are not those that were sent: their hash differs")
            return True
        if frame.kind not in (messages.STATE, messages.RECIPES) or len(frame.payloads) != 1:
            raise ProtocolError(f"expected weights, got a frame of kind {frame.kind!r}")
        if frame.kind == messages.RECIPES:
            self.follow(bytes(frame.payloads[0]))
            return False
        try:
            tensors = safetensors.torch.load(bytes(frame.payloads[0]))
        except (safetensors.SafetensorError, ValueError, KeyError) as error:
            raise ProtocolError(f"weights are not valid safetensors: {error}") from error
        for name, tensor in tensors.items():
            dtype, shape = self._awaited(name)
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ProtocolError(
                    f"weights of {name!r} are {tensor.dtype} {tuple(tensor.shape)}, the graph says {(dtype, shape)}"
                )
            self._keep(name, tensor, digest_of(tensor))
        return False

    @property
    def lacking(self) -> dict[str, tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """Digest, type and shape of what is unequal."""
        return {name: (self.digests[name], self._expected[name]) for name in sorted(self.unequal)}

    def fill(self, find: Callable[[str], torch.Tensor | None]) -> None:
        """Take what has been found elsewhere: `find` gives it by digest, checked, each time in memory of its own."""
        for name, (digest, _) in self.lacking.items():
            if (tensor := find(digest)) is not None:
                self._keep(name, tensor, digest)

    def spend(self) -> Mapping[str, torch.Tensor]:
        """The state, for who copies it: a tensor that has been looked up is held here no more."""
        return _Spent(self.state)

    def _awaited(self, name: object) -> tuple[torch.dtype, tuple[int, ...]]:
        if not isinstance(name, str) or name not in self._expected or name in self.state:
            raise ProtocolError(f"weights of {str(name)[:200]!r} were not expected")
        return self._expected[name]

    def _keep(self, name: str, tensor: torch.Tensor, digest: str) -> None:
        self.state[name] = tensor
        self.digests[name] = digest
        self.unequal.discard(name)

    def follow(self, data: bytes) -> None:
        """Make what the recipes say."""
        from meshcee.capture.recipes import decode

        if not self._recipes:
            raise ProtocolError("recipes for weights have no meaning here")
        made = read(unpack(data, len(data), "a set of recipes"), Recipes, "a set of recipes")
        for name, (recipe, digest) in made.items():
            dtype, shape = self._awaited(name)
            if name in self.unequal:
                raise ProtocolError(f"the recipe for {name!r} came twice")
            if recipe == AS_BEFORE:
                here = (t for t in self._held(name, digest) if (t.dtype, tuple(t.shape)) == (dtype, shape))
                tensor = next((t.clone() for t in here if digest_of(t) == digest), None)
            else:
                found, view = decode(recipe, dtype, shape)
                tensor = found.tensor(view).contiguous()
                if digest_of(tensor) != digest:  # another kind of processor may draw other bits
                    tensor = None
            if tensor is None:
                self.unequal.add(name)
                self.digests[name] = digest
            else:
                self._keep(name, tensor, digest)


class _Spent(Mapping[str, torch.Tensor]):
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state.pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def digests_of(weights: Mapping[str, str], optimizer: Mapping[str, str]) -> list[bytes]:
    """The payloads that say what a copy is."""
    return [msgpack.packb({n: bytes.fromhex(d) for n, d in part.items()}) for part in (weights, optimizer)]


def digests_in(frame: Frame, layouts: tuple[Layout, Layout]) -> tuple[dict[str, str], dict[str, str]]:
    """They, by name: all weights, and of the optimizer's state what there is. Raises ProtocolError."""
    what = "what describes a copy of the stage"
    if len(frame.payloads) != len(layouts):
        raise ProtocolError(f"{what} has {len(frame.payloads)} parts")
    found: list[dict[str, str]] = []
    for payload, layout in zip(frame.payloads, layouts, strict=True):
        most = 9 + sum(18 + 4 * len(name) + DIGEST_BYTES for name in layout)  # as msgpack
        table = read(unpack(payload, most, what), Digests, what)
        if not table.keys() <= layout.keys():
            raise ProtocolError(f"{what} names what is not in the stage")
        found.append({name: digest.hex() for name, digest in table.items()})
    if found[0].keys() != layouts[0].keys():
        raise ProtocolError(f"{what} lacks weights")
    return found[0], found[1]
