"""A folder whose disk refuses, by the kernel's word: full and read-only, while files are open on it, and whole again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from benchmarks.disks import SmallDisk, why_not
from meshcee.files import disk

REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=f"no disks of our own here: {REASON}")
@pytest.mark.parametrize(("kind", "error"), [("disk full", errno.ENOSPC), ("read-only disk", errno.EROFS)])
def test_a_disk_refuses_for_a_while_what_is_written_through_its_path(tmp_path: Path, kind: str, error: int) -> None:
    folder = tmp_path / "runs"
    with SmallDisk(folder) as small:
        disk.append(folder / "lines", b"before\n")
        with open(folder / "lock", "ab"):  # which an owner holds open all the time
            small.refuse(kind)
            with pytest.raises(OSError, match="lines") as refused:
                disk.append(folder / "lines", bytes(1 << 16))
            assert refused.value.errno == error
            with pytest.raises(OSError, match="other") as refused:
                disk.write_whole(folder / "other", bytes(1 << 16))
            assert refused.value.errno == error
            small.accept()
            disk.append(folder / "lines", b"after\n")
            disk.write_whole(folder / "other", b"whole")
        assert (folder / "lines").read_bytes() == b"before\nafter\n"
    assert list(folder.iterdir()) == []  # what lay on it is gone with it
