"""Weights on the wire: safetensors, a few tensors a frame, checked against what the receiver expects.

The idea: the receiver knows every name, type and shape from the graph before a byte arrives, so a frame that lies
about its size is refused and nothing is allocated for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import safetensors
import safetensors.torch
import torch

from meshcee.errors import ProtocolError
from peers import messages
from peers.transport.base import Frame

__all__ = ["SLOWEST_BYTES_PER_S", "ReplicaReceiver", "StateReceiver", "hash_state", "state_frames"]

GROUP_BYTES = 16 << 20  # tensors are grouped into frames of about this size
SLACK_BYTES = 1 << 20  # names and offsets that safetensors adds
SLOWEST_BYTES_PER_S = 1 << 20  # weights may take as long as a link of this speed needs


def state_frames(state: Mapping[str, torch.Tensor]) -> Iterator[Frame]:
    """STATE frames that together hold every tensor once, then STATE_END with their hash."""
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in state.items():
        if group and size + tensor.nbytes > GROUP_BYTES:
            yield Frame(messages.STATE, {}, [safetensors.torch.save(group)])
            group, size = {}, 0
        # safetensors refuses views that share memory: tied parameters are already one entry, a clone is rare.
        group[name] = (
            tensor.detach().cpu().contiguous().clone() if tensor._is_view() else tensor.detach().cpu().contiguous()
        )
        size += tensor.nbytes
    if group:
        yield Frame(messages.STATE, {}, [safetensors.torch.save(group)])
    yield Frame(messages.STATE_END, {"hash": hash_state(state)})


def hash_state(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class StateReceiver:
    """Collects STATE frames. `expected` maps each name to its type and shape; anything else is refused.

    `partial`: not all of it need come, as of an optimizer that has not met every parameter yet.
    """

    def __init__(self, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, partial: bool = False) -> None:
        self._expected = dict(expected)
        self._partial = partial
        self.state: dict[str, torch.Tensor] = {}
        self.hash = ""  # of all of it, once `take` has returned True
        largest = max((dtype.itemsize * _count(shape) for dtype, shape in self._expected.values()), default=0)
        self.max_payload_bytes = max(largest, GROUP_BYTES) + SLACK_BYTES

    def take(self, frame: Frame) -> bool:
        """Add one frame; True once STATE_END has confirmed that everything expected is here, unharmed."""
        if frame.kind == messages.STATE_END:
            missing = sorted(self._expected.keys() - self.state.keys())
            if missing and not self._partial:
                raise ProtocolError(f"weights of {missing[0]} and {len(missing) - 1} others never arrived")
            self.hash = hash_state(self.state)
            if messages.need(frame.header, "hash", str) != self.hash:
                raise ProtocolError("the weights that arrived are not those that were sent: their hash differs")
            return True
        if frame.kind != messages.STATE or len(frame.payloads) != 1:
            raise ProtocolError(f"expected weights, got a frame of kind {frame.kind!r}")
        try:
            tensors = safetensors.torch.load(bytes(frame.payloads[0]))
        except (safetensors.SafetensorError, ValueError, KeyError) as error:
            raise ProtocolError(f"weights are not valid safetensors: {error}") from error
        for name, tensor in tensors.items():
            if name not in self._expected or name in self.state:
                raise ProtocolError(f"weights of {name!r} were not expected")
            if (tensor.dtype, tuple(tensor.shape)) != self._expected[name]:
                raise ProtocolError(
                    f"weights of {name!r} are {tensor.dtype} {tuple(tensor.shape)}, the graph says {self._expected[name]}"
                )
            self.state[name] = tensor
        return False


class ReplicaReceiver(StateReceiver):
    """Of a further member of a group: only the hash of its state, to be compared with the state that another sent."""

    def __init__(self) -> None:
        super().__init__({})

    def take(self, frame: Frame) -> bool:
        if frame.kind != messages.STATE_END:
            raise ProtocolError(f"expected the hash of weights, got a frame of kind {frame.kind!r}")
        self.hash = messages.need(frame.header, "hash", str)
        return True


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
