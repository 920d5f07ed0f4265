"""The policy as a table, and the files: listing, damage, falling back, hostile content. No Trainer."""

import json
import os
import pickle
import re
import shutil
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from callbacks.checkpoint_retention import (
    CheckpointRetention,
    DamagedCheckpointError,
    Policy,
    Saved,
    UnsafeCheckpointError,
    decide,
    find_damage,
    list_saved,
    manifest_hash,
    read_manifest,
)

NAN, INF = float("nan"), float("inf")


def steps_of(kept):
    return [s.step for s in kept]


def made(metrics, **kwargs):
    return [Saved(step=step, metric=m, order=i) for i, (step, m) in enumerate(metrics.items())]


TABLE = {
    # name: (metrics by step, policy, latest, best, archive, pruned)
    "one role each": ({1: 3.0, 2: 1.0, 3: 2.0}, {"keep_latest": 1}, [3], [2], [], [1]),
    "several roles, one checkpoint": ({1: 3.0, 2: 1.0}, {"keep_latest": 1, "archive": 2}, [2], [2], [2], [1]),
    "a tie keeps the earlier": ({1: 1.0, 2: 1.0, 3: 1.0}, {"keep_latest": 1}, [3], [1], [], [2]),
    "NaN and inf are never best": ({1: NAN, 2: 5.0, 3: -INF, 4: INF}, {"keep_latest": 1}, [4], [2], [], [1, 3]),
    "all NaN: no best": ({1: NAN, 2: NAN}, {"keep_latest": 1}, [2], [], [], [1]),
    "no metric, no best": ({1: None, 2: None, 3: None}, {"keep_latest": 2}, [3, 2], [], [], [1]),
    "max": ({1: 3.0, 2: 1.0, 3: 2.0}, {"keep_latest": 1, "mode": "max"}, [3], [1], [], [2]),
    "max, infinite": ({1: 3.0, 2: INF, 3: 2.0}, {"keep_latest": 1, "mode": "max"}, [3], [1], [], [2]),
    "too small an improvement": ({1: 1.0, 2: 0.95, 3: 0.97}, {"keep_latest": 1, "min_delta": 0.1}, [3], [1], [], [2]),
    "small ones do not add up against a kept one": (
        {1: 1.0, 2: 0.95, 3: 0.89}, {"keep_latest": 1, "min_delta": 0.1}, [3], [3], [], [1, 2]),
    "two best": ({1: 3.0, 2: 1.0, 3: 2.0, 4: 9.0}, {"keep_latest": 1, "keep_best": 2}, [4], [2, 3], [], [1]),
    "none best": ({1: 3.0, 2: 1.0}, {"keep_latest": 1, "keep_best": 0}, [2], [], [], [1]),
    "archive each third": (dict.fromkeys(range(1, 8)), {"keep_latest": 1, "archive": 3}, [7], [], [3, 6], [1, 2, 4, 5]),
    "archive listed": (dict.fromkeys(range(1, 6)), {"keep_latest": 1, "archive": (2, 5)}, [5], [], [2, 5], [1, 3, 4]),
    "nothing there": ({}, {}, [], [], [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_policy_table(name):
    metrics, kwargs, latest, best, archive, pruned = TABLE[name]
    roles, prune = decide(made(metrics), Policy(**kwargs))
    assert (steps_of(roles["latest"]), steps_of(roles["best"]), steps_of(roles["archive"])) == (
        latest,
        best,
        archive,
    )
    assert steps_of(prune) == pruned


@pytest.mark.case("W11")
def test_w11_best_latest_and_archive_of_a_validation_curve():
    saved = made(dict(zip(range(10, 70, 10), [0.71, 0.52, 0.43, 0.39, 0.42, 0.48], strict=True)))
    roles, prune = decide(saved, Policy(keep_latest=1, archive=20))
    assert [steps_of(roles[r]) for r in ("best", "latest", "archive")] == [[40], [60], [20, 40, 60]]
    assert steps_of(prune) == [10, 30, 50]
    roles, prune = decide(saved, Policy(keep_latest=1, archive=(20, 60)))
    assert [steps_of(roles[r]) for r in ("best", "latest", "archive")] == [[40], [60], [20, 60]]
    assert steps_of(prune) == [10, 30, 50]


@pytest.mark.case("C36")
def test_c36_ties_and_nan():
    roles, _ = decide(made({1: 2.0, 2: 2.0}), Policy())
    assert steps_of(roles["best"]) == [1]
    roles, _ = decide(made({1: NAN, 2: 4.0, 3: NAN, 4: NAN}), Policy(keep_latest=1))
    assert steps_of(roles["best"]) == [2]
    assert decide(made({1: NAN, 2: INF}), Policy())[0]["best"] == []


def test_the_last_verified_one_is_never_pruned_and_only_the_last():
    saved = [Saved(step=s, order=s, is_verified=s in (1, 2)) for s in range(1, 6)]
    assert steps_of(decide(saved, Policy(keep_latest=1))[1]) == [1, 3, 4]


def test_an_archived_one_stays_when_the_policy_no_longer_archives():
    saved = [Saved(step=s, order=s, archived=s == 2) for s in range(1, 6)]
    assert steps_of(decide(saved, Policy(keep_latest=1))[1]) == [1, 3, 4]


def test_one_that_was_no_improvement_does_not_become_best_when_the_best_before_it_is_pruned():
    entered = [
        Saved(step=2, metric=0.95, order=2, improved=False, archived=True),
        Saved(step=3, metric=0.89, order=3, improved=True),
    ]
    assert steps_of(decide(entered, Policy(min_delta=0.1))[0]["best"]) == [3]
    assert steps_of(decide(entered[:1], Policy(min_delta=0.1))[0]["best"]) == [
        2
    ]  # deleted by hand: what is left


def test_latest_is_what_was_saved_last_also_after_going_back_to_an_older_one():
    saved = [Saved(step=s, order=i) for i, s in enumerate([10, 20, 30, 12])]
    assert steps_of(decide(saved, Policy(keep_latest=2))[0]["latest"]) == [12, 30]


@given(
    st.lists(st.one_of(st.none(), st.sampled_from([NAN, INF, 0.0, 1.0, 2.0]), st.floats(0, 9)), max_size=25),
    st.integers(0, 3), st.integers(1, 3), st.sampled_from([None, 2, 5, (3, 7)]), st.sampled_from([0.0, 0.5]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_properties_of_the_policy(metrics, keep_best, keep_latest, archive, min_delta):
    """Saving and pruning one by one, as a run does, never loses the best, and deciding twice changes nothing."""
    policy = Policy(keep_best=keep_best, keep_latest=keep_latest, archive=archive, min_delta=min_delta)
    disk, thresholds = [], []
    for step, metric in enumerate(metrics, 1):
        new = Saved(step=step, metric=metric, order=step, archived=policy.archives(step))
        improved = any(s is new for s in decide([*disk, new], policy)[0]["best"])
        disk.append(Saved(**{**vars(new), "improved": improved}))
        roles, prune = decide(disk, policy)
        assert not {id(s) for s in prune} & {id(s) for kept in roles.values() for s in kept}
        disk = [s for s in disk if all(s is not p for p in prune)]
        again, nothing = decide(disk, policy)
        assert nothing == []
        assert {k: steps_of(v) for k, v in again.items()} == {k: steps_of(v) for k, v in roles.items()}
        # What a reader of the whole curve would call best, update by update:
        is_number = metric is not None and metric == metric and abs(metric) != INF
        if is_number and (not thresholds or thresholds[-1][1] - metric > min_delta):
            thresholds.append((step, metric))
        if keep_best == 1:
            assert steps_of(again["best"]) == [s for s, _ in thresholds[-1:]]
    archived = {s for s in range(1, len(metrics) + 1) if policy.archives(s)}
    assert archived <= {s.step for s in disk}


# ---- files -----------------------------------------------------------------------------------------------------------


def write_step(folder, step, *, metric=None, order=None, run="r", state=None, **extra):
    """A step directory, written by hand after the README's description of the format."""
    import hashlib

    where = folder / f"step-{step:08d}"
    where.mkdir(parents=True)
    torch.save(
        {"state_dict": {"w": torch.full((100,), float(step))}} if state is None else state,
        where / "state.ckpt",
    )
    content = (where / "state.ckpt").read_bytes()
    manifest = {
        "schema": 1, "step": step, "run": run, "order": step if order is None else order,
        "created": f"2026-01-01T00:00:{step % 60:02d}",
        "files": {"state.ckpt": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}},
        "metric": None if metric is None else {"name": "val/loss", "value": metric, "step": step, "mode": "min"}, **extra,
    }  # fmt: skip
    manifest["sha256"] = manifest_hash(manifest)
    manifest["verified"] = None
    (where / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return where


def loaded_step(path):
    return int(torch.load(path, weights_only=True)["state_dict"]["w"][0])


def test_resolve_finds_each_role(tmp_path):
    for step, metric in ((10, 3.0), (20, 1.0), (30, 2.0)):
        write_step(tmp_path, step, metric=metric)
    resolve = CheckpointRetention.resolve
    assert loaded_step(resolve(tmp_path, "latest")) == loaded_step(resolve(tmp_path, "auto")) == 30
    assert loaded_step(resolve(tmp_path, "best")) == 20
    assert loaded_step(resolve(tmp_path, "archive:10")) == loaded_step(resolve(tmp_path, "step:10")) == 10
    assert loaded_step(resolve(tmp_path, tmp_path / "step-00000020")) == 20
    assert loaded_step(resolve(tmp_path, "step-00000020")) == 20
    assert loaded_step(resolve(tmp_path, tmp_path / "step-00000020" / "state.ckpt")) == 20
    with pytest.raises(FileNotFoundError, match=r"there are steps \[10, 20, 30\]"):
        resolve(tmp_path, "archive:11")
    with pytest.raises(FileNotFoundError, match="give latest, best"):
        resolve(tmp_path, "newest")


def test_resolve_where_nothing_was_saved(tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        assert CheckpointRetention.resolve(folder, "auto") is None
        with pytest.raises(FileNotFoundError):
            CheckpointRetention.resolve(folder, "latest")
    (tmp_path / ".tmp-step-00000010.host.1").mkdir()  # a save that was killed
    assert CheckpointRetention.resolve(tmp_path, "auto") is None


@pytest.mark.case("C37")
def test_c37_a_truncated_newest_falls_back_and_names_the_file(tmp_path):
    write_step(tmp_path, 10)
    newest = write_step(tmp_path, 20) / "state.ckpt"
    with open(newest, "r+b") as f:
        f.truncate(newest.stat().st_size // 2)
    for verify in ("load", "sizes"):
        with pytest.warns(UserWarning, match=rf"Step 20 is damaged and passed over: {newest} has \d+ bytes"):
            assert loaded_step(CheckpointRetention.resolve(tmp_path, "latest", verify=verify)) == 10
    shutil.rmtree(tmp_path / "step-00000010")
    with pytest.warns(match="Step 20"), pytest.raises(DamagedCheckpointError, match=re.escape(str(newest))):
        CheckpointRetention.resolve(tmp_path, "auto")  # never a silent fresh start
    (newest.parent / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"no manifest\.json"):
        CheckpointRetention.resolve(tmp_path, "auto")


def test_every_flipped_bit_and_every_missing_byte_is_noticed(tmp_path):
    folder = write_step(tmp_path, 10, metric=1.5, lineage={"parent_run": "a", "parent_step": 3})
    assert find_damage(folder) is None
    generator = torch.Generator().manual_seed(0)
    for name in ("manifest.json", "state.ckpt"):
        whole = (folder / name).read_bytes()
        positions = torch.randint(len(whole), (150,), generator=generator).tolist() + [0, len(whole) - 1]
        for position in positions:
            broken = bytearray(whole)
            broken[position] ^= 1 << int(torch.randint(8, (), generator=generator))
            (folder / name).write_bytes(broken)
            assert name in (find_damage(folder) or ""), (
                name,
                position,
                bytes(broken[position - 20 : position + 20]),
            )
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:length])
            assert name in (find_damage(folder) or ""), (name, length)
        (folder / name).unlink()
        assert name in (find_damage(folder) or "")
        (folder / name).write_bytes(whole)
    assert find_damage(folder) is None


def test_who_verifies_later_may_write_it_down(tmp_path):
    folder = write_step(tmp_path, 10)
    manifest = read_manifest(folder)
    manifest["verified"] = {"promise": "exact", "when": "now"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(folder) is None
    assert list_saved(tmp_path)[0].is_verified
    manifest["verified"] = {"promise": "failed"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert not list_saved(tmp_path)[0].is_verified


def test_a_damaged_best_falls_back_to_the_next_best_and_a_named_one_does_not(tmp_path):
    for step, metric in ((10, 3.0), (20, 1.0), (30, 2.0)):
        write_step(tmp_path, step, metric=metric)
    (tmp_path / "step-00000020" / "state.ckpt").write_bytes(b"")
    with pytest.warns(UserWarning, match="Step 20 is damaged"):
        assert loaded_step(CheckpointRetention.resolve(tmp_path, "best")) == 30
    with pytest.warns(match="Step 20"), pytest.raises(DamagedCheckpointError):
        CheckpointRetention.resolve(tmp_path, "archive:20")
    with pytest.raises(DamagedCheckpointError):
        CheckpointRetention.resolve(tmp_path, "step-00000020")


def test_of_several_runs_in_one_folder_the_one_that_saved_last_is_found(tmp_path):
    write_step(tmp_path, 50, run="old", order=9)
    write_step(tmp_path, 51, run="new", order=1)
    manifest = read_manifest(tmp_path / "step-00000050")
    assert manifest["created"] < read_manifest(tmp_path / "step-00000051")["created"]
    assert loaded_step(CheckpointRetention.resolve(tmp_path, "latest")) == 51


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_hostile_content_is_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"
    runs = tmp_path / "runs"
    folder = write_step(runs, 10, state={"state_dict": {}, "x": Payload(ran)})
    with pytest.raises(UnsafeCheckpointError, match=r"state\.ckpt is refused: .*(posix|nt)\.system"):
        CheckpointRetention.resolve(runs, "latest")
    (tmp_path / "raw.ckpt").write_bytes(pickle.dumps(Payload(ran)))
    with pytest.raises(UnsafeCheckpointError, match=r"raw\.ckpt is refused"):
        CheckpointRetention.resolve(runs, tmp_path / "raw.ckpt")
    # A sharded folder: hostile in its metadata, in its other file, in an entry that is no tensor.
    state = tmp_path / "sharded"
    state.mkdir()
    (state / ".metadata").write_bytes(pickle.dumps(Payload(ran)))
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata is refused: it asks for (posix|nt)\.system"):
        CheckpointRetention.resolve(runs, state)
    (state / ".metadata").unlink()
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(3), "lr": 0.1}, checkpoint_id=state, no_dist=True)
    assert CheckpointRetention.resolve(runs, state) == state
    dcp.save({"w": torch.ones(3), "lr": Payload(ran)}, checkpoint_id=state, no_dist=True)
    with pytest.raises(UnsafeCheckpointError, match=r"distcp is refused: .*(posix|nt)\.system"):
        CheckpointRetention.resolve(runs, state)
    assert folder.exists() and not ran.exists()


def test_listing_and_deciding_over_a_thousand_is_quick(tmp_path):
    folder = write_step(tmp_path, 1, metric=1.0)
    content = json.loads((folder / "manifest.json").read_text())
    for step in range(2, 1001):
        (tmp_path / f"step-{step:08d}").mkdir()
        manifest = json.dumps({**content, "step": step, "order": step})
        (tmp_path / f"step-{step:08d}" / "manifest.json").write_text(manifest)
    started = time.perf_counter()
    saved = list_saved(tmp_path)
    roles, prune = decide(saved, Policy(archive=100))
    elapsed_s = time.perf_counter() - started
    assert len(saved) == 1000 and len(prune) == 1000 - 10 - 1 - 1  # 1000 is archived too
    assert steps_of(roles["latest"]) == [1000, 999]
    assert elapsed_s < 2.0  # recipes.bench holds the 0.2 s on a quiet machine


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"mode": "lowest"}, "'min' or 'max'"),
        ({"keep_latest": 0}, "a run has to be able to continue"),
        ({"keep_best": -1}, "0 or more"),
        ({"every_n_steps": 0}, "1 or more"),
        ({"every_n_minutes": 0}, "> 0"),
        ({"min_delta": NAN}, "0 or more"),
        ({"verify": "never"}, "one of write, load, both, sizes"),
        ({"archive_every_n_steps": 0}, "1 or more"),
    ],
)
def test_arguments_that_make_no_sense(kwargs, rule):
    with pytest.raises(ValueError, match=rule):
        CheckpointRetention("x", **kwargs)
