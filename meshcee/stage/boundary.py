"""Slices between groups of different width: what each member sends to each, and how the parts become one again.

The idea: rows that two neighbours have in common travel between them, once. Values that are computed from parameters alone are
whole at every member. These values, sizes and the generator's state come from the first of the senders. Gradients go back the way
that the values came. So the sum over the group at the end of the step counts each gradient exactly once. What does not fit is
refused while its sender is known: a kernel's error would be the receiver's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from meshcee.capture import Batch, Program, StageSpec, Value
from meshcee.errors import ProtocolError
from meshcee.role import Piece

if TYPE_CHECKING:
    from meshcee.capture.graph.rows import Cut

__all__ = ["Boundaries", "Boundary"]

GPU_STATE_BYTES = 16  # a seed and an offset


@dataclass(frozen=True)
class Boundary:
    """The values that cross between two stages, in wire order. Without `cuts` one member sends all to one member."""

    values: tuple[Value, ...]
    cuts: tuple[Cut, ...] | None = None

    # -- forward -----------------------------------------------------------------------------------------------------

    def split(self, sent: Sequence[Any], rng: Any, rows: tuple[int, int], targets: Sequence[Piece]) -> list[list[Any]]:
        """For each target the values of an F frame, the generator's state last; `rows` are the sender's."""
        if self.cuts is None:
            return [[*sent, rng] for _ in targets]
        frames = []
        for piece in targets:
            leads = piece.first == piece.rows[0]  # we are the first sender that this target hears of
            values = [
                self._take(i, value, rows, piece) if cut.dim is not None else value if leads else None
                for i, (value, cut) in enumerate(zip(sent, self.cuts, strict=True))
            ]
            frames.append([*values, rng if leads else None])
        return frames

    def join(
        self, arrived: Mapping[str, Sequence[Any]], rows: tuple[int, int], sources: Sequence[Piece]
    ) -> tuple[list[Any], Any]:
        """The values of one micro-batch and the generator's state, from all sources; `rows` are the receiver's.

        ProtocolError, with a note of who sent it, for values of another type or shape, or a state that no generator has.
        """
        parts = [arrived[piece.peer] for piece in sources]
        for piece, part in zip(sources, parts):
            with _of(piece.peer):
                self._check(part, piece, leads=piece is sources[0])
        first = parts[0]
        if self.cuts is None:
            return list(first[:-1]), first[-1]
        values: list[Any] = []
        for i, cut in enumerate(self.cuts):
            if cut.dim is not None:
                values.append(self._concatenated(i, [part[i] for part in parts], sources))
            elif cut.per_sample:
                a, b = sources[0].rows
                values.append(first[i] * (rows[1] - rows[0]) // (b - a))
            else:
                values.append(first[i])
        return values, first[-1]

    # -- backward ----------------------------------------------------------------------------------------------------

    def split_back(
        self, gradients: Sequence[torch.Tensor | None], rows: tuple[int, int], sources: Sequence[Piece]
    ) -> list[list[torch.Tensor | None]]:
        """For each source the gradients of what it had sent; `rows` are those of the member that sends them back."""
        if self.cuts is None:
            return [list(gradients) for _ in sources]
        return [
            [
                self._take(i, g, rows, piece) if g is not None and cut.dim is not None else None if k else g
                for i, (g, cut) in enumerate(zip(gradients, self.cuts, strict=True))
            ]
            for k, piece in enumerate(sources)
        ]

    def join_back(
        self, arrived: Mapping[str, Sequence[torch.Tensor | None]], targets: Sequence[Piece], sent: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """The gradients of what was `sent`, from all targets.

        ProtocolError, with a note of who sent it, for gradients of another type or shape.
        """
        parts = [arrived[piece.peer] for piece in targets]
        for piece, part in zip(targets, parts):
            with _of(piece.peer):
                self._check_back(part, piece.end - piece.first, sent, _count(targets))
        if self.cuts is None:
            return list(parts[0])
        out: list[torch.Tensor | None] = []
        for i, cut in enumerate(self.cuts):
            column = [part[i] for part in parts]
            present = [g for g in column if g is not None]
            if not present:
                out.append(None)
            elif cut.dim is not None:
                out.append(self._concatenated(i, self._filled(i, column, present[0], targets), targets))
            else:
                total = present[0]
                for gradient in present[1:]:
                    total = total + gradient
                out.append(total)
        return out

    # -- parts -------------------------------------------------------------------------------------------------------

    def _check(self, part: Sequence[Any], piece: Piece, *, leads: bool) -> None:
        """What a source has sent. Only of the first one do values count that every member has whole."""
        if len(part) != len(self.values) + 1:
            raise ProtocolError(f"an activation frame has {len(self.values)} values and the generator's state")
        samples = piece.end - piece.first
        for i, (value, given) in enumerate(zip(self.values, part)):
            counts = leads or (self.cuts is not None and self.cuts[i].dim is not None)
            if counts and not _fits(value, given, samples):
                raise ProtocolError(f"value {i} of {samples} samples arrived as {_told(given)}")
        if leads and not _is_generators(part[-1]):
            raise ProtocolError(f"a generator's state arrived as {_told(part[-1])}")

    def _check_back(self, part: Sequence[Any], samples: int, sent: Sequence[Any], all_samples: int) -> None:
        """What a target has sent back, for its own rows of what was sent."""
        if len(part) != len(self.values):
            raise ProtocolError(f"a gradient frame has {len(self.values)} values")
        for i, (value, given, own) in enumerate(zip(self.values, part, sent)):
            shape = list(value.to_wire(own).shape) if isinstance(own, torch.Tensor) else []
            if self.cuts is not None and self.cuts[i].dim is not None:
                dim = self._wire_dim(i)
                shape[dim] = shape[dim] // all_samples * samples
            if given is not None and (
                not isinstance(own, torch.Tensor) or [given.dtype, *given.shape] != [own.dtype, *shape]
            ):
                raise ProtocolError(f"gradient {i} of {samples} samples arrived as {_told(given)}")

    def _wire_dim(self, index: int) -> int:
        assert self.cuts is not None
        dim = self.cuts[index].dim
        assert dim is not None
        return self.values[index].order.index(dim)

    def _take(self, index: int, value: torch.Tensor, rows: tuple[int, int], piece: Piece) -> torch.Tensor:
        """The piece's rows of a tensor on the wire."""
        if (piece.first, piece.end) == rows:
            return value
        dim = self._wire_dim(index)
        each = value.shape[dim] // (rows[1] - rows[0])
        return value.narrow(dim, (piece.first - rows[0]) * each, (piece.end - piece.first) * each).contiguous()

    def _concatenated(self, index: int, parts: Sequence[Any], pieces: Sequence[Piece]) -> torch.Tensor:
        dim, value = self._wire_dim(index), self.values[index]
        for part, piece in zip(parts, pieces):
            count = piece.end - piece.first
            if part.shape[dim] % count or part.shape[dim] // count * _count(pieces[:1]) != parts[0].shape[dim]:
                raise ProtocolError(f"rows of {value.name} arrived as {tuple(part.shape)} for {count} samples")
            if any(part.shape[d] != parts[0].shape[d] for d in range(part.dim()) if d != dim):
                raise ProtocolError(f"rows of {value.name} arrived in different shapes")
        return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts], dim)

    def _filled(
        self, index: int, column: Sequence[torch.Tensor | None], like: torch.Tensor, targets: Sequence[Piece]
    ) -> list[torch.Tensor]:
        """Zeros where a member had no gradient for its rows while another had."""
        dim = self._wire_dim(index)
        known = next(_count([piece]) for g, piece in zip(column, targets) if g is like)
        filled = []
        for gradient, piece in zip(column, targets):
            if gradient is None:
                shape = list(like.shape)
                shape[dim] = shape[dim] // known * _count([piece])
                gradient = like.new_zeros(shape)
            filled.append(gradient)
        return filled


def _count(pieces: Sequence[Piece]) -> int:
    return sum(piece.end - piece.first for piece in pieces)


@contextlib.contextmanager
def _of(peer: str) -> Iterator[None]:
    """Whoever reports an error from in here is to say whose frame it was."""
    try:
        yield
    except ProtocolError as error:
        error.add_note(peer)
        raise


def _fits(value: Value, given: Any, samples: int) -> bool:
    """Whether it may be this value for so many samples, as it travels."""
    if not value.is_tensor:
        return type(given) is int
    if not isinstance(given, torch.Tensor) or not value.admits(given, on_wire=True):
        return False
    sizes = zip(value.from_wire(given).shape, value.sizes(samples), value.shape)
    return all(own == wanted for own, wanted, dim in sizes if isinstance(dim, Batch))


def _is_generators(rng: Any) -> bool:
    """A seed, nothing, or the state of a generator, of a GPU by its size alone."""
    if rng is None or type(rng) is int:
        return True
    if not isinstance(rng, torch.Tensor) or rng.dtype != torch.uint8 or rng.dim() != 1:
        return False
    if len(rng) == GPU_STATE_BYTES:
        return True
    try:
        torch.Generator().set_state(rng)
    except (RuntimeError, TypeError):
        return False
    return True


def _told(given: Any) -> str:
    return f"{given.dtype}{tuple(given.shape)}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"


@dataclass(frozen=True)
class Boundaries:
    """Of one stage: what it receives and what it sends."""

    before: Boundary
    after: Boundary

    @classmethod
    def uncut(cls, spec: StageSpec) -> Boundaries:
        """One member here, one before, one behind."""
        return cls(Boundary(spec.received), Boundary(spec.sent))

    @classmethod
    def of(cls, program: Program, spec: StageSpec, *, before: bool, after: bool) -> Boundaries:
        """`before` and `after` say where a group is on either side; PlanError if a value cannot be divided there."""
        received = sent = None
        if before or after:
            from meshcee.capture.graph.rows import divided

            received = divided(program, spec.received_numbers) if before else None
            sent = divided(program, spec.sent_numbers) if after else None
        return cls(Boundary(spec.received, received), Boundary(spec.sent, sent))
