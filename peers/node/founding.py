"""The mesh that this machine has founded, and founds again: its key, identity and port outlive the peer.

The idea: a token names a key and an address, so a first machine that comes back with other ones has left its own mesh. What it
was is kept in a file beside its identities. Who holds the file's lock is the first peer. Another one that is started in the same
way would found a second mesh by mistake, and is told how to join instead.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from dht import Identity, MeshKey
from meshcee.errors import JoinError, NotNowError, UsageError
from meshcee.files import disk, dumps, loads
from meshcee.files.home import Home, is_locked

__all__ = ["Founding", "down", "founded", "founders", "founds_again"]

log = structlog.get_logger()


class Founding:
    """What is known of it; made by `of`."""

    def __init__(
        self, home: Home, file: Path, key: MeshKey, kept: dict[str, Any], chosen: Path | None, root: Identity | None
    ) -> None:
        self.key = key
        self.root = root  # whose signature makes members; None in an open mesh
        self._home = home
        self._file = file
        self._kept = kept
        self.identity = chosen or (Path(kept["identity"]) if "identity" in kept else None)

    @classmethod
    @contextmanager
    def of(cls, home: Home, identity: Path | None, *, is_open: bool) -> Iterator[Founding]:
        """Of who starts a mesh, with or without a key, and with this identity if one was chosen: each is a mesh of its own.

        NotNowError where its first peer runs already, or another one with that one's identity.
        """
        base = identity or home.folder / "mesh"
        file = base.with_name(base.name + (".open.json" if is_open else ".founded.json"))
        with home.writable():
            disk.make_folder(base.parent)
            lock = file.with_name(f"{file.name}.lock").open("ab")
        with lock:
            kept = _read(file)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotNowError(_runs_already(kept)) from None
            if identity is None and "identity" in kept and is_locked(Path(f"{kept['identity']}.lock")):
                raise NotNowError(_is_taken(kept))
            key = MeshKey() if is_open else MeshKey.load_or_create(base.with_name(base.name + ".mesh-key"))
            root = None if is_open else Identity.load_or_create(_admin_key(base))
            yield cls(home, file, key, kept, identity, root)

    def listen(self, where: str) -> str:
        """Where to listen when the user says this: on the port of the last time, if any is left to us."""
        kept = self._kept.get("listening", {}).get(where)
        if kept is None:
            return where
        try:
            from peers.transport.p2p import reserve

            _, sockets = reserve([kept])
        except JoinError as error:
            log.warning("this mesh has another port now, so its old tokens do not lead here", error=str(error))
            return where
        for held in sockets:
            held.close()
        return str(kept)

    def note(self, where: str, listening: str, identity: Path, token: str) -> None:
        """The peer is up."""
        data = {
            "identity": str(identity.absolute()),
            "listening": {**self._kept.get("listening", {}), where: listening},
            "mesh": self.key.fingerprint,
            "token": token,
        }
        with self._home.writable():
            disk.write_whole(self._file, dumps(data, indent=1).encode())  # mode 0600: it holds the key


def _admin_key(base: Path) -> Path:
    return base.with_name(base.name + ".admin-key")


def founded(home: Home, root: str | None = None) -> tuple[Identity, Path] | None:
    """The admin's key, and the first peer's identity file, of a mesh that this machine has founded: of this root, or of any."""
    here = sorted((home.folder / "identities").glob("*.founded.json"))
    bases = (Path(str(file).removesuffix(".founded.json")) for file in here)
    for base in (home.folder / "mesh", *bases, *home.identities_elsewhere()):
        found = _founded_at(base)
        if found is not None and root in (None, found[0].peer_id):
            return found
    return None


def founders(home: Home) -> list[Path]:
    """The identity files of first peers, in meshes with and without a key: who joins takes none of them."""
    kinds, chosen = (".founded.json", ".open.json"), home.identities_elsewhere()
    records = [file for folder in (home.folder, home.folder / "identities") for file in folder.glob("*.json")]
    records += [one.with_name(one.name + kind) for one in chosen for kind in kinds]
    found = [_read(file) for file in sorted(records) if file.name.endswith(kinds)]
    return [Path(kept["identity"]) for kept in found if "identity" in kept]


def down(home: Home) -> list[str]:
    """The ids of those first peers, as far as none of this machine runs."""
    files = [file for file in founders(home) if file.exists() and not is_locked(Path(f"{file}.lock"))]
    return [Identity.load_or_create(file).peer_id for file in files]


def founds_again(home: Home, identity: Path | None) -> bool:
    """Whether who starts a mesh with this identity, or chooses none, has founded it before."""
    return _founded_at(identity or home.folder / "mesh") is not None


def _founded_at(base: Path) -> tuple[Identity, Path] | None:
    kept = _read(base.with_name(base.name + ".founded.json"))
    if "identity" not in kept or not _admin_key(base).exists():
        return None
    return Identity.load_or_create(_admin_key(base)), Path(kept["identity"])


def _read(file: Path) -> dict[str, Any]:
    try:
        kept = loads(file.read_text())
        if not all(isinstance(kept.get(name, kind()), kind) for name, kind in (("identity", str), ("listening", dict))):
            raise ValueError("its entries are of other kinds")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{file}, which says what this machine's mesh is, cannot be read ({error}): restore it, or remove it and old tokens "
            "lead nowhere"
        ) from error
    return dict(kept)


def _runs_already(kept: dict[str, Any]) -> str:
    token = kept.get("token")
    if token is None:
        return "another `meshcee peer` is starting a mesh on this machine at this moment: try again"
    return (
        f"the first peer of mesh {kept.get('mesh')} runs on this machine already; to join that mesh:\n\n"
        f"  meshcee peer --join {token}\n\nto found another one beside it, set another MESHCEE_HOME"
    )


def _is_taken(kept: dict[str, Any]) -> str:
    return (
        f"a peer on this machine runs with {kept['identity']}, the identity of the first peer of mesh {kept.get('mesh')}: end "
        f"that peer, or join beside it:\n\n  meshcee peer --join {kept.get('token')}"
    )
