"""The allow-list: what models use is on it, what reaches outside tensors is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshcee.capture.graph import Node, Ref, Value
from meshcee.capture.graph.guards import GUARDED
from meshcee.capture.graph.operators import find_operator
from meshcee.errors import GraphError

USED = """
numpy_T mT mH matrix_H
linear layer_norm embedding batch_norm conv2d conv1d conv_transpose2d.input dropout gelu relu silu softmax.int
add.Tensor mul.Tensor matmul bmm addmm baddbmm scaled_dot_product_attention cross_entropy_loss nll_loss mse_loss view
reshape permute transpose.int cat stack split.Tensor chunk unbind.int expand masked_fill.Scalar where.self tril triu
arange.start_step cumsum gather index.Tensor index_select scatter.value max_pool2d avg_pool2d adaptive_avg_pool2d
group_norm lstm.input gru.input topk one_hot bernoulli rand_like randn einsum lift_fresh_copy _softmax add_.Tensor relu_
to.dtype_layout rms_norm __and__.Tensor sym_size.int zeros full_like new_zeros index_put_ index_add scatter_add copy_
"""
REFUSED = """
from_file set_.source_Storage resize_ as_strided data_ptr record_stream empty.memory_format empty_like item
_local_scalar_dense nonzero unique_dim masked_select quantize_per_tensor to_sparse _to_copy.out add.out mm.out rename_
tolist _cudnn_rnn _foreach_add.List convolution_backward _print is_pinned pin_memory quantized_lstm.data lift
sparse_coo_tensor.size _fused_adamw_ resize_as_ requires_grad_ storage_offset
"""


@pytest.mark.parametrize("name", USED.split())
def test_operators_of_models_are_allowed(name: str) -> None:
    full = f"aten.{name}" if "." in name else f"aten.{name}.default"
    found = find_operator(full).call
    assert found is GUARDED[full] if full in GUARDED else isinstance(found, torch._ops.OpOverload)


@pytest.mark.parametrize("name", REFUSED.split())
def test_operators_that_reach_outside_are_refused(name: str) -> None:
    with pytest.raises(GraphError):
        find_operator(f"aten.{name}" if "." in name else f"aten.{name}.default")


@pytest.mark.parametrize(
    "name", ["os.system", "aten", "aten.add", "aten.add.Tensor.x", "aten..default", "aten.add.", "", "a" * 500]
)
def test_names_that_are_no_operators(name: str) -> None:
    with pytest.raises(GraphError):
        find_operator(name)


def test_every_allowed_operator_of_this_torch_takes_plain_arguments_only() -> None:
    kinds = set()
    allowed = 0
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::"):
            base, _, overload = full.removeprefix("aten::").partition(".")
            try:
                found = find_operator(f"aten.{base}.{overload or 'default'}")
            except GraphError:
                continue
            allowed += 1
            kinds.update(found.argument_types)
    numbers = {"number", "int", "SymInt", "float", "bool", "ScalarType", "Layout", "MemoryFormat"}
    assert kinds <= numbers | {"Tensor", "str", "Device", "Generator"}
    assert 900 < allowed < 2500


def test_what_the_schema_does_not_say() -> None:
    norm = find_operator("aten.batch_norm.default")
    assert [norm.argument_names[i] for i in norm.mutates] == ["running_mean", "running_var"]
    assert find_operator("aten.dropout.default").random
    assert find_operator("aten.dropout.default").aliases == (0,)
    assert find_operator("aten.view.default").aliases == (0,)
    assert find_operator("aten.relu_.default").mutates == (0,)


def norm(flag: Any, operator: str = "aten.batch_norm.default", **named: Any) -> Node:
    """A norm of the values 0 to 4, whose flag is this one; without a flag, where there is none."""
    rest = [] if flag is None else [flag, 0.1, 1e-5, True]
    return Node(find_operator(operator), (*map(Ref, range(5)), *rest), named, Value("n", torch.float32))


@pytest.mark.parametrize("operator", ["aten.batch_norm.default", "aten.instance_norm.default"])
def test_a_norm_writes_its_statistics_unless_the_node_itself_says_that_it_does_not(operator: str) -> None:
    statistics = (3, 4)
    assert norm(False, operator).writes == ()
    named = find_operator(operator).argument_names[5]
    assert norm(None, operator, **{named: False}).writes == ()
    assert norm(True, operator).writes == norm(None, operator).writes == statistics
    assert norm(None, operator, **{named: True}).writes == statistics
    assert norm(Ref(7), operator).writes == norm(0, operator).writes == norm("", operator).writes == statistics


def test_a_call_that_is_no_norm_writes_what_its_schema_says() -> None:
    node = Node(find_operator("aten.add_.Tensor"), (Ref(0), False), {}, Value("n", torch.float32))
    assert node.writes == (0,)


def test_a_norm_that_is_evaluated_leaves_its_statistics() -> None:
    """As the rule says, which trusts these kernels."""
    for name in ("batch_norm", "instance_norm"):
        mean, var = torch.randn(64), torch.rand(64)
        before = mean.clone(), var.clone()
        for training in (False, True):
            getattr(torch, name)(torch.randn(7, 64, 5), None, None, mean, var, training, 0.1, 1e-5, False)
            assert (torch.equal(mean, before[0]), torch.equal(var, before[1])) == (not training,) * 2
