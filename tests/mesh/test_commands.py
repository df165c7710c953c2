"""The user's commands, as the README gives them, and what happens when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import safetensors.torch

from dht.addresses import peer_of
from dht.signing import Identity, Token
from meshcee.files.home import Home
from peers.node.admission import Membership
from tests.mesh.harness import Peers, environment, meshcee, p2pds_of, peers, training, wait_until

ROOT = Path(__file__).parents[2]

JOB = """
import torch
from torch import nn
import meshcee

torch.manual_seed(0)
STEPS = {steps}

class Data:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((16,), i / 64), torch.tensor(float(i % 2))

job = meshcee.Job(
    name="tiny",
    model=nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)),
    loss=lambda out, y: {loss},
    data=Data(),
    optimizer=meshcee.Optimizer("SGD", lr=0.1),
    batch_size=16,
    micro_batch_size=4,
    steps=STEPS,
)
"""
MSE = "nn.functional.mse_loss(out.squeeze(-1), y)"


def write_job(folder: Path, steps: int = 10, loss: str = MSE) -> Path:
    path = folder / "job.py"
    path.write_text(JOB.format(steps=steps, loss=loss))
    return path


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    with peers(tmp_path_factory.mktemp("mesh"), 3) as found:
        yield found


@pytest.mark.smoke
def test_a_token_admits_peers_and_a_job_trains_on_them(mesh: Peers, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    done = meshcee("train", str(write_job(tmp_path)), "--join", mesh.token, "--out", str(out), "--json", home=mesh.home)
    assert done.code == 0, done.err
    reports = [line["report"] for line in done.lines if "report" in line]
    assert [r["step"] for r in reports] == list(range(10))
    result = done.lines[-1]["result"]
    assert result["step_s"] > 0
    assert result["predicted_step_s"] > 0
    assert reports[-1]["loss"] < reports[0]["loss"]
    assert safetensors.torch.load_file(out)["0.weight"].shape == (32, 16)


@pytest.mark.slow
def test_a_command_needs_no_standard_stream(tmp_path: Path) -> None:
    """libuv aborted the process, as a socket had the number of a stream that whoever started it had closed."""
    job, out = write_job(tmp_path, 1), tmp_path / "weights.safetensors"
    command = [sys.executable, "-m", "meshcee", "train", str(job), "--local", "1", "--out", str(out)]
    closed = ["/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command]
    done = subprocess.run(closed, env=environment(tmp_path / "home"), timeout=120, check=False)
    assert done.returncode == 0
    assert out.exists()


@pytest.mark.slow
def test_doctor_compares_this_machine_with_the_mesh(mesh: Peers, tmp_path: Path) -> None:
    done = meshcee("doctor", "--join", mesh.token, "--json", home=tmp_path)
    assert done.code == 0, done.err
    told = {(f["group"], f["what"]): f for f in (line["finding"] for line in done.lines if "finding" in line)}
    assert told["mesh", "clock"]["level"] == "ok"
    assert "3 peers" in told["mesh", "join"]["detail"]
    assert told["mesh", "reach"]["level"] == "unknown"  # nobody is on another machine
    assert told["processes", "meshcee"]["level"] == "ok"
    invite, certificate = (one for (group, _), one in told.items() if group == "membership")
    assert "ends in 6 days" in invite["detail"]
    assert "member already" not in invite["detail"], "it was none before this command"
    assert "none lie here yet" in certificate["detail"]
    assert "as 3 peers of that class" in told["exactness", "kernels"]["detail"]


@pytest.mark.slow
def test_status_shows_peers_links_and_the_coordinator(mesh: Peers) -> None:
    def look() -> dict:
        done = meshcee("status", "--join", mesh.token, "--json", home=mesh.home)
        assert done.code == 0, done.err
        return json.loads(done.out)

    deadline_s = time.monotonic() + 30
    apart = sys.platform == "linux"
    while len((seen := look())["links"]) < 6 or (apart and not all(p["guards"] for p in seen["peers"])):
        assert time.monotonic() < deadline_s, seen
    assert {p["name"] for p in seen["peers"]} >= {"peer-0", "peer-1", "peer-2"}
    assert seen["coordinator"]["peer"] in mesh.ids.values()
    assert all(link["latency_s"] > 0 and link["bandwidth_bytes_per_s"] > 0 for link in seen["links"])
    shown = meshcee("status", "--join", mesh.token, home=mesh.home)
    assert "coordinator" in shown.out
    assert "peer-2" in shown.out
    assert f"graphs of others are checked {'apart, behind' if apart else 'in the process'}" in shown.out


@pytest.mark.slow
def test_a_dry_run_plans_and_trains_nothing(mesh: Peers, tmp_path: Path) -> None:
    done = meshcee("train", str(write_job(tmp_path)), "--join", mesh.token, "--dry-run", "--json", home=mesh.home)
    assert done.code == 0, done.err
    assert any("plan" in line for line in done.lines)
    assert not any("report" in line for line in done.lines)


@pytest.mark.slow
def test_plan_and_simulate_say_what_a_live_mesh_would_do(mesh: Peers, tmp_path: Path) -> None:
    job, page = str(write_job(tmp_path)), tmp_path / "plan.html"
    arguments = ("plan", job, "--join", mesh.token, "--stages", "2", "--explain", "--html", str(page))
    told = meshcee(*arguments, home=mesh.home)
    assert told.code == 0, told.err
    assert "stage 1: blocks" in told.out
    assert "best single device: peer-" in told.out
    assert told.out.count("left out: peer-") == 1
    assert not any(peer in told.out for peer in mesh.ids.values())
    assert "<svg" in page.read_text()
    told = meshcee("plan", job, "--join", mesh.token, "--compare", home=mesh.home)
    assert told.code == 0, told.err
    assert "  twice the memory on peer-" in told.out
    assert not any(peer in told.out for peer in mesh.ids.values())
    done = meshcee("simulate", job, "--join", mesh.token, "--stages", "3", "--json", home=mesh.home)
    assert done.code == 0, done.err
    (result,) = done.lines
    assert result["period_s"] > 0
    assert set(result["utilisation"]) == set(mesh.ids.values())
    refused = meshcee("plan", job, "--join", mesh.token, "--stages", "40", home=mesh.home)
    assert refused.code == 5, refused.err
    assert "40 stages were asked for" in refused.err
    assert meshcee("plan", job, home=mesh.home).code == 2


@pytest.mark.slow
def test_runs_are_listed_and_their_logs_kept(mesh: Peers, tmp_path: Path) -> None:
    done = meshcee("train", str(write_job(tmp_path, steps=3)), "--join", mesh.token, home=mesh.home)
    assert done.code == 0, done.err
    assert "Done: 3 steps" in done.out
    listed = meshcee("run", "list", "--json", home=mesh.home).lines
    assert listed[0]["state"] == "done"
    assert listed[0]["step"] == 3
    assert len(meshcee("run", "logs", "last", "--json", home=mesh.home).lines) == 3


def test_the_first_interrupt_finishes_the_step_and_saves(mesh: Peers, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    with training(mesh, write_job(tmp_path, steps=100_000), "--out", str(out)) as process:
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    result = json.loads(rest.splitlines()[-1])["result"]
    assert result["state"] == "stopped"
    assert 0 < result["steps"] < 100_000
    assert out.exists()


@pytest.mark.slow
def test_the_second_interrupt_aborts_with_130_and_frees_the_peers(mesh: Peers, tmp_path: Path) -> None:
    # A step that takes long: the first Ctrl-C waits for it, the second does not.
    loss = MSE + " + 0 * (out @ torch.ones(1, 4_000_000)).sum()"
    with training(mesh, write_job(tmp_path, steps=100_000, loss=loss)) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    arguments = ("train", str(write_job(tmp_path, steps=2)), "--join", mesh.token, "--stages", "3", "--json")
    done = meshcee(*arguments, home=mesh.home)
    assert done.code == 0, done.err
    plan = next(line["plan"] for line in done.lines if "plan" in line)
    assert len(plan["pipelines"][0]["stages"]) == 3


@pytest.mark.slow
def test_a_killed_p2pd_is_restarted_and_its_peer_comes_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with peers(home, 2) as mesh:
        launcher = psutil.Process(mesh.processes["peer-1"].pid).children()[0]
        daemon = launcher.children()[0]
        daemon.kill()
        daemon.wait(5)

        def trains_on_both() -> bool:
            arguments = ("train", str(write_job(tmp_path, steps=2)), "--join", mesh.token, "--stages", "2")
            return meshcee(*arguments, home=home).code == 0

        wait_until("a job trains on both peers again", trains_on_both, 40)
        assert mesh.processes["peer-1"].poll() is None


@pytest.mark.slow
def test_the_owner_may_compute_too(tmp_path: Path) -> None:
    with peers(tmp_path / "home", 1) as mesh:
        arguments = ("train", str(write_job(tmp_path)), "--join", mesh.token, "--compute", "--device", "cpu")
        done = meshcee(*arguments, "--stages", "2", "--json", home=mesh.home)
    assert done.code == 0, done.err
    plan = next(line["plan"] for line in done.lines if "plan" in line)
    assert len(plan["pipelines"][0]["stages"]) == 2


@pytest.mark.slow
def test_a_fresh_token_admits_too(mesh: Peers, tmp_path: Path) -> None:
    fresh = meshcee("token", "--join", mesh.token, "--valid", "1h", home=mesh.home)
    assert fresh.code == 0, fresh.err
    seen = meshcee("status", "--join", fresh.out.strip(), "--json", home=mesh.home)
    assert seen.code == 0, seen.err
    assert len(json.loads(seen.out)["peers"]) >= 3


@pytest.mark.slow
def test_an_open_mesh_is_joined_by_a_plain_multiaddress(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    mesh = Peers(home)
    try:
        first = mesh.start("first", "--open")
        mesh.token = first["addresses"][0]
        mesh.start("second")
        seen = json.loads(meshcee("status", "--join", mesh.token, "--json", home=home).out)
        assert {p["name"] for p in seen["peers"]} >= {"first", "second"}
    finally:
        mesh.close()


def test_a_dead_seed_beside_a_living_one_does_not_prevent_joining(mesh: Peers, tmp_path: Path) -> None:
    known = Token.parse(mesh.token)
    dead = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWPPvGbzEUWVSnDV6UZBERMxBqXJziik2YZWwSW2LvAfhV"
    both = replace(known, addresses=(dead, *known.addresses)).encode()
    done = meshcee("status", "--join", both, "--json", home=tmp_path / "home")
    assert done.code == 0, done.err


def test_the_demo_ends_with_equal_losses_and_weights(tmp_path: Path) -> None:
    done = meshcee("demo", "--peers", "2", "--steps", "3", "--json", home=tmp_path / "home", cwd=tmp_path)
    assert done.code == 0, done.err
    result = done.lines[-1]["result"]
    assert result["equal"] is True
    assert len(result["losses"]) == 3


@pytest.mark.slow
def test_an_emulated_shape_is_a_mesh_like_any_other(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=2)
    done = meshcee("local", "--shape", "cee-small", "--job", str(job), "--json", home=tmp_path / "home")
    assert done.code == 0, done.err
    names = next(line["names"] for line in done.lines if "names" in line)
    assert "edge-rtx-3090-1" in names.values()


@pytest.mark.slow
def test_run_stop_ends_a_run_from_another_terminal(mesh: Peers, tmp_path: Path) -> None:
    with training(mesh, write_job(tmp_path, steps=100_000), cwd=tmp_path) as process:
        with ThreadPoolExecutor() as pool:  # who does not read its reports stops it sooner: the pipe is full
            rest = pool.submit(process.communicate, timeout=120)
            stopped = meshcee("run", "stop", home=mesh.home)
            rest.result()
        assert stopped.code == 0, stopped.err
        assert "stopped" in stopped.out
    assert process.returncode == 0
    assert (tmp_path / "tiny-stopped.safetensors").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_exits_with_7(mesh: Peers, tmp_path: Path) -> None:
    job = write_job(tmp_path, loss="(out / 0).mean()")
    done = meshcee("train", str(job), "--join", mesh.token, home=mesh.home)
    assert done.code == 7, done.err
    # Which one is heard of first depends on the plan: pipelines beside each other compute different ones.
    assert re.search(r"step 1, micro-batch \d+ is inf; the step was not applied", done.err)
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "nowhere.py", "--local", "1"], 2, "there is no file"),
        (["train", "JOB"], 2, "--join TOKEN"),
        (["peer", "--join", "nonsense"], 2, "token"),
        (["peer", "--memory", "lots"], 2, "8GiB"),
        (["peer", "--no-such-flag"], 2, "No such option"),
        pytest.param(
            ["status", "--join", "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWPPvGbzEUWVSnDV6UZBERMxBqXJziik2YZWwSW2LvAfhV"],
            3,
            "127.0.0.1",
            marks=pytest.mark.slow,  # 20 s of trying
        ),
        (["run", "logs", "nope"], 2, "run list"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    job = write_job(tmp_path)
    done = meshcee(*[str(job) if a == "JOB" else a for a in arguments], home=tmp_path / "home")
    assert done.code == code, done.err
    assert says in done.err
    assert "Traceback" not in done.err


def test_a_model_that_cannot_be_captured_names_the_line(tmp_path: Path) -> None:
    job = write_job(tmp_path, loss="nn.functional.mse_loss(out, y) if out.sum() > 0 else out.mean()")
    done = meshcee("train", str(job), "--local", "1", home=tmp_path / "home")
    assert done.code == 4, done.err
    assert "job.py" in done.err


@pytest.mark.slow
def test_a_job_that_the_peers_cannot_hold_says_how_much_is_missing(tmp_path: Path) -> None:
    with peers(tmp_path / "home", 1, "--memory", "10KiB") as small:
        done = meshcee("train", str(write_job(tmp_path)), "--join", small.token, home=small.home)
    assert done.code == 5, done.err
    assert "are missing" in done.err


@pytest.mark.slow
def test_an_edited_a_forged_and_an_old_token_are_refused(mesh: Peers, tmp_path: Path) -> None:
    mine, forger = Token.parse(mesh.token), Identity.generate()
    assert mine.grant is not None
    edited = replace(mine, grant=mine.grant._replace(expires_at=1e12))
    forged = Token.sign(forger, mine.addresses, mine.grant._replace(issuer=forger.peer_id))
    for token, why in ((edited, "changed since"), (forged, "another admin's, or of another mesh")):
        done = meshcee("peer", "--join", token.encode(), home=tmp_path / "home")
        assert done.code == 8, done.err
        assert why in done.err
    old = meshcee("peer", "--join", "meshcee1.vK4b1JOR2VEva", home=tmp_path / "home")
    assert old.code == 8, old.err
    assert "upgrade the first machine" in old.err


@pytest.mark.slow
def test_an_invite_admits_until_its_date_and_as_many_as_it_says(mesh: Peers, tmp_path: Path) -> None:
    short = meshcee("invite", "--for", "1s", home=mesh.home)
    assert short.code == 0, short.err
    once = meshcee("invite", "--uses", "1", "--json", home=mesh.home).lines[0]["token"]
    time.sleep(1.1)
    late = meshcee("status", "--join", short.out.strip(), home=tmp_path / "late")
    assert late.code == 8, late.err
    assert "expired" in late.err
    first = meshcee("status", "--join", once, home=tmp_path / "first")
    assert first.code == 0, first.err
    second = meshcee("status", "--join", once, home=tmp_path / "second")
    assert second.code == 8, second.err
    assert "has let in 1 peers" in second.err


@pytest.mark.slow
def test_who_came_to_compute_offers_no_job_and_invites_nobody(mesh: Peers, tmp_path: Path) -> None:
    once, home = meshcee("invite", "--role", "compute", home=mesh.home).out.strip(), tmp_path / "away"
    for command in (("train", str(write_job(tmp_path))), ("train", str(tmp_path / "job.py"))):  # again, as a member
        done = meshcee(*command, "--join", once, home=home)
        assert done.code == 8, done.err
        assert "came by an invite to compute" in done.err
    nobody = meshcee("invite", "--join", once, home=home)
    assert nobody.code == 8, nobody.err
    assert "has no admin's key" in nobody.err


@pytest.mark.slow
def test_who_is_revoked_is_shown_and_cannot_come_back(tmp_path: Path) -> None:
    with peers(tmp_path / "home", 1) as mesh:
        invite = meshcee("invite", "--role", "own", "--uses", "2", home=mesh.home).out.strip()
        away = Peers(tmp_path / "away", token=invite)
        away.home.mkdir()
        try:
            away.start("away")
            seen = meshcee("members", "--json", home=mesh.home).lines[0]
            assert {m["name"]: m["role"] for m in seen["members"]} == {"peer-0": "admin", "away": "own"}
            done = meshcee("revoke", "away", "--json", home=mesh.home)
            assert done.code == 0, done.err
            assert (done.lines[0]["peer"], done.lines[0]["heard"]) == (away.ids["away"], 1)
            shown = meshcee("members", home=mesh.home).out
            assert "members that are here: 1" in shown, shown
            assert "away" not in shown
            assert f"revoked: …{away.ids['away'][-8:]}" in shown
            assert away.ended("away") == 8
            back = meshcee("status", "--join", invite, home=away.home)
            assert back.code == 8, (back.out, back.err)
            assert "revoked" in back.err
        finally:
            away.close()


@pytest.mark.slow
def test_an_admins_machine_revokes_while_its_own_peer_is_down(tmp_path: Path) -> None:
    """Others answer its commands. Who was revoked may still run, and be the first to be asked: another one is."""
    files = sorted((tmp_path / f"{i}.key" for i in range(2)), key=lambda file: Identity.load_or_create(file).peer_id)
    with peers(tmp_path / "home", 1) as mesh:
        others = Peers(tmp_path / "others", token=mesh.token)
        others.home.mkdir()
        try:
            others.start("stays", "--identity", str(files[1]))
            others.start("goes", "--identity", str(files[0]), "--join", others.tokens["stays"])
            mesh.kill("peer-0")
            line = others.tokens["goes"]
            done = meshcee("revoke", "goes", "--join", line, "--json", home=mesh.home)
            assert (done.code, done.lines[0]["heard"]) == (0, 1), done.err
            seen = meshcee("members", "--join", line, "--json", home=mesh.home)
            assert seen.code == 0, seen.err
            assert "stays" in {m["name"] for m in seen.lines[0]["members"]}
            assert seen.lines[0]["revoked"] == [others.ids["goes"]]
        finally:
            others.close()


@pytest.mark.slow
def test_another_protocol_version_is_refused_and_names_the_upgrade(mesh: Peers, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.mesh.next_version", "peer", "--join", mesh.token, "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        command, env=environment(tmp_path / "home"), capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 3, done.stderr
    assert "pip install -U meshcee" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_peers_with_one_identity_are_refused(mesh: Peers, tmp_path: Path) -> None:
    identity = next((mesh.home / "identities").glob("0.key"))
    done = meshcee("peer", "--identity", str(identity), "--join", mesh.token, home=tmp_path / "home")
    assert done.code == 3, done.err
    assert "identity" in done.err


@pytest.mark.slow
def test_a_job_whose_last_peer_is_killed_ends_with_its_name_and_how_to_go_on(tmp_path: Path) -> None:
    with peers(tmp_path / "home", 1) as mesh:
        with training(mesh, write_job(tmp_path, steps=1_000_000), "--regroup", "0.5") as process:
            mesh.kill("peer-0")
            _, err = process.communicate(timeout=60)
        assert process.returncode == 6, err
        assert "peer-0" in err
        assert "step" in err


def test_nothing_of_ours_survives_a_kill(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with peers(home, 2) as mesh:
        assert len(p2pds_of(home)) == 2
        sockets = [c.laddr for p in p2pds_of(home) for c in p.net_connections("unix") if c.laddr]
        for name in list(mesh.processes):
            os.kill(mesh.processes[name].pid, signal.SIGKILL)
        wait_until("p2pd ends with its peer", lambda: not p2pds_of(home), 5)
        wait_until("the sockets are gone", lambda: not [s for s in sockets if os.path.exists(str(s))], 5)
        wait_until("no process of ours is left", lambda: not _processes_of(home), 5)


def _processes_of(home: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.slow
def test_ctrl_c_is_heard_while_a_model_is_captured(mesh: Peers, tmp_path: Path) -> None:
    job = tmp_path / "slow.py"
    job.write_text(
        "import os, signal, time\n"
        "import torch\n"
        "from dataclasses import replace\n"
        "from tests.mesh.jobs import make_job\n"
        "class Slow(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(5)\n"
        "        print('went on', flush=True)\n"
        "        return super().forward(x)\n"
        "job = replace(make_job('cnn-adamw'), model=Slow(2, 2))\n"
    )
    done = meshcee("train", str(job), "--join", mesh.token, home=mesh.home, cwd=ROOT)
    assert done.code == 130, done.err
    assert "went on" not in done.out
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_restarted_first_machine_is_the_same_mesh(tmp_path: Path) -> None:
    with peers(tmp_path, 2) as both:
        name, second = both.ids
        before, token = both.ids[name], both.tokens[name]
        both.kill(name)
        both.processes[name].communicate()
        both.token = ""  # started again without arguments
        both.start(name)
        again = both.tokens[name]
        assert (both.ids[name], where(again)) == (before, where(token))
        wait_until("the other one sees it again", lambda: names(token, tmp_path) == {name, second}, 60)
        assert names(token, tmp_path / "new") == {name, second}, "an invite outlives the restart"
        beside = meshcee("peer", home=tmp_path)
        assert beside.code == 3
        assert where(beside.err.partition("meshcee peer --join ")[2].split()[0]) == where(again)


@pytest.mark.slow
def test_a_mesh_is_one_while_its_first_machine_is_down_and_once_that_is_back_elsewhere(tmp_path: Path) -> None:
    """The line of the first machine leads nowhere meanwhile: a member knows others, and so does the first machine."""
    a, b, _ = machines = [Peers(tmp_path / name) for name in "abc"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        elsewhere = f"127.0.0.1:{free.getsockname()[1]}"
    try:
        for name, one in zip("abc", machines):
            one.home.mkdir()
            one.token = a.token
            one.start(name)
        line = a.token
        assert names(line, b.home) == {"a", "b", "c"}  # this command is a member from here on too
        wait_until("they have written down where others are", lambda: all(knows(one.home, 2) for one in (a, b)), 90)
        for name, one in (("a", a), ("b", b)):
            one.kill(name)
            one.processes[name].communicate()
        b.start("b")
        wait_until("b sees c without a", lambda: {"b", "c"} <= names(line, b.home), 60)
        a.token = ""
        a.start("a", "--listen", elsewhere)
        wait_until("a is found where it is now", lambda: names(line, b.home) == {"a", "b", "c"}, 60)
    finally:
        for one in machines:
            one.close()


@pytest.mark.slow
def test_on_the_first_machine_a_line_leads_to_others_while_its_own_peer_is_down(tmp_path: Path) -> None:
    with peers(tmp_path, 2) as mesh:
        line, (first, second) = mesh.token, mesh.ids
        mesh.kill(first)
        assert second in names(line, tmp_path)
        mesh.start("third", "--join", mesh.tokens[second])
        mesh.token = ""
        mesh.start("first")  # its identity was left to it
        assert mesh.ids["first"] == mesh.ids[first]
        for name in ("first", second, "third"):
            mesh.kill(name)
        wait_until("their p2pds have ended", lambda: not p2pds_of(tmp_path), 30)
        done = meshcee("status", "--join", line, home=tmp_path, timeout_s=60)
        assert done.code == 3


@pytest.mark.slow
@pytest.mark.parametrize("said", [(), ("--open",)], ids=["with a key", "open"])
def test_where_only_this_machines_own_peer_could_answer_it_is_named(tmp_path: Path, said: tuple[str, ...]) -> None:
    with peers(tmp_path, 1, *said) as mesh:
        mesh.kill("peer-0")
        done = meshcee("status", "--join", mesh.token, home=tmp_path, timeout_s=15)
        assert (done.code, "this machine's own peer, which is not running" in done.err) == (3, True), done.err
        line, mesh.token = mesh.token, ""
        mesh.start("again", *said)  # alone, as before
        assert names(line, tmp_path) == {"again"}


def knows(home: Path, count: int) -> bool:
    """Whether a peer of this home has noted so many others."""
    kept = [found for file in Membership.files(Home(home)) if (found := Membership.read(file)) is not None]
    return any(len({peer_of(address) for address in one.others}) >= count for one in kept)


def where(token: str) -> tuple[object, ...]:
    """Of an invite all but its name and date."""
    known = Token.parse(token)
    assert known.grant is not None
    return known.addresses, known.grant._replace(id="", expires_at=0.0)


def names(token: str, home: Path) -> set[str]:
    found = meshcee("status", "--join", token, "--json", home=home)
    return {p["name"] for p in found.lines[0]["peers"]} if found.code == 0 else set()
