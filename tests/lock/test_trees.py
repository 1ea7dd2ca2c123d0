"""Models, tokenizers, templates and datasets become lists of files with digests."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RecipeError, ResolveError
from kitbuild.lock.hub import Hub
from kitbuild.lock.trees import Trees
from kitbuild.recipe.models import Dataset, Recipe
from tests.base.made import Notes
from tests.hub.server import HubServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kitbuild.store import Store


@pytest.fixture
def own_hub(tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub that a test fills."""
    with HubServer(tmp_path / "own") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The recipe's folder."""
    place = tmp_path / "recipes"
    place.mkdir()
    return place


def trees(folder: Path, store: Store, environ: dict[str, str] | None = None, notes: Notes | None = None) -> Trees:
    def hub() -> Hub:
        assert environ is not None, "a local path asks no Hub"
        return Hub(environ)

    return Trees(folder=folder, hub=hub, store=store, progress=notes or Notes())


def recipe(**model: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "kitbuild": 1,
            "name": "test",
            "model": model,
            "dataset": ({"repo": "trl-lib/Capybara"},),
            "image": {"cuda": "cpu"},
            "batch": {"global": 1, "micro": 1},
            "policy": {},
        }
    )


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


MODEL = {
    "config.json": "{}",
    "model.safetensors": "w",
    "tokenizer.json": "{}",
    "README.md": "x",
    "pytorch_model.bin": "p",
}


ROW = '{"text": "a"}\n'


def test_a_model_of_the_hub(hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store) -> None:
    """Weights, configuration and tokenizer at the branch's commit; cards and licences stay where they are."""
    notes = Notes()
    found = trees(folder, store, hub_environ, notes).model(recipe(repo="Qwen/Qwen3-8B"))
    assert found.weights is not None
    assert (found.weights.repo, found.weights.revision, found.weights.path) == ("Qwen/Qwen3-8B", "main", None)
    assert found.weights.commit == hub.sha("Qwen/Qwen3-8B")
    assert [file.path for file in found.weights.files] == [
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    ]
    assert (found.tokenizer, found.chat_template, found.config) == (None, None, None)
    assert notes.lines == [f"model: Qwen/Qwen3-8B @ {found.weights.commit[:12]} (main), 9 files"]


def test_a_model_on_disk(folder: Path, store: Store) -> None:
    """The same files by content; what is hidden, deeper or of another kind is left out; a copy goes into the store."""
    write(folder / "model", {**MODEL, ".cache/config.json": "no", "onnx/model.safetensors": "no"})
    found = trees(folder, store).model(recipe(path="model"))
    assert found.weights is not None
    assert (found.weights.path, found.weights.repo, found.weights.commit) == ("model", None, None)
    digests = {file.path: file.sha256 for file in found.weights.files}
    assert digests == {
        name: hashlib.sha256(MODEL[name].encode()).hexdigest()
        for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    (folder / "model" / "model.safetensors").write_text("later")
    assert store.path(digests["model.safetensors"]).read_text() == "w"


def test_no_safetensors(own_hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store) -> None:
    """A model whose weights are pickled only is refused, from the Hub and from disk, with the way to convert it."""
    files = {name: text for name, text in MODEL.items() if name != "model.safetensors"}
    own_hub.create_repo("org/pickled")
    own_hub.commit("org/pickled", dict(files))
    write(folder / "model", files)
    environ = {**hub_environ, "HF_ENDPOINT": own_hub.url}
    for model, name in (({"repo": "org/pickled"}, "org/pickled"), ({"path": "model"}, "model")):
        with pytest.raises(ResolveError) as caught:
            trees(folder, store, environ).model(recipe(**model))
        assert caught.value.message == f"model {name} has no model.safetensors and no model.safetensors.index.json"
        assert "save_pretrained" in (caught.value.hint or "")


def test_remote_code(own_hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store) -> None:
    """The repository's Python is locked only where the recipe runs it, the tokenizer's too."""
    for repo in ("org/own-code", "org/own-tokenizer"):
        own_hub.create_repo(repo)
        own_hub.commit(repo, {**MODEL, "modeling.py": "1"})
    asked = trees(folder, store, {**hub_environ, "HF_ENDPOINT": own_hub.url})
    trusting: dict[str, Any] = {"trust_remote_code": True}
    for extra, expected in (({}, False), (trusting, True)):
        found = asked.model(recipe(repo="org/own-code", tokenizer={"repo": "org/own-tokenizer"}, **extra))
        for tree in (found.weights, found.tokenizer):
            assert tree is not None
            assert ("modeling.py" in {file.path for file in tree.files}) is expected


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_another_repository(
    own_hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store, file: str
) -> None:
    """Code that a model would take from elsewhere has no pinned commit: refused by name, and only if code may run."""
    auto_map = '{"auto_map": {"AutoTokenizer": ["m.Slow", null], "AutoModel": "org/others--m.Model"}}'
    own_hub.create_repo("org/borrows")
    own_hub.commit("org/borrows", {**MODEL, file: auto_map, "m.py": "1"})
    write(folder / "model", {**MODEL, file: auto_map})
    environ = {**hub_environ, "HF_ENDPOINT": own_hub.url}
    places: tuple[dict[str, Any], ...] = ({"repo": "org/borrows"}, {"path": "model"})
    for place in places:
        asked = trees(folder, store, environ)
        assert asked.model(recipe(**place)).weights
        with pytest.raises(RecipeError) as caught:
            asked.model(recipe(**place, trust_remote_code=True))
        (name,) = place.values()
        assert caught.value.message == (f"model: {name} takes code from another place: org/others ({file}: AutoModel)")


def test_code_that_is_missing(folder: Path, store: Store) -> None:
    """A class whose module is not in the folder is told while locking, by the file's name."""
    write(folder / "model", {**MODEL, "config.json": '{"auto_map": {"AutoModel": "mine.Model"}}'})
    with pytest.raises(RecipeError) as caught:
        trees(folder, store).model(recipe(path="model", trust_remote_code=True))
    assert caught.value.message == "model: model lacks code that it names: mine.py (config.json: AutoModel)"
    write(folder / "model", {"mine.py": "class Model: ..."})
    found = trees(folder, store).model(recipe(path="model", trust_remote_code=True)).weights
    assert found is not None
    assert "mine.py" in {file.path for file in found.files}


def test_the_weights_that_transformers_loads(
    own_hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store
) -> None:
    """The one file, else the index with its shards, else what config.json names; other forms of the weights stay."""
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}'
    shards = {"model-1.safetensors": "1", "model-2.safetensors": "2", "model.safetensors.index.json": index}
    others = {"consolidated.safetensors": "c", "model.fp16.safetensors": "h", "extra.safetensors.index.json": "{}"}
    plain = {"config.json": "{}"}
    named = {"config.json": '{"transformers_weights": "extra.safetensors"}', "extra.safetensors": "e"}
    cases: tuple[tuple[dict[str, str], set[str]], ...] = (
        ({**plain, **others, "model.safetensors": "w"}, {"model.safetensors"}),
        ({**plain, **others, **shards}, set(shards)),
        ({**plain, **others, **shards, "model.safetensors": "w"}, {"model.safetensors"}),
        ({**others, **named, "model.safetensors": "w"}, {"extra.safetensors"}),
    )
    environ = {**hub_environ, "HF_ENDPOINT": own_hub.url}
    for number, (files, expected) in enumerate(cases):
        own_hub.create_repo(f"org/m{number}")
        own_hub.commit(f"org/m{number}", dict(files))
        write(folder / f"m{number}", files)
        for place in ({"repo": f"org/m{number}"}, {"path": f"m{number}"}):
            found = trees(folder, store, environ).model(recipe(**place)).weights
            assert found is not None
            assert {file.path for file in found.files} == {"config.json", *expected}


@pytest.mark.parametrize(
    "case",
    [
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'},
            "model {} lacks 1 of 2 files that model.safetensors.index.json names: m-2.safetensors",
        ),
        ({"model.safetensors.index.json": "{}"}, "model {}: model.safetensors.index.json names no file"),
        (
            {"model.safetensors.index.json": "x"},
            "model {}: model.safetensors.index.json is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            {"config.json": '{"transformers_weights": "gone.safetensors"}'},
            "model {} has no gone.safetensors",
        ),
        ({"README.md": "r"}, "model {} has no model.safetensors and no model.safetensors.index.json"),
    ],
)
def test_weights_that_are_not_whole(
    own_hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store, case: tuple[dict[str, str], str]
) -> None:
    """A shard that the index names and that is not there is exit 4 while locking, on the Hub and on disk."""
    files, message = case
    held = {"config.json": "{}", "m-1.safetensors": "1", "consolidated.safetensors": "c", **files}
    own_hub.create_repo("org/partial")
    own_hub.commit("org/partial", dict(held))
    write(folder / "model", held)
    environ = {**hub_environ, "HF_ENDPOINT": own_hub.url}
    for place, name in (({"repo": "org/partial"}, "org/partial"), ({"path": "model"}, "model")):
        with pytest.raises(ResolveError) as caught:
            trees(folder, store, environ).model(recipe(**place))
        assert caught.value.message == message.format(name)


def test_a_configuration_with_its_tokenizer(folder: Path, store: Store) -> None:
    """Random weights have no files; the tokenizer and the template that the recipe names are locked by content."""
    write(folder, {"tok/tokenizer.json": "{}", "tok/model.safetensors": "no", "chat.jinja": "t"})
    config = {"model_type": "qwen3"}
    found = trees(folder, store).model(recipe(config=config, tokenizer={"path": "tok"}, chat_template="chat.jinja"))
    assert (found.weights, found.config) == (None, config)
    assert found.tokenizer is not None
    assert [file.path for file in found.tokenizer.files] == ["tokenizer.json"]
    assert found.chat_template is not None
    assert (found.chat_template.path, found.chat_template.size) == ("chat.jinja", 1)


def test_the_split_of_a_dataset(hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store) -> None:
    """Only the split's files, at the commit of the revision; the tag from before has fewer rows."""
    asked = trees(folder, store, hub_environ)
    now = asked.dataset(Dataset(repo="trl-lib/Capybara", revision="main"), key="dataset.0")
    assert now.data_files == ("data/train-00000-of-00001.jsonl",)
    assert [file.path for file in now.tree.files] == ["data/train-00000-of-00001.jsonl"]
    assert now.format == "json"
    assert now.tree.commit == hub.sha("trl-lib/Capybara")
    before = asked.dataset(Dataset(repo="trl-lib/Capybara", revision="v0.1"), key="dataset.0")
    assert before.tree.files[0].size < now.tree.files[0].size
    held_out = asked.dataset(Dataset(repo="trl-lib/Capybara", split="test"), key="evaluate.dataset")
    assert held_out.data_files == ("data/test-00000-of-00001.jsonl",)


def test_a_split_that_is_not_there(hub_environ: dict[str, str], folder: Path, store: Store) -> None:
    """Exit 4 with the configurations and files that exist."""
    asked = trees(folder, store, hub_environ)
    with pytest.raises(ResolveError) as caught:
        asked.dataset(Dataset(repo="trl-lib/Capybara", split="validation"), key="dataset.0")
    assert caught.value.message == "dataset trl-lib/Capybara@main has no data files for split 'validation'"
    assert caught.value.hint == (
        "configurations: default; files that exist: README.md, data/test-00000-of-00001.jsonl,"
        " data/train-00000-of-00001.jsonl"
    )
    with pytest.raises(ResolveError, match=r"for split 'train' of configuration 'large'$"):
        asked.dataset(Dataset(repo="trl-lib/Capybara", config="large"), key="dataset.0")


def test_formats(folder: Path, store: Store) -> None:
    """A folder of one format is read; two formats at once, and none, are exit 4 and name what was found."""
    asked = trees(folder, store)
    write(folder, {"one/a.jsonl": ROW, "one/b.json": ROW, "two/a.jsonl": ROW, "two/b.csv": "a", "none/a.bin": "x"})
    assert asked.dataset(Dataset(path="one"), key="dataset.0").data_files == ("a.jsonl", "b.json")
    with pytest.raises(ResolveError, match=r"^dataset\.0: two has csv, json; one format is needed$"):
        asked.dataset(Dataset(path="two"), key="dataset.0")
    with pytest.raises(ResolveError, match=r"^dataset\.0: none has no data file; one format is needed$"):
        asked.dataset(Dataset(path="none"), key="dataset.0")


def test_one_file(folder: Path, store: Store) -> None:
    """A dataset that is one file is a tree of it, whatever folder it lies in."""
    write(folder, {"data/chats.jsonl": ROW})
    found = trees(folder, store).dataset(Dataset(path="data/chats.jsonl", weight=0.5), key="dataset.0")
    assert (found.tree.path, found.data_files, found.weight) == ("data/chats.jsonl", ("chats.jsonl",), 0.5)
    assert store.has(found.tree.files[0].sha256)


def test_a_row_that_cannot_be_trained_on(folder: Path, store: Store) -> None:
    """Exit 2 while locking, with the file as the recipe names it: of one file, and of a folder."""
    write(folder, {"rows.jsonl": ROW + '{"foo": 1}\n', "data/a.jsonl": ROW, "data/b.jsonl": "no\n"})
    asked = trees(folder, store)
    with pytest.raises(RecipeError, match=r"^dataset\.0: rows\.jsonl:2: a row has foo; needed: messages, or prompt"):
        asked.dataset(Dataset(path="rows.jsonl"), key="dataset.0")
    with pytest.raises(RecipeError, match=r"^evaluate\.dataset: data/b\.jsonl:1: is not JSON"):
        asked.dataset(Dataset(path="data/"), key="evaluate.dataset")


def test_local_paths_that_fail(folder: Path, store: Store) -> None:
    """A missing path and a folder without the files are exit 2 with the recipe's key."""
    (folder / "empty").mkdir()
    asked = trees(folder, store)
    with pytest.raises(RecipeError) as caught:
        asked.dataset(Dataset(path="nowhere.jsonl"), key="dataset.0")
    assert caught.value.problems[0].key == "dataset.0"
    assert caught.value.message == "dataset.0: nowhere.jsonl does not exist"
    with pytest.raises(RecipeError, match=r"^model: empty has none of the files that are needed$"):
        asked.model(recipe(path="empty"))


@pytest.mark.parametrize("card", ["", "---\nnever closed", "---\n: [\n---\n", "---\n- a list\n---\n", "\ufffe"])
def test_a_card_that_cannot_be_read(
    own_hub: HubServer, hub_environ: dict[str, str], folder: Path, store: Store, card: str
) -> None:
    """A dataset whose card says nothing usable goes by the names of its files."""
    own_hub.create_repo("org/data", "dataset")
    own_hub.commit("org/data", {"README.md": card, "train.jsonl": "{}\n", "test.jsonl": "{}\n"})
    found = trees(folder, store, {**hub_environ, "HF_ENDPOINT": own_hub.url}).dataset(Dataset(repo="org/data"), key="d")
    assert found.data_files == ("train.jsonl",)
