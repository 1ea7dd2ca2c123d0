"""The tar format, byte for byte."""

from __future__ import annotations

import io
import tarfile

from kitbuild.image.entries import Entry, Folder, Link, merge
from kitbuild.image.tars import write_tar

LONG = "/opt/kit/" + "long-folder-name/" * 8 + "ünïcode.txt"


def test_bytes_are_pinned() -> None:
    """Long and non-ASCII names, links and folders give these bytes, whatever the version of Python."""
    nodes = merge(
        (
            Entry.of(LONG, b"text\n", owner="a"),
            Entry.of("/opt/kit/bin/tool", b"#!x\n", owner="a", executable=True),
            Link(path="/opt/kit/bin/python", target="/usr/bin/python3"),
            Folder(path="/out", mode=0o1777),
        )
    )
    out = io.BytesIO()
    advanced: list[float] = []
    written = write_tar(out, nodes, advance=advanced.append)
    assert written.sha256 == "f23c0148ac6d7e0146d3f1f9fa5053309dbd54c6693b9140a86049358e41c84e"
    assert written.size == len(out.getvalue()) == sum(advanced)
    assert written.links == {"/opt/kit/bin/python": "/usr/bin/python3"}
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        assert archive.getmember(LONG[1:]).size == 5
        assert archive.getmember("opt/kit/bin/tool").mode == 0o755
        assert archive.getmember("out").mode == 0o1777
