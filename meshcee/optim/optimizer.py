"""An optimizer by name: what each stage builds over its own parameters.

The idea: classes come from a list, so no code of a user's runs on a peer. Each updates a parameter from that parameter and its own
state alone, so it does not matter on which stage the parameter lies.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from meshcee.errors import UsageError

__all__ = ["PER_PARAMETER", "Optimizer", "plain_number"]

# Classes whose update of a parameter reads that parameter and its own state only.
PER_PARAMETER = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
    | {"Adafactor", "Muon", "AdamW8bit"}
)
OURS = ("AdamW8bit",)  # of these a class of this room, of the others torch's
# Why others are refused, where people ask.
REFUSED = {
    "LBFGS": "its update reads all parameters at once, which lie on many machines",
    "SparseAdam": "it takes sparse gradients alone",
    "AdamWScheduleFree": "it computes with other weights than it evaluates: Job(ema=0.999) has an average to evaluate",
    "RAdamScheduleFree": "it computes with other weights than it evaluates: Job(ema=0.999) has an average to evaluate",
    "SGDScheduleFree": "it computes with other weights than it evaluates: Job(ema=0.999) has an average to evaluate",
}


class Optimizer:
    """A class of torch.optim, or `AdamW8bit`, by name, with options and parameter groups by name pattern.

    >>> Optimizer("AdamW", lr=3e-4, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}})

    Patterns are shell patterns over `named_parameters` names; the first that matches wins, the rest form the last group. A warning
    tells of a pattern that matches no parameter. A group may have a class of its own, with options of its own alone:

    >>> Optimizer("Muon", lr=0.02, groups={"*embed*|*.bias": {"class": "AdamW", "lr": 3e-4}})
    """

    def __init__(self, name: str, *, groups: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> None:
        if not isinstance(groups or {}, Mapping) or not all(isinstance(g, Mapping) for g in (groups or {}).values()):
            raise UsageError('groups are options by a pattern of names: groups={"*.bias": {"weight_decay": 0.0}}')
        for kind in (name, *(extra["class"] for extra in (groups or {}).values() if "class" in extra)):
            if not isinstance(kind, str):
                raise UsageError(
                    "an optimizer is given by its name and options, Optimizer('AdamW', lr=1e-3): peers run no code of yours, so "
                    f"one of {', '.join(sorted(PER_PARAMETER))}"
                )
            if kind not in PER_PARAMETER:
                why = f"is refused, as {REFUSED[kind]}" if kind in REFUSED else "is no name known here"
                use = ", ".join(sorted(PER_PARAMETER))
                raise UsageError(f"optimizer {kind!r:.80} {why}: write one of {use}")
        self.options = {key: plain_number(value) for key, value in options.items()}
        self.groups = {p: {k: plain_number(v) for k, v in own.items()} for p, own in (groups or {}).items()}
        for key, value in [*self.options.items(), *(kv for g in self.groups.values() for kv in g.items())]:
            numbers = isinstance(value, tuple | list) and all(x is None or isinstance(x, int | float) for x in value)
            known = key in ("class", "adjust_lr_fn") and isinstance(value, str)
            if not (value is None or isinstance(value, bool | int | float) or numbers or known):
                advice = "groups= choose by name" if key == "params" else "write one, as 0.01"
                raise UsageError(f"optimizer option {key:.80}={value!r:.80} is no number; {advice}")
        if any(own.get("differentiable") for own in (self.options, *self.groups.values())):
            raise UsageError("optimizer option differentiable=True is for who differentiates a step; leave it out")
        if any("initial_accumulator_value" in own for own in self.groups.values()):
            raise UsageError(
                "torch reads no initial_accumulator_value of a group: say it of all, Optimizer('Adagrad', "
                "initial_accumulator_value=0.5), and give other groups a class"
            )
        self.name = name
        self.ema: float | None = None  # a stage keeps an average of what it updates: what a Job says
        self.eval_ema = False  # and evaluates it

    def averaging(self, ema: float | None, evaluated: bool = False) -> Optimizer:
        """The same, with this decay of an average of the weights, which evaluations are of or not."""
        found = Optimizer(self.name, groups=self.groups, **self.options)
        found.ema, found.eval_ema = ema, evaluated
        return found

    def group_of(self, parameter: str) -> int:
        """Index of the group that holds this parameter; the group without a pattern is the last."""
        for i, pattern in enumerate(self.groups):
            if _meets(pattern, parameter):
                return i
        return len(self.groups)

    def first_state(self, parameter: str, like: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """What a class of this room keeps of a parameter of that size, without a step; None where a class of torch's updates it."""
        extra = [*self.groups.values(), {}][self.group_of(parameter)]
        if extra.get("class", self.name) not in OURS:
            return None
        from meshcee.optim.adamw8bit import first_state

        return first_state(like)

    def check(self, types: Mapping[str, torch.dtype]) -> None:
        """Raise UsageError where a step reads more than one parameter at a time, for parameters of these types.

        Where Adafactor is not told its first eps, it takes that of the first parameter's type for all of a group (torch 2.13).
        """
        for group, extra in enumerate([*self.groups.values(), {}]):
            kind = extra.get("class", self.name)
            eps = {**(self.options if kind == self.name else {}), **extra}.get("eps") or (None,)
            alike = {types[name] for name in types if self.group_of(name) == group}
            if kind == "Adafactor" and eps[0] is None and len(alike) > 1:
                said = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in alike))
                raise UsageError(
                    f"Adafactor takes the first of its eps from the first parameter of a group, and one holds {said}; "
                    "say Optimizer('Adafactor', eps=(1e-7, 1e-3))"
                )

    def check_device(self, kind: str) -> None:
        """Raise UsageError where torch does not step so on devices of this kind, as "cpu"."""
        if kind == "cpu" and any(own.get("capturable") for own in (self.options, *self.groups.values())):
            raise UsageError("optimizer option capturable=True is for CUDA graphs, and CPUs refuse it; leave it out")

    def unmet(self, names: Collection[str], aliases: Mapping[str, str]) -> Iterator[str]:
        """A sentence for each pattern that meets none of these names, by itself. `aliases`: other names of tied ones."""
        for pattern in self.groups:
            if not names or any(_meets(pattern, name) for name in names):
                continue
            tied = next((other for other in aliases if _meets(pattern, other)), None)
            if tied is not None:
                yield f"{tied!r} is tied to {aliases[tied]!r}: write that name in place of {pattern!r}"
                continue
            parts = pattern.split("|")
            wider = ["|".join(f"{one}.*" for one in parts), "|".join(f"*{one}*" for one in parts)]
            wider = [wide for wide in wider if any(_meets(wide, name) for name in names)]
            known = sorted(names, key=lambda name: not any(_meets(wide, name) for wide in wider[:1]))
            some = ", ".join(repr(name) for name in known[:3])
            do = f"{wider[0]!r}, or another pattern" if wider else "a pattern"
            yield f"no parameter of the model has a name like {pattern!r}: write {do} of names such as {some}, or leave it out"

    def build(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over these parameters. Every group exists, also when empty, so that indices agree."""
        groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"params": []}, extra) for extra in [*self.groups.values(), {}]
        ]
        for name, parameter in named.items():
            group, extra = groups[self.group_of(name)]
            group["params"].append(parameter)
            if extra.get("class", self.name) == "Muon" and parameter.dim() != 2:
                raise UsageError(
                    f"optimizer Muon: {name!r} is no matrix, as Muon's parameters are; give others a class: "
                    'groups={"PATTERN": {"class": "AdamW"}}'
                )
        parts: dict[str, list[dict[str, Any]]] = {}  # by class
        for group, extra in groups:
            group |= {key: value for key, value in extra.items() if key != "class"}
            parts.setdefault(extra.get("class", self.name), []).append(group)
        built = [self._built(kind, own) for kind, own in parts.items()]
        return built[0] if len(built) == 1 else _Several(built, [group for group, _ in groups])

    def _built(self, kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Of one class. A group that is named for another class has its own options only."""
        known = [*inspect.signature(_class(kind)).parameters][1:]
        for unknown in {key: None for group in groups for key in group if key not in ("params", *known)}:
            raise UsageError(  # torch keeps such a key, and nothing reads it
                f"optimizer {kind}: a group has {unknown!r}, which is no option of {kind}; its options are {', '.join(known)}"
            )
        try:
            built: torch.optim.Optimizer = _class(kind)(groups, **(self.options if kind == self.name else {}))
        except (TypeError, ValueError) as error:
            more = ""
            if "unexpected keyword" in str(error):
                more = f"; its options are {', '.join(known)}"
            raise UsageError(f"optimizer {kind}: {error}{more}") from error
        return built

    def to_json(self) -> dict[str, Any]:
        found = {"name": self.name, "options": self.options, "groups": [[p, g] for p, g in self.groups.items()]}
        if self.ema is None:
            return found
        return found | {"ema": self.ema} | ({"eval_ema": True} if self.eval_ema else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Optimizer:
        try:
            groups = {str(pattern): dict(extra) for pattern, extra in data["groups"]}
            found = cls(str(data["name"]), groups=groups, **dict(data["options"]))
            return found if data.get("ema") is None else found.averaging(float(data["ema"]), bool(data.get("eval_ema")))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not an optimizer: {error!r}") from error


def plain_number(value: Any) -> Any:
    """A number of numpy's as one of Python's, also inside of a tuple or a list; anything else as it is."""
    if type(value) in (tuple, list):
        return type(value)(map(plain_number, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _meets(pattern: str, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, one) for one in pattern.split("|"))


def _class(kind: str) -> type[torch.optim.Optimizer]:
    if kind in OURS:
        from meshcee.optim.adamw8bit import AdamW8bit

        return AdamW8bit
    found: type[torch.optim.Optimizer] = getattr(torch.optim, kind)
    return found


class _Several(torch.optim.Optimizer):
    """Optimizers of several classes as one: the same groups, in the order of their patterns, and the same state."""

    def __init__(self, classes: list[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> None:
        first, *others = classes
        shared = {k: v for k, v in first.defaults.items() if all((k, v) in o.defaults.items() for o in others)}
        super().__init__(groups, shared)  # schedules look at these
        self.classes = classes
        self._link()

    def _link(self) -> None:
        """One state and one list of groups for all: each class has its own groups of them."""
        for one in self.classes:
            one.state = self.state
            own = {id(p) for group in one.param_groups for p in group["params"]}
            one.param_groups = [g for g in self.param_groups if any(id(p) in own for p in g["params"])]

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._link()
        for one in self.classes:
            if type(one).__name__ in OURS:
                one.put_back(state_dict, self.param_groups)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"classes": self.classes}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.classes:
            one.step()
