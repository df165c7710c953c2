"""What arguments an allowed operator may have: each class of call that would crash, run away or read foreign memory is refused.

Graphs are made by hand here, as a hostile owner would, and go through the decoder as on a peer.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import capture, decode_program, encode_program
from meshcee.capture.graph import NodeRefused
from meshcee.capture.graph.guards import GUARDED
from meshcee.capture.graph.operators import ALLOWED, find_operator
from meshcee.capture.graph.sizes import integer
from meshcee.errors import CaptureError, GraphError
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.cli.main import main

INF = float("inf")


def tensor(*shape: Any, dtype: str = "float32") -> list[Any]:
    return [2, dtype, list(shape), [], False]


def graph(inputs: list[Any], *calls: tuple[str, list[Any], Any], **kwargs: Any) -> bytes:
    """A document: (operator, arguments, declared value) in turn; `kwargs` are of the last call. {"r": n} is value n."""
    names = list(dict.fromkeys(name for name, _, _ in calls))
    entries = [[0, f"x{i}", value, False, False, True, None, []] for i, value in enumerate(inputs)]
    nodes: list[Any] = [[names.index(name), args, {}, value, 0, False] for name, args, value in calls]
    nodes[-1][2] = kwargs
    packed: bytes = msgpack.packb([2, names, entries, nodes, [len(entries) + len(nodes) - 1], 1, []])
    return packed


X = {"r": 0}
Y = {"r": 1}
IMAGE = tensor(1, 1, 4, 4)


def one(operator: str, *args: Any, of: Any = tensor(4, 4), makes: Any = tensor(4, 4), **kwargs: Any) -> bytes:  # noqa: B008
    """A graph of one call; its first input is `of`, the second a float32 tensor of 2 numbers."""
    return graph([of, tensor(2)], (f"aten.{operator}", list(args), makes), **kwargs)


# What is named here crashed a peer, kept it busy for ever, filled its memory or read what nobody gave it.
RUNS_AWAY = {
    "a difference of 10^8 differences": one("diff.default", X, 10**8),
    "a power of 2^62": one("matrix_power.default", X, 1 << 62),
    "a histogram of 10^9 bins": one("histc.default", X, 10**9, makes=tensor(10**9)),
    "a list of tensors times 10^9": graph(
        [tensor(4, 4)], ("aten.unbind.int", [X], [1]), ("int.mul", [Y, 10**9], [1])
    ),
    "a list of tensors added to itself": graph([tensor(4, 4)], ("aten.unbind.int", [X], [1]), ("int.add", [Y, Y], [1])),
    "numbers drawn from the largest on": graph(
        [tensor(4)], ("aten.clone.default", [X], tensor(4)), ("aten.random_.from", [Y, (1 << 63) - 1, None], tensor(4))
    ),
    "repeats in 4,000 dimensions": one("repeat.default", X, [1] * 4000),
    "an outer product of outer products": graph(
        [tensor(1 << 11, 1 << 11), tensor(1 << 11, 1 << 11)],
        ("aten.einsum.default", ["ab,cd,bd,ac->", [X, Y, X, Y]], tensor()),
    ),
    "a recurrent layer of 10^6 steps": graph(
        [tensor(10**6, 1, 1), tensor(1, 1, 1), tensor(1, 1)],
        ("aten.rnn_tanh.input", [X, Y, [{"r": 2}] * 2, False, 1, 0.0, False, False, False], [1]),
    ),
}  # fmt: skip
CRASHES = {
    "a recurrent layer without weights": graph(
        [tensor(3, 2, 4), tensor(1, 2, 4)],
        ("aten.lstm.input", [X, [Y, Y], [], True, 1, 0.0, False, False, False], [1]),
    ),
    "a recurrent layer with another's weights": graph(
        [tensor(3, 2, 4), tensor(1, 2, 4), tensor(2, 2)],
        ("aten.gru.input", [X, Y, [{"r": 2}] * 4, True, 1, 0.0, False, False, False], [1]),
    ),
    "a cell with a bias of another shape": graph(
        [tensor(2, 3), tensor(2, 4), tensor(16, 3), tensor(16, 4), tensor(3, 3, 2, 1, dtype="complex128")],
        ("aten.lstm_cell.default", [X, [Y, Y], {"r": 2}, {"r": 3}, None, {"r": 4}], [1]),
    ),
    "weights without rows": graph(
        [tensor(0, 8, 4), tensor(0, 1, 1)], ("aten._weight_norm.default", [X, Y, 0], tensor(0, 8, 4))
    ),
    "weights with fewer norms than rows": one("_weight_norm.default", X, Y, 0),
    "a type that is a number": one("to.prim_dtype", X, -1),
    "recurrent layers of packed rows": one("lstm.data", X, X, [X], [X], True, 1, 0.0, False, False),
    "eigenvalues": one("linalg_eigvals.default", X, makes=tensor(4, dtype="complex64")),
    "factors unpacked": one("lu_unpack.default", X, Y, makes=[1]),
    "statistics of quantization": one("fused_moving_avg_obs_fake_quant.default", X, X, X, X, X, X, X, 0.1, 0, 255, 0),
    "a shuffle in no groups": one("channel_shuffle.default", X, 0, of=IMAGE, makes=IMAGE),
    "repeats of minus one": one("repeat_interleave.self_Tensor", X, Y, 0, output_size=4),
}
READS = {
    "any address": one("segment_reduce.default", X, "sum", lengths=Y, unsafe=True),
    "memory by strides": one("as_strided.default", X, [1 << 20], [1], 0, makes=tensor(1 << 20)),
    "memory by a slice of another": one("slice_inverse.default", X, X, 0, 0, 2, 1),
    "memory that nobody wrote": one("new_empty.default", X, [1 << 20], makes=tensor(1 << 20)),
    "memory that nobody wrote, permuted": one("empty_permuted.default", [1 << 20], [0], makes=tensor(1 << 20)),
    "beyond an image": one("upsample_linear1d.default", X, [4], False, 1e-300, of=tensor(1, 1, 4), makes=tensor(1, 1, 4)),
    "before an image": one("upsample_nearest2d.default", X, [4, 4], -1.0, 1e-30, of=IMAGE, makes=IMAGE),
    "behind a row that is repeated": graph(
        [tensor(1)], ("aten.expand.default", [X, [5]], tensor(5)), ("aten.median.dim", [Y, 0], [1])
    ),
    "a circle that is cropped": one("pad.default", X, [-1, 1], "circular", makes=tensor(4, 4)),
    "a loss of another shape's target": one("binary_cross_entropy.default", X, Y, None, 1, makes=tensor()),
    "a sum of no rows": graph(
        [tensor(0, 2), tensor(0, 2, dtype="int64")], ("aten.multilabel_margin_loss.default", [X, Y, 2], tensor())
    ),
    "bags with wild offsets": one("embedding_bag.default", X, Y, Y, makes=[1]),
    "places drawn outside": one("fractional_max_pool2d.default", X, [2, 2], [2, 2], Y, of=IMAGE, makes=[1]),
    "numbers as flags": one("view.dtype", X, {"t": "bool"}, makes=tensor(4, 16, dtype="bool")),
    "a cache of another size": one("native_group_norm.default", X, None, None, 2000, 4, 3, 2, 1e-5, makes=[1]),
}  # fmt: skip
WORDS_AND_NUMBERS = {
    "a word that is none": one("gelu.default", X, approximate="mean"),
    "a word of another argument": one("div.Tensor_mode", X, X, rounding_mode="reflect"),
    "an epsilon without end": one("rms_norm.default", X, [4], None, INF),
    "an end without end": one("arange.default", INF, device={"d": 0}),
    "a page-locked tensor": one("zeros_like.default", X, pin_memory=True),
    "a sparse gradient": one("embedding.default", X, Y, -1, False, True),
    "a reduction that is none": one("mse_loss.default", X, X, 7),
    "a tensor where a number belongs": one("sum.dim_IntList", X, [Y]),
    "a flag where a dimension belongs": one("softmax.int", X, True),
    "a number where a flag belongs": one("dropout.default", X, 0.5, 1),
    "sizes of tensors compared as numbers": graph([tensor(4)], ("int.eq", [X, X], tensor(4, dtype="bool"))),
}
ALL = RUNS_AWAY | CRASHES | READS | WORDS_AND_NUMBERS


@pytest.mark.parametrize("what", ALL)
def test_a_peer_refuses(what: str) -> None:
    with pytest.raises(GraphError) as refused:
        decode_program(ALL[what])
    assert "malformed" not in str(refused.value)  # else the document is wrong, and nothing else is looked at


@pytest.mark.parametrize("what", ["a difference of 10^8 differences", "a list of tensors times 10^9"])
def test_the_smallest_graphs_are_small(what: str) -> None:
    """A few dozen bytes sufficed to take a peer's memory or its time."""
    assert len(ALL[what]) < 120


def test_what_the_refused_calls_do_within_bounds_is_allowed() -> None:
    assert decode_program(one("diff.default", X, 2, makes=tensor(4, 2)))
    assert decode_program(one("matrix_power.default", X, 3))
    assert decode_program(one("upsample_nearest2d.default", X, [8, 8], 2.0, 2.0, of=IMAGE, makes=tensor(1, 1, 8, 8)))
    assert decode_program(one("masked_fill.Scalar", Y, X, -INF, of=tensor(2, dtype="bool"), makes=tensor(2)))
    assert decode_program(one("linalg_vector_norm.default", X, INF, makes=tensor()))
    assert decode_program(
        graph(
            [tensor(3, 2, 4), tensor(1, 2, 4), tensor(16, 4)],
            ("aten.lstm.input", [X, [Y, Y], [{"r": 2}] * 2, False, 1, 0.0, False, False, False], [1]),
        )
    )


def test_a_refusal_names_the_node_the_operator_and_the_argument() -> None:
    with pytest.raises(GraphError, match=r"node 0 \(aten\.diff\.default\): its n is 100000000, not between 0 and 16"):
        decode_program(ALL["a difference of 10^8 differences"])


class Differences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.diff(self.linear(x), n=20)


def test_the_user_hears_of_it_at_capture_with_the_line() -> None:
    data = [(torch.randn(40), torch.randn(20)) for _ in range(4)]
    job = Job(
        model=Differences(), loss=F.mse_loss, optimizer=Optimizer("SGD", lr=0.1), data=data, batch_size=2, steps=1
    )
    said = r"operation aten\.diff\.default at .*test_rules\.py:\d+ .*cannot run on a peer: its n is 20.*; write it"
    with pytest.raises(CaptureError, match=said):
        capture(job)


JOB = """import meshcee, torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return torch.histc(self.linear(x).detach(), 1 << 21) + self.linear(x).sum()
data = [(torch.randn(4), torch.randn(())) for _ in range(4)]
def loss(out, y):
    return (out.sum() - y.sum()) ** 2
sgd = meshcee.Optimizer("SGD", lr=0.1)
job = meshcee.Job(model=Model(), loss=loss, optimizer=sgd, data=data, batch_size=2, steps=1)
"""


def test_the_check_of_a_job_says_it_before_any_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / "job.py")])
    assert ended.value.code == 4
    assert "job.py:8" in (said := capsys.readouterr().err)
    assert "aten.histc.default" in said
    assert "its bins is 2097152, not between 1 and 1048576" in " ".join(said.split())


def test_a_refusal_says_which_node_it_is_about_whatever_was_wrong_with_it() -> None:
    """Capture finds the user's line by that."""
    good = decode_program(one("gelu.default", X, approximate="tanh"))
    node = good.nodes[0]
    for wrong in ({"approximate": "sideways"}, {"approximate": "mean"}, {"approximation": "tanh"}):
        nodes = (node, dataclasses.replace(node, kwargs=wrong))
        with pytest.raises(NodeRefused) as refused:
            decode_program(encode_program(dataclasses.replace(good, nodes=nodes)))
        assert refused.value.position == 1


def test_every_argument_of_every_overload_has_a_rule() -> None:
    plain = {"Tensor", "number", "int", "SymInt", "float", "bool", "str"}
    for name in ALLOWED["overloads"]:
        found = find_operator(name)
        assert set(found.argument_types) <= plain | {"ScalarType", "Layout", "MemoryFormat", "Device", "Generator"}
        assert name in GUARDED or not any(argument.is_out for argument in found.call._schema.arguments)
        for argument, kind in zip(found.argument_names, found.argument_types):
            if kind in ("int", "SymInt"):
                least, most = ALLOWED["integers_of"].get(name, {}).get(argument) or ALLOWED["integers"][argument]
                assert -(1 << 63) < least < most < 1 << 63
            if kind == "str":
                assert argument == "equation" or ALLOWED["words"][argument]


def test_the_list_is_in_order_and_has_no_rule_for_nothing() -> None:
    names = list(ALLOWED["overloads"])
    assert names == sorted(names)
    assert ALLOWED["integers_of"].keys() <= set(names)
    assert not {name for refused in ALLOWED["refused"].values() for name in refused} & set(names)
    arguments = {argument for name in names for argument in find_operator(name).argument_names}
    assert set(ALLOWED["integers"]) <= arguments
    assert set(ALLOWED["words"]) <= arguments


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("operator", ["div.Tensor_mode", "div.Scalar_mode", "div_.Tensor_mode", "divide.Tensor_mode"])
def test_the_lowest_integer_by_minus_one_is_an_error_and_no_signal(operator: str, dtype: torch.dtype) -> None:
    lowest = torch.full((5,), torch.iinfo(dtype).min, dtype=dtype)
    minus = -1 if "Scalar" in operator else torch.full((5,), -1, dtype=dtype)
    call = find_operator(f"aten.{operator}").call
    with pytest.raises(ValueError, match="cannot be divided"):
        call(lowest, minus, rounding_mode="trunc")
    assert call(lowest + 1, minus, rounding_mode="trunc").tolist() == [torch.iinfo(dtype).max] * 5


def test_labels_of_a_ctc_loss_are_looked_at() -> None:
    call = find_operator("aten.ctc_loss.IntList").call
    scores, labels = torch.randn(5, 2, 3).log_softmax(-1), torch.tensor([[1, 2, 1], [2, 1, 2]])
    wanted = torch.ops.aten.ctc_loss.IntList(scores, labels, [5, 5], [3, 2])
    assert torch.equal(call(scores, labels, [5, 5], [3, 2]), wanted)
    padded = torch.tensor([[1, 2, 1], [2, 1, -100]])
    assert torch.equal(call(scores, padded, [5, 5], [3, 2]), wanted)  # what is beyond a length is not read
    flat = torch.tensor([1, 2, 1, 2, 1])
    assert torch.equal(call(scores, flat, [5, 5], [3, 2]), wanted)
    for wrong, lengths in ((labels * 10**9, [3, 2]), (padded, [3, 3]), (labels, [3, -1]), (flat, [3, 9])):
        with pytest.raises(ValueError):
            call(scores, wrong, [5, 5], lengths)


def test_an_empty_tensor_counts_for_what_kernels_go_through() -> None:
    """Pooling to 2^39 x 5 x 0 numbers loops 2.7 * 10^12 times to make none."""
    with pytest.raises(GraphError, match="it makes a tensor of more than"):
        decode_program(one("adaptive_max_pool3d.default", X, [1 << 39, 5, 0], of=tensor(1, 1, 2, 2, 5), makes=[1]))


R2, R3 = {"r": 2}, {"r": 3}
ROWS = tensor([1], 4)
SPARE = (("aten.sym_size.int", [X, 0], [0]), ("int.sub", [Y, 2], [0]))  # samples - 2: none in the pass over two
# Harmless for two samples: each call reads memory that is not its own, or runs away, for other numbers of samples.
FOR_TWO = {
    "memory of 2^41 numbers": graph(
        [ROWS], *SPARE, ("int.mul", [R2, 1 << 41], [0]), ("aten.new_zeros.default", [X, [R3]], tensor(0))
    ),
    "fewer norms than rows": graph(
        [ROWS, tensor(2, 1)], ("aten._weight_norm.default", [X, Y, 0], ROWS), ("aten.relu.default", [R2], ROWS)
    ),
    "a target of two samples": graph(
        [tensor([1], 1), tensor(2, 1)], ("aten.binary_cross_entropy.default", [X, Y, None, 1], tensor())
    ),
    "a row that is repeated": graph(
        [ROWS, tensor(1)],
        ("aten.sym_size.int", [X, 0], [0]), ("int.sub", [R2, 1], [0]), ("aten.expand.default", [Y, [R3]], tensor(1)),
        ("aten.median.dim", [{"r": 4}, 0], [1]), ("getitem", [{"r": 5}, 0], tensor()),
    ),
    "a power of samples": graph(
        [ROWS, tensor(4, 4)],
        ("aten.sym_size.int", [X, 0], [0]), ("int.sub", [R2, 2], [0]), ("int.mul", [R3, 1 << 20], [0]),
        ("aten.matrix_power.default", [Y, {"r": 4}], tensor(4, 4)),
    ),
    "a number of 2^70 bits": graph(
        [ROWS], *SPARE, ("int.add", [R2, R2], [0]),
        *(("int.mul", [{"r": n}, {"r": n}], [0]) for n in range(3, 73)), ("aten.mul.Tensor", [X, {"r": 73}], ROWS),
    ),
    "5,000 parts": graph(
        [ROWS], *SPARE, ("int.mul", [R2, 5000], [0]), ("int.add", [R3, 1], [0]),
        ("aten.new_zeros.default", [X, [{"r": 4}]], tensor(1)), ("aten.unbind.int", [{"r": 5}], [1]),
        ("getitem", [{"r": 6}, 0], tensor()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOR_TWO)
def test_what_is_harmless_for_two_samples_is_checked_for_the_real_number(what: str) -> None:
    program = decode_program(FOR_TWO[what])
    run = program.slice(0, 1).build()

    def rows(samples: int) -> list[torch.Tensor]:
        return [torch.full(entry.value.sizes(samples), 0.5) for entry in program.inputs]

    run(*rows(2))
    with pytest.raises(GraphError, match="is refused"):
        run(*rows(3))


def test_a_models_most_frequent_calls_are_the_operators_own() -> None:
    program = decode_program(
        graph(
            [ROWS],
            ("aten.sym_size.int", [X, 0], [0]),
            ("aten.view.default", [X, [Y, 2, 2]], tensor([1], 2, 2)),
            ("aten.relu.default", [R2], tensor([1], 2, 2)),
        )
    )
    assert all(node.call is node.operator.call for node in program.nodes)


def test_parts_are_counted_along_the_dimension_that_is_split() -> None:
    assert decode_program(one("split.Tensor", X, 1, -1, of=tensor([1], 8192, 2), makes=[1]))
    assert decode_program(one("unbind.int", X, 1, of=tensor([1], 3, 8192), makes=[1]))
    for refused in (
        one("split.Tensor", X, 1, of=tensor(8192, 2), makes=[1]),
        one("unbind.int", X, 1, of=tensor(2, 8192), makes=[1]),
    ):
        with pytest.raises(GraphError, match="it makes 8192 tensors, more than 4096"):
            decode_program(refused)
    with pytest.raises(GraphError, match="Dimension out of range"):
        decode_program(one("unbind.int", X, 2, makes=[1]))


def recurrent(kind: str, steps: int, first: bool) -> bytes:
    """Two layers, both ways, of 8 numbers, on so many steps of two samples."""
    wide = 8 * {"lstm": 4, "gru": 3}[kind]
    around = (2, steps) if first else (steps, 2)
    entry, later, bias = R2, R3, {"r": 4}
    params = [entry, R2, bias, bias] * 2 + [later, R2, bias, bias] * 2
    state = [Y, Y] if kind == "lstm" else Y
    return graph(
        [tensor(*around, 8), tensor(4, 2, 8), tensor(wide, 8), tensor(wide, 16), tensor(wide)],
        (f"aten.{kind}.input", [X, state, params, True, 2, 0.0, False, True, first], [1]),
        ("getitem", [{"r": 5}, 0], tensor(*around, 16)),
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_recurrent_layer_may_walk_a_thousand_steps(kind: str, first: bool) -> None:
    """It calls 60,000 kernels, and is verified by its first step."""
    program = decode_program(recurrent(kind, 1000, first))
    values = [torch.zeros(entry.value.sizes(2)) for entry in program.inputs]
    (output,) = program.slice(0, 1).build()(*values)
    assert program.value(program.outputs[0]).admits(output)
    with pytest.raises(GraphError, match="it walks 120000 steps in all its layers"):
        decode_program(recurrent(kind, 30_000, first))


def test_an_integer_is_computed_once_however_many_read_it() -> None:
    doubled = [("int.min", [{"r": n}, {"r": n}], [0]) for n in range(1, 101)]
    program = decode_program(graph([ROWS], ("aten.sym_size.int", [X, 0], [0]), *doubled))
    assert integer(program, 101, 7) == 7


def test_experts_in_a_graph_are_a_stack_of_matrices() -> None:
    """Of two matrices the kernel takes the offsets for places in the other dimension."""
    product, ends = find_operator("aten._grouped_mm.default"), torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="experts a stack of matrices"):
        product.call(torch.ones(8, 4), torch.ones(4, 8), ends)
    assert product.call(torch.ones(8, 4), torch.ones(2, 4, 8), ends).shape == (8, 8)
