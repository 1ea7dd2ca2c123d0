"""What a wheel puts where, and what no wheel may do."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ImageError, VerificationError
from kitbuild.image.entries import Entry, Reader
from kitbuild.image.wheels import plan
from tests.image.kit import locked_wheel, make_wheel, new_store, record_row

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.store import Store

SITE = "/opt/kit/lib/python3.11/site-packages"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def planned(store: Store, file: str, data: bytes) -> dict[str, Entry]:
    wheel = locked_wheel(store, file, data)
    return {entry.path: entry for entry in plan(wheel, store.path(wheel.sha256), python="3.11.2")}


def read(entry: Entry) -> str:
    with Reader() as reader:
        return reader.read(entry).decode()


def test_every_scheme(store: Store) -> None:
    """Packages, scripts, data and headers go where a virtual environment has them."""
    files = {
        "pkg/__init__.py": b"x = 1\n",
        "pkg-1.0.data/platlib/pkg/fast.so": b"\x7fELF",
        "pkg-1.0.data/scripts/run": b"#!python\nprint(1)\n",
        "pkg-1.0.data/scripts/binary": b"\x7fELF\n",
        "pkg-1.0.data/data/share/doc.txt": b"doc",
        "pkg-1.0.data/headers/pkg.h": b"//",
    }
    entries = planned(store, *make_wheel("pkg", files, executable=("pkg/__init__.py",)))
    info = f"{SITE}/pkg-1.0.dist-info"
    assert set(entries) == {
        f"{SITE}/pkg/__init__.py",
        f"{SITE}/pkg/fast.so",
        "/opt/kit/bin/run",
        "/opt/kit/bin/binary",
        "/opt/kit/share/doc.txt",
        "/opt/kit/include/site/python3.11/pkg/pkg.h",
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "INSTALLER", "RECORD")),
    }
    assert read(entries["/opt/kit/bin/run"]) == "#!/opt/kit/bin/python\nprint(1)\n"
    assert read(entries["/opt/kit/bin/binary"]) == "\x7fELF\n"
    assert entries["/opt/kit/bin/binary"].executable
    assert entries[f"{SITE}/pkg/__init__.py"].executable
    assert not entries[f"{SITE}/pkg/fast.so"].executable
    assert read(entries[f"{info}/INSTALLER"]) == "kitbuild\n"


def test_console_script(store: Store) -> None:
    """An entry point becomes a script that runs by the image's Python; other sections are left alone."""
    points = "[console_scripts]\ntool = pkg.cli:app.main [extra]\n\n[pytest11]\nx = pkg\n"
    entries = planned(store, *make_wheel("pkg", {"pkg/cli.py": b""}, entry_points=points))
    expected = (
        "#!/opt/kit/bin/python\nimport sys\nfrom pkg.cli import app\n"
        'if __name__ == "__main__":\n    sys.exit(app.main())\n'
    )
    assert read(entries["/opt/kit/bin/tool"]) == expected
    assert entries["/opt/kit/bin/tool"].executable


def test_record_is_of_what_is_installed(store: Store) -> None:
    """RECORD lists each installed file but itself with its digest, relative to site-packages."""
    points = "[console_scripts]\ntool = pkg:main\n"
    files = {"pkg.py": b"x\n", "pkg-1.0.data/data/share/d": b"d"}
    entries = planned(store, *make_wheel("pkg", files, entry_points=points))
    rows = read(entries[f"{SITE}/pkg-1.0.dist-info/RECORD"]).splitlines()
    assert "pkg-1.0.dist-info/RECORD,," in rows
    assert record_row("pkg.py", b"x\n").strip() in rows
    assert record_row("../../../share/d", b"d").strip() in rows
    assert record_row("pkg-1.0.dist-info/INSTALLER", b"kitbuild\n").strip() in rows
    assert any(row.startswith("../../../bin/tool,sha256=") for row in rows)
    assert len(rows) == len(entries)


def test_traces_of_other_installers_are_dropped(store: Store) -> None:
    """Bytecode and installer notes inside a wheel are not installed."""
    files = {
        "pkg/__pycache__/a.cpython-311.pyc": b"x",
        "pkg-1.0.dist-info/INSTALLER": b"pip\n",
        "pkg-1.0.dist-info/direct_url.json": b"{}",
    }
    entries = planned(store, *make_wheel("pkg", {**files, "pkg/a.py": b""}))
    assert not [path for path in entries if "__pycache__" in path or path.endswith("direct_url.json")]
    assert read(entries[f"{SITE}/pkg-1.0.dist-info/INSTALLER"]) == "kitbuild\n"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../evil.py", "member '../evil.py' points outside of it"),
        ("pkg/../../evil.py", "member 'pkg/../../evil.py' points outside of it"),
        ("/etc/passwd", "member '/etc/passwd' points outside of it"),
        ("pkg\\..\\evil.py", r"member 'pkg\\..\\evil.py' points outside of it"),
        ("pkg\nevil.py", r"member 'pkg\nevil.py' points outside of it"),
        ("pkg-1.0.data/other/x", "pkg-1.0.data/other/x is not contained in a valid .data subdirectory."),
    ],
)
def test_paths_that_lead_elsewhere(store: Store, path: str, message: str) -> None:
    """A member that would land outside of the environment is refused with its name, exit 5."""
    with pytest.raises(ImageError) as caught:
        planned(store, *make_wheel("pkg", {path: b"x"}))
    assert caught.value.message.startswith("pkg-1.0-py3-none-any.whl is not a wheel that can be installed: ")
    assert message in caught.value.message
    assert caught.value.exit_code == 5


def test_script_name_that_leads_elsewhere(store: Store) -> None:
    """An entry point cannot be named into another directory."""
    points = "[console_scripts]\n../../etc/x = pkg:main\n"
    with pytest.raises(ImageError, match=r"\.\./\.\./etc/x points outside of /opt/kit/bin"):
        planned(store, *make_wheel("pkg", {"pkg.py": b""}, entry_points=points))


def test_entry_point_that_is_none(store: Store) -> None:
    """A malformed entry point is an error about that wheel, no traceback."""
    with pytest.raises(ImageError, match="is not a wheel that can be installed"):
        planned(store, *make_wheel("pkg", {"pkg.py": b""}, entry_points="[console_scripts]\ntool = no function\n"))


@pytest.mark.parametrize("data", [b"", b"no zip", b"PK\x03\x04" + b"\0" * 40])
def test_no_zip(store: Store, data: bytes) -> None:
    """What is no zip archive is refused with its name."""
    with pytest.raises(ImageError, match=r"^pkg-1.0-py3-none-any.whl is not a wheel that can be installed: "):
        planned(store, "pkg-1.0-py3-none-any.whl", data)


def rewritten(data: bytes, change: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.infolist():
            if change == "link" and item.filename == "pkg.py":
                item.external_attr = 0o120777 << 16
            if change == "no WHEEL" and item.filename.endswith("/WHEEL"):
                continue
            content = old.read(item)
            if change == "version 2" and item.filename.endswith("/WHEEL"):
                content = content.replace(b"1.0", b"2.0")
            new.writestr(item, content)
        if change == "two dist-infos":
            new.writestr("other-1.0.dist-info/METADATA", b"")
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("link", "member pkg.py is a symbolic link"),
        ("no WHEEL", "There is no item named 'pkg-1.0.dist-info/WHEEL' in the archive"),
        ("version 2", "Incompatible Wheel-Version 2.0"),
        ("two dist-infos", "doesn't contain exactly one .dist-info directory"),
    ],
)
def test_malformed(store: Store, change: str, message: str) -> None:
    """Other breaches of the wheel format are refused by name."""
    file, data = make_wheel("pkg", {"pkg.py": b""})
    with pytest.raises(ImageError) as caught:
        planned(store, file, rewritten(data, change))
    assert message in caught.value.message


def test_member_twice(store: Store) -> None:
    """Two members of one name are refused: readers differ in which one they take."""
    file, data = make_wheel("pkg", {"pkg.py": b""})
    stream = io.BytesIO(data)
    with zipfile.ZipFile(stream, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("pkg.py", b"again")
    with pytest.raises(ImageError, match=r"member pkg\.py is there twice"):
        planned(store, file, stream.getvalue())


def test_record_that_lies(store: Store) -> None:
    """A member that is not what the wheel's own RECORD says is exit 7 when it is read."""
    row = record_row("pkg.py", b"other")
    entries = planned(store, *make_wheel("pkg", {"pkg.py": b"x = 1"}, record=row))
    with pytest.raises(VerificationError, match=rf"^pkg-1.0-py3-none-any.whl: {SITE}/pkg.py has sha256 "):
        read(entries[f"{SITE}/pkg.py"])


def test_record_that_is_silent(store: Store) -> None:
    """A member without a row in RECORD is installed, with its digest in ours."""
    entries = planned(store, *make_wheel("pkg", {"pkg.py": b"x = 1"}, record=""))
    assert record_row("pkg.py", b"x = 1").strip() in read(entries[f"{SITE}/pkg-1.0.dist-info/RECORD"]).splitlines()
