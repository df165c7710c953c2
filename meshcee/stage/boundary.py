"""Slices between groups of different width: what each member sends to each, and how the parts become one again.

The idea: rows that two neighbours have in common travel between them, once. What every member has whole (computed from
parameters alone), sizes and the generator's state come from the first of the senders; gradients go back the way
that the values came, so the sum over the group at the end of the step counts each exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshcee.capture import Program, StageSpec, Value
from meshcee.capture.graph import Cut, divided
from meshcee.errors import ProtocolError
from meshcee.role import Piece

__all__ = ["Boundaries", "Boundary"]


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
        """The values of one micro-batch and the generator's state, from all sources; `rows` are the receiver's."""
        parts = [arrived[piece.peer] for piece in sources]
        if any(len(part) != len(self.values) + 1 for part in parts):
            raise ProtocolError(f"an activation frame has {len(self.values)} values and the generator's state")
        first = parts[0]
        if self.cuts is None:
            return list(first[:-1]), first[-1]
        values: list[Any] = []
        for i, cut in enumerate(self.cuts):
            if cut.dim is not None:
                values.append(self._concatenated(i, [part[i] for part in parts], sources))
            elif cut.per_sample:
                if type(first[i]) is not int:
                    raise ProtocolError(f"size {self.values[i].name} arrived as a {type(first[i]).__name__}")
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
        self, arrived: Mapping[str, Sequence[torch.Tensor | None]], targets: Sequence[Piece]
    ) -> list[torch.Tensor | None]:
        """The gradients of what was sent, from all targets."""
        parts = [arrived[piece.peer] for piece in targets]
        if any(len(part) != len(self.values) for part in parts):
            raise ProtocolError(f"a gradient frame has {len(self.values)} values")
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
                if any(g.shape != present[0].shape or g.dtype != present[0].dtype for g in present):
                    raise ProtocolError(f"gradients for {self.values[i].name} arrived in different shapes")
                total = present[0]
                for gradient in present[1:]:
                    total = total + gradient
                out.append(total)
        return out

    # -- parts -------------------------------------------------------------------------------------------------------

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
            if not isinstance(part, torch.Tensor) or part.dim() != len(value.shape) or part.dtype != value.dtype:
                raise ProtocolError(f"{value.name} did not arrive as a tensor of {value.dtype}")
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
        if like.dim() != len(self.values[index].shape):
            raise ProtocolError(f"a gradient for {self.values[index].name} arrived as {tuple(like.shape)}")
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
        received = divided(program, spec.received_numbers) if before else None
        sent = divided(program, spec.sent_numbers) if after else None
        return cls(Boundary(spec.received, received), Boundary(spec.sent, sent))
