"""The page as a command shows it: served by the demo, opened on a desktop, there until Ctrl-C."""

from __future__ import annotations

import signal
import urllib.request
from pathlib import Path

import pytest

from tests.mesh.test_joining import terminal

pytest.importorskip("aiohttp", reason="the extra `ui` is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("screen", [True, False], ids=["on a desktop", "over ssh"])
def test_the_demo_opens_its_page_and_leaves_it_open_until_ctrl_c(tmp_path: Path, screen: bool) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    variables = {"BROWSER": str(browser), "DISPLAY": ":0", "SSH_CONNECTION": "here"}
    if screen:
        del variables["SSH_CONNECTION"]
    arguments = ("demo", "--ui", "--peers", "2", "--steps", "2")
    with terminal(tmp_path / "home", *arguments, **variables) as demo:
        address = demo.until(r"the page: (http://127\.0\.0\.1:\d+/\?token=\S+)")[1]
        demo.until("weights .*equal, bit for bit")
        demo.until("The page stays until Ctrl-C")
        with urllib.request.urlopen(address, timeout=20) as page:
            assert b"<title>" in page.read()
        assert (opened.read_text().strip() == address) if screen else not opened.exists()
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(60) == 0
