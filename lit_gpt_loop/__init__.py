"""lit_gpt_loop: the model, the data, the LightningModule and the strategies of a GPT pretraining run."""

from importlib import import_module, metadata
from typing import Any

_EXPORTS = {
    "GPT": "lit_gpt_loop.model",
    "GPTConfig": "lit_gpt_loop.config",
    "LitGPT": "lit_gpt_loop.module",
    "TextDataModule": "lit_gpt_loop.data",
}
__all__ = ["GPT", "GPTConfig", "LitGPT", "TextDataModule"]

COMPROMISED = ("2.6.2", "2.6.3")


def refuse_compromised_releases() -> None:
    """Refuse the two Lightning releases that carried malicious code, before anything of Lightning is imported.

    Raises:
        RuntimeError: lightning or pytorch-lightning 2.6.2 or 2.6.3 is installed (advisory GHSA-w37p-236h-pfx3).
    """
    for package in ("lightning", "pytorch-lightning"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version in COMPROMISED:
            raise RuntimeError(
                f"{package} {version} is installed, a compromised release (GHSA-w37p-236h-pfx3): "
                f"pip uninstall -y {package}, purge pip's cache, install {package}>=2.6.4, and rotate the credentials that "
                "this machine holds, as the advisory says"
            )


refuse_compromised_releases()


def __getattr__(name: str) -> Any:
    # Lazy, so that what needs no torch (recipes.plan) does not wait for it.
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'lit_gpt_loop' has no attribute {name!r}")
