"""Ordinary code that the export says in words of its own: it is captured, and trains what the plain loop trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import nn
from torch.nn.utils import parametrizations

import meshcee
from meshcee.capture import Free, capture, decode_program, encode_program
from meshcee.capture.graph.operators import find_operator
from meshcee.config import Limits
from meshcee.eager import plain
from meshcee.errors import CaptureError, GraphError, UsageError
from meshcee.events import Event
from meshcee.reach.modules import into_training
from tests.capture.exactness import WIDTH, asserted, captured, difference, job_of
from tests.mutation import breaks, changed
from tests.rig.chain import Chain

Then = Callable[["Layers", torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Three layers around whatever a test wants."""

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.groups, self.image = nn.GroupNorm(1, 2), nn.Conv2d(2, 2, 1)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.then(self, self.a(x).tanh())))


def grouped(m: Layers, h: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's mixtures of experts compute by default."""
    experts, order = torch.sort(h[:, :4].argmax(-1))
    counts = torch.histc(experts.float(), bins=4, min=0, max=3)
    out = F.grouped_mm(h[order], m.experts.transpose(-2, -1), offs=torch.cumsum(counts, 0, dtype=torch.int32))
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return out[back]


def unit(m: Layers, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = F.normalize(m.b.weight, dim=1, out=torch.empty(WIDTH, WIDTH))
    return h @ made


def many_at_once(m: Layers, h: torch.Tensor) -> torch.Tensor:
    """As diffusers' UNet does."""
    return h.contiguous() if h.shape[0] >= 64 else h * 2


def follows(m: Layers, h: torch.Tensor) -> torch.Tensor:
    """A teacher that is an average of its student, as BYOL's is."""
    with torch.no_grad():
        m.experts[0].mul_(0.9).add_(m.b.weight, alpha=0.1)
    return h @ m.experts[0]


def sampled(m: Layers, h: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(h, F.softplus(h) + 0.1, validate_args=True).rsample()


def halves(m: Layers, h: torch.Tensor) -> torch.Tensor:
    """Of two views of every sample, as SimCLR has them: what refusals say in place of chunk and split."""
    z = torch.cat([h, h.flip(1)])
    n = z.shape[0] // 2
    one, other = torch.split(z, [n, n])
    return one * other + z[:n] * z[n:]


def channels_last(m: Layers, h: torch.Tensor) -> torch.Tensor:
    """torch's kernel ends the process if it is asked for the gradients of such a norm's weights alone."""
    for _ in range(2):
        image = h.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        h = m.groups(image).flatten(1)
    return h


def made_into(m: Layers, h: torch.Tensor) -> torch.Tensor:
    return h @ torch.eye(WIDTH, WIDTH, out=torch.empty_like(m.b.weight))


def seen_in_another_order(m: Layers, h: torch.Tensor) -> torch.Tensor:
    """A view that the strides of the CPU's convolution allow, and those of the meta device's do not."""
    image = h.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    return h + m.image(image).permute(0, 2, 3, 1).contiguous().view(-1, WIDTH)


def swapped(m: Layers, h: torch.Tensor) -> torch.Tensor:
    weight = m.b.weight.swapaxes(axis0=0, axis1=1) @ (m.c.weight * 2).swapaxes_(0, 1).swapdims_(-1, 0)
    return h.swapaxes(0, 1).swapdims(-1, -2) @ weight


CASES: dict[str, Then] = {
    "a factory that writes to a tensor": made_into,
    "a view of channels last": seen_in_another_order,
    "a group norm over channels last, twice": channels_last,
    "an assertion on values": lambda m, h: asserted(h),
    "a parameter that forward writes": follows,
    "a distribution that checks its arguments": sampled,
    "transposed": lambda m, h: (h.T.mT @ m.b.weight.T).mH.T,
    "transposed by other names": swapped,
    "written to a tensor that is given": unit,
    "integers like a tensor": lambda m, h: h + 0.1 * torch.randint_like(h, 0, 3),
    "experts in one product": grouped,
    "another way for many samples": many_at_once,
    "halves of two views": halves,
    "the number of samples as a tensor": lambda m, h: h / torch.full((), h.shape[0] + 1).log(),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", CASES)
def test_captured_and_exact(name: str) -> None:
    torch.manual_seed(1)
    model = Layers(CASES[name])
    model.experts.requires_grad_(CASES[name] is not follows)
    assert difference(job_of(model)) == ""


class Tagger(nn.Module):
    """Of at most 32 positions; as Hugging Face's models it makes the loss, where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(50, WIDTH), nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 5)
        self.register_buffer("numbers", torch.arange(32)[None])

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        out = self.head(self.words(words) + self.places(self.numbers[:, : words.shape[1]]))
        return out if labels is None else F.cross_entropy(out.view(-1, 5), labels.view(-1))


def padded_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Next(Tagger):
    """What comes next: of each word but the last, or of a first one beside each word."""

    def __init__(self, *, has_first: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH)) if has_first else None

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        h = self.words(words) + self.places(self.numbers[:, : words.shape[1]])
        if self.first is None:
            return self.head(h)[:, :-1]
        return self.head(torch.cat([self.first.expand(h.shape[0], -1, -1), h], 1))


def by_rows(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def by_places(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.transpose(1, 2), labels)


@pytest.mark.cases(2)
@pytest.mark.parametrize("loss", [by_rows, by_places])
@pytest.mark.parametrize("has_first", [False, True], ids=["one label less", "one label more"])
def test_labels_may_be_longer_or_shorter_by_a_constant(has_first: bool, loss: Callable[..., torch.Tensor]) -> None:
    def collate(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        words = padded_rows(rows)
        return (words[:, :-1], words % 5) if has_first else (words, words[:, 1:] % 5)

    torch.manual_seed(0)
    rows = [torch.randint(1, 50, (3 + i % 5,)) for i in range(24)]
    job = job_of(Next(has_first=has_first), loss, data=rows, collate=collate)
    found = capture(job)
    lengths = [entry.value.shape[1] for entry in found.train.inputs if entry.kind == "raw"]
    limits = {length.limit for length in lengths if isinstance(length, Free)}
    assert limits == {32, 33 if has_first else 31}, "the model has 32 places"
    chain, want = Chain(job, found, 3), plain(job)
    chain.run(job.steps)
    assert all(torch.equal(tensor, want.state_dict[name]) for name, tensor in chain.state().items())


@pytest.mark.parametrize("twice", [False, True], ids=["labels", "labels in x and in y"])
def test_labels_are_no_longer_than_what_they_are_for(twice: bool) -> None:
    """A text of many times the usual length has labels for as many words as the model takes; in x and in y they are one tensor."""

    def padded(rows: list[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.where(words > 0, words % 5, -100)
        return ({"words": words, "labels": labels} if twice else words), labels

    torch.manual_seed(1)
    texts = [torch.randint(1, 50, (size,)) for size in range(3, 27)]
    loss = lambda out, y: out if twice else F.cross_entropy(out.view(-1, 5), y.view(-1))  # noqa: E731
    job = job_of(Tagger(), loss, data=texts, collate=padded)
    found = capture(job)
    lengths = [entry.value.shape[1] for entry in found.train.inputs if entry.kind == "raw"]
    assert [(length.limit, length.batch) for length in lengths if isinstance(length, Free)] == [(32, False)] * 2
    chain, want = Chain(job, found, 3), plain(job)
    chain.run(job.steps)
    assert all(torch.equal(tensor, want.state_dict[name]) for name, tensor in chain.state().items())


def test_the_plain_loop_keeps_what_forward_writes_in_bf16_too() -> None:
    """A frozen parameter is in full what it was given as, and as forward has left it once that has written it."""
    torch.manual_seed(1)
    model = Layers(follows)
    for parameter in (model.experts, model.a.weight):
        parameter.requires_grad_(False)
    job = job_of(model, precision="bf16")
    loop, chain = plain(job), Chain(job, captured(job), 3)
    chain.run(job.steps)
    assert torch.equal(loop.state_dict["a.weight"], model.a.weight)
    assert torch.equal(loop.state_dict["experts"], chain.state()["experts"])
    assert not torch.equal(loop.state_dict["experts"].float(), model.experts)


@pytest.mark.parametrize("kind", ["spectral_norm", "orthogonal"])
def test_parametrizations_are_captured_and_exact(kind: str) -> None:
    torch.manual_seed(1)
    model = Layers(lambda m, h: h)
    getattr(parametrizations, kind)(model.b)
    assert difference(job_of(model)) == ""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.c = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        h = self.drop(self.norm(self.a(x if scale is None else x * scale)))
        return self.c(h)


@pytest.mark.cases(2)
@pytest.mark.parametrize("frozen", [(), ("norm",), ("norm", "drop"), ("",)])
def test_eval_mode_stays_inside_of_a_model_in_train_mode(frozen: tuple[str, ...]) -> None:
    """A model that is in eval mode as a whole, as Hugging Face returns it, is trained."""
    torch.manual_seed(1)
    model = Scaled()
    for name in frozen:
        model.get_submodule(name).eval()
    modes = [m.training for m in model.modules()]
    assert difference(job_of(model)) == ""
    assert [m.training for m in model.modules()] == modes
    with capture_logs() as logged:
        random = capture(job_of(model)).train.uses_random
    assert random == ("drop" not in frozen)
    told = [entry["modules"] for entry in logged if entry["event"] == Event.PART_IN_EVAL]
    assert told == [list(frozen)] * (frozen not in ((), ("",))), "who wraps an adapter around from_pretrained is told"


class Freezes(Scaled):
    """As people's detectors are: its `train` keeps the statistics of its norm, and lets no gradient into its first layer."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        self.a.requires_grad_(False)
        return self


@pytest.mark.cases(1)
@pytest.mark.parametrize("inside", [False, True])
def test_a_train_method_of_the_users_is_called(inside: bool) -> None:
    """A fresh module is in train mode already, and every loop calls `train` all the same."""

    def fresh() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Freezes()) if inside else Freezes()

    def story() -> None:
        model = fresh()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        job = job_of(model)
        assert difference(job) == ""
        found = meshcee.train(job, local=1)
        assert all(m.training for m in model.modules())
        frozen = [name for name in before if ".norm.running" in f".{name}" or f".{name}".endswith(".a.weight")]
        assert len(frozen) == 3
        assert all(torch.equal(found.state_dict[name], before[name]) for name in frozen)

    story()
    with changed(into_training, "module.train()", "pass"):
        assert breaks(story)


def test_a_train_method_that_would_wake_what_is_asleep_is_refused() -> None:
    """Whether a loop calls it then, nobody can see."""
    model = Freezes()
    model.drop.eval()
    for begin in (capture, plain):
        with pytest.raises(
            UsageError, match=r"Freezes.train\(\) puts 'drop' into train mode, and it is in eval mode now"
        ):
            begin(job_of(model))
    model.train()
    model.norm.eval()  # as train() leaves it
    assert difference(job_of(model)) == ""


def test_an_input_may_be_none() -> None:
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(5)
    rows = [((torch.randn(WIDTH, generator=g), None), torch.randn(WIDTH, generator=g)) for _ in range(24)]
    for data in (rows, [({"x": x, "scale": none}, y) for (x, none), y in rows]):
        assert difference(job_of(Scaled(), data=data)) == ""
    mixed = [((x, None if i else torch.ones(WIDTH)), y) for i, ((x, _), y) in enumerate(rows)]
    with pytest.raises(UsageError, match=r"samples"):
        capture(job_of(Scaled(), data=mixed))


class Clamps(Scaled):
    """It writes to its samples."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.clamp_(-0.1, 0.1), scale)


@pytest.mark.parametrize("given", ["a tensor", "views", "an array"])
def test_a_target_in_the_memory_of_a_sample_that_forward_writes_is_refused(given: str) -> None:
    def shared(rows: list[Any]) -> tuple[Any, Any]:
        stacked = torch.stack(rows)
        whole = stacked.numpy() if given == "an array" else stacked
        return (whole[:, :-1], whole[:, 1:]) if given == "views" else (whole, whole)

    def apart(rows: list[Any]) -> tuple[Any, Any]:
        x, y = shared(rows)
        return x, y.copy() if given == "an array" else y.clone()

    torch.manual_seed(1)
    data = list(torch.randn(24, WIDTH + (given == "views")))
    with pytest.raises(CaptureError, match=r"collate gives x and y the same memory.*: return y\.clone\(\)"):
        capture(job_of(Clamps(), data=data, collate=shared))
    capture(job_of(Scaled(), data=data, collate=shared))  # neither of these is refused
    capture(job_of(Clamps(), data=data, collate=apart))


HELD = torch.randn(24, WIDTH)
BUFFER = torch.empty(3, WIDTH)


def buffered(rows: list[Any]) -> torch.Tensor:
    return torch.stack([HELD[i] for i in rows], out=BUFFER[: len(rows)])


VIEWS: dict[str, Callable[[list[Any]], Any]] = {
    "a slice": lambda rows: HELD[rows[0] : rows[0] + len(rows)],
    "a slice of an array": lambda rows: HELD.numpy()[rows[0] : rows[0] + len(rows)],
    "a buffer": buffered,
    "an expanded row": lambda rows: HELD[rows[0]].expand(len(rows), -1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("who", ["forward", "the loss"])
def test_a_micro_batch_that_is_a_view_of_what_collate_holds_is_refused_where_it_is_written(view: str, who: str) -> None:
    """A plain loop changes the data, and the next data epoch has other samples."""

    def collate(rows: list[Any]) -> Any:
        one, other = VIEWS[view](rows), torch.stack([HELD[i] for i in rows]).tanh()
        return (one, other) if who == "forward" else (other, one)

    def written(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, y.mul_(0.5))

    model, loss = (Clamps(), F.mse_loss) if who == "forward" else (Scaled(), written)
    job = job_of(model, loss, data=list(range(20)), collate=collate)
    name = "x" if who == "forward" else "y"
    if view != "an expanded row":
        with pytest.raises(
            CaptureError, match=rf"collate gives {name} as a view of what the data holds.*{name}\.clone\(\)"
        ):
            capture(job)
    capture(job_of(Scaled(), F.mse_loss, data=list(range(20)), collate=collate))  # nobody writes


def test_a_view_of_the_samples_that_is_written_is_refused() -> None:
    def first(rows: list[Any]) -> Any:
        return rows[0][None] if len(rows) == 1 else torch.stack(rows), torch.stack(rows).tanh()

    model = nn.Sequential(nn.Hardtanh(-0.1, 0.1, inplace=True), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"collate gives x as a view of what the data holds"):
        capture(job_of(model, data=list(HELD), collate=first, micro_batch_size=1))


def test_disjoint_parts_of_one_tensor_are_no_shared_memory() -> None:
    def parts(rows: list[Any]) -> Any:
        return tuple(torch.cat([torch.stack(rows)] * 2, 1).split(WIDTH, 1))

    found = meshcee.check(job_of(Clamps(), data=list(HELD), collate=parts), stages=(2,), steps=3)
    assert found.equal, found.differs


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Parameter(torch.randn(20, 4)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.unsqueeze(-1) + self.places[: x.shape[1]]).mean((1, 2))


def test_a_table_of_positions_limits_the_lengths_that_vary() -> None:
    g = torch.Generator().manual_seed(5)
    data = [(torch.randn(4 + i % 7, generator=g), torch.randn((), generator=g)) for i in range(24)]
    job = job_of(Table(), data=data, batch_size=4, micro_batch_size=1)
    assert difference(job) == ""
    assert [d.limit for x in capture(job).train.inputs for d in x.value.shape if isinstance(d, Free)] == [20]


class Windowed(Table):
    """What is longer than its window is cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, -6:] if x.shape[1] > 6 else x)


@pytest.mark.parametrize("long", [1, 24])
def test_a_branch_on_the_length_is_refused_where_a_sample_goes_the_other_way(long: int) -> None:
    """All samples that capture looks at may be long: then a shorter micro-batch has a reason."""
    data = [(torch.ones(8 + i % 3 if i < long else 4 + i % 7), torch.ones(())) for i in range(24)]
    job = job_of(Windowed(), data=data, batch_size=4, micro_batch_size=1)
    if long == 1:
        with pytest.raises(CaptureError, match=r"x is .* another way for lengths under 7: pad to 7, or write it for"):
            capture(job)
        return
    found = capture(job)
    target = torch.ones(1)
    assert found.misfit({"x": torch.ones(1, 7), "y": target}) is None
    assert "for lengths under 7: pad to 7" in str(found.misfit({"x": torch.ones(1, 6), "y": target}))


@pytest.mark.parametrize("offsets", [[2, 2, 5, 6], [2, 1, 5, 7], [-1, 2, 5, 7], [2, 2, 5, 9]])
def test_a_peer_computes_experts_only_over_all_rows(offsets: list[int]) -> None:
    """The kernel would leave rows as memory that nobody wrote."""
    call = find_operator("aten._grouped_mm.default").call
    rows, experts = torch.randn(7, 8), torch.randn(4, 8, 8)
    with pytest.raises(ValueError, match="all rows"):
        call(rows, experts, torch.tensor(offsets, dtype=torch.int32))
    good = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    assert torch.equal(call(rows, experts, good)[:2], torch.mm(rows[:2], experts[0]))


def test_a_size_that_follows_from_values_is_refused_in_words() -> None:
    with pytest.raises(CaptureError, match=r"test_ordinary\.py:\d+ .*size follows from values of the data; use a mask"):
        capture(job_of(Layers(lambda m, h: h + h[torch.where(h[:, 0] > 0)[0]].sum())))


def state_space(m: Layers, h: torch.Tensor) -> torch.Tensor:
    """As S4D: a kernel of complex exponentials, and a convolution by Fourier."""
    decay = -torch.exp(m.a.bias) + 1j * m.b.bias
    kernel = (torch.exp(decay[:, None] * torch.arange(WIDTH)) * (2 - 1j)).sum(0)
    both = torch.fft.rfft(h, n=2 * WIDTH) * torch.fft.rfft(2 * kernel.real, n=2 * WIDTH)
    return torch.fft.irfft(both, n=2 * WIDTH)[..., :WIDTH]


@pytest.mark.parametrize(
    "then",
    [
        state_space,
        lambda m, h: ((h + 1j) ** 2).real / (h - 2j).abs(),
        lambda m, h: torch.where(h > 0, h, 1j).abs() + torch.add(h + 0j, h, alpha=2j).imag,
        lambda m, h: (h * torch.full((WIDTH,), 1j)).imag,
    ],
    ids=["state space", "powers", "where", "full"],
)
def test_complex_numbers_of_python(then: Then) -> None:
    assert difference(job_of(Layers(then)), ["late"]) == ""


@pytest.mark.parametrize("wrong", [[1.0], [1.0, 2.0, 3.0], [1, 2], ["1", 2.0], {"r": 0}, None])
def test_what_comes_as_a_complex_number_and_is_none(wrong: Any) -> None:
    document = msgpack.unpackb(encode_program(capture(job_of(Layers(lambda m, h: (h + 1j).abs()))).train))
    graph = msgpack.packb(_with(document, wrong))
    with pytest.raises(GraphError):
        decode_program(graph, Limits(graph_bytes=len(graph)))


def _with(document: Any, wrong: Any) -> Any:
    if isinstance(document, dict):
        return {
            key: wrong if key == "c" and value == [0.0, 1.0] else _with(value, wrong) for key, value in document.items()
        }
    return [_with(value, wrong) for value in document] if isinstance(document, list) else document


@pytest.mark.parametrize(
    "make",
    [
        lambda h: h.new_ones(WIDTH, WIDTH),
        lambda h: h.new_full((WIDTH, WIDTH), 2),
        lambda h: h.new_zeros(WIDTH, WIDTH) + 1,
        lambda h: torch.ones_like(h[:1].expand(WIDTH, WIDTH)),
    ],
    ids=["new_ones", "new_full", "new_zeros", "ones_like"],
)
def test_a_branch_on_numbers_that_are_made_like_others_is_taken(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As Transformer-XL's mask."""

    def masked(m: Any, h: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(make(h), diagonal=1).bool()
        return h @ h.new_ones(WIDTH, WIDTH).masked_fill(mask, 0.0) if mask.any() else h

    assert difference(job_of(Layers(masked)), ["late"]) == ""


def test_a_constant_that_is_asked_for_its_type_alone_is_no_obstacle() -> None:
    """As pytorch-ssim does, by `.data`, of which nothing is left in the graph."""
    window = torch.ones(WIDTH)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = window if window.data.type() == out.data.type() else window.type_as(out)
        return ((out - y).pow(2) * weights).mean()

    assert difference(job_of(Layers(lambda m, h: h), loss), ["late"]) == ""


@pytest.mark.parametrize(
    ("ordinary", "said"),
    [
        (lambda m, h: h if torch.equal(h, h.clone()) else -h, "torch.equal.* looks at the values.*ask `a is b`"),
        (lambda m, h: torch.where((h > 0).to(torch.uint8), h, -h), r"write mask\.bool\(\)"),
    ],
    ids=["equal", "uint8"],
)
def test_words_of_what_looks_at_values(ordinary: Callable[[Any, torch.Tensor], torch.Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(job_of(Layers(ordinary)))


def test_words_of_the_adaptive_softmax_are_followed() -> None:
    class Words(nn.Module):
        def __init__(self, by_hand: bool) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [5, 10], 2.0)
            self.by_hand = by_hand

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return F.nll_loss(self.last.log_prob(h), y) if self.by_hand else self.last(h, y).loss  # type: ignore[no-any-return]

    data = [((torch.randn(WIDTH), i % 20), 0) for i in range(24)]
    with pytest.raises(CaptureError, match=r"write torch\.nn\.functional\.nll_loss\(adaptive\.log_prob\(h\), y\)"):
        capture(job_of(Words(False), lambda out, y: out, data=data))
    assert difference(job_of(Words(True), lambda out, y: out, data=data), ["late"]) == ""


@pytest.mark.parametrize(
    "write",
    [
        lambda kept, h: kept[:2].copy_(h[:2]),
        lambda kept, h: kept[0].add_(1.0),
        lambda kept, h: kept.t()[0].mul_(0.5),
        lambda kept, h: kept.view(-1)[:3].fill_(2.0),
        lambda kept, h: kept.__setitem__(slice(0, 2), torch.where(h > 0, h, kept[:2])),
    ],
    ids=["slice", "row", "transposed", "view", "where"],
)
def test_a_write_through_a_view_of_a_hidden_tensor_is_refused(
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    """It lies in a list, so no state has it; stages would share it."""
    hidden = [torch.zeros(4, WIDTH)]

    def ordinary(m: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            write(hidden[0], h)
        return h + hidden[0].mean(0)

    with pytest.raises(
        CaptureError, match=r"changes a tensor that is no buffer of the model in place at .*test_ordinary"
    ):
        capture(job_of(Layers(ordinary)))
