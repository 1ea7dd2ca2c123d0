"""The Hugging Face Hub as the lock needs it: commits, file lists with digests, publishers.

Part of step 2, the only one with `store` that uses the network. Speaks through `huggingface_hub`; its
errors become ours here, once. The access token goes into request headers and nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kitbuild.errors import ResolveError, VerificationError
from kitbuild.lock.models import LockedFile
from kitbuild.store.download import Download, fetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kitbuild.progress import Progress
    from kitbuild.store import Store

RepoType = Literal["model", "dataset", "kernel"]
READ_WHILE_LOCKING = frozenset(
    {
        "README.md",
        "config.json",
        "kernel-status.toml",
        "metadata.json",
        "metadata.json.sigstore",
        "model.safetensors.index.json",
        "tokenizer_config.json",
    }
)
"""Files whose content a lock depends on: fetched even where the Hub tells their digest, as it does for LFS files."""


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file at a commit. `sha256` is known for LFS files only; `blob_id` is git's sha1 of the others."""

    path: str
    size: int
    sha256: str | None
    blob_id: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A repository at a commit, under the name that it has today."""

    repo: str
    repo_type: RepoType
    commit: str
    files: tuple[HubFile, ...]


class Hub:
    """One endpoint and one user. `pins` maps (type, repo, revision) to the commit that an earlier lock fixed."""

    def __init__(self, environ: Mapping[str, str], *, pins: Mapping[tuple[str, str, str], str] | None = None) -> None:
        from huggingface_hub import HfApi, constants, get_token  # noqa: PLC0415 - half a second, only when asked

        endpoint = environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT
        self._environ = environ
        self._pins = pins or {}
        self._token = environ.get("HF_TOKEN") or get_token()
        self._api = HfApi(endpoint=endpoint, token=self._token or False)

    def snapshot(self, repo: str, revision: str, repo_type: RepoType, *, folder: str | None = None) -> Snapshot:
        """The commit that `revision` names now, and its files (below `folder` where one is given)."""
        from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415

        pinned = self._pins.get((repo_type, repo, revision), revision)
        with self._errors(repo, pinned, repo_type):
            info = self._api.repo_info(repo, revision=pinned, repo_type=repo_type)
            commit = str(info.sha)
            tree = self._api.list_repo_tree(
                info.id, path_in_repo=folder, recursive=True, revision=commit, repo_type=repo_type
            )
            files = tuple(
                HubFile(
                    path=entry.path,
                    size=entry.size,
                    sha256=entry.lfs.sha256 if entry.lfs else None,
                    blob_id=entry.blob_id,
                )
                for entry in tree
                if isinstance(entry, RepoFile)
            )
            if getattr(info, "gated", False) and files:
                # Its file list is public; whether this account may have the files, only a file tells.
                self._api.get_hf_file_metadata(url=self._url(info.id, files[0].path, repo_type, commit))
        ordered = tuple(sorted(files, key=lambda file: file.path))
        return Snapshot(repo=info.id, repo_type=repo_type, commit=commit, files=ordered)

    def revisions(self, repo: str, repo_type: RepoType) -> tuple[str, ...]:
        """Branches and tags, sorted: what a message about an unknown revision lists."""
        with self._errors(repo, "main", repo_type):
            refs = self._api.list_repo_refs(repo, repo_type=repo_type)
        return tuple(sorted({ref.name for ref in (*refs.branches, *refs.tags)}))

    def trusts(self, publisher: str) -> bool:
        """Whether the Hub marks the organisation as a trusted kernel publisher; one that it does not know is not."""
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

        with self._errors(publisher, "overview", "organization"):
            try:
                overview = self._api.get_organization_overview(publisher)
            except HfHubHTTPError as error:
                if error.response is not None and error.response.status_code in {400, 401, 403, 404}:
                    return False
                raise
        return bool(getattr(overview, "trustedKernelPublisher", False))

    def downloads(self, repo: str, repo_type: RepoType, commit: str, files: Iterable[HubFile]) -> tuple[Download, ...]:
        """Where the files are, for `store.download.fetch`."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return tuple(
            Download(
                name=f"{repo}/{file.path}",
                url=self._url(repo, file.path, repo_type, commit),
                sha256=file.sha256,
                size=file.size,
                headers=tuple(sorted(headers.items())),
            )
            for file in files
        )

    def _url(self, repo: str, path: str, repo_type: RepoType, commit: str) -> str:
        from huggingface_hub import hf_hub_url  # noqa: PLC0415

        return hf_hub_url(repo, path, repo_type=repo_type, revision=commit, endpoint=self._api.endpoint)

    def lock_files(
        self, snapshot: Snapshot, files: Iterable[HubFile], *, store: Store, progress: Progress
    ) -> tuple[LockedFile, ...]:
        """Digest per file: told by the Hub for LFS files, computed for the others, which are fetched for it."""
        wanted = tuple(files)
        read = tuple(file for file in wanted if file.sha256 and file.path.rpartition("/")[2] in READ_WHILE_LOCKING)
        told = self.downloads(snapshot.repo, snapshot.repo_type, snapshot.commit, read)
        small = tuple(file for file in wanted if file.sha256 is None)
        unknown = tuple(file for file in small if self._known(store, file) is None)
        where = self.downloads(snapshot.repo, snapshot.repo_type, snapshot.commit, unknown)
        fetched = fetch(store, (*told, *where), progress=progress, environ=self._environ)
        for file, download in zip(unknown, where, strict=True):
            self._remember(store, file, fetched[download], download.name)
        return tuple(
            LockedFile(path=file.path, size=file.size, sha256=file.sha256 or str(self._known(store, file)))
            for file in wanted
        )

    @staticmethod
    def _known(store: Store, file: HubFile) -> str | None:
        found = store.record("git-blobs", file.blob_id)
        return found if isinstance(found, str) and store.has(found) else None

    @staticmethod
    def _remember(store: Store, file: HubFile, sha256: str, name: str) -> None:
        """Tie git's sha1 of a blob to the sha256 of the same bytes, once they are seen to be the same."""
        data = store.path(sha256).read_bytes()
        # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects: the object id covers "blob <size>\0" and the bytes.
        blob_id = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        if blob_id != file.blob_id:
            raise VerificationError(
                f"{name}: the Hub sent other bytes than its file list names (git blob {file.blob_id[:12]}…)",
                hint="a mirror or proxy may be damaged; try again or set HF_ENDPOINT to another one",
            )
        store.write_record("git-blobs", file.blob_id, sha256)

    def _unreachable(self, what: str) -> ResolveError:
        return ResolveError(
            f"the Hub cannot be reached, {what} was not resolved",
            hint=f"check the network, or set HF_ENDPOINT (now {self._api.endpoint}) to a mirror;"
            " without the Hub, use model.path and dataset.path",
        )

    @contextlib.contextmanager
    def _errors(self, repo: str, revision: str, repo_type: RepoType | Literal["organization"]) -> Iterator[None]:
        from huggingface_hub import errors  # noqa: PLC0415

        what = f"{repo_type} {repo}"
        try:
            yield
        except errors.GatedRepoError as error:
            raise ResolveError(
                f"{what} is gated and your account has no access",
                hint="accept its terms on the Hub, then set HF_TOKEN to a token of that account",
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ResolveError(
                f"{what} does not exist on the Hub, or is private",
                hint="check the spelling; for a private repository set HF_TOKEN",
            ) from error
        except errors.RevisionNotFoundError as error:
            assert repo_type != "organization"  # noqa: S101 - for us: it has no revisions
            known = ", ".join(self.revisions(repo, repo_type)) or "none"
            raise ResolveError(
                f"{what} has no revision {revision!r}", hint=f"branches and tags that exist: {known}"
            ) from error
        except errors.EntryNotFoundError as error:
            raise ResolveError(f"{what}@{revision} lacks a file or folder: {_first_line(error)}") from error
        except errors.HfHubHTTPError as error:
            status = getattr(getattr(error, "response", None), "status_code", "no")
            raise ResolveError(
                f"the Hub answered {status} for {what}@{revision}",
                hint="try again later; where the Hub cannot be reached, set HF_ENDPOINT to a mirror",
            ) from error
        except errors.OfflineModeIsEnabled as error:
            raise ResolveError(
                f"HF_HUB_OFFLINE is set, {what} was not resolved", hint="unset it, or take everything from a bundle"
            ) from error
        except OSError as error:
            raise self._unreachable(what) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in {"httpx", "httpx2", "httpcore", "httpcore2"}:
                raise
            raise self._unreachable(what) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
