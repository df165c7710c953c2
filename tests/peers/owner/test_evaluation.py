"""Evaluation and prediction on the mesh: the same numbers as the eager model, in the order of the samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import meshcee
from meshcee.capture import capture
from meshcee.eager import plain_steps
from meshcee.equality import why_not_shared
from meshcee.errors import ProtocolError, UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.member.coding import Coding
from peers.owner.evaluation import EvaluationFeed
from peers.wire import messages
from tests.peers.member.test_training import Net, Pairs, make_job

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

DATA = Pairs(23)


class Others(Pairs):
    """As Pairs, but the samples are not in the order of their numbers."""

    def __getitem__(self, i: int) -> tuple[int, int]:
        return (7 * i) % 23, (7 * i + 1) % 23


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output.argmax(-1) == target).float().mean())


def eager(model: torch.nn.Module, data: Pairs, micro: int) -> list[torch.Tensor]:
    """Outputs in eval mode, micro-batch by micro-batch: another size of the batch may round differently."""
    model.eval()
    x = torch.tensor([data[i][0] for i in range(len(data))])
    with torch.no_grad():
        return [model(part) for part in x.split(micro)]


def job_of(**changes: Any) -> Job:
    return make_job(micro_batch_size=6, **changes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stages", [1, 3])
async def test_predictions_equal_the_eager_model_in_sample_order(stages: int) -> None:
    job = job_of()
    data = Others(23)  # 3 micro-batches of 6 and one of 5
    async with meshcee.join(local=3) as mesh:
        output = await mesh.predict(job, data, stages=stages)
        assert torch.equal(output, torch.cat(eager(job.model, data, 6)))


class WithLoss(torch.nn.Module):
    """Returns a loss beside what it predicts, as minGPT does."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.a, self.alone = torch.nn.Linear(4, 4), alone

    def forward(self, x: torch.Tensor) -> Any:
        out = self.a(x)
        return out.square().mean() if self.alone else (out, out.square().mean())


async def test_an_output_without_rows_is_left_out_of_predictions() -> None:
    rows = [(torch.randn(4), 0.0) for _ in range(8)]
    job = Job(
        model=WithLoss(),
        loss=lambda out, y: out[1],
        data=rows,
        optimizer=Optimizer("SGD", lr=0.1),
        batch_size=4,
        micro_batch_size=2,
        steps=2,
    )
    async with meshcee.join(local=1) as mesh:
        out, loss = await mesh.predict(job, rows)
        assert out.shape == (8, 4)
        assert loss is None
        with pytest.raises(UsageError, match=r"^the model's output has no first dimension of samples"):
            await mesh.predict(replace(job, model=WithLoss(alone=True), loss=lambda out, y: out), rows)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
async def test_a_trained_state_is_evaluated_as_the_eager_model_would_be(stages: int) -> None:
    job = job_of(metrics={"accuracy": accuracy}, steps=12, schedule=None)
    async with meshcee.join(local=3) as mesh:
        before = await mesh.evaluate(job, DATA, stages=stages)
        async for _ in mesh.train(job, stages=stages):
            pass
        state = mesh.result.state_dict
        after = await mesh.evaluate(job, DATA, state=state, stages=stages)
        predicted = await mesh.predict(job, DATA, state=state, stages=stages)
        again = await mesh.evaluate(job, DATA, stages=stages)
    model = Net()
    model.load_state_dict(state)
    parts = eager(model, DATA, 6)
    assert torch.equal(predicted, torch.cat(parts))
    targets = torch.tensor([DATA[i][1] for i in range(23)]).split(6)
    losses = [float(torch.nn.functional.cross_entropy(o, t)) * len(t) for o, t in zip(parts, targets)]
    assert after["loss"] == sum(losses) / 23
    assert after["accuracy"] == pytest.approx(accuracy(torch.cat(parts), torch.cat(targets)))
    assert after["accuracy"] > before["accuracy"]
    assert again == before  # evaluating, and training in between, has changed nothing of the job's own model


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


async def test_a_state_that_load_state_dict_would_read_otherwise_is_refused() -> None:
    """Of tied weights torch keeps those that are loaded last."""
    rows = [(torch.tensor(i % 5), torch.tensor((i + 1) % 5)) for i in range(8)]
    job = make_job(model=Tied(), data=rows, loss=torch.nn.functional.cross_entropy, batch_size=8, micro_batch_size=8)
    own = {name: torch.randn(5, 4) for name in ("words.weight", "head.weight")}
    tied = dict.fromkeys(own, own["words.weight"])
    async with meshcee.join(local=1) as mesh:
        with pytest.raises(
            UsageError, match=r"'head\.weight' and 'words\.weight' are one tensor in the model and differ"
        ):
            await mesh.evaluate(job, rows, state=own, stages=1)
        with pytest.raises(UsageError, match="has an entry 'other', which the model has not"):
            await mesh.predict(job, rows, state=tied | {"other": torch.zeros(1)}, stages=1)
        found = await mesh.evaluate(job, rows, state=tied, stages=1)
    model = Tied()
    model.load_state_dict(tied)
    x, y = map(torch.stack, zip(*rows))
    assert found["loss"] == torch.nn.functional.cross_entropy(model(x), y).item()


@pytest.mark.cases(1)
@pytest.mark.parametrize("micro", [2, 4, 5])
async def test_a_summed_loss_is_evaluated_as_the_mean_per_sample(micro: int) -> None:
    """In micro-batches of any size, the last of them smaller."""

    def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target, reduction="sum")

    job = make_job(loss=summed, reduction="sum", micro_batch_size=micro, batch_size=2 * micro)
    data = Pairs(10)
    async with meshcee.join(local=1) as mesh:
        found = await mesh.evaluate(job, data, stages=1)
    assert isinstance(job.model, torch.nn.Module)
    output = torch.cat(eager(job.model, data, micro))
    target = torch.tensor([data[i][1] for i in range(10)])
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(output, target)), rel=1e-6)


class Unseeded:
    """(x, x) of a generator of its own: another one each time that it is read."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 28

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, generator=self.own)
        return x, x


class Identity(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one * x


def far(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output - target).abs().max())


def of_its_own(**changes: Any) -> Job:
    settings = {"model": Identity(), "loss": torch.nn.functional.mse_loss, "data": Unseeded(), "schedule": None}
    return job_of(**settings, **changes)


async def test_metrics_are_of_the_samples_that_were_fed() -> None:
    async with meshcee.join(local=1) as mesh:
        found = await mesh.evaluate(of_its_own(metrics={"far": far}), Unseeded(), stages=1)
    assert found == {"loss": 0.0, "far": 0.0}


@pytest.mark.parametrize("needed", [{"metrics": {"far": far}}, {"weight": torch.numel}, {}])
def test_a_target_is_kept_until_it_is_asked_for_once(needed: dict[str, Any]) -> None:
    job = of_its_own(eval_data=Unseeded(), **needed)
    feed = EvaluationFeed(job, capture(job), 6)
    round = next(feed.rounds())
    for micro in (1, 0):
        inputs = feed.inputs(round, micro)
        if needed:
            target = feed.target(round, micro)
            assert torch.equal(target, inputs["x"])
            assert feed.target_shares(target, [(0, 1), (1, len(target))]) == [1 / len(target), 1 - 1 / len(target)]
            with pytest.raises(ProtocolError, match="not fed"):
                feed.target(round, micro)
        else:
            assert feed.target(round, micro) is None


@pytest.mark.parametrize("micro", [2, 4])
async def test_a_weight_counts_in_an_evaluation_as_in_training(micro: int) -> None:
    """The mean over tokens, however samples are divided; where a micro-batch has none, its loss is 0 / 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12))
    tokens = torch.randint(0, 12, (12, 6))
    targets = tokens.clone()
    targets[4:8] = -100
    targets[9, :5] = -100

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)

    job = meshcee.Job(
        model, loss, list(zip(tokens, tokens)), meshcee.Optimizer("SGD", lr=0.1), batch_size=4, micro_batch_size=micro, steps=2,
        weight=lambda y: float((y != -100).sum()),
    )  # fmt: skip
    async with meshcee.join(local=1) as mesh:
        found = await mesh.evaluate(job, list(zip(tokens, targets)))
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(loss(model(tokens), targets)), rel=1e-5)


class Noise(torch.nn.Module):
    """Nothing in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x + torch.randn_like(x)


class Noisy(Net):
    """Draws while it is evaluated, as a variational autoencoder or a diffusion model does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h) + 0.1 * torch.randn_like(h)
        return self.head(torch.nn.functional.dropout(h, 0.2))


@pytest.mark.slow
async def test_what_is_drawn_in_an_evaluation_is_the_same_each_time_and_for_any_plan() -> None:
    """By the process's own numbers a run with EarlyStop ended after another step each time."""
    torch.manual_seed(0)
    job = job_of(model=Noisy(), steps=2)
    found = []
    async with meshcee.join(local=3) as mesh:
        for stages in (1, 3, 3):
            torch.rand(stages)  # what else the process draws
            found.append(await mesh.predict(job, DATA, stages=stages))
    x = torch.tensor([DATA[i][0] for i in range(len(DATA))])
    assert isinstance(job.model, torch.nn.Module)
    job.model.eval()
    parts = []
    for k, part in enumerate(x.split(6)):
        with torch.no_grad(), meshcee.seeded(job.seed, -1, k):
            parts.append(job.model(part))
    assert all(torch.equal(one, torch.cat(parts)) for one in found)


def test_a_group_does_not_share_an_evaluation_that_draws() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(23, 16), Noise(), torch.nn.Linear(16, 23))
    job = job_of(model=model, groups=True, eval_data=DATA)
    assert "evaluation draws random numbers there" in why_not_shared(job, capture(job))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "made_up",
    [
        [],
        [torch.zeros(())],
        [torch.zeros(()), torch.zeros(6, 2)],
        [torch.zeros(2), torch.zeros(6, 23)],
        [torch.zeros(()), torch.zeros(5, 23)],
        [1.0, None],
    ],
    ids=["nothing", "no output", "another shape", "many losses", "fewer samples", "no tensors"],
)
async def test_what_a_member_makes_up_is_its_own_fault_and_not_the_metrics(
    made_up: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = Coding.frame

    def made(coding: Coding, kind: str, header: Any, values: Any, *more: Any) -> Any:
        return frame(coding, kind, header, made_up if kind == messages.OUTPUT else values, *more)

    monkeypatch.setattr(Coding, "frame", made)
    async with meshcee.join(local=1) as mesh:
        with pytest.raises(ProtocolError, match="what it returned of an evaluation is not what the graph says"):
            await mesh.evaluate(job_of(metrics={"accuracy": accuracy}), DATA, stages=1)


async def test_what_cannot_be_evaluated_is_said_at_once() -> None:
    job = job_of()
    async with meshcee.join(local=1) as mesh:
        with pytest.raises(UsageError, match="nothing to evaluate"):
            await mesh.evaluate(job)
        with pytest.raises(UsageError, match="has no entry"):
            await mesh.predict(job, DATA, state={})
        state = job.model.state_dict()
        with pytest.raises(UsageError, match="in the state and"):
            await mesh.predict(job, DATA, state=state | {"embed.weight": torch.zeros(2, 2)})


class Centred(torch.nn.Module):
    """A mean of what was seen, which training assigns or writes and evaluation reads."""

    mean: torch.Tensor

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        self.register_buffer("mean", torch.zeros(8))
        self.assigns = assigns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.training and self.assigns:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        elif self.training:
            self.mean[1:] += 0.1 * h.detach().mean(0)[1:]
        out: torch.Tensor = self.b((h - self.mean).relu())
        return out


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("assigns", "stages"), [(True, 1), (False, 2)]
)  # what is assigned is one block from its first read on
async def test_a_buffer_that_only_training_changes_is_as_in_a_plain_loop_with_evaluations(
    assigns: bool, stages: int
) -> None:
    torch.manual_seed(4)
    data = [(torch.randn(8), torch.tensor(i % 3)) for i in range(24)]
    job = replace(job_of(steps=3, eval_data=data, eval_every=1), model=Centred(assigns), data=data)
    losses, evaluated = [], []
    for done in plain_steps(job):
        parts = [torch.stack(part) for part in zip(*data)]
        done.module.eval()
        with torch.no_grad():
            each = [float(job.loss(done.module(x), y)) * len(y) for x, y in zip(*(part.split(6) for part in parts))]
        done.module.train()
        losses.append(done.loss)
        evaluated.append(sum(each) / len(data))
        state = {name: tensor.clone() for name, tensor in done.state_dict.items()}
    async with meshcee.join(local=2) as mesh:
        reports = [report async for report in mesh.train(job, stages=stages)]
        found = mesh.result.state_dict
    assert [report.loss for report in reports] == losses
    assert [report.metrics["loss"] for report in reports] == evaluated
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert state["mean"].abs().max() > 0
