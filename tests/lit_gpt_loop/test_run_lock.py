import errno
import fcntl
import signal
import subprocess
import sys

import pytest

from lit_gpt_loop.run_lock import run_lock

HOLD = """
import multiprocessing, sys, time, pathlib
from lit_gpt_loop.run_lock import run_lock
with run_lock(pathlib.Path(sys.argv[1])) as is_held:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    print(is_held, worker.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path / "run", with a forked worker as a DataLoader has."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    is_held, worker = process.stdout.readline().split()
    assert is_held == "True"
    yield process
    process.kill()
    process.wait()
    subprocess.run(["kill", "-9", worker], check=False)


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path, holder):
    for _ in range(2):  # the attempt itself must not break the lock, nor wipe the name
        with (
            pytest.raises(RuntimeError, match=rf"trained by process {holder.pid} on .*choose another --run"),
            run_lock(tmp_path / "run"),
        ):
            raise AssertionError("entered")
    with run_lock(tmp_path / "other") as is_held:
        assert is_held


def test_a_killed_process_loses_it_at_once_though_its_workers_live(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run_lock(tmp_path / "run") as is_held:
        assert is_held


def test_it_is_free_again_after_use(tmp_path):
    with run_lock(tmp_path / "run"):
        pass
    code = f"import pathlib; from lit_gpt_loop.run_lock import run_lock\nwith run_lock(pathlib.Path({str(tmp_path / 'run')!r})): pass"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_stops_nobody(tmp_path, monkeypatch, number):
    def lockf(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with run_lock(tmp_path / "run") as is_held:
        assert not is_held


def test_any_other_error_is_not_hidden(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(OSError, match="broken"), run_lock(tmp_path / "run"):
        raise AssertionError("entered")


def test_the_holder_may_take_it_again_and_still_has_it_afterwards(tmp_path):
    """A second open and close of the file in one process would free a POSIX lock."""
    code = f"import pathlib; from lit_gpt_loop.run_lock import run_lock\nwith run_lock(pathlib.Path({str(tmp_path / 'run')!r})): pass"
    (tmp_path / "link").symlink_to(tmp_path)
    with run_lock(tmp_path / "run"):
        with run_lock(tmp_path / "link" / "run") as is_held:
            assert is_held
        assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 1
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_directory_that_stays_empty_is_removed_and_one_that_is_used_stays(tmp_path):
    with pytest.raises(ValueError), run_lock(tmp_path / "mistyped"):
        raise ValueError
    assert not (tmp_path / "mistyped").exists()
    with run_lock(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "config.yaml"]


def test_a_place_that_cannot_be_written_to_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(OSError, match=r"file/run cannot be written to \(Not a directory\): .* --runs_dir"),
        run_lock(tmp_path / "file" / "run"),
    ):
        raise AssertionError("entered")
