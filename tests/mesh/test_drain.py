"""A peer that is drained or gets a signal leaves its job in order, as a real process; the losses are those of a plain loop."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshcee.files.home import Home
from tests.mesh.harness import meshcee, peers, training
from tests.mesh.test_survive import JOB, ROOT, assert_like_the_plain_loop, goes_on


@pytest.mark.slow
def test_peers_leave_a_running_job_and_no_number_changes(tmp_path: Path) -> None:
    job_file, home = tmp_path / "job.py", Home(tmp_path / "home")
    job_file.write_text(JOB)
    with peers(home.folder, 4) as mesh:
        processes = mesh.processes
        lends = ("--stages", "5", "--compute", "--device", "cpu")
        with ThreadPoolExecutor() as pool, training(mesh, job_file, *lends, cwd=ROOT) as owner:
            ended = pool.submit(owner.communicate, timeout=300)  # a full pipe would stop it
            run = home.run("last")
            goes_on(run)
            processes["peer-1"].send_signal(signal.SIGTERM)
            assert processes["peer-1"].wait(60) == 0
            goes_on(run)
            done = meshcee("drain", "peer-0", "--join", mesh.token, home=home.folder)  # at whom everybody joined
            assert done.code == 0, done.err
            assert "peer-0 has gone" in done.out
            assert processes["peer-0"].wait(60) == 0
            goes_on(run)

            mesh.token = mesh.tokens["peer-2"]
            done = meshcee("drain", "owner-device", "--join", mesh.token, home=home.folder)
            assert done.code == 0, done.err
            goes_on(run)
            unknown = meshcee("drain", "peer-1", "--join", mesh.token, home=home.folder)
            assert unknown.code == 2, unknown.err
            assert "no peer of this mesh is called 'peer-1'; there are peer-2" in unknown.err

            processes["peer-3"].send_signal(signal.SIGINT)
            processes["peer-3"].send_signal(signal.SIGTERM)
            assert processes["peer-3"].wait(60) == 130, "asked twice, it waits for nothing"
            goes_on(run)
            owner.send_signal(signal.SIGINT)
            _, err = ended.result()
        assert owner.returncode == 0, err
        for name in ("peer-1", "peer-0", "owner-device"):
            assert f'"who": ["{name}"]' in err
        assert err.count("a member was lost") == 1, "peer-3 alone"
        processes["peer-2"].send_signal(signal.SIGINT)
        assert processes["peer-2"].wait(60) == 0, "an idle peer goes at once"
    assert_like_the_plain_loop(run)
