"""Files of installed packages, checked against SHA-256 and read as data: no code of the package runs."""

import base64
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path


def _distribution(package: str, version: str | None) -> importlib.metadata.Distribution:
    wanted = package if version is None else f"{package}=={version}"
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the package {package} is not installed: `pip install {wanted}` brings it."
        ) from None
    if version is not None and found.version != version:
        raise ValueError(
            f"{package} {found.version} is installed, but the hashes known here are those of {version}: `pip install {wanted}`."
        )
    return found


def _checked(package: str, name: str, path: Path, sha256: str) -> Path:
    try:
        with path.open("rb") as f:
            actual = hashlib.file_digest(f, "sha256").hexdigest()
    except FileNotFoundError:
        raise ValueError(
            f"{package}: its file {name} is missing from {path.parent}. Reinstall the package."
        ) from None
    if actual != sha256:
        raise ValueError(
            f"{package}: {name} has SHA-256 {actual} where {sha256} is expected, so it was changed after it was published. "
            f"Reinstall the package: `pip install --force-reinstall {package}`."
        )
    return path


def package_files(package: str, version: str, sha256: Mapping[str, str]) -> list[Path]:
    """Return the paths of named files of an installed package, each checked against the hash given for it.

    Raises:
        ValueError: package absent, another version, a file missing or changed; the message says what to do.
    """
    distribution = _distribution(package, version)
    return [
        _checked(package, name, Path(str(distribution.locate_file(name))), h) for name, h in sha256.items()
    ]


def recorded_files(
    package: str, version: str | None = None, suffix: str = "", under: str = ""
) -> tuple[str, list[tuple[str, Path, str]]]:
    """Return (version, [(name, path, SHA-256)]) of an installed package's files, checked against its own RECORD, sorted by name.

    RECORD shows files that were changed after the installation; only a digest kept elsewhere shows a forged RECORD.

    Raises:
        ValueError: package absent, another version, no RECORD, or a file missing or changed.
    """
    distribution = _distribution(package, version)
    result = []
    for file in sorted(distribution.files or (), key=str):
        name = file.as_posix()
        if not (name.endswith(suffix) and name.startswith(under)):
            continue
        if file.hash is None or file.hash.mode != "sha256":
            raise ValueError(f"{package} has no SHA-256 for {name} in its RECORD: install it with pip.")
        recorded = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()
        result.append((name, _checked(package, name, Path(str(file.locate())), recorded), recorded))
    if not result:
        raise ValueError(
            f"{package} {distribution.version} lists no files named {under}*{suffix}: install it with pip."
        )
    return distribution.version, result


def combined_sha256(files: Iterable[tuple[str, Path, str]]) -> str:
    """Return one SHA-256 over the names and hashes of `recorded_files`."""
    return hashlib.sha256("".join(f"{name} {h}\n" for name, _, h in files).encode()).hexdigest()
