"""`python -m benchmarks.lab`: run any command on the network of a testbed, or check what the lab can do on this machine.

    python -m benchmarks.lab run --cluster FILE:NAME [--on HOST] -- COMMAND...
    python -m benchmarks.lab check

`run` starts the command on every host (or those named by --on), in an environment with LAB_HOST, LAB_ADDRESS, LAB_DEVICE
and LAB_HOSTS ({name: address} as JSON), starts the trace, and ends with the first failure, or when all have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from benchmarks.lab import DEVICE, Lab, Network, pair_of_hosts, tcp
from meshcee.errors import MeshceeError, UsageError
from meshcee.figures.scenario import load_scenario, packaged

# Mbit/s, round trip in ms, and the share of the bandwidth that TCP must reach: what the benchmarks rely on.
CHECKS = ((100, 50, 0.90), (1000, 10, 0.95))


def network_of(where: str, profiles: Path | None, lost: list[str]) -> Network:
    """FILE:NAME of a testbed, or NAME of one that ships; `lost` has entries FROM:TO:SHARE."""
    file, _, name = where.rpartition(":")
    scenario = load_scenario(
        Path(file) if file else packaged("testbeds.json"), name, profiles or packaged("gpu_profiles.json")
    )
    loss = {}
    for entry in lost:
        source, target, share = [*entry.split(":"), "", ""][:3]
        try:
            loss[source, target] = float(share)
        except ValueError as error:
            raise UsageError(f"--loss {entry!r}: write FROM:TO:SHARE, e.g. cloud:edge:0.001") from error
    return Network.of(scenario, loss=loss)


async def run(network: Network, hosts: list[str], command: list[str], mtu: int) -> int:
    """The exit code of the first command that fails, which ends the others; 0 when none does."""
    async with Lab(network, mtu=mtu) as lab:

        async def one(host: str) -> int:
            environment = {"LAB_HOST": host, "LAB_ADDRESS": lab.addresses[host], "LAB_DEVICE": DEVICE}
            environment["LAB_HOSTS"] = json.dumps(lab.addresses)
            process = await lab.run(host, command, env={**os.environ, **environment})
            return await process.wait()

        await lab.start_trace()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(host)) for host in hosts or lab.addresses]
            for done in asyncio.as_completed(running):
                if code := await done:
                    for task in running:
                        task.cancel()
                    return code
    return 0


async def measure(network: Network, seconds: float = 4.0, connections: int = 1) -> dict[str, float]:
    """Raw TCP from host "here" to host "there": bits_per_s, rtt_s, and the router's processor time cpu_s."""
    async with Lab(network) as lab:
        server = await lab.run("there", [sys.executable, tcp.__file__, "--serve"], stdout=asyncio.subprocess.PIPE)
        assert server.stdout is not None
        await server.stdout.readline()
        command = [sys.executable, tcp.__file__, lab.addresses["there"]]
        command += ["--seconds", str(seconds), "--connections", str(connections)]
        sender = await lab.run("here", command, stdout=asyncio.subprocess.PIPE)
        out, _ = await sender.communicate()
        if sender.returncode:
            raise MeshceeError("the sender failed; what it said is above")
        return {**json.loads(out), "cpu_s": (await lab.stats())["cpu_s"]}


def check() -> int:
    good = True
    for mbit_per_s, rtt_ms, share in CHECKS:
        found = asyncio.run(measure(pair_of_hosts(mbit_per_s * 1e6 / 8, rtt_ms / 1e3)))
        reached = found["bits_per_s"] / 1e6
        good = good and reached >= share * mbit_per_s
        print(
            f"{mbit_per_s} Mbit/s, {rtt_ms} ms: TCP reaches {reached:.0f} Mbit/s, "
            f"idle round trip {found['rtt_s'] * 1e3:.1f} ms, router {found['cpu_s']:.1f} s of processor time"
        )
    if not good:
        print("less than the benchmarks rely on: is the machine busy?", file=sys.stderr)
    return 0 if good else 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("check", help="measure TCP through the lab")
    runs = commands.add_parser("run", help="run a command on every host, or on some")
    runs.add_argument("--cluster", required=True, help="FILE:NAME of a testbed, or NAME of one that ships")
    runs.add_argument("--profiles", type=Path, help="device profiles; default: those that ship")
    runs.add_argument("--on", action="append", default=[], help="a host; may be given several times")
    runs.add_argument("--loss", action="append", default=[], help="FROM:TO:SHARE of packets lost between two regions")
    runs.add_argument("--mtu", type=int, default=9000)
    runs.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    try:
        if options.what == "check":
            sys.exit(check())
        network = network_of(options.cluster, options.profiles, options.loss)
        sys.exit(asyncio.run(run(network, options.on, options.command, options.mtu)))
    except MeshceeError as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BaseExceptionGroup as group:
        print(f"lab: {group.exceptions[0]}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
