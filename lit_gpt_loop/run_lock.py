"""One process trains into a run's directory at a time (layer P, standard library only).

Two trainings into one directory mix their journals and prune each other's checkpoints, and neither notices: a job submitted
twice, or one that outlived the terminal it was started from. The lock is the kernel's (POSIX record locks, which NFS and Lustre
know): a killed process loses it at once, and nothing is left to clean up. A process that holds a directory may take it again,
as recipes.cooldown does, which decides under the lock and then trains.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_mine: set[Path] = set()  # lock files that this process holds


class RunLockedError(RuntimeError):
    """Another process trains in the directory."""


@contextmanager
def run_lock(run_dir: Path) -> Iterator[bool]:
    """Hold the directory for this process; it is made if it does not exist.

    Args:
        run_dir: of the run.

    Yields:
        Whether it is held; False where the file system knows no locks.

    A directory that was made for it and is still empty at the end is removed again.

    Raises:
        RunLockedError: another process trains there.
        OSError: the directory cannot be written to.
    """
    is_new = not run_dir.exists()
    path = run_dir / NAME
    key = path.resolve()
    if key in _mine:  # opening and closing the file once more would free it
        yield True
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115  closed below; opening must not wipe the holder's name
    except OSError as e:
        raise OSError(
            f"{run_dir} cannot be written to ({e.strerror}): a run needs a directory for its checkpoints and journal. Name another "
            "place with --runs_dir"
        ) from e
    # Not inherited by forked data workers, unlike flock.
    with file as f:
        try:
            fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in _UNKNOWN:
                yield False
                return
            if e.errno not in _HELD:
                raise
            f.seek(0)
            holder = f.read().strip() or "another process"
            raise RunLockedError(
                f"{run_dir} is being trained by {holder}: two trainings in one directory would overwrite each other's "
                f"checkpoints. Wait for it or end it, choose another --run, or, if it is surely gone, delete {path}"
            ) from None
        f.truncate(0)
        f.write(f"process {os.getpid()} on {socket.gethostname()}")
        f.flush()
        _mine.add(key)
        try:
            yield True
        finally:
            _mine.discard(key)
            if is_new and run_dir.is_dir() and [p.name for p in run_dir.iterdir()] == [NAME]:
                path.unlink()
                run_dir.rmdir()
