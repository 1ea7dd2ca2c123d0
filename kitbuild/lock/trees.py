"""Models, tokenizers, chat templates and datasets as file trees: by commit from the Hub, by content from disk.

Part of step 2. Every file gets a sha256; local files are copied into the store, so that a later edit cannot
reach a run.
"""

from __future__ import annotations

import fnmatch
import io
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem, RecipeError, ResolveError
from kitbuild.lock.checkpoint import code_of, weight_files
from kitbuild.lock.models import LockedDataset, LockedFile, LockedModel, LockedTree
from kitbuild.lock.rows import check_rows
from kitbuild.lock.splits import FORMATS, config_names, split_files
from kitbuild.store import sha256_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kitbuild.lock.hub import Hub, HubFile, RepoType
    from kitbuild.progress import Progress
    from kitbuild.recipe.models import Dataset, Located, Recipe
    from kitbuild.store import Store

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "*.model",
)
MODEL_FILES = ("*config*.json", *TOKENIZER_FILES)


class Trees:
    """Locks trees for one recipe. `folder` is the recipe's, where its relative paths start."""

    def __init__(self, *, folder: Path, hub: Callable[[], Hub], store: Store, progress: Progress) -> None:
        self._folder = folder
        self._hub = hub
        self._store = store
        self._progress = progress

    def model(self, recipe: Recipe) -> LockedModel:
        """The checkpoint or configuration, the tokenizer where it is separate, the chat template where one is named."""
        model = recipe.model
        code = ("*.py",) if model.trust_remote_code else ()
        weights = None
        if model.config is None:
            weights = self._tree(model, "model", (*MODEL_FILES, *code), key="model", weights=True)
        tokenizer = None
        if model.tokenizer:
            tokenizer = self._tree(
                model.tokenizer, "model", (*TOKENIZER_FILES, "config.json", *code), key="model.tokenizer"
            )
        for key, tree in (("model", weights), ("model.tokenizer", tokenizer)):
            if tree is not None and model.trust_remote_code:
                self._check_code(tree, key=key)
        template = None
        if model.chat_template is not None:
            template = self._file(self._folder / model.chat_template, model.chat_template, key="model.chat_template")
        return LockedModel(weights=weights, config=model.config, tokenizer=tokenizer, chat_template=template)

    def dataset(self, dataset: Dataset, *, key: str) -> LockedDataset:
        """One dataset: the data files of its split, and how they are read."""
        if dataset.path is not None:
            tree = self._local(dataset.path, ("*",), key=key)
            data_files = tuple(file.path for file in tree.files if PurePosixPath(file.path).suffix in FORMATS)
        else:
            tree, data_files = self._hub_dataset(dataset)
        formats = {FORMATS[PurePosixPath(name).suffix] for name in data_files}
        if len(formats) != 1:
            found = ", ".join(sorted(formats)) or "no data file"
            raise ResolveError(
                f"{key}: {dataset.repo or dataset.path} has {found}; one format is needed",
                hint=f"formats that are read: {', '.join(FORMATS)}",
            )
        if dataset.path is not None:
            self._check_rows(dataset.path, data_files, key=key)
        return LockedDataset.model_validate(
            {
                "tree": tree,
                "format": formats.pop(),
                "config": dataset.config,
                "split": dataset.split,
                "data_files": data_files,
                "weight": dataset.weight,
            }
        )

    def _check_rows(self, path: str, data_files: Iterable[str], *, key: str) -> None:
        place = self._folder / path
        if place.is_file():
            check_rows([(place, path)], key=key)
        else:
            check_rows([(place / name, f"{path.rstrip('/')}/{name}") for name in data_files], key=key)

    def _check_code(self, tree: LockedTree, *, key: str) -> None:
        """From the Hub, when it loads, transformers would take such code at a branch, whatever the model's commit."""
        names = {file.path for file in tree.files}
        code = [
            item
            for file in tree.files
            if file.path in {"config.json", "tokenizer_config.json"}
            for item in code_of(file.path, self._store.path(file.sha256).read_bytes())
        ]
        foreign = [f"{repo} ({where})" for where, repo, _ in code if repo is not None]
        if foreign:
            raise _recipe_error(
                key,
                f"{tree.repo or tree.path} takes code from another place: {', '.join(foreign)}",
                "copy that code into the model's folder, take what stands before `--` out of auto_map, and use model.path",
            )
        missing = [f"{file} ({where})" for where, _, file in code if file not in names]
        if missing:
            raise _recipe_error(
                key,
                f"{tree.repo or tree.path} lacks code that it names: {', '.join(missing)}",
                "take another revision, or leave trust_remote_code out",
            )

    def _tree(
        self, where: Located, repo_type: RepoType, patterns: tuple[str, ...], *, key: str, weights: bool = False
    ) -> LockedTree:
        if where.path is not None:
            return self._local(where.path, patterns, key=key, weights=weights)
        repo, revision = str(where.repo), where.revision or "main"
        hub = self._hub()
        snapshot = hub.snapshot(repo, revision, repo_type)
        named = {file.path: file for file in snapshot.files}

        def read(path: str) -> bytes:
            (locked,) = hub.lock_files(snapshot, (named[path],), store=self._store, progress=self._progress)
            return self._store.path(locked.sha256).read_bytes()

        extra = weight_files(named, read, name=repo) if weights else ()
        chosen = tuple(file for file in snapshot.files if file.path in extra or _matches(file.path, patterns))
        files = hub.lock_files(snapshot, chosen, store=self._store, progress=self._progress)
        self._progress.note(f"{key}: {snapshot.repo} @ {snapshot.commit[:12]} ({revision}), {len(files)} files")
        return LockedTree(repo=snapshot.repo, revision=revision, commit=snapshot.commit, files=files)

    def _hub_dataset(self, dataset: Dataset) -> tuple[LockedTree, tuple[str, ...]]:
        repo, revision = str(dataset.repo), dataset.revision or "main"
        hub = self._hub()
        snapshot = hub.snapshot(repo, revision, "dataset")
        card = tuple(file for file in snapshot.files if file.path == "README.md")
        locked_card = hub.lock_files(snapshot, card, store=self._store, progress=self._progress)
        about = _front_matter(self._store.path(locked_card[0].sha256).read_bytes()) if locked_card else {}
        names = split_files([file.path for file in snapshot.files], about, config=dataset.config, split=dataset.split)
        if not names:
            raise ResolveError(
                f"dataset {repo}@{revision} has no data files for split {dataset.split!r}"
                + (f" of configuration {dataset.config!r}" if dataset.config else ""),
                hint=(f"configurations: {', '.join(config_names(about))}; " if config_names(about) else "")
                + f"files that exist: {', '.join(_some(snapshot.files))}",
            )
        chosen = tuple(file for file in snapshot.files if file.path in set(names))
        files = hub.lock_files(snapshot, chosen, store=self._store, progress=self._progress)
        self._progress.note(f"dataset: {snapshot.repo} @ {snapshot.commit[:12]} ({revision}), {len(files)} files")
        tree = LockedTree(repo=snapshot.repo, revision=revision, commit=snapshot.commit, files=files)
        return tree, tuple(names)

    def _local(self, path: str, patterns: tuple[str, ...], *, key: str, weights: bool = False) -> LockedTree:
        place = self._folder / path
        if place.is_file() and not weights:
            return LockedTree(path=path, files=(self._file(place, place.name, key=key),))
        if not place.is_dir():
            what = "is a file, not a model's folder" if place.is_file() else "does not exist"
            raise _recipe_error(key, f"{path} {what}", "paths start at the recipe's own folder")
        found = sorted(
            (item.relative_to(place).as_posix(), item)
            for item in place.rglob("*")
            if item.is_file() and not any(part.startswith(".") for part in item.relative_to(place).parts)
        )
        named = dict(found)
        extra = weight_files(named, lambda name: named[name].read_bytes(), name=path) if weights and found else ()
        chosen = [(name, item) for name, item in found if name in extra or _matches(name, patterns)]
        if not chosen:
            raise _recipe_error(
                key, f"{path} has none of the files that are needed", f"looked for {', '.join(patterns)}"
            )
        return LockedTree(path=path, files=tuple(self._file(item, name, key=key) for name, item in chosen))

    def _file(self, place: Path, name: str, *, key: str) -> LockedFile:
        try:
            sha256, size = sha256_file(place)
            self._store.add_file(place, name=name, expected=sha256)
        except OSError as error:
            raise _recipe_error(key, f"{place.name} cannot be read: {error.strerror}", None) from error
        return LockedFile(path=name, size=size, sha256=sha256)


def _front_matter(data: bytes) -> dict[str, Any]:
    from ruamel.yaml import YAML  # noqa: PLC0415
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    text = data.decode("utf-8", errors="replace")
    if not text.startswith("---"):
        return {}
    try:
        loaded = YAML(typ="safe", pure=True).load(io.StringIO(text.split("---", 2)[1]))
    except YAMLError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    # Only the top folder counts for a model: `original/` and `onnx/` hold the same weights in other forms.
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns) and ("*" in patterns or "/" not in name)


def _some(files: Iterable[HubFile], most: int = 12) -> list[str]:
    names = [file.path for file in files]
    return [*names[:most], "…"] if len(names) > most else names


def _recipe_error(key: str, message: str, hint: str | None) -> RecipeError:
    return RecipeError(f"{key}: {message}", hint=hint, problems=[Problem(key=key, message=message, hint=hint)])
