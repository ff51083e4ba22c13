"""Work, ledgers and leases in a bucket, shared by machines that share nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from freezer.errors import InfrastructureError, IntegrityError, StoreUnreachableError, UsageError
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import (
    History,
    LeaseLostError,
    Ledger,
    campaign_lock,
    ledger_folder,
    read_holder,
    read_rows,
)
from pipeline.ledger import lease as lease_module
from pipeline.ledger.lease import Lease, lease_path
from pipeline.ledger.ledger import MERGE_AT
from pipeline.ledger.segments import part_paths
from pipeline.planning import FileDigests
from pipeline.sources import Materials, download_sources
from pipeline.sources.transfer import SHIPPED
from pipeline.workspace import Workplace, damage_of, note_digests
from pipeline.workspace.work_folders import DIGESTS
from tests.support.buckets import Wire, objects, overwrite
from tests.support.campaigns import entry


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the settle times: the bucket is on this machine."""
    monkeypatch.setattr("freezer.store.bucket.SETTLE_S", 0.1)
    monkeypatch.setattr(lease_module, "SETTLE_S", 0.1)


def machine(bucket: str, folder: Path) -> Workplace:
    """The workplace of another machine, which has only this folder."""
    return Workplace(folder, Store.open(bucket).remote)


def made(folder: Path) -> Path:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "payload").write_bytes(b"payload" * 100)
    (folder / "wall_s").write_text("1.5")
    return folder


@pytest.mark.parametrize("provider", ["bucket", "gs"])
def test_folder_travels_whole(
    provider: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bucket = request.getfixturevalue(provider)
    here = machine(bucket, tmp_path / "here")
    there = machine(bucket, tmp_path / "there")
    assert not there.is_listed("candidates", "key")
    assert not there.bring("candidates", "key", tmp_path / "brought")
    here.keep(made(tmp_path / "made"), "candidates", "key")
    assert there.has("candidates", "key")
    assert not there.is_listed("candidates", "key"), "the listing is read once"
    assert machine(bucket, tmp_path / "third").is_listed("candidates", "key")
    assert there.read("candidates", "key", "wall_s") == b"1.5"
    assert there.read("candidates", "other", "wall_s") is None
    assert there.bring("candidates", "key", tmp_path / "brought")
    assert (tmp_path / "brought" / "deep" / "payload").read_bytes() == b"payload" * 100
    (tmp_path / "made" / "wall_s").write_text("2.5")
    there.keep(tmp_path / "made", "candidates", "key")
    assert here.read("candidates", "key", "wall_s") == b"1.5", "the first one stays"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {
        tmp_path / folder / name
        for folder in ("brought", "made")
        for name in ("deep/payload", "wall_s")
    }, "nothing is left"
    there.drop("candidates", "key")
    assert not here.has("candidates", "key")


def test_folder_needs_its_marker(
    bucket: str, s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Wire(s3_address) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.address)
        here = machine(bucket, tmp_path / "here")
        wire.cut_at = 3
        with pytest.raises(StoreUnreachableError):
            here.keep(made(tmp_path / "made"), "judged", "key")
        wire.restore()
        assert len(objects(s3_address, bucket.removeprefix("s3://"))) == 2
        assert not here.has("judged", "key")
        assert not here.bring("judged", "key", tmp_path / "brought")
        here.keep(tmp_path / "made", "judged", "key")
        assert here.has("judged", "key")


def test_damaged_files_are_rejected(bucket: str, s3_address: str, tmp_path: Path) -> None:
    here = machine(bucket, tmp_path / "here")
    place = bucket.removeprefix("s3://")
    here.keep(made(tmp_path / "made"), "judged", "key")
    overwrite(s3_address, f"{place}/.coldpress/judged/key/deep/payload", b"PAYLOAD" * 100)
    with pytest.raises(IntegrityError):
        here.bring("judged", "key", tmp_path / "brought")
    overwrite(
        s3_address,
        f"{place}/.coldpress/judged/key.json",
        b'{"files": {"../out": {"digest": "", "size_bytes": 1}}}',
    )
    with pytest.raises(IntegrityError, match="outside the artifact's folder"):
        here.bring("judged", "key", tmp_path / "brought")
    overwrite(s3_address, f"{place}/.coldpress/judged/key.json", b"{")
    with pytest.raises(IntegrityError):
        here.has("judged", "key")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {
        tmp_path / "made" / name for name in ("deep/payload", "wall_s")
    }


def test_sources_are_shipped_once(bucket: str, s3_address: str, tmp_path: Path) -> None:
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    given = entry("ranker", catalog)
    (catalog / "mod.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Linear(2, 2)\n"
    )
    driver = machine(bucket, tmp_path / "driver")
    digests = FileDigests(tmp_path / "digests.json")
    materials = Materials(driver.root, "sqlite://", digests, place=driver)
    assert materials.as_sent(materials.ready(given)) == given, "a local Ray sees the catalog"
    materials.ship_from_now_on()
    as_sent = materials.as_sent(materials.ready(given))
    assert as_sent.search_path[0].startswith(str(SHIPPED))
    before = objects(s3_address, bucket.removeprefix("s3://"))
    for name in ("one", "two"):
        node = machine(bucket, tmp_path / name)
        here: Entry = download_sources(as_sent, node)
        assert Path(here.search_path[0]).is_relative_to(tmp_path / name)
        assert [path.name for path in Path(here.search_path[0]).iterdir()] == ["mod.py"]
        assert download_sources(as_sent, node) == here
    again = Materials(driver.root, "sqlite://", digests, place=driver)
    again.ship_from_now_on()
    assert again.as_sent(again.ready(given)) == as_sent
    assert objects(s3_address, bucket.removeprefix("s3://")) == before


def test_ledger_in_a_bucket(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(bucket)
    with Ledger(store, "one") as ledger:
        for index in range(MERGE_AT + 2):
            ledger.append(
                "build", f"key{index}", model="m", device_class="portable", data={"index": index}
            )
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
        other = Store.open(bucket)
        assert other.root != store.root
        assert len(part_paths(ledger_folder(other))) == 3, "merged parts are removed there too"
        rows = {row.key: row.data["index"] for row in read_rows(ledger_folder(other))}
        assert rows == {f"key{index}": index for index in range(MERGE_AT + 2)}
        with Ledger(other, "two") as second:
            row = second.find("build", "key7")
            assert row is not None
            assert row.data == {"index": 7}
            ledger.append("build", "late", model="m", device_class="portable", data={"index": -1})
            assert second.find("build", "late") is None
            second.refresh()
            assert second.find("build", "late") is not None
    assert len(part_paths(ledger_folder(other))) == 1
    with pytest.raises(UsageError):
        History(other).record("one")


def test_failed_write_adds_no_row(
    bucket: str, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Wire(s3_address) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.address)
        with Ledger(Store.open(bucket), "one") as ledger:
            ledger.append("build", "first", model="m", device_class="portable", data={})
            wire.is_cut = True
            with pytest.raises(StoreUnreachableError):
                ledger.append("build", "second", model="m", device_class="portable", data={})
            wire.restore()
            ledger.append("build", "third", model="m", device_class="portable", data={})
        assert {row.key for row in read_rows(ledger_folder(Store.open(bucket)))} == {
            "first",
            "third",
        }


def test_lease_in_a_bucket_excludes_a_second_driver(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Store.open(bucket).remote
    one, two = Store(tmp_path / "one", remote), Store(tmp_path / "two", remote)
    with campaign_lock(one, "c") as lease:
        with (
            pytest.raises(InfrastructureError),
            campaign_lock(two, "c"),
        ):
            pass
        lease.check()
        holder = read_holder(one, "c")
        assert holder is not None
        assert holder.token == lease.token
        one.files.write(lease_path("c"), b"{}")
        with pytest.raises(LeaseLostError):
            lease.check()
    one.files.remove(lease_path("c"))
    with campaign_lock(two, "c"):
        pass
    assert read_holder(one, "c") is None


def test_one_of_two_simultaneous_drivers_continues(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rival writes its lease after both have seen that there is none."""
    store = Store(tmp_path, Store.open(bucket).remote)
    sleep = time.sleep

    def then_the_rival(seconds: float) -> None:
        monkeypatch.setattr(time, "sleep", sleep)
        assert read_holder(store, "c") is not None
        Lease(store, "c", after=None).write()

    monkeypatch.setattr(time, "sleep", then_the_rival)
    with (
        pytest.raises(InfrastructureError),
        campaign_lock(store, "c"),
    ):
        pass
    assert read_holder(store, "c") is not None, "the rival's lease stays"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "key"
    (folder / "payloads").mkdir(parents=True)
    (folder / "candidate.json").write_text("{}")
    (folder / "payloads" / "b1.pt").write_bytes(b"weights")
    note_digests(folder)
    return folder


def test_changed_or_missing_file_is_damage(folder: Path) -> None:
    assert damage_of(folder) is None
    (folder / "payloads" / "b1.pt").write_bytes(b"weightz")
    assert "b1.pt differs" in str(damage_of(folder))
    (folder / "candidate.json").unlink()
    assert "candidate.json is missing" in str(damage_of(folder))
    assert "other is missing" in str(damage_of(folder.with_name("other")))


def test_digests_of_earlier_releases_are_optional(folder: Path) -> None:
    (folder / DIGESTS).write_text("{")
    assert "cannot be read" in str(damage_of(folder))
    (folder / DIGESTS).unlink()
    assert damage_of(folder) is None
