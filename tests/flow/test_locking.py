"""recipe → lock: what is kept, what is refused, what is replaced. Resolving itself is played."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import LockError, RecipeError, UsageError
from kitbuild.flow import locking
from kitbuild.flow.context import Context
from kitbuild.lock.files import lock_path, maker, read_lock, write_lock
from kitbuild.lock.models import LockedTree
from kitbuild.progress import Silent
from kitbuild.recipe import read
from tests.image.kit import locked_file, make_lock, new_store

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock

REPOSITORY = Path(__file__).resolve().parents[2]
NOTHING: frozenset[str] = frozenset()


class Resolver:
    """In place of the network: gives the next lock, remembers what it was asked."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.asked: list[dict[str, Any]] = []
        self.changes: dict[str, Any] = {}

    def __call__(self, loaded: Any, *, previous: Lock | None, update: frozenset[str], **effects: Any) -> Lock:
        assert effects.keys() == {"store", "environ", "progress", "client"}
        self.asked.append({"previous": previous, "update": update})
        return make_lock(self._context.store, name=loaded.recipe.name, recipe_sha256=loaded.sha256, **self.changes)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(environ={}, store=new_store(tmp_path / "store"), progress=Silent())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / "recipes/data", tmp_path / "data")
    return Path(shutil.copy(REPOSITORY / "recipes/tiny-cpu.yaml", tmp_path / "tiny.yaml"))


@pytest.fixture
def resolver(context: Context, monkeypatch: pytest.MonkeyPatch) -> Resolver:
    played = Resolver(context)
    monkeypatch.setattr("kitbuild.lock.resolve.resolve", played)
    return played


def lock(context: Context, path: Path, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"only_check": False, "update": NOTHING, "upgrade": False, "diff": None} | options
    return dict(locking.lock(context, path, **given).fields)


def test_lock_is_written_beside_the_recipe(context: Context, recipe: Path, resolver: Resolver) -> None:
    """The first time it is resolved from nothing and said to have changed."""
    fields = lock(context, recipe)
    written = read_lock(recipe)
    assert written is not None
    assert fields == {
        "lock_path": str(recipe.with_name("tiny.lock.json")),
        "lock_sha256": written.sha256,
        "changed": True,
    }
    assert resolver.asked == [{"previous": None, "update": NOTHING}]


def test_current_lock_is_not_resolved_again(context: Context, recipe: Path, resolver: Resolver) -> None:
    """A newer upstream makes no lock stale: nobody is asked, not a byte is written."""
    lock(context, recipe)
    before = lock_path(recipe).stat()
    assert lock(context, recipe)["changed"] is False
    assert lock(context, recipe, only_check=True)["changed"] is False
    assert len(resolver.asked) == 1
    assert lock_path(recipe).stat().st_mtime_ns == before.st_mtime_ns


def test_check_without_a_lock(context: Context, recipe: Path, resolver: Resolver) -> None:
    """Exit 3, and nothing is written."""
    with pytest.raises(LockError, match=r"tiny\.lock\.json does not exist"):
        lock(context, recipe, only_check=True)
    assert resolver.asked == []
    assert not lock_path(recipe).exists()


def test_changed_recipe_makes_the_lock_stale(context: Context, recipe: Path, resolver: Resolver) -> None:
    """A comment is enough for --check and `ensure_lock`; `lock` resolves from what was fixed before."""
    lock(context, recipe)
    fixed = read_lock(recipe)
    recipe.write_text(recipe.read_text() + "# a remark\n")
    with pytest.raises(LockError, match=r"is stale: .*tiny\.yaml changed since") as raised:
        lock(context, recipe, only_check=True)
    assert raised.value.hint == f"kitbuild lock {recipe}"
    with pytest.raises(LockError, match="is stale"):
        locking.ensure_lock(context, read(recipe))
    assert read_lock(recipe) == fixed
    assert lock(context, recipe)["changed"] is True
    assert resolver.asked[-1]["previous"] == fixed
    assert lock(context, recipe, only_check=True)["changed"] is False


def test_comment_changes_no_content(context: Context, recipe: Path, resolver: Resolver) -> None:
    """What compare looks at stays the same when a comment is edited."""
    lock(context, recipe)
    first = read_lock(recipe)
    recipe.write_text(recipe.read_text() + "# a remark\n")
    lock(context, recipe)
    second = read_lock(recipe)
    assert first is not None
    assert second is not None
    assert (first.sha256 != second.sha256, first.content_sha256 == second.content_sha256) == (True, True)
    assert len(resolver.asked) == 2


def test_local_file_that_changed(context: Context, recipe: Path, resolver: Resolver) -> None:
    """Data on disk is part of the lock: the problem names the file. What is gone is no problem."""
    data = recipe.parent / "data/commands-train.jsonl"
    tree = LockedTree(
        path="data/commands-train.jsonl",
        files=(locked_file(context.store, "commands-train.jsonl", data.read_bytes()),),
    )
    base = make_lock(context.store)
    resolver.changes = {"datasets": (base.datasets[0].model_copy(update={"tree": tree}),)}
    lock(context, recipe)
    assert lock(context, recipe, only_check=True)["changed"] is False
    data.write_bytes(data.read_bytes().replace(b"a", b"b"))
    with pytest.raises(LockError, match="local files changed since") as raised:
        lock(context, recipe, only_check=True)
    assert [problem.file for problem in raised.value.problems] == [str(data)]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"version": 2}', b'{"version": 1}', b"\xff\xfe"],
    ids=["empty", "cut", "list", "object", "newer", "no fields", "binary"],
)
def test_damaged_lock(content: bytes, context: Context, recipe: Path, resolver: Resolver) -> None:
    """--check and `image` say so (exit 3); `kitbuild lock` makes it anew."""
    lock_path(recipe).write_bytes(content)
    for call in (
        lambda: lock(context, recipe, only_check=True),
        lambda: locking.ensure_lock(context, read(recipe)),
    ):
        with pytest.raises(LockError):
            call()
    assert resolver.asked == []
    assert lock(context, recipe)["changed"] is True
    assert resolver.asked == [{"previous": None, "update": NOTHING}]


def test_edited_lock(context: Context, recipe: Path, resolver: Resolver) -> None:
    """A digest changed by hand is noticed."""
    lock(context, recipe)
    path = lock_path(recipe)
    path.write_bytes(path.read_bytes().replace(b'"torch"', b'"touch"', 1))
    with pytest.raises(LockError, match="was edited"):
        lock(context, recipe, only_check=True)
    assert lock(context, recipe)["changed"] is True
    assert len(resolver.asked) == 2


@pytest.mark.parametrize(
    ("change", "word"),
    [({"version": "9.9.9"}, "version"), ({"guest_sha256": "0" * 64}, "build"), ({"layout": 9}, "build")],
)
def test_lock_of_another_kitbuild(
    change: dict[str, Any], word: str, context: Context, recipe: Path, resolver: Resolver
) -> None:
    """It would give another image: exit 3, with what to install."""
    resolver.changes = {"kitbuild": maker().model_copy(update=change)}
    write_lock(recipe, resolver(read(recipe), previous=None, update=NOTHING, store=0, environ=0, progress=0, client=0))
    with pytest.raises(LockError, match=f"written by another {word} of kitbuild"):
        locking.ensure_lock(context, read(recipe))


def test_update_and_upgrade(context: Context, recipe: Path, resolver: Resolver) -> None:
    """--update moves what it names and keeps the rest; --upgrade keeps nothing."""
    lock(context, recipe)
    fixed = read_lock(recipe)
    lock(context, recipe, update=frozenset({"torch", "org/tiny", "base"}))
    lock(context, recipe, upgrade=True)
    assert resolver.asked[1:] == [
        {"previous": fixed, "update": frozenset({"torch", "org/tiny", "base"})},
        {"previous": None, "update": NOTHING},
    ]


@pytest.mark.parametrize(("name", "hint"), [("toch", "did you mean torch?"), ("flask", "a package as the lock spells")])
def test_update_of_what_is_not_locked(name: str, hint: str, context: Context, recipe: Path, resolver: Resolver) -> None:
    """A misspelt name is refused before anything is resolved."""
    lock(context, recipe)
    with pytest.raises(UsageError, match=f"--update {name}: the lock names no such package") as raised:
        lock(context, recipe, update=frozenset({name}))
    assert str(raised.value.hint).startswith(hint)
    assert len(resolver.asked) == 1


def test_difference_from_the_lock_that_is_replaced(context: Context, recipe: Path, resolver: Resolver) -> None:
    """`--upgrade --diff` of the lock itself tells what moved, by name."""
    lock(context, recipe)
    base = make_lock(context.store)
    moved = tuple(
        wheel.model_copy(update={"version": "2.0"}) if wheel.name == "torch" else wheel for wheel in base.wheels
    )
    resolver.changes = {"wheels": moved}
    fields = lock(context, recipe, upgrade=True, diff=lock_path(recipe))
    assert fields["differences"] == [{"part": "packages", "name": "torch", "old": "1.0", "new": "2.0"}]
    assert lock(context, recipe, diff=lock_path(recipe))["differences"] == []
    options: dict[str, Any] = {"only_check": False, "update": NOTHING, "upgrade": False}
    told = locking.lock(context, recipe, diff=lock_path(recipe), **options).lines
    assert told[-1] == f"no difference from {lock_path(recipe)}"
    resolver.changes = {}
    told = locking.lock(context, recipe, diff=lock_path(recipe), **options | {"upgrade": True}).lines
    assert told[1:] == ("packages:", "  torch 2.0 → 1.0")


def test_difference_from_nothing_is_told_first(context: Context, recipe: Path, resolver: Resolver) -> None:
    """A missing OLD is exit 3 before anything slow."""
    with pytest.raises(LockError, match=r"old\.json cannot be read"):
        lock(context, recipe, diff=recipe.parent / "old.json")
    assert resolver.asked == []


def test_added_and_removed_are_one_line_each(context: Context, recipe: Path, resolver: Resolver) -> None:
    """An item is known by its name, so that an insertion does not move the rest."""
    lock(context, recipe)
    resolver.changes = {"wheels": make_lock(context.store).wheels[1:]}
    differences = lock(context, recipe, upgrade=True, diff=lock_path(recipe))["differences"]
    assert differences == [{"part": "packages", "name": "torch", "old": "1.0", "new": None}]


def test_ensure_lock_writes_one_where_there_is_none(context: Context, recipe: Path, resolver: Resolver) -> None:
    """`image` and `run` lock a new recipe by themselves."""
    made = locking.ensure_lock(context, read(recipe))
    assert read_lock(recipe) == made
    assert locking.ensure_lock(context, read(recipe)) == made
    assert len(resolver.asked) == 1


def test_missing_input_is_told_before_resolving(context: Context, recipe: Path, resolver: Resolver) -> None:
    """Exit 2 with every path that is not there."""
    (recipe.parent / "data/commands-train.jsonl").unlink()
    shutil.rmtree(recipe.parent / "data/tiny-tokenizer")
    with pytest.raises(RecipeError, match="names files that do not exist") as raised:
        lock(context, recipe)
    assert len(raised.value.problems) == 2
    assert resolver.asked == []
    with pytest.raises(RecipeError):
        locking.check(recipe, {})


@pytest.mark.parametrize(("state", "word"), [("missing", "none yet"), ("current", "current"), ("stale", "is stale")])
def test_check_tells_the_state_of_the_lock(
    state: str, word: str, context: Context, recipe: Path, resolver: Resolver
) -> None:
    """`kitbuild check` never fails for a lock; it says how it stands."""
    if state != "missing":
        lock(context, recipe)
    if state == "stale":
        recipe.write_text(recipe.read_text() + "# a remark\n")
    result = locking.check(recipe, {})
    assert result.fields["lock"] == state
    (line,) = (line for line in result.lines if line.startswith("  lock "))
    assert word in line
    assert len(resolver.asked) == (state != "missing")


def test_check_estimates_memory(recipe: Path, tmp_path: Path) -> None:
    """From the recipe's own config, a local directory's, and where neither is there in words; never an error."""
    told = locking.check(recipe, {})
    assert told.fields["memory"]["parameters"] > 100_000
    (line,) = (line for line in told.lines if line.startswith("  memory "))
    assert line.startswith("  memory   about ")
    assert "of a process at the peak (weights " in line
    text = recipe.read_text()
    start, end = text.index("  config:"), text.index("  tokenizer:")
    config = read(recipe).recipe.model.config
    (recipe.parent / "model").mkdir()
    recipe.write_text(f"{text[:start]}  path: model\n{text[end:]}")
    for content, words in (("{", "not known"), ("[]", "not known"), ('{"model_type": "t5"}', "no estimate for t5")):
        (recipe.parent / "model/config.json").write_text(content)
        told = locking.check(recipe, {})
        assert told.fields["memory"] is None
        assert words in "\n".join(told.lines)
    (recipe.parent / "model/config.json").write_text(json.dumps(config))
    assert locking.check(recipe, {}).fields["memory"]["parameters"] > 100_000
    repo = f"{text[:start]}  repo: some/where\n{text[end:]}"
    recipe.write_text(repo)
    assert locking.check(recipe, {"KITBUILD_HOME": str(tmp_path / "none")}).fields["memory"] is None
    assert not (tmp_path / "none").exists()


def test_lock_that_cannot_be_written(context: Context, recipe: Path, resolver: Resolver) -> None:
    """Exit 3 that names it; a folder stands where the file should be."""
    lock_path(recipe).mkdir()
    with pytest.raises(LockError, match="cannot be"):
        lock(context, recipe)
    assert len(resolver.asked) == 1


def test_check_shows_the_launcher(recipe: Path) -> None:
    """With `launch`, what the lock will tell the launcher is shown; without it, it is not."""
    assert "launch" not in locking.check(recipe, {}).fields
    told = locking.check(recipe, {}, launch=True)
    assert told.fields["launch"]["world_size"] == read(recipe).recipe.launch.world_size
    assert json.loads(told.lines[-1]) == told.fields["launch"]
