"""What cannot be captured is told with the operation, the line and the way out; what export would leave out is refused."""

from __future__ import annotations

import dataclasses
import importlib
import math
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from meshcee.capture import capture
from meshcee.errors import CaptureError
from meshcee.job import Job
from meshcee.optim import Optimizer

HERE = r"test_refusals\.py:\d+"


class Calls(nn.Module):
    """A linear layer, and then whatever a test wants."""

    def __init__(self, then: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.linear, self.linear(x))


def job_of(model: nn.Module) -> Job:
    data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
    return Job(model=model, loss=F.mse_loss, optimizer=Optimizer("SGD", lr=0.1), data=data, batch_size=4, steps=1)


STRAY = nn.Parameter(torch.ones(4))
TEACHER = nn.Linear(4, 4)
OPTIMIZER = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
COUNTING = nn.BatchNorm1d(4, momentum=None)


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def branches(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        return h
    return -h


def loops(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    for _ in range(int(h.max().item())):
        h = h + 1
    return h


def prints(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    print(f"{h.mean():.3f}")
    return h


def hooks(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def casts(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return linear(h).float()


def grows(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        linear.weight[0].mul_(0.9)
    return linear(h)


def drops_layers(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    layerdrop = 0.1
    return h if torch.rand([]) < layerdrop else linear(h)


def flips(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return h.flip(-1) if torch.rand(1) < 0.5 else h


def chunks(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    one, other = torch.cat([h, h.flip(1)]).chunk(2)
    return one * other


def splits(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    one, other = torch.split(torch.cat([h, h.flip(1)]), h.shape[0])
    return one * other


def begins(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    first = torch.zeros(h.shape[0], 4, requires_grad=True)
    return h + F.linear(first, torch.ones(4, 4))


def steps_by_rows(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    n = len(h)
    w = torch.full((n, n), 0.5)
    w.view(-1)[::n] = 1.0
    return h * w.mean()


def writes_last_but_one(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    n = len(h)
    w = torch.full((n, n), 0.5)
    w[n - 2, 0] = 1.0
    return h * w.mean()


def mixes(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return h * torch.distributions.Beta(0.4, 0.4).sample()


def differentiates(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return h + torch.autograd.grad(linear(h).sum(), h, create_graph=True)[0]


def trains(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    linear(h.detach()).sum().backward()
    return h


def steps(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    OPTIMIZER.zero_grad()
    return h


def asks_a_teacher(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h + TEACHER(h)


def takes_the_largest(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    per_sample = h.mean(1)
    return h + per_sample.topk(per_sample.shape[0] // 2).values.mean()


def takes_some(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    k = max(1, int(0.5 * h.shape[0]))
    return h + h.mean(1).topk(k).values.mean()


def counts_samples(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    rows = []
    for i in range(h.shape[0]):
        rows.append(linear(h[i]))
    return torch.stack(rows)


def packs(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(h.unsqueeze(-1), torch.tensor([4, 3, 2]), batch_first=True)
    return h + packed.data.sum()


def counts(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return COUNTING(h)


def adds_up(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    steps = h.log_softmax(-1).expand(5, -1, -1)
    samples = h.shape[0]
    lengths = torch.full((samples,), 5), torch.full((samples,), 2)
    return h + F.ctc_loss(steps, torch.ones(samples, 2, dtype=torch.long), *lengths)


def builds(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return nn.Linear(4, 4)(h)


def assigns(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    linear.weight.data = linear.weight.data * 0.9
    return h


def half(h: torch.Tensor) -> torch.Tensor:
    return h * 0.5


with warnings.catch_warnings(action="ignore"):  # scripting is deprecated
    scripted = torch.jit.script(half)


REFUSED = {
    "a layer that forward makes": (
        builds,
        rf"forward makes a parameter at .*{HERE}.*run one batch through the model before",
    ),
    "a parameter written through a view": (
        grows,
        rf"changes parameter 'linear\.weight' in place at .*{HERE} `linear\.w",
    ),
    "layers left out by chance": (
        drops_layers,
        rf"{HERE} .*left out by chance.*set the probability to 0",
    ),
    "numpy": (lambda _, h: h * float(h.detach().numpy().max()), rf"{HERE} .*numbers leave torch there.*or data\[i\]"),
    "a branch by chance": (
        flips,
        rf"{HERE} .*: a number that is drawn decides .*; .*torch\.where\(torch\.rand\(\(\)\) < 0\.5, a, b\), or augment in data",
    ),
    "two halves by chunk": (
        chunks,
        rf"{HERE} .*a part of the number of samples; take the parts as z\[:n\] and z\[n:\]",
    ),
    "two halves by split": (
        splits,
        rf"{HERE} .*a part of the number of samples; .*torch\.split\(z, \[n, n\]\); or say",
    ),
    "a state that wants a gradient": (begins, rf"requires_grad is set in forward at .*{HERE} `first.*; leave it out$"),
    "an index counted from the number of samples": (
        writes_last_but_one,
        rf"at .*{HERE} .*: an index is counted from the number of samples; count from the end, as w\[-2, 0\]; or say",
    ),
    "a step of the number of samples": (
        steps_by_rows,
        rf"at .*{HERE} `w\.view\(-1\)\[::n\] = 1\.0`: the number of samples is the step of a slice; write it by rows",
    ),
    "the diagonal of a product by steps": (
        lambda _, h: h + (h @ h.t()).view(-1)[:: len(h) + 1].mean(),
        rf"at .*{HERE} .*size n\*\*2, no multiple.*; keep samples apart in the model; of m = z @ z\.t\(\) take m\.diagonal\(\)",
    ),
    "a tensor of the number of samples": (
        lambda _, h: h / torch.tensor(h.shape[0]),
        rf"a tensor is made of a number of samples at .*{HERE} .*; divide by x\.shape\[0\] itself",
    ),
    "Python's math of the number of samples": (
        lambda _, h: h / math.log(h.shape[0] + 1),
        rf"{HERE} .*: Python computes with the number of samples; .*torch\.full\(\(\), x\.shape\[0\]\), as \.log\(\) does",
    ),
    "numpy's math of the number of samples": (
        lambda _, h: h / np.log(h.shape[0]),
        rf"{HERE} .*: numpy computes with a size; divide by x\.shape\[0\] itself",
    ),
    "mixup in forward": (mixes, rf"a Beta or Dirichlet distribution is drawn at .*{HERE} .*data\[i\] or Job\.collate"),
    "a power of the number of samples": (
        lambda _, h: h / h.shape[0] ** 0.5,
        rf"Python computes pow\(\) of a size at .*{HERE}.*; .*torch\.full\(\(\), n\)",
    ),
    "a generator of its own": (
        lambda _, h: h + torch.randn(4, generator=torch.Generator().manual_seed(3)),
        rf"a torch\.Generator is used at .*{HERE}.*leave generator= out",
    ),
    "random_": (
        lambda _, h: h + torch.empty_like(h).random_(0, 3),
        r"no words for x\.random_.*; draw by torch\.randint",
    ),
    "a covariance": (
        lambda _, h: h * torch.cov(h.t()).sum(),
        rf"{HERE} .*torch\.equal, or a function of torch that calls it, as torch\.cov does.*d @ d\.T",
    ),
    "a gradient inside": (
        differentiates,
        rf"\(torch\.autograd\) at .*{HERE}.*gradients of the loss only; write the deriv",
    ),
    "a backward pass inside": (
        trains,
        rf"a backward pass inside of forward or loss at .*{HERE} .*; return one loss for",
    ),
    "an optimizer inside": (steps, rf"a backward pass inside of forward or loss at .*{HERE} .*; return one loss for"),
    "a teacher that could be trained": (
        asks_a_teacher,
        rf"needs a gradient is used at .*{HERE} .*under torch\.no_grad\(\); .*teacher\.requires_grad_\(False\)",
    ),
    "a transform of torch.func": (
        lambda _, h: h + torch.func.grad(lambda row: row.sin().sum())(h),
        rf"\(torch\.func\) at .*{HERE}.*write the derivative",
    ),
    "torch.vmap": (
        lambda linear, h: torch.vmap(linear)(h),
        rf"{HERE} .*: torch\.vmap is used; write it for a whole batch",
    ),
    "a packed sequence": (packs, rf"a packed sequence is made at .*{HERE}.*padded sequence, and mask"),
    "an embedding bag": (
        lambda linear, h: h + F.embedding_bag(torch.zeros(len(h), 2, dtype=torch.long), linear.weight),
        rf"an embedding bag is used at .*{HERE}.*; for ids of one length nn\.Embedding\(\.\.\.\)\(ids\)\.mean\(1\) does the same",
    ),
    "an embedding with max_norm": (
        lambda linear, h: h + F.embedding(torch.zeros(len(h), dtype=torch.long), linear.weight, max_norm=1.0),
        rf"writes its weights when it is read at .*{HERE} .*; leave out max_norm$",
    ),
    "sparse gradients": (
        lambda linear, h: h + F.embedding(torch.zeros(len(h), dtype=torch.long), linear.weight, sparse=True),
        rf"makes sparse gradients at .*{HERE} .*; sparse=False trains the same$",
    ),
    "a parameter of nobody": (
        lambda _, h: h * STRAY,
        rf"needs a gradient is used at .*{HERE}.*reach it by its module",
    ),
    "a batch norm that counts": (counts, rf"{HERE} .*momentum=None divides by the number.*give it a momentum"),
    "a CTC loss": (adds_up, rf"{HERE} .*CTC loss adds up over lengths.*another loss"),
    "a branch on data": (branches, rf"at .*{HERE} `if h\.sum\(\) > 0:`: .*values of a tensor; .*torch\.where"),
    "a loop of .item()": (loops, rf"at .*{HERE} `for _ in range\(int\(h\.max\(\)\.item\(\)\)\):`.*values of a tensor"),
    "a product with .item()": (lambda _, h: h * h.max().item(), rf"aten\.item.*{HERE}.*keep it a tensor"),
    "a print of a value": (prints, rf"{HERE} `print\(.*look at values outside the model"),
    "a numpy call": (
        lambda _, h: h + torch.from_numpy(np.sign(h.detach().numpy())),
        rf"{HERE}.*numpy.*torch functions",
    ),
    "a size that depends on data": (
        lambda _, h: h[h.nonzero()[:, 0]].mean(0) + h,
        rf"aten\.nonzero.*{HERE}.*functions",
    ),
    "a size that follows from a value, of what needs a gradient": (  # an error in torch's C++ code would end this process
        lambda _, h: h * h[:, : h.detach().argmax(1).max().item()].mean(1, keepdim=True),
        rf"aten\.item.*{HERE}.*keep it a tensor",
    ),
    "as many as there are samples, by a mask": (
        lambda _, h: (h.logsumexp(1) - h[F.one_hot(h.argmax(1), 4).bool()])[:, None],
        rf"aten\.index.*{HERE} .*size follows from values of the data; use a mask of fixed size",
    ),
    "tolist() over samples": (
        lambda _, h: h * sum((h > 0).sum(1).tolist()),
        rf"{HERE} .*: tolist\(\) makes Python's numbers of values; keep them in tensors",
    ),
    "a list times the number of samples": (
        lambda linear, h: h + torch.cat([linear.weight[:1]] * h.shape[0]),
        rf"{HERE} .*: a list has an item for each sample; with n = x\.shape\[0\], write t\.expand\(n, \.\.\.\)",
    ),
    "a scripted function": (
        lambda _, h: scripted(h),
        rf"a scripted function is called at .*{HERE} .*without torch\.jit\.script",
    ),
    "a .data that is assigned": (assigns, rf"a \.data is assigned at .*{HERE} .*compute with what it shall be"),
    "sparse tensors": (lambda _, h: h.to_sparse().to_dense(), rf"{HERE}.*to_sparse.*torch functions"),
    "another library's operator": (lambda _, h: twice(h), rf"operation tests\.twice\.default at .*{HERE}.*allow-list"),
    "the largest of a part of the samples": (
        takes_the_largest,
        rf"{HERE} `.*//.*: .*a part of the number of samples; .*torch\.arange\(l\.shape\[0\]\) < l\.shape\[0\] // 2",
    ),
    "a fraction of the samples": (
        takes_some,
        rf"{HERE} `k = max.*: .*a part of the number of samples; keep all samples",
    ),
    "a loop that counts samples": (
        counts_samples,
        rf"{HERE} `for i in .*: a Python loop goes over the samples; compute on",
    ),
    "a loop over samples": (
        lambda linear, h: torch.stack([linear(row) for row in h]),
        rf"{HERE} .*: a Python loop goes over the samples; compute on the whole batch",
    ),
    "a fixed size in a loop": (
        lambda _, h: sum(h.view(3, 4) for _ in range(3)),
        rf"{HERE} .*: the model fixes a size",
    ),
    "a fixed size beside a part of the samples": (
        lambda _, h: h.view(3, 4) * max(1, int(0.5 * len(h.mean(1)))),
        rf"{HERE} .*: the model fixes a size",
    ),
    "a complex mean over samples": (
        lambda _, h: h + torch.view_as_complex(h.view(-1, 2, 2)).mean(0).real.sum(),
        rf"{HERE} .*: the mean of complex numbers .*; write z\.sum\(0\) / z\.shape\[0\]",
    ),
    "a fixed batch size": (lambda _, h: h.view(3, 4), rf"{HERE} .*h\.view\(3, 4\).*fixes a size.*x\.shape"),
    "a size that mixes samples": (lambda _, h: h.flatten()[1:].mean() + h, rf"operation .*{HERE}.*keep samples apart"),
    "a self-chosen size": (lambda _, h: h + h[:, h[0] > 0].sum(), rf"{HERE} .*size follows from values of the data"),
    "autocast": (casts, rf"autocast\('cuda'\) is on at .*{HERE}.*precision='bf16-mixed'"),
    "a hook on a gradient": (hooks, rf"register_hook is called at .*{HERE} .*run no hooks"),
    "Python's random": (lambda _, h: h * random.random(), rf"draws from the module random at .*{HERE} .*torch\.where"),
    "numpy's random": (
        lambda _, h: h * float(np.random.rand()),
        rf"draws from the module numpy\.random at .*{HERE} .*torch\.rand.*draw mixup's lambda in Job\.collate",
    ),
    "an activation that wants a gradient": (
        lambda linear, h: linear(h.detach().requires_grad_()),
        rf"requires_grad is set in forward at .*{HERE}.*leave it out \(model\.disable_input_require_grads",
    ),
    "a re-entrant checkpoint": (
        lambda linear, h: torch.utils.checkpoint.checkpoint(linear, h, use_reentrant=True),
        rf"re-entrant checkpoint at .*{HERE} .*use_reentrant=False, or leave it out and use Job\(recompute=True\)",
    ),
}


@pytest.mark.cases(27)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_says_what_where_and_what_to_do(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    then, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as raised:
        capture(job_of(Calls(then)))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")  # torch has nothing to add


def test_a_part_of_few_samples_is_told_alike() -> None:
    """With so few that export has nothing to guard against."""
    with pytest.raises(CaptureError, match=rf"{HERE} .*no multiple of the batch size; keep all samples and weigh them"):
        capture(dataclasses.replace(job_of(Calls(takes_the_largest)), batch_size=2))


def test_hooks_that_are_there_before_are_refused() -> None:
    on_parameter = nn.Linear(4, 4)
    on_parameter.weight.register_hook(lambda grad: grad * 2)
    after = nn.Linear(4, 4)
    after.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    on_module = nn.Sequential(nn.Linear(4, 4))
    on_module[0].register_full_backward_hook(lambda module, given, made: None)
    for model, name in ((on_parameter, "parameter 'weight'"), (after, "parameter 'weight'"), (on_module, "module '0'")):
        with pytest.raises(CaptureError, match=rf"{name} has a .*hook.* remove the hook"):
            capture(job_of(model))


def transposed(model: nn.Module, weight: torch.Tensor) -> None:
    model.other = nn.Parameter(weight.t())


def sliced(model: nn.Module, weight: torch.Tensor) -> None:
    model.register_buffer("other", weight.detach()[1:])


def expanded(model: nn.Module, weight: torch.Tensor) -> None:
    model.other = nn.Parameter(torch.zeros(1, 4).expand(4, 4))


@pytest.mark.parametrize("share", [transposed, sliced, expanded])
def test_memory_that_two_have_and_training_changes(share: Callable[[nn.Module, torch.Tensor], None]) -> None:
    model = Calls(lambda _, h: h + model.get_submodule("").__getattr__("other").sum())
    share(model, model.linear.weight)
    with pytest.raises(CaptureError, match=r"'(other|linear.weight)' shares memory with .* in forward"):
        capture(job_of(model))


def test_slices_of_one_flat_tensor_are_parameters_like_others() -> None:
    model = nn.Linear(4, 4)
    flat = torch.randn(4, 5)
    model.weight, model.bias = nn.Parameter(flat[:, :4]), nn.Parameter(flat[:, 4])
    assert capture(job_of(model)).param_order == ("weight", "bias")


class Versioned(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]


def test_a_state_that_is_neither_parameter_nor_buffer_is_refused() -> None:
    """It was left out, and `load_state_dict` refused the result of a whole run."""
    with pytest.raises(CaptureError, match=r"module '0' has a get_extra_state: .*keep it in a buffer"):
        capture(job_of(nn.Sequential(Versioned(4, 4))))


def test_a_loss_with_a_parameter_is_refused() -> None:
    loss = nn.Module()
    loss.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(
        CaptureError, match=r"the loss has a parameter 'scale', which is none of the model's.*a part of the"
    ):
        capture(dataclasses.replace(job_of(nn.Linear(4, 4)), loss=loss))
    teacher = nn.Module()
    teacher.net = nn.Linear(4, 4)
    with pytest.raises(
        CaptureError, match=r"'net\.weight', which is none .* as a teacher's, say \.requires_grad_\(False\)"
    ):
        capture(dataclasses.replace(job_of(nn.Linear(4, 4)), loss=teacher))


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_parameter_with_the_name_of_an_input_is_to_be_renamed(name: str) -> None:
    model = Calls(lambda linear, h: h * getattr(model, name))
    setattr(model, name, nn.Parameter(torch.ones(4)))
    with pytest.raises(
        CaptureError, match=rf"^'{name}' of the model has the name of an input.*: rename '{name}' in the model$"
    ):
        capture(job_of(model))
    inner = nn.Module()
    inner.x = nn.Linear(4, 4)
    inner.forward = lambda weight: inner.x(weight)
    job = job_of(inner)
    with pytest.raises(CaptureError, match=r"^'x\.weight' of the model .*: rename 'x' in the model$"):
        capture(dataclasses.replace(job, data=[({"weight": x}, y) for x, y in job.data]))


def test_a_loss_that_writes_a_buffer_of_its_own_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return F.mse_loss(output, target)

    with pytest.raises(CaptureError, match=rf"no buffer of the model .*{HERE} .*a loss .* must be a part of the model"):
        capture(dataclasses.replace(job_of(nn.Linear(4, 4)), loss=Counts()))


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (
            lambda _, h: h.view(int(h.shape[0] / 1), 4),
            r"int\(\) makes a constant of the number of samples; write a // b",
        ),
    ],
)
def test_habits_with_one_word_that_no_graph_has_are_told_which_to_write(then: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=rf"{HERE} .*{words}"):
        capture(job_of(Calls(then)))


def test_what_a_backward_pass_has_left_is_not_to_be_read() -> None:
    model = Calls(lambda linear, h: h if linear.weight.grad is None else 2 * h)
    with pytest.raises(CaptureError, match=rf"a \.grad is read at .*{HERE} .*a graph has none"):
        capture(job_of(model))


class Halves(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value.half() for name, value in super().state_dict(*args, **options).items()}


def test_a_state_dict_that_has_more_than_the_model_or_has_it_otherwise_is_refused() -> None:
    adds = nn.Linear(4, 4)
    adds.register_state_dict_post_hook(lambda module, found, prefix, _: found.update(version=torch.ones(1)))
    for model, name in ((adds, "version"), (Halves(4, 4), "weight")):
        with pytest.raises(CaptureError, match=rf"model\.state_dict\(\) has '{name}', which is no parameter or buffer"):
            capture(job_of(model))


def test_code_of_a_library_is_told_with_the_users_line_and_no_advice_to_rewrite_it(tmp_path: Path) -> None:
    package = tmp_path / "somelib"
    package.mkdir()
    (tmp_path / "somelib-1.0.dist-info").mkdir()
    (package / "__init__.py").write_text("def branch(h):\n    return h if h.sum() > 0 else -h\n")
    sys.path.insert(0, str(tmp_path))
    try:
        branch = importlib.import_module("somelib").branch
    finally:
        sys.path.remove(str(tmp_path))
    says = rf"at .*{HERE} `.*branch\(h\).*` in somelib \(__init__\.py:2 `.*`\): .* values .*; peers cannot run this part of somelib"
    with pytest.raises(CaptureError, match=says):
        capture(job_of(Calls(lambda _, h: branch(h))))


class Counting(nn.Module):
    """What forward has seen of a kind of data: in training, in evaluation or in both."""

    def __init__(self, counts: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()
        self.counts = counts
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts(self):
            self.seen += 1
        return self.norm(self.frozen(self.linear(x))) * self.seen


@pytest.mark.parametrize("counts", [lambda model: not model.training, lambda model: True], ids=["eval", "always"])
def test_evaluation_that_changes_what_training_goes_on_with_is_refused(counts: Callable[[nn.Module], bool]) -> None:
    job = job_of(Counting(counts))
    assert capture(job).evaluate is None
    with pytest.raises(
        CaptureError, match=rf"model\.eval\(\) changes 'seen' at .*{HERE} `self\.seen \+= 1`.*self\.training"
    ):
        capture(dataclasses.replace(job, eval_data=job.data))


def test_a_norm_in_eval_mode_changes_nothing_and_one_in_train_mode_its_statistics() -> None:
    program = capture(job_of(Counting(lambda model: model.training))).train
    written = program.slice(0, program.num_blocks).mutated
    assert set(written) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen"}


class Assigning(Counting):
    """The same by assignment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts(self):
            self.seen = self.seen + 1
        return self.norm(self.linear(x)) * self.seen


@pytest.mark.parametrize("counts", [lambda model: not model.training, lambda model: True], ids=["eval", "always"])
def test_evaluation_that_assigns_a_buffer_is_refused(counts: Callable[[nn.Module], bool]) -> None:
    job = job_of(Assigning(counts))
    with pytest.raises(CaptureError, match=r"model\.eval\(\) changes 'seen', .*self\.training"):
        capture(dataclasses.replace(job, eval_data=job.data))


class Elsewhere(nn.Module):
    """Training assigns a buffer that evaluation writes in a way of its own."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.training:
            self.seen = self.seen + h.detach().mean(0)
        else:
            self.write(self.seen, h)
        return h + self.seen


@pytest.mark.parametrize(
    "write",
    [
        lambda seen, h: seen.add_(1),
        lambda seen, h: seen[1:].add_(1),
        lambda seen, h: F.batch_norm(h, seen, torch.ones(4), training=True),  # torch counts no write of this
    ],
)
def test_evaluation_that_writes_into_what_training_assigns_is_refused(write: Callable[..., Any]) -> None:
    job = job_of(Elsewhere(write))
    with pytest.raises(CaptureError, match=r"model\.eval\(\) changes 'seen' at .*self\.training"):
        capture(dataclasses.replace(job, eval_data=job.data))


@pytest.mark.parametrize("kind", [Counting, Assigning])
def test_evaluation_may_read_what_training_changes(kind: type[Counting]) -> None:
    job = job_of(kind(lambda model: model.training))
    assert capture(dataclasses.replace(job, eval_data=job.data)).evaluate is not None


class Uses(nn.Module):
    """Two layers, in an order of its own in evaluation."""

    def __init__(self, evaluation: str) -> None:
        super().__init__()
        self.a, self.b, self.other = (nn.Linear(4, 4) for _ in range(3))
        self.evaluation = evaluation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.evaluation == "both":  # one operation with weights of two blocks
            return torch.addmm(self.a.bias, x, self.b.weight)
        for name in ("a", "b") if self.training else self.evaluation.split():
            x = self.get_submodule(name)(x).relu()
        return x


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("a b other", r"uses 'other\.weight' at .*, which model\.train\(\) does not; leave out eval_data"),
        ("b a", r"uses 'a\.weight' at .*, in another order than model\.train\(\); leave out eval_data"),
        ("both", r"uses 'a\.bias' at .*, in another order than model\.train\(\); leave out eval_data"),
    ],
)
def test_evaluation_that_no_placement_serves_says_why(order: str, says: str) -> None:
    job = job_of(Uses(order))
    with pytest.raises(CaptureError, match=says):
        capture(dataclasses.replace(job, eval_data=job.data, cuts=("a",)))


class Scaled(nn.Module):
    """Training writes a buffer; evaluation computes something of the buffer alone."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            self.scale.mul_(0.9).add_(x.detach().square().mean(0), alpha=0.1)
        out: torch.Tensor = self.last((x * self.scale.rsqrt()).relu())
        return out


def test_evaluation_reads_what_training_writes_only_in_the_stage_that_writes_it() -> None:
    job = job_of(Scaled())
    captured = capture(dataclasses.replace(job, eval_data=job.data, cuts=("first", "last")))
    assert captured.evaluate is not None
    for first in range(captured.train.num_blocks):
        trained, evaluated = (p.slice(first, first + 1) for p in (captured.train, captured.evaluate))
        assert ("scale" in evaluated.buffers) <= ("scale" in trained.mutated)
