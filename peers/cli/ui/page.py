"""The page's files, and the page as one file that needs no server.

The idea: the page is ES modules without a build step. In one file they stand one behind the other in one scope, without their
imports. A policy allows these bytes and nothing else: no script that stands in a name, no address to send anything to.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from meshcee.files import dumps
from meshcee.picture import Picture

__all__ = ["FILES", "MODULES", "POLICY", "read_file", "self_contained"]

MODULES = (
    "dom.js",
    "charts.js",
    "acts.js",
    "mesh.js",
    "plan.js",
    "blocks.js",
    "runs.js",
    "page.js",
)  # each imports only from those before it
FILES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "uplot.css": "text/css",
    "uplot.js": "text/javascript",
    **dict.fromkeys(MODULES, "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def read_file(name: str) -> str:
    """One of FILES, as it ships."""
    return (files("peers.cli.ui") / "static" / name).read_text(encoding="utf-8")


def self_contained(picture: Picture, title: str) -> str:
    """The page with this picture in it, in one file that loads nothing."""
    script = "\n".join(["'use strict';", *(_in_one_scope(read_file(name)) for name in MODULES)])
    script = f"(() => {{\n{script}\n}})();\n"
    charts, style = read_file("uplot.js"), read_file("uplot.css") + read_file("style.css")
    policy = (
        f"default-src 'none'; script-src {_hash(charts)} {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = _in_script({"title": title, "picture": picture.to_json()})
    page = read_file("index.html")
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n?', "", page)
    page = re.sub(r"<script[^>]*></script>\n?", "", page)
    page = page.replace("</head>", f"<style>{style}</style>\n</head>", 1)
    ending = (
        f'<script type="application/json" id="picture">{data}</script>\n'
        f"<script>{charts}</script>\n<script>{script}</script>\n</body>"
    )
    head, _, rest = page.rpartition("</body>")
    return head + ending + rest


def _in_one_scope(module: str) -> str:
    """Without its imports, which the scope has, and its exports, which nobody else needs."""
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", module, flags=re.MULTILINE), flags=re.MULTILINE)


def _in_script(value: Any) -> str:
    """JSON that ends no element and begins none, whatever texts are in it."""
    text = dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
