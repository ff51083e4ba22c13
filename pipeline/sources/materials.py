"""Materials: what an entry's model is made of, brought to where workers find it.

resolve   before planning: which version of a registry's model is meant, the bytes of what a URL names without a digest, and
          whether all files that the keys are made of can be read
ready     before building: what is left to fetch is fetched, a registry's model becomes a file with its inputs, and where nodes
          do not share this machine's disk, files and code travel through the store (transfer.py)

STORE/.coldpress/sources/<sha256>/<name>              fetched or shipped files
STORE/.coldpress/sources/mlflow/<slug>-<version>/     versions of a registry's models
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import CatalogError, ColdpressError, InfrastructureError, SourceError
from freezer.files.atomic import move
from freezer.files.download import fetch, identity, is_url
from freezer.freezing.models.sources import FILE_KINDS, Source, fetched
from freezer.spec.parse import declared_spec
from freezer.store.store import WORK
from pipeline.catalog.entry import SOURCE_RUN, SOURCE_VERSION, Entry, of_version
from pipeline.planning.file_digests import FileDigests
from pipeline.planning.keys import source_key
from pipeline.sources.transfer import sent, ship

if TYPE_CHECKING:
    from pipeline.tracking.mlmodel import Described
    from pipeline.workspace.workspace import Workplace


class Materials:
    """Brings the materials of entries into a store.

    Args:
        store: its root.
        tracking_uri: of the MLflow whose registry `mlflow:` sources name.
        digests: remembers what was fetched.
        shipping: whether some node does not see this machine's files.
        place: of a store in a bucket, through which files and code travel then.
    """

    def __init__(
        self, store: Path, tracking_uri: str, digests: FileDigests, *, shipping: bool = False, place: Workplace | None = None
    ) -> None:
        self._shipped = store / WORK / "sources"
        self._place = place if place is not None and place.remote is not None else None
        self._folder = self._shipped if self._place is None else store / WORK / "fetched"
        self._tracking_uri, self._digests = tracking_uri, digests
        self.shipping = shipping
        self._ready: dict[str, Entry] = {}
        self._sent: dict[str, Entry] = {}

    def resolve(self, entries: Sequence[Entry]) -> tuple[list[Entry], list[CatalogError]]:
        """The entries with all that their keys need, and what is wrong with the others.

        Raises:
            InfrastructureError: MLflow is needed, and cannot be reached.
        """
        found: list[Entry] = []
        problems: list[CatalogError] = []
        for entry in entries:
            field, resolved = "source", entry
            try:
                with _told_of(f"source {entry.source}"):
                    resolved = self._with_source(resolved)
                field = "samples"
                with _told_of(f"samples {entry.samples}"):
                    found.append(self._with_samples(resolved))
            except InfrastructureError:
                raise
            except ColdpressError as error:
                problems.append(CatalogError(str(error), entry=entry.name, field=field, code=error.code))
        return found, problems

    def ship_from_now_on(self) -> None:
        """Let files and code travel through the store: a node has joined that does not see this machine's."""
        if not self.shipping:
            self.shipping = True
            self._ready.clear()
            self._sent.clear()

    def is_ready(self, entry: Entry) -> bool:
        """Whether nothing is left to do for an entry that is work: to fetch, to download or to ship."""
        remote = entry.source.kind == "mlflow" or (entry.source.kind in FILE_KINDS and is_url(entry.source.location))
        return entry.name in self._ready or not (self.shipping or remote)

    def ready(self, entry: Entry) -> Entry:
        """The entry as a worker can load it; done once for each name.

        Raises:
            ColdpressError: something cannot be fetched, is not what was pinned, or is not trusted.
        """
        if entry.name not in self._ready:
            with _told_of(f"source {entry.source}"):
                made = replace(entry, source=fetched(entry.source, self._folder))
                if made.source.kind == "mlflow":
                    made = self._of_registry(made)
                if self.shipping:
                    made = ship(made, self._shipped)
            self._ready[entry.name] = made
        return self._ready[entry.name]

    def travelling(self, entry: Entry) -> Entry:
        """An entry that is ready as it is given to a worker.

        Raises:
            StoreUnreachableError: it has to go through a bucket, which cannot be written.
        """
        if self._place is None or not self.shipping:
            return entry
        if entry.name not in self._sent:
            self._sent[entry.name] = sent(entry, self._shipped, self._place)
        return self._sent[entry.name]

    def _with_source(self, entry: Entry) -> Entry:
        """The entry with a source that its key can be made of; all files of the key have been read."""
        source = entry.source
        pinned_here = source.sha256 is not None and not is_url(source.location)
        if pinned_here and self._digests.of(Path(source.location)) != f"sha256:{source.sha256}":
            raise SourceError(
                f"{source.location} has another digest than `sha256: {source.sha256}`; the file was changed, or the digest is old",
                code="CP-FETCH-DIGEST",
            )
        if source.kind == "mlflow" and SOURCE_VERSION not in entry.tags:
            from pipeline.tracking.source_models import resolve_model

            entry = of_version(entry, resolve_model(self._tracking_uri, source.location))
        elif source.kind in FILE_KINDS and is_url(source.location) and source.sha256 is None:
            local = self._fetch_unpinned(source.location)
            entry = replace(entry, source=replace(source, location=str(local), origin=str(source)))
        source_key(entry, self._digests)
        return entry

    def _with_samples(self, entry: Entry) -> Entry:
        """The entry with a file of samples that has been read, if it has one."""
        samples = self._fetch_unpinned(entry.samples) if isinstance(entry.samples, str) else entry.samples
        if samples is not None:
            self._digests.of(samples)
        return replace(entry, samples=samples)

    def _fetch_unpinned(self, url: str) -> Path:
        """The file of a URL; one that the server says is still the same is not fetched again."""
        said = identity(url)
        known = self._digests.recall(f"{url}|{said}") if said else None
        local = fetch(url, self._folder, sha256=known)
        if said:
            self._digests.remember(f"{url}|{said}", local.parent.name)
        return local

    def _of_registry(self, entry: Entry) -> Entry:
        """The entry with the files of its version for a source, and its inputs where the entry says nothing of them."""
        from pipeline.tracking.mlmodel import describe
        from pipeline.tracking.source_models import RegistryModel, download, slug

        source = entry.source
        name, _, version = source.location.removeprefix("models:/").rpartition("/")
        folder = self._folder / "mlflow" / "-".join((slug(name), version, entry.tags.get(SOURCE_RUN, "")[:8])).rstrip("-")
        if not folder.is_dir():
            model = RegistryModel(name=name, version=version, run_id=None, tags={}, model_uri=source.location)
            download(self._tracking_uri, model, folder)
        silent = entry.spec is None and entry.samples is None
        described = describe(folder, inputs=silent)
        if described.needs_trust and not source.trust:
            raise SourceError(
                f"{source} is a pickled module, which runs code when it is loaded; add `trust: true` (--trust for a registry), or "
                'log it with mlflow.pytorch.log_model(..., serialization_format="pt2")',
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
        made = replace(entry, source=loaded)
        return self._with_inputs(made, described, folder) if silent else made

    def _with_inputs(self, entry: Entry, described: Described, folder: Path) -> Entry:
        spec = declared_spec(described.inputs, described.dims) if described.inputs is not None else None
        if spec is None and described.kind != "export":
            raise SourceError(
                f"{entry.source} has neither a signature nor an input example; write `inputs:` in an entry, or log it with "
                "input_example=",
                code="CP-REGISTRY-INPUTS",
            )
        samples = None
        if described.samples and spec is not None:
            from safetensors.numpy import save_file

            samples = folder.with_name(f"{folder.name}-example.safetensors")
            unfinished = folder.with_name(f".{os.getpid()}-{folder.name}.safetensors")
            save_file(described.samples, unfinished)
            move(unfinished, samples)
        return replace(entry, spec=spec, samples=samples, fill_up=True)


@contextlib.contextmanager
def _told_of(what: str) -> Iterator[None]:
    """Make a file that cannot be read, copied or parsed the failure of its entry, and never the campaign's."""
    try:
        yield
    except (OSError, SyntaxError, ValueError) as error:
        raise SourceError(f"{what}: {type(error).__name__}: {error}", code="CP-FETCH") from error
