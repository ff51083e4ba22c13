"""Bring the sources of entries to the workers.

resolve  before planning: find registry versions, fetch URLs without a digest, check that all files
         of the keys are readable
ready    before building: fetch the rest, turn a registry model into a file with its inputs, and
         ship files and code through the store if nodes do not share this machine's disk

STORE/.coldpress/sources/<sha256>/<name>              fetched files
STORE/.coldpress/sources/<sha256>/<absolute path>     shipped files
STORE/.coldpress/sources/mlflow/<slug>-<version>/     versions of registry models
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import CatalogError, ColdpressError, InfrastructureError, SourceError
from freezer.files import digest_bytes, fetch, identity, is_url, write_whole
from freezer.freezing.sources import FILE_KINDS, Source, fetched
from freezer.spec import declared_spec
from freezer.store import WORK
from pipeline.catalog import SOURCE_RUN, SOURCE_VERSION, Entry, of_version
from pipeline.planning import FileDigests, source_key
from pipeline.sources.transfer import ship, upload_sources
from pipeline.workspace import computing, move_whole, staging_folder

if TYPE_CHECKING:
    from pipeline.tracking import Described
    from pipeline.workspace import Workplace


class Materials:
    """Sources of entries in a store.

    Args:
        store: root of the store.
        tracking_uri: of the MLflow registry of `mlflow:` sources.
        digests: remembers fetched files.
        place: of a store in a bucket, which files and code are shipped through.
    """

    def __init__(
        self,
        store: Path,
        tracking_uri: str,
        digests: FileDigests,
        *,
        place: Workplace | None = None,
    ) -> None:
        self._store = store
        self._shipped = store / WORK / "sources"
        self._place = place if place is not None and place.remote is not None else None
        self._folder = self._shipped if self._place is None else store / WORK / "fetched"
        self._tracking_uri = tracking_uri
        self._digests = digests
        self._shipping = False
        self._ready: dict[tuple[str, bool], Entry] = {}
        self._sent: dict[tuple[str, bool], Entry] = {}

    def resolve(self, entries: Sequence[Entry]) -> tuple[list[Entry], list[CatalogError]]:
        """Return the entries with everything that their keys need, and the errors of the others.

        Raises:
            InfrastructureError: MLflow is needed and cannot be reached.
        """
        usable = []
        problems = []
        for entry in entries:
            field = "source"
            try:
                with _error_of(f"source {entry.source}"):
                    resolved = self._with_source(entry)
                field = "samples"
                with _error_of(f"samples {entry.samples}"):
                    usable.append(self._with_samples(resolved))
            except InfrastructureError:
                raise
            except ColdpressError as error:
                problems.append(
                    CatalogError(str(error), entry=entry.name, field=field, code=error.code)
                )
        return usable, problems

    def ship_from_now_on(self) -> None:
        """Ship files and code through the store, since a node does not see this machine's files."""
        if not self._shipping:
            self._shipping = True
            self._ready.clear()

    def ready(self, entry: Entry) -> Entry:
        """Return the entry as a worker can load it, with what its class decides; prepared once for
        each name, while no judge measures on this machine.

        Raises:
            ColdpressError: a file cannot be fetched, differs from its pinned digest, or is not
                trusted.
        """
        key = _key(entry)
        if key not in self._ready:
            with _error_of(f"source {entry.source}"), computing():
                made = replace(entry, source=fetched(entry.source, self._folder))
                if made.source.kind == "mlflow":
                    made = self._of_registry(made)
                if self._shipping:
                    made = ship(made, self._shipped)
            self._ready[key] = made
        return _of_class(self._ready[key], entry)

    def as_sent(self, entry: Entry) -> Entry:
        """Return a ready entry as it is sent to a worker.

        Raises:
            StoreUnreachableError: the bucket cannot be written.
        """
        if self._place is None or not self._shipping:
            return entry
        key = _key(entry)
        if key not in self._sent:  # each upload asks the bucket, and each task is sent its entry
            self._sent[key] = upload_sources(entry, self._shipped, self._place)
        return _of_class(self._sent[key], entry)

    def _with_source(self, entry: Entry) -> Entry:
        """Return the entry with a source that has a key. Reads all files of the key."""
        source = entry.source
        pinned_here = source.sha256 is not None and not is_url(source.location)
        if pinned_here and self._digests.of(Path(source.location)) != f"sha256:{source.sha256}":
            raise SourceError(
                f"the digest of {source.location} is not `sha256: {source.sha256}`; the file"
                " changed, or the digest is outdated",
                code="CP-FETCH-DIGEST",
            )
        if source.kind == "mlflow" and SOURCE_VERSION not in entry.tags:
            from pipeline.tracking import resolve_model

            entry = of_version(entry, resolve_model(self._tracking_uri, source.location))
        elif source.kind in FILE_KINDS and is_url(source.location) and source.sha256 is None:
            entry = replace(
                entry,
                source=replace(
                    source,
                    location=str(self._fetch_unpinned(source.location)),
                    origin=str(source),
                ),
            )
        source_key(entry, self._digests)
        return entry

    def _with_samples(self, entry: Entry) -> Entry:
        """Return the entry with local files of samples, if it has samples."""
        accuracy = entry.accuracy
        if accuracy is not None:
            accuracy = replace(accuracy, samples=self._local(accuracy.samples))
        return replace(entry, samples=self._local(entry.samples), accuracy=accuracy)

    def _local(self, samples: Path | str | None) -> Path | None:
        """A local file of samples, which is fetched if it is a URL, and read for its digest."""
        if isinstance(samples, str):
            samples = self._fetch_unpinned(samples)
        if samples is not None:
            self._digests.of(samples)
        return samples

    def _fetch_unpinned(self, url: str) -> Path:
        """Return the file of a URL. It is fetched only if the server reports a change."""
        current = identity(url)
        key = digest_bytes(f"{url}|{current}".encode())  # the URL may contain credentials
        known = self._digests.known.get(key) if current else None
        local = fetch(url, self._folder, sha256=known)
        if current:
            self._digests.known[key] = local.parent.name
        return local

    def _of_registry(self, entry: Entry) -> Entry:
        """Return the entry with the downloaded version as source, and with its inputs if the entry
        declares none.
        """
        from pipeline.tracking import MODELS, RegistryModel, describe, download, slug

        source = entry.source
        name, _, version = source.location.removeprefix(MODELS).rpartition("/")
        run = entry.tags.get(SOURCE_RUN, "")[:8]
        folder = self._folder / "mlflow" / f"{slug(name)}-{version}-{run}".rstrip("-")
        if not folder.is_dir():
            model = RegistryModel(name=name, version=version)
            with staging_folder(self._store) as staging:
                made = download(self._tracking_uri, model, staging)
                made.chmod(0o755)
                move_whole(made, folder)
        silent = entry.spec is None and entry.samples is None
        described = describe(folder, inputs=silent)
        if described.kind == "pickle" and not source.trust:
            raise SourceError(
                f"{source} is a pickled module, which runs code when loaded; add `trust: true`"
                " (--trust for a registry), or log it with mlflow.pytorch.log_model(...,"
                ' serialization_format="pt2")',
                code="CP-TRUST",
            )
        loaded = Source(
            kind=described.kind,
            location=str(described.path),
            seed=source.seed,
            trust=source.trust,
            search_path=(*(str(path) for path in described.code), *source.search_path),
            origin=str(source),
        )
        loadable = replace(entry, source=loaded)
        return self._with_inputs(loadable, described, folder) if silent else loadable

    def _with_inputs(
        self,
        entry: Entry,
        described: Described,
        folder: Path,
    ) -> Entry:
        spec = None
        if described.inputs is not None:
            spec = declared_spec(described.inputs, described.dims)
        if spec is None and described.kind != "export":
            raise SourceError(
                f"{entry.source} has neither a signature nor an input example; declare `inputs:` in"
                " an entry, or log it with input_example=",
                code="CP-REGISTRY-INPUTS",
            )
        samples = None
        if described.samples and spec is not None:
            from safetensors.numpy import save

            samples = folder.with_name(f"{folder.name}-example.safetensors")
            write_whole(samples, save(described.samples))
        return replace(
            entry,
            spec=spec,
            samples=samples,
            fill_up=True,
        )


def _key(entry: Entry) -> tuple[str, bool]:
    """What the preparations of an entry are of: its items share them but for held-out samples."""
    return entry.name, entry.accuracy is None


def _of_class(made: Entry, entry: Entry) -> Entry:
    """A prepared entry with what the class of another item of its name decides."""
    return replace(made, limits=entry.limits, objective=entry.objective, precision=entry.precision)


@contextmanager
def _error_of(what: str) -> Iterator[None]:
    """Turn an error of a file into a failure of its entry, instead of the campaign."""
    try:
        yield
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise SourceError(f"{what}: {type(error).__name__}: {error}", code="CP-FETCH") from error
