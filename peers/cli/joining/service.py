"""`meshcee peer install`, `uninstall` and `logs`: a peer that starts with the machine, as a service of the user's own.

The idea: what is written is a pure function of what the user said; installing writes two files and calls the system's own tool.
The join line lies in a file of mode 0600 under MESHCEE_HOME, as every process may read the arguments of others. An identity
file is named, so the peer is the same one after a reboot.
"""

from __future__ import annotations

import getpass
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dht import Token
from meshcee.errors import JoinError, UsageError
from meshcee.files import disk
from meshcee.files.home import Home
from peers.cli.joining.lines import keep_line
from peers.cli.joining.notice import known
from peers.cli.joining.yielding import Hours
from peers.cli.session import Screen, parse_bytes

__all__ = [
    "Service",
    "System",
    "install",
    "launchd_plist",
    "logs",
    "service_of",
    "show_logs",
    "system_of",
    "systemd_unit",
    "uninstall",
]

UNIT = "meshcee-peer.service"
LABEL = "io.github.meshcee.peer"
LEAVE_S = 30.0  # Timeouts.leave_s
# Beside what a stage may use: torch and the peer itself, what it keeps of others' stages, and the process that checks graphs.
BESIDE_BYTES = 3 << 30
SPARE = 1.25
LOOKS, LOOK_S = 10, 1.0  # at a service that has just begun: what is wrong with it shows once torch is loaded
TOOL_S = 60  # for a tool of the system, beside what it waits for
# Exit codes after which it is not started again: what was said is wrong, it was drained and left too late, it is not permitted.
NO_USE = (2, 6, 8)

Call = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Service:
    """What the user said of it. `flags` are those of `meshcee peer`, without the join line."""

    home: Path
    python: str
    flags: tuple[str, ...] = ()
    joins: bool = False
    memory: str | None = None
    leave_s: float = LEAVE_S
    path: str = os.defpath
    settings: tuple[tuple[str, str], ...] = ()  # variables by which it finds the file of its settings

    @property
    def environment(self) -> dict[str, str]:
        return {"MESHCEE_HOME": str(self.home), **dict(self.settings), "PATH": self.path}

    @property
    def line_file(self) -> Path:
        return self.home / "service.line"

    @property
    def log_file(self) -> Path:
        return self.home / "service.log"  # of launchd; systemd has its journal

    @property
    def command(self) -> list[str]:
        found = [self.python, "-m", "meshcee", "peer", "--no-lan", *self.flags]
        if self.joins:  # a mesh that is founded here has its identity already
            found += ["--join", f"@{self.line_file}", "--identity", str(self.home / "identities" / "service.key")]
        return found

    @property
    def most_bytes(self) -> int | None:
        """That the system lets it have: more than it should ever take, less than takes the machine down."""
        return int(SPARE * parse_bytes(self.memory)) + BESIDE_BYTES if self.memory else None

    @property
    def stop_s(self) -> int:
        return int(self.leave_s) + 20


def systemd_unit(service: Service) -> str:
    """For the user's own systemd."""
    command = " ".join(_quoted(word.replace("$", "$$")) for word in service.command)
    limit = f"MemoryMax={service.most_bytes}\n" if service.most_bytes is not None else ""
    told = "\n".join(f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environment.items())
    return f"""# Written by `meshcee peer install`; `meshcee peer uninstall` removes it.
[Unit]
Description=meshcee peer
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
{told}
WorkingDirectory={str(service.home).replace("%", "%%")}
UMask=0077

# SIGTERM asks this peer to leave: its job goes on without it first. Its helpers must live until then.
KillMode=mixed
TimeoutStopSec={service.stop_s}
Restart=on-failure
RestartSec=5
RestartSteps=6
RestartMaxDelaySec=300
RestartPreventExitStatus={" ".join(map(str, NO_USE))}

# What it never needs. Not here, because it needs them: namespaces and landlock, by which it locks up what checks graphs; memory
# that is written and run, by which torch makes kernels; devices, which may be GPUs.
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={_quoted(str(service.home))}
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
OOMPolicy=continue
{limit}LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


def _quoted(text: str) -> str:
    """As systemd reads it, to which % means something."""
    if any(c in text for c in "\n\r\0"):
        raise UsageError(f"{text!r} has a line end in it: a service cannot be told that")
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if plain != text or set(text) & set(" ';") else plain


def launchd_plist(service: Service) -> bytes:
    """For macOS. It has no walls of its own to give to a user's agent; a limit of memory is one that is only advised."""
    told: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": service.command,
        "EnvironmentVariables": service.environment,
        "WorkingDirectory": str(service.home),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": service.stop_s,
        "ProcessType": "Background",
        "Umask": 0o077,
        "StandardOutPath": str(service.log_file),
        "StandardErrorPath": str(service.log_file),
    }
    if service.most_bytes is not None:
        told["HardResourceLimits"] = {"ResidentSetSize": service.most_bytes}
    return plistlib.dumps(told)


def _calls(stop_s: int) -> Call:
    """Of the system's tools, which wait for as long as a service may take to leave."""

    def call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        limit_s = stop_s + TOOL_S
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise JoinError(
                f"{shlex.join(command)} has not ended in {limit_s} s: see in `meshcee peer logs` what the service does, then type "
                "your own command again"
            ) from error

    return call


def _stop_s(file: Path) -> int:
    """That the service in this file may take to leave; it may have been installed with another --leave-within."""
    said = re.search(r"TimeoutStopSec=(\d+)|<key>ExitTimeOut</key>\s*<integer>(\d+)", file.read_text())
    return int(said[1] or said[2]) if said else 0


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip()[:300]


@dataclass(frozen=True)
class System:
    """Where its services lie, and what starts and ends them."""

    file: Path
    start: tuple[tuple[str, ...], ...]
    end: tuple[tuple[str, ...], ...]
    tool: str


def system_of(platform: str = sys.platform, environment: os._Environ[str] | dict[str, str] = os.environ) -> System:
    if platform == "darwin":
        file = Path("~/Library/LaunchAgents").expanduser() / f"{LABEL}.plist"
        domain = f"gui/{os.getuid()}"
        return System(
            file,
            (("launchctl", "bootstrap", domain, str(file)),),
            (("launchctl", "bootout", f"{domain}/{LABEL}"),),
            "launchctl",
        )
    folder = Path(environment.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "systemd" / "user"
    user = ("systemctl", "--user")
    start = ((*user, "daemon-reload"), (*user, "enable", UNIT), (*user, "restart", UNIT))
    return System(folder / UNIT, start, ((*user, "disable", "--now", UNIT), (*user, "daemon-reload")), "systemctl")


def service_of(
    flags: Mapping[str, object] | None = None, line: str | None = None, kept: Mapping[str, object] | None = None
) -> Service:
    """Of this user and machine. `flags` by their names; what was not said is None or False.

    `kept` is what its peer has without them, of the file of settings.
    """
    said: list[str] = []
    for name, value in (flags or {}).items():
        if name == "--dataset" and isinstance(value, list):
            from peers.node.datasets import Datasets

            Datasets(value)  # which says what is wrong with them here
            for text in value:  # a service has another working folder
                named, _, file = text.partition("=")
                said += [name, f"{named}={Path(file).absolute()}"]
        elif value is not None and value is not False:
            said += [name] if value is True else [name, str(value)]
    if when := (flags or {}).get("--when"):
        Hours.parse(str(when))  # here, where somebody reads why it means nothing
    if (cloud := (flags or {}).get("--spot")) is not None:
        known(str(cloud))
    both = {**(kept or {}), **(flags or {})}
    leave_s, memory = both.get("--leave-within"), both.get("--memory")
    return Service(
        Home().folder.absolute(),
        sys.executable,
        tuple(said),
        line is not None,
        str(memory) if memory is not None else None,
        float(str(leave_s)) if leave_s is not None else LEAVE_S,
        os.environ.get("PATH", os.defpath),
        tuple(_settings(os.environ)),
    )


def _settings(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """As the commands of this user read them: a service has none of a shell's variables."""
    if file := environment.get("MESHCEE_CONFIG"):
        yield "MESHCEE_CONFIG", str(Path(file).expanduser().absolute())
    if (folder := environment.get("XDG_CONFIG_HOME", "")).startswith("/"):
        yield "XDG_CONFIG_HOME", folder


def install(
    service: Service, line: str | None, *, only_print: bool, system: System | None = None, call: Call | None = None
) -> None:
    """Write the service and start it; with `only_print` show what would be written, and write nothing."""
    if line is not None:
        Token.parse(line)  # what is wrong is told now, and not in a log
    system, call = system or system_of(), call or _calls(service.stop_s)
    is_unit = system.tool == "systemctl"
    text = systemd_unit(service) if is_unit else launchd_plist(service).decode()
    screen = Screen()
    if only_print:
        screen.print(f"# {system.file}\n{text}", soft_wrap=True)
        if line is not None:
            screen.print(f"# {service.line_file}, mode 0600: the line of --join", soft_wrap=True)
        return
    if shutil.which(system.tool) is None:
        raise UsageError(
            f"there is no {system.tool} here to start a service with: `meshcee peer install --print` shows what to tell another "
            "supervisor"
        )
    if is_unit and (done := call(("systemctl", "--user", "show-environment"))).returncode:
        raise UsageError(
            f"your own systemd cannot be asked ({_said(done)}): type this in a session of your own login, not behind su or sudo; "
            "`meshcee peer install --print` shows what to tell another supervisor"
        )
    with Home(service.home).writable():
        disk.make_folder(service.home)
        if line is not None:
            disk.write_whole(service.line_file, f"{line}\n".encode())  # mode 0600
        disk.make_folder(system.file.parent)
        disk.write_whole(system.file, text.encode())
    kept = keep_line(Home(service.home), line, None) if line is not None else None
    if not is_unit:
        call(system.end[0])  # an older one
    for command in system.start:
        done = call(command)
        if done.returncode:
            raise JoinError(
                f"{shlex.join(command)} failed ({_said(done)}): the service is written to {system.file}; "
                "`meshcee peer uninstall` removes it"
            )
    lingers = not is_unit or not call(("loginctl", "enable-linger", getpass.getuser())).returncode
    if is_unit:
        _watch(call)
    screen.print(f"The peer runs as a service: {system.file}", soft_wrap=True)
    if not lingers:
        screen.print(
            f"It starts when you log in. To start it with the machine: sudo loginctl enable-linger {getpass.getuser()}",
            soft_wrap=True,
        )
    screen.print("What it says: meshcee peer logs")
    if kept is not None:
        screen.print(kept, soft_wrap=True)


def _watch(call: Call) -> None:
    """For a while after its start: JoinError with its last words when it does not run."""
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        state = call(("systemctl", "--user", "is-active", UNIT))
        if state.returncode:
            lines = "--lines", "40", "--output", "cat", "--no-pager"
            said = call(("journalctl", "--user", f"_SYSTEMD_USER_UNIT={UNIT}", *lines)).stdout.strip()
            _, error, rest = f"\n{said}".rpartition("\nmeshcee: ")
            told = rest if error else said.rpartition("\n")[2]
            raise JoinError(
                f"the service does not run ({state.stdout.strip()}): {told[:2000] or 'it has said nothing'}\n"
                "See `meshcee peer logs`; systemd tries again where that may help; `meshcee peer uninstall` removes the service"
            )


def uninstall(service: Service | None = None, *, system: System | None = None, call: Call | None = None) -> None:
    """End the service, in order, and remove what `install` wrote. Its identity stays."""
    service, system = service or service_of(), system or system_of()
    if not system.file.exists():
        raise UsageError(f"there is no service of meshcee here: {system.file} does not exist")
    call = call or _calls(_stop_s(system.file))
    for command in system.end[:1]:
        done = call(command)
        if done.returncode:
            raise JoinError(f"{shlex.join(command)} failed: {_said(done)}")
    with Home(service.home).writable():
        disk.remove(system.file)
        disk.remove(service.line_file)
    for command in system.end[1:]:
        call(command)
    print("The service is removed; its identity and the runs of this machine stay.")


def logs(service: Service, *, follow: bool, platform: str = sys.platform) -> list[str]:
    """The command that shows what it has said."""
    if platform == "darwin":
        return ["tail", "-n", "200", *(["-F"] if follow else []), str(service.log_file)]
    return ["journalctl", "--user", "--unit", UNIT, "--lines", "200", *(["--follow"] if follow else ["--no-pager"])]


def show_logs(*, follow: bool) -> None:
    if not (file := system_of().file).exists():
        raise UsageError(
            f"there is no service of meshcee here: {file} does not exist; `meshcee peer install` makes one"
        )
    command = logs(service_of(), follow=follow)
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no {command[0]} here, which keeps what a service says: ask its supervisor")
    subprocess.run(command, check=False)
