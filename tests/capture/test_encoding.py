"""Programs as bytes: a faithful round trip, and a decoder that nothing can surprise."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import Program, capture, decode_program, encode_program
from meshcee.capture.graph import FUNCTION
from meshcee.config import Limits
from meshcee.errors import GraphError
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig import zoo


@functools.cache
def program(model: str) -> Program:
    return capture(zoo.make(model)).train


@functools.cache
def document(model: str = "char_gpt") -> bytes:
    return encode_program(program(model))


def changed(change: Any, model: str = "char_gpt") -> bytes:
    """The encoding after `change(document)`."""
    tree = msgpack.unpackb(document(model), raw=False)
    change(tree)
    packed: bytes = msgpack.packb(tree)
    return packed


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", zoo.PHASE_ONE)
def test_a_round_trip_loses_nothing_that_matters(model: str) -> None:
    original, decoded = program(model), decode_program(document(model))
    assert encode_program(decoded) == document(model)
    assert [n.operator for n in decoded.nodes] == [n.operator for n in original.nodes]
    assert [n.refs for n in decoded.nodes] == [n.refs for n in original.nodes]
    assert [n.value for n in decoded.nodes] == [n.value for n in original.nodes]
    assert [(i.kind, i.value, i.mutated) for i in decoded.inputs] == [
        (i.kind, i.value, i.mutated) for i in original.inputs
    ]
    for a, b in zip(decoded.inputs, original.inputs):
        assert (a.data is None) == (b.data is None)
        if a.data is not None and b.data is not None:
            assert torch.equal(a.data, b.data)


def put(*path: int, to: Any) -> Callable[[Any], None]:
    """Sets one place of a document to something else."""

    def change(tree: Any) -> None:
        for step in path[:-1]:
            tree = tree[step]
        tree[path[-1]] = to

    return change


def node(tree: Any, operator: str) -> Any:
    """The first node that calls this operator."""
    return next(n for n in tree[3] if tree[1][n[0]] == operator)


def split(tree: Any, operator: int) -> None:
    target = node(tree, "aten.unbind.int")
    target[0], target[1] = operator, [target[1][0], 1 << 40]
    target[3] = [1]


# A document is [version, operators, inputs, nodes, outputs, blocks, recomputed], a node [operator, args, kwargs, value,
# block, no_grad], an input [kind, name, value, trainable, mutated, persistent, data].
REFUSED: dict[str, Callable[[Any], Any]] = {
    "another version": put(0, to=99),
    "an operator that loads files": put(1, 0, to="aten.from_file.default"),
    "an operator of another library": put(1, 0, to="prims.add.default"),
    "a Python function": put(1, 0, to="builtins.eval"),
    "an attribute of an operator": put(1, 0, to="aten.add.overloads"),
    "a class": put(1, 0, to="aten.__class__.default"),
    "an internal operator": put(1, 0, to="aten._cudnn_rnn.default"),
    "an operator that reads foreign memory": put(1, 0, to="aten.as_strided.default"),
    "an operator that writes to an output argument": put(1, 0, to="aten.add.out"),
    "uninitialised memory": put(1, 0, to="aten.empty.memory_format"),
    "an operator that does not exist": put(1, 0, to="aten.no_such_thing.default"),
    "an operator number out of range": put(3, 0, 0, to=9999),
    "a negative operator number": put(3, 0, 0, to=-1),
    "a forward reference": lambda d: d[3][1][1].__setitem__(0, {"r": len(d[2]) + 5}),
    "a reference to itself": lambda d: d[3][1][1].__setitem__(0, {"r": len(d[2]) + 1}),
    "a dangling reference": put(3, 1, 1, 0, to={"r": 1 << 40}),
    "a negative reference": put(3, 1, 1, 0, to={"r": -1}),
    "a reference that is a flag": put(3, 1, 1, 0, to={"r": True}),
    "an unknown tag": put(3, 1, 1, 0, to={"x": 1}),
    "an unknown dtype": put(3, 1, 1, 0, to={"t": "quint8"}),
    "a string": put(3, 1, 1, 0, to="/etc/passwd"),
    "bytes": put(3, 1, 1, 0, to=b"x"),
    "a deep list": put(3, 1, 1, 0, to=[[[[1]]]]),
    "too many arguments": put(3, 1, 1, to=[1] * 50),
    "an argument that the operator does not have": put(3, 1, 2, to={"nonsense": 1}),
    "a decreasing block": put(3, -1, 4, to=0),
    "a block out of range": put(3, -1, 4, to=1000),
    "an output that does not exist": put(4, to=[1 << 30]),
    "no output": put(4, to=[]),
    "no blocks": put(5, to=0),
    "too many blocks": put(5, to=1 << 30),
    "an absurd shape": put(2, 0, 2, to=[2, "float32", [1 << 30, 1 << 30], [], True]),
    "a negative size": put(2, 0, 2, to=[2, "float32", [-1], [], True]),
    "too many dimensions": put(2, 0, 2, to=[2, "float32", [1] * 99, [], True]),
    "an impossible memory order": put(2, 0, 2, to=[2, "float32", [2, 2], [0, 0], True]),
    "an input without a name": put(2, 0, 1, to=""),
    "two inputs of one name": lambda d: d[2][0].__setitem__(1, d[2][1][1]),
    "a trainable input of another kind": put(2, 0, 0, to=0),
    "data where there is none": put(2, 0, 6, to=b"1234"),
    "a constant that lies about its size": lambda d: d[2].append(
        [3, "c", [2, "float32", [9], [], False], False, False, False, b"1"]
    ),
    "constants that are too large": lambda d: d[2].append(
        [3, "c", [2, "uint8", [5 << 20], [], False], False, False, False, bytes(5 << 20)]
    ),
    "a random value to recompute": lambda d: d.__setitem__(6, [len(d[2]) + n for n in range(len(d[3]))]),
    "an integer of 70 bits": put(3, 1, 1, 0, to=(1 << 64) - 1),
    "a number instead of nodes": put(3, to=7),
    "a truncated document": lambda d: d.pop(),
    "a value of another shape than declared": lambda d: node(d, "aten.linear.default")[3][2].__setitem__(-1, 17),
    "a value of another type than declared": lambda d: node(d, "aten.linear.default")[3].__setitem__(1, "float64"),
    "a tensor where a number was declared": lambda d: node(d, "aten.linear.default").__setitem__(3, [0]),
    "a call that cannot run": lambda d: node(d, "aten.view.default")[1].__setitem__(1, [7, 7]),
    "a mask of 2^62 elements": lambda d: node(d, "aten.arange.default").__setitem__(1, [1 << 62]),
    "a split into 2^40 parts": lambda d: (d[1].append("aten.chunk.default"), split(d, len(d[1]) - 1)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_decoder_refuses(what: str) -> None:
    data = changed(REFUSED[what])
    tracemalloc.start()
    began = time.thread_time()  # of the processor: others may have it meanwhile
    with pytest.raises(GraphError):
        decode_program(data)
    elapsed_s = time.thread_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert elapsed_s < 1
    assert peak - 2 * len(data) < 10 << 20


class Scaled(torch.autograd.Function):
    """Both outputs have gradients; a size and two tensors are kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.count = x.shape[0]
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return left * weight + right, (left * x + right).sum(0) * ctx.count / ctx.count


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        left, right = Scaled.apply(self.first(x), self.weight)
        return left + right


@functools.cache
def function_document() -> bytes:
    data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
    job = Job(model=Scaling(), loss=F.mse_loss, data=data, optimizer=Optimizer("SGD", lr=0.1), batch_size=4, steps=1)
    return encode_program(capture(job).train)


def inside(*path: int | str, to: Any) -> Callable[[Any], None]:
    """Sets one place of the backward pass of the function."""
    return lambda tree: put(*path, to=to)(node(tree, FUNCTION)[2]["backward"])  # type: ignore[arg-type]


def given(place: int, to: Any) -> Callable[[Any], None]:
    """Sets one argument of the function."""
    return lambda tree: node(tree, FUNCTION)[1].__setitem__(place, to)


def nested(tree: Any) -> None:
    """The backward pass holds its function."""
    function = copy.deepcopy(node(tree, FUNCTION))
    inner = node(tree, FUNCTION)[2]["backward"]
    inner[1].append(FUNCTION)
    inner[3].append([len(inner[1]) - 1, *function[1:]])


def drawing(tree: Any) -> None:
    inner = node(tree, FUNCTION)[2]["backward"]
    inner[1].append("aten.rand_like.default")
    inner[3].append([len(inner[1]) - 1, [{"r": 0}], {}, inner[2][0][2], 0, False])


def writing(tree: Any) -> None:
    inner = node(tree, FUNCTION)[2]["backward"]
    inner[1].append("aten.mul_.Tensor")
    inner[3].append([len(inner[1]) - 1, [{"r": 0}, 2], {}, inner[2][0][2], 0, False])


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "no backward pass": lambda tree: node(tree, FUNCTION).__setitem__(2, {}),
    "another argument": lambda tree: node(tree, FUNCTION)[2].__setitem__("more", 1),
    "a backward pass that is a number": lambda tree: node(tree, FUNCTION)[2].__setitem__("backward", 1),
    "a backward pass of another operator": lambda tree: tree[3][0].__setitem__(2, node(tree, FUNCTION)[2]),
    "fewer arguments": lambda tree: node(tree, FUNCTION)[1].pop(),
    "no outputs": given(0, []),
    "numbers for outputs": given(0, [1, 2]),
    "one value for many": given(0, {"r": 1}),
    "another number of inputs": given(1, [{"r": 0}]),
    "an input that is no tensor": lambda tree: node(tree, FUNCTION)[1][1].__setitem__(0, {"r": len(tree[2])}),
    "another number of saved values": given(2, []),
    "an output without a gradient that is not there": given(3, [2]),
    "a place that is a flag": given(3, [True]),
    "an operator inside that is not allowed": inside(1, 0, to="aten.from_file.default"),
    "a reference inside that is not there": inside(3, 0, 1, 0, to={"r": 1 << 40}),
    "a weight inside": inside(2, 0, 0, to=1),
    "blocks inside": inside(5, to=2),
    "what is computed again inside": lambda tree: (b := node(tree, FUNCTION)[2]["backward"])[6].append(len(b[2])),
    "an output inside that is not there": inside(4, 0, to=1 << 30),
    "another shape inside": inside(2, 0, 2, to=[2, "float32", [7, 7], [], False]),
    "a gradient of another shape": lambda tree: inside(4, to=node(tree, FUNCTION)[2]["backward"][4][::-1])(tree),
    "a function inside a function": nested,
    "a draw inside": drawing,
    "a write inside to what is given": writing,
}


def test_a_function_and_its_backward_pass_go_there_and_back() -> None:
    decoded = decode_program(function_document())
    assert encode_program(decoded) == function_document()
    [function] = [n for n in decoded.nodes if n.operator.name == FUNCTION]
    assert [len(argument) for argument in function.args] == [2, 2, 3, 0]  # the size of the micro-batch is kept, too
    assert len(function.kwargs["backward"].outputs) == 2


@pytest.mark.parametrize("what", FUNCTIONS)
def test_the_decoder_refuses_a_function_with(what: str) -> None:
    tree = msgpack.unpackb(function_document(), raw=False)
    FUNCTIONS[what](tree)
    with pytest.raises(GraphError):
        decode_program(msgpack.packb(tree))


def frozen_norm() -> Any:
    """The document of a model whose batch norm is in eval mode, and its node."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
    job = Job(model=model, loss=F.mse_loss, data=data, optimizer=Optimizer("SGD", lr=0.1), batch_size=4, steps=1)
    tree = msgpack.unpackb(encode_program(capture(job).train), raw=False)
    return tree, node(tree, "aten.batch_norm.default")


@pytest.mark.parametrize("flag", [True, 1, 0, "computed"])
def test_a_norm_that_may_write_its_statistics_needs_a_buffer_that_is_marked(flag: Any) -> None:
    """Else a member would keep other numbers than its neighbours, and say nothing."""
    tree, norm = frozen_norm()
    assert decode_program(msgpack.packb(tree)).slice(0, 1).mutated == ()
    if flag == "computed":
        tree[1].append("int.eq")
        at = tree[3].index(norm)
        tree[3].insert(at, [len(tree[1]) - 1, [1, 1], {}, [0], 0, False])
        flag = {"r": len(tree[2]) + at}
        renumbered(tree, len(tree[2]) + at)
    norm[1][5] = flag
    with pytest.raises(GraphError, match=r"writes to '1\.running_mean', which is not marked so"):
        decode_program(msgpack.packb(tree))


def renumbered(tree: Any, first: int) -> None:
    """References behind a node that was put in as this value."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, list):
            return [moved(a) for a in argument]
        if isinstance(argument, dict) and argument.get("r", -1) >= first:
            return {"r": argument["r"] + 1}
        return argument

    for one in tree[3][first - len(tree[2]) + 1 :]:
        one[1] = moved(one[1])
    tree[4] = [number + (number >= first) for number in tree[4]]


@pytest.mark.slow
def test_a_fresh_process_decodes_and_refuses_in_a_second_without_an_import(tmp_path: Path) -> None:
    """The first graph that a peer ever reads."""
    (tmp_path / "good").write_bytes(document())
    (tmp_path / "bad").write_bytes(changed(lambda tree: tree[3][-1].__setitem__(3, [2, "float32", [7, 7], [], False])))
    script = """
import json, sys, time
from pathlib import Path
import torch
from meshcee.capture import decode_program, prepare
from meshcee.errors import GraphError
from tests.rig.resident import growth

torch.set_num_threads(1)
prepare()  # as a peer does before it announces its device
modules, grown, began_s = set(sys.modules), growth(), time.process_time()
try:
    decode_program(Path(sys.argv[1]).read_bytes())
    refused = False
except GraphError:
    refused = True
seconds = time.process_time() - began_s
print(json.dumps([refused, grown(), seconds, sorted(set(sys.modules) - modules), "torch._dynamo.eval_frame" in sys.modules]))
"""
    for name, expected in (("bad", True), ("good", False)):
        command = [sys.executable, "-c", script, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        refused, grown, seconds, imported, compiler = json.loads(done.stdout.splitlines()[-1])
        assert refused is expected
        assert imported == []
        assert not compiler
        assert grown < 10 << 20
        assert seconds < 1


def test_a_graph_of_too_many_bytes_is_refused_before_it_is_read() -> None:
    with pytest.raises(GraphError, match="larger"):
        decode_program(document(), Limits(graph_bytes=100))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x00",
        b"\xd5\x01xx",
    ],
)
def test_claims_of_great_length_cost_nothing(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(GraphError):
        decode_program(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
