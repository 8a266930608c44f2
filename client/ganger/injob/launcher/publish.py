"""Making a checkpoint exist: the manifest, then the rename. The rename is the truth."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from typing import Any

from ganger.injob.launcher.exit_record import sync_directory, write_durably
from ganger.injob.launcher.launch_request import LaunchError

MANIFEST = "MANIFEST.json"


def publish(temporary: str, final: str, manifest: Mapping[str, Any]) -> None:
    """Write the manifest into ``temporary``, sync, rename it to ``final``, sync the parent.

    Asked again after it was done, it agrees. Raises LaunchError(PUBLISH_FAILED) when shards the manifest names
    (``files``: name to {"bytes"}) are missing or of another size, LaunchError(STORAGE_FULL or STORAGE_FAILED) for what
    storage says.
    """
    if not os.path.isdir(temporary):
        if os.path.exists(os.path.join(final, MANIFEST)):
            return
        raise LaunchError("PUBLISH_FAILED", f"there is no {temporary} to publish")
    files = manifest.get("files", {})
    for name, facts in files.items() if isinstance(files, Mapping) else ():
        path = os.path.join(temporary, os.path.basename(name))
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise LaunchError("PUBLISH_FAILED", f"{path} is named in the manifest: {error.strerror}") from error
        if isinstance(facts, Mapping) and facts.get("bytes", size) != size:
            raise LaunchError("PUBLISH_FAILED", f"{path} has {size} bytes, the manifest says {facts['bytes']}")
    try:
        write_durably(os.path.join(temporary, MANIFEST), json.dumps(manifest, indent=1, sort_keys=True).encode(), 0o644)
        os.rename(temporary, final)
        sync_directory(os.path.dirname(os.path.abspath(final)))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise LaunchError("STORAGE_FULL" if full else "STORAGE_FAILED", str(error)) from error
